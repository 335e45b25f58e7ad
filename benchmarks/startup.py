"""From process start to the first token, phase by phase, with kernels compiled before and not.

    python benchmarks/startup.py --model benchmarks/models/llama-100m [--runs 1] [--set graphs.mode=none]
        [--json FILE]

Random weights are written to a temporary folder first, so that reading them is part of what is timed; they were just
written, so they come from the page cache. Each run is a process of its own. The first has an empty folder for
compiled kernels (Triton's, Inductor's, numba's and our own cache), the others find what it left there. Python's modules
are compiled to bytecode before, as an installation does: a process that is not timed plans the engine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from command_line import at_least
from result_file import write_result

SHORT = "--model benchmarks/models/llama-tiny --runs 0 --set attention.backend=torch --set optimize=false"
CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "NUMBA_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "SLOTLINE_CACHE",
)


def child(model: str, settings: list[str]) -> None:
    """One start, timed from the moment at which the parent called for the process."""
    begun = float(os.environ["STARTED_AT"])
    if "STARTUP_LOG" in os.environ:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    from slotline.core import LLM, SamplingParams

    imported = time.time()
    llm = LLM(model=model, overrides=settings)
    built = time.time()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0, detokenize=False), progress=False)
    done = time.time()
    startup = dict(llm.engine.startup)
    graphs = llm.engine.graphs.report.to_json() if llm.engine.graphs else None
    phases = {"process and imports": imported - begun, **startup}
    phases["other"] = built - imported - sum(startup.values())
    phases["first token"] = done - built
    print(json.dumps({"total": done - begun, "phases": phases, "graphs": graphs, "plan": llm.plan.summary()}))


def environment_of(root: Path, caches: Path) -> dict[str, str]:
    """The variables of a child: bytecode is written below `root` if this process writes none, kernels to `caches`."""
    environment = {"PYTHONPYCACHEPREFIX": str(root / "bytecode"), **os.environ, **dict.fromkeys(CACHES, str(caches))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def write_bytecode(model: Path, settings: list[str], root: Path) -> None:
    """Import what a start imports, in a process that builds nothing and keeps its kernels elsewhere."""
    lines = (
        "import slotline.builder.engine_builder",
        "from slotline.planner.plan import make_plan",
        "from slotline.registry.config import load_config",
        f"make_plan(load_config(overrides={settings!r}, values={{'model': {str(model)!r}}}))",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment_of(root, root / "unused"), check=True)


def start(model: Path, settings: list[str], root: Path, profile: Path | None) -> dict[str, Any]:
    """Run a child; its report."""
    flags = ["-m", "cProfile", "-o", str(profile)] if profile else []
    command = [sys.executable, *flags, __file__, "--child", "--model", str(model)]
    environment = {**environment_of(root, root / "caches"), "STARTED_AT": str(time.time())}
    done = subprocess.run(
        [*command, *(f"--set={item}" for item in settings)], env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"a start failed with exit code {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report["phases"].items())
    print(f"started in {report['total']:.1f} s: {phases}", file=sys.stderr, flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a config.json; or a checkpoint, with --keep")
    parser.add_argument("--keep", action="store_true", help="use the folder's own weights")
    parser.add_argument("--runs", type=at_least(0), default=1, help="starts with kernels cached")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    parser.add_argument("--log", action="store_true", help="show what each start logs, with its milliseconds")
    parser.add_argument("--profile", metavar="FILE", help="profile one more cached start with cProfile into this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.model, options.set)
        return
    if options.log:
        os.environ["STARTUP_LOG"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = Path(options.model)
        (root / "caches").mkdir()
        from slotline.cli.random_weights import random_checkpoint  # here: children time their own imports

        before = time.time()
        model = model if options.keep else random_checkpoint(model, root)
        print(f"weights written in {time.time() - before:.1f} s", file=sys.stderr, flush=True)
        write_bytecode(model, options.set, root)
        reports = [start(model, options.set, root, None) for _ in range(1 + options.runs)]
        if options.profile:
            start(model, options.set, root, Path(options.profile))
    print(reports[-1]["plan"])
    print(f"graphs: {reports[-1]['graphs']}")
    names = list(dict.fromkeys(name for report in reports for name in report["phases"]))
    heads = ["not cached", *(["cached"] * options.runs)]
    print("  ".join(["phase".ljust(20), *(head.rjust(10) for head in heads)]))
    for name in names:
        print("  ".join([name.ljust(20), *(f"{report['phases'].get(name, 0.0):10.2f}" for report in reports)]))
    if options.json:
        rows = [[name, *(f"{report['phases'].get(name, 0.0):.2f}" for report in reports)] for name in names]
        rows.append(["total", *(f"{report['total']:.2f}" for report in reports)])
        write_result(options.json, "startup", [f"{Path(options.model).name}, s", *heads], rows)
    print("  ".join(["total".ljust(20), *(f"{report['total']:10.2f}" for report in reports)]))


if __name__ == "__main__":
    main()
