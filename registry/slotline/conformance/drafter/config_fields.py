"""Every field of the configurations of published draft heads: those that change nothing, and those that must count.

The fields are those of transformers' ``LlamaConfig``, which EAGLE's and EAGLE-3's config.json extends, and
``Qwen3Config``, which DFlash's does, what their authors and vLLM read beside it, and Medusa's. A field that is set and
ignored gives another draft than the head was trained to give, so that drafts fall without a word. The reference is
`slotline.testing.oracles.draft_heads`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from random import Random
from types import MappingProxyType
from typing import Any

from attrs import evolve
from safetensors.torch import load_file, save_file

from slotline.registry.contracts import DrafterContext
from slotline.registry.descriptor import Kind
from slotline.registry.errors import SlotlineError
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.drafter import (
    Request,
    RowDraft,
    World,
    draft_lengths,
    empty_folder,
    hidden_states,
    random_request,
    target_of,
    world_of,
)
from slotline.testing.oracles.draft_heads import TargetModel, drafts, usual_settings, write_head
from slotline.testing.subject import Subject

Values = Mapping[str, tuple[Any, ...]]
VOCABULARY, HIDDEN, LONGEST = 32, 16, 64
CLOSE = 1e-3
"""Logits whose two best are closer may be drawn either way in float32."""

_LLAMA_HARMLESS: Values = {
    "transformers_version": ("4.40.0",),
    "architectures": (["LlamaForCausalLM"],),
    "output_hidden_states": (True,),
    "return_dict": (False,),
    "dtype": ("float16",),
    "torch_dtype": ("bfloat16",),
    "chunk_size_feed_forward": (4,),
    "id2label": ({"0": "LABEL_0"},),
    "label2id": ({"LABEL_0": 0},),
    "problem_type": ("regression",),
    "max_position_embeddings": (4096,),
    "initializer_range": (0.5,),
    "use_cache": (False,),
    "pad_token_id": (3, None),
    "bos_token_id": (5,),
    "eos_token_id": (7, [7, 8]),
    "pretraining_tp": (2,),  # the same products in slices
    "tie_word_embeddings": (True,),  # EAGLE shares the model's in any case, EAGLE-3's file has its own
    "attention_dropout": (0.5,),
    "is_encoder_decoder": (False,),
    "head_dim": (None,),  # the size that follows from the others here
    "sliding_window": (4,),  # read where layer_types asks for it
    "quantization_config": (None,),
}
_LLAMA_COUNTS: Values = {
    "intermediate_size": (24,),
    "num_attention_heads": (4,),
    "num_key_value_heads": (2, None),
    "head_dim": (4, 16),
    "hidden_act": ("gelu", "relu"),
    "rms_norm_eps": (8.0,),
    "rope_theta": (20.0,),
    "rope_scaling": ({"rope_type": "linear", "factor": 8.0},),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 20.0},
        {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 8.0, "rope_theta": 100.0, "original_max_position_embeddings": 8},
        {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "attention_bias": (True,),
    "mlp_bias": (True,),
}
_LLAMA_REFUSED: Values = {
    "vocab_size": (VOCABULARY - 1,),
    "hidden_size": (2 * HIDDEN,),
    "layer_types": (["sliding_attention"],),
    "rope_parameters": (
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},  # turns depend on the longest of a batch
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "partial_rotary_factor": (0.5,),
    "quantization_config": ({"quant_method": "fp8"},),
}

_BLOCKS = {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [0, 2]}
"""The table `dflash_config` of the usual head."""

HARMLESS: Mapping[str, Values] = MappingProxyType(
    {
        "dflash": {
            **_LLAMA_HARMLESS,
            "architectures": (["Qwen3ForCausalLM"],),
            "model_type": ("llama",),
            "block_size": (16, 64),
            "num_target_layers": (4, None),
            "draft_vocab_size": (VOCABULARY, None),
            "target_hidden_size": (HIDDEN, None),
            "use_sliding_window": (False,),
            "max_window_layers": (0, 28),  # read where use_sliding_window is set
            "layer_types": (["full_attention", "full_attention"], None),
            "dflash_config": ({**_BLOCKS, "block_size": 16}, {**_BLOCKS, "use_target_cache": False}),
        },
        "eagle": _LLAMA_HARMLESS,
        "eagle3": {
            **_LLAMA_HARMLESS,
            "target_hidden_size": (HIDDEN, None),
            "eagle_config": ({"use_aux_hidden_state": True}, None),
            "draft_vocab_size": (VOCABULARY, None),
            "norm_before_fc": (False,),
            "parallel_draft_step": (1,),
        },
        "medusa": {
            "version": ("2",),
            "base_model_name_or_path": ("lmsys/vicuna-7b-v1.3",),
            "architectures": (["MedusaModel"],),
            "model_type": ("medusa",),
            "transformers_version": ("4.40.0",),
            "torch_dtype": ("float16",),
            "dtype": ("bfloat16",),
            "max_paths": (8,),
            "topk": (3,),
            "max_seq_len": (128,),
            "num_lookahead_tokens": (2,),
            "hidden_size": (HIDDEN, None),
            "vocab_size": (VOCABULARY,),
            "truncated_vocab_size": (VOCABULARY, None),
            "quantization_config": (None,),
        },
    }
)
"""Form -> fields of it that say nothing about a draft, or say what is so in any case -> values."""

COUNTS: Mapping[str, Values] = MappingProxyType(
    {
        "dflash": {
            **_LLAMA_COUNTS,
            "num_hidden_layers": (1, 3),
            "use_sliding_window": (True,),
            "layer_types": (["sliding_attention", "full_attention"], ["sliding_attention"] * 2),
            "dflash_config": ({**_BLOCKS, "mask_token_id": 3}, {**_BLOCKS, "target_layer_ids": [1, 0, 2]}),
        },
        "eagle": {**_LLAMA_COUNTS, "num_hidden_layers": (2, 3), "bias": (False,)},
        "eagle3": {
            **_LLAMA_COUNTS,
            "draft_vocab_size": (20,),
            "norm_before_residual": (True,),
            "eagle_aux_hidden_state_layer_ids": ([0, 3, 1],),
            "eagle_config": ({"eagle_aux_hidden_state_layer_ids": [1, 3]},),
        },
        "medusa": {
            "medusa_num_layers": (0, 2),
            "medusa_fc_bias": (False,),
            "original_lm_head": (True,),
        },
    }
)
"""Form -> fields that change the draft in the way of the reference, in a folder whose weights belong to them."""

REFUSED: Mapping[str, Values] = MappingProxyType(
    {
        "dflash": {
            **_LLAMA_REFUSED,
            "layer_types": (["sliding_attention"], ["chunked_attention"] * 2),
            "num_hidden_layers": (40,),
            "target_hidden_size": (2 * HIDDEN,),
            "num_target_layers": (5,),
            "draft_vocab_size": (VOCABULARY - 12,),
            "block_size": (2, None),
            "dflash_config": (
                {**_BLOCKS, "mask_token_id": VOCABULARY},
                {**_BLOCKS, "mask_token_id": None},
                {**_BLOCKS, "target_layer_ids": [0, 3]},  # the output of the last layer is no layer's input
                {**_BLOCKS, "causal": True},
            ),
        },
        "eagle": {**_LLAMA_REFUSED, "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,)},
        "eagle3": {
            **_LLAMA_REFUSED,
            "num_hidden_layers": (2,),
            "target_hidden_size": (2 * HIDDEN,),
            "eagle_config": ({"use_aux_hidden_state": False},),
            "norm_before_fc": (True,),
            "use_aux_hidden_state": (False,),
            "use_input_layernorm_in_first_layer": (False,),
            "use_last_layernorm": (False,),
            "use_mtp_layernorm": (True,),
            "parallel_draft_step": (2,),
        },
        "medusa": {
            "medusa_num_heads": (40,),
            "medusa_num_layers": (40,),
            "hidden_size": (2 * HIDDEN,),
            "vocab_size": (VOCABULARY - 1,),
            "truncated_vocab_size": (VOCABULARY - 12,),  # and no token_map
            "quantization_config": ({"quant_method": "fp8"},),
        },
    }
)
"""Form -> fields that contradict the folder or the model, or ask for what no reference has -> values."""

STRANGE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "eagle": ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.sinks", "layers.1.mlp.up_proj.weight"),
        "eagle3": ("midlayer.self_attn.k_norm.weight", "midlayer.mlp.gate_proj.bias", "fc_norm.weight"),
        "dflash": ("layers.0.self_attn.sinks", "layers.2.mlp.up_proj.weight", "layers.1.mlp.gate_proj.bias"),
        "medusa": ("0.1.linear.weight", "blocks.0.layers.0.norm.weight"),
    }
)
"""Form -> names of weights that a head of this form and these settings has no place for."""


def _form(subject: Subject) -> str:
    form: str = subject.capabilities.checkpoint_form
    if not form:
        raise NotApplicable("checkpoint_form is not declared")
    return form


def _cases(fields: Mapping[str, Values], subject: Subject) -> Iterable[Case]:
    named = fields[_form(subject)]
    return [{"field": name, "value": index} for name in named for index in range(len(named[name]))]


@check(
    Kind.DRAFTER, "drafter.config.harmless", Level.HOSTILE, cases=lambda subject: _cases(HARMLESS, subject), cost=0.05
)
def config_harmless(run: Run) -> None:
    """A field of a published head's configuration that says nothing about its drafts is taken, and changes nothing."""
    name, value = run["field"], HARMLESS[_form(run.subject)][run["field"]][run["value"]]
    changed = _Folder(run, {name: value}, weights_too=False)
    try:
        changed.compare(f"{name} = {value!r}")
    except SlotlineError as error:
        raise Failed(f"{name} = {value!r} does not change a draft, yet it is refused: {error}") from error


@check(Kind.DRAFTER, "drafter.config.counts", Level.NUMERICS, cases=lambda subject: _cases(COUNTS, subject), cost=0.05)
def config_counts(run: Run) -> None:
    """A field that changes the drafts of a published head changes them as the reference says, or is refused by name."""
    name, value = run["field"], COUNTS[_form(run.subject)][run["field"]][run["value"]]
    changed = _Folder(run, {name: value})
    try:
        changed.compare(f"{name} = {value!r}")
    except SlotlineError as error:
        _must_name(error, name, value)


@check(Kind.DRAFTER, "drafter.config.refuses", Level.HOSTILE, cases=lambda subject: _cases(REFUSED, subject), cost=0.05)
def config_refuses(run: Run) -> None:
    """A field that contradicts the head's weights or its model, or asks for something unknown, is refused by name."""
    name, value = run["field"], REFUSED[_form(run.subject)][run["field"]][run["value"]]
    _refused(_Folder(run, {name: value}, weights_too=False), name, value)


@check(
    Kind.DRAFTER,
    "drafter.config.weights",
    Level.HOSTILE,
    cases=lambda subject: [{"tensor": name} for name in STRANGE[_form(subject)]],
    cost=0.05,
)
def config_weights(run: Run) -> None:
    """A weight that the head's settings have no place for is refused by name: another network was trained."""
    folder = _Folder(run, {})
    file = next(folder.path.glob("*.safetensors"))
    weights = load_file(file)
    like = next(tensor for tensor in weights.values() if tensor.ndim == 2)
    save_file({**weights, run["tensor"]: like.clone()}, file)
    _refused(folder, run["tensor"], list(like.shape))


def _refused(folder: _Folder, name: str, value: Any) -> None:
    try:
        folder.world()
    except SlotlineError as error:
        _must_name(error, name, value)
        return
    raise Failed(f"{name} = {value!r} was taken, and nothing in the reference has it: refuse it by name")


def _must_name(error: SlotlineError, name: str, value: Any) -> None:
    names = (name, *value) if isinstance(value, Mapping) else (name,)
    if not any(each in error.message for each in names) or not error.fix:
        raise Failed(f"{name} = {value!r} is refused, and the message names neither it nor a remedy: {error}")


class _Folder:
    """Folder of a published head with changed settings.

    Args:
        run: the check's run.
        changes: fields of config.json.
        weights_too: True for weights of the shapes that the changed settings ask for.
    """

    def __init__(self, run: Run, changes: Mapping[str, Any], *, weights_too: bool = True) -> None:
        self.run, self.form, self.path = run, _form(run.subject), empty_folder()
        self.count = draft_lengths(run.subject, up_to=4)[-1]
        self.target = _target(self.form, run.subject.device.type)
        settings = usual_settings(self.form, self.count, VOCABULARY, HIDDEN, LONGEST)
        changed = {**settings, **changes}
        write_head(self.path, self.form, changed if weights_too else settings, self.target)
        (self.path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        self.counts = weights_too and bool(changes)

    def world(self) -> World:
        """Return the drafter that reads the folder, with the requests."""
        return world_of(self.run.subject, _requests(), num_tokens=self.count, form="chain", path=str(self.path))

    def compare(self, what: str) -> None:
        """Compare the drafts of the folder with the reference.

        Raises:
            Failed: naming the history and both drafts.
            slotline.registry.errors.SlotlineError: if the plugin refuses the folder.
        """
        found, usual = self.world().propose(sorted(_requests())), _usual_drafts(self.form, self.count)
        differs = not self.counts
        for row, request in _requests().items():
            if not self.counts:
                expected, distance = usual[row]
            else:
                expected, distance = drafts(self.path, self.form, self.target, request.tokens, self.count)
            drafted = _first_children(found[row])
            expected, before = expected[: len(drafted)], usual[row][0][: len(drafted)]
            differs = differs or expected != before
            if distance > CLOSE and (drafted != expected or not drafted):
                raise Failed(
                    f"{what}: after the history {list(request.tokens)} the draft is {drafted}, the reference gives "
                    f"{expected}"
                )
        if not differs:
            raise RuntimeError(f"{what} does not change the reference's drafts: the check cannot see it")


def _first_children(draft: RowDraft) -> list[int]:
    """Return the draft as it is verified as a chain: the path of each node's first child."""
    if draft.parents is None:
        return list(draft.token_ids)
    path, node = list[int](), -1
    while node in draft.parents:
        node = draft.parents.index(node)
        path.append(draft.token_ids[node])
    return path


@cache
def _requests() -> Mapping[int, Request]:
    """Return requests by row, always the same."""
    rng = Random(11)
    return {row: random_request(rng, vocab_size=VOCABULARY, length=n) for row, n in enumerate((3, 11, 24))}


def _target(form: str, device: str) -> TargetModel:
    """Return the model that all heads are for."""
    context = DrafterContext(
        contract=1,
        num_tokens=1,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        max_requests=len(_requests()),
        max_model_len=LONGEST,
        device=device,
        dtype="float32",
    )
    found = target_of(context)
    if form == "medusa":
        return evolve(found, state=lambda tokens, _layer: hidden_states([Request(tokens, ())], HIDDEN)[0])
    return found


@cache
def _usual_drafts(form: str, count: int) -> Mapping[int, tuple[list[int], float]]:
    """Return what the reference drafts by the usual settings, for each request."""
    folder, target = empty_folder(), _target(form, "cpu")
    write_head(folder, form, usual_settings(form, count, VOCABULARY, HIDDEN, LONGEST), target)
    return {row: drafts(folder, form, target, request.tokens, count) for row, request in _requests().items()}
