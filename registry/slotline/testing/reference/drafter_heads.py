"""Drafter of a published EAGLE-3 or DFlash head or Medusa heads, for clarity: all is computed again each time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from slotline.registry.capability import Max, Set
from slotline.registry.contracts import ComputedTokens, Draft, DraftBatch, DrafterCapabilities, DrafterContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ModelError
from slotline.testing.oracles.draft_heads import NUM_LAYERS, dflash_block, eagle_chain, medusa_chain, read_head

_FIX = "use the config.json that belongs to these weights"
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "target_hidden_size": (None, 16),
    "norm_before_fc": (None, False),
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
    "parallel_draft_step": (None, 1),
    "num_hidden_layers": (None, 1),
    "layer_types": (None,),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
}


class PublishedHead:
    """Common parts: settings and weights of the folder, with everything refused that the oracle does not compute."""

    form = ""

    def __init__(self, context: DrafterContext) -> None:
        if context.path is None:
            raise ModelError("no head is named", fix="set drafter.path to its folder")
        self.context, self.path = context, Path(context.path)
        settings, weights = read_head(self.path)
        self.settings = self.served(settings)
        self.refuse(self.settings, weights)
        self.weights = weights
        assert context.embed is not None
        self.table: torch.Tensor = context.embed(torch.arange(context.vocab_size)).cpu()

    def served(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that count."""
        return settings

    def refuse(self, settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        """Refuse what the oracle does not compute.

        Raises:
            ModelError: naming the field or the weight.
        """
        context = self.context
        sizes = {"hidden_size": (None, context.hidden_size), "vocab_size": (None, context.vocab_size)}
        for where in (settings, settings.get("eagle_config") or {}):
            for name, usual in {**_USUAL, **sizes}.items():
                if where.get(name) not in usual:
                    raise ModelError(f"{name} is {where[name]!r}", fix=_FIX)
        for name in ("rope_parameters", "rope_scaling"):
            rope = settings.get(name) or {}
            if rope.get("rope_type") == "dynamic" or "partial_rotary_factor" in rope:
                raise ModelError(f"{name} is {rope!r}", fix=_FIX)
        if strange := [name for name in weights if any(part in name for part in self.strange(settings))]:
            raise ModelError(f"there is no place for {strange[0]}", fix=_FIX)

    def strange(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return parts of the names of weights that have no place."""
        return ("q_norm", "k_norm", "sinks", "fc_norm", *(() if settings.get("mlp_bias") else ("mlp.gate_proj.bias",)))

    def release(self, row: int) -> None:
        """Keep nothing that must go."""

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Begin with nothing."""


class RecomputedEagle3(PublishedHead):
    """EAGLE-3, from hidden states that it keeps for each row."""

    form = "eagle3"

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        more = self.settings.get("eagle_config") or {}
        ids = more.get("eagle_aux_hidden_state_layer_ids") or self.settings.get("eagle_aux_hidden_state_layer_ids")
        layers = 4 if context.facts is None else len(context.facts.layers)
        self.layer_ids = tuple(ids or (2, layers // 2, layers - 3))
        self.seen: dict[int, dict[int, tuple[torch.Tensor, int]]] = {}  # row -> position -> states, the next token

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Begin with nothing."""
        self.seen[row] = {}

    def preempt(self, row: int) -> None:
        """Begin again."""
        self.seen[row] = {}

    def release(self, row: int) -> None:
        """Forget the row."""
        del self.seen[row]

    def observe(self, computed: ComputedTokens) -> None:
        """Keep the states of the tokens of each row."""
        assert computed.served is not None
        assert computed.layer_hidden_states is not None
        starts = computed.query_start_loc.tolist()
        for index, row in enumerate(computed.rows.tolist()):
            if computed.served[index]:
                for place in range(starts[index], starts[index + 1]):
                    kept = computed.layer_hidden_states[place].cpu(), int(computed.next_token_ids[place])
                    self.seen[row][int(computed.positions[place])] = kept

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose the chain of the oracle."""
        ids = [
            self.chain(self.seen[row], newest, position)
            for row, newest, position in zip(
                batch.rows.tolist(), batch.last_token_ids.tolist(), batch.positions.tolist(), strict=True
            )
        ]
        found = torch.tensor(ids, dtype=torch.int64).view(len(ids), self.context.num_tokens)
        return Draft(token_ids=found.to(self.context.device))

    def chain(self, seen: Mapping[int, tuple[torch.Tensor, int]], newest: int, position: int) -> list[int]:
        """Return the draft after the newest token, which is at `position`."""
        if any(place not in seen for place in range(position)):
            return [-1] * self.context.num_tokens
        states = [seen[place][0] for place in range(position)]
        following = [*(seen[place][1] for place in range(position - 1)), newest]
        count = self.context.num_tokens
        return eagle_chain(self.form, self.settings, self.weights, self.table, states, following, count)[0]


class RecomputedDFlash(RecomputedEagle3):
    """DFlash, from hidden states that it keeps for each row."""

    form = "dflash"

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.layer_ids = tuple(1 + layer for layer in self.settings["dflash_config"]["target_layer_ids"])

    def refuse(self, settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        """Refuse what contradicts the model or the weights, or is not computed here."""
        super().refuse({**settings, "layer_types": None, "num_hidden_layers": None}, weights)
        layers, own, vocab = settings["num_hidden_layers"], settings["dflash_config"], self.context.vocab_size
        kinds, ids = settings.get("layer_types") or ["full_attention"] * layers, own["target_layer_ids"]
        size = own.get("block_size") or settings.get("block_size") or 0
        wrong = {
            "draft_vocab_size": settings.get("draft_vocab_size") not in (None, vocab),
            "num_target_layers": settings.get("num_target_layers") not in (None, NUM_LAYERS),
            "num_hidden_layers": f"layers.{layers - 1}.mlp.up_proj.weight" not in weights,
            "layer_types": len(kinds) != layers or bool({*kinds} - {"full_attention", "sliding_attention"}),
            "block_size": size <= self.context.num_tokens,
            "mask_token_id": own.get("mask_token_id") not in range(vocab),
            "target_layer_ids": not 0 <= min(ids) <= max(ids) < NUM_LAYERS - 1,
        }
        wrong |= {name: bool(value) for name, value in own.items() if name not in wrong}
        if names := [name for name, found in wrong.items() if found]:
            raise ModelError(f"{names[0]} is another one than the model or the weights have", fix=_FIX)

    def strange(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return parts of the names of weights that have no place."""
        more = () if settings.get("mlp_bias") else ("mlp.gate_proj.bias",)
        return ("sinks", f"layers.{settings.get('num_hidden_layers') or self.settings['num_hidden_layers']}.", *more)

    def chain(self, seen: Mapping[int, tuple[torch.Tensor, int]], newest: int, position: int) -> list[int]:
        """Return the draft after the newest token, which is at `position`."""
        count = self.context.num_tokens
        if any(place not in seen for place in range(position)):
            return [-1] * count
        states = [seen[place][0] for place in range(position)]
        return dflash_block(self.settings, self.weights, self.table, states, newest, count)[0]


class RecomputedMedusa(PublishedHead):
    """Medusa, from the last hidden states."""

    form = "medusa"

    def refuse(self, settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        """Refuse more heads than there are, and a vocabulary that needs a token map."""
        super().refuse(settings, weights)
        for name in ("medusa_num_heads", "medusa_num_layers"):
            if settings[name] > len(weights):
                raise ModelError(f"{name} is {settings[name]}, and there are {len(weights)} weights", fix=_FIX)
        if settings.get("truncated_vocab_size") not in (None, self.context.vocab_size):
            raise ModelError(f"truncated_vocab_size is {settings['truncated_vocab_size']}", fix=_FIX)

    def strange(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return parts of the names of weights that have no place."""
        layers = settings["medusa_num_layers"]
        return (f"0.{layers}.linear", "norm")

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose the heads' likeliest tokens."""
        assert batch.hidden_states is not None
        count = self.context.num_tokens
        ids = [
            medusa_chain(self.settings, self.weights, self.table, state, count)[0]
            for state in batch.hidden_states.cpu()
        ]
        found = torch.tensor(ids, dtype=torch.int64).view(len(ids), count)
        return Draft(token_ids=found.to(self.context.device))


eagle3 = Descriptor(
    kind=Kind.DRAFTER,
    name="reference_eagle3",
    summary="an EAGLE-3 head, computed again for each draft",
    capabilities=DrafterCapabilities(
        devices=Set(None),
        max_tokens=Max(4),
        needs_layers=True,
        needs_computed=True,
        needs_checkpoint=True,
        checkpoint_form="eagle3",
        state="rows",
    ),
    factory=RecomputedEagle3,
)
dflash = evolve(
    eagle3,
    name="reference_dflash",
    summary="a DFlash head, computed again for each draft",
    capabilities=evolve(eagle3.capabilities, checkpoint_form="dflash"),
    factory=RecomputedDFlash,
)
medusa = evolve(
    eagle3,
    name="reference_medusa",
    summary="Medusa's heads, one after the other",
    capabilities=DrafterCapabilities(
        devices=Set(None), max_tokens=Max(4), needs_hidden_states=True, needs_checkpoint=True, checkpoint_form="medusa"
    ),
    factory=RecomputedMedusa,
)
