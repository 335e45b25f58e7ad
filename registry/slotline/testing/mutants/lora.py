"""Broken LoRA plugins, one bug each, and right ones that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file

from slotline.registry.capability import Flag
from slotline.registry.contracts import LoraContext
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import CapacityError, RequestError
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference import lora as reference
from slotline.testing.reference.lora import LoadedAdapter, PaddedSlots

# --- what is added, and where


class IgnoresAlpha(PaddedSlots):
    def scale(self, config: dict[str, Any]) -> float:
        return super().scale({**config, "lora_alpha": config["r"]})


class WholeNumberScale(PaddedSlots):
    def scale(self, config: dict[str, Any]) -> float:
        return float(super().scale(config) // 1 or 1)


class StabilisedAsPlain(PaddedSlots):
    def scale(self, config: dict[str, Any]) -> float:
        return super().scale({**config, "use_rslora": False})


class CoarseShare(PaddedSlots):
    def share(self, module: str, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        return super().share(module, slot, inputs).to(torch.float8_e4m3fn).to(inputs.dtype)


class FirstLayerForAll(PaddedSlots):
    def share(self, module: str, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        name = module.rpartition(".")[2]
        return super().share(next(path for path in self.a if path.endswith(f".{name}")), slot, inputs)


class EmbedsByPlace(PaddedSlots):
    def rows(self, module: str, inputs: torch.Tensor) -> torch.Tensor:
        is_embedding = module in self.context.embeddings
        return super().rows(module, torch.arange(len(inputs), device=inputs.device) if is_embedding else inputs)


class FirstColumns(PaddedSlots):
    def columns(self, inner: torch.Tensor, slot: int) -> torch.Tensor:
        return super().columns(inner, 0)


class KeepsTheFirstAlone(PaddedSlots):
    copied = False

    def plan_single(self, slots: torch.Tensor, slot: int) -> None:
        alone = self.alone
        self.alone = {} if self.copied else alone
        super().plan_single(slots, slot)
        self.alone, self.copied = alone, True


class StaysSingle(PaddedSlots):
    def plan(self, slots: torch.Tensor) -> None:
        single = self.single
        super().plan(slots)
        self.single = single


class KnowsItsOwnAlone(PaddedSlots):
    def weights(self, path: str, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
        context, self.context = self.context, attrs.evolve(self.context, elsewhere={})
        try:
            return super().weights(path, tensors, rank)
        finally:
            self.context = context


class FirstPartForAll(PaddedSlots):
    def part(self, module: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner, outer = self.context.modules[module]
        return a[:, :inner], b[:outer]


class OrderByNumber(PaddedSlots):
    def share(self, module: str, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 1 or module in self.context.embeddings:
            return super().share(module, slot, inputs)
        inner = inputs.flip(1) @ self.a[module][slot].flip(1).T  # the same sum, begun at the other end
        return (inner @ self.b[module][slot].T) * self.scales[slot].to(inputs.dtype)


class Overwrites(PaddedSlots):
    def add(self, out: torch.Tensor, rows: torch.Tensor, share: torch.Tensor) -> None:
        out[rows] = share


class NoneIsSlotZero(PaddedSlots):
    def plan(self, slots: torch.Tensor) -> None:
        super().plan(slots.clamp(min=0))


class FirstSlotForAll(PaddedSlots):
    def plan(self, slots: torch.Tensor) -> None:
        super().plan(slots[:1].expand(len(slots)))


class SortsTheTokens(PaddedSlots):
    def plan(self, slots: torch.Tensor) -> None:
        super().plan(slots.sort().values)


class KeepsTheFirstPlan(PaddedSlots):
    longest = 0

    def plan(self, slots: torch.Tensor) -> None:
        if len(slots) > self.longest:
            self.longest = len(slots)
            super().plan(slots)


class NoEmptyPlan(PaddedSlots):
    def plan(self, slots: torch.Tensor) -> None:
        if int(slots.max()) >= 0:  # an error where there is nothing to take the maximum of
            super().plan(slots)
        else:
            self.planned[:] = -1


class CopiesOut(PaddedSlots):
    def add(self, out: torch.Tensor, rows: torch.Tensor, share: torch.Tensor) -> None:
        super().add(out.contiguous(), rows, share)


class ClearsUnusedInputs(PaddedSlots):
    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        super().apply(module, inputs, out)
        inputs[self.planned[: len(inputs)] < 0] = 0


# --- slots over time


class KeepsUntargetedModules(PaddedSlots):
    def write(self, slot: int, adapter: LoadedAdapter) -> None:
        kept = {m: (self.a[m][slot].clone(), self.b[m][slot].clone()) for m in self.a if m not in adapter.weights}
        super().write(slot, adapter)
        for module, (a, b) in kept.items():
            self.a[module][slot], self.b[module][slot] = a, b


class KeepsPadding(PaddedSlots):
    def write(self, slot: int, adapter: LoadedAdapter) -> None:
        kept = {m: (self.a[m][slot].clone(), self.b[m][slot].clone()) for m in adapter.weights}
        super().write(slot, adapter)
        for module, (a, b) in kept.items():
            self.a[module][slot, adapter.rank :] = a[adapter.rank :]
            self.b[module][slot, :, adapter.rank :] = b[:, adapter.rank :]


class RemembersByName(PaddedSlots):
    def __init__(self, context: LoraContext) -> None:
        super().__init__(context)
        self.remembered: dict[str, LoadedAdapter] = {}
        self.name = ""

    def load(self, name: str, path: str) -> int:
        self.name = name
        return super().load(name, path)

    def write(self, slot: int, adapter: LoadedAdapter) -> None:
        super().write(slot, self.remembered.setdefault(self.name, adapter))


class NeverFrees(PaddedSlots):
    def unload(self, name: str) -> None:
        slot = self.slots[name]
        super().unload(name)
        self.slots[f"unloaded {len(self.slots)} {name}"] = slot


class SlotsInTurn(PaddedSlots):
    turn = -1

    def free_slot(self, name: str) -> int:
        super().free_slot(name)
        self.turn += 1
        return self.turn % self.context.max_adapters


class MovesTheLastSlot(PaddedSlots):
    def unload(self, name: str) -> None:
        freed = self.slots.get(name, -1)
        super().unload(name)
        last = max(self.slots.values(), default=-1)
        if last > freed:
            for weights in (*self.a.values(), *self.b.values(), self.scales):
                weights[freed] = weights[last]
                weights[last] = 0


class NoCapacity(PaddedSlots):
    def free_slot(self, name: str) -> int:
        return super().free_slot(name) if len(self.slots) < self.context.max_adapters else 0


class UnloadsAnything(PaddedSlots):
    def unload(self, name: str) -> None:
        self.slots.pop(name, None)


class TakesTheSlotFirst(PaddedSlots):
    def load(self, name: str, path: str) -> int:
        slot = self.free_slot(name)
        self.slots[name] = slot
        self.write(slot, self.read(path))  # a refusal here leaves the slot taken
        return slot


# --- sizes where kernels break


class EightSlots(PaddedSlots):
    def plan(self, slots: torch.Tensor) -> None:
        super().plan(torch.where(slots < 0, slots, slots % 8))


class SlotsByBit(PaddedSlots):
    def plan(self, slots: torch.Tensor) -> None:
        super().plan(torch.where(slots < 32, slots, -1))  # a bit for each slot in one int32


class RankInTiles(PaddedSlots):
    tile = 16

    def write(self, slot: int, adapter: LoadedAdapter) -> None:
        whole = max(adapter.rank // self.tile * self.tile, self.tile)
        super().write(slot, LoadedAdapter(self.cut(adapter.weights, whole), adapter.rank, adapter.scale))

    def cut(self, weights: dict[str, Any], rank: int) -> dict[str, Any]:
        return {module: (a[:rank], b[:, :rank]) for module, (a, b) in weights.items()}


class RankInWideTiles(RankInTiles):
    tile = 64


class FirstTileOfRank(RankInTiles):
    def cut(self, weights: dict[str, Any], rank: int) -> dict[str, Any]:
        return super().cut(weights, self.tile)


class SecondHalfOfRankFirst(RankInTiles):
    def cut(self, weights: dict[str, Any], rank: int) -> dict[str, Any]:
        return {module: (a, b if len(a) <= self.tile else b.roll(1, 1)) for module, (a, b) in weights.items()}


class ScaleOfRankEight(PaddedSlots):
    def scale(self, config: dict[str, Any]) -> float:
        return super().scale({**config, "r": min(int(config["r"]), 8)})


class SwapsSquare(PaddedSlots):
    def weights(self, path: str, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
        found = super().weights(path, tensors, rank)
        return {m: (b.T, a.T) if a.shape[1] == b.shape[0] else (a, b) for m, (a, b) in found.items()}


class SwapsByShape(PaddedSlots):
    def weights(self, path: str, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
        found = super().weights(path, tensors, rank)
        return {m: (b, a) if a.shape == b.shape else (a, b) for m, (a, b) in found.items()}


class WideInputs(PaddedSlots):
    most = 512

    def rows(self, module: str, inputs: torch.Tensor) -> torch.Tensor:
        rows = super().rows(module, inputs).clone()
        rows[:, self.most :] = 0
        return rows


class TailOfOutputs(PaddedSlots):
    def share(self, module: str, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        share = super().share(module, slot, inputs)
        if share.shape[1] > 128:
            share[:, share.shape[1] // 128 * 128 :] = 0
        return share


class LayerByDigit(PaddedSlots):
    def weights(self, path: str, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
        found = super().weights(path, tensors, rank)
        return {module: self.same_digit(module, found) if ".layers." in module else found[module] for module in found}

    def same_digit(self, module: str, found: dict[str, Any]) -> Any:
        before, _, after = module.partition(".layers.")
        number, _, name = after.partition(".")
        return found.get(f"{before}.layers.{number[-1]}.{name}", found[module])


class LayerByBeginning(PaddedSlots):
    def write(self, slot: int, adapter: LoadedAdapter) -> None:
        found = dict(adapter.weights)
        for module in self.a:
            layer, _, name = module.rpartition(".")
            for other, weights in adapter.weights.items():
                if other.endswith(name) and layer.startswith(other.rpartition(".")[0]):
                    found.setdefault(module, weights)
        super().write(slot, LoadedAdapter(found, adapter.rank, adapter.scale))


class ShortBatches(PaddedSlots):
    most = 512

    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        super().apply(module, inputs[: self.most], out[: self.most])


class BatchesInTiles(PaddedSlots):
    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        whole = len(inputs) // 32 * 32 if len(inputs) > 32 else len(inputs)
        super().apply(module, inputs[:whole], out[:whole])


class ShortSegmentForgotten(PaddedSlots):
    def plan(self, slots: torch.Tensor) -> None:
        super().plan(slots)
        runs = (slots[:-1] != slots[1:]).cumsum(0)
        if len(slots) > 256 and int(runs[-1]) == 1:  # one long segment and a short one, taken for one
            self.planned[: len(slots)] = slots[0]


# --- the third time


class FreesTwice(PaddedSlots):
    unloads = 0

    def free_slot(self, name: str) -> int:
        slot = super().free_slot(name)
        return slot if self.unloads < 2 * self.context.max_adapters else 0

    def unload(self, name: str) -> None:
        super().unload(name)
        self.unloads += 1


class KnowsTheFolder(PaddedSlots):
    def __init__(self, context: LoraContext) -> None:
        super().__init__(context)
        self.known: dict[str, LoadedAdapter] = {}

    def read(self, path: str) -> LoadedAdapter:
        found = self.known.get(Path(path).name) or super().read(path)
        self.known[Path(path).name] = found
        return found


class CountsLoads(PaddedSlots):
    loads = 0

    def load(self, name: str, path: str) -> int:
        self.loads += 1
        if self.loads > 3 * self.context.max_adapters:
            raise CapacityError("the table of adapters is full", fix="start again")
        return super().load(name, path)


class WritesOnce(PaddedSlots):
    def __init__(self, context: LoraContext) -> None:
        super().__init__(context)
        self.held: dict[int, tuple[int, ...]] = {}

    def write(self, slot: int, adapter: LoadedAdapter) -> None:
        shape = (adapter.rank, len(adapter.weights), self.held.get(slot, (0, 0, 0))[2] + 1)
        if shape[2] > 2 and shape[:2] == self.held[slot][:2]:
            return  # the slot has had such an adapter twice, so it must be there
        self.held[slot] = shape
        super().write(slot, adapter)


# --- folders that must be refused


class CutsTheRank(PaddedSlots):
    def read(self, path: str) -> LoadedAdapter:
        highest = self.context.max_rank
        self.context = attrs.evolve(self.context, max_rank=10**6)
        try:
            found = super().read(path)
        finally:
            self.context = attrs.evolve(self.context, max_rank=highest)
        cut = {module: (a[:highest], b[:, :highest]) for module, (a, b) in found.weights.items()}
        return LoadedAdapter(cut, found.rank, found.scale)


class SkipsUnknownModules(PaddedSlots):
    def weights(self, path: str, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
        known = [key for key in tensors if any(f".{module}.lora_" in key for module in self.context.modules)]
        return super().weights(path, {key: tensors[key] for key in known}, rank)


class IgnoresVariants(PaddedSlots):
    ignores: tuple[str, ...] = ()

    def read(self, path: str) -> LoadedAdapter:
        config = reference.read_config(path)
        self.check_kind(path, config)
        if any(config.get(name) for name in self.ignores):
            rank = int(config["r"])
            weights = load_file(f"{path}/adapter_model.safetensors")
            return LoadedAdapter(self.weights(path, weights, rank), rank, self.scale(config))
        return super().read(path)


class IgnoresDora(IgnoresVariants):
    ignores = ("use_dora",)


class IgnoresAlphaPattern(IgnoresVariants):
    ignores = ("alpha_pattern",)


class IgnoresSavedModules(IgnoresVariants):
    ignores = ("modules_to_save",)


class IgnoresReplication(IgnoresVariants):
    ignores = ("layer_replication",)


class IgnoresBiases(IgnoresVariants):
    ignores = ("lora_bias",)


class IgnoresFields(IgnoresVariants):
    ignores = (
        "use_qalora",
        "alora_invocation_tokens",
        "target_parameters",
        "trainable_token_indices",
        "arrow_config",
    )


class IgnoresTheStart(IgnoresVariants):
    ignores = ("init_lora_weights",)


class OtherTypes(PaddedSlots):
    def check_kind(self, path: str, config: dict[str, Any]) -> None:
        super().check_kind(path, {**config, "peft_type": "LORA"})


class DropsOut(PaddedSlots):
    def scale(self, config: dict[str, Any]) -> float:
        return super().scale(config) * (1 - float(config.get("lora_dropout", 0)))


class Transposes(PaddedSlots):
    def read(self, path: str) -> LoadedAdapter:
        if reference.read_config(path).get("fan_in_fan_out"):
            found = super().read(path)
            flipped = {module: (a.flip(1), b) for module, (a, b) in found.weights.items()}
            return LoadedAdapter(flipped, found.rank, found.scale)
        return super().read(path)


class TrainedOnly(PaddedSlots):
    def read(self, path: str) -> LoadedAdapter:
        if not reference.read_config(path).get("inference_mode", True):
            raise RequestError(f"{path}: inference_mode is off")
        return super().read(path)


class NamelessRefusals(PaddedSlots):
    def read(self, path: str) -> LoadedAdapter:
        try:
            return super().read(path)
        except RequestError as error:
            raise RequestError("cannot load the adapter") from error


def _mutant(
    name: str, summary: str, level: Level, factory: Any, base: Descriptor[Any] = reference.descriptor
) -> Mutant:
    changed = attrs.evolve(base, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory)
    return Mutant(name, summary, level, changed)


_PLAIN_ONLY = attrs.evolve(
    reference.descriptor, capabilities=attrs.evolve(reference.descriptor.capabilities, rslora=Flag(False))
)

MUTANTS: tuple[Mutant, ...] = (
    _mutant("no-alpha", "leaves out lora_alpha", Level.NUMERICS, IgnoresAlpha),
    _mutant("whole-scale", "rounds lora_alpha / r down", Level.NUMERICS, WholeNumberScale),
    _mutant("stabilised-as-plain", "scales a rank-stabilised adapter by 1 / r", Level.NUMERICS, StabilisedAsPlain),
    _mutant("coarse", "rounds the share to eight bits", Level.NUMERICS, CoarseShare),
    _mutant("first-layer", "uses the first layer's weights in all layers", Level.NUMERICS, FirstLayerForAll),
    _mutant("embeds-by-place", "takes a token's place for its id", Level.NUMERICS, EmbedsByPlace),
    _mutant("overwrites", "overwrites the output instead of adding", Level.NUMERICS, Overwrites),
    _mutant("none-is-zero", "takes slot -1 for slot 0", Level.NUMERICS, NoneIsSlotZero),
    _mutant("first-slot", "uses the first token's slot for the whole batch", Level.NUMERICS, FirstSlotForAll),
    _mutant("sorts-tokens", "sorts the slots and not the tokens", Level.NUMERICS, SortsTheTokens),
    _mutant("first-columns", "expands every token of the first slot's columns", Level.HOSTILE, FirstColumns),
    _mutant("first-alone", "keeps the first adapter that was alone in a step", Level.HOSTILE, KeepsTheFirstAlone),
    _mutant("stays-single", "takes every step behind one of one adapter for such", Level.HOSTILE, StaysSingle),
    _mutant("own-alone", "refuses an adapter with modules in other stages", Level.HOSTILE, KnowsItsOwnAlone),
    _mutant("first-part", "gives every rank the first one's part", Level.HOSTILE, FirstPartForAll),
    _mutant("order-by-number", "sums in an order that hangs on the number of tokens", Level.HOSTILE, OrderByNumber),
    _mutant("first-plan", "keeps a plan until a longer one comes", Level.HOSTILE, KeepsTheFirstPlan),
    _mutant("empty-plan", "fails on a step without tokens", Level.HOSTILE, NoEmptyPlan),
    _mutant("copies-out", "adds to a copy where out is not contiguous", Level.HOSTILE, CopiesOut),
    _mutant("clears-inputs", "writes to the inputs of tokens without an adapter", Level.HOSTILE, ClearsUnusedInputs),
    _mutant("stale-modules", "modules without an adapter keep the last one's", Level.HOSTILE, KeepsUntargetedModules),
    _mutant("stale-padding", "ranks above the adapter's keep the last one's weights", Level.HOSTILE, KeepsPadding),
    _mutant("by-name", "a name loaded again gets its old weights", Level.HOSTILE, RemembersByName),
    _mutant("never-frees", "unloading does not free the slot", Level.HOSTILE, NeverFrees),
    _mutant("slots-in-turn", "hands out slots in turn, taken ones too", Level.HOSTILE, SlotsInTurn),
    _mutant("moves-slots", "moves the last adapter into a freed slot", Level.HOSTILE, MovesTheLastSlot),
    _mutant("no-capacity", "loads one more adapter over slot 0", Level.HOSTILE, NoCapacity),
    _mutant("unloads-anything", "accepts unloading what is not loaded", Level.HOSTILE, UnloadsAnything),
    _mutant("slot-first", "takes the slot before it reads the folder", Level.HOSTILE, TakesTheSlotFirst),
    _mutant("cuts-rank", "cuts a rank that is too high", Level.HOSTILE, CutsTheRank),
    _mutant("skips-unknown", "leaves out modules that it does not know", Level.HOSTILE, SkipsUnknownModules),
    _mutant("ignores-dora", "loads a DoRA adapter as a plain one", Level.HOSTILE, IgnoresDora),
    _mutant("ignores-pattern", "leaves out alpha_pattern", Level.HOSTILE, IgnoresAlphaPattern),
    _mutant("ignores-saved", "leaves out modules_to_save", Level.HOSTILE, IgnoresSavedModules),
    _mutant("eight-slots", "takes a slot's last three bits", Level.HOSTILE, EightSlots),
    _mutant("slots-by-bit", "has a bit for each of 32 slots", Level.HOSTILE, SlotsByBit),
    _mutant("rank-tiles", "leaves out what a rank has behind tiles of 16", Level.NUMERICS, RankInTiles),
    _mutant("wide-rank-tiles", "leaves out what a rank has behind tiles of 64", Level.NUMERICS, RankInWideTiles),
    _mutant("first-tile", "takes the first 16 of a higher rank", Level.NUMERICS, FirstTileOfRank),
    _mutant("rolled-rank", "pairs A and B of ranks above 16 one off", Level.NUMERICS, SecondHalfOfRankFirst),
    _mutant("scale-of-eight", "divides alpha by 8 at most", Level.NUMERICS, ScaleOfRankEight),
    _mutant("swaps-square", "swaps A and B of square modules", Level.NUMERICS, SwapsSquare),
    _mutant("swaps-by-shape", "tells A from B by their shapes", Level.NUMERICS, SwapsByShape),
    _mutant("wide-inputs", "reads 512 inputs at most", Level.NUMERICS, WideInputs),
    _mutant("tail-of-outputs", "leaves out outputs behind tiles of 128", Level.NUMERICS, TailOfOutputs),
    _mutant("layer-by-digit", "finds layers by their last digit", Level.HOSTILE, LayerByDigit),
    _mutant("layer-by-beginning", "finds layers by how their names begin", Level.HOSTILE, LayerByBeginning),
    _mutant("short-batches", "adds to 512 tokens at most", Level.HOSTILE, ShortBatches),
    _mutant("batches-in-tiles", "leaves out tokens behind tiles of 32", Level.HOSTILE, BatchesInTiles),
    _mutant(
        "long-segment", "takes a short segment behind a long one for part of it", Level.HOSTILE, ShortSegmentForgotten
    ),
    _mutant("frees-twice", "hands out slot 0 after many unloads", Level.HOSTILE, FreesTwice),
    _mutant("knows-the-folder", "does not read a folder again that has changed", Level.HOSTILE, KnowsTheFolder),
    _mutant("counts-loads", "has room for a number of loads in all", Level.HOSTILE, CountsLoads),
    _mutant("writes-twice", "does not write a like adapter the third time", Level.HOSTILE, WritesOnce),
    _mutant("ignores-replication", "leaves out layer_replication", Level.HOSTILE, IgnoresReplication),
    _mutant("ignores-biases", "leaves out lora_bias", Level.HOSTILE, IgnoresBiases),
    _mutant("ignores-fields", "leaves out fields that change the result", Level.HOSTILE, IgnoresFields),
    _mutant("ignores-start", "loads what belongs to other base weights", Level.HOSTILE, IgnoresTheStart),
    _mutant("other-types", "takes other kinds of adapter for LoRA", Level.HOSTILE, OtherTypes),
    _mutant("drops-out", "scales by what dropout leaves", Level.NUMERICS, DropsOut),
    _mutant("transposes", "turns A around with fan_in_fan_out", Level.HOSTILE, Transposes),
    _mutant("trained-only", "refuses an adapter saved while training", Level.HOSTILE, TrainedOnly),
    _mutant("nameless", "refuses without saying what is wrong", Level.HOSTILE, NamelessRefusals),
    _mutant("undeclared-rslora", "takes a variant it does not declare", Level.HOSTILE, PaddedSlots, base=_PLAIN_ONLY),
)

CORRECT: tuple[Correct, ...] = (
    Correct("padded slots, one product for each adapter", reference.descriptor),
    Correct("weights gathered for each token, batched products", reference.gathered),
)
