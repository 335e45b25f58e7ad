"""L2 of `reload_weights`: new numbers at the old addresses, all of them or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slotline.registry.descriptor import Kind
from slotline.registry.errors import ModelError
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.model_family import FamilyWorld, by_example, rewrite, tensors_in

_LITERALS = ("aten::lift_fresh", "aten::lift", "aten::lift_fresh_copy")


class Reads(TorchDispatchMode):
    """Finds the memory that a forward pass reads and has not made: weights and buffers, as in a captured graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: set[int] = set()
        self._made: set[int] = set()
        self._alive: list[Any] = []  # no address is used twice while this looks on

    def given(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the memory of inputs out."""
        self._made |= {_address(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an operation reads, then run it."""
        read = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        if func.name().partition(".")[0] in _LITERALS:
            self.given(read)
        self.addresses |= {_address(tensor) for tensor in read} - self._made
        found = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        self._alive += [*read, *made]
        self._made |= {_address(tensor) for tensor in made} - self.addresses
        return found


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's numbers lie. A tensor in a form without strides is an address by itself."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


@check(Kind.MODEL_FAMILY, "model_family.reload.addresses", Level.HOSTILE, cases=by_example, cost=0.8)
def reload_keeps_addresses(run: Run) -> None:
    """Weights of another folder take the place of the old ones: a captured graph reads them where it read those."""
    world = FamilyWorld(run)
    model, new = _reloadable(world.load()), world.load(world.folder(1))
    text = world.text(model, run.rng, 9)
    world.whole(model, text)  # buffers that are made at first use
    before = _read(world, model, text)
    model.reload_weights(world.folder(1))
    fresh = world.text(new, run.rng, 9)
    world.compare(world.whole(model, fresh), world.whole(new, fresh), "after reload_weights of another folder")
    after = _read(world, model, text)
    if moved := len(before - after):
        raise Failed(f"{moved} of {len(before)} tensors that a forward pass reads lie elsewhere after reload_weights")


@check(Kind.MODEL_FAMILY, "model_family.reload.again", Level.HOSTILE, cases=by_example, cost=0.8)
def reload_reads_the_folder_again(run: Run) -> None:
    """Without a folder, weights are read again from that of the last load: as it is now, not as it was."""
    world = FamilyWorld(run)
    folder = world.copy()
    model = _reloadable(world.load(folder))
    text = world.text(model, run.rng, 9)
    before = world.whole(model, text)
    model.reload_weights()
    world.compare(world.whole(model, text), before, "after reload_weights of the same folder")
    if text.states is None and text.embeds is None:
        for file in set(tensors_in(folder).values()):
            rewrite(file, lambda tensors: {n: _scaled(t) for n, t in tensors.items()})
        expected = world.whole(world.load(folder), text)
        model.reload_weights()
        world.compare(world.whole(model, text), expected, "after reload_weights of a folder that has changed")
    model.reload_weights(world.folder(1))
    second = world.whole(model, text)
    model.reload_weights()
    world.compare(world.whole(model, text), second, "after reload_weights of the folder that was read last")


@check(Kind.MODEL_FAMILY, "model_family.reload.third", Level.HOSTILE, cases=by_example, cost=0.8)
def the_third_reload_is_as_the_first(run: Run) -> None:
    """Two folders in turn, the same one twice among them: each reload gives the numbers of its folder."""
    world = FamilyWorld(run)
    folders = (world.folder(0), world.folder(1))
    model = _reloadable(world.load(folders[0]))
    text = world.text(model, run.rng, 8)
    expected = [world.whole(world.load(folder), text) for folder in folders]
    for number, which in enumerate((1, 0, 1, 1, 0), 1):
        model.reload_weights(folders[which])
        world.compare(world.whole(model, text), expected[which], f"after reload {number}, of folder {which}")


@check(Kind.MODEL_FAMILY, "model_family.reload.refused", Level.HOSTILE, cases=by_example, cost=0.8)
def a_reload_that_cannot_be_changes_nothing(run: Run) -> None:
    """Weights that are missing or do not fit are refused by a ModelError, and the old ones stay as they were."""
    world = FamilyWorld(run)
    model = _reloadable(world.load())
    text = world.text(model, run.rng, 8)
    before = world.whole(model, text)
    for what, folder in _broken(world, run):
        try:
            model.reload_weights(folder)
        except ModelError as error:
            if not error.fix:
                raise Failed(f"{what}: the refusal names no remedy: {error}") from error
        except Exception as error:  # a plugin may raise anything
            raise Failed(f"{what}: {type(error).__name__} instead of a ModelError: {error}") from error
        else:
            raise Failed(f"{what}: it was taken")
        world.compare(world.whole(model, text), before, f"after a refused reload, {what}")


def _reloadable(model: Any) -> Any:
    if not callable(getattr(model, "reload_weights", None)):
        raise NotApplicable("not declared: the model has no reload_weights")
    return model


def _read(world: FamilyWorld, model: Any, text: Any) -> set[int]:
    """Return the addresses that a step of a text reads, and its logits."""
    reads = Reads()
    given = [part for part in (text.embeds, text.states, text.layer_embeds, text.axes) if part is not None]

    def entered(inputs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        reads.given([*given, *tensors])
        reads.__enter__()  # type: ignore[no-untyped-call]

    own = text.again()
    from slotline.testing.environments.model_calls import KeptKeys

    try:
        hidden = world.step(model, KeptKeys(model.facts), [(own, own.left)], change=entered)
        world.answers(model, hidden)
    finally:
        reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return reads.addresses


def _broken(world: FamilyWorld, run: Run) -> Iterator[tuple[str, Path]]:
    """Yield folders whose last tensors are missing or misshapen, so that a part may be read before that is seen."""
    yield "an empty folder", world.copy().parent
    for what in ("missing", "misshapen"):
        folder = world.copy(1)
        last = max(tensors_in(folder))
        file = tensors_in(folder)[last]

        def changed(tensors: dict[str, torch.Tensor], what: str = what) -> dict[str, torch.Tensor]:
            name = max(n for n, t in tensors.items() if t.dim() and len(t) > 1)
            kept = {n: t for n, t in tensors.items() if n != name}
            return kept if what == "missing" else {**kept, name: tensors[name][:-1]}

        rewrite(file, changed)
        yield f"a folder with a {what} tensor", folder


def _scaled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1.25 if tensor.is_floating_point() else tensor
