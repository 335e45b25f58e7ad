"""Inputs of a drafter: requests on permanent rows, a token table with garbage after each history, a step's batch.

`World` plays the core's part. It keeps requests, builds the batch of a step, calls the drafter and looks at the form
of what comes back. Three kinds of garbage fill places without an accepted token:

- ``zeros``: friendly surroundings.
- ``garbage``: ids outside the vocabulary, other ones at each call.
- ``tempting``: ids inside the vocabulary that continue the history plausibly, other ones at each call.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, cast

import numpy as np
import torch
from attrs import define, evolve, field, frozen

from slotline.registry.contracts import (
    CheckpointDrafterFactory,
    Draft,
    DraftBatch,
    DrafterCapabilities,
    DrafterContext,
    DrafterInspection,
)
from slotline.registry.loading import resolve_factory
from slotline.testing.check import Failed, NotApplicable
from slotline.testing.environments.drafter_steps import (
    NUM_LAYERS,
    Steps,
    embedding,
    inspect_nothing,
    model_facts,
    own_layers,
    state,
)
from slotline.testing.oracles.draft_heads import TargetModel, usual_settings, write_head
from slotline.testing.oracles.drafter import Fault, draft_faults
from slotline.testing.subject import Subject

MOST_DRAFT_TOKENS = 8
"""Checks ask for no more draft tokens than this; longer drafts show nothing new."""


@frozen
class Request:
    """Request with its tokens, the seed of its draws, and its temperature."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    seed: int = 0
    temperature: float = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far."""
        return self.prompt + self.output

    def uniforms(self, count: int) -> list[float]:
        """Return draws that depend only on the seed and the position."""
        rng = Random(self.seed << 20 | len(self.prompt) + len(self.output))
        return [rng.random() for _ in range(count)]

    def then(self, tokens: Iterable[int]) -> Request:
        """Return the same request with more accepted tokens."""
        return Request(self.prompt, self.output + tuple(tokens), self.seed, self.temperature)


@frozen(eq=False)
class RowDraft:
    """Proposal for one request: ids up to the first -1, and the distribution of each, [len, vocab] float64."""

    token_ids: tuple[int, ...]
    probabilities: torch.Tensor | None
    parents: tuple[int, ...] | None


@define
class World:
    """Drafter under test and its requests.

    Attributes:
        subject: the plugin.
        num_tokens: requested draft tokens, by default the declared maximum up to 4.
        form: how proposals are verified, see `DrafterContext.form`. By default the most that the drafter declares.
        garbage: kind of garbage after the histories (see the module).
        seed: seed of the garbage.
        ahead: number of tokens by which the host's counts are too large, for some requests. As with overlapping steps,
            the host's draws are missing then, and its table is out of date.
        path: folder of a drafter that reads one. None for an example.
    """

    subject: Subject
    num_tokens: int = 0
    form: str = ""
    vocab_size: int = 32
    max_requests: int = 6
    max_model_len: int = 64
    garbage: str = "zeros"
    seed: int = 0
    ahead: int = 0
    path: str | None = None
    drafter: Any = field(init=False)
    steps: Steps | None = field(init=False)
    requests: dict[int, Request] = field(init=False, factory=dict)
    calls: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.num_tokens = self.num_tokens or draft_lengths(self.subject, up_to=4)[-1]
        self.form = self.form or tree_forms(self.subject)[-1]
        context = with_engine_parts(self.subject, self.context())
        self.drafter = self.subject.build(context)
        self.steps = self._steps(context)

    def context(self) -> DrafterContext:
        """Return the build context without a checkpoint. Contract and options are filled in by the subject."""
        return DrafterContext(
            contract=1,
            num_tokens=self.num_tokens,
            vocab_size=self.vocab_size,
            hidden_size=16,
            max_requests=self.max_requests,
            max_model_len=self.max_model_len,
            device=self.subject.device.type,
            dtype="float32",
            form=self.form,
            path=self.path,
        )

    def admit(self, row: int, request: Request) -> None:
        """Put the request on the row."""
        self.requests[row] = request
        if self.steps is not None:
            self.steps.begin(row)
        self.drafter.admit(row, list(request.prompt))

    def preempt(self, row: int) -> None:
        """Give up what was computed for the row's request."""
        if self.steps is not None:
            self.steps.preempt(row)

    def release(self, row: int) -> None:
        """Remove the request from its row. Its last step may be observed after that."""
        request = self.requests.pop(row)
        self.drafter.release(row)
        if self.steps is not None:
            self.steps.finish(row, request.tokens)

    def batch(self, rows: Sequence[int]) -> DraftBatch:
        """Return the core's batch for these rows, in this order."""
        self.calls += 1
        asked = [self.requests[row] for row in rows]
        lengths = [len(request.tokens) for request in asked]
        device, capabilities = self.subject.device.type, self.subject.capabilities
        newest = torch.tensor([request.tokens[-1] for request in asked], dtype=torch.int64)
        temperature = torch.tensor([request.temperature for request in asked], dtype=torch.float32)
        more = self._of_steps(rows) if self.steps is not None else {}
        if capabilities.needs_hidden_states and self.steps is None:
            more["hidden_states"] = hidden_states(asked, 16).to(device)
        return DraftBatch(
            rows=torch.tensor(list(rows), dtype=torch.int64),
            token_table=torch.from_numpy(self._table()),
            num_tokens=torch.tensor([n + (i + 1) % (self.ahead + 1) for i, n in enumerate(lengths)], dtype=torch.int32),
            last_token_ids=newest.to(device),
            positions=torch.tensor([n - 1 for n in lengths], dtype=torch.int64, device=device),
            **more,
            temperature=temperature.to(device),
            uniforms=None if self.ahead else self._uniforms(asked),
        )

    def draft(self, rows: Sequence[int]) -> tuple[Draft, list[Fault]]:
        """Call the drafter, and return its answer and the faults in its form."""
        draft = self.drafter.propose(self.batch(rows))
        faults = draft_faults(
            draft,
            rows,
            num_tokens=self.num_tokens,
            vocab_size=self.vocab_size,
            declared=self.subject.capabilities,
            form=self.form,
        )
        return draft, faults

    def propose(self, rows: Sequence[int]) -> dict[int, RowDraft]:
        """Return the proposal for each row.

        Raises:
            Failed: if the form of the answer is wrong.
        """
        draft, faults = self.draft(rows)
        if faults:
            raise Failed(faults[0].text)
        return row_drafts(draft, rows)

    def _steps(self, context: DrafterContext) -> Steps | None:
        """Return the steps that a drafter observes. None if it observes none."""
        declared = self.subject.capabilities
        if not (declared.needs_computed or declared.needs_layers or declared.needs_kv_group):
            return None
        rng = None if self.garbage == "zeros" else Random(repr((self.seed, self.garbage)))
        sizes = (self.vocab_size, context.hidden_size, self.max_model_len, self.num_tokens)
        return Steps(declared, context.layers, sizes, self.subject.device.type, rng, drafter=self.drafter)

    def _of_steps(self, rows: Sequence[int]) -> dict[str, Any]:
        """Show what the drafter has not observed of these rows. Return the parts of a batch that come of it."""
        assert self.steps is not None
        declared, steps = self.subject.capabilities, self.steps
        histories = [(row, self.requests[row].tokens) for row in rows]
        newest = [len(tokens) - 1 for _, tokens in histories]
        last, layers = steps.last_states(histories)
        found: dict[str, Any] = {}
        if declared.needs_computed:
            found["computed_index"], found["observed"] = steps.observe(histories)
        if declared.needs_hidden_states:
            found["hidden_states"] = last
        if declared.needs_layers:
            found["layer_hidden_states"] = layers
        if declared.needs_kv_group:
            found["attend"] = steps.attend(rows, newest)
            found["attend_tree"] = None if self.form == "chain" else steps.attend_tree(rows, newest)
        if declared.block_attention != "none":
            found["attend_block"] = steps.attend_block(rows, newest)
        return found

    def _table(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the token table: promised accepted histories, and garbage everywhere else."""
        rng = np.random.default_rng((self.seed, self.calls))
        shape, vocab = (self.max_requests, self.max_model_len), self.vocab_size
        if self.garbage == "zeros":
            table = np.zeros(shape, np.int32)
        elif self.garbage == "tempting":
            table = rng.integers(0, vocab, shape, np.int32)
        else:
            distance = rng.integers(0, 99, shape)
            table = np.where(rng.random(shape) < 0.5, -2 - distance, vocab + distance).astype(np.int32)
        for row, request in self.requests.items():
            tokens = request.tokens
            if self.ahead or not self.subject.capabilities.needs_history:
                continue  # undeclared history is not promised, because the host's table may be out of date
            table[row, : len(tokens)] = tokens
            if self.garbage == "tempting":
                _tempt(table[row], len(tokens), int(rng.integers(1, 6)))
        return table

    def _uniforms(self, requests: Sequence[Request]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return [num_requests, num_tokens]. Each request's values depend only on its seed and position."""
        drawn = [request.uniforms(self.num_tokens) for request in requests]
        return np.array(drawn, np.float64).reshape(len(requests), self.num_tokens)


def world_of(subject: Subject, requests: Mapping[int, Request], **options: Any) -> World:
    """Return a new drafter with these requests on their rows."""
    world = World(subject, **options)
    for row, request in requests.items():
        world.admit(row, request)
    return world


def draft_lengths(subject: Subject, up_to: int = MOST_DRAFT_TOKENS) -> tuple[int, ...]:
    """Return the declared numbers of draft tokens, from 1 up.

    Raises:
        NotApplicable: for drafters whose needs cannot be satisfied outside an engine.
    """
    capabilities = subject.capabilities
    for name in ("needs_layers", "needs_computed", "needs_kv_group"):
        if getattr(capabilities, name) and not is_shown_steps(capabilities):
            raise NotApplicable(f"{name}: only an engine can give it")
    if (
        capabilities.checkpoint_form == ""
        and capabilities.needs_checkpoint
        and not hasattr(resolve_factory(subject.descriptor), "write_example")
    ):
        raise NotApplicable("needs_checkpoint: its factory has no write_example")
    limit = capabilities.max_tokens.limit
    return tuple(range(1, 1 + min(up_to, up_to if limit is None else limit)))


def is_shown_steps(declared: DrafterCapabilities) -> bool:
    """Return True if the suite plays the engine for a drafter that observes steps.

    It does so for drafters with blocks or states, or with heads of a published form. Others may read more of a model
    than there is here.
    """
    return declared.block_attention != "none" or declared.state != "none" or declared.checkpoint_form != ""


def with_engine_parts(subject: Subject, context: DrafterContext) -> DrafterContext:
    """Return the context with dummy weights, and with what an engine gives a drafter that the suite shows steps.

    Raises:
        Failed: if the plugin cannot write weights.
    """
    declared = subject.capabilities
    if not is_shown_steps(declared):
        return with_checkpoint(subject, context)
    facts = model_facts(context.vocab_size, context.hidden_size, context.max_model_len)
    table = embedding(context.vocab_size, context.hidden_size).to(context.device)
    context = evolve(context, facts=facts, embed=lambda ids: table[ids], compute_logits=lambda x: x.float() @ table.T)
    context = with_checkpoint(subject, context) if context.path is None else context
    if not declared.needs_kv_group:
        return context
    inspection = DrafterInspection(
        facts=facts,
        num_tokens=context.num_tokens,
        max_model_len=context.max_model_len,
        path=context.path,
        inspect_model=inspect_nothing,
        options=subject.options,
    )
    return evolve(context, layers=own_layers(resolve_factory(subject.descriptor), inspection))


def tree_forms(subject: Subject) -> tuple[str, ...]:
    """Return the forms in which proposals of the drafter may be verified, the one that it declares last."""
    declared = subject.capabilities
    if not declared.tree.support:
        return ("chain",)
    return ("chain", "tree", "request_trees") if declared.request_trees.support else ("chain", "request_trees", "tree")


def with_checkpoint(subject: Subject, context: DrafterContext) -> DrafterContext:
    """Return the context with a folder of dummy weights written by the plugin, if it needs one.

    Raises:
        Failed: if the plugin cannot write it.
    """
    if not subject.capabilities.needs_checkpoint:
        return context
    folder = str(empty_folder())
    if form := subject.capabilities.checkpoint_form:
        target = target_of(context)
        sizes = (context.num_tokens, context.vocab_size, context.hidden_size, context.max_model_len)
        write_head(Path(folder), form, usual_settings(form, *sizes), target)
        return evolve(context, path=folder)
    factory = cast(CheckpointDrafterFactory, resolve_factory(subject.descriptor))
    try:
        factory.write_example(Path(folder), evolve(context, options=subject.options))
    except Exception as error:  # the plugin's
        raise Failed(f"write_example raised {type(error).__name__}: {error}") from error
    return evolve(context, path=folder)


def target_of(context: DrafterContext) -> TargetModel:
    """Return the made-up model of a context, for heads of a published form."""
    return TargetModel(
        table=embedding(context.vocab_size, context.hidden_size),
        state=lambda tokens, layer: state(tokens, layer, context.hidden_size),
        num_layers=NUM_LAYERS,
        max_model_len=context.max_model_len,
    )


def empty_folder() -> Path:
    """Return a new folder, which is removed when the process ends."""
    return Path(mkdtemp(dir=_folders().name))


@cache
def _folders() -> TemporaryDirectory[str]:
    """Return the folder of all checkpoints of this process, which is removed when the process ends."""
    return TemporaryDirectory(prefix="slotline-drafters-")


def random_request(rng: Random, *, vocab_size: int = 32, length: int = 0, temperature: float | None = None) -> Request:
    """Return a request whose text repeats itself with noise, so that lookup drafters find matches."""
    length = length or rng.randint(3, 40)
    motif = [rng.randrange(vocab_size) for _ in range(rng.randint(2, 5))]
    tokens = [motif[i % len(motif)] if rng.random() < 0.85 else rng.randrange(vocab_size) for i in range(length)]
    prompt = rng.randint(1, length - 1)
    warm = rng.choice((0.0, 0.7, 1.0, 1.5)) if temperature is None else temperature
    return Request(tuple(tokens[:prompt]), tuple(tokens[prompt:]), rng.randrange(2**31), warm)


def hidden_states(requests: Sequence[Request], hidden_size: int) -> torch.Tensor:
    """Return [num_requests, hidden_size] float32, a function of only the accepted history."""
    rows = []
    for request in requests:
        generator = torch.Generator().manual_seed(zlib.crc32(np.array(request.tokens, np.int64).tobytes()))
        rows.append(torch.randn(hidden_size, generator=generator))
    return torch.stack(rows) if rows else torch.empty(0, hidden_size)


def row_drafts(draft: Draft, rows: Sequence[int]) -> dict[int, RowDraft]:
    """Return a well-formed proposal divided by row."""
    trees = None if draft.parents is None else draft.parents.expand(draft.token_ids.shape).tolist()
    found = {}
    for index, (row, ids) in enumerate(zip(rows, draft.token_ids.tolist(), strict=True)):
        length = ids.index(-1) if -1 in ids else len(ids)
        probabilities = None if draft.probabilities is None else draft.probabilities[index, :length].double().cpu()
        parents = None if trees is None else tuple(trees[index][:length])
        found[row] = RowDraft(tuple(ids[:length]), probabilities, parents)
    return found


def _tempt(row: np.ndarray[Any, Any], length: int, period: int) -> None:
    """Continue a history with its own last tokens, so that a lookup that reads on finds a match."""
    for position in range(length, len(row)):
        row[position] = row[max(position - period, 0)]
