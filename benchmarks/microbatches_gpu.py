"""Prompts over two GPUs, with steps whole and in pieces: `python benchmarks/microbatches_gpu.py [stages]`.

A random Llama of 3 billion parameters in bfloat16 is divided over as many GPUs; 16 prompts of 2,048 tokens give a token
each, in steps of 8,192. Prints tokens a second, the best of five runs, and whether the tokens are those of whole steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from command_line import at_least, require_gpus

from slotline.core import LLM, SamplingParams

SHORT = ""
COUNT, LENGTH, RUNS = 16, 2048, 5
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def checkpoint(folder: Path) -> Path:
    """A random model; it has no tokenizer."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    return folder


def measure(path: Path, stages: int, microbatches: int) -> tuple[float, list[list[int]]]:
    """Prompt tokens a second, and the tokens."""
    settings: dict[str, Any] = {
        "parallel.pipeline": stages,
        "scheduler.microbatches": microbatches,
        "scheduler.max_batched_tokens": 8192,
        "scheduler.max_requests": 64,
        "cache.prefix_caching": False,
        "memory": "8GiB",
        "observability.progress": False,
    }
    llm = LLM(path, device="cuda", max_model_len=4096, **settings)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 32000, (COUNT, LENGTH), generator=generator).tolist()
    best, found = float("inf"), list[list[int]]()
    for _ in range(RUNS):
        start = time.perf_counter()
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]
        best = min(best, time.perf_counter() - start)
    return COUNT * LENGTH / best, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", type=at_least(2), nargs="?", default=2, help="as many GPUs")
    stages = parser.parse_args().stages
    require_gpus(stages)
    with tempfile.TemporaryDirectory() as folder:
        path, expected = checkpoint(Path(folder)), None
        for microbatches in (1, 2, 4):
            rate, found = measure(path, stages, microbatches)
            expected = expected or found
            print(
                f"{stages} stages, {microbatches} pieces: {rate:,.0f} tokens/s, equal {found == expected}", flush=True
            )


if __name__ == "__main__":
    main()
