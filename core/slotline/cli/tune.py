"""`slotline tune`: every feasible backend, block size and graph mode timed for a model, and the choice written down."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotline.builder.counted import counted
from slotline.cli.command import Command, add_config_options, add_json_option, load, overrides, print_json
from slotline.cli.random_weights import model_settings
from slotline.cli.table import print_table
from slotline.registry.config import LoadedConfig, load_config
from slotline.registry.errors import ConfigError

if TYPE_CHECKING:
    from slotline.cli.tuning import Cases, Tuning
    from slotline.cli.tuning.timing import Timing
    from slotline.cli.tuning.tuner import Outcome

_NOTHING_RAN = 1


def _configure(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser, positional=True)
    parser.add_argument("--model", metavar="PATH", help="a checkpoint folder, or one with a config.json alone")
    parser.add_argument("--random-weights", action="store_true", help="random weights even if the folder has its own")
    parser.add_argument("--output", metavar="tuned.toml", help="write the choice here, for a configuration to extend")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of context in the decode cases")
    parser.add_argument(
        "--batches", type=_numbers, metavar="1,8,64", help="requests of the decode cases (default: also max_requests)"
    )
    add_json_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    from slotline.cli.tuning import Tuner, tuned_file
    from slotline.planner.measurements import save_measurements

    target = Path(arguments.output) if arguments.output else None
    if target is not None and not target.resolve().parent.is_dir():
        raise ConfigError(f"--output {target}: there is no folder {str(target.parent)!r}", fix="make it first")
    loaded = load(arguments, {"model": arguments.model} if arguments.model else None)
    model = model_settings(loaded, random=arguments.random_weights)
    cases = _cases(arguments, loaded, model)
    settings = _settings(loaded, cases, model)

    def configure(more: Mapping[str, Any]) -> LoadedConfig:
        return load_config(arguments.config, overrides=overrides(arguments), values={**settings, **more})

    def shown(trials: list[Any], label: str) -> Iterable[Any]:
        return counted(trials, label, show=loaded.config.observability.progress)

    tuning = Tuner(configure, cases, date=f"{datetime.now(UTC):%Y-%m-%d}", counted=shown).run()
    kept = written = None
    if tuning.best is not None:
        kept = save_measurements(tuning.measured, tuning.base.facts, tuning.base.plan.device)
    if tuning.best is not None and target is not None:
        target.write_text(tuned_file(tuning, tuning.best, cases), encoding="utf-8")
        written = target
    if arguments.json:
        print_json(_report(tuning, cases, kept, written))
    else:
        _print(tuning, cases, kept, written)
    return 0 if tuning.best is not None else _NOTHING_RAN


def _cases(arguments: argparse.Namespace, loaded: LoadedConfig, model: Mapping[str, str]) -> Cases:
    from slotline.cli.tuning import cases_for
    from slotline.planner.plan import make_plan

    planned = make_plan(load_config(arguments.config, overrides=overrides(arguments), values=model))
    if planned.task != "generate":
        raise ConfigError(f"task = {planned.task!r} cannot be timed", fix="`slotline tune` times models that generate")
    scheduler = loaded.config.scheduler
    return cases_for(
        planned.plan.device.type,
        max_requests=scheduler.max_requests,
        max_model_len=planned.max_model_len,
        max_batched_tokens=scheduler.max_batched_tokens,
        context=arguments.context,
        batches=arguments.batches,
    )


def _settings(loaded: LoadedConfig, cases: Cases, model: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of every trial: the model, no inner bars, and graphs of only the timed sizes."""
    settings: dict[str, Any] = {**model, "observability.progress": False}
    if loaded.origins["graphs.sizes"].kind == "default":
        settings["graphs.sizes"] = sorted({*cases.batches, cases.mixed})
    return settings


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _report(tuning: Tuning, cases: Cases, kept: Path | None, written: Path | None) -> dict[str, Any]:
    from slotline.registry.negotiation.measured import to_json

    plan, best = tuning.base.plan, tuning.best
    return {
        "device": plan.device.name or plan.device.type,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "cases": cases.to_json(),
        "trials": [_trial(outcome, chosen=best is not None and outcome.run is best) for outcome in tuning.outcomes],
        "refused": [{"what": what, "why": why} for what, why in tuning.refused],
        "measured": to_json(tuning.measured),
        "kept": str(kept) if kept else None,
        "output": str(written) if written else None,
    }


def _trial(outcome: Outcome, *, chosen: bool) -> dict[str, Any]:
    return {
        "varied": outcome.trial.varied,
        "settings": dict(outcome.trial.settings),
        "graphs": outcome.run.graphs if outcome.run else None,
        "timings": {case: timing.to_json() for case, timing in outcome.timings.items()},
        "skipped": dict(outcome.skipped),
        "failure": outcome.failure,
        "seconds": outcome.seconds,
        "capture": outcome.capture,
        "leaked_bytes": outcome.leaked,
        "chosen": chosen,
    }


def _print(tuning: Tuning, cases: Cases, kept: Path | None, written: Path | None) -> None:
    plan = tuning.base.plan
    device = plan.device.name or plan.device.type
    print(f"{plan.facts['architecture']}, {plan.facts['parameters'] / 1e6:,.1f} M parameters, on {device}")
    print(f"{cases.describe()}; median of a step, and half the distance of the quartiles\n")
    names = list(dict.fromkeys(case for outcome in tuning.outcomes for case in outcome.timings))
    rows = [_row(tuning, outcome, names) for outcome in tuning.outcomes]
    right = range(3, 4 + len(names))
    print_table(("backend", "block", "graphs", *names, "mean", "captured", ""), rows, right=tuple(right))
    for what, why in tuning.refused:
        print(f"refused  {what}: {why}")
    for what, why in dict.fromkeys(item for outcome in tuning.outcomes for item in outcome.skipped.items()):
        print(f"skipped  {what}: {why}")
    if kept is not None:
        print(f"\n`auto` chooses by these figures from now on: {kept}")
    if written is not None:
        print(f'written: {written}; a configuration takes it with `extends = "{written}"`')


def _row(tuning: Tuning, outcome: Outcome, names: list[str]) -> tuple[str, ...]:
    from slotline.registry.negotiation.measured import UNMEASURED, in_words

    run = outcome.run
    assert run is not None
    cost = tuning.measured.cost(run)
    cells = [_cell(outcome.timings.get(name)) for name in names]
    mean = "-" if cost == UNMEASURED else in_words(cost)
    captured = "-"
    if outcome.capture is not None:
        captured = f"{outcome.capture['memory'] / 2**20:.0f} MiB, {outcome.capture['seconds']:.1f} s"
    verdict = "chosen" if run is tuning.best else f"failed: {outcome.failure}" if outcome.failure else ""
    backends = "/".join(dict.fromkeys(run.backends.values()))
    return (backends, str(run.block_size), run.graphs, *cells, mean, captured, verdict)


def _cell(timing: Timing | None) -> str:
    from slotline.registry.negotiation.measured import in_words

    return "-" if timing is None else f"{in_words(round(timing.median * 1e9))} ±{timing.spread / 2:.0%}"


COMMAND = Command(
    name="tune",
    summary="time every feasible backend, block size and graph mode for a model, and keep the choice",
    examples=(
        "slotline tune run.toml",
        "slotline tune run.toml --output tuned.toml --set scheduler.max_requests=64",
        "slotline tune --model models/qwen3-0.6b --random-weights --json",
    ),
    configure=_configure,
    run=_run,
)
