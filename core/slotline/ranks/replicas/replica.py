"""Program of a replica: build an engine, and run it on what the front asks for."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field

from slotline.core.batch.request import Request
from slotline.core.engine.engine import Engine
from slotline.core.engine.output_processor import StepResult
from slotline.planner.experts import replicas_share_experts
from slotline.planner.ranks import layout_of
from slotline.ranks.child import be_child_of
from slotline.ranks.logs import log_as
from slotline.ranks.replicas.held_prefixes import PrefixTeller
from slotline.ranks.replicas.regroup import start_alone
from slotline.ranks.replicas.reports import (
    ADDRESS,
    NUMBER,
    Abort,
    Add,
    Answer,
    Batch,
    Call,
    End,
    Failed,
    News,
    Ready,
    Report,
    load_of,
    sendable,
)
from slotline.ranks.replicas.sharing import MeetingAddress, start_sharing
from slotline.ranks.replicas.sharing_engine import SharingEngine
from slotline.ranks.replicas.sharing_ranks import SharedRanks
from slotline.ranks.start import start_engine
from slotline.registry.config import LoadedConfig

QUIET = 0.25
"""Seconds after which a step is reported that gave nothing to readers."""
_CALLED = "called"
"""In the inbox: another replica waits for this one."""
_LEAVE = 5.0  # seconds that a step may take after the front has gone
_NO_KEYS, _NO_TOKENS = np.zeros(0, np.int64), np.zeros(0, np.int32)


@define(eq=False)
class Sent:
    """What the front knows of a request.

    Attributes:
        read: whether its tokens are sent while it runs.
        detailed: whether there is more to send of it than tokens.
        scored: log-probabilities that were sent.
        text: settled text that was sent.
        prompt: whether the prompt's log-probabilities were sent.
    """

    key: int
    request: Request
    read: bool
    detailed: bool
    scored: int = 0
    text: str = ""
    prompt: bool = False


@define(eq=False)
class Replica:
    """An engine that does what a front asks for.

    Two threads share it: one receives, and the main thread steps. Steps go on while requests are unfinished.
    """

    connection: Connection
    engine: Engine
    _inbox: SimpleQueue[Batch | str | None] = field(factory=SimpleQueue, init=False)
    _left: threading.Event = field(factory=threading.Event, init=False)
    _sending: threading.Lock = field(factory=threading.Lock, init=False)
    _sent: dict[Request, Sent] = field(factory=dict, init=False)
    _by_key: dict[int, Sent] = field(factory=dict, init=False)
    _detailed: dict[int, Sent] = field(factory=dict, init=False)
    _handled: int = field(default=0, init=False)
    _reported: float = field(default=0.0, init=False)
    _refused: list[tuple[int, BaseException]] = field(factory=list, init=False)
    _ended: list[End] = field(factory=list, init=False)
    _others: int = field(default=0, init=False)
    _sharing: SharingEngine | None = field(init=False)
    _teller: PrefixTeller | None = field(init=False)
    _keys: npt.NDArray[np.int64] = field(init=False)
    _seen: npt.NDArray[np.int64] = field(init=False)

    def __attrs_post_init__(self) -> None:
        size = self.engine.rows.max_requests
        self._keys, self._seen = np.zeros(size, np.int64), np.full(size, -1)
        self._teller = PrefixTeller.of(self.engine)
        self._sharing = self.engine if isinstance(self.engine, SharingEngine) else None
        if self._sharing is not None:
            self._sharing.called = lambda: self._inbox.put(_CALLED)

    def run(self) -> None:
        """Serve until the front closes the connection."""
        threading.Thread(target=self._receive, name="slotline-replica", daemon=True).start()
        paused = False
        while True:
            block = paused or not self.engine.requests
            if block and self._sharing is not None and self._sharing.is_awaited:
                self._sharing.run_experts()
            while block or not self._inbox.empty():
                message = self._inbox.get()
                if message is None:
                    self._left.set()
                    return
                if isinstance(message, Batch):
                    self._do(message)
                    block = paused = False
                elif block:
                    break  # another replica has called this one
            if paused or not self.engine.requests:
                continue
            try:
                result = self.engine.step()
            except Exception as error:
                if self._sharing is not None and self._sharing.is_within:
                    raise  # the other replicas wait for the rest of the step
                paused = True
                self._report(raised=error)
                continue
            self._told(result)

    def _receive(self) -> None:
        while True:
            try:
                batch: Batch = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                break
            except Exception as error:  # modules that this process does not find
                self._send(Failed(sendable(error)))
                break
            for one in batch.asked:
                if isinstance(one, Call) and one.reads:
                    self._call(one)
            self._inbox.put(batch)
        self._inbox.put(None)
        if not self._left.wait(_LEAVE):
            os._exit(1)  # the main thread hangs

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending, suppress(OSError):
            self.connection.send_bytes(data)

    def _do(self, batch: Batch) -> None:
        for one in batch.asked:
            if isinstance(one, Add):
                self._add(one)
            elif isinstance(one, Abort):
                self._abort(one.key)
            elif not one.reads:
                self._call(one)
        self._handled = batch.number
        if self._refused or self._ended or any(isinstance(one, Add) for one in batch.asked):
            self._report()

    def _add(self, asked: Add) -> None:
        options = asked.options
        try:
            request = self.engine.add(asked.request_id, asked.prompt_token_ids, asked.params, **options)  # type: ignore[arg-type]
        except Exception as error:
            self._refused.append((asked.key, sendable(error)))
            return
        params, read = request.params, bool(options.get("stream"))
        detailed = request.detokenizer is not None or params.logprobs is not None or params.prompt_logprobs is not None
        sent = Sent(asked.key, request, read, read and detailed)
        self._sent[request] = self._by_key[asked.key] = sent
        if sent.detailed:
            self._detailed[asked.key] = sent

    def _abort(self, key: int) -> None:
        sent = self._by_key.get(key)
        if sent is None:
            return
        self.engine.abort(sent.request.request_id)
        if sent.request.finished:
            self._end(sent.request)

    def _call(self, asked: Call) -> None:
        try:
            value, error = asked.function(self.engine, *asked.given), None
            pickle.dumps(value)
        except Exception as caught:
            value, error = None, sendable(caught)
        self._send(Answer(asked.number, value, error))

    def _told(self, result: StepResult) -> None:
        """Tell what a step gave."""
        keys, tokens = self._read(result)
        news = [one for sent in self._detailed.values() if (one := self._news(sent)) is not None]
        for request in result.finished:
            self._end(request)
        if len(keys) or news or self._ended or self._refused or time.monotonic() - self._reported > QUIET:
            self._report(keys, tokens, news)

    def _read(self, result: StepResult) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return the keys [n] and tokens [n] of a step for requests that are read while they run. Count the others."""
        rows = result.rows
        generations = self.engine.rows.generation[rows]
        for row in set(rows[generations != self._seen[rows]].tolist()):
            request = self.engine.rows.requests[row]
            sent = None if request is None else self._sent.get(request)
            self._keys[row] = sent.key if sent is not None and sent.read else 0
            if request is not None:  # the tokens of one that has ended come with its end
                self._seen[row] = self.engine.rows.generation[row]
        keys = self._keys[rows]
        read = keys > 0
        self._others += len(rows) - int(np.count_nonzero(read))
        return keys[read], result.token_ids[read]

    def _news(self, sent: Sent) -> News | None:
        """Return what is new of a request besides its tokens."""
        request, text, logprobs, prompt = sent.request, None, None, None
        if request.finished:
            return None
        if request.detokenizer is not None and len(settled := request.detokenizer.settled) > len(sent.text):
            text = sent.text = settled
        if request.logprobs is not None and len(request.logprobs) > sent.scored:
            logprobs = request.logprobs[sent.scored :]
            sent.scored += len(logprobs)
        whole = request.metrics.time_to_first_token is not None
        if request.prompt_logprobs is not None and not sent.prompt and whole:
            prompt, sent.prompt = request.prompt_logprobs, True
        if text is None and logprobs is None and prompt is None:
            return None
        return News(sent.key, text, logprobs, prompt)

    def _end(self, request: Request) -> None:
        """Note the end of a request."""
        sent = self._sent.pop(request, None)
        if sent is None:
            return
        del self._by_key[sent.key]
        self._detailed.pop(sent.key, None)
        pooled = None if request.task_params is None else self.engine.extension("pooling").output(request).outputs
        self._ended.append(
            End(
                sent.key,
                np.array(request.output_token_ids, np.int32),
                request.text,
                request.finish_reason,
                request.stop_reason,
                request.metrics,
                None if request.logprobs is None else request.logprobs[sent.scored :],
                request.prompt_logprobs,
                pooled,
            )
        )

    def _report(
        self,
        keys: npt.NDArray[np.int64] = _NO_KEYS,
        tokens: npt.NDArray[np.int32] = _NO_TOKENS,
        news: list[News] | None = None,
        raised: BaseException | None = None,
    ) -> None:
        """Send everything since the last report."""
        if raised is not None:
            raised = _with_trace(sendable(raised), raised)
        self._send(
            Report(
                self._handled,
                self._refused,
                keys,
                tokens,
                self._others,
                news or [],
                self._ended,
                load_of(self.engine),
                raised,
                None if self._teller is None else self._teller.news(),
            )
        )
        self._refused, self._ended, self._others, self._reported = [], [], 0, time.monotonic()


def main() -> int:
    """Serve the front until it closes the connection."""
    log_as(f"replica {os.environ[NUMBER]}")
    address, key = pickle.loads(bytes.fromhex(os.environ[ADDRESS]))
    return serve(Client(address, authkey=key), int(os.environ[NUMBER]))


def serve(connection: Connection, number: int) -> int:
    """Build an engine and run it for the front. Return the exit code once the front has closed the connection."""
    connection.send(number)
    loaded = pickle.loads(connection.recv_bytes())
    if number:
        config = loaded.config
        loaded = evolve(loaded, config=evolve(config, observability=evolve(config.observability, progress=False)))
    try:
        engine = _engine(loaded, number, connection)
        ready = Ready(engine.plan.digest, engine.memory, dict(engine.startup), load_of(engine), engine.notes)
        connection.send_bytes(pickle.dumps(ready))
        Replica(connection, engine).run()
    except BaseException as error:
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(Failed(_with_trace(sendable(error), error))))
        return 1
    return 0


def _engine(loaded: LoadedConfig, number: int, connection: Connection) -> Engine:
    """Build the engine of a replica. The front says where replicas that share experts meet."""
    layout = layout_of(loaded)
    if not replicas_share_experts(loaded):
        return start_engine(loaded, number * layout.size)
    address: MeetingAddress | None = pickle.loads(connection.recv_bytes())
    if layout.replica_size > 1:
        assert address is not None
        return SharedRanks(number, address).lead(loaded)
    return start_alone(loaded, number) if address is None else start_sharing(loaded, number, address)


def _with_trace(error: BaseException, raised: BaseException) -> BaseException:
    """Return an error with the traceback of what was raised, which pickling leaves out."""
    error.add_note("".join(traceback.format_exception(raised)).rstrip())
    return error


if __name__ == "__main__":
    be_child_of(int(sys.argv[1]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a server's front drains
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end takes seconds, and other ranks end with their connections
