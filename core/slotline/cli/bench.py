"""`slotline bench`: time a workload, and show for each figure the share of the machine's limit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotline.cli.bench_drafts import drafts_report, drafts_text
from slotline.cli.command import (
    Command,
    add_config_options,
    add_json_option,
    load,
    overrides,
    print_header,
    print_json,
)
from slotline.cli.random_weights import model_settings
from slotline.cli.table import print_table
from slotline.cli.workloads import WORKLOADS, Workload, workload
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import ConfigError

if TYPE_CHECKING:
    from slotline.cli.bench_figures import Figure
    from slotline.cli.bench_limits import Machine
    from slotline.cli.bench_run import Run
    from slotline.llm.llm import LLM


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    add_config_options(parser)
    parser.add_argument(
        "--model", metavar="PATH", help="a checkpoint folder, or one with a config.json alone (random weights)"
    )
    parser.add_argument("--random-weights", action="store_true", help="random weights even if the folder has its own")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="F", help="factor on requests and lengths (default: 1)"
    )
    parser.add_argument(
        "--runs", type=int, default=3, metavar="N", help="timed runs after a warm-up; the median counts (default: 3)"
    )
    add_json_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    from slotline.cli.bench_figures import figures
    from slotline.cli.bench_limits import cost_of, measure_machine
    from slotline.cli.bench_run import median_run, timed_runs
    from slotline.kernels.device_scope import device_scope
    from slotline.llm.llm import LLM

    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs} times nothing", fix="give at least 1")
    work = workload(arguments.workload, arguments.scale)
    loaded = load(arguments, {"model": arguments.model} if arguments.model else None)
    model = model_settings(loaded, random=arguments.random_weights)
    folder = Path(model["model"])
    values = {**model, **_length(loaded, work, folder)}
    llm = LLM(arguments.config, overrides=overrides(arguments), **values)
    device = llm.engine.device  # of the last stage: its rates count, since the stages run in turn
    with device_scope(device):
        before = measure_machine(device, llm.plan.dtype)
        runs = timed_runs(llm, work, arguments.runs)
        drafts = drafts_report(llm, work, arguments.runs, median_run(runs))
        machine = before.better_of(measure_machine(device, llm.plan.dtype))
    rows = figures(median_run(runs), cost_of(llm.plan, folder, loaded.config.scheduler.max_requests), machine)
    report = _report(llm, work, runs, machine, rows) | {"drafts": drafts}
    if arguments.json:
        print_json(report)
    else:
        print_header(loaded)
        _print(report, rows)
    return 0


def _length(loaded: LoadedConfig, work: Workload, folder: Path) -> dict[str, Any]:
    """Return the workload's model length, unless the configuration names one or the model is shorter."""
    if loaded.origins["scheduler.max_model_len"].kind != "default" or not (folder / "config.json").is_file():
        return {}
    from slotline.planner.auto_config import auto_config

    config = auto_config(folder).get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or work.max_model_len
    return {"scheduler.max_model_len": min(work.max_model_len, longest)}


def _report(llm: LLM, work: Workload, runs: list[Run], machine: Machine, rows: list[Figure]) -> dict[str, Any]:
    import torch

    return {
        "workload": work.name,
        "plan": llm.plan.summary(),
        "digest": llm.plan.digest,
        "parameters": llm.plan.facts["parameters"],
        "threads": torch.get_num_threads(),
        "requests": len(work.waves[-1]),
        "tokens_in": sum(map(len, work.waves[-1])),
        "tokens_out": sum(work.max_tokens[-1]),
        "runs_s": [run.seconds for run in runs],
        "machine": machine.to_json(),
        "graphs": llm.engine.graphs.report.to_json() if llm.engine.graphs else None,
        "startup_s": dict(llm.engine.startup),
        "late_kernels": [kernel._asdict() for kernel in llm.engine.late_kernels],
        "figures": {row.key: row.to_json() for row in rows},
    }


def _print(report: dict[str, Any], rows: list[Figure]) -> None:
    machine, seconds = report["machine"], report["runs_s"]
    requests = f"{report['requests']} request{'s' if report['requests'] > 1 else ''}"
    print(f"{report['workload']}: {requests}, {report['tokens_in']:,} tokens in, {report['tokens_out']:,} out")
    print(f"{report['plan']}; {report['parameters'] / 1e6:,.1f} M parameters, {report['threads']} threads")
    print(
        f"machine: {machine['read_bytes_per_s'] / 1e9:,.1f} GB/s read, "
        f"{machine['copy_bytes_per_s'] / 1e9:,.1f} GB/s copied, "
        f"{machine['flops_per_s'] / 1e12:,.3f} TFLOP/s in {machine['dtype']} matrix products"
    )
    if graphs := report["graphs"]:
        print(
            f"graphs: {graphs['shapes']} shapes in {graphs['graphs']} graphs, {graphs['memory'] / 2**20:,.0f} MiB, "
            f"captured in {graphs['seconds']:.1f} s"
        )
    if late := report["late_kernels"]:
        waited = sum(kernel["seconds"] for kernel in late)
        print(f"steps waited {waited:.2f} s for Triton: {', '.join(kernel['name'] for kernel in late)}")
    print(f"median of {len(seconds)} runs, best {min(seconds):,.3f} s\n")
    print_table(("figure", "measured", "limit", "share"), [row.cells() for row in rows], right=(1, 2, 3))
    if drafts := report["drafts"]:
        print("\n" + drafts_text(drafts))


COMMAND = Command(
    name="bench",
    summary="time a workload and show the share of the hardware's limit that it reaches",
    examples=(
        "slotline bench decode16",
        "slotline bench nano --model models/qwen3-0.6b --random-weights --json",
        "slotline bench latency --scale 0.25 --set attention.backend=torch",
    ),
    configure=_configure,
    run=_run,
)
