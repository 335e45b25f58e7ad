"""Inputs of a logits processor: requests on permanent rows, a token table with garbage after each history, batches.

`World` plays the core's part: it validates and admits requests, shows a row only where the processor said that it has
work, and looks at the form of what comes back. Three kinds of garbage stand where no known token is:

- ``zeros``: friendly surroundings.
- ``garbage``: ids outside the vocabulary, other ones at each call.
- ``tempting``: ids inside the vocabulary, other ones at each call.

Without a declared need for history the output tokens in the table are garbage too: a host that runs ahead of the device
does not know them. The logits of a companion follow from those of the row that it belongs to, see `companion_logits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import attrs
import numpy as np
import torch
from attrs import define, field, frozen

from slotline.core import SamplingParams
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.testing.check import Case, Failed, NotApplicable
from slotline.testing.oracles.logits_processor import form_fault
from slotline.testing.subject import Subject

VOCAB_SIZE, MAX_REQUESTS, MAX_MODEL_LEN = 32, 6, 64
EOS_TOKEN_IDS = (2,)
MOST_DRAFTS = 4
_FIELDS = frozenset(item.name for item in attrs.fields(SamplingParams))

Settings = Mapping[str, Any]
"""Sampling parameters by name, those of `extra_args` among them, as in the descriptor's `examples`."""


@frozen(eq=False)
class Request:
    """Request with its settings and its tokens so far."""

    settings: Settings
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output tokens."""
        return self.prompt + self.output

    def then(self, tokens: Iterable[int]) -> Request:
        """Return the same request with more accepted tokens."""
        return Request(self.settings, self.prompt, self.output + tuple(tokens))

    def __str__(self) -> str:
        return f"{dict(self.settings)}, prompt {list(self.prompt)}, output {list(self.output)}"


@frozen
class Entry:
    """Row of logits: the request's row, and the draft tokens that are assumed before it."""

    row: int
    drafts: tuple[int, ...] = ()


@define(eq=False)
class World:
    """Processor under test and its requests.

    Attributes:
        subject: the plugin.
        max_requests: number of rows.
        garbage: kind of garbage after the histories (see the module).
        seed: seed of the garbage.
        earlier: for a sequential processor, by row: the logits [vocab_size] last shown at each place, oldest first.
    """

    subject: Subject
    max_requests: int = MAX_REQUESTS
    garbage: str = "zeros"
    seed: int = 0
    earlier: dict[int, dict[Request, torch.Tensor]] = field(init=False, factory=dict)
    processor: Any = field(init=False)
    requests: dict[int, Request] = field(init=False, factory=dict)
    active: dict[int, bool] = field(init=False, factory=dict)
    paired: dict[int, bool] = field(init=False, factory=dict)
    calls: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.processor = self.subject.build(
            LogitsProcessorContext(
                contract=1,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=EOS_TOKEN_IDS,
                max_requests=self.max_requests,
                max_model_len=MAX_MODEL_LEN,
                device=self.subject.device.type,
            )
        )

    def admit(self, row: int, request: Request) -> None:
        """Check the request and put it on the row.

        Raises:
            Failed: if `admit` does not return a bool.
        """
        self.take(row, request, parameters(request.settings), list(request.prompt))

    def take(self, row: int, request: Request, params: dict[str, Any], prompt: list[int]) -> None:
        """Call `admit` with these objects for the request's parameters and prompt."""
        self.processor.validate(params)
        companions = self.subject.capabilities.companions
        self.paired[row] = companions and self.processor.companion(params, prompt) is not None
        answer = self.processor.admit(row, params, prompt)
        if not isinstance(answer, bool):
            raise Failed(f"admit returned {answer!r}, wanted True or False")
        self.requests[row], self.active[row], self.earlier[row] = request, answer, {}

    def shows(self, row: int) -> bool:
        """Return True if the core would show the row to the processor."""
        return self.active[row] and (self.paired[row] or not self.subject.capabilities.companions)

    def grow(self, row: int, tokens: Iterable[int]) -> None:
        """Add accepted tokens to the request."""
        self.requests[row] = self.requests[row].then(tokens)

    def release(self, row: int) -> None:
        """Remove the request, and release it in the processor if that had work."""
        del self.requests[row]
        if self.active.pop(row):
            self.processor.release(row)

    def batch(self, entries: Sequence[Entry], logits: torch.Tensor, *, speculative: bool) -> LogitsBatch:
        """Return the core's batch for the logits. Without `speculative` there are no draft arrays."""
        self.calls += 1
        asked = [self.requests[entry.row] for entry in entries]
        positions = np.array([len(entry.drafts) for entry in entries], np.int64)
        drafts = np.full((len(entries), int(positions.max(initial=0))), -1, np.int64)
        for index, entry in enumerate(entries):
            drafts[index, : len(entry.drafts)] = entry.drafts
        return LogitsBatch(
            rows=np.array([entry.row for entry in entries], np.int64),
            draft_positions=positions,
            token_table=self._table(),
            num_tokens=np.array([len(request.tokens) for request in asked], np.int64),
            num_prompt_tokens=np.array([len(request.prompt) for request in asked], np.int64),
            draft_token_ids=drafts if speculative else None,
            companion_logits=companion_logits(logits) if self.subject.capabilities.companions else None,
        )

    def apply(self, entries: Sequence[Entry], logits: torch.Tensor, *, speculative: bool | None = None) -> torch.Tensor:
        """Return the logits [len(entries), vocab_size], processed for rows with work. The input is not modified.

        Raises:
            Failed: if the form of the answer is wrong.
        """
        if speculative is None:
            speculative = any(entry.drafts for entry in entries)
        shown = [index for index, entry in enumerate(entries) if self.shows(entry.row)]
        after = logits.clone()
        if shown:
            batch = self.batch([entries[index] for index in shown], logits[shown], speculative=speculative)
            found = self.processor.apply(logits[shown], batch)
            fault = form_fault(logits[shown], found)
            if fault is not None:
                raise Failed(f"{fault}; entries {[entries[index] for index in shown]}")
            after[shown] = found
        if self.subject.capabilities.sequential:
            for index in shown:
                row = entries[index].row
                self.earlier.setdefault(row, {})[self.requests[row]] = logits[index].clone()
        return after

    def _table(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        rng = np.random.default_rng((self.seed, self.calls))
        shape = (self.max_requests, MAX_MODEL_LEN)
        if self.garbage == "zeros":
            table = np.zeros(shape, np.int64)
        elif self.garbage == "tempting":
            table = rng.integers(0, VOCAB_SIZE, shape)
        else:
            far = rng.integers(0, 2**30, shape)
            table = np.where(rng.random(shape) < 0.5, -2 - far, VOCAB_SIZE + far)
        for row, request in self.requests.items():
            known = request.tokens if self.subject.capabilities.needs_history else request.prompt
            table[row, : len(known)] = known
        return table.astype(np.int32)


def parameters(settings: Settings) -> dict[str, Any]:
    """Return all sampling parameters, as the core passes them to processors.

    Raises:
        RequestError: if `SamplingParams` refuses them.
    """
    own = {name: value for name, value in settings.items() if name in _FIELDS}
    extra = {name: value for name, value in settings.items() if name not in _FIELDS}
    given = {**(own.pop("extra_args", None) or {}), **extra}
    return SamplingParams(**{"max_tokens": None, **own, "extra_args": given or None}).as_mapping()


def examples(subject: Subject) -> tuple[Settings, ...]:
    """Return the declared examples. A processor without parameters has one empty example.

    Raises:
        NotApplicable: if there are parameters but no examples.
    """
    declared: tuple[Settings, ...] = subject.capabilities.examples
    if not declared and subject.capabilities.parameters:
        raise NotApplicable("not declared: examples, settings of the parameters that change logits")
    return declared or ({},)


def by_example(subject: Subject) -> Iterable[Case]:
    """Return a case for each example."""
    return [{"example": index} for index in range(len(examples(subject)))]


def random_request(rng: Random, settings: Settings, *, length: int = 0) -> Request:
    """Return a request whose tokens repeat themselves."""
    length = length or rng.randint(2, 40)
    few = [rng.randrange(VOCAB_SIZE) for _ in range(6)]
    tokens = tuple(rng.choice(few) if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE) for _ in range(length))
    prompt = rng.randint(1, length)
    return Request(settings, tokens[:prompt], tokens[prompt:])


def some_requests(subject: Subject, rng: Random, rows: Iterable[int] = range(MAX_REQUESTS)) -> dict[int, Request]:
    """Return requests of several lengths with all examples in turn."""
    known = examples(subject)
    lengths = (1, 4, 9, 17, 33, 60)
    return {
        row: random_request(rng, known[index % len(known)], length=lengths[index % len(lengths)])
        for index, row in enumerate(rows)
    }


def random_drafts(rng: Random, request: Request, most: int = MOST_DRAFTS) -> tuple[int, ...]:
    """Return up to `most` drafts, some of them tokens of the request."""
    count = min(rng.randint(0, most), MAX_MODEL_LEN - len(request.tokens))
    return tuple(rng.choice((rng.randrange(VOCAB_SIZE), rng.choice(request.tokens))) for _ in range(count))


def verify_entries(row: int, drafts: tuple[int, ...]) -> list[Entry]:
    """Return the entries of one request under speculation: before each draft, and after the last."""
    return [Entry(row, drafts[:count]) for count in range(len(drafts) + 1)]


def random_logits(rng: Random, count: int, device: str, form: str = "plain") -> torch.Tensor:
    """Return [count, vocab_size] float32: ``plain``, ``ties`` (integers), ``bans`` (some -inf) or ``large``."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = 4 * torch.randn(count, VOCAB_SIZE, generator=generator)
    if form == "ties":
        logits = (logits / 2).round()
    elif form == "large":
        logits = logits * 300
    elif form == "bans":
        banned = torch.rand(count, VOCAB_SIZE, generator=generator) < 0.4
        banned[:, 0] = False
        logits = logits.masked_fill(banned, -torch.inf)
    return logits.to(device)


def companion_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return stand-ins for the logits of the rows' companions, [n, vocab_size]: each row shifted by some tokens."""
    return logits.roll(7, dims=-1)


def world_of(subject: Subject, requests: Mapping[int, Request], **options: Any) -> World:
    """Return a new processor with these requests on their rows."""
    world = World(subject, **options)
    for row, request in requests.items():
        world.admit(row, request)
    return world


def alone(
    subject: Subject,
    request: Request,
    logits: torch.Tensor,
    drafts: tuple[int, ...] = (),
    earlier: Mapping[Request, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return [vocab_size], one row of logits processed by a new processor for only this request, with accepted drafts.

    It sees the logits of `earlier` positions first, once each.
    """
    accepted = request.then(drafts)
    world = world_of(subject, {0: accepted})
    for before, shown in (earlier or {}).items():
        if len(before.tokens) < len(accepted.tokens):
            world.requests[0] = before
            world.apply([Entry(0)], shown[None])
    world.requests[0] = accepted
    return world.apply([Entry(0)], logits[None])[0]
