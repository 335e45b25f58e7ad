"""Decode throughput on a GPU without adapters, with one, and with many, in one engine with random weights.

    python benchmarks/lora_gpu.py benchmarks/models/llama-3.1-8b [--adapters 16] [--rank 16] [--requests 64]
        [--prompt 128] [--output 256] [--rounds 3] [--kernels] [--set lora.name=torch]

All cases run in turn, round after round, in one engine with graphs for no adapter, for one and for several; a request's
adapter is its number modulo the number of adapters. Figures are the medians of the rounds: output tokens per second of
whole runs, prompts included, and microseconds of a decode step's graph by events.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from command_line import positive, require_gpus
from safetensors.torch import save_file
from step_gpu import engine, finish, kernels, wall

from slotline.core import LLM, LoRARequest, SamplingParams

SHORT = "benchmarks/models/llama-tiny --adapters 2 --requests 2 --prompt 16 --output 8 --rounds 1"


def write_adapter(folder: Path, modules: dict[str, tuple[int, int]], rank: int) -> None:
    """A random adapter on every linear layer, as PEFT would save it."""
    generator, tensors = torch.Generator(device="cuda").manual_seed(1), {}
    for name, (inner, outer) in modules.items():
        for part, shape in (("A", (rank, inner)), ("B", (outer, rank))):
            values = torch.randn(shape, generator=generator, device="cuda") * 0.01
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values.to(torch.bfloat16).cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def add(llm: LLM, args: argparse.Namespace, adapters: Sequence[LoRARequest]) -> None:
    """Queue the requests."""
    generator = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True, detokenize=False)
    for index in range(args.requests):
        adapter = adapters[index % len(adapters)] if adapters else None
        tokens = generator.integers(0, 10_000, args.prompt).tolist()
        llm.engine.add(f"r{index}", tokens, params, lora_request=adapter)


def run(llm: LLM, args: argparse.Namespace, adapters: Sequence[LoRARequest]) -> float:
    """Output tokens per second of a whole run."""
    add(llm, args, adapters)
    torch.cuda.synchronize()
    start = perf_counter()
    finish(llm)
    torch.cuda.synchronize()
    return float(args.requests * args.output / (perf_counter() - start))


def replay(llm: LLM, args: argparse.Namespace, adapters: Sequence[LoRARequest]) -> Any:
    """A call that replays the last full decode step."""
    graphs, seen = llm.engine.runner.graphs, []
    assert graphs is not None, llm.plan.explain()
    original = graphs.replay

    def remember(inputs: Any) -> Any:
        seen.append(inputs)
        return original(inputs)

    graphs.replay = remember  # type: ignore[method-assign]
    add(llm, args, adapters)
    for _ in range(12):
        llm.engine.step()
    inputs = seen[-1]
    assert inputs.num_tokens == args.requests, inputs.num_tokens
    assert (inputs.extras["adapters"] is not None) == bool(adapters)
    del graphs.replay
    measured = wall(lambda: graphs.replay(inputs))
    if args.kernels:
        found = kernels(lambda: graphs.replay(inputs))
        print(f"{len(adapters)} adapters: busy {sum(kernel.time for kernel in found):.0f} us")
        for kernel in found[:14]:
            print(f"   {kernel.time:9.1f} us {kernel.count:4d} x {kernel.time / kernel.count:8.2f}  {kernel.name[:90]}")
    for request_id in list(llm.engine.requests):
        llm.engine.abort(request_id)
    finish(llm)
    return measured


def main() -> None:
    """See the module's description."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name, default in (("adapters", 16), ("rank", 16), ("requests", 64), ("prompt", 128), ("output", 256)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    require_gpus()
    settings = [
        "lora.name=triton",
        f"lora.max_adapters={args.adapters}",
        f"lora.max_rank={args.rank}",
        f"graphs.sizes=[{args.requests}]",
        *args.set,
    ]
    llm = engine(args.model, args.prompt + args.output, args.requests, 8192, settings)
    held = llm.engine.extension("adapters")
    assert held is not None
    with tempfile.TemporaryDirectory() as name:
        write_adapter(Path(name), held.steps._modules, args.rank)
        many = [LoRARequest(f"a{index}", index + 1, name) for index in range(args.adapters)]
        cases = {"none": [], "one adapter": many[:1], f"{args.adapters} adapters": many}
        steps = {title: replay(llm, args, adapters) for title, adapters in cases.items()}
        rates: dict[str, list[float]] = {title: [] for title in cases}
        for _ in range(args.rounds):
            for title, adapters in cases.items():
                rates[title].append(run(llm, args, adapters))
    base_rate, base_step = median(rates["none"]), steps["none"]
    for title in cases:
        rate = median(rates[title])
        print(
            f"{title:12}: {rate:7.0f} tok/s ({100 * rate / base_rate:5.1f} % of none; {min(rates[title]):.0f} to "
            f"{max(rates[title]):.0f}), step {steps[title]:.0f} us ({100 * base_step / steps[title]:.1f} %)"
        )


if __name__ == "__main__":
    main()
