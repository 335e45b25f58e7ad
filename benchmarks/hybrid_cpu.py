"""Hybrid models on a CPU beside transformers' `generate`: 16 requests together, same checkpoint, float32.

    python benchmarks/hybrid_cpu.py [--families bamba qwen3_next] [--rounds 3] [--requests 16] [--tokens 48]
        [--json out.json]

Checkpoints of a few ten million parameters with random weights. Each figure is the median over rounds, engines in turn,
of generated tokens per second over whole calls: prompts of 64 tokens, all different, and `--tokens` greedy tokens each.
A last line repeats the prompts, so that slotline goes on from its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch
import transformers
from command_line import positive

from slotline.core import LLM, SamplingParams

SHORT = "--families lfm2 bamba --requests 2 --rounds 1 --tokens 4"
PROMPT = 64
_SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 1024,
}
_MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_expand": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", {**_MAMBA2, "attn_layer_indices": [3, 7]}),
    "falcon_h1": ("FalconH1", {**_MAMBA2, "mamba_d_ssm": 1024}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "mlp_only_layers": list(range(8)),
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": (["conv"] * 3 + ["full_attention"]) * 2, "block_auto_adjust_ff_dim": False}),
}


def checkpoint(family: str, path: Path) -> Path:
    """A random checkpoint of a family."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **settings})
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path)
    return path


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = perf_counter()
    call()
    return perf_counter() - start


def measure(family: str, folder: Path, requests: int, rounds: int, new: int) -> dict[str, Any]:
    """Tokens per second of both, and of slotline once more with the same prompts."""
    path, rng = checkpoint(family, folder / family), Random(0)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False
    ).eval()
    llm = LLM(path, dtype="float32", max_model_len=256, max_num_seqs=requests, memory="1GiB")
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    seconds: dict[str, list[float]] = {"transformers": [], "slotline": [], "again": []}
    for _ in range(rounds + 1):  # the first round warms up
        prompts = [[rng.randint(3, 8_000) for _ in range(PROMPT)] for _ in range(requests)]
        ids = torch.tensor(prompts)
        ask = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "min_new_tokens": new}
        with torch.inference_mode():
            seconds["transformers"].append(timed(lambda: oracle.generate(ids, do_sample=False, **ask)))  # noqa: B023
        for name in ("slotline", "again"):
            seconds[name].append(timed(lambda: llm.generate(prompts, params, progress=False)))  # noqa: B023
    rates = {name: requests * new / statistics.median(times[1:]) for name, times in seconds.items()}
    states = llm.engine.extension("states")
    hits = states.checkpoints.counts.restored if states else 0
    ratio = rates["slotline"] / rates["transformers"]
    print(
        f"{family}: transformers {rates['transformers']:.0f} tokens/s, slotline {rates['slotline']:.0f}, {ratio:.2f}x, "
        f"the same prompts again {rates['again']:.0f}, {hits} requests from checkpoints"
    )
    return {"family": family, **rates, "ratio": ratio, "restored": hits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--requests", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--tokens", type=positive, default=48)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(family, Path(folder), args.requests, args.rounds, args.tokens) for family in args.families]
    if args.json:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "families": found}))


if __name__ == "__main__":
    main()
