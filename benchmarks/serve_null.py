"""The server's own cost: streamed completions of a model that costs almost nothing, beside a bare application.

    python benchmarks/serve_null.py [--clients 64] [--tokens 32] [--seconds 4] [--rounds 5] [--json FILE]

It is `slotline serve` with all its parts but the model's forward pass, which is a look-up: each token has one that
follows it. The bare application is Starlette under uvicorn with its defaults: it reads the body and streams events that
the server sent before. In `same events` they are those of a response, in which tokens that came together share an
event. In `an event a token` the same text has an event for each token. Both log each request. What is measured has one
core, the client the other, and rounds alternate. CPU time is that of the serving process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import define, field
from command_line import positive
from raw_client import Answer, ask_for, post
from result_file import write_result
from server_process import ServerProcess, own_cores, server_process

if TYPE_CHECKING:
    import torch

Int = npt.NDArray[np.int64]
SHORT = "--clients 2 --tokens 4 --seconds 0.2 --rounds 1"
TEXT = "def main(argument, other):\n    return [one for one in argument if one not in other]\n"


class NullModel:
    """The forward pass of a model whose every token has one that follows it.

    Args:
        model: gives all but the forward pass.
        following: [vocab_size] int64, by token.
        most: rows of a step.
    """

    def __init__(self, model: Any, following: Int, most: int) -> None:
        import torch

        self._model = model
        self._following = following
        self._logits = np.zeros((most, len(following)), np.float32)
        self._chosen = np.zeros(most, np.int64)
        self._places = np.arange(most)
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Any, wanted: Any) -> torch.Tensor:
        """Return the tokens that follow, in place of hidden states [num_tokens, hidden_size]."""
        tokens = input_ids.numpy()
        return self._torch.from_numpy(self._following[tokens if wanted is None else tokens[wanted.numpy()]])

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [num_tokens, vocab_size] whose largest is that of the token that follows."""
        count = len(hidden_states)
        self._logits[self._places, self._chosen] = 0
        self._chosen[:count] = hidden_states.numpy()
        self._logits[self._places, self._chosen] = 1
        return self._torch.from_numpy(self._logits[:count])


def serve_null(port: int) -> None:
    """Run `slotline serve` with the null model until the process is ended."""
    from slotline.core import AsyncLLM
    from slotline.registry.config import load_config
    from slotline.server import run

    class NullLLM(AsyncLLM):
        """An engine of the model that ships whose forward pass is the null model's."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            runner: Any = self.engine.runner
            size = self.engine.limits.vocab_size
            tokens = np.array([token for token in self.tokenizer.encode(TEXT) if token > 2])
            following = tokens[np.arange(size) % len(tokens)]
            following[tokens] = np.roll(tokens, -1)
            most = self.engine.rows.max_requests
            runner.model = runner.head.model = NullModel(runner.model, following, most)

    run.__dict__["AsyncLLM"] = NullLLM
    values = {"cache.memory": "64MiB", "scheduler.max_model_len": 512, "observability.progress": False}
    run.serve(load_config(values={"server.port": port, **values}), print)


def serve_bare(port: int, events: Path) -> None:
    """Stream recorded events until the process is ended."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    recorded = cycle([[one.encode() for one in body] for body in json.loads(events.read_text())])

    async def answer(request: Request) -> StreamingResponse:
        await request.body()
        body = next(recorded)

        async def events() -> AsyncIterator[bytes]:
            for one in body:
                yield one

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    uvicorn.run(app, port=port, lifespan="off", ws="none")


@define(eq=False)
class Served:
    """A serving process, and what was measured of it.

    Attributes:
        rates: requests a second of each round.
        costs: seconds of CPU time for each request of a round.
        events: the events of each response.
    """

    server: ServerProcess
    rates: list[float] = field(factory=list)
    costs: list[float] = field(factory=list)
    events: list[int] = field(factory=list)

    def measure(self, seconds: float, clients: int, requests: Iterator[bytes]) -> None:
        """Measure a round.

        Raises:
            RuntimeError: if a request failed.
        """
        before = self.server.cpu_time()
        answers = ask_for(seconds, self.server.port, clients, requests)
        if failed := [one for one in answers if one.status != 200]:
            raise RuntimeError(f"{len(failed)} of {len(answers)} requests failed: {failed[0].body()!r}")
        self.rates.append(len(answers) / (max(one.times[-1] for one in answers) - min(one.started for one in answers)))
        self.costs.append((self.server.cpu_time() - before) / (len(answers) + clients))  # late ones cost as well
        self.events += [len(one.events()) for one in answers[:200]]


def recorded(answers: list[Answer], tokens: int, *, merged: bool) -> list[list[str]]:
    """Return the events of responses. If not `merged`, as if each token had come with an event of its own."""
    found = [[event.decode() for event in answer.events()] for answer in answers[:256]]
    return found if merged else [_an_event_each(events, tokens) for events in found[:16]]


def _an_event_each(events: list[str], tokens: int) -> list[str]:
    """Return the events of a response with its text cut into so many pieces."""
    chunks = [json.loads(event[len("data: ") :]) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    cuts = [len(text) * index // tokens for index in range(tokens + 1)]
    pieces = []
    for index in range(tokens):
        chunk = chunks[-1] if index == tokens - 1 else {**chunks[0]}
        choice = {**chunk["choices"][0], "text": text[cuts[index] : cuts[index + 1]]}
        pieces.append("data: " + json.dumps({**chunk, "choices": [choice]}, separators=(",", ":")) + "\n\n")
    return [*pieces, events[-1]]


def compare(arguments: argparse.Namespace) -> dict[str, Served]:
    """Measure the server and the bare applications in turn, each alone."""
    fields = {"max_tokens": arguments.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    requests = cycle([post("/v1/completions", {"prompt": TEXT[: 20 + i % 50], **fields}) for i in range(64)])
    seconds, clients = arguments.seconds, arguments.clients
    with ExitStack() as stack:
        core, folder = stack.enter_context(own_cores()), Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def served(role: str, *more: str) -> Served:
            command = [sys.executable, __file__, "--role", role, *more]
            return Served(stack.enter_context(server_process(command, core, OMP_NUM_THREADS="1")))

        found = {"slotline": served("slotline")}
        first = ask_for(min(2.0, seconds), found["slotline"].server.port, clients, requests)
        for name in ("same events", "an event a token"):
            events = folder / f"{name}.json"
            events.write_text(json.dumps(recorded(first, arguments.tokens, merged=name == "same events")))
            found[name] = served("bare", "--events", str(events))
        for _ in range(arguments.rounds):
            for one in found.values():
                one.measure(seconds, clients, requests)
        return found


def main() -> None:
    """Serve in one role, or measure all and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=positive, default=64)
    parser.add_argument("--tokens", type=positive, default=32)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a round")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    parser.add_argument("--role", choices=("slotline", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--events", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "slotline":
        serve_null(arguments.port)
    elif arguments.role == "bare":
        serve_bare(arguments.port, arguments.events)
    else:
        report(compare(arguments), arguments)


def report(found: dict[str, Served], arguments: argparse.Namespace) -> None:
    """Print the figures, and write them as a result file if asked."""
    columns = ["streamed completions", "requests/s", "share of it", "CPU ms a request", "events a response"]
    rates, rows = {name: median(served.rates) for name, served in found.items()}, []
    for name, served in found.items():
        ratio = median(own / other for own, other in zip(found["slotline"].rates, served.rates, strict=True))
        rows.append(
            [
                "slotline with the null model" if name == "slotline" else f"bare Starlette, {name}",
                f"{rates[name]:,.0f}",
                "" if name == "slotline" else f"{ratio:.2f}",
                f"{1e3 * median(served.costs):.2f}",
                f"{sum(served.events) / len(served.events):.1f}",
            ]
        )
    for row in [columns, *rows]:
        print("".join(f"{cell:<36}" if index == 0 else f"{cell:>20}" for index, cell in enumerate(row)))
    if arguments.json:
        note = (
            f"{arguments.clients} clients, {arguments.tokens} tokens each. Share of it: the server's requests a second "
            "divided by the application's, median of the rounds."
        )
        write_result(arguments.json, "serve_null", columns, rows, note=note)


if __name__ == "__main__":
    main()
