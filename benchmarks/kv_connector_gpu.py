"""What the KV connector `host_memory` gains and costs on a GPU: long prompts that come again after the pool lost them.

    python benchmarks/kv_connector_gpu.py benchmarks/models/qwen3-0.6b [--prompts 16] [--length 4096] [--pool 8]

Random prompts, one token each, are served one after the other, then all of them again; the pool holds `--pool` of them
at a time and host memory all. Rounds alternate between an engine without a connector and one with it, on random
weights. Prints the seconds of each round: the first one with the connector saves what the pool gives up, the later ones
load as much. The bytes over seconds of such a round are no bandwidth of the bus alone: prompts' ends are computed, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from step_gpu import random_llm

from slotline.core import LLM, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def build(folder: Path, prompts: int, length: int, pool: int, *, connector: bool) -> LLM:
    """An engine whose pool holds `pool` prompts."""
    sized = random_llm(folder, max_model_len=length + 64, overrides=["cache.memory=1GiB", "graphs.mode=none"])
    assert sized.plan.pool is not None
    each = sized.engine.scheduler.cache.blocks_for_one(length + 1) * sized.plan.pool.block_bytes
    del sized
    settings = [f"cache.memory={pool * each // 2**20}MiB", "graphs.mode=none"]
    if connector:
        memory = f"{prompts * each // 2**20 + 64}MiB"
        settings += ["kv_connector.name=host_memory", f"kv_connector.host_memory.memory={memory}"]
    return random_llm(folder, max_model_len=length + 64, overrides=settings)


def serve(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[int], int]:
    """Seconds for all prompts one by one, their tokens, and how many prompt tokens were loaded."""
    torch.cuda.synchronize()
    start, tokens, loaded = perf_counter(), list[int](), 0
    for prompt in prompts:
        output = llm.generate([prompt], ONE)[0]
        tokens += output.outputs[0].token_ids
        loaded += output.metrics.num_loaded_tokens
    torch.cuda.synchronize()
    return perf_counter() - start, tokens, loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--pool", type=int, default=8)
    arguments = parser.parse_args()
    count, length = arguments.prompts, arguments.length
    rng = np.random.default_rng(0)
    prompts = rng.integers(1000, 100_000, (count, length)).tolist()
    warm = rng.integers(1000, 100_000, (2, length)).tolist()
    for connector in (False, True):
        llm = build(arguments.folder, count, length, arguments.pool, connector=connector)
        size = llm.plan.pool.block_bytes if llm.plan.pool else 0
        print(f"connector {connector}: {llm.plan.summary()}; a block of {llm.plan.block_size} tokens is {size} bytes")
        serve(llm, warm)
        for number in range(3):
            seconds, tokens, loaded = serve(llm, prompts)
            each = f"{1e3 * seconds / count:.1f} ms a prompt"
            print(f"  round {number}: {seconds:.3f} s, {each}, {loaded} tokens loaded, tokens add up to {sum(tokens)}")
        del llm
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
