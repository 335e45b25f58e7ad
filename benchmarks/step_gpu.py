"""GPU time of a step of a dense decoder, by kind of kernel, against what the card could do at best.

    python benchmarks/step_gpu.py benchmarks/models/qwen3-0.6b [--decode 1:270 32:270 256:840] [--prefill 4:2048]
        [--kernels] [--set optimize=false] [--json FILE]

A shape is REQUESTS:TOKENS; a decode step has so many tokens of context. Weights are random and made on the device. A
decode step is a replay of its captured graph: wall time is the median of replays by events, busy time the sum of its
kernels as torch's profiler sees them. Prefill runs eagerly; its first step is profiled. The limit is the bytes of
weights and keys over the rate of a large copy on this card, or the operations over that of a large product, whichever
is longer.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from card_rates import measured_rates
from command_line import require_gpus
from result_file import write_result
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families import binding, checkpoint, loading
from slotline.plugins.model_families.quantized import load

SHORT = "benchmarks/models/llama-tiny --decode 1:16 --prefill 1:16"
ROOM = 64
"""Tokens that a request may give, so that none ends while others are still prefilled."""
KINDS = {
    "attention": r"attend|join|flash|fmha|prefill|BatchDecode|BatchPrefill",
    "cache writes": r"^_?store|reshape_and_cache|AppendPaged|write_keys",
    "norms": r"rms_norm",
    "rotary": r"rotate|turn",
    "activation": r"act_and_mul",
    "products": r"gemm|gemv|nvjet|cutlass|splitK|cublas|linear",
}
"""Kinds of kernels by their names, first match; the rest is `other`."""


class Kernel(NamedTuple):
    """All launches of one kernel: how many, and their time in microseconds."""

    name: str
    count: int  # type: ignore[assignment]
    time: float


def random_model(context: Any, *_: Any) -> Any:
    """Stands in for reading a checkpoint: random weights, made where they will lie."""
    found = checkpoint.read(context.facts.path)
    binding.register(binding.ATTENTION_NAME, binding.slot_attention)
    torch.manual_seed(0)
    with torch.device(context.device):
        model = found.model_class._from_config(
            found.config, dtype=loading.torch_dtype(context.dtype), attn_implementation=binding.ATTENTION_NAME
        )
        if context.weights is not None:  # quantized as they are, see weights.quantize
            load.put(model, context.weights, context)
    return model.eval().requires_grad_(False)


def random_llm(folder: Path, **settings: Any) -> LLM:
    """An LLM over the folder's configuration, with random bfloat16 weights made on the device."""
    return LLM(model=folder, device="cuda", dtype="bfloat16", **{"load.format": "dummy"}, **settings)


def engine(folder: Path, longest: int, requests: int, tokens: int, settings: list[str]) -> LLM:
    """An LLM of so many requests, without prefix caching."""
    return random_llm(
        folder,
        max_model_len=longest,
        max_num_seqs=requests,
        max_num_batched_tokens=tokens,
        overrides=["cache.prefix_caching=false", *settings],
    )


def kernels(work: Callable[[], Any]) -> list[Kernel]:
    """What runs on the device during `work`, longest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Mem", "Activity")):
            found[event.name].append(event.device_time)
    return sorted((Kernel(n, len(t), sum(t)) for n, t in found.items()), key=lambda kernel: -kernel.time)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def wall(replay: Callable[[], Any], times: int = 50) -> float:
    """Median microseconds of a replay."""
    taken = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        taken.append(1e3 * start.elapsed_time(end))
    return float(median(taken))


def show(title: str, measured: float, found: list[Kernel], limit: float, *, each: bool) -> None:
    """One line of the step, one by kind, and if wanted one for each kernel."""
    by_kind: dict[str, float] = defaultdict(float)
    for kernel in found:
        by_kind[kind_of(kernel.name)] += kernel.time
    busy, launches = sum(by_kind.values()), sum(kernel.count for kernel in found)
    print(
        f"{title}: {measured:.0f} us, busy {busy:.0f} us, {launches} launches, limit {limit:.0f} us "
        f"({100 * limit / measured:.0f} %)"
    )
    print("   " + ", ".join(f"{kind} {time:.0f}" for kind, time in sorted(by_kind.items(), key=lambda item: -item[1])))
    for kernel in found[:16] if each else ():
        print(f"   {kernel.time:9.1f} us {kernel.count:4d} x {kernel.time / kernel.count:8.2f}  {kernel.name[:90]}")


def add(llm: LLM, requests: int, tokens: int, max_tokens: int) -> None:
    generator = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for index in range(requests):
        llm.engine.add(f"{tokens}-{index}", generator.integers(0, 10_000, tokens).tolist(), params)


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()


def decode(llm: LLM, requests: int, tokens: int) -> tuple[float, list[Kernel]]:
    """A replay of the decode step of requests that have all been prefilled."""
    graphs, seen = llm.engine.runner.graphs, []
    assert graphs is not None, llm.plan.explain()
    original = graphs.replay

    def remember(inputs: Any) -> Any:
        seen.append(inputs)
        return original(inputs)

    graphs.replay = remember  # type: ignore[method-assign]
    add(llm, requests, tokens, ROOM - 1)
    while not seen or seen[-1].shape.query_len != 1 or seen[-1].num_tokens < requests:
        llm.engine.step()
    inputs = seen[-1]
    for _ in range(3):
        original(inputs)
    result = wall(lambda: original(inputs)), kernels(lambda: original(inputs))
    graphs.replay = original  # type: ignore[method-assign]
    finish(llm)
    return result


def prefill(llm: LLM, requests: int, tokens: int) -> tuple[float, list[Kernel]]:
    """The first step, which holds all tokens."""
    for _ in range(2):
        add(llm, requests, tokens, 1)
        finish(llm)
    taken = []
    for _ in range(3):
        add(llm, requests, tokens, 1)
        taken.append(wall(llm.engine.step, times=1))
        finish(llm)
    add(llm, requests, tokens, 1)
    found = kernels(llm.engine.step)
    finish(llm)
    return median(taken), found


def limit(llm: LLM, requests: int, context: int, tokens: int) -> float:
    """Microseconds at best: `tokens` new tokens of each request, the last at `context` keys."""
    model: Any = llm.engine.runner.model
    config, layers = model.hf_model.config, model.facts.layers
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for name, p in model.hf_model.named_parameters() if p.dim() == 2 and "embed" not in name)
    body -= 0 if config.tie_word_embeddings else head
    keys = sum(2 * layer.num_kv_heads * layer.head_size for layer in layers) * requests * context
    pairs = requests * (context * tokens - tokens * (tokens - 1) / 2)
    operations = 2 * body * requests * tokens + 2 * head * requests
    operations += sum(4 * layer.num_heads * layer.head_size for layer in layers) * pairs
    rates = measured_rates()
    return float(1e6 * max(2 * (body + head + keys) / rates.bandwidth, operations / rates.operations))


def shape(text: str) -> tuple[int, int]:
    requests, _, tokens = text.partition(":")
    return int(requests), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--decode", type=shape, nargs="*", default=[(1, 270), (32, 270), (256, 840)])
    parser.add_argument("--prefill", type=shape, nargs="*", default=[(4, 2048)])
    parser.add_argument("--kernels", action="store_true", help="the sixteen longest kernels of each step, too")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    arguments = parser.parse_args()
    require_gpus()
    shapes = arguments.decode + arguments.prefill
    longest, largest = max(tokens for _, tokens in shapes) + ROOM, max((r for r, _ in arguments.decode), default=1)
    batch = max([8192, *(requests * tokens for requests, tokens in arguments.prefill)])
    sizes = ",".join(map(str, sorted({requests for requests, _ in arguments.decode}))) or "1"
    llm = engine(arguments.folder, longest, largest, batch, [f"graphs.sizes=[{sizes}]", *arguments.settings])
    rates = measured_rates()
    print(llm.plan.summary(), "\n".join(llm.engine.notes), rates, sep="\n")
    rows = []
    for kind, few in (("decode", arguments.decode), ("prefill", arguments.prefill)):
        for requests, tokens in few:
            measured, found = (decode if kind == "decode" else prefill)(llm, requests, tokens)
            best = limit(llm, requests, tokens, 1 if kind == "decode" else tokens)
            title = f"{kind} {requests} x {tokens}"
            show(title, measured, found, best, each=arguments.kernels)
            launches = sum(kernel.count for kernel in found)
            rows.append([title, f"{measured:.0f}", f"{best:.0f}", f"{100 * best / measured:.0f} %", str(launches)])
    if arguments.json:
        columns = [f"{arguments.folder.name}, step", "us", "limit, us", "share of the limit", "launches"]
        note = f"Random bfloat16 weights. Limit at {rates.bandwidth / 1e12:.2f} TB/s and {rates.operations / 1e12:.0f}"
        write_result(arguments.json, "step_gpu", columns, rows, note=f"{note} TFLOP/s, measured.")


if __name__ == "__main__":
    main()
