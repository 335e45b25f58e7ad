"""The model family: looks at a checkpoint, loads it, and runs flattened tokens through transformers' modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

import slotline.plugins.model_families.lighter_imports  # noqa: F401

# isort: split
from slotline.plugins.model_families import (
    building,
    inspection,
    loading,
    own_stage,
    random_weights,
    saved_model,
    stages,
    structure,
    tried,
)
from slotline.plugins.model_families.adapters import Adaptation
from slotline.plugins.model_families.decoder import VETTED, DecoderOptions
from slotline.plugins.model_families.fast_prefill import keep_wanted
from slotline.plugins.model_families.logits import NoHead, head_of
from slotline.plugins.model_families.loops import LeanLoop, choose_loop, plain_advance, plain_attend
from slotline.plugins.model_families.pooling import make_pooler, reload_pooler
from slotline.plugins.model_families.quantized import inspect as quantized_inspect
from slotline.plugins.model_families.tensor_parallel.expert_growth import GrowingMixtures
from slotline.plugins.model_families.tensor_parallel.expert_routing import idle_pass, own_tokens
from slotline.registry.contracts.lora import ModulePart
from slotline.registry.contracts.model_family import ModelContext, ModelFacts, Shard
from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json

if TYPE_CHECKING:
    import numpy as np

    from slotline.registry.contracts.communicator import Communicator
    from slotline.registry.contracts.family_example import FamilyExample
    from slotline.registry.contracts.model_family import AddShares, Advance, Attend, Tap


class TransformersDecoder:
    """Family of every decoder of `decoder.ARCHITECTURES`. It keeps no state, so one instance may load many models."""

    def __init__(self, context: object = None) -> None:
        """Do nothing, because `load` gets its context later."""

    def takes_on(self, architecture: str) -> bool:
        """See `slotline.registry.contracts.model_family.InspectingFamily.takes_on`."""
        return tried.is_tried(architecture)

    def inspect(
        self, path: Path, *, quantized: bool = False, weights: bool = True, shard: Shard | None = None
    ) -> ModelFacts:
        """See `slotline.registry.contracts.model_family.ModelFamily.inspect`."""
        if quantized:
            return quantized_inspect.inspect(Path(path), weights=weights, shard=shard)
        return inspection.inspect(Path(path), weights=weights, shard=shard)

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        """Return the reason why a forward cannot be captured, or None.

        Copies from the host cannot be captured. The same holds for torch's grouped matrix product, which reads its
        group sizes on the host, except in bfloat16 on CUDA.
        """
        if facts.host_copies and device.startswith("cuda"):
            return f"each forward copies from the host (copies: {facts.host_copies})"
        config = read_json(facts.path / "config.json")
        experts = any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
        if not experts or not device.startswith("cuda") or dtype == "bfloat16":
            return None
        return f"experts synchronise with the host in {dtype}; in bfloat16 they do not"

    def load(self, context: ModelContext) -> DecoderModel:
        """See `slotline.registry.contracts.model_family.ModelFamily.load`."""
        return DecoderModel(context)

    @staticmethod
    def examples() -> Mapping[str, FamilyExample]:
        """See `slotline.registry.contracts.ExampleFamily.examples`."""
        from slotline.plugins.model_families.examples import decoder_examples

        return decoder_examples()


class DecoderModel:
    """Loaded decoder.

    Attributes:
        facts: the facts returned by `inspect`.
        hf_model: the transformers model itself, for plugins that replace its modules.
        pooler: computes answers from hidden states. None if tokens are generated.
        notes: changes made while loading, in words.
        load_seconds: wall time of loading, probes included.
        weight_bytes: bytes of all parameters and buffers, those in host memory included.
    """

    def __init__(self, context: ModelContext) -> None:
        started = time.perf_counter()
        self.facts = context.facts
        self._context = context
        built = building.build(context, self._load)
        self.hf_model, self._holder, self._origin = built.hf_model, built.holder, built.origin
        self._divided, self._token_division = built.parts, built.tokens
        self._parts = own_stage.parts_of(self.hf_model, context)
        self._tensors = _tensors(self.hf_model)  # the objects themselves: names change when a plugin wraps a module
        self.pooler, pooling_notes = make_pooler(context, self.hf_model)
        vetted = type(self.hf_model).__name__ in VETTED
        has_head = self.pooler is None and own_stage.gives_logits(self.hf_model, context.own_stage)
        self._head = head_of(self.hf_model, vetted=vetted) if has_head else NoHead(self.hf_model)
        options = context.options if isinstance(context.options, DecoderOptions) else DecoderOptions()
        stage = own_stage.own_stage(self.hf_model, context.own_stage)
        if stage is not None:
            self._loop, loop_notes = own_stage.choose_stage_loop(
                self.hf_model, self._holder, stage, self._parts[0], lean=options.lean, tokens=built.tokens
            )
        else:
            self._loop, loop_notes = choose_loop(
                self.hf_model,
                self._holder,
                self._head,
                self._parts,
                lean=options.lean,
                known=self._origin.lean,
                tokens=built.tokens,
            )
            keep_wanted(self.hf_model, self.facts.layers, self._holder)
        self._origin.lean = isinstance(self._loop, LeanLoop)
        if context.compiler:
            from slotline.plugins.model_families.compiled import compiled

            self._loop, compiled_notes = compiled(self.hf_model, self._loop, context.compiler)
            loop_notes += compiled_notes
        self.notes: tuple[str, ...] = built.notes + loop_notes + pooling_notes
        self._adaptation: Adaptation | None = None  # most engines have no adapters
        self._idle: Callable[[], None] | None = None  # made when it is first needed
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())
        self.load_seconds = time.perf_counter() - started

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        advance: Advance | None = None,
        tap: Tap | None = None,
        fast_prefill: bool = False,
        received: torch.Tensor | None = None,
        position_offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `slotline.registry.contracts.model_family.MultimodalModel.forward` and `StageModel.forward`."""
        if received is not None:
            inputs_embeds = received
        if position_offsets is not None:
            positions = positions + position_offsets  # [axes, num_tokens]
        if fast_prefill:
            with self._holder.serving(attend, advance, wanted):
                return self._loop(input_ids, positions, None, inputs_embeds, tap)[0]  # [n, hidden_size]
        if wanted is not None and self._adaptation and self._adaptation.active:  # which are planned for all tokens
            return self.forward(input_ids, positions, attend, None, inputs_embeds, advance=advance, tap=tap)[wanted]
        with self._holder.serving(attend, advance):
            return self._loop(input_ids, positions, wanted, inputs_embeds, tap)[0]  # [n, hidden_size]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] float32 of hidden states [n, hidden_size]."""
        return self._head(hidden_states)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [num_tokens, hidden_size] of tokens [num_tokens] int64."""
        embeddings: torch.Tensor = self.hf_model.get_input_embeddings()(input_ids)
        return embeddings if self._embedding_scale is None else embeddings * self._embedding_scale

    @cached_property
    def _embedding_scale(self) -> float | None:
        return structure.embedding_scale(self.hf_model.base_model)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """See `slotline.registry.contracts.model_family.AdaptableModel`."""
        return self._adaptable().linears

    @property
    def merged_linears(self) -> tuple[tuple[str, ...], ...]:
        """See `slotline.registry.contracts.model_family.AdaptableModel`."""
        return self._adaptable().merged

    @property
    def embeddings(self) -> dict[str, tuple[int, int]]:
        """See `slotline.registry.contracts.model_family.AdaptableModel`."""
        return self._adaptable().embeddings

    @property
    def adapter_stages(self) -> dict[str, int]:
        """See `slotline.registry.contracts.model_family.AdaptableModel`."""
        return self._adaptable().stages(stages.stage_of(self.hf_model, self._parts))

    @property
    def adapter_parts(self) -> Mapping[str, ModulePart]:
        """See `slotline.registry.contracts.model_family.AdaptableModel`."""
        return self._divided

    def adapt(self, add: AddShares | None, names: Collection[str] = (), *, single: bool = False) -> None:
        """See `slotline.registry.contracts.model_family.AdaptableModel.adapt`."""
        self._adaptable().adapt(add, names, single=single)

    def extend(
        self, names: tuple[str, ...], rows: int, max_tokens: int, *, single_rows: int = 0
    ) -> torch.Tensor | None:
        """See `slotline.registry.contracts.model_family.AdaptableModel.extend`."""
        if self._context.offload_bytes:
            return None
        return self._adaptable().extend(names, rows, max_tokens, single_rows=single_rows)

    def add_to_weight(self, name: str, delta: torch.Tensor) -> None:
        """See `slotline.registry.contracts.model_family.AdaptableModel.add_to_weight`."""
        self._adaptable().add_to_weight(name, delta)

    def reload_weights(self, path: Path | None = None) -> None:
        """Read the weights again, in place: addresses stay, so captured graphs stay valid.

        The new weights pass through host memory. If passes have changed the model, a second copy of it is on the device
        while this runs, since the passes must run over the new weights too.

        Args:
            path: another checkpoint's folder, for weights of the same names and shapes. None for the same one.

        Raises:
            ModelError: if the weights are missing or do not fit the loaded model any more.
        """
        facts = self.facts if path is None else evolve(self.facts, path=path)
        form = self._context.load_format if path is None else building.format_of(path)
        context = evolve(self._context, facts=facts, load_format=form)
        passed = context.optimize or form == "sharded"
        new = building.build(context, self._load).hf_model if passed else building.read_plain(context, self._load)
        loading.copy_weights(self._tensors, _tensors(new), facts.path)
        reload_pooler(self.pooler, facts.path)
        self.facts, self._context = facts, context

    def save_weights(self, folder: Path) -> None:
        """See `slotline.registry.contracts.model_family.SavingModel.save_weights`."""
        if self._context.shard is not None:
            raise ModelError(
                f"the weights are divided among {self._context.shard.size} ranks, and each has a part of them",
                fix="save them from an engine with parallel.tensor = 1",
            )
        saved_model.save(Path(folder), self._origin, self._tensors, self._context, lambda other: self._load(other)[0])

    def expert_loads(self) -> Sequence[torch.Tensor]:
        """See `slotline.registry.contracts.model_family.MixtureModel.expert_loads`."""
        return self._mixtures.loads()

    def expert_placements(self) -> Sequence[np.ndarray[Any, Any]]:
        """See `slotline.registry.contracts.model_family.MixtureModel.expert_placements`."""
        return self._mixtures.placements()

    def place_experts(self, placements: Sequence[np.ndarray[Any, Any]]) -> int:
        """See `slotline.registry.contracts.model_family.MixtureModel.place_experts`."""
        return self._mixtures.place(placements)

    def join_experts(self, communicator: Communicator) -> None:
        """See `slotline.registry.contracts.model_family.GrowingMixtureModel.join_experts`."""
        self._mixtures.join(communicator)
        self._context = evolve(self._context, communicator=communicator)

    def resize_experts(
        self,
        held: Sequence[Sequence[np.ndarray[Any, Any]]],
        placements: Sequence[np.ndarray[Any, Any]],
        ranks: int,
        shard: Shard | None,
    ) -> int:
        """See `slotline.registry.contracts.model_family.GrowingMixtureModel.resize_experts`."""
        came = self._mixtures.resize(held, placements, ranks)
        self._context = evolve(self._context, shard=shard or self._context.shard)
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())
        return came

    def idle_experts(self, pieces: int = 1) -> None:
        """See `slotline.registry.contracts.model_family.MixtureModel.idle_experts`."""
        if pieces > 1:
            self.forward_pieces([None] * pieces)
        else:
            self._idle_pass()

    def forward_pieces(self, pieces: Sequence[tuple[Any, ...] | None]) -> list[torch.Tensor | None]:
        """See `slotline.registry.contracts.model_family.MixtureModel.forward_pieces`."""
        from slotline.plugins.model_families.tensor_parallel.turns import in_turns

        calls = [self._idle_pass if piece is None else partial(self.forward, *piece) for piece in pieces]
        return in_turns(calls, own_tokens(self.hf_model), self._holder)

    def _idle_pass(self) -> None:
        if self._idle is None:
            self._idle = idle_pass(self.hf_model)
        self._idle()

    def gather_experts(self, *, gathers: bool) -> None:
        """See `slotline.registry.contracts.model_family.MixtureModel.gather_experts`."""
        for form in own_tokens(self.hf_model):
            form.gathers = gathers

    @property
    def _mixtures(self) -> GrowingMixtures:
        assert self._context.communicator is not None
        return GrowingMixtures(self.hf_model, self._context.communicator)

    def _adaptable(self) -> Adaptation:
        """Linear layers of the model, found on first use."""
        self._adaptation = self._adaptation or Adaptation(self.hf_model, self._probe)
        return self._adaptation

    def _probe(self, num_tokens: int) -> None:
        """Run a forward pass of some tokens, with attention and states that keep nothing."""
        device = next(self.hf_model.parameters()).device
        tokens, received = torch.arange(num_tokens, device=device), None
        stage = own_stage.own_stage(self.hf_model, self._context.own_stage)
        if stage is not None and not stage.is_first:
            received = torch.zeros(num_tokens, self.facts.hidden_size, dtype=self.hf_model.dtype, device=device)
        with torch.no_grad(), self._holder.serving(plain_attend, plain_advance):
            hidden = self._loop(tokens, tokens, None, received, None)[0]
            if stage is None or stage.is_last:
                self._head(hidden)

    def _load(self, context: ModelContext) -> tuple[Any, torch.nn.Module | None]:
        """Return the decoder in host memory, and the encoder of its other inputs if it takes any."""
        if context.load_format == "dummy":
            return random_weights.random_model(context), None
        return loading.load_transformers_model(context), None


def _tensors(hf_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(hf_model.named_parameters()) | dict(hf_model.named_buffers())
