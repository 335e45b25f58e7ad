"""A soak of the server: clients that stream, leave, read slowly and send nonsense; then everything is counted.

    python benchmarks/serve_soak.py [--minutes 10] [--clients 500] [--json FILE]

The server is `slotline serve` in float32, batch-invariant, with adapters, on a cache too small for its requests, and
with the integrity checker on. Clients send well-formed requests, whole and streamed, to the model and to adapters that
come and go meanwhile, and must get the texts that `LLM.generate` gives. Others leave in the middle of an answer or of a
body, read slowly, or send bodies that are no JSON, wrong, or too large, and must get the status that fits. At the end
no request, row, block, task, socket or file may be left that was not there before, and the process's memory may not
have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from attrs import define, field, frozen
from command_line import positive
from raw_client import Answer, post
from result_file import write_result
from server_process import ServerProcess, server_process

SHORT = "--minutes 0.05 --clients 8 --texts 2"
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "batch_invariant": True,
    "lora.name": "torch",
    "scheduler.max_model_len": 192,
    "scheduler.max_batched_tokens": 256,
    "observability.progress": False,
}
TESTED: dict[str, Any] = {
    "cache.memory": "12MiB",
    "scheduler.max_requests": 48,
    "server.max_body": "64KiB",
    "server.max_unfinished": 400,
    "server.access_log": False,
    "observability.check_integrity": True,
}
ADAPTERS = ("typed", "docstrings")
GROWTH = 96 * 2**20
"""Bytes that the process may grow: by what its allocator keeps."""


def serve(port: int) -> None:
    """Serve until the process is ended. SIGUSR1 writes what the server holds into the file that `HOLDS` names."""
    from slotline.registry.config import load_config
    from slotline.server import run

    build, states = run.build_state, list[Any]()

    def build_and_keep(llm: Any) -> Any:
        states.append(build(llm))
        return states[-1]

    def tell(*_: Any) -> None:
        engine = states[0].llm.engine
        pool, rows = engine.scheduler.cache.pool, engine.rows
        found = {
            "prompts": states[0].llm.num_unfinished,
            "requests": len(engine.requests),
            "rows": rows.max_requests - rows.num_free,
            "blocks": pool.num_blocks - 1 - pool.num_free,
            "tasks": len(asyncio.all_tasks()),
            "adapters": len(states[0].adapters),
        }
        place = Path(os.environ["HOLDS"])
        place.with_suffix(".part").write_text(json.dumps(found))
        place.with_suffix(".part").replace(place)

    run.__dict__["build_state"] = build_and_keep
    signal.signal(signal.SIGUSR1, tell)
    run.serve(load_config(values={**SETTINGS, **TESTED, "server.port": port}), print)


@frozen
class Case:
    """A well-formed request and its text."""

    fields: dict[str, Any]
    adapter: str | None
    text: str


def cases(texts: int, rng: Random) -> tuple[list[Case], Path]:
    """Return requests with their texts, as an engine of this process gives them, and the folder of the adapters."""
    from slotline.core import LLM, LoRARequest, SamplingParams

    llm = LLM(**SETTINGS, memory="256MiB")
    folder = llm.engine.runner.model.facts.path / "adapters"
    loras = {name: LoRARequest(name, number, str(folder / name)) for number, name in enumerate(ADAPTERS, 1)}
    source = Path(__file__).read_text(encoding="utf-8")
    found: list[tuple[dict[str, Any], str | None]] = []
    params, given = [], []
    for index in range(3 * texts):
        start = rng.randrange(len(source) - 200)
        adapter = (None, *ADAPTERS)[index % 3]
        fields: dict[str, Any] = {
            "prompt": source[start : start + rng.randrange(5, 120)],
            "max_tokens": rng.randrange(1, 48),
        }
        found.append((fields, adapter))
        params.append(SamplingParams(temperature=0, ignore_eos=True, max_tokens=fields["max_tokens"]))
        given.append(loras.get(adapter or ""))
    outputs = llm.generate([fields["prompt"] for fields, _ in found], params, lora_request=given)
    more = {"temperature": 0, "ignore_eos": True}
    texts_of = [output.outputs[0].text for output in outputs]
    return [Case({**f, **more}, adapter, text) for (f, adapter), text in zip(found, texts_of, strict=True)], folder


@define(eq=False)
class Soak:
    """The clients of a server.

    Attributes:
        counts: answers by what was sent and how it was answered.
        faults: what was answered wrongly.
        models: names under which each adapter is loaded.
    """

    port: int
    key: str
    cases: list[Case]
    folder: Path
    rng: Random
    counts: Counter[tuple[str, str]] = field(factory=Counter)
    faults: list[str] = field(factory=list)
    models: dict[str, list[str]] = field(factory=lambda: {name: [] for name in ADAPTERS})
    _numbers: count[int] = field(factory=count)

    async def run(self, clients: int, seconds: float) -> None:
        """Let so many clients act for so long, while four others load and unload adapters."""
        end = time.monotonic() + seconds
        acts: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.whole, 4),
            (self.streamed, 6),
            (self.slow, 2),
            (self.leave, 3),
            (self.leave_in_body, 1),
            (self.malformed, 3),
            (self.oversized, 1),
            (self.look, 1),
        ]
        weights = [weight for _, weight in acts]

        async def client() -> None:
            await asyncio.sleep(self.rng.random())
            while time.monotonic() < end:
                (act, _) = self.rng.choices(acts, weights)[0]
                await self.guarded(act)
                await asyncio.sleep(self.rng.random())

        async def manager(adapter: str) -> None:
            while time.monotonic() < end:
                await self.guarded(lambda: self.adapter(adapter))

        managers = [manager(ADAPTERS[index % 2]) for index in range(4)]
        await asyncio.gather(*managers, *(client() for _ in range(clients)))

    async def guarded(self, act: Callable[[], Awaitable[None]]) -> None:
        """Act. What a client does not expect is a fault."""
        try:
            await asyncio.wait_for(act(), 300)
        except Exception as error:
            self.faults.append(f"{getattr(act, '__name__', 'adapter')}: {error!r}")

    async def send(self, data: bytes, *, leave: float | None = None, slow: bool = False) -> Answer:
        """Send a request on a connection of its own, and return what came until its end, or until the client left."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=512 if slow else 2**16)
        answer = Answer(time.perf_counter())
        try:
            writer.write(data)
            if leave is not None:
                await asyncio.sleep(leave)
                if self.rng.random() < 0.5:
                    writer.transport.abort()
                return answer
            while data := await reader.read(64 if slow else 2**16):
                answer.pieces.append(data)
                if slow:
                    await asyncio.sleep(0.01)
            return answer
        except ConnectionError:
            return answer
        finally:
            writer.close()

    def request(self, case: Case, **more: Any) -> tuple[str, bytes] | None:
        """Return the model and the request of a case, None if its adapter is not loaded."""
        names = [""] if case.adapter is None else self.models[case.adapter]
        if not names:
            return None
        model = self.rng.choice(names)
        return model, post("/v1/completions", {"model": model, **case.fields, **more}, {"connection": "close"})

    async def ask(self, kind: str, *, stream: bool, slow: bool = False) -> None:
        """Ask for a text, and compare it."""
        case = self.rng.choice(self.cases)
        if (sent := self.request(case, stream=stream)) is None:
            return
        answer = await self.send(sent[1], slow=slow)
        said = self.judge(case, sent[0], answer, stream=stream)
        self.counts[kind, said] += 1

    def judge(self, case: Case, model: str, answer: Answer, *, stream: bool) -> str:
        """Return how a well-formed request was answered, and note a fault."""
        body = answer.body() if answer.pieces else b""
        if answer.status == 429:
            return "429, too many requests"
        if case.adapter is not None and answer.status in (400, 404) and model not in self.models[case.adapter]:
            return "its adapter was unloaded"
        if answer.status != 200:
            self.faults.append(f"{case.fields}: status {answer.status}, {body[:300]!r}")
            return f"status {answer.status}"
        if stream:
            chunks = [json.loads(one[len("data: ") :]) for one in answer.events() if b"[DONE]" not in one]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            ended = body.endswith(b"data: [DONE]\n\n")
        else:
            text, ended = json.loads(body)["choices"][0]["text"], True
        if text != case.text or not ended:
            self.faults.append(f"{case.fields} with adapter {case.adapter}: {text!r} is not {case.text!r}")
            return "another text"
        return "the right text"

    async def whole(self) -> None:
        """Ask for a text in one piece."""
        await self.ask("whole answer", stream=False)

    async def streamed(self) -> None:
        """Ask for a stream."""
        await self.ask("stream", stream=True)

    async def slow(self) -> None:
        """Ask for a stream, and read it slowly."""
        await self.ask("stream, read slowly", stream=True, slow=True)

    async def leave(self) -> None:
        """Leave in the middle of an answer."""
        if (sent := self.request(self.rng.choice(self.cases), stream=self.rng.random() < 0.7)) is not None:
            await self.send(sent[1], leave=self.rng.choice([0.0, 0.01, 0.3, 1.0]))
            self.counts["client that leaves", "left"] += 1

    async def leave_in_body(self) -> None:
        """Leave in the middle of the body."""
        await self.send(post("/v1/completions", {"prompt": "x" * 5000})[:-100], leave=0.1)
        self.counts["client that leaves in its body", "left"] += 1

    async def malformed(self) -> None:
        """Send what is wrong, and expect the status that says so."""
        body, wanted = self.rng.choice(
            [
                (b"{", 400),
                (b"", 400),
                (b"\xff\xfe", 400),
                ({"prompt": 5}, 400),
                ({"prompt": "x", "no_such_field": 1}, 400),
                ({"prompt": "x", "temperature": -1}, 400),
                ({"prompt": "x", "model": "nobody"}, 404),
                ({"prompt": [10**9]}, 400),
                ({"prompt": "x " * 3000}, 400),
                ({"prompt": "x", "structured_outputs": {"regex": "("}}, 400),
            ]
        )
        answer = await self.send(post("/v1/completions", body, {"connection": "close"}))
        self.expect("malformed body", answer, wanted, body)

    async def oversized(self) -> None:
        """Send a body that is too large, whose length the head tells or not."""
        data = post("/v1/completions", {"prompt": "x" * 100_000}, {"connection": "close"})
        if self.rng.random() < 0.5:
            head, _, body = data.partition(b"\r\n\r\n")
            lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
            chunk = hex(len(body))[2:].encode() + b"\r\n" + body + b"\r\n0\r\n\r\n"
            data = b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", chunk])
        answer = await self.send(data)
        if answer.pieces:  # else the server closed the connection while the body was sent
            self.expect("body that is too large", answer, 413, "100,000 bytes")

    async def look(self) -> None:
        """Read a page of the server's state."""
        path = self.rng.choice(["/health", "/metrics", "/v1/models", "/v1/plan", "/nothing"])
        answer = await self.send(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        self.expect("look at the server", answer, 404 if path == "/nothing" else 200, path)

    def expect(self, kind: str, answer: Answer, wanted: int, sent: Any) -> None:
        """Note an answer of a known status."""
        if answer.status in (wanted, 429):
            self.counts[kind, f"status {answer.status}"] += 1
            return
        self.faults.append(f"{sent!r}: status {answer.status} and not {wanted}: {b''.join(answer.pieces)[-300:]!r}")

    async def adapter(self, adapter: str) -> None:
        """Load an adapter under a new name, let others use it, and unload it."""
        name = f"{adapter}-{next(self._numbers)}"
        headers = {"connection": "close", "authorization": f"Bearer {self.key}"}
        body = {"lora_name": name, "lora_path": str(self.folder / adapter)}
        self.expect("load of an adapter", await self.send(post("/v1/load_lora_adapter", body, headers)), 200, body)
        self.models[adapter].append(name)
        await asyncio.sleep(2 + 2 * self.rng.random())
        self.models[adapter].remove(name)
        for _ in range(300):
            answer = await self.send(post("/v1/unload_lora_adapter", {"lora_name": name}, headers))
            if answer.status == 200:
                break
            await asyncio.sleep(0.1)  # a request uses it
        self.expect("unload of an adapter", answer, 200, name)


def held(server: ServerProcess, place: Path) -> dict[str, int]:
    """Return what a server that has nothing to do holds, at the latest after a minute."""
    for _ in range(120):
        place.unlink(missing_ok=True)
        os.kill(server.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        if not place.exists():
            continue
        found: dict[str, int] = json.loads(place.read_text())
        found["files and sockets"] = server.process.num_fds()
        if (
            not found["prompts"]
            and not found["rows"]
            and found["tasks"] <= 2
            and not server.process.net_connections()[1:]
        ):
            break
    found["bytes"] = server.process.memory_info().rss
    return found


def compared(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return what is left after a soak that was not there before."""
    return [
        f"{after[name]} {name} after, {amount} before"
        for name, amount in before.items()
        if after[name] > amount + (GROWTH if name == "bytes" else 0)
    ]


def main() -> int:
    """Soak, count and compare. The exit code is 1 if anything was wrong or is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=positive, default=500)
    parser.add_argument("--texts", type=positive, default=24, help="for the model and for each adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts as a result file")
    parser.add_argument("--role", choices=("server",), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        serve(arguments.port)
        return 0
    rng, key = Random(arguments.seed), secrets.token_hex()
    wanted, folder = cases(arguments.texts, rng)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "held.json"
        variables = {"HOLDS": str(place), "SLOTLINE_ADMIN_KEY": key, "OMP_NUM_THREADS": "1"}
        with server_process([sys.executable, __file__, "--role", "server"], None, **variables) as server:
            seconds = 60 * arguments.minutes
            warm = Soak(server.port, key, wanted, folder, rng)
            asyncio.run(warm.run(arguments.clients, min(30.0, seconds / 3)))  # what is compiled and cached once
            before = held(server, place)
            soak = Soak(server.port, key, wanted, folder, rng)
            asyncio.run(soak.run(arguments.clients, seconds))
            after = held(server, place)
    faults = [*warm.faults, *soak.faults, *compared(before, after)]
    rows = [[kind, said, f"{number:,}"] for (kind, said), number in sorted(soak.counts.items())]
    rows += [["held by the server", name, f"{before[name]:,} before, {after[name]:,} after"] for name in before]
    for row in rows:
        print(f"{row[0]:<32}{row[1]:<28}{row[2]}")
    print(f"{len(faults)} faults" if faults else "no leak, and every answer is right")
    print("\n".join(faults[:20]))
    if arguments.json:
        write_result(
            arguments.json,
            "serve_soak",
            ["what was sent", "answer", "number"],
            rows,
            note=f"{len(faults)} faults. The model that ships in float32, the integrity checker on.",
        )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
