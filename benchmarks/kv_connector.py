"""What the KV connector `host_memory` gains and costs: long prompts that come again after the pool has lost them.

    python benchmarks/kv_connector.py [--device cpu] [--prompts 12] [--length 1500] [--pool 6]
    python benchmarks/kv_connector.py benchmarks/models/qwen3-0.6b --device cuda --prompts 16 --length 4096 --pool 8

Random prompts, one token each, are served one after the other, then all of them again, twice. The pool holds `--pool`
of them at a time, and host memory all. First an engine without a connector does it, then one with it; without a folder
the model that ships, with one random weights of its configuration on a GPU. Prints the seconds of each round: the first
one with the connector saves what the pool gives up, the later ones save and load.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from command_line import positive, require_gpus
from step_gpu import random_llm

from slotline.core import LLM, SamplingParams

SHORT = "--prompts 2 --length 40 --pool 1"
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def build(arguments: argparse.Namespace, settings: list[str]) -> LLM:
    """An engine without graphs, which prompts do not use."""
    common = {"max_model_len": arguments.length + 1, "overrides": ["graphs.mode=none", *settings]}
    if arguments.folder is not None:
        return random_llm(arguments.folder, **common)
    return LLM(device=arguments.device, **common)


def with_pool(arguments: argparse.Namespace, *, connector: bool) -> LLM:
    """One whose pool holds `pool` prompts."""
    sized = build(arguments, ["cache.memory=1GiB"])
    assert sized.plan.pool is not None
    each = sized.engine.scheduler.cache.blocks_for_one(arguments.length + 1) * sized.plan.pool.block_bytes
    del sized
    settings = [f"cache.memory={arguments.pool * each // 2**10}KiB"]
    if connector:
        memory = f"{arguments.prompts * each // 2**10 + 2**16}KiB"
        settings += ["kv_connector.name=host_memory", f"kv_connector.host_memory.memory={memory}"]
    return build(arguments, settings)


def serve(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[int], int]:
    """Seconds for all prompts one by one, their tokens, and how many prompt tokens were loaded."""
    start, tokens, loaded = perf_counter(), list[int](), 0
    for prompt in prompts:
        output = llm.generate([prompt], ONE)[0]  # waits for the token
        tokens += output.outputs[0].token_ids
        loaded += output.metrics.num_loaded_tokens
    return perf_counter() - start, tokens, loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=positive, default=12)
    parser.add_argument("--length", type=positive, default=1500)
    parser.add_argument("--pool", type=positive, default=6)
    arguments = parser.parse_args()
    if arguments.folder is not None or arguments.device != "cpu":
        require_gpus()
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 4000, (arguments.prompts, arguments.length)).tolist()
    warm = rng.integers(100, 4000, (2, arguments.length)).tolist()
    seen = []
    for connector in (False, True):
        llm = with_pool(arguments, connector=connector)
        size = llm.plan.pool.block_bytes if llm.plan.pool else 0
        print(f"connector {connector}: {llm.plan.summary()}; a block of {llm.plan.block_size} tokens is {size} bytes")
        serve(llm, warm)
        for number in range(3):
            seconds, tokens, loaded = serve(llm, prompts)
            seen.append(tokens)
            each = f"{1e3 * seconds / arguments.prompts:.1f} ms a prompt"
            print(f"  round {number}: {seconds:.3f} s, {each}, {loaded} tokens loaded")
        del llm
        torch.cuda.empty_cache()
    print("the same tokens" if all(tokens == seen[0] for tokens in seen) else "other tokens, as rounding may give")


if __name__ == "__main__":
    main()
