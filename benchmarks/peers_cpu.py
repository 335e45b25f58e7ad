"""The engine on a CPU beside its peers, each in a Python of its own: decode at batch 1 and 16, and a prompt.

    python benchmarks/peers_cpu.py [--peers transformers openvino] [--dtype float32 bfloat16] [--runs 5]
        [--openvino-python PATH] [--json FILE]
    python benchmarks/peers_cpu.py --model benchmarks/models/qwen3-0.6b --scale 0.1 --runs 1

Each cell is one `slotline bench WORKLOAD --against PEER` with a random checkpoint of the configuration in `--model`,
which both engines load. `--scale` shortens prompts and outputs and takes fewer requests, for a larger model. OpenVINO
GenAI runs in the Python that has it (pip install openvino-genai "optimum-intel[openvino]"), or in the environment that
`slotline bench --peer-install` made. The file of `--json` has the table, and the cells that
`slotline bench --check FILE` runs again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from command_line import positive
from result_file import print_rows, write_result

from slotline.cli import main as slotline
from slotline.cli.bench_ratios import read_cells

SHORT = "--model benchmarks/models/llama-tiny --peers transformers --dtype bfloat16 --workloads decode1 --runs 1"
MODEL = Path("benchmarks/models/llama-100m")
FIGURES = {
    "decode1": ("decode_tokens_per_s", "decode, batch 1, tokens/s"),
    "decode16": ("decode_tokens_per_s", "decode, batch 16, tokens/s"),
    "prefill512": ("prefill_tokens_per_s", "prefill 512, tokens/s"),
}
"""The figure of each workload, and its title."""
TARGETS = {
    ("float32", "decode1"): 1.6,
    ("float32", "decode16"): 2.2,
    ("float32", "prefill512"): 1.2,
    ("bfloat16", "decode1"): 1.7,
    ("bfloat16", "decode16"): 2.4,
    ("bfloat16", "prefill512"): 1.25,
}
"""Ratios to transformers that are aimed at. To the others it is 1."""


def compare(given: argparse.Namespace, peer: str, dtype: str, workload: str, ratios: Path) -> None:
    """Run one cell and keep it.

    Raises:
        SystemExit: if it cannot be run.
    """
    command = ["bench", workload, "--against", peer, "--model", str(given.model), "--random-weights"]
    command += ["--set", "device=cpu", "--set", f"dtype={dtype}", "--runs", str(given.runs)]
    command += ["--scale", str(given.scale), "--save", str(ratios)]
    if peer == "openvino" and given.openvino_python is not None:
        command += ["--peer-python", given.openvino_python]
    if code := slotline(command):
        raise SystemExit(code)


def table(cells: Sequence[Mapping[str, Any]], peers: Sequence[str], dtypes: Sequence[str]) -> list[list[str]]:
    """Return a row for each dtype and workload: slotline's figure beside each peer, the peer's, the ratio, the target.

    slotline runs once beside each peer, so that a ratio is of one run.
    """
    found = {(cell["peer"], cell["dtype"], cell["workload"]): cell["figures"] for cell in cells}
    rows = []
    for dtype in dtypes:
        for workload, (key, title) in FIGURES.items():
            row = [f"{dtype}, {title}"]
            for peer in peers:
                figure = found.get((peer, dtype, workload), {}).get(key)
                target = TARGETS.get((dtype, workload), 1.0) if peer == "transformers" else 1.0
                numbers = ["", "", ""] if figure is None else [f"{figure[n]:,.1f}" for n in ("ours", "theirs")]
                row += numbers if figure is None else [*numbers, f"{figure['ratio']:.2f} ({target:g})"]
            if any(row[1:]):
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=["transformers", "openvino"], help="as `slotline bench` has them")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--workloads", nargs="+", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder with a config.json")
    parser.add_argument("--runs", type=positive, default=5, help="timed runs of each engine; the median counts")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on requests and lengths")
    parser.add_argument("--openvino-python", metavar="PATH", help="a Python that has OpenVINO GenAI")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write table and cells as a result file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ratios = Path(folder) / "ratios.json"
        for dtype in given.dtype:
            for workload in given.workloads:
                for peer in given.peers:
                    compare(given, peer, dtype, workload, ratios)
        cells = read_cells(ratios)
    columns = ["figure"]
    for peer in given.peers:
        columns += [f"slotline beside {peer}", peer, f"ratio to {peer} (target)"]
    rows = table(cells, given.peers, given.dtype)
    print_rows(columns, rows)
    if given.json:
        versions = {cell["peer"]: cell["peer_version"] for cell in cells}
        named = ", ".join(f"{peer} {versions[peer]}" for peer in given.peers)
        note = f"Random weights of {given.model.name}; {named}; {cells[0]['threads']} threads; medians of {given.runs}."
        write_result(given.json, "peers_cpu", columns, rows, note=note)
        commands = [f"python benchmarks/peers_cpu.py --model {given.model} --runs {given.runs}"]
        found = json.loads(given.json.read_text(encoding="utf-8")) | {"commands": commands, "cells": cells}
        given.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
