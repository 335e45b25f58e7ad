"""The choice as a configuration file that another one can extend."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from slotline.cli.tuning.cases import Cases
from slotline.cli.tuning.trials import one_or_table
from slotline.cli.tuning.tuner import Tuning
from slotline.registry.config.toml_text import toml_value
from slotline.registry.negotiation import MeasuredRun
from slotline.registry.negotiation.measured import figures

PACKAGES = ("slotline", "torch", "triton", "transformers")


def tuned_file(tuning: Tuning, best: MeasuredRun, cases: Cases) -> str:
    """Return the text of the file: the best run's choices, with their origin in comments."""
    plan, measured = tuning.base.plan, tuning.measured
    device = plan.device.name or plan.device.type
    names = {**{f"attention {name}": text for name, text in best.versions.items()}, **_versions()}
    lines = [
        f"Written by `slotline tune` on {measured.date}; take it with: extends = 'this file'",
        f"device: {device}, {plan.device.cores} cores; dtypes {plan.dtype}/{plan.kv_dtype}",
        f"model: {plan.facts['architecture']}, {plan.facts['parameters']} parameters, {tuning.base.facts.path}",
        f"versions: {', '.join(f'{name} {text}' for name, text in names.items())}",
        f"timed: {cases.describe()}",
        f"chosen: {figures(best, measured.cases)}",
    ]
    others = [run for run in measured.runs if run is not best]
    lines += [f"{_name(run)}: {figures(run, measured.cases) if run.seconds else run.failure}" for run in others]
    body: dict[str, dict[str, object]] = {
        "attention": {"backend": one_or_table(best.backends)},
        "cache": {"block_size": best.block_size},
        "graphs": {"mode": best.graphs},
    }
    text = "".join(f"# {line}\n" for line in lines) + "config_version = 1\n"
    for table, keys in body.items():
        text += f"\n[{table}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in keys.items())
    return text


def _name(run: MeasuredRun) -> str:
    backends = "/".join(dict.fromkeys(run.backends.values()))
    return f"{backends}, block {run.block_size}, graphs {run.graphs}"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
