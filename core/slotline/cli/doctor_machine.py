"""Checks of the machine: processor, GPU, and the model that ships."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from slotline.cli.finding import Finding, Status
from slotline.kernels.cpu_threads import cores

_NVIDIA = Path("/proc/driver/nvidia/version")
_MODEL_FILES = ("config.json", "tokenizer.json", "*.safetensors")


def check_processor() -> Iterator[Finding]:
    """Check instruction sets, threads and memory."""
    import torch

    from slotline.planner.device import describe_device

    info = describe_device("cpu")
    features = ", ".join(sorted(info.features)) or "none of avx512, avx512_bf16, amx_tile"
    yield Finding(Status.OK, "cpu", f"{info.name}; {features}; {info.total_memory / 2**30:.1f} GiB of memory")
    yield threads_finding(torch.get_num_threads(), cores().usable)


def threads_finding(threads: int, usable: int) -> Finding:
    """Compare threads with cores.

    More threads than cores wait for each other at every barrier. Fewer leave cores idle.
    """
    text = f"torch uses {threads} of {usable} usable cores"
    if threads > usable:
        return Finding(Status.WARN, "threads", text, f"set OMP_NUM_THREADS={usable}")
    return Finding(Status.OK, "threads", text)


def check_gpu() -> Iterator[Finding]:
    """Check that a GPU, if there is one, can be used."""
    import torch

    driver = nvidia_driver()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            text = f"{card.name}, sm_{card.major}{card.minor}, {card.total_memory / 2**30:.0f} GiB, "
            text += f"driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
            yield Finding(Status.OK, f"cuda:{index}", text)
    elif driver is None:
        yield Finding(Status.OK, "cuda", f"no NVIDIA driver; {_build()}")
    elif torch.version.cuda is None:
        fix = "install a CUDA build of torch, or set device = 'cpu' to say that this is meant"
        yield Finding(Status.WARN, "cuda", f"driver {driver} is there, and {_build()}", fix)
    else:
        fix = "update the driver, or install a torch built for an older CUDA; see CUDA_VISIBLE_DEVICES too"
        yield Finding(
            Status.WARN, "cuda", f"driver {driver} is there, and torch for CUDA {torch.version.cuda} sees no card", fix
        )


def nvidia_driver(file: Path = _NVIDIA) -> str | None:
    """Return the version of the NVIDIA kernel driver, or None."""
    found = re.search(r"Module\S*\s+(?:for \S+\s+)?(\d+\.[\d.]+)", file.read_text()) if file.is_file() else None
    return found.group(1) if found else None


def check_small_model() -> Iterator[Finding]:
    """Check the model that runs if no other is named."""
    from slotline.planner.plan import SMALL_MODEL

    missing = [pattern for pattern in _MODEL_FILES if not any(SMALL_MODEL.glob(pattern))]
    if missing:
        text = f"{SMALL_MODEL} lacks {', '.join(missing)}"
        yield Finding(Status.WARN, "small model", text, "name a model: --model PATH, or model = '...' in run.toml")
    else:
        size = sum(file.stat().st_size for file in SMALL_MODEL.rglob("*") if file.is_file())
        yield Finding(Status.OK, "small model", f"{SMALL_MODEL}, {size / 2**20:.1f} MiB")


def _build() -> str:
    import torch

    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"torch {torch.__version__} is built for the CPU"
    )
