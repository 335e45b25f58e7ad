"""Broken model families, one bug each, and right ones that differ."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import linear

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.family_example import FamilyExample
from slotline.registry.contracts.model_family import ModelContext, ModelFacts, ModelParts, ProcessedItem
from slotline.registry.errors import ModelError
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference.model_family import descriptor, family
from slotline.testing.reference.model_family.family import FIX, ReferenceFamily
from slotline.testing.reference.model_family.model import ReferenceModel

EXAMPLE = "grouped heads"


def _family(model: type[ReferenceModel] = ReferenceModel, *examples: str, **methods: Any) -> type[ReferenceFamily]:
    """Return a family with a model and some of the examples, the first one if none is named."""

    class Family(ReferenceFamily):
        def load(self, context: ModelContext) -> Any:
            return model(context)

        @staticmethod
        def examples() -> Mapping[str, FamilyExample]:
            offered = ReferenceFamily.examples()
            return {name: offered[name] for name in examples or (EXAMPLE,)}

    for name, method in methods.items():
        setattr(Family, name, method)
    return Family


# --- what is declared and found


def _facts(**changes: Any) -> type[ReferenceFamily]:
    """Return a family whose `inspect` is wrong in some facts. A function is called with the right facts."""

    def inspect(self: ReferenceFamily, path: Path) -> ModelFacts:
        facts = ReferenceFamily.inspect(self, path)
        return attrs.evolve(facts, **{n: c(facts) if callable(c) else c for n, c in changes.items()})

    return _family(inspect=inspect)


def _layers(**changes: Any) -> type[ReferenceFamily]:
    """Return a family whose last layer's facts are wrong."""
    return _facts(layers=lambda facts: (*facts.layers[:-1], attrs.evolve(facts.layers[-1], **changes)))


def _parts(**changes: Any) -> type[ReferenceFamily]:
    """Return a family whose parts are wrong."""

    def changed(facts: ModelFacts) -> ModelParts:
        assert facts.parts is not None
        return attrs.evolve(facts.parts, **{n: c(facts.parts) for n, c in changes.items()})

    return _facts(parts=changed)


def _reads_weights(self: ReferenceFamily, path: Path) -> ModelFacts:
    facts = ReferenceFamily.inspect(self, path)
    weights = family.read_weights(path, family.read_config(path), "float32")
    return attrs.evolve(facts, notes=(f"its norm is {float(weights['norm'].sum()):.3f}",))


class ListNotes(ReferenceModel):
    notes = ["a note"]  # type: ignore[assignment]  # noqa: RUF012


class OwnFacts(ReferenceModel):
    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.facts = attrs.evolve(context.facts, max_model_len=9)


class NoTap(ReferenceModel):
    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, attend: Any, wanted: Any = None, embeds: Any = None
    ) -> Tensor:
        return super().forward(input_ids, positions, attend, wanted, embeds)


def _strict_load(self: ReferenceFamily, context: ModelContext) -> Any:
    return ReferenceModel(
        ModelContext(**{name: getattr(context, name) for name in attrs.asdict(context, recurse=False)})
    )


def _takes_all(self: ReferenceFamily, architecture: str) -> bool:
    return True


# --- arithmetic


class CountsPositions(ReferenceModel):
    def attention(self, index: int, x: Tensor, positions: Tensor, attend: Any) -> Tensor:
        return super().attention(index, x, torch.arange(len(x), device=x.device), attend)


class ShiftsPositions(ReferenceModel):
    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        return super().rotated(heads, positions - positions[:1])


class LaterPositions(ReferenceModel):
    """Keys of a token are one position late where a step begins behind the first token."""

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        late = 1 if int(positions[0]) and heads.shape[1] == self.config.num_kv_heads else 0
        return super().rotated(heads, positions + late)


class WantedFirst(ReferenceModel):
    """The last layer attends for the wanted tokens alone, with their keys alone."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Any, wanted: Any = None, *args: Any, **kw: Any
    ) -> Tensor:
        if wanted is None or not len(wanted):
            return super().forward(input_ids, positions, attend, wanted, *args, **kw)
        last = int(wanted.max()) + 1
        return super().forward(input_ids[:last], positions[:last], attend, wanted, *args, **kw)


class WantedLast(ReferenceModel):
    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Any, wanted: Any = None, *args: Any, **kw: Any
    ) -> Tensor:
        found = super().forward(input_ids, positions, attend, None, *args, **kw)
        return found if wanted is None else found[len(found) - len(wanted) :]


class WantedSorted(ReferenceModel):
    """Wanted tokens are counted from the step's end."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Any, wanted: Any = None, *args: Any, **kw: Any
    ) -> Tensor:
        if wanted is not None:
            wanted = wanted.clone()
            wanted[wanted == 0] = len(input_ids) - 1
        return super().forward(input_ids, positions, attend, wanted, *args, **kw)


class WantedAll(ReferenceModel):
    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Any, wanted: Any = None, *args: Any, **kw: Any
    ) -> Tensor:
        few = wanted is not None and len(wanted) > 0
        return super().forward(input_ids, positions, attend, wanted if few else None, *args, **kw)


class WantedEmpty(ReferenceModel):
    """A step without a wanted token is left out, so its keys are never stored."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Any, wanted: Any = None, *args: Any, **kw: Any
    ) -> Tensor:
        if wanted is not None and not len(wanted):
            for layer in self.facts.layers:
                keys = self.weights["norm"].new_zeros(len(input_ids), layer.num_kv_heads, layer.head_size)
                attend(layer, keys.new_zeros(len(keys), layer.num_heads, layer.head_size), keys, keys, None)
            return self.weights["norm"].new_zeros(0, self.config.hidden_size)
        return super().forward(input_ids, positions, attend, wanted, *args, **kw)


class MeanOfStep(ReferenceModel):
    """The final norm takes the mean of the step."""

    def norm(self, x: Tensor, name: str) -> Tensor:
        if name != "norm" or len(x) < 2:
            return super().norm(x, name)
        wide = x.float() * torch.rsqrt(x.float().square().mean() + 1e-6)
        return wide.to(x.dtype) * self.weights[name]


class MixesNeighbours(ReferenceModel):
    """Each token gets a thousandth part of the token before it in the step."""

    def layer(self, index: int, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        found = super().layer(index, hidden, positions, attend)
        return found + 0.003 * found.roll(1, 0)


class SkipsLayer(ReferenceModel):
    def layer(self, index: int, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        return hidden if index == 1 else super().layer(index, hidden, positions, attend)


class TwiceLayer(ReferenceModel):
    def layer(self, index: int, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        found = super().layer(index, hidden, positions, attend)
        return super().layer(index, found, positions, attend) if index == 0 else found


class Expanded(ReferenceModel):
    """Keys and values are repeated for each query head."""

    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        group = layer.num_heads // layer.num_kv_heads
        return super().attended(
            attend, layer, query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), sinks
        )


class FlatHeads(ReferenceModel):
    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        return super().attended(attend, layer, query.flatten(1), key, value, sinks)


class SwappedKeys(ReferenceModel):
    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        return super().attended(attend, layer, query, value, key, sinks)


class WideQuery(ReferenceModel):
    """Queries stay in float32, whatever the dtype."""

    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        return super().attended(attend, layer, query.float(), key, value, sinks).to(query.dtype)


class ForgetsSinks(ReferenceModel):
    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        return super().attended(attend, layer, query, key, value, None)


class TwiceScaled(ReferenceModel):
    """Queries are scaled by the model too."""

    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        return super().attended(attend, layer, query * layer.scale, key, value, sinks)


class OtherPairs(ReferenceModel):
    """Rotates neighbouring numbers in place of the two halves."""

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        order = torch.arange(heads.shape[-1]).view(2, -1).T.flatten().argsort()
        return super().rotated(heads[..., order], positions)[..., order.argsort()]


class NarrowNorm(ReferenceModel):
    def norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float() - x.float().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weights[name]


class GateAndUp(ReferenceModel):
    def layer(self, index: int, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        name = f"layers.{index}.up"
        before = self.weights[name]
        self.weights[name] = before.roll(len(before) // 2, 0)
        try:
            return super().layer(index, hidden, positions, attend)
        finally:
            self.weights[name] = before


class HalfLogits(ReferenceModel):
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return super().compute_logits(hidden_states).bfloat16()


class FewLogits(ReferenceModel):
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return super().compute_logits(hidden_states)[:, :-1]


class OneLogit(ReferenceModel):
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return super().compute_logits(hidden_states[-1:])


class LogitsInPlace(ReferenceModel):
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return super().compute_logits(hidden_states.mul_(1.0001))


class OwnRandom(ReferenceModel):
    """Weights are drawn from the folder's size, and not read."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        generator = torch.Generator().manual_seed(1)
        for name, tensor in self.weights.items():
            self.weights[name] = torch.randn(tensor.shape, generator=generator).to(tensor) / 4


class NewRandom(ReferenceModel):
    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.weights["norm"] = self.weights["norm"] + 0.01 * torch.randn_like(self.weights["norm"])


class Remembers(ReferenceModel):
    """The last token's state of a step goes into the next one."""

    before: Tensor | float = 0.0

    def forward(self, *args: Any, **kw: Any) -> Tensor:
        found = super().forward(*args, **kw) + 0.001 * self.before
        self.before = found[-1].clone() if len(found) else 0.0
        return found


class SharedRows(ReferenceModel):
    """`embed` hands out views of a buffer of its own for short texts."""

    rows: Mapping[int, Tensor] = {}

    def embed(self, input_ids: Tensor) -> Tensor:
        key = int(input_ids.sum()) if len(input_ids) < 12 else -1
        if key in self.rows:
            return self.rows[key]
        found = super().embed(input_ids)
        self.rows = {**self.rows, key: found} if key >= 0 else self.rows
        return found


class ScaledEmbeds(ReferenceModel):
    """Tokens are scaled in the forward pass, and `embed` gives them as they are."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, attend: Any, wanted: Any = None, embeds: Any = None, **kw: Any
    ) -> Tensor:
        embeds = self.embed(input_ids) * 2 if embeds is None else embeds
        return super().forward(input_ids, positions, attend, wanted, embeds, **kw)


class IgnoresEmbeds(ReferenceModel):
    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, attend: Any, wanted: Any = None, embeds: Any = None, **kw: Any
    ) -> Tensor:
        return super().forward(input_ids, positions, attend, wanted, None, **kw)


class TapsAfter(ReferenceModel):
    """The tap sees what a layer gives, not what it reads."""

    def forward(self, *args: Any, tap: Any = None, **kw: Any) -> Tensor:
        self.tap = tap
        return super().forward(*args, **kw)

    def layer(self, index: int, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        found = super().layer(index, hidden, positions, attend)
        if getattr(self, "tap", None) is not None:
            self.tap(index, found)
        return found


class TapsFromOne(ReferenceModel):
    def forward(self, *args: Any, tap: Any = None, **kw: Any) -> Tensor:
        later = None if tap is None else lambda index, states: tap(index + 1, states)
        return super().forward(*args, tap=later, **kw)


class TapsNormed(ReferenceModel):
    def forward(self, *args: Any, tap: Any = None, **kw: Any) -> Tensor:
        later = None if tap is None else lambda index, x: tap(index, self.norm(x, f"layers.{index}.norm"))
        return super().forward(*args, tap=later, **kw)


class FastFirst(ReferenceModel):
    """In fast prefill the positions of the wanted tokens begin at 0."""

    def layer(self, index: int, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        if index > self.config.owner and self.fast:
            positions = torch.arange(len(hidden), device=hidden.device)
        return super().layer(index, hidden, positions, attend)

    def forward(self, *args: Any, fast_prefill: bool = False, **kw: Any) -> Tensor:
        self.fast = fast_prefill
        return super().forward(*args, fast_prefill=fast_prefill, **kw)


class FastNever(ReferenceModel):
    def forward(self, *args: Any, fast_prefill: bool = False, **kw: Any) -> Tensor:
        return super().forward(*args, **kw)


class FastLast(ReferenceModel):
    """In fast prefill the last layer with a cache runs for the wanted tokens too."""

    def forward(self, *args: Any, fast_prefill: bool = False, **kw: Any) -> Tensor:
        before = self.config
        if fast_prefill:
            self.config = attrs.evolve(before, shared=before.shared + 1)
        try:
            return super().forward(*args, fast_prefill=fast_prefill, **kw)
        finally:
            self.config = before


# --- items


class OneEar(ReferenceModel):
    """The numbers of the first item are encoded for all."""

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        first = items[0]["s"]
        return super().encode(modality, [{"s": first.repeat(4)[: len(item["s"])]} for item in items])


class ShortEar(ReferenceModel):
    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        return [rows[:-1] if len(rows) > 5 else rows for rows in super().encode(modality, items)]


class JoinedEar(ReferenceModel):
    """Items are scaled by the largest number among all of them."""

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        largest = max(float(item["s"].abs().max()) for item in items)
        return super().encode(modality, [{"s": item["s"] / largest} for item in items])


class Deaf(ReferenceModel):
    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        return super().encode(modality, [{"s": torch.ones_like(item["s"])} for item in items])


class SmallExample(ReferenceModel):
    def example(self, modality: str) -> ProcessedItem:
        return self.process(modality, [0.5])


class AnyItem(ReferenceModel):
    def process(self, modality: str, item: Any) -> ProcessedItem:
        return super().process(modality, [float(one) for one in item])


# --- surroundings


class WritesPositions(ReferenceModel):
    def forward(self, input_ids: Tensor, positions: Tensor, attend: Any, *args: Any, **kw: Any) -> Tensor:
        found = super().forward(input_ids, positions, attend, *args, **kw)
        positions.clamp_(max=5)
        return found


class WholeStorage(ReferenceModel):
    """Reads token ids from the storage, past the view's beginning."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Any, *args: Any, **kw: Any) -> Tensor:
        input_ids = torch.as_strided(input_ids, input_ids.shape, (1,), 0)
        return super().forward(input_ids, positions, attend, *args, **kw)


class ContiguousOutput(ReferenceModel):
    """Takes for granted that outputs of attention are contiguous."""

    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        out = super().attended(attend, layer, query, key, value, sinks)
        return torch.as_strided(out, out.shape, (out.shape[1] * out.shape[2], out.shape[2], 1), out.storage_offset())


class StaysBroken(ReferenceModel):
    """What attention raised leaves the model without a layer."""

    skipped = False

    def layer(self, index: int, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        if self.skipped and index == 0:
            hidden = hidden * 1.5
        try:
            return super().layer(index, hidden, positions, attend)
        except Exception:
            self.skipped = True
            raise


class Swallows(ReferenceModel):
    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        try:
            return super().attended(attend, layer, query, key, value, sinks)
        except Exception as error:
            if type(error).__name__ != "Failing":
                raise
            return torch.zeros_like(query)


class SharedWeights(ReferenceModel):
    """The head of the model that was loaded last serves all."""

    last: Mapping[str, Tensor] = {}

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        type(self).last = self.weights

    def norm(self, x: Tensor, name: str) -> Tensor:
        before = self.weights
        self.weights = type(self).last if name == "norm" else before  # type: ignore[assignment]
        try:
            return super().norm(x, name)
        finally:
            self.weights = before


class ShortTables(ReferenceModel):
    """Rotary embeddings come from a table with half of the positions."""

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        return super().rotated(heads, torch.arange(self.config.max_len // 2, device=heads.device)[positions])


class WrappedTables(ReferenceModel):
    """Positions above 128 begin anew in keys."""

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        own = heads.shape[1] == self.config.num_kv_heads and len(positions) <= 64
        return super().rotated(heads, positions % 128 if own else positions)


class LastToken(ReferenceModel):
    """The last token of the vocabulary has no row."""

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids).masked_fill((input_ids == self.config.vocab_size - 1)[:, None], float("nan"))


class StoresInOrder(ReferenceModel):
    """Keys are stored one after the other, wherever their slots are."""

    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        slots = attend.slots(layer, key) if hasattr(attend, "slots") else None
        if slots is None:
            out: Tensor = attend(layer, query, key, value, sinks)
            return out
        first = int(slots.slot_mapping.min())
        slots.cache.key.flatten(0, 1)[first : first + len(key)] = key
        slots.cache.value.flatten(0, 1)[first : first + len(key)] = value
        found: Tensor = attend(layer, query, key, value, sinks, written=True)
        return found


class StoresKeys(ReferenceModel):
    """Values are not stored where keys are."""

    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        slots = attend.slots(layer, key) if hasattr(attend, "slots") else None
        if slots is not None:
            slots.cache.key.flatten(0, 1)[slots.slot_mapping] = key
        written = {} if slots is None else {"written": True}
        out: Tensor = attend(layer, query, key, value, sinks, **written)
        return out


class SetsDefaults(ReferenceModel):
    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        torch.manual_seed(0)


class WritesFolder(ReferenceModel):
    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        (context.facts.path / "cache.bin").write_bytes(b"1")


# --- weights


def _reading(change: Any) -> type[ReferenceModel]:
    """Return a model that reads a folder in its own way: `change` gets the stored tensors, the path and the sizes."""

    class Reading(ReferenceModel):
        def __init__(self, context: ModelContext) -> None:
            folder = change(context.facts.path)
            super().__init__(attrs.evolve(context, facts=attrs.evolve(context.facts, path=folder)))
            self.facts = context.facts
            shutil.rmtree(folder)

    return Reading


def _filled(path: Path) -> Path:
    """Return a copy of a folder with zeros for what is missing or has another shape."""
    from tempfile import mkdtemp

    from safetensors.torch import load_file, save_file

    folder = Path(mkdtemp(prefix="slotline-family-"))
    shutil.copytree(path, folder, dirs_exist_ok=True)
    try:
        stored = load_file(folder / family.FILE)
    except Exception:  # no file that can be read
        return folder
    config = family.read_config(folder)
    fitting = {
        name: stored[name].float() if name in stored and tuple(stored[name].shape) == shape else torch.zeros(shape)
        for name, shape in family.shapes_of(config).items()
    }
    save_file(fitting, folder / family.FILE)
    return folder


class NoBias(ReferenceModel):
    """The bias of values is not read. Without an independent result nothing but the tensor's own change shows it."""

    def of(self, index: int, name: str) -> Tensor:
        found = super().of(index, name)
        return torch.zeros_like(found) if name == "value_bias" else found


def _unchecked(**changes: Any) -> type[ReferenceFamily]:
    """Return a family whose examples have nothing to compare with."""

    class Unchecked(changes.pop("base")):  # type: ignore[misc]
        @staticmethod
        def examples() -> Mapping[str, FamilyExample]:
            offered = ReferenceFamily.examples()
            return {EXAMPLE: attrs.evolve(offered[EXAMPLE], expected=None)}

    return Unchecked


def _load_with(reader: Any) -> type[ReferenceFamily]:
    """Return a family whose `load` passes on what `reader` makes of an error of the right one."""

    def load(self: ReferenceFamily, context: ModelContext) -> Any:
        try:
            return ReferenceModel(context)
        except ModelError as error:
            raise reader(error) from error

    return _family(load=load)


def _inspect_with(reader: Any) -> type[ReferenceFamily]:
    def inspect(self: ReferenceFamily, path: Path) -> ModelFacts:
        try:
            return ReferenceFamily.inspect(self, path)
        except ModelError as error:
            raise reader(error) from error

    return _family(inspect=inspect)


def _any_number(self: ReferenceFamily, path: Path) -> ModelFacts:
    """Take any text for the longest length."""
    import json

    config = json.loads((path / "config.json").read_text(encoding="utf-8")) if (path / "config.json").exists() else {}
    if isinstance(config, dict) and isinstance(config.get("max_len"), str):
        raise TypeError("'<' not supported between instances of 'str' and 'int'")
    return ReferenceFamily.inspect(self, path)


class MovesWeights(ReferenceModel):
    def reload_weights(self, path: Path | None = None) -> None:
        self.weights = {name: tensor.clone() for name, tensor in self.weights.items()}
        super().reload_weights(path)


class MovesNorm(ReferenceModel):
    """One tensor that was merged at load is made anew."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.merge()

    def merge(self) -> None:
        """Make the scaled norm."""
        self.scaled = self.weights["norm"] * 1.0

    def norm(self, x: Tensor, name: str) -> Tensor:
        self.weights["norm"], before = self.scaled, self.weights["norm"]
        try:
            return super().norm(x, name)
        finally:
            self.weights["norm"] = before

    def reload_weights(self, path: Path | None = None) -> None:
        super().reload_weights(path)
        self.merge()


class StaleMerged(MovesNorm):
    """What was merged at load keeps the old weights."""

    def reload_weights(self, path: Path | None = None) -> None:
        ReferenceModel.reload_weights(self, path)


class ReloadsNothing(ReferenceModel):
    def reload_weights(self, path: Path | None = None) -> None:
        family.read_weights(path or self.facts.path, self.config, self.context.dtype)


class ReloadsFirst(ReferenceModel):
    """Without a folder, the first folder's weights come back."""

    def reload_weights(self, path: Path | None = None) -> None:
        super().reload_weights(path)
        self.facts = self.context.facts


class ReloadsHalf(ReferenceModel):
    """Tensors are copied one by one while they are checked."""

    def reload_weights(self, path: Path | None = None) -> None:
        from safetensors.torch import load_file

        path = path or self.facts.path
        family.read_config(path)
        stored = load_file(path / family.FILE)
        for name, tensor in self.weights.items():
            if name not in stored or stored[name].shape != tensor.shape:
                raise ModelError(f"{name} does not fit", fix=FIX)
            tensor.copy_(stored[name])
        self.facts = attrs.evolve(self.facts, path=path)


class ReloadsKept(ReferenceModel):
    """Weights of a folder that was read once are never read again."""

    def reload_weights(self, path: Path | None = None) -> None:
        if path is not None:
            super().reload_weights(path)


class ThirdReload(ReferenceModel):
    """The third reload reads the folder and does not use it."""

    reloads = 0

    def reload_weights(self, path: Path | None = None) -> None:
        self.reloads += 1
        kept = {name: tensor.clone() for name, tensor in self.weights.items()}
        super().reload_weights(path)
        if self.reloads == 3:
            for name, tensor in self.weights.items():
                tensor.copy_(kept[name])


class Tires(ReferenceModel):
    steps = 0

    def forward(self, *args: Any, **kw: Any) -> Tensor:
        self.steps += 1
        found = super().forward(*args, **kw)
        return found if self.steps <= 40 else found * 1.01


class Crowded(ReferenceModel):
    """In steps of four texts and more, the last ones are a position late."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Any, *args: Any, **kw: Any) -> Tensor:
        begins = (positions[1:] < positions[:-1]).nonzero().flatten()
        if len(begins) > 2 and len(positions) > 8:
            positions = positions + (torch.arange(len(positions), device=positions.device) > begins[-1])
        return super().forward(input_ids, positions, attend, *args, **kw)


def _mutant(name: str, summary: str, level: Level, factory: Any, **offer: Any) -> Mutant:
    changed = attrs.evolve(
        descriptor,
        name=f"mutant_{name.replace('-', '_')}",
        summary=summary,
        factory=factory if isinstance(factory, type) and issubclass(factory, ReferenceFamily) else _family(factory),
        capabilities=attrs.evolve(descriptor.capabilities, **offer),
    )
    return Mutant(name, summary, level, changed)


def _quiet(error: ModelError) -> Exception:
    return ModelError("it cannot be loaded", fix=FIX)


def _foreign(error: ModelError) -> Exception:
    return KeyError(error.message)


def _hopeless(error: ModelError) -> Exception:
    return ModelError(error.message)


L0, L1, L2, L3 = Level.CONTRACT, Level.NUMERICS, Level.HOSTILE, Level.STATEFUL
_TEXT, _SHARED, _SOUND = ("windows, caps and sinks", "shared caches", "sounds")

MUTANTS: tuple[Mutant, ...] = (
    _mutant("claims-all", "takes checkpoints of every architecture", L0, ReferenceModel, architectures=Set(None)),
    _mutant("claims-other", "its example is of another architecture", L0, ReferenceModel, architectures=Set(("X",))),
    _mutant("other-tasks", "does not declare its example's task", L0, ReferenceModel, tasks=Set(("embed",))),
    _mutant("takes-all", "takes on every architecture", L0, _family(takes_on=_takes_all), by_inspection=Flag(True)),
    _mutant("no-takes-on", "declares by_inspection and has no takes_on", L0, ReferenceModel, by_inspection=Flag(True)),
    _mutant("needs-context", "its factory needs an argument", L0, _family(__init__=lambda self, context: None)),
    _mutant("no-load", "has no load", L0, _family(load=None)),
    _mutant("strict-context", "refuses contexts of later versions", L0, _family(load=_strict_load)),
    _mutant("long-refusal", "refuses graphs in two lines", L0, _family(capture_refusal=lambda *_: "it\ncannot")),
    _mutant("reads-weights", "reads weights to inspect", L0, _family(inspect=_reads_weights)),
    _mutant("no-vocabulary", "finds no size of the vocabulary", L0, _facts(vocab_size=0)),
    _mutant("outer-end", "its end token is outside of the vocabulary", L0, _facts(eos_token_ids=(96,))),
    _mutant("text-dtype", "names a dtype as config.json does", L0, _facts(dtype="torch.float32")),
    _mutant("other-path", "names another folder", L0, _facts(path=Path("model"))),
    _mutant("no-layers", "finds no layers", L0, _facts(layers=())),
    _mutant("index-from-one", "counts layers from 1", L0, _layers(index=2)),
    _mutant("one-name", "gives two layers one name", L0, _layers(name="layers.0.attention")),
    _mutant("uneven-heads", "has heads that KV heads do not divide", L0, _layers(num_kv_heads=3)),
    _mutant("window-and-chunk", "has a window and a chunk", L0, _layers(window=4, chunk=4)),
    _mutant("own-cache", "reads its own cache as another's", L0, _layers(shares_kv_with=1)),
    _mutant("few-parts", "its parts lack the norms", L0, _parts(layers=lambda parts: (1,) * len(parts.layers))),
    _mutant("other-places", "its parts place attention after the end", L0, _parts(attention=lambda _: (0, 2))),
    _mutant("no-parts", "declares stages without parts", L0, _facts(parts=None), pipeline=Flag(True)),
    _mutant("list-notes", "gives notes as a list", L0, ListNotes),
    _mutant("own-facts", "changes the facts while it loads", L0, OwnFacts),
    _mutant("no-tap", "declares taps, and forward takes none", L0, NoTap),
    _mutant("small-head", "says half of its heads' size", L1, _layers(head_size=4, head_size_v=4)),
    _mutant("more-heads", "says more KV heads than it has", L1, _layers(num_kv_heads=4)),
    _mutant("says-sinks", "says sinks that it does not hand over", L1, _layers(sinks=True)),
    _mutant("other-scale", "says another scale than the model's", L1, _layers(scale=0.5)),
    _mutant("says-window", "says a window that the model has not", L1, _layers(window=4, kv_kind="sliding")),
    _mutant("counts-positions", "takes a token's place in the step for its position", L1, CountsPositions),
    _mutant("shifts-positions", "counts positions from the first token of the step", L1, ShiftsPositions),
    _mutant("later-positions", "keys of later chunks are one position late", L1, LaterPositions),
    _mutant("cuts-step", "leaves out the tokens behind the last wanted one", L1, WantedFirst),
    _mutant("wanted-last", "gives the last tokens, whichever are wanted", L1, WantedLast),
    _mutant("wanted-zero", "takes token 0 for the last one among the wanted", L1, WantedSorted),
    _mutant("wanted-all", "gives all tokens where none is wanted", L1, WantedAll),
    _mutant("wanted-none", "stores no keys where no token is wanted", L1, WantedEmpty),
    _mutant("mean-of-step", "norms with the mean of the step", L1, MeanOfStep),
    _mutant("mixes-neighbours", "adds a part of the token before in the step", L1, MixesNeighbours),
    _mutant("skips-layer", "leaves a layer out", L1, SkipsLayer),
    _mutant("twice-layer", "runs a layer twice", L1, TwiceLayer),
    _mutant("expanded-keys", "repeats keys for each query head", L1, Expanded),
    _mutant("flat-heads", "hands over queries without heads", L1, FlatHeads),
    _mutant("swapped-keys", "hands over values as keys", L1, SwappedKeys),
    _mutant("wide-query", "hands over queries in float32", L1, WideQuery),
    _mutant("forgets-sinks", "hands over no sinks", L1, _family(ForgetsSinks, _TEXT)),
    _mutant("twice-scaled", "scales queries that the backend scales", L1, TwiceScaled),
    _mutant("other-pairs", "rotates neighbours in place of halves", L1, OtherPairs),
    _mutant("layer-norm", "subtracts the mean in RMS norms", L1, NarrowNorm),
    _mutant("gate-and-up", "changes the two halves of the MLP", L1, GateAndUp),
    _mutant("half-logits", "gives logits in bfloat16", L1, HalfLogits),
    _mutant("few-logits", "gives no logit for the last token", L1, FewLogits),
    _mutant("one-logit", "gives logits of the last row alone", L1, OneLogit),
    _mutant("logits-in-place", "changes hidden states while it makes logits", L1, LogitsInPlace),
    _mutant("own-random", "makes weights up", L1, OwnRandom),
    _mutant("new-random", "adds noise to a weight at each load", L1, NewRandom),
    _mutant("remembers", "adds something of the step before", L1, Remembers),
    _mutant("shared-rows", "hands out the same embeddings again", L1, SharedRows),
    _mutant("scaled-embeds", "scales tokens, and not what embed gives", L1, ScaledEmbeds),
    _mutant("ignores-embeds", "reads tokens where embeddings are given", L1, IgnoresEmbeds),
    _mutant("taps-after", "taps the outputs of layers", L1, TapsAfter),
    _mutant("taps-from-one", "counts layers from 1 in taps", L1, TapsFromOne),
    _mutant("taps-normed", "taps what is behind a layer's norm", L1, TapsNormed),
    _mutant("fast-positions", "counts positions of wanted tokens from 0", L1, _family(FastFirst, _SHARED)),
    _mutant("fast-never", "runs all tokens in fast prefill", L1, _family(FastNever, _SHARED)),
    _mutant("fast-early", "leaves tokens out of a layer with a cache", L1, _family(FastLast, _SHARED)),
    _mutant("one-ear", "encodes the first item for all", L1, _family(OneEar, _SOUND)),
    _mutant("short-ear", "gives a long item a row too few", L1, _family(ShortEar, _SOUND)),
    _mutant("joined-ear", "scales items by the largest among all", L1, _family(JoinedEar, _SOUND)),
    _mutant("deaf", "gives all items the same rows", L1, _family(Deaf, _SOUND)),
    _mutant("small-example", "gives a small item to measure memory with", L1, _family(SmallExample, _SOUND)),
    _mutant("any-item", "takes any item, or raises TypeError", L2, _family(AnyItem, _SOUND)),
    _mutant("writes-positions", "writes into positions", L2, WritesPositions),
    _mutant("whole-storage", "reads token ids from the beginning of their memory", L2, WholeStorage),
    _mutant("contiguous-output", "reads outputs of attention as contiguous", L2, ContiguousOutput),
    _mutant("stays-broken", "is another model after attention raised", L2, StaysBroken),
    _mutant("swallows", "swallows what attention raises", L2, Swallows),
    _mutant("shared-weights", "uses the final norm of the model loaded last", L2, SharedWeights),
    _mutant("short-tables", "has tables for half of the positions", L2, ShortTables),
    _mutant("wrapped-tables", "begins anew at position 128 in later chunks", L2, WrappedTables),
    _mutant("last-token", "has no row for the last token", L1, LastToken),
    _mutant("stores-in-order", "stores keys one after the other", L2, StoresInOrder),
    _mutant("stores-keys", "stores keys without values", L2, StoresKeys),
    _mutant("seeds", "seeds torch while it loads", L2, SetsDefaults),
    _mutant("writes-folder", "writes a file into the checkpoint's folder", L2, WritesFolder),
    _mutant("no-bias", "does not read a bias", L2, _unchecked(base=_family(NoBias))),
    _mutant("fills-up", "takes zeros for tensors that are missing or misshapen", L2, _reading(_filled)),
    _mutant("nameless", "does not name the tensor that is missing", L2, _load_with(_quiet)),
    _mutant("key-errors", "raises KeyError for a missing tensor", L2, _load_with(_foreign)),
    _mutant("hopeless", "says of a missing tensor what is wrong and not what to do", L2, _load_with(_hopeless)),
    _mutant("config-errors", "raises KeyError for a missing or broken config.json", L0, _inspect_with(_foreign)),
    _mutant("config-quiet", "says nothing of a broken config.json", L2, _inspect_with(_quiet)),
    _mutant("any-number", "raises TypeError for a text in place of a number", L2, _family(inspect=_any_number)),
    _mutant("moves-weights", "has its weights elsewhere after a reload", L2, MovesWeights),
    _mutant("moves-merged", "makes a merged weight anew in a reload", L2, MovesNorm),
    _mutant("stale-merged", "keeps a merged weight in a reload", L2, StaleMerged),
    _mutant("reloads-nothing", "reads weights again and does not use them", L2, ReloadsNothing),
    _mutant("reloads-first", "reads the first folder again after another", L2, ReloadsFirst),
    _mutant("reloads-half", "copies weights before all are checked", L2, ReloadsHalf),
    _mutant("third-reload", "reads weights for the third time and does not use them", L2, ThirdReload),
    _mutant("reloads-kept", "does not read a folder a second time", L2, ReloadsKept),
    _mutant("tires", "gives other numbers after 40 steps", L3, Tires),
    _mutant("crowded", "is a position late in steps of four texts and more", L3, Crowded),
)


class Merged(ReferenceModel):
    """One product for query, key and value, and no keys stored by the model."""

    def attention(self, index: int, x: Tensor, positions: Tensor, attend: Any) -> Tensor:
        layer = self.facts.layers[index]
        if layer.shares_kv_with is not None:
            return super().attention(index, x, positions, attend)
        weight = torch.cat([self.of(index, name) for name in ("query", "key", "value")])
        bias = weight.new_zeros(len(weight))
        bias[: layer.num_heads * layer.head_size] = self.of(index, "query_bias")
        bias[-layer.num_kv_heads * layer.head_size :] = self.of(index, "value_bias")
        heads = linear(x, weight, bias).view(len(x), -1, layer.head_size)
        query, key, value = heads.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), 1)
        sinks = self.of(index, "sinks") if layer.sinks else None
        out = attend(layer, self.rotated(query, positions), self.rotated(key, positions), value, sinks)
        return linear(out.flatten(1), self.of(index, "out"))


class LastQueries(ReferenceModel):
    """The last layer attends for the wanted tokens alone where the step allows it."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Any, wanted: Any = None, *args: Any, **kw: Any
    ) -> Tensor:
        self.wanted = wanted
        return super().forward(input_ids, positions, attend, wanted, *args, **kw)

    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        last = layer.index == len(self.facts.layers) - 1 and layer.shares_kv_with is None
        if not (last and self.wanted is not None and hasattr(attend, "takes_wanted") and attend.takes_wanted(layer)):
            return super().attended(attend, layer, query, key, value, sinks)
        out = torch.zeros_like(query)
        out[self.wanted] = attend(layer, query[self.wanted], key, value, sinks, wanted=True)
        return out


CORRECT: tuple[Correct, ...] = (
    Correct("one product for each weight, keys stored by the model", descriptor),
    Correct(
        "one product for query, key and value, keys stored by the backend",
        attrs.evolve(descriptor, name="merged_family", factory=_family(Merged, EXAMPLE, _TEXT)),
    ),
    Correct(
        "the last layer attends for the wanted tokens alone",
        attrs.evolve(descriptor, name="last_queries_family", factory=_family(LastQueries, EXAMPLE)),
    ),
)
