"""Whole engine on a tiny random model with state layers, with the spec under test in its slot."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from attrs import frozen

from slotline.testing.environments.engine import selection
from slotline.testing.environments.state_spec import declared_kinds
from slotline.testing.subject import Subject

UNIT = 16
NEW_TOKENS = 5


@frozen
class TinyModel:
    """Configuration of transformers, and the kinds of its state layers."""

    architecture: str
    config: str
    kinds: tuple[str, ...]
    settings: Mapping[str, Any]


COMMON: Mapping[str, Any] = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2}
MODELS = (
    TinyModel(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        ("short_conv", "mamba2"),
        {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    ),
    TinyModel(
        "MambaForCausalLM",
        "MambaConfig",
        ("short_conv", "mamba1"),
        {"state_size": 8, "time_step_rank": 4, "expand": 2},
    ),
    TinyModel(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        ("short_conv", "gated_delta"),
        {
            "layer_types": ["linear_attention", "full_attention"],
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
)


def models_of(subject: Subject) -> list[TinyModel]:
    """Return models with the declared kinds of layers, one for each kind that no earlier model has."""
    kinds, found = set(declared_kinds(subject)), []
    for model in MODELS:
        if kinds & set(model.kinds):
            found.append(model)
            kinds -= set(model.kinds)
    return found


def write(model: TinyModel, folder: Path) -> None:
    """Write a random checkpoint without a tokenizer."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = getattr(transformers, model.config)(**COMMON, **model.settings, architectures=[model.architecture])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = getattr(transformers, model.architecture)(config)
        for parameter in built.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)  # otherwise every token continues in the same way
    config.save_pretrained(folder)
    save_file({name: tensor.clone() for name, tensor in built.state_dict().items()}, folder / "model.safetensors")


Answer = tuple[list[tuple[int, ...]], list[int]]
"""The tokens of each prompt, and how many of each prompt's tokens were cached."""


def texts(subject: Subject, model: TinyModel, length: int) -> tuple[Answer, Answer]:
    """Return the texts of an engine without prefix caching, and of an engine with the spec.

    Args:
        subject: the spec.
        model: one of `models_of`.
        length: tokens of the longest prompt. The prompts come one after the other.

    Raises:
        NotApplicable: if no configuration can name the spec.
    """
    from slotline.core import LLM, SamplingParams

    plugins = selection(subject)
    prompt = [(7 * i * i + 13 * i) % 240 + 4 for i in range(length)]
    other = [*prompt[: length // 2], *((5 * i) % 240 + 4 for i in range(length - length // 2))]
    prompts = [prompt, other, [*prompt, 9, 11], other]
    kinds = [kind for kind in model.kinds if kind in declared_kinds(subject)]
    named: dict[str, Any] = {f"cache.kv_spec.{kind}": subject.name for kind in kinds}
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)

    def answer(settings: Mapping[str, Any]) -> Answer:
        llm = LLM(
            folder,
            device=subject.device.type,
            dtype="float32",
            **{
                "cache.block_size": UNIT,
                "graphs.mode": "none",
                "scheduler.max_model_len": length + 2 + NEW_TOKENS,
                "scheduler.max_requests": 4,
                "observability.progress": False,
                **settings,
            },
        )
        with closing(llm):
            outputs = [llm.generate([each], params)[0] for each in prompts]
        return (
            [tuple(output.outputs[0].token_ids) for output in outputs],
            [output.metrics.num_cached_tokens for output in outputs],
        )

    with tempfile.TemporaryDirectory() as folder:
        write(model, Path(folder))
        return (
            answer({"cache.prefix_caching": False}),
            answer({"plugins.inline": plugins, "cache.prefix_caching": True, **named}),
        )
