"""State backend, its slots and the steps that are run on it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from slotline.registry.contracts.state import StateBackend, StateBatch, StateContext, kind_of
from slotline.testing.environments.state.pages import Region, plain_slots, slots_in_one_page
from slotline.testing.environments.state.problem import Problem
from slotline.testing.subject import Subject

Tensors = Mapping[str, Tensor]


@frozen
class Part:
    """Row of a batch.

    Attributes:
        slot: -1 for padding.
        tokens: for each layer the inputs of the row's tokens.
        has_initial_state: as in the batch.
        accepted: accepted tokens of the previous step.
    """

    slot: int
    tokens: tuple[Tensors, ...]
    has_initial_state: bool = True
    accepted: int = 1

    @property
    def count(self) -> int:
        """Number of tokens."""
        return int(next(iter(self.tokens[0].values())).shape[0])


@define
class Surroundings:
    """Built backend, the slots of its layers, and the steps that are run on it.

    Attributes:
        backend: the backend under test.
        problems: its layers.
        regions: for each layer its state tensors.
        device: device of all tensors.
        hostile: see the package's docstring.
        extra_rows, extra_tokens: additional length of the tensors of each batch.
    """

    backend: StateBackend
    problems: tuple[Problem, ...]
    regions: tuple[dict[str, Region], ...]
    device: str
    hostile: bool
    extra_rows: int = 0
    extra_tokens: int = 0
    parameters: tuple[Tensors, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.parameters = tuple(
            {name: value.to(self.device) for name, value in problem.parameters.items()} for problem in self.problems
        )

    def state(self, layer: int) -> dict[str, Tensor]:
        """Return the mapping that the backend gets for a layer."""
        return {name: region.view for name, region in self.regions[layer].items()}

    def run(self, parts: Sequence[Part]) -> list[list[Tensor]]:
        """Run one step and return, for each layer, the outputs of each row, on the CPU.

        Raises:
            AssertionError: if an output has a wrong shape or dtype or is not finite, if the inputs have changed, or if
                a byte changed that belongs to no tensor and slot of a row with tokens.
        """
        batch = self.batch(parts)
        before = _copies(batch)
        plan = self.backend.plan(batch)
        outputs = [self._forward(index, parts, batch, plan) for index in range(len(self.problems))]
        for name, value in before.items():
            assert torch.equal(value, getattr(batch, name)), f"the batch's {name} was changed by the backend"
        return outputs

    def batch(self, parts: Sequence[Part]) -> StateBatch:
        """Return the batch. With `extra_rows` its tensors are longer than its counts."""
        lengths = [part.count for part in parts]
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        singles = [length == 1 for length in lengths]
        padding = self.extra_rows
        return StateBatch(
            num_requests=len(parts),
            num_tokens=int(bounds[-1]),
            max_query_len=max(lengths, default=0),
            query_start_loc=self._ints([*bounds.tolist(), *[int(bounds[-1])] * padding]),
            slots=self._ints([*(part.slot for part in parts), *[-1] * padding]),
            has_initial_state=self._ints([*(part.has_initial_state for part in parts), *[0] * padding]).bool(),
            num_accepted=self._ints([*(part.accepted for part in parts), *[1] * padding]),
            query_start_loc_cpu=bounds,
            num_decodes=singles.index(False) if False in singles else len(singles),
            extras={"unknown_to_this_version": 1},
        )

    def _ints(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def _forward(self, index: int, parts: Sequence[Part], batch: StateBatch, plan: Any) -> list[Tensor]:
        problem = self.problems[index]
        inputs, buffers = self.inputs(index, parts)
        copies = [buffer.clone() for buffer in buffers]
        with self.only(index, written_by(parts)), poisoned_memory(self.hostile):
            output = self.backend.forward(problem.layer, inputs, self.state(index), plan)
        for copy, buffer, name in zip(copies, buffers, inputs, strict=True):
            assert torch.equal(copy.view(torch.uint8), buffer.view(torch.uint8)), f"input {name!r} was changed"
        assert_output(output, inputs, problem, parts)
        return by_rows(output, parts)

    def inputs(self, index: int, parts: Sequence[Part]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the step's inputs of one layer, and the buffers that they are views of, in the same order."""
        views: dict[str, Tensor] = {}
        buffers: list[Tensor] = []
        rows = [part.tokens[index] for part in parts]
        padding = self.problems[index].tokens(self.extra_tokens, seed=99)
        for name in padding:
            value = torch.cat([row[name] for row in rows] + [padding[name]]).to(self.device)
            views[name], buffer = _strided(value) if self.hostile else (value, value)
            buffers.append(buffer)
        for name, value in self.parameters[index].items():
            views[name] = value
            buffers.append(value)
        return views, buffers

    @contextmanager
    def only(self, index: int, slots: Collection[int]) -> Iterator[None]:
        """Check that inside only bytes of one layer's tensors in some slots change.

        Raises:
            AssertionError: on leaving, if another byte has changed.
        """
        pages = {region.page.data_ptr(): region.page for own in self.regions for region in own.values()}
        before = {page_id: page.clone() for page_id, page in pages.items()}
        yield
        for page_id, page in pages.items():
            self._assert_only(index, page_id, before[page_id], page, slots)

    def _assert_only(self, index: int, page_id: int, before: Tensor, after: Tensor, slots: Collection[int]) -> None:
        changed = before != after  # [num_slots, bytes]
        for region in self.regions[index].values():
            if region.page.data_ptr() == page_id and slots:
                changed[sorted(slots), region.first : region.last] = False
        if changed.any():
            slot, byte = changed.nonzero()[0].tolist()
            raise AssertionError(
                f"slot {slot} was changed, where only slots {sorted(slots)} of layer "
                f"{self.problems[index].layer.name!r} may be: byte {byte} of its page, {self._owner(page_id, byte)}"
            )

    def _owner(self, page_id: int, byte: int) -> str:
        for problem, own in zip(self.problems, self.regions, strict=True):
            for name, region in own.items():
                if region.page.data_ptr() == page_id and region.first <= byte < region.last:
                    return f"tensor {name!r} of layer {problem.layer.name!r}"
        return "padding between tensors"

    def commit(self, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """Commit the accepted tokens in every layer, with the rows of the last batch. -1 for rows to leave unchanged.

        Raises:
            AssertionError: if a byte changed that belongs to none of the slots.
        """
        for index, problem in enumerate(self.problems):
            with self.only(index, {slot for slot in slots if slot >= 0}):
                self.backend.commit(problem.layer, self.state(index), self._ints(slots), self._ints(accepted))

    def copy(self, source: int, target: int) -> None:
        """Copy one slot to another in every layer.

        Raises:
            AssertionError: if the target is then not the source bit for bit, or anything else has changed.
        """
        for index, problem in enumerate(self.problems):
            with self.only(index, {target}):
                self.backend.copy(problem.layer, self.state(index), source, target)
            for name, region in self.regions[index].items():
                pair = region.page[[source, target], region.first : region.last].cpu()
                assert torch.equal(pair[0], pair[1]), (
                    f"copy of slot {source} to {target}: tensor {name!r} of layer {problem.layer.name!r} differs from "
                    f"the original in {int((pair[0] != pair[1]).sum())} of {pair.shape[1]} bytes"
                )

    def read(self, index: int, slot: int) -> dict[str, Tensor]:
        """Return the content of a slot, on the CPU."""
        return {name: region.view[slot].cpu() for name, region in self.regions[index].items()}

    def refill(self, slot: int) -> None:
        """Fill a slot with garbage, as an earlier owner may have left it."""
        for own in self.regions:
            for region in own.values():
                region.view[slot] = float("nan") if self.hostile else 0.0


def surround(
    subject: Subject,
    problems: Sequence[Problem],
    *,
    hostile: bool = True,
    num_slots: int = 6,
    max_draft_tokens: int = 0,
    max_query_len: int = 512,
    channel_last: bool = False,
    extra_rows: int = 0,
    extra_tokens: int = 0,
) -> Surroundings:
    """Build the backend for some layers and give each its slots.

    `channel_last` stores the conv state with stride 1 over channels. `extra_rows` and `extra_tokens` pad every batch.
    """
    device = subject.device.type
    problems = tuple(problems)
    context = StateContext(
        contract=1,
        layers=tuple(problem.layer for problem in problems),
        device=device,
        dtype=str(problems[0].dtype).removeprefix("torch."),
        max_query_len=max_query_len,
        max_requests=64,
        max_tokens=8192,
        max_draft_tokens=max_draft_tokens,
    )
    regions = (
        slots_in_one_page(problems, num_slots, device, channel_last)
        if hostile
        else plain_slots(problems, num_slots, device)
    )
    return Surroundings(subject.build(context), problems, regions, device, hostile, extra_rows, extra_tokens)


def _strided(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same values as a slice of a wider buffer whose other columns are NaN."""
    columns = int(np.prod(value.shape[1:]))
    buffer = torch.full((value.shape[0], columns + 16), float("nan"), dtype=value.dtype, device=value.device)
    view = buffer[:, 8 : 8 + columns].unflatten(1, value.shape[1:])
    view.copy_(value)
    return view, buffer


def _copies(batch: StateBatch) -> dict[str, Tensor]:
    names = ("query_start_loc", "slots", "has_initial_state", "num_accepted")
    return {name: getattr(batch, name).clone() for name in names}


def written_by(parts: Sequence[Part]) -> set[int]:
    """Return the slots that a batch may write: those of rows with tokens."""
    return {part.slot for part in parts if part.slot >= 0 and part.count > 0}


def by_rows(output: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Return each row's outputs, on the CPU."""
    host = output.cpu()
    ends = np.cumsum([part.count for part in parts]).tolist()
    return [host[end - part.count : end] for end, part in zip(ends, parts, strict=True)]


def assert_output(output: Tensor, inputs: Tensors, problem: Problem, parts: Sequence[Part]) -> None:
    """Check that shape and dtype follow the contract, and that every row is finite.

    Raises:
        AssertionError: if not.
    """
    shape = inputs[kind_of(problem.layer).output].shape
    assert tuple(output.shape) == tuple(shape), f"output has shape {tuple(output.shape)}, expected {tuple(shape)}"
    assert output.dtype == problem.dtype, f"output is {output.dtype}, activations are {problem.dtype}"
    bad = (~torch.isfinite(output.flatten(1)).all(1)).nonzero().flatten().tolist()
    assert not bad, f"{problem.layer.state_kind}: output of {_owner_of(bad[0], parts)} is not finite"


def _owner_of(token: int, parts: Sequence[Part]) -> str:
    for row, part in enumerate(parts):
        if token < part.count:
            return f"token {token} of row {row} (slot {part.slot}{', padding' if part.slot < 0 else ''})"
        token -= part.count
    return f"token {token} of the padding behind the last row"


@contextmanager
def poisoned_memory(active: bool) -> Iterator[None]:
    """Fill tensors that torch allocates without filling with NaN, so that unwritten rows show."""
    if not active:
        yield
        return
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
