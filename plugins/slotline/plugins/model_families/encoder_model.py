"""The model family for encoders: prompts go through transformers' modules whole and side by side, attention to slots.

An encoder keeps no keys: all tokens of a prompt are in the step that computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

import slotline.plugins.model_families.lighter_imports  # noqa: F401

# isort: split
from slotline.plugins.model_families import (
    binding,
    checkpoint,
    inspection,
    loading,
    offload,
    weight_sizes,
)
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.encoder import ARCHITECTURES, CLASSIFIERS, TAGGERS
from slotline.plugins.model_families.logits import NoHead
from slotline.plugins.model_families.passes.pipeline import ENCODER_PASSES, apply_passes, target_for
from slotline.plugins.model_families.pooling import make_encoder_pooler, reload_pooler
from slotline.plugins.model_families.tensor_parallel.collectives import Joined, install
from slotline.plugins.model_families.tensor_parallel.division import divide
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.model_family import ModelContext, ModelFacts, Shard

if TYPE_CHECKING:
    from slotline.registry.contracts.family_example import FamilyExample
    from slotline.registry.contracts.model_family import Attend

PROBE_TOKENS = 2


class TransformersEncoder:
    """Family of every model of `encoder.ARCHITECTURES`. It keeps no state, so one instance may load many models."""

    def __init__(self, context: object = None) -> None:
        """Do nothing, because `load` gets its context later."""

    def inspect(self, path: Path, *, quantized: bool = False, shard: Shard | None = None) -> ModelFacts:
        """See `slotline.registry.contracts.model_family.ModelFamily.inspect`."""
        found = checkpoint.read(Path(path), ARCHITECTURES)
        weight_sizes.require_weights(found)
        binding.register(inspection.INSPECT_NAME, inspection.recording_attention)
        found.config._attn_implementation = inspection.INSPECT_NAME
        with inspection.sizes_that_fit(found), torch.device("meta"):
            model = found.model_class(found.config).eval()
        length = found.max_model_len - _first_position(found)
        with inspection.sizes_that_fit(found):
            notes = () if shard is None else divide(model, shard).notes
            layers = _watch(model, length)
        return ModelFacts(
            architecture=found.architecture,
            path=found.path,
            vocab_size=int(found.config.vocab_size),
            hidden_size=int(found.config.hidden_size),
            max_model_len=length,
            dtype=found.dtype,
            layers=layers,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            tasks=_tasks(found.architecture),
            notes=notes,
            token_types=int(getattr(found.config, "type_vocab_size", 1) or 1),
        )

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        """Return None, because its modules never synchronise."""
        return None

    def load(self, context: ModelContext) -> EncoderModel:
        """See `slotline.registry.contracts.model_family.ModelFamily.load`."""
        return EncoderModel(context)

    @staticmethod
    def examples() -> Mapping[str, FamilyExample]:
        """See `slotline.registry.contracts.ExampleFamily.examples`."""
        from slotline.plugins.model_families.examples import encoder_examples

        return encoder_examples()


class EncoderModel:
    """A loaded encoder.

    Attributes:
        facts: what `inspect` found.
        hf_model: the transformers model itself.
        pooler: what makes answers of hidden states.
        notes: what was done while loading, in words.
    """

    def __init__(self, context: ModelContext) -> None:
        self.facts, self._context = context.facts, context
        found = checkpoint.read(context.facts.path, ARCHITECTURES)
        self._first_position = _first_position(found)
        self.hf_model, joined, passed = self._read(context)
        self._holder = binding.bind(self.hf_model, context.facts.layers)
        device = torch.device(context.device)
        self.notes: tuple[str, ...] = offload.place_whole(self.hf_model, device, context.offload_bytes)
        if joined is not None:
            assert context.communicator is not None
            install(self.hf_model, joined, context.communicator)
        self.pooler, notes = make_encoder_pooler(context, self.hf_model)
        self._head = NoHead(self.hf_model)
        self.notes += passed + notes

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        *,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `slotline.registry.contracts.model_family.TypedModel.forward`."""
        kwargs = {}
        if hasattr(self.hf_model.config, "type_vocab_size"):
            kwargs["token_type_ids"] = (torch.zeros_like(input_ids) if token_types is None else token_types)[None]
        with self._holder.serving(attend):
            hidden: torch.Tensor = self.hf_model.base_model(
                input_ids=input_ids[None], position_ids=(positions + self._first_position)[None], **kwargs
            ).last_hidden_state[0]
        return hidden if wanted is None else hidden[wanted]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [n, hidden_size] float32, because an encoder has no logits."""
        return self._head(hidden_states)

    def reload_weights(self, path: Path | None = None) -> None:
        """Read the weights again, in place.

        Args:
            path: another checkpoint's folder, for weights of the same names and shapes. None for the same one.

        Raises:
            ModelError: if the weights are missing or do not fit the loaded model.
        """
        facts = self.facts if path is None else evolve(self.facts, path=path)
        new = self._read(evolve(self._context, facts=facts))[0]
        loading.copy_weights(_tensors(self.hf_model), _tensors(new), facts.path)
        reload_pooler(self.pooler, facts.path)
        self.facts = facts

    @staticmethod
    def _read(context: ModelContext) -> tuple[Any, Joined | None, tuple[str, ...]]:
        """Return the model, or a rank's part of it and where the ranks join their outputs, and notes on passes."""
        hf_model = loading.load_transformers_model(context, checkpoint.read(context.facts.path, ARCHITECTURES))
        if context.shard is not None:
            return hf_model, divide(hf_model, context.shard), ()
        target = target_for(context.device, context.dtype, captured=False)
        if not context.optimize or not target.packs:
            return hf_model, None, ()
        return hf_model, None, apply_passes(hf_model, target, ENCODER_PASSES)


def _tensors(hf_model: Any) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, packed weights included."""
    return {**dict(hf_model.named_parameters()), **dict(hf_model.named_buffers())}


def _tasks(architecture: str) -> tuple[str, ...]:
    if architecture in TAGGERS:
        return ("token_classify",)
    return ("classify",) if architecture in CLASSIFIERS else ("embed",)


def _first_position(found: Checkpoint) -> int:
    """Return the position of a prompt's first token.

    RoBERTa and related models count from after the padding token's id.
    """
    counts_from_padding = found.config.model_type in ("roberta", "xlm-roberta", "camembert")
    return int(found.config.pad_token_id) + 1 if counts_from_padding else 0


def _watch(model: Any, max_model_len: int) -> tuple[AttentionLayer, ...]:
    """Return the attention layers in call order. All see the whole prompt, and none keeps anything."""
    recorder = inspection.Recorder({module: name for name, module in model.named_modules()}, max_model_len)
    for module in model.modules():
        setattr(module, binding.SLOT_ATTRIBUTE, recorder)
    tokens = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device="meta")
    with torch.no_grad():
        model.base_model(input_ids=tokens, position_ids=tokens)
    return tuple(
        evolve(layer, attention_type="encoder_only", kv_kind="encoder_only", edges=()) for layer in recorder.layers
    )
