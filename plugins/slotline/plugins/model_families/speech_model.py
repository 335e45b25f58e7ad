"""The model family for speech: Whisper's encoder runs once for a recording, its decoder token by token through slots.

The decoder's self-attention is any decoder's. Its cross-attention makes keys and values of the encoder's states when a
request begins, and reads them from the cache from then on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from slotline.plugins.model_families import binding, checkpoint, inspection, loading, offload, weight_sizes
from slotline.plugins.model_families.audio_processing import AudioProcessing
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.speech import ARCHITECTURES
from slotline.plugins.model_families.tensor_parallel.collectives import Joined, install
from slotline.plugins.model_families.tensor_parallel.division import divide
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.model_family import Modality, ModelContext, ModelFacts, ProcessedItem, Shard

if TYPE_CHECKING:
    from slotline.registry.contracts.model_family import Attend

NO_TOKEN = -1
CROSS_ATTENTION = "encoder_attn"
"""What transformers calls the modules of a decoder layer that read the encoder."""


class TransformersSpeech:
    """Family of every model of `speech.ARCHITECTURES`. It keeps no state, so one instance may load many models."""

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
        config = found.config
        with inspection.sizes_that_fit(found):
            notes = () if shard is None else divide(model, shard, model.model.decoder).notes
            layers = _watch(model, found)
        return ModelFacts(
            architecture=found.architecture,
            path=found.path,
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.d_model),
            max_model_len=int(config.max_target_positions),
            dtype=found.dtype,
            layers=layers,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            eos_token_ids=found.eos_token_ids,
            modalities=(Modality(name="audio", placeholder_token_id=NO_TOKEN, cross=True),),
            max_encoder_len=int(config.max_source_positions),
            notes=notes,
        )

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        """Return None, because the core itself captures no cross-attention."""
        return None

    def load(self, context: ModelContext) -> SpeechModel:
        """See `slotline.registry.contracts.model_family.ModelFamily.load`."""
        return SpeechModel(context)


class SpeechModel:
    """A loaded model. Implements `MultimodalModel`.

    Attributes:
        facts: what `inspect` found.
        hf_model: the transformers model itself.
        pooler: None: it generates.
        notes: what was done while loading, in words.
    """

    pooler = None

    def __init__(self, context: ModelContext) -> None:
        self.facts, self._context = context.facts, context
        self.hf_model, joined = self._read(context)
        self._holder = binding.bind(self.hf_model, context.facts.layers)
        self._device = torch.device(context.device)
        self.notes: tuple[str, ...] = offload.place_whole(self.hf_model, self._device, context.offload_bytes)
        if joined is not None:
            assert context.communicator is not None
            install(self.hf_model, joined, context.communicator)
        (modality,) = context.facts.modalities
        self._processing = AudioProcessing(context.facts.path, modality, context.facts.max_encoder_len)
        self._no_states = torch.zeros((0, context.facts.hidden_size), dtype=self.hf_model.dtype, device=self._device)

    def process(self, modality: str, item: Any) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.MultimodalModel.process`."""
        return self._processing.process(item)

    def example(self, modality: str) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.MultimodalModel.example`."""
        return self._processing.example()

    @torch.inference_mode()
    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the encoder's states [max_encoder_len, hidden_size] of each recording, all computed in one call."""
        features = torch.stack([item["input_features"] for item in items])  # [items, mel bins, frames]
        states = self.hf_model.model.encoder(features.to(self._device, self.hf_model.dtype)).last_hidden_state
        return list(states)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [num_tokens, hidden_size] of tokens [num_tokens] int64."""
        embeddings: torch.Tensor = self.hf_model.model.decoder.embed_tokens(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        encoder_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `slotline.registry.contracts.model_family.MultimodalModel.forward`."""
        states = self._no_states if encoder_states is None else encoder_states
        with self._holder.serving(attend):
            hidden: torch.Tensor = self.hf_model.model.decoder(
                input_ids=input_ids[None],
                position_ids=positions[None],
                encoder_hidden_states=states[None],
                use_cache=False,
            ).last_hidden_state[0]
        return hidden if wanted is None else hidden[wanted]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] float32 of hidden states [n, hidden_size]."""
        logits: torch.Tensor = self.hf_model.proj_out(hidden_states).float()
        return logits

    def reload_weights(self, path: Path | None = None) -> None:
        """Read the weights again, in place.

        Args:
            path: another checkpoint's folder, for weights of the same names and shapes. None for the same one.

        Raises:
            ModelError: if the weights are missing or do not fit the loaded model.
        """
        facts = self.facts if path is None else evolve(self.facts, path=path)
        new = self._read(evolve(self._context, facts=facts))[0].state_dict()
        loading.copy_weights(self.hf_model.state_dict(), new, facts.path)
        self.facts = facts

    @staticmethod
    def _read(context: ModelContext) -> tuple[Any, Joined | None]:
        """Return the model, with transformers' own attention in its encoder and slots in its decoder.

        With a shard, the decoder is a rank's part, and the second result says where the ranks join its outputs.
        """
        found = checkpoint.read(context.facts.path, ARCHITECTURES)
        hf_model = loading.load_transformers_model(context, found, attention="sdpa")
        config = copy.deepcopy(hf_model.config)
        config._attn_implementation = binding.ATTENTION_NAME
        for module in hf_model.model.decoder.modules():
            if hasattr(module, "config"):
                module.config = config
        decoder = hf_model.model.decoder
        return hf_model, None if context.shard is None else divide(hf_model, context.shard, decoder)


def _watch(model: Any, found: Checkpoint) -> tuple[AttentionLayer, ...]:
    """Return the decoder's attention layers in call order."""
    length = int(found.config.max_target_positions)
    recorder = inspection.Recorder({module: name for name, module in model.named_modules()}, length)
    for module in model.modules():
        setattr(module, binding.SLOT_ATTRIBUTE, recorder)
    tokens = torch.zeros((1, inspection.PROBE_TOKENS), dtype=torch.int64, device="meta")
    states = torch.zeros((1, inspection.PROBE_TOKENS, found.config.d_model), device="meta")
    with torch.no_grad():
        model.model.decoder(input_ids=tokens, position_ids=tokens, encoder_hidden_states=states, use_cache=False)
    return tuple(
        evolve(layer, attention_type="cross", kv_kind="cross") if CROSS_ATTENTION in layer.name else layer
        for layer in recorder.layers
    )
