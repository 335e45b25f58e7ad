"""What long prompts do to requests that decode: in one engine, and with prefill apart from decode, on two cards.

    python benchmarks/prefill_decode_gpu.py benchmarks/models/llama-3.1-8b [--length 8192] [--prompts 16]
        [--every 0.6] [--running 16] [--set KEY=VALUE] [--json FILE]
    python benchmarks/prefill_decode_gpu.py benchmarks/models/llama-tiny --device cpu --length 64 --context 16

Weights are random. `--running` requests decode, and a new prompt of `--length` tokens comes every so many seconds. It
gives `--tokens` tokens beside the others. First one engine on one card does all of it. Then a second process on the
other card computes the prompts, and the connector `handoff` brings their blocks to the engine that decodes. Printed are
the times between the tokens of the requests that were running before: their median, 99th percentile and longest, and
the median time to the first token of the prompts. Prompts are new each time. Both kinds get the same ones at the same
times.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from command_line import positive, require_gpus
from result_file import print_rows, write_result

SHORT = (
    "benchmarks/models/llama-tiny --device cpu --length 48 --context 16 --prompts 2 --running 2 --every 0.1 "
    "--kinds apart --steps 900 --memory 64MiB --cache 4MiB"
)
COLUMNS = (
    "kind", "token to token ms: median", "99th percentile", "longest", "of the first 99th",
    "first token of a prompt ms", "tokens loaded", "intervals",
)  # fmt: skip
WARM = 2
"""Prompts before those that count."""
PATIENCE = 300.0
"""Seconds in which a prompt must be computed."""


def build(arguments: argparse.Namespace, settings: list[str]) -> Any:
    """An engine with random weights of the folder's shape."""
    from slotline.core import LLM  # here: the process must see its own card only, before torch is imported

    return LLM(
        model=arguments.folder,
        device=arguments.device,
        dtype="bfloat16",
        max_model_len=max(arguments.length + arguments.tokens, arguments.context + arguments.steps) + 32,
        max_num_seqs=arguments.running + 8,
        overrides=[
            f"graphs.sizes=[{arguments.running}]", "load.format=dummy", "observability.progress=false",
            *settings, *arguments.settings,
        ],
    )  # fmt: skip


def params_of(tokens: int) -> Any:
    """Parameters of a request that gives so many tokens."""
    from slotline.core import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """The long prompts."""
    rng = np.random.default_rng(3)
    return rng.integers(5, 200, (arguments.prompts + WARM, arguments.length)).tolist()  # type: ignore[no-any-return]


def prefill(arguments: argparse.Namespace, address: str, card: str, pipe: Any) -> None:
    """Compute the prompts that come through a pipe, in a process of its own, until None comes."""
    see(card)
    settings = ["kv_connector.name=handoff", "kv_connector.handoff.role=prefill"]
    settings += [f"kv_connector.handoff.address={address}", f"kv_connector.handoff.memory={arguments.memory}"]
    llm = build(arguments, settings)
    engine, asked = llm.engine, {"do_remote_decode": True, "do_remote_prefill": False}
    pipe.send(llm.plan.summary())
    number = 0
    while (prompt := pipe.recv()) is not None:
        engine.add(f"prefill {number}", prompt, params_of(1), kv_transfer_params=asked)
        number += 1
        while engine.has_work:
            engine.step()
        pipe.send(dict(engine.extension("kv_transfer").answer(asked)))


def see(card: str) -> None:
    """Have this process see one card only."""
    if card:
        os.environ["CUDA_VISIBLE_DEVICES"] = card


def decode(arguments: argparse.Namespace, peer: str, card: str, pipe: Any, prefills: Any) -> None:
    """Time requests that decode while prompts come, in a process of its own.

    Args:
        peer: address of the engine that computes prompts, empty for none.
        pipe: takes the times.
        prefills: pipe to the process of that engine, None for none.
    """
    see(card)
    settings = [f"cache.memory={arguments.cache}"] if arguments.cache else []
    if peer:
        settings += ["kv_connector.name=handoff", "kv_connector.handoff.role=decode"]
        settings += [f"kv_connector.handoff.peers={json.dumps([peer])}"]
    llm = build(arguments, settings)
    pipe.send(llm.plan.summary())
    pipe.recv()  # the other one is ready
    Run(arguments, llm.engine, prefills).all(pipe.send)


class Run:
    """Requests that decode, and prompts that come.

    Attributes:
        gaps: seconds between two tokens of requests that decode.
        firsts: seconds from a prompt's time to its first token.
        loaded: tokens of prompts that came from the other engine.
    """

    def __init__(self, arguments: argparse.Namespace, engine: Any, prefills: Any) -> None:
        self.arguments, self.engine, self.prefills = arguments, engine, prefills
        self.gaps, self.firsts, self.loaded = list[float](), list[float](), 0
        self.own: list[tuple[Any, int, float]] = []  # requests with known tokens and the time of the last one
        self.sent: list[tuple[int, float]] = []  # prompts at the other engine, with their times
        self.begun: list[tuple[Any, float]] = []  # prompts in this engine, and how late they came to it
        self.counts = False

    def all(self, say: Callable[[Any], None]) -> None:
        """Serve everything, and say the times."""
        rng, now = np.random.default_rng(7), perf_counter()
        for number in range(self.arguments.running):
            prompt = rng.integers(5, 200, self.arguments.context).tolist()
            request = self.engine.add(f"runs {number}", prompt, params_of(self.arguments.steps))
            self.own.append((request, 0, now))
        prompts = prompts_of(self.arguments)
        for number in range(WARM):
            self.come(number, prompts[number], perf_counter())
            while self.sent or self.begun:
                self.step()
        self.firsts.clear()
        self.loaded, self.counts = 0, True
        start, left = perf_counter(), list(range(WARM, len(prompts)))
        while left or self.sent or self.begun:
            due = start + (left[0] - WARM) * self.arguments.every if left else float("inf")
            if perf_counter() >= due:
                number = left.pop(0)
                self.come(number, prompts[number], due)
            self.step()
            if any(request.finished for request, _, _ in self.own):
                raise SystemExit("error: requests ended too early: give more --steps")
        say((self.gaps, self.firsts, self.loaded))

    def come(self, number: int, prompt: list[int], due: float) -> None:
        """Take a prompt, whose time is `due`."""
        if self.prefills is None:
            self.begin(number, prompt, due)
        else:
            self.prefills.send(prompt)
            self.sent.append((number, due))

    def begin(self, number: int, prompt: list[int], due: float, **more: Any) -> None:
        """Add a prompt to this engine."""
        late = perf_counter() - due
        self.begun.append((self.engine.add(f"prompt {number}", prompt, params_of(self.arguments.tokens), **more), late))

    def step(self) -> None:
        """Run a step, and note the tokens that it gave."""
        if self.prefills is not None and self.sent and self.prefills.poll():
            answer = self.prefills.recv()
            number, due = self.sent.pop(0)
            self.begin(number, prompts_of(self.arguments)[number], due, kv_transfer_params=answer)
        self.engine.step()
        now, rows = perf_counter(), self.engine.rows
        for index, (request, tokens, last) in enumerate(self.own):
            new = 0 if request.row < 0 else int(rows.num_tokens[request.row] - rows.num_pending[request.row])
            if new > tokens:
                if self.counts and tokens:
                    self.gaps += [(now - last) / (new - tokens)] * (new - tokens)
                self.own[index] = (request, new, now)
        for request, late in list(self.begun):
            if request.finished:
                self.begun.remove((request, late))
                self.loaded += request.metrics.num_loaded_tokens
                self.firsts.append(late + request.metrics.time_to_first_token)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ready(pipe: Any, process: Any) -> Any:
    """What a process says next.

    Raises:
        SystemExit: if it ends without a word.
    """
    while not pipe.poll(0.2):
        if not process.is_alive() and not pipe.poll():
            raise SystemExit(f"error: {process.name} has ended with exit code {process.exitcode}")
    return pipe.recv()


def measure(arguments: argparse.Namespace, *, apart: bool) -> tuple[list[float], list[float], int]:
    """Gaps, first tokens and loaded tokens of one kind."""
    context, cuda = get_context("spawn"), arguments.device != "cpu"
    here, there = context.Pipe()
    prefills, at_prefill = context.Pipe() if apart else (None, None)
    address = f"127.0.0.1:{free_port()}" if apart else ""
    cards = ("0", "1") if cuda else ("", "")
    processes = [
        context.Process(target=decode, args=(arguments, address, cards[0], there, prefills), name="decode", daemon=True)
    ]
    if apart:
        other = (arguments, address, cards[1], at_prefill)
        processes.append(context.Process(target=prefill, args=other, name="prefill", daemon=True))
    for process in processes:
        process.start()
    try:
        if prefills is not None:
            print(f"  prefill: {ready(prefills, processes[1])}")
        print(f"  decode: {ready(here, processes[0])}")
        here.send(None)
        found: tuple[list[float], list[float], int] = ready(here, processes[0])
        if prefills is not None:
            prefills.send(None)
        return found
    finally:
        for process in processes:
            process.join(0 if process.exitcode is None else 10)
            process.terminate()
            process.join(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=positive, default=8192, help="tokens of a prompt that comes")
    parser.add_argument("--prompts", type=positive, default=16, help="prompts that come")
    parser.add_argument("--every", type=float, default=0.6, help="seconds from one to the next")
    parser.add_argument("--tokens", type=positive, default=16, help="tokens that each of them gives")
    parser.add_argument("--running", type=positive, default=16, help="requests that decode")
    parser.add_argument("--context", type=positive, default=512, help="tokens of their prompts")
    parser.add_argument("--steps", type=positive, default=6000, help="tokens that they may give")
    parser.add_argument("--memory", default="8GiB", help="kv_connector.handoff.memory of the engine that prefills")
    parser.add_argument("--cache", default="", help="cache.memory of the engines that decode, empty for their choice")
    parser.add_argument("--kinds", nargs="+", choices=("mixed", "apart"), default=["mixed", "apart"])
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write a result file")
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        require_gpus(2 if "apart" in arguments.kinds else 1)
    rows, tails = list[list[str]](), list[float]()
    for kind in arguments.kinds:
        print(f"{kind}:", flush=True)
        start = time.perf_counter()
        gaps, firsts, loaded = measure(arguments, apart=kind == "apart")
        middle, tail = np.percentile(gaps, (50, 99))
        tails.append(float(tail))
        print(f"  {len(gaps)} intervals, {time.perf_counter() - start:.0f} s with the start", flush=True)
        rows.append([
            kind, f"{1e3 * middle:.2f}", f"{1e3 * tail:.2f}", f"{1e3 * max(gaps):.2f}", f"{tail / tails[0]:.2f}",
            f"{1e3 * float(np.median(firsts)):.0f}", str(loaded), str(len(gaps)),
        ])  # fmt: skip
    print_rows(COLUMNS, rows)
    if arguments.json is not None:
        note = f"{arguments.running} requests decode; a prompt of {arguments.length} tokens every {arguments.every:g} s"
        write_result(arguments.json, "prefill_decode_gpu", COLUMNS, rows, note=note)


if __name__ == "__main__":
    main()
