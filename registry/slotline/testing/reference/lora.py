"""LoRA plugin in plain torch: padded slots, and two ways to apply them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.functional import pad

from slotline.registry.capability import Flag, GraphSupport, Level, Max, Set
from slotline.registry.contracts import LoraCapabilities, LoraContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import CapacityError, RequestError

_UNSUPPORTED = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "alora_invocation_tokens",
    "arrow_config",
    "ensure_weight_tying",
    "use_bdlora",
    "monteclora_config",
    "kasa_config",
)
_OTHER_BASE = ("pissa", "corda", "olora", "loftq")
_PREFIX = "base_model.model."


@frozen(eq=False)
class LoadedAdapter:
    """Content of a folder: module path -> A [rank, in] and B [out, rank], and the scaling factor."""

    weights: dict[str, tuple[torch.Tensor, torch.Tensor]]
    rank: int
    scale: float


class PaddedSlots:
    """Plugin with one tensor per module for the A of all slots and one for the B, zero-padded to the highest rank."""

    def __init__(self, context: LoraContext) -> None:
        self.context = context
        dtype = getattr(torch, context.dtype)
        slots, rank = context.max_adapters, context.max_rank
        self.slots: dict[str, int] = {}  # name -> slot
        self.scales = torch.zeros(slots, device=context.device)
        self.alone: dict[str, torch.Tensor] = {}  # by module, [rank, in_features]
        self.a = {m: self.room(m, i).view(slots, rank, i) for m, (i, _) in self.modules()}
        self.b = {m: torch.zeros(slots, o, rank, dtype=dtype, device=context.device) for m, (_, o) in self.modules()}
        self.planned = torch.full((context.max_tokens,), -1, dtype=torch.int64, device=context.device)
        self.single = False

    def room(self, module: str, size: int) -> torch.Tensor:
        """Return the tensor of a module's A of all slots, [slots * rank, in_features], after its weight or separate.

        After a weight, they are preceded by room for a copy of the adapter that is the only one in a step.
        """
        context, rank = self.context, self.context.max_rank
        rows, room = context.max_adapters * rank, None
        if context.extend is not None and module not in context.embeddings:
            room = context.extend((module,), rank + rows, context.max_tokens, rank)
        if room is None:
            return torch.zeros(rows, size, dtype=getattr(torch, context.dtype), device=context.device)
        self.alone[module] = room[:rank]
        return room[rank:]

    def modules(self) -> list[tuple[str, tuple[int, int]]]:
        return list(self.context.modules.items())

    def load(self, name: str, path: str) -> int:
        if name in self.slots:
            raise RequestError(f"adapter {name!r} is loaded already", fix="unload it first")
        adapter = self.read(path)  # all faults are found before any change
        slot = self.free_slot(name)
        self.write(slot, adapter)
        self.slots[name] = slot
        return slot

    def unload(self, name: str) -> None:
        if name not in self.slots:
            raise RequestError(f"adapter {name!r} is not loaded", fix=f"loaded are: {sorted(self.slots)}")
        del self.slots[name]

    def plan(self, slots: torch.Tensor) -> None:
        self.planned[: len(slots)] = slots
        self.single = False

    def plan_single(self, slots: torch.Tensor, slot: int) -> None:
        self.plan(slots)
        for module, alone in self.alone.items():
            alone.copy_(self.a[module][slot])
        self.single = True

    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        planned = self.planned[: len(inputs)]
        for slot in planned.unique().tolist():
            if slot >= 0:
                rows = (planned == slot).nonzero().flatten()
                self.add(out, rows, self.share(module, slot, inputs[rows]))

    def expand(self, modules: tuple[str, ...], inner: torch.Tensor, out: torch.Tensor) -> None:
        (module,), planned = modules, self.planned[: len(out)]
        inner = (inner.sum(0) if inner.dim() == 3 else inner).to(self.b[module].dtype)
        for slot in planned.unique().tolist():
            if slot >= 0:
                rows = (planned == slot).nonzero().flatten()
                own = self.columns(inner[rows], slot)
                share = (own @ self.b[module][slot].T) * self.scales[slot].to(inner.dtype)
                self.add(out, rows, share.to(out.dtype))

    def columns(self, inner: torch.Tensor, slot: int) -> torch.Tensor:
        """Return the columns [n, rank] of a slot."""
        rank = self.context.max_rank
        first = 0 if self.single else rank + slot * rank
        return inner[:, first : first + rank]

    def share(self, module: str, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return the contribution of the slot's adapter for some tokens."""
        inputs = self.rows(module, inputs)
        tiles = inputs.split(1) if self.context.batch_invariant else (inputs,)
        share = torch.cat([tile @ self.a[module][slot].T @ self.b[module][slot].T for tile in tiles])
        return share * self.scales[slot].to(inputs.dtype)

    def rows(self, module: str, inputs: torch.Tensor) -> torch.Tensor:
        """Return the left factor of the product: the inputs, or for an embedding the one-hot rows of the token ids."""
        if module not in self.context.embeddings:
            return inputs
        return torch.eye(self.context.modules[module][0], dtype=self.b[module].dtype, device=inputs.device)[inputs]

    def add(self, out: torch.Tensor, rows: torch.Tensor, share: torch.Tensor) -> None:
        out[rows] += share

    def free_slot(self, name: str) -> int:
        free = set(range(self.context.max_adapters)) - set(self.slots.values())
        if not free:
            raise CapacityError(
                f"adapter {name!r}: all {self.context.max_adapters} slots are taken",
                fix="unload one, or raise lora.max_adapters",
            )
        return min(free)

    def write(self, slot: int, adapter: LoadedAdapter) -> None:
        """Put an adapter into a slot, replacing all previous contents."""
        self.scales[slot] = adapter.scale
        for module in self.a:
            self.clear(slot, module)
            if module in adapter.weights:
                a, b = adapter.weights[module]
                self.a[module][slot, : len(a)] = a
                self.b[module][slot, :, : len(a)] = b

    def clear(self, slot: int, module: str) -> None:
        self.a[module][slot] = 0
        self.b[module][slot] = 0

    # --- reading PEFT folders

    def read(self, path: str) -> LoadedAdapter:
        """Read a PEFT folder and check it as a whole."""
        config = read_config(path)
        self.check_kind(path, config)
        for key in _UNSUPPORTED:
            if config.get(key):
                raise RequestError(f"{path}: {key} = {config[key]!r} is not supported")
        if str(config.get("init_lora_weights")).lower().startswith(_OTHER_BASE):
            raise RequestError(f"{path}: init_lora_weights = {config['init_lora_weights']!r} changes the base model")
        rank = int(config["r"])
        if rank > self.context.max_rank:
            raise RequestError(f"{path}: rank {rank} is above the highest, {self.context.max_rank}")
        try:
            tensors = load_file(Path(path, "adapter_model.safetensors"))
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{path}: cannot read adapter_model.safetensors: {error}") from error
        return LoadedAdapter(self.weights(path, tensors, rank), rank, self.scale(config))

    def check_kind(self, path: str, config: dict[str, Any]) -> None:
        """Refuse adapters of other types than LoRA, and biases."""
        if config.get("peft_type", "LORA") != "LORA" or config.get("bias", "none") != "none":
            raise RequestError(f"{path}: only peft_type LORA without bias is supported, not {config}")

    def scale(self, config: dict[str, Any]) -> float:
        rank = int(config["r"])
        return float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)

    def weights(self, path: str, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
        """Return the tensors by module."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        sizes = {**self.context.modules, **self.context.elsewhere}
        sizes |= {module: (part.in_features, part.out_features) for module, part in self.context.parts.items()}
        for key, tensor in tensors.items():
            module, _, part = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            part = part.replace("_embedding", "") if module in self.context.embeddings else part
            if part not in ("lora_A", "lora_B") or module not in sizes:
                raise RequestError(f"{path}: {key} belongs to no module that may carry an adapter")
            found.setdefault(module, {})[part] = tensor
        for module, parts in found.items():
            inner, outer = sizes[module]
            shapes = {part: tuple(tensor.shape) for part, tensor in parts.items()}
            wanted = {"lora_A": (rank, inner), "lora_B": (outer, rank)}
            if shapes != wanted:
                raise RequestError(f"{path}: {module} has the shapes {shapes}, wanted {wanted}")
        own = {m: (parts["lora_A"], parts["lora_B"]) for m, parts in found.items() if m in self.context.modules}
        return {module: self.part(module, *pair) for module, pair in own.items()}

    def part(self, module: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a rank has of a module's weights, with zeros as padding."""
        part = self.context.parts.get(module)
        if part is None:
            return a, b
        inner, outer = self.context.modules[module]
        own = a if part.inputs is None else a[:, part.inputs], b if part.outputs is None else b[part.outputs]
        return pad(own[0], (0, inner - own[0].shape[1])), pad(own[1], (0, 0, 0, outer - own[1].shape[0]))


class GatheredSlots(PaddedSlots):
    """Plugin that gathers the weights of every token and multiplies in two batched products.

    The launches do not depend on the slots' values, so they can be captured.
    """

    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        if self.context.batch_invariant:
            super().apply(module, inputs, out)
            return
        inputs = self.rows(module, inputs)
        planned = self.planned[: len(inputs)]
        index = planned.clamp(min=0)
        inner = torch.bmm(self.a[module][index], inputs[:, :, None])  # [num_tokens, max_rank, 1]
        share = torch.bmm(self.b[module][index], inner)[:, :, 0] * self.scales[index, None].to(inputs.dtype)
        out.copy_(torch.where(planned[:, None] >= 0, out + share, out))


def read_config(path: str) -> dict[str, Any]:
    """Return the configuration of a PEFT folder."""
    try:
        config = json.loads(Path(path, "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot read adapter_config.json: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("r"), int) or "lora_alpha" not in config:
        raise RequestError(f"{path}: adapter_config.json gives no rank r and no lora_alpha")
    return config


def _capabilities(graphs: GraphSupport) -> LoraCapabilities:
    return LoraCapabilities(
        devices=Set(None),
        dtypes=Set(("float32", "bfloat16", "float16")),
        target_modules=Set(None),
        max_rank=Max(),
        max_adapters=Max(),
        rslora=Flag(True),
        graphs=Level(graphs),
        graph_key=False,
        embeddings=Flag(True),
        extended=Flag(True),
        single=Flag(True),
        staged=Flag(True),
        divided=Flag(True),
        batch_invariant=Flag(True),
    )


descriptor = Descriptor(
    kind=Kind.LORA,
    name="reference_padded_slots",
    summary="one product for each adapter in the batch",
    capabilities=_capabilities(GraphSupport.NEVER),
    factory=PaddedSlots,
)

gathered = Descriptor(
    kind=Kind.LORA,
    name="reference_gathered_slots",
    summary="weights gathered for each token, two batched products",
    capabilities=_capabilities(GraphSupport.ALWAYS),
    factory=GatheredSlots,
)
