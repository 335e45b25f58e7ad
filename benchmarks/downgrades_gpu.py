"""What each part gives: the same model on a GPU with one part after the other taken away.

    python benchmarks/downgrades_gpu.py benchmarks/models/qwen3-0.6b [--scale 0.25] [--only "no graphs"]

Random weights, one process, one engine after the other. `latency` is one request, `nano` many; both are scaled down,
so their figures compare with each other and not with those of engine_gpu.py. Each line says by what factor the
setting is slower than what slotline chose, and what the plan calls the downgrade, where it knows of one. A setting
whose engine fails is said to, and the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from pathlib import Path

import torch
from command_line import require_gpus
from engine_gpu import build, figure

from slotline.cli.bench_run import timed_runs
from slotline.cli.workloads import workload
from slotline.registry.errors import SlotlineError

SHORT = "benchmarks/models/llama-tiny --scale 0.01"
DOWNGRADES: Mapping[str, tuple[str, ...]] = {
    "as chosen": (),
    "graphs for decode alone": ("graphs.mode=full_decode_only",),
    "graphs in pieces": ("graphs.mode=piecewise",),
    "no graphs": ("graphs.mode=none",),
    "step by step, not asynchronous": ("scheduler.async=false",),
    "transformers' modules, not fused": ("optimize=false",),
    "attention by flash_attn": ("attention.backend=flash_attn",),
    "attention by flex": ("attention.backend=flex",),
    "attention by torch": ("attention.backend=torch",),
}
"""Settings that take one part away, by what is lost."""
WORKLOADS = ("latency", "nano")


def measure(folder: Path, settings: tuple[str, ...], scale: float) -> tuple[dict[str, tuple[float, str]], list[str]]:
    """Seconds and figure of each workload, and the downgrades that the plan tells of."""
    llm, _ = build(folder, list(settings))
    told = [f"{note.code} {note.text}" for note in llm.plan.downgrades]
    found = {}
    for name in WORKLOADS:
        work = workload(name, scale)
        seconds = min(run.seconds for run in timed_runs(llm, work, 1))
        found[name] = (seconds, figure(work, seconds))
    return found, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=0.25, help="of the workloads' requests and lengths")
    parser.add_argument("--only", nargs="*", default=list(DOWNGRADES), choices=list(DOWNGRADES), metavar="NAME")
    arguments = parser.parse_args()
    require_gpus()
    best: dict[str, float] = {}
    failed = False
    for title in dict.fromkeys(("as chosen", *arguments.only)):
        try:
            found, told = measure(arguments.folder, DOWNGRADES[title], arguments.scale)
        except SlotlineError as error:
            print(f"{title:34}failed: {error}", flush=True)
            failed = True
            continue
        best = best or {name: seconds for name, (seconds, _) in found.items()}
        parts = (f"{name} {said} ({seconds / best[name]:.2f}x)" for name, (seconds, said) in found.items())
        print(f"{title:34}{', '.join(parts)}", *(f"    {line}" for line in told), sep="\n", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
