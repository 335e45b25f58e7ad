"""Every field of PEFT's LoRA configuration: those that change nothing, and those that a plugin applies or refuses.

The fields are those of PEFT 0.21 (``peft/tuners/lora/config.py``). A field that is set and ignored gives another result
than PEFT does, without a word. `lora.load.patterns` has `rank_pattern` and `alpha_pattern`, `lora.load.refuses` has
`bias`, `modules_to_save`, `use_dora` and `use_rslora`, and all checks have `r` and `lora_alpha`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from slotline.conformance.lora.numerics import once
from slotline.conformance.lora.slots import refused_and_unchanged
from slotline.registry.descriptor import Kind
from slotline.registry.errors import RequestError
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.lora import LoraWorld
from slotline.testing.subject import Subject

HARMLESS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "task_type": (None, "SEQ_CLS"),
        "auto_mapping": ({"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},),
        "peft_version": ("0.21.2", None),
        "base_model_name_or_path": (None, "/somewhere/else"),
        "revision": ("main",),
        "inference_mode": (False,),
        "target_modules": ("all-linear", r".*_proj"),
        "exclude_modules": (["lm_head"], "lm_head"),
        "lora_dropout": (0.5,),
        "fan_in_fan_out": (True,),
        "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga"),
        "layers_to_transform": ([0, 1], 0),
        "layers_pattern": ("layers", ["layers"]),
        "megatron_config": (None,),
        "megatron_core": ("megatron.core",),
        "loftq_config": ({}, {"loftq_bits": 4, "loftq_iter": 1}),
        "eva_config": ({"rho": 2.0, "tau": 0.99},),
        "corda_config": ({"corda_method": "ipm"},),
        "lora_ga_config": ({"direction": "ArB2r", "scale": "stable"},),
        "velora_config": ({"num_groups": 64, "scale": 1.0, "init_type": "batch_average_once"},),
        "qalora_group_size": (16, 32),
        "runtime_config": ({"ephemeral_gpu_offload": False},),
    }
)
"""Fields that only training reads, or that the tensors of the file already say -> values."""

CHANGES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "peft_type": ("LOHA", "IA3", "ADALORA", "PREFIX_TUNING"),
        "init_lora_weights": ("pissa", "pissa_niter_16", "corda", "olora", "loftq"),
        "trainable_token_indices": ([3, 5], {"embed_tokens": [3]}),
        "alora_invocation_tokens": ([7, 9],),
        "use_qalora": (True,),
        "monteclora_config": ({"num_samples": 4},),
        "layer_replication": ([[0, 2], [1, 3]],),
        "lora_bias": (True,),
        "target_parameters": (["mlp.experts.gate_up_proj"],),
        "use_bdlora": ({"nblocks": 2, "target_modules_bd_a": ["q_proj"], "target_modules_bd_b": []},),
        "arrow_config": ({"top_k": 2},),
        "kasa_config": ({"beta": 0.1},),
        "ensure_weight_tying": (True,),
    }
)
"""Fields under which PEFT computes something else from the same two matrices, or with other base weights -> values."""

ELSEWHERE = frozenset(
    {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "bias", "modules_to_save", "use_dora", "use_rslora"}
)
"""Fields that other checks set."""


def _cases(fields: Mapping[str, tuple[Any, ...]], subject: Subject) -> Iterable[Case]:
    return [
        {"field": name, "value": index} for _ in once(subject) for name in fields for index in range(len(fields[name]))
    ]


@check(Kind.LORA, "lora.load.harmless", Level.HOSTILE, cases=lambda subject: _cases(HARMLESS, subject), cost=0.02)
def load_harmless(run: Run) -> None:
    """A field of PEFT's configuration that says nothing about the result is taken, and changes nothing."""
    name, value = run["field"], HARMLESS[run["field"]][run["value"]]
    with LoraWorld(run) as world:
        adapter = world.adapter(1)
        try:
            world.load("a", adapter, world.write(adapter, **{name: value}))
        except RequestError as error:
            raise Failed(
                f"{name} = {value!r} does not change what PEFT computes, yet it is refused: {error}"
            ) from error
        world.check(["a", None], f"{name} = {value!r}", list(world.modules)[:1])


@check(Kind.LORA, "lora.load.changes", Level.HOSTILE, cases=lambda subject: _cases(CHANGES, subject), cost=0.02)
def load_changes(run: Run) -> None:
    """A field of PEFT's configuration under which it computes something else is refused by name, never ignored."""
    name, value = run["field"], CHANGES[run["field"]][run["value"]]
    with LoraWorld(run) as world:
        world.load("a", world.adapter(1))
        if world.max_adapters == 1:
            world.unload("a")
        refused_and_unchanged(world, "changed", world.write(world.adapter(1), **{name: value}), name, (RequestError,))
        world.load("changed", world.adapter(1))
        world.check([None, *world.loaded], "after the refusal", list(world.modules)[:1])
