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
from slotline.registry.errors import ConfigError

if TYPE_CHECKING:
    from slotline.cli.bench_figures import Figure
    from slotline.cli.bench_limits import Machine
    from slotline.cli.bench_run import Run
    from slotline.llm.llm import LLM


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", nargs="?", metavar="WORKLOAD", help=", ".join(WORKLOADS))
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
    peers = parser.add_argument_group("comparison with another engine, in a process of its own")
    peers.add_argument("--against", metavar="PEER", help="vllm, transformers or openvino; prints ratios and shares")
    peers.add_argument(
        "--peer-python", metavar="PATH", help="the Python that has it (default: ours, or its environment)"
    )
    peers.add_argument(
        "--peer-install", action="store_true", help="make it an environment in the cache, by venv and pip"
    )
    peers.add_argument("--peer-model", metavar="PATH", help="the same checkpoint in the peer's form")
    peers.add_argument(
        "--peer-set", action="append", default=[], metavar="NAME=VALUE", help="an argument of the peer's own engine"
    )
    peers.add_argument("--any-text", action="store_true", help="compare times even if the texts differ")
    peers.add_argument("--save", metavar="FILE", help="keep the ratios in a JSON file, beside those that it has")
    peers.add_argument(
        "--check", metavar="FILE", help="run what a file keeps again; exit code 1 if something got slower"
    )
    peers.add_argument(
        "--tolerance", type=float, default=5.0, metavar="%", help="percent that a ratio may fall (default: 5)"
    )


def _run(arguments: argparse.Namespace) -> int:
    from slotline.cli.bench_figures import figures
    from slotline.cli.bench_limits import cost_of, measure_machine
    from slotline.cli.bench_run import median_run, timed_runs, workload_length
    from slotline.kernels.device_scope import device_scope
    from slotline.llm.llm import LLM

    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs} times nothing", fix="give at least 1")
    if arguments.check is not None or arguments.against is not None:
        from slotline.cli.bench_against import against, check

        return against(arguments) if arguments.check is None else check(arguments)
    _refuse_alone(arguments)
    work = workload(arguments.workload, arguments.scale)
    loaded = load(arguments, {"model": arguments.model} if arguments.model else None)
    model = model_settings(loaded, random=arguments.random_weights)
    folder = Path(model["model"])
    values = {**model, **workload_length(loaded, work, folder)}
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


def _refuse_alone(arguments: argparse.Namespace) -> None:
    """Refuse options that need another engine to compare with."""
    given = {"--save": arguments.save, "--peer-python": arguments.peer_python, "--peer-model": arguments.peer_model}
    given |= {"--peer-set": arguments.peer_set, "--peer-install": arguments.peer_install}
    for name in (name for name, value in given.items() if value):
        raise ConfigError(f"{name} has no meaning without a peer", fix="name one: --against transformers")


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
        "slotline bench decode16 --against transformers --save ratios.json",
        "slotline bench --check ratios.json",
    ),
    configure=_configure,
    run=_run,
)
