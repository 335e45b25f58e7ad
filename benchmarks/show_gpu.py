"""Everything that is claimed about a GPU, in one call: conformance, speed, explanations, and what each downgrade costs.

    python benchmarks/show_gpu.py [--only conformance speed explain downgrades]

Prints the conformance level of every attention and state backend installed, the end-to-end workloads beside the card's
limits, `explain` for a model with sliding-window and full layers under the backends that serve it differently, and the
factor by which Qwen3-0.6B's shape slows down when a part is taken away. Jobs run one at a time on each visible GPU.
Weights are random.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import torch

HERE = Path(__file__).parent
SMALL, LARGE = "qwen3-0.6b", "llama-3.1-8b"
BACKENDS = ("triton", "flash_attn", "flashinfer", "flex", "torch")
MIXED = ("flash_attn", "flashinfer", "triton")
JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))  # conformance is compiling, for the most part
DOWNGRADES = {
    "as chosen": (),
    "graphs for decode alone": ("graphs.mode=full_decode_only",),
    "graphs in pieces": ("graphs.mode=piecewise",),
    "no graphs": ("graphs.mode=none",),
    "step by step, not asynchronous": ("scheduler.async=false",),
    "transformers' modules, not fused": ("optimize=false",),
    "attention by flash_attn": ("attention.backend=flash_attn",),
    "attention by torch": ("attention.backend=torch",),
}
"""Settings that take one part away, by what is lost."""


def run(command: Sequence[str], gpu: str, seconds: float = 240) -> str:
    """What a command printed, errors included, on one GPU."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:.0f} s"
    return (
        done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr[-2000:]}\nexit status {done.returncode}"
    )


def slotline(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from slotline.core.cli import main; raise SystemExit(main())", *arguments]


def engine(model: str, *arguments: str) -> list[str]:
    return [sys.executable, str(HERE / "engine_gpu.py"), str(HERE / "models" / model), *arguments]


def mixed_model(folder: Path) -> str:
    """A tiny Gemma 3 of random weights: three layers with a window of 512 tokens and one without."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=1024,
        sliding_window=512,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def jobs(only: Sequence[str], model: str) -> dict[str, list[str]]:
    """Commands by title, in the order in which they are shown."""
    found: dict[str, list[str]] = {}
    if "conformance" in only:
        for backend in BACKENDS:
            found[f"conformance: {backend}"] = slotline(
                "conform", f"attention:{backend}", "--device", "cuda", "--level", "L4", "--jobs", str(JOBS)
            )
    if "speed" in only:
        for name in (SMALL, LARGE):
            found[f"speed: {name}"] = engine(name)
    if "explain" in only:
        for backend in MIXED:
            found[f"explain: sliding and full layers, {backend}"] = slotline(
                "explain", "--model", model, "--device", "cuda", "--set", f"attention.backend={backend}"
            )
    if "downgrades" in only:
        for title, settings in DOWNGRADES.items():
            chosen = [argument for setting in settings for argument in ("--set", setting)]
            found[f"downgrade: {title}"] = engine(SMALL, "--workload", "latency", "nano", "--runs", "1", *chosen)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["conformance", "speed", "explain", "downgrades"]
    parser.add_argument("--only", nargs="*", default=parts, choices=parts)
    arguments = parser.parse_args()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus: Queue[str] = Queue()
    for gpu in visible.split(","):
        gpus.put(gpu)

    def work(command: Sequence[str]) -> str:
        gpu = gpus.get()
        try:
            return run(command, gpu)
        finally:
            gpus.put(gpu)

    print(torch.cuda.get_device_name(), f"x {gpus.qsize()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(gpus.qsize()) as pool:
        commands = jobs(arguments.only, mixed_model(Path(folder)))
        for title, printed in zip(commands, pool.map(work, commands.values()), strict=True):
            lines = [line for line in printed.splitlines() if line.strip() and "Warning" not in line]
            shown = lines[-4:] if title.startswith("conformance") else lines
            print(f"\n== {title}", *shown, sep="\n", flush=True)


if __name__ == "__main__":
    main()
