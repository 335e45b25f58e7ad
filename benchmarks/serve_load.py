"""Load on `slotline serve`: clients stream over loopback, beside `LLM.generate` with the same prompts.

    python benchmarks/serve_load.py [--model M] [--concurrency 16] [--rate R] [--requests 64] [--input 64] [--output 32]
        [--rounds 3] [--set a.b=value] [--json FILE]

Prompts are random tokens, outputs have a fixed length. `--concurrency` requests are under way at a time, or with
`--rate` requests come at random, so many a second on average. The time to the first token runs from the request to the
first event, and gaps are those between the events of a stream, each of which has all tokens that came since the last.
On a CPU, rounds of the server and of `LLM.generate` alternate. On a GPU, which holds one of them at a time, all rounds
of `LLM.generate` come first, in a process of their own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from selectors import EVENT_READ, DefaultSelector
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from attrs import define, field, frozen
from command_line import positive
from raw_client import Answer, Connection, post
from result_file import write_result
from server_process import SERVE, server_process

COMMON = ("cache.prefix_caching=false", "observability.progress=false")
"""Settings of both engines: a round computes what the one before did."""
SHORT = "--concurrency 2 --requests 2 --input 8 --output 4 --rounds 1"


@frozen
class Workload:
    """Prompts [requests][input] of tokens, and how they come."""

    prompts: list[list[int]]
    output: int
    concurrency: int
    starts: list[float]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Workload:
        """Return the workload of a command line."""
        rng = Random(0)
        vocabulary = range(3, arguments.vocabulary)
        prompts = [rng.choices(vocabulary, k=arguments.input) for _ in range(arguments.requests)]
        starts, now = [0.0] * arguments.requests, 0.0
        if arguments.rate:
            starts = [now := now + rng.expovariate(arguments.rate) for _ in prompts]
        return cls(prompts, arguments.output, arguments.requests if arguments.rate else arguments.concurrency, starts)

    def bodies(self) -> list[bytes]:
        """Return the requests."""
        fields = {"max_tokens": self.output, "temperature": 0, "ignore_eos": True, "stream": True}
        return [post("/v1/completions", {"prompt": prompt, **fields}) for prompt in self.prompts]


@define(eq=False)
class Figures:
    """Figures of some rounds, times in seconds.

    Attributes:
        rates: output tokens a second of each round.
    """

    rates: list[float] = field(factory=list)
    firsts: list[float] = field(factory=list)
    gaps: list[float] = field(factory=list)

    def add(self, answers: Sequence[Answer], output: int) -> None:
        """Add a round.

        Raises:
            RuntimeError: if a request failed.
        """
        if failed := [one for one in answers if one.status != 200]:
            raise RuntimeError(f"{len(failed)} of {len(answers)} requests failed: {failed[0].body()[:500]!r}")
        seconds = max(one.times[-1] for one in answers) - min(one.started for one in answers)
        self.rates.append(len(answers) * output / seconds)
        for answer in answers:
            events = [when for when, piece in zip(answer.times, answer.pieces, strict=True) if b"data: {" in piece]
            self.firsts.append(events[0] - answer.started)
            self.gaps += np.diff(events).tolist()


def ask(port: int, workload: Workload) -> list[Answer]:
    """Send each request at its time, or as soon as fewer than `concurrency` are under way, and return the answers."""
    answers: list[Answer] = []
    waiting, free = list(zip(workload.starts, workload.bodies(), strict=True))[::-1], list[Connection]()
    with ExitStack() as stack, DefaultSelector() as selector:
        begin, going = perf_counter(), 0
        while waiting or going:
            while waiting and going < workload.concurrency and waiting[-1][0] <= perf_counter() - begin:
                if not free:
                    free.append(Connection(port))
                    selector.register(stack.enter_context(free[-1].socket), EVENT_READ, free[-1])
                free.pop().send(waiting.pop()[1])
                going += 1
            rest = waiting[-1][0] - (perf_counter() - begin) if waiting and going < workload.concurrency else None
            for key, _ in selector.select(None if rest is None else max(0.0, rest)):
                try:
                    answer = key.data.read()
                except ConnectionError:
                    if key.data.answer is not None:
                        raise
                    selector.unregister(key.data.socket)  # the server ends connections that are idle
                    free.remove(key.data)
                    continue
                if answer is not None:
                    answers.append(answer)
                    free.append(key.data)
                    going -= 1
    return answers


def engine(arguments: argparse.Namespace) -> Any:
    """Return the engine in this process."""
    from slotline.core import LLM

    model = {"model": arguments.model} if arguments.model else {}
    return LLM(**model, overrides=[*COMMON, *arguments.set])


def generate(llm: Any, workload: Workload) -> float:
    """Return the tokens a second of `LLM.generate`."""
    from slotline.core import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=workload.output)
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    start = perf_counter()
    llm.generate(prompts, params)
    return len(prompts) * workload.output / (perf_counter() - start)


@contextmanager
def offline_rounds(arguments: argparse.Namespace, workload: Workload) -> Iterator[Iterator[float]]:
    """Tokens a second of rounds of `LLM.generate`, measured as they are asked for, or on a GPU at once."""
    import torch

    if torch.cuda.is_available():
        command = [sys.executable, *sys.argv, "--offline"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        yield iter(json.loads(done.stdout.splitlines()[-1]))
        return
    llm = engine(arguments)
    generate(llm, workload)
    yield iter(lambda: generate(llm, workload), None)


def measure(arguments: argparse.Namespace) -> tuple[list[float], Figures]:
    """Return the rates of `LLM.generate`, and the server's figures."""
    workload, figures = Workload.of(arguments), Figures()
    model = ["--model", arguments.model] if arguments.model else []
    settings = [part for one in (*COMMON, *arguments.set) for part in ("--set", one)]
    with offline_rounds(arguments, workload) as rounds, server_process([*SERVE, *model, *settings]) as server:
        ask(server.port, workload)
        rates = []
        for _ in range(arguments.rounds):
            rates.append(next(rounds))
            figures.add(ask(server.port, workload), arguments.output)
    return rates, figures


def report(arguments: argparse.Namespace, rates: list[float], figures: Figures) -> None:
    """Print the figures, and write them as a result file if asked."""

    def ms(times: list[float]) -> list[str]:
        return [f"{1e3 * float(np.quantile(times, share)):,.1f}" for share in (0.5, 0.99)] if times else ["", ""]

    how = f"{arguments.rate:g} requests/s" if arguments.rate else f"{arguments.concurrency} at a time"
    columns = ["", "output tokens/s", "first token, p50 ms", "p99 ms", "gap, p50 ms", "p99 ms"]
    served = [f"slotline serve, {how}", f"{median(figures.rates):,.0f}", *ms(figures.firsts), *ms(figures.gaps)]
    share = median(own / other for own, other in zip(figures.rates, rates, strict=True))
    rows = [served, ["LLM.generate, all at once", f"{median(rates):,.0f}", "", "", "", ""]]
    rows.append(["share of it", f"{share:.0%}".replace("%", " %"), "", "", "", ""])
    for row in [columns, *rows]:
        print("".join(f"{cell:<36}" if index == 0 else f"{cell:>22}" for index, cell in enumerate(row)))
    if arguments.json:
        note = f"{arguments.requests} prompts of {arguments.input} random tokens, {arguments.output} tokens each."
        write_result(arguments.json, "serve_load", columns, rows, note=note)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name on the Hub (default: the small model that ships)")
    parser.add_argument("--concurrency", type=positive, default=16)
    parser.add_argument("--rate", type=float, default=0.0, metavar="R", help="requests a second, in place of it")
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--input", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=positive, default=32, help="tokens of an output")
    parser.add_argument("--vocabulary", type=positive, default=4000, help="tokens that prompts are drawn from")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", help="a setting of both engines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.offline:
        llm, workload = engine(arguments), Workload.of(arguments)
        print(json.dumps([generate(llm, workload) for _ in range(arguments.rounds + 1)][1:]))
    else:
        report(arguments, *measure(arguments))


if __name__ == "__main__":
    main()
