"""A workload on this engine and on another one, one after the other, from the same weights."""

from __future__ import annotations

import argparse
import gc
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import frozen

from slotline.cli.bench_limits import cost_of, measure_machine
from slotline.cli.bench_peers import PEERS, PeerJob, PeerRuns, check_same_model, check_same_text, run_peer
from slotline.cli.bench_ratios import HEADERS, Ratio, ratios, read_cells, save, slower
from slotline.cli.bench_run import median_run, timed_runs, workload_length
from slotline.cli.command import load, overrides, print_json
from slotline.cli.random_weights import model_settings, random_checkpoint
from slotline.cli.table import print_table
from slotline.cli.workloads import Workload, workload
from slotline.kernels.device_scope import device_scope
from slotline.llm.llm import LLM
from slotline.registry.errors import ConfigError

_DTYPES = ("float32", "bfloat16", "float16")


@frozen(kw_only=True)
class Against:
    """What a comparison found.

    Attributes:
        arguments: of the command.
        work: the workload.
        plan: of our engine, as text, and its facts.
        peer: what the other engine did.
        rows: the figures of both.
        same_text: share of the requests with the same first token. None if tokens are drawn.
    """

    arguments: argparse.Namespace
    work: Workload
    plan: Mapping[str, Any]
    peer: PeerRuns
    rows: list[Ratio]
    same_text: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a cell of a file of ratios."""
        given, work = self.arguments, self.work
        return {
            "workload": work.name,
            "scale": given.scale,
            "runs": given.runs,
            "model": given.model or "",
            "random_weights": given.random_weights,
            "settings": list(overrides(given)),
            "peer": given.against,
            "peer_version": self.peer.version,
            "peer_settings": list(given.peer_set),
            "peer_startup_s": self.peer.startup_s,
            "same_first_tokens": self.same_text,
            "requests": len(work.waves[-1]),
            "tokens_in": sum(map(len, work.waves[-1])),
            "tokens_out": sum(work.max_tokens[-1]),
            **self.plan,
            "figures": {row.ours.key: row.to_json() for row in self.rows},
            "rows": [list(row.cells()) for row in self.rows],
            "command": _command(given),
        }


def against(arguments: argparse.Namespace) -> int:
    """Compare, print, and keep the ratios if a file is named. Return the exit code."""
    found = compare(arguments)
    cell = found.to_json()
    if arguments.save is not None:
        save(Path(arguments.save), cell)
    if arguments.json:
        print_json(cell)
    else:
        show(cell)
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Run the comparisons of a file again, and name what got slower. Return 1 if something did."""
    cells = read_cells(Path(arguments.check))
    if arguments.workload is not None:
        cells = [cell for cell in cells if cell["workload"] == arguments.workload]
    if arguments.against is not None:
        cells = [cell for cell in cells if cell["peer"] == arguments.against]
    if not cells:
        raise ConfigError(f"{arguments.check} has no such comparison", fix="leave out the workload or --against")
    lines, rows = [], []
    for cell in cells:
        now = compare(_as_kept(arguments, cell)).to_json()
        lines += slower(cell, now, arguments.tolerance / 100)
        rows += [
            (cell["peer"], cell["workload"], key, f"{kept['ratio']:.2f}x", f"{now['figures'][key]['ratio']:.2f}x")
            for key, kept in cell["figures"].items()
            if key in now["figures"]
        ]
    if arguments.json:
        print_json({"slower": lines, "ratios": [list(row) for row in rows]})
    else:
        print_table(("peer", "workload", "figure", "kept", "now"), rows, right=(3, 4))
        tolerance = f"more than {arguments.tolerance:g} % below what was kept"
        print("\n".join(["", f"slower, {tolerance}:", *lines] if lines else ["", f"nothing is {tolerance}"]))
    return 1 if lines else 0


def compare(arguments: argparse.Namespace) -> Against:
    """Run the workload on both engines.

    Raises:
        PeerError: if the other engine is missing, fails, or does other work.
        ConfigError: for arguments that make no sense.
    """
    if arguments.against not in PEERS:
        raise ConfigError(f"there is no peer {arguments.against!r}", fix=f"there are {', '.join(PEERS)}")
    peer = PEERS[arguments.against]
    python = peer.python(arguments.peer_python, install=arguments.peer_install)  # before minutes of work
    options = dict(map(_option, arguments.peer_set))
    work = workload(arguments.workload, arguments.scale)
    with _checkpoint(arguments) as folder:
        theirs = folder if arguments.peer_model is None else Path(arguments.peer_model)
        check_same_model(folder, theirs)
        loaded = load(arguments, {"model": str(folder)})
        values = {"model": str(folder), **workload_length(loaded, work, folder)}
        llm = LLM(arguments.config, overrides=overrides(arguments), **values)
        plan, device, limits = llm.plan, llm.engine.device, llm.engine.limits
        cost = cost_of(plan, folder, loaded.config.scheduler.max_requests)
        with device_scope(device):
            before = measure_machine(device, plan.dtype)
            ours = timed_runs(llm, work, arguments.runs)
        llm.close()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        job = PeerJob(
            peer=peer.name,
            model=str(theirs),
            dtype=plan.dtype,
            device=str(device).partition(":")[0],
            threads=torch.get_num_threads(),
            waves=tuple([[token % limits.vocab_size for token in prompt] for prompt in wave] for wave in work.waves),
            max_tokens=work.max_tokens,
            temperature=work.temperature,
            max_model_len=limits.max_model_len,
            runs=arguments.runs,
            options=options,
        )
        other = run_peer(job, python, plan.facts["parameters"] if arguments.peer_model is None else None)
        with device_scope(device):
            machine = before.better_of(measure_machine(device, plan.dtype))
    mine, others = median_run(ours), median_run(other.runs)
    same = None if arguments.any_text else check_same_text(mine, others, peer.name, work.temperature)
    facts = {
        "plan": plan.summary(),
        "parameters": plan.facts["parameters"],
        "dtype": plan.dtype,
        "threads": torch.get_num_threads(),
        "runs_s": [run.seconds for run in ours],
        "peer_runs_s": [run.seconds for run in other.runs],
        "machine": machine.to_json(),
    }
    rows = ratios(mine, others, cost, machine)
    return Against(arguments=arguments, work=work, plan=facts, peer=other, rows=rows, same_text=same)


def show(cell: Mapping[str, Any]) -> None:
    """Print a comparison for people."""
    name = f"{cell['peer']} {cell['peer_version']}"
    requests = f"{cell['requests']} request{'s' if cell['requests'] > 1 else ''}"
    print(f"{cell['workload']}: {requests}, {cell['tokens_in']:,} tokens in, {cell['tokens_out']:,} out")
    print(f"{cell['plan']}; {cell['parameters'] / 1e6:,.1f} M parameters, {cell['threads']} threads")
    same = cell["same_first_tokens"]
    text = (
        "tokens are drawn, and texts not compared" if same is None else f"{same:.0%} of the first tokens are the same"
    )
    print(f"{name} on the same weights; {text}; medians of {cell['runs']} runs each\n")
    print_table([header.format(peer=cell["peer"]) for header in HEADERS], cell["rows"], right=(1, 2, 3, 4, 5))


@contextmanager
def _checkpoint(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of the weights that both engines load. Random ones are written, in a folder that is removed."""
    loaded = load(arguments, {"model": arguments.model} if arguments.model else None)
    found = model_settings(loaded, random=arguments.random_weights)
    if "load.format" not in found:
        yield Path(found["model"])
        return
    dtype = loaded.config.dtype if loaded.config.dtype in _DTYPES else "auto"
    with TemporaryDirectory(prefix="slotline-bench-") as folder:
        yield random_checkpoint(Path(found["model"]), Path(folder), dtype)


def _option(text: str) -> tuple[str, Any]:
    """Return the name and value of `--peer-set NAME=VALUE`. The value is JSON, or text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--peer-set {text!r} is not NAME=VALUE", fix="write for example max_num_seqs=64")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _as_kept(arguments: argparse.Namespace, cell: Mapping[str, Any]) -> argparse.Namespace:
    """Return the command's arguments with those of a kept comparison. A model that is named counts."""
    copied = argparse.Namespace(**vars(arguments))
    copied.workload, copied.against, copied.scale = cell["workload"], cell["peer"], cell["scale"]
    copied.model = arguments.model or cell["model"] or None
    copied.random_weights, copied.set = cell["random_weights"], [*cell["settings"], *arguments.set]
    copied.peer_set = [*cell["peer_settings"], *arguments.peer_set]
    return copied


def _command(given: argparse.Namespace) -> str:
    """Return the command of a comparison, without what only says where the results go."""
    words = ["slotline", "bench", given.workload, "--against", given.against]
    words += ["--model", given.model] if given.model else []
    words += ["--random-weights"] if given.random_weights else []
    words += ["--scale", f"{given.scale:g}"] if given.scale != 1 else []
    words += [word for setting in overrides(given) for word in ("--set", setting)]
    words += [word for setting in given.peer_set for word in ("--peer-set", setting)]
    return shlex.join([*words, "--runs", str(given.runs)])
