"""Environment of a LoRA plugin: a model's linear modules, adapters in PEFT folders on disk, and batches of tokens.

Folders are written as PEFT writes them: ``adapter_config.json``, and ``adapter_model.safetensors`` with the keys
``base_model.model.<module path>.lora_A.weight`` and ``.lora_B.weight``, or ``.lora_embedding_A`` and ``_B``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from attrs import define, evolve, field
from safetensors.torch import save_file
from torch.nn.functional import pad

from slotline.registry.contracts import LoraContext, ModulePart
from slotline.testing.check import Failed, NotApplicable, Run
from slotline.testing.oracles.lora import Adapter, expected
from slotline.testing.subject import Subject

_LINEAR_PARTS = ("lora_A.weight", "lora_B.weight")
_NAMES = ("q_proj", "o_proj", "down_proj")
_SIZES = ((48, 40), (32, 72), (56, 24))  # (in_features, out_features): all different, none a power of two throughout
LAYERS = 2
HIGHEST_RANK = 8
EMBEDDING, _EMBEDDING_SIZES = "model.embed_tokens", (29, 40)  # (num_embeddings, embedding_dim)


@define
class LoraWorld:
    """Plugin under test with its adapters and their folders. Use it in a ``with`` statement.

    Attributes:
        run: the run whose subject is built.
        dtype: dtype of the base model by name, by default the subject's first.
        embeds: True if the model's embedding is among the modules.
        extends: True if the model has room after its weights, and computes products with both.
        in_parts: True if it computes these products in parts.
        staged: True if the second layer's modules are in another pipeline stage, as `elsewhere`.
        rank: which half of each module a rank of two has, outputs of some and inputs of others. -1 for whole modules.
        parts: what it has, by module.
        batch_invariant: True if a token's contribution must be bitwise the same in any batch.
        max_adapters, max_rank: slots, and the highest rank. What is declared limits both.
        layers: numbers of the layers that the model has.
        sizes: (in_features, out_features) of the modules of a layer.
        loaded: name -> (slot, adapter).
        single: True if the last plan was for one adapter.
        rng: generator of the assignment of adapters to tokens.
    """

    run: Run
    dtype: str = ""
    embeds: bool = False
    extends: bool = False
    staged: bool = False
    rank: int = -1
    batch_invariant: bool = False
    max_adapters: int = 3
    max_tokens: int = 24
    max_rank: int = HIGHEST_RANK
    layers: Sequence[int] = range(LAYERS)
    sizes: Sequence[tuple[int, int]] = _SIZES
    modules: dict[str, tuple[int, int]] = field(init=False)
    elsewhere: dict[str, tuple[int, int]] = field(init=False, factory=dict)
    parts: dict[str, ModulePart] = field(init=False, factory=dict)
    lora: Any = field(init=False)
    loaded: dict[str, tuple[int, Adapter]] = field(init=False, factory=dict)
    planned: list[str | None] = field(init=False, factory=list)
    written: int = field(init=False, default=0)
    in_parts: bool = field(init=False, default=False)
    single: bool = field(init=False, default=False)
    rooms: dict[str, torch.Tensor] = field(init=False, factory=dict)
    single_rows: dict[str, int] = field(init=False, factory=dict)
    _folder: TemporaryDirectory[str] = field(init=False, factory=TemporaryDirectory)
    rng: Random = field(init=False)
    _generator: torch.Generator = field(init=False)

    def __attrs_post_init__(self) -> None:
        subject = self.run.subject
        self.dtype = self.dtype or dtypes_of(subject)[0]
        self.max_rank = min(self.max_rank, subject.capabilities.max_rank.limit or self.max_rank)
        self.max_adapters = min(self.max_adapters, subject.capabilities.max_adapters.limit or self.max_adapters)
        self.modules = modules_of(subject, self.layers, self.sizes) | (
            {EMBEDDING: _EMBEDDING_SIZES} if self.embeds else {}
        )
        if self.staged:
            self.elsewhere = {path: sizes for path, sizes in self.modules.items() if ".layers.1." in path}
            self.modules = {path: sizes for path, sizes in self.modules.items() if path not in self.elsewhere}
        if self.rank >= 0:
            self._divide()
        self.rng = self.run.rng
        self._generator = torch.Generator().manual_seed(self.run.seed)
        self.lora = subject.build(
            LoraContext(
                contract=1,
                modules=dict(self.modules),
                elsewhere=dict(self.elsewhere),
                parts=dict(self.parts),
                embeddings=(EMBEDDING,) if self.embeds else (),
                extend=self._extend if self.extends else None,
                batch_invariant=self.batch_invariant,
                max_adapters=self.max_adapters,
                max_rank=self.max_rank,
                max_tokens=self.max_tokens,
                device=subject.device.type,
                dtype=self.dtype,
            )
        )

    def _divide(self) -> None:
        """Leave each module the half of its inputs or outputs that a rank of two has, the last number padding."""
        for number, (path, (inner, outer)) in enumerate(self.modules.items()):
            size = outer if number % 2 and path != EMBEDDING else inner
            half = size // 2 + 1
            places = torch.arange(self.rank * half, min((self.rank + 1) * half, size))
            of_outputs = number % 2 and path != EMBEDDING
            which = {"outputs": places} if of_outputs else {"inputs": places}
            self.parts[path] = ModulePart(in_features=inner, out_features=outer, **which)
            self.modules[path] = (inner, half) if of_outputs else (half, outer)

    def _own(self, adapter: Adapter) -> Adapter:
        """Return what the rank has of an adapter."""
        weights = dict(adapter.weights)
        for module, part in self.parts.items():
            if module in weights:
                (a, b), (inner, outer) = weights[module], self.modules[module]
                a = a if part.inputs is None else a[:, part.inputs]
                b = b if part.outputs is None else b[part.outputs]
                weights[module] = pad(a, (0, inner - a.shape[1])), pad(b, (0, 0, 0, outer - b.shape[0]))
        return evolve(adapter, weights=weights)

    def __enter__(self) -> LoraWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._folder.cleanup()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the base model."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def adapter(
        self,
        rank: int,
        *,
        alpha: float = 12.0,
        modules: Sequence[str] | None = None,
        rslora: bool = False,
        size: float = 1.0,
    ) -> Adapter:
        """Return a random adapter whose contribution is about `size` times the inputs.

        Without `modules` it has all modules, those elsewhere included.
        """
        weights, every = {}, {**self.modules, **self.elsewhere}
        every |= {path: (part.in_features, part.out_features) for path, part in self.parts.items()}
        for module in every if modules is None else modules:
            inner, outer = every[module]
            scale = size * rank**0.5 / (alpha * inner**0.5)
            weights[module] = (self.random(rank, inner) * scale, self.random(outer, rank))
        rounded = {name: (a.to(self.torch_dtype), b.to(self.torch_dtype)) for name, (a, b) in weights.items()}
        return Adapter(rounded, rank, alpha, rslora)

    def write(self, adapter: Adapter, folder: Path | None = None, **config: Any) -> Path:
        """Write the adapter as a PEFT folder, every second one in float32, as training does.

        Args:
            adapter: the adapter.
            folder: one that was written before, whose files are replaced. By default a new one.
            config: further fields of the configuration.
        """
        self.written += 1
        dtype = torch.float32 if self.written % 2 else self.torch_dtype
        tensors = {}
        for module, (a, b) in adapter.weights.items():
            first, second = ("lora_embedding_A", "lora_embedding_B") if module == EMBEDDING else _LINEAR_PARTS
            tensors[f"base_model.model.{module}.{first}"] = a.to(dtype).contiguous()
            tensors[f"base_model.model.{module}.{second}"] = b.to(dtype).contiguous()
        return self.write_files(tensors, {**peft_config(adapter), **config}, folder)

    def write_files(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        config: Mapping[str, Any] | None,
        folder: Path | None = None,
    ) -> Path:
        """Write a new folder, or `folder` again, with the two files, or without one of them."""
        if folder is None:
            folder = Path(self._folder.name, f"adapter_{self.written}_{len(list(Path(self._folder.name).iterdir()))}")
            folder.mkdir()
        if tensors is not None:
            save_file(dict(tensors), folder / "adapter_model.safetensors")
        if config is not None:
            (folder / "adapter_config.json").write_text(json.dumps(dict(config)))
        return folder

    def load(self, name: str, adapter: Adapter, path: Path | None = None) -> int:
        """Load the adapter from its folder, which is written if it does not exist, and check the slot."""
        slot = self.lora.load(name, str(path or self.write(adapter)))
        taken = {other for other, _ in self.loaded.values()}
        if not isinstance(slot, int) or not 0 <= slot < self.max_adapters or slot in taken:
            raise Failed(f"load({name!r}) returned {slot!r}; wanted 0 to {self.max_adapters - 1}, not in {taken}")
        self.loaded[name] = slot, self._own(adapter)
        return slot

    def unload(self, name: str) -> None:
        """Free the adapter's slot."""
        self.lora.unload(name)
        del self.loaded[name]

    def plan(self, names: Sequence[str | None]) -> None:
        """Set the adapter of each token of the next step, None for none."""
        self.lora.plan(self._slots(names))
        self.single = False

    def plan_single(self, names: Sequence[str | None]) -> None:
        """Do the work of `plan` for tokens that have one adapter or none, announced to the plugin."""
        (only,) = {name for name in names if name is not None}
        self.lora.plan_single(self._slots(names), self.loaded[only][0])
        self.single = True

    def _slots(self, names: Sequence[str | None]) -> torch.Tensor:
        self.planned = list(names)
        slots = [-1 if name is None else self.loaded[name][0] for name in names]
        return torch.tensor(slots, dtype=torch.int64, device=self.run.subject.device.type)

    def random(self, *shape: int) -> torch.Tensor:
        """Return normal float32 on the host."""
        return torch.randn(*shape, generator=self._generator)

    def tensors(self, module: str, num_tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random inputs [num_tokens, in_features] and base output [num_tokens, out_features] of a module.

        An embedding's inputs are token ids [num_tokens] int64.
        """
        count = len(self.planned) if num_tokens is None else num_tokens
        device = self.run.subject.device.type
        inner, outer = self.modules[module]
        out = self.random(count, outer).to(device, self.torch_dtype)
        if module == EMBEDDING:
            return torch.randint(inner, (count,), generator=self._generator).to(device), out
        return self.random(count, inner).to(device, self.torch_dtype), out

    def applied(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return a copy of `out` after the plugin has added its contribution."""
        result = out.clone()
        if module in self.rooms and self.in_parts:
            parts = zip(inputs.float().tensor_split(3, 1), self._used(module).float().tensor_split(3, 1), strict=True)
            result = result.float()
            self.lora.expand((module,), torch.stack([part @ room.T for part, room in parts]), result)
            result = result.to(out.dtype)
        elif module in self.rooms:
            self.lora.expand((module,), inputs @ self._used(module).T, result)
        else:
            self.lora.apply(module, inputs, result)
        return result

    def _used(self, module: str) -> torch.Tensor:
        """Return the part of a module's room that is multiplied after the last plan."""
        return self.rooms[module][: self.single_rows[module]] if self.single else self.rooms[module]

    def _extend(self, names: tuple[str, ...], rows: int, max_tokens: int, single_rows: int = 0) -> torch.Tensor:
        """Return room after a module's weight. Only the room itself exists here."""
        (module,) = names
        self.single_rows[module] = single_rows
        device = self.run.subject.device.type
        self.rooms[module] = torch.zeros(rows, self.modules[module][0], dtype=self.torch_dtype, device=device)
        return self.rooms[module]

    def compare(self, module: str, inputs: torch.Tensor, out: torch.Tensor, result: torch.Tensor, what: str) -> None:
        """Compare the result with the oracle, bitwise for tokens without an adapter.

        Raises:
            Failed: naming module, token and adapter.
        """
        adapters = [None if name is None else self.loaded[name][1] for name in self.planned]
        for token, adapter in enumerate(adapters):
            untouched = adapter is None or module not in adapter.weights
            if untouched and not torch.equal(result[token], out[token]):
                error = float((result[token].double() - out[token].double()).abs().max())
                why = "no adapter" if adapter is None else f"{self.planned[token]!r}, which is not on this module"
                raise Failed(f"{what}: {module}, token {token} has {why}, yet its output changed by up to {error:.3g}")
        if adapters:
            if module == EMBEDDING:
                inputs = torch.nn.functional.one_hot(inputs, self.modules[module][0]).to(out.dtype)
            right = expected(module, adapters, inputs, out)
            errors = (result.double() - right.values).abs().amax(dim=-1)
            token = int(errors.nan_to_num(nan=torch.inf).argmax())
            where = f"{what}: {module}, token {token} with adapter {self.planned[token]!r}"
            self.run.measure(error=float(errors[token]), allowed=right.allowed, baseline=right.baseline, what=where)

    def check(self, names: Sequence[str | None], what: str, modules: Sequence[str] | None = None) -> None:
        """Plan, apply and compare on the given modules, or on all."""
        self.plan(names)
        self._check_planned(what, modules)

    def check_single(self, names: Sequence[str | None], what: str) -> None:
        """Do the work of `check` for tokens that have one adapter or none, announced to the plugin."""
        self.plan_single(names)
        self._check_planned(what)

    def _check_planned(self, what: str, modules: Sequence[str] | None = None) -> None:
        for module in self.modules if modules is None else modules:
            inputs, out = self.tensors(module)
            self.compare(module, inputs, out, self.applied(module, inputs, out), what)

    def names(self, num_tokens: int) -> list[str | None]:
        """Return a random adapter or none for each token, in random order, different in each call."""
        return [self.rng.choice([None, *self.loaded]) for _ in range(num_tokens)]

    def fill(self) -> None:
        """Leave large weights of the highest rank in every slot, so that missing overwrites show."""
        loud = self.adapter(self.max_rank, size=1e3)
        path = self.write(loud)
        for index in range(self.max_adapters):
            self.load(f"loud{index}", loud, path)
        self.check([*self.loaded, None], "large weights")
        for name in tuple(self.loaded):
            self.unload(name)


def peft_config(adapter: Adapter) -> dict[str, Any]:
    """Return the configuration that PEFT writes for a plain adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.05,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.weights}),
        "use_rslora": adapter.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }


def modules_of(
    subject: Subject, layers: Sequence[int] = range(LAYERS), sizes: Sequence[tuple[int, int]] = _SIZES
) -> dict[str, tuple[int, int]]:
    """Return layers with up to three of the declared modules each: path -> (in_features, out_features).

    Raises:
        NotApplicable: if none is declared.
    """
    declared = subject.capabilities.target_modules.values
    names = _NAMES if declared is None else tuple(sorted(declared))[:3]
    if not names:
        raise NotApplicable("no target module is declared")
    return {f"model.layers.{layer}.{name}": size for layer in layers for name, size in zip(names, sizes, strict=False)}


def dtypes_of(subject: Subject) -> tuple[str, ...]:
    """Return the declared dtypes that the checks know, float32 first."""
    declared = subject.capabilities.dtypes.values
    known = [name for name in ("float32", "bfloat16", "float16") if declared is None or name in declared]
    if not known:
        raise NotApplicable("no dtype that the checks know is declared")
    return tuple(known)
