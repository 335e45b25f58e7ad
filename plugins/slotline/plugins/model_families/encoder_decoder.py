"""What models with an encoder in front of a decoder have in common. The decoder runs token by token through slots.

The decoder's self-attention is any decoder's. Its cross-attention makes keys and values of the encoder's states when a
request begins, and reads them from the cache from then on.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
    positions,
    relative_positions,
)
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.tensor_parallel.collectives import Joined, install
from slotline.plugins.model_families.tensor_parallel.division import divide
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.model_family import ModelContext, Shard
from slotline.registry.errors import ModelError

if TYPE_CHECKING:
    from slotline.registry.contracts.model_family import Attend

CROSS_ATTENTION = ("encoder_attn", "EncDecAttention")
"""What transformers calls the modules of a decoder layer that read the encoder."""


class EncoderDecoderModel:
    """A loaded model, without what reads its encoder's inputs. A subclass adds that for `MultimodalModel`.

    Attributes:
        architectures: the architectures that it may be of.
        facts: what `inspect` found.
        hf_model: the transformers model itself.
        decoder: its decoder.
        pooler: None: it generates.
        notes: what was done while loading, in words.
    """

    architectures: ClassVar[tuple[str, ...]]
    pooler = None

    def __init__(self, context: ModelContext) -> None:
        self.facts, self._context = context.facts, context
        self.hf_model, joined = self._read(context)
        self.decoder = self.hf_model.get_decoder()
        self._holder = binding.bind(self.hf_model, context.facts.layers)
        self._device = torch.device(context.device)
        self.notes: tuple[str, ...] = offload.place_whole(self.hf_model, self._device, context.offload_bytes)
        if joined is not None:
            assert context.communicator is not None
            install(self.hf_model, joined, context.communicator)
        self._one_state = torch.zeros((1, context.facts.hidden_size), dtype=self.hf_model.dtype, device=self._device)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [num_tokens, hidden_size] of tokens [num_tokens] int64."""
        embeddings: torch.Tensor = self.decoder.embed_tokens(input_ids)
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
        states = self._one_state if encoder_states is None else encoder_states  # modules cannot view an empty tensor
        with self._holder.serving(attend if encoder_states is not None else _without_new_keys(attend)):
            hidden: torch.Tensor = self.decoder(
                input_ids=input_ids[None],
                position_ids=positions[None],
                encoder_hidden_states=states[None],
                use_cache=False,
            ).last_hidden_state[0]
        return hidden if wanted is None else hidden[wanted]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] float32 of hidden states [n, hidden_size]."""
        logits: torch.Tensor = self.hf_model.get_output_embeddings()(hidden_states).float()
        return logits

    def reload_weights(self, path: Path | None = None) -> None:
        """Read the weights again, in place.

        Args:
            path: another checkpoint's folder, for weights of the same names and shapes. None for the same one.

        Raises:
            ModelError: if the weights are missing or do not fit the loaded model.
        """
        facts = self.facts if path is None else evolve(self.facts, path=path)
        self._require_same_bias(facts.path)
        new = self._read(evolve(self._context, facts=facts))[0].state_dict()
        loading.copy_weights(self.hf_model.state_dict(), new, facts.path)
        self.facts = facts

    def _require_same_bias(self, path: Path) -> None:
        """Refuse weights with other biases of scores: the attention backend has those of the first ones.

        Raises:
            ModelError: if they differ.
        """
        bias = next((layer.position_bias for layer in self.facts.layers if layer.position_bias), None)
        if bias is not None and bias != relative_positions.decoder_bias(path, self.hf_model):
            raise ModelError(
                f"{path} has other relative positions than the weights in use", fix="build a new LLM for it"
            )

    def _read(self, context: ModelContext) -> tuple[Any, Joined | None]:
        """Return the model, with transformers' own attention in its encoder and slots in its decoder.

        With a shard, the decoder is a rank's part, and the second result says where the ranks join its outputs.
        """
        found = checkpoint.read(context.facts.path, self.architectures)
        hf_model = loading.load_transformers_model(context, found, attention="sdpa")
        config = copy.deepcopy(hf_model.config)
        config._attn_implementation = binding.ATTENTION_NAME
        decoder = hf_model.get_decoder()
        for module in decoder.modules():
            if hasattr(module, "config"):
                module.config = config
        positions.pass_to(decoder)
        relative_positions.leave_out(decoder)
        return hf_model, None if context.shard is None else divide(hf_model, context.shard, decoder)


def _without_new_keys(attend: Attend) -> Attend:
    """Return `attend` that gets no new keys and values from layers that read the encoder."""

    def call(
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        count = 0 if layer.attention_type == "cross" else len(key)
        return attend(layer, query, key[:count], value[:count], sinks)

    return call


def look_at(found: Checkpoint, max_model_len: int, shard: Shard | None) -> dict[str, Any]:
    """Return what a model without memory shows: its layers, parameters and notes, by their names in the facts.

    Raises:
        ModelError: if no model can be built from the configuration, or it does not run.
        NegotiationError: if its layers cannot be divided so.
    """
    binding.register(inspection.INSPECT_NAME, inspection.recording_attention)
    found.config._attn_implementation = inspection.INSPECT_NAME
    with inspection.sizes_that_fit(found):
        with torch.device("meta"):
            model = found.model_class(found.config).eval()
        notes = () if shard is None else divide(model, shard, model.get_decoder()).notes
        layers = _watch(model, max_model_len)
    if found.config.model_type == "t5":
        bias = relative_positions.decoder_bias(found.path, model)
        layers = tuple(evolve(each, position_bias=None if each.attention_type == "cross" else bias) for each in layers)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"layers": layers, "num_parameters": num_parameters, "notes": notes}


def _watch(model: Any, max_model_len: int) -> tuple[AttentionLayer, ...]:
    """Return the decoder's attention layers in call order."""
    recorder = inspection.Recorder({module: name for name, module in model.named_modules()}, max_model_len)
    for module in model.modules():
        setattr(module, binding.SLOT_ATTRIBUTE, recorder)
    tokens = torch.zeros((1, inspection.PROBE_TOKENS), dtype=torch.int64, device="meta")
    states = torch.zeros((1, inspection.PROBE_TOKENS, model.config.d_model), device="meta")
    decoder = model.get_decoder()
    positions.pass_to(decoder)
    relative_positions.leave_out(decoder)
    with torch.no_grad():
        decoder(input_ids=tokens, position_ids=tokens, encoder_hidden_states=states, use_cache=False)
    return tuple(
        evolve(layer, attention_type="cross", kv_kind="cross", edges=())
        if layer.name.endswith(CROSS_ATTENTION)
        else layer
        for layer in recorder.layers
    )
