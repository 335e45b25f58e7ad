"""Time to load a model's weights, beside the time to read their bytes.

    python benchmarks/load_weights.py --model benchmarks/models/qwen3-0.6b [--device cuda:0] [--dtype bfloat16]
        [--runs 3] [--shards 20] [--keep] [--json FILE]

Random weights are written to a temporary folder in so many shards, unless --keep uses the folder's own. They are loaded
as a checkpoint, and as the folder that `save_weights` writes. "cold" runs begin with the files out of the page cache,
"warm" runs find them there. "bytes alone" reads the files into memory with four threads, and keeps nothing. "mapped"
touches each page of the mapped files in order, which is how a loader without reading ahead gets them. Medians.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from command_line import at_least
from result_file import write_result
from safetensors import safe_open

from slotline.cli.random_weights import random_checkpoint
from slotline.planner.plan import make_plan
from slotline.registry.config import load_config
from slotline.registry.contracts import ModelContext
from slotline.registry.contracts.model_family import SAVED_WEIGHTS

SHORT = "--model benchmarks/models/llama-tiny --runs 1"
COLUMNS = ["weights", "MiB", "cold, s", "warm, s", "cold / bytes alone", "warm / bytes alone"]
BLOCK = 16 << 20


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def evict(files: Iterable[Path]) -> None:
    """Take files out of the page cache, as far as the system lets go of them."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes(folder: Path) -> None:
    """Read all blocks of a folder's weights with four threads."""
    blocks = [(file, start) for file in files_of(folder) for start in range(0, file.stat().st_size, BLOCK)]

    def read(block: tuple[Path, int]) -> None:
        with block[0].open("rb", buffering=0) as opened:
            opened.seek(block[1])
            opened.read(BLOCK)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, blocks))


def touch_mapped(folder: Path) -> None:
    """Touch each page of the weights, in the order of the files."""
    for file in files_of(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                opened.get_tensor(name).view(torch.uint8).view(-1)[::4096].sum()


def loader(folder: Path, device: str, dtype: str) -> Callable[[], Any]:
    """Return a function that loads a folder's model as an engine does."""
    planned = make_plan(load_config(None, values={"model": str(folder), "device": device, "dtype": dtype}))
    context = ModelContext(
        contract=1,
        facts=planned.facts,
        device=planned.device,
        dtype=planned.plan.dtype,
        load_format=planned.load_format,
        options=planned.options(planned.family_descriptor),
    )

    def load() -> Any:
        model = planned.family.load(context)
        if planned.device.startswith("cuda"):
            torch.cuda.synchronize()
        return model

    return load


def times(act: Callable[[], Any], files: list[Path], runs: int) -> tuple[float, float]:
    """Return the median seconds of an act, cold and warm."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(runs):
        for cold in (True, False):
            if cold:
                evict(files)
            begun = time.perf_counter()
            act()
            found[cold].append(time.perf_counter() - begun)
    return median(found[True]), median(found[False])


def rows_of(folder: Path, form: str, load: Callable[[], Any], runs: int) -> list[list[str]]:
    """Measure a folder: its bytes alone, mapped, and as a model."""
    files = files_of(folder)
    size = sum(file.stat().st_size for file in files) / 2**20
    acts = {
        f"{form}: bytes alone": lambda: read_bytes(folder),
        f"{form}: mapped": lambda: touch_mapped(folder),
        f"{form}: loaded": load,
    }
    rows: list[list[str]] = []
    alone = (0.0, 0.0)
    for name, act in acts.items():
        cold, warm = times(act, files, runs)
        alone = alone if rows else (cold, warm)
        ratios = (f"{cold / alone[0]:.2f}", f"{warm / alone[1]:.2f}")
        rows.append([f"{name} ({len(files)} files)", f"{size:.0f}", f"{cold:.2f}", f"{warm:.2f}", *ratios])
        print("  ".join([rows[-1][0].ljust(36), *(cell.rjust(10) for cell in rows[-1][1:])]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="a folder with a config.json")
    parser.add_argument("--keep", action="store_true", help="use the folder's own weights")
    parser.add_argument("--shards", type=at_least(1), default=1, help="files of the random weights, about")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runs", type=at_least(1), default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slotline-load-", dir=os.environ.get("TMPDIR")) as scratch:
        source = options.model
        if not options.keep:
            source = random_checkpoint(options.model, Path(scratch, "checkpoint"), options.dtype, shards=options.shards)
        load = loader(source, options.device, options.dtype)
        saved = Path(scratch, "saved")
        load().save_weights(saved)  # which loads kernels too
        assert (saved / SAVED_WEIGHTS).is_file()
        print("  ".join([COLUMNS[0].ljust(36), *(head.rjust(10) for head in COLUMNS[1:])]))
        rows = rows_of(source, "checkpoint", load, options.runs)
        rows += rows_of(saved, "saved", loader(saved, options.device, options.dtype), options.runs)
    if options.json:
        write_result(options.json, "load_weights", COLUMNS, rows)


if __name__ == "__main__":
    main()
