"""A soak: requests come, go, are aborted and preempted at random for as long as asked; then everything is counted.

    python benchmarks/soak.py [--minutes 10] [--compare 4000] [--device cuda] [--set a.b=value]

The engine under test runs as configured, by default asynchronously and with graphs where the device has them, on a
cache too small for its requests. At the end no row, block or byte may be missing, and every token of the requests that
are compared, drawn at random from all, must equal what a second engine gives that runs step by step, without graphs,
prefix caching or preemption. Both are batch-invariant and in float32, so that no token hangs on a rounding; with
`--set batch_invariant=false` the engine under test rounds as by default, and a token in ten thousand may differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from random import Random
from time import monotonic
from typing import Any

import psutil
import torch
from command_line import positive, require_gpus

from slotline.core import LLM, SamplingParams
from slotline.core.batch.request import Request

SHORT = "--minutes 0.005 --compare 4"
MAX_MODEL_LEN = 192
PLAIN: dict[str, Any] = {"scheduler.async": False, "graphs.mode": "none", "enable_prefix_caching": False}


def parameters(rng: Random) -> SamplingParams:
    """Greedy or sampled, with penalties, stop tokens or log-probabilities now and then."""
    chosen: dict[str, Any] = {"max_tokens": rng.randrange(1, 64), "seed": rng.randrange(2**31), "temperature": 0.0}
    if rng.random() < 0.6:
        chosen |= {
            "temperature": rng.choice([0.5, 0.8, 1.1]),
            "top_p": rng.choice([1.0, 0.9]),
            "top_k": rng.choice([0, 40]),
        }
    if rng.random() < 0.2:
        chosen |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
    if rng.random() < 0.2:
        chosen["stop_token_ids"] = [rng.randrange(3, 4000) for _ in range(20)]
    if rng.random() < 0.1:
        chosen["logprobs"] = 2
    return SamplingParams(**chosen, detokenize=False)


def soak(llm: LLM, seconds: float, rng: Random) -> tuple[list[Request], int]:
    """Serve random requests for so long; the requests in order, and how often one was preempted."""
    engine, requests = llm.engine, list[Request]()
    heads = [[rng.randrange(3, 4000) for _ in range(48)] for _ in range(8)]  # shared prefixes
    end = monotonic() + seconds
    while monotonic() < end or engine.has_work:
        if monotonic() < end:
            for _ in range(rng.randrange(4) if len(engine.requests) < 64 else 0):
                prompt = rng.choice(heads)[: rng.randrange(1, 49)] + [
                    rng.randrange(3, 4000) for _ in range(rng.randrange(1, 64))
                ]
                requests.append(engine.add(f"soak-{len(requests)}", prompt, parameters(rng)))
            if engine.requests and rng.random() < 0.05:
                engine.abort(rng.choice(list(engine.requests)))
        engine.step()
    return requests, sum(request.metrics.num_preemptions for request in requests)


def held(device: str) -> int:
    """Bytes that the engine's memory takes: on the device, or of this process."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return int(psutil.Process().memory_info().rss)


def main() -> int:
    """Soak, count, compare; the exit code is 1 if anything is missing or differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compare", type=positive, help="how many requests to compare; all where it is not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every-step", action="store_true", help="run the integrity checker after every step")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="a setting of the engine under test"
    )
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        require_gpus()
    common: dict[str, Any] = {
        "device": arguments.device,
        "dtype": "float32",
        "batch_invariant": True,
        "scheduler.max_model_len": MAX_MODEL_LEN,
        "scheduler.max_batched_tokens": 256,
        "observability.progress": False,
    }
    tested = {"scheduler.async": True, "cache.memory": "12MiB", "scheduler.max_requests": 48}
    tested["observability.check_integrity"] = arguments.check_every_step
    settings = [f"{key}={json.dumps(value)}" for key, value in (common | tested).items()]
    llm = LLM(overrides=[*settings, *arguments.set])
    print(llm.plan.summary())
    rng = Random(arguments.seed)
    soak(llm, min(10.0, 6 * arguments.minutes), Random(arguments.seed + 1))  # what is compiled and cached once
    before = held(arguments.device)
    requests, preemptions = soak(llm, 60 * arguments.minutes, rng)
    after, pool = held(arguments.device), llm.engine.scheduler.cache.pool
    aborted = sum(request.finish_reason == "abort" for request in requests)
    tokens = sum(len(request.output_token_ids) for request in requests)
    late = [f"{kernel.name} {kernel.seconds:.2f} s" for kernel in llm.engine.late_kernels if not kernel.on_disk]
    print(f"{len(late)} kernels compiled while requests ran: {', '.join(late)}")
    print(f"{len(requests)} requests, {tokens} tokens, {aborted} aborted, {preemptions} preemptions")
    faults = []
    if pool.num_free != pool.num_blocks - 1:
        faults.append(f"{pool.num_blocks - 1 - pool.num_free} blocks are not free")
    if llm.engine.rows.num_free != llm.engine.rows.max_requests:
        faults.append(f"{llm.engine.rows.max_requests - llm.engine.rows.num_free} rows are not free")
    slack = 0 if arguments.device == "cuda" else 256 * 2**20  # a process grows by what its allocator keeps
    if after > before + slack:
        faults.append(f"{after - before} bytes more are held than before")
    compared = rng.sample(requests, min(len(requests), arguments.compare or len(requests)))
    faults += compare(compared, LLM(**common, **PLAIN, memory="512MiB", max_num_seqs=64))
    equal = f"no leak, and every token of {len(compared)} requests equals the plain engine's"
    print(equal if not faults else "\n".join(faults))
    return bool(faults)


def compare(requests: list[Request], plain: LLM) -> list[str]:
    """Where the plain engine gives other tokens; an aborted request's are the beginning of its own."""
    wanted = plain.generate([r.prompt_token_ids for r in requests], [r.params for r in requests])
    faults = []
    for request, output in zip(requests, wanted, strict=True):
        own, other = request.output_token_ids, output.outputs[0].token_ids
        if own != other[: len(own)] or (request.finish_reason != "abort" and own != other):
            faults.append(f"{request.request_id} ({request.finish_reason}) differs: {own[:8]}... is not {other[:8]}...")
    return faults[:5]


if __name__ == "__main__":
    sys.exit(main())
