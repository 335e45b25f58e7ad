"""Broken readers of published draft heads: each ignores a field of the configuration, or refuses one without a need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from slotline.registry.contracts import DrafterContext
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import ModelError
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.reference import drafter_heads as reference
from slotline.testing.reference.drafter_heads import (
    PublishedHead,
    RecomputedDFlash,
    RecomputedEagle3,
    RecomputedMedusa,
)


def _ignoring(base: type[PublishedHead], *fields: str) -> type[PublishedHead]:
    """Return a reader that does not look at some fields, not inside `eagle_config` or `dflash_config` either."""

    class Ignoring(base):  # type: ignore[misc, valid-type]  # a class that is known at run time only
        def served(self, settings: dict[str, Any]) -> dict[str, Any]:
            kept = {name: value for name, value in settings.items() if name not in fields}
            for table in ("eagle_config", "dflash_config"):
                if isinstance(more := kept.get(table), dict):
                    kept[table] = {name: value for name, value in more.items() if name not in fields}
            return kept

    return Ignoring


def _refusing(field: str, *, usual: Any) -> type[PublishedHead]:
    """Return a reader that refuses a field which changes nothing."""

    class Refusing(RecomputedEagle3):
        def refuse(self, settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
            super().refuse(settings, weights)
            if settings.get(field, usual) != usual:
                raise ModelError(f"{field} is {settings[field]!r}", fix="leave it out")

    return Refusing


class TakesStrangeWeights(RecomputedEagle3):
    def strange(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        return ()


class NamelessRefusals(RecomputedEagle3):
    def refuse(self, settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        try:
            super().refuse(settings, weights)
        except ModelError as error:
            raise ModelError("the head cannot be read", fix=error.fix) from error


class OnlyTopFields(RecomputedEagle3):
    def served(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name != "eagle_config"}


class NoDraftVocabulary(RecomputedEagle3):
    def chain(self, seen: Mapping[int, tuple[torch.Tensor, int]], newest: int, position: int) -> list[int]:
        self.weights = {name: tensor for name, tensor in self.weights.items() if name != "d2t"}
        return super().chain(seen, newest, position)


class FixedMask(RecomputedDFlash):
    """Takes the last token for the mask in any case."""

    def served(self, settings: dict[str, Any]) -> dict[str, Any]:
        mask = {"mask_token_id": self.context.vocab_size - 1}
        return {**settings, "dflash_config": {**settings["dflash_config"], **mask}}


class OutputsForInputs(RecomputedDFlash):
    """Reads the inputs of the layers whose outputs are named."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.layer_ids = tuple(self.settings["dflash_config"]["target_layer_ids"])


class AlwaysOwn(RecomputedMedusa):
    def refuse(self, settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        super().refuse(settings, weights)
        if settings.get("original_lm_head"):
            raise ModelError("there are no projections", fix="use heads with projections of their own")


def _mutant(name: str, summary: str, level: Level, factory: Any, base: Descriptor[Any] = reference.eagle3) -> Mutant:
    changed = attrs.evolve(base, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory)
    return Mutant(name, summary, level, changed)


def _eagle(name: str, level: Level, *fields: str) -> Mutant:
    what = " and ".join(fields)
    return _mutant(name, f"an EAGLE-3 head that ignores {what}", level, _ignoring(RecomputedEagle3, *fields))


def _dflash(name: str, level: Level, *fields: str) -> Mutant:
    what = " and ".join(fields)
    factory = _ignoring(RecomputedDFlash, *fields)
    return _mutant(name, f"a DFlash head that ignores {what}", level, factory, reference.dflash)


def _medusa(name: str, level: Level, *fields: str) -> Mutant:
    what = " and ".join(fields)
    factory = _ignoring(RecomputedMedusa, *fields)
    return _mutant(name, f"Medusa's heads that ignore {what}", level, factory, reference.medusa)


_Tied = _refusing("tie_word_embeddings", usual=False)
_Short = _refusing("max_position_embeddings", usual=128)
_L1, _L2 = Level.NUMERICS, Level.HOSTILE
MUTANTS: tuple[Mutant, ...] = (
    _eagle("no-eps", _L1, "rms_norm_eps"),
    _eagle("no-theta", _L1, "rope_theta"),
    _eagle("no-rope-scaling", _L1, "rope_scaling"),
    _eagle("no-rope-parameters", _L1, "rope_parameters"),
    _eagle("silu-always", _L1, "hidden_act"),
    _eagle("usual-layers", _L1, "eagle_aux_hidden_state_layer_ids"),
    _eagle("plain-residual", _L1, "norm_before_residual"),
    _mutant("only-top-fields", "does not look inside eagle_config", _L1, OnlyTopFields),
    _mutant("no-draft-vocabulary", "takes draft tokens for the model's", _L1, NoDraftVocabulary),
    _eagle("no-norm-before-fc", _L2, "norm_before_fc"),
    _eagle("one-state", _L2, "use_aux_hidden_state"),
    _eagle("all-attention-full", _L2, "layer_types"),
    _eagle("one-layer", _L2, "num_hidden_layers"),
    _eagle("one-step-at-a-time", _L2, "parallel_draft_step"),
    _eagle("whole-turns", _L2, "partial_rotary_factor"),
    _eagle("no-quantization", _L2, "quantization_config"),
    _eagle("any-target", _L2, "target_hidden_size"),
    _eagle("any-vocabulary", _L2, "vocab_size"),
    _eagle("no-last-norm", _L2, "use_last_layernorm"),
    _mutant("strange-weights", "takes weights that it has no place for", _L2, TakesStrangeWeights),
    _mutant("nameless-refusals", "does not say which field it refuses", _L2, NamelessRefusals),
    _mutant("tied", "refuses tied embeddings, which a head does not use", _L2, _Tied),
    _mutant("short-positions", "refuses more positions than it knows", _L2, _Short),
    _mutant("own-projections", "refuses shared projections and names no field", _L1, AlwaysOwn, reference.medusa),
    _dflash("blocks-see-all", _L1, "use_sliding_window"),
    _dflash("blocks-of-full-layers", _L1, "layer_types"),
    _dflash("blocks-without-eps", _L1, "rms_norm_eps"),
    _dflash("any-blocks", _L2, "causal"),
    _dflash("blocks-of-any-model", _L2, "num_target_layers"),
    _dflash("blocks-of-any-vocabulary", _L2, "draft_vocab_size"),
    _dflash("blocks-of-any-width", _L2, "target_hidden_size"),
    _mutant("fixed-mask", "takes the last token for a DFlash head's mask", _L1, FixedMask, reference.dflash),
    _mutant(
        "outputs-for-inputs",
        "reads what goes into a layer in place of what comes out",
        _L1,
        OutputsForInputs,
        reference.dflash,
    ),
    _medusa("any-truncation", _L2, "truncated_vocab_size"),
    _medusa("any-hidden-size", _L2, "hidden_size"),
    _medusa("quantized-heads", _L2, "quantization_config"),
)
