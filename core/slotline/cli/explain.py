"""`slotline explain`: the planned plugins, with the reasons for them and against others. Reads no weights."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slotline.cli.command import (
    Command,
    add_config_options,
    add_json_option,
    load,
    overrides,
    print_header,
    print_inline,
    print_json,
    warn,
)
from slotline.registry.config import LoadedConfig, load_config
from slotline.registry.errors import ConfigError, NegotiationError

if TYPE_CHECKING:
    from slotline.planner.plan import Planned
    from slotline.registry.negotiation import Plan

_CODE = re.compile(r"[A-Za-z]\d{3}")
_NO_PLAN = 1


def _configure(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser, positional=True)
    parser.add_argument("--why-not", metavar="NAME", help="why this plugin was not chosen")
    parser.add_argument("--diff", metavar="OTHER.toml", help="what this configuration would change")
    parser.add_argument("--code", metavar="N191", help="what a code means; a code may stand in place of run.toml too")
    parser.add_argument("--width", type=int, default=100, metavar="N", help="columns of the text (default: 100)")
    add_json_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    code = arguments.code or (arguments.config if _CODE.fullmatch(arguments.config or "") else None)
    if code is not None:
        return _explain_code(code, arguments)
    if arguments.width < 40:
        raise ConfigError(f"--width {arguments.width} is too narrow", fix="give at least 40 columns")
    loaded = load(arguments)
    try:
        planned = _planned(loaded)
        other = _planned(load_config(arguments.diff, overrides=overrides(arguments))).plan if arguments.diff else None
    except NegotiationError as error:
        return _refused(error, loaded, arguments)
    plan = planned.plan
    if other is not None:
        return _show_diff(plan, other, arguments)
    if arguments.why_not:
        return _show_why_not(plan, arguments)
    if arguments.json:
        print_json(plan.to_json())
    else:
        print_header(planned.loaded, planned.registry, arguments.width)
        print(plan.explain(arguments.width), end="")
    return 0


def _planned(loaded: LoadedConfig) -> Planned:
    from slotline.planner.plan import make_plan

    planned = make_plan(loaded, weights=False)
    warn((*planned.loaded.warnings, *planned.registry.warnings))
    return planned


def _explain_code(name: str, arguments: argparse.Namespace) -> int:
    from slotline.registry.negotiation import CODES, explain_code

    text = explain_code(name, arguments.width)
    if arguments.json:
        code = CODES[name.upper()]
        fields = {"code": code.name, "severity": code.severity.value, "title": code.title}
        print_json({**fields, "explanation": code.explanation, "fix": code.fix})
    else:
        print(text, end="")
    return 0


def _refused(error: NegotiationError, loaded: LoadedConfig, arguments: argparse.Namespace) -> int:
    """Report why there is no plan, or why one plugin could not serve."""
    if arguments.why_not and error.failure is not None:
        _show_why_not(error, arguments)
    elif arguments.json:
        print_json({**error.to_json(), "inline_plugins": list(loaded.inline_files)})
    else:
        print(error.explain(arguments.width).rstrip("\n"))
        print_inline(loaded)
    return _NO_PLAN


def _show_why_not(outcome: Plan | NegotiationError, arguments: argparse.Namespace) -> int:
    from slotline.registry.negotiation import why_not

    text = why_not(outcome, arguments.why_not, arguments.width)
    if arguments.json:
        print_json({"name": arguments.why_not, "groups": _verdicts(outcome.to_json(), arguments.why_not)})
    else:
        print(text, end="")
    return 0


def _verdicts(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return each group's verdict on a plugin, out of a plan's or a failure's record."""
    verdicts = []
    for group in (*record["groups"], *record.get("state_groups", ())):
        reasons = [reason for item in group["rejected"] if item["name"] == name for reason in item["reasons"]]
        chosen = group.get("backend") == name
        if chosen or reasons:
            verdicts.append({"group": group["name"], "chosen": chosen, "reasons": reasons})
    return verdicts


def _show_diff(before: Plan, after: Plan, arguments: argparse.Namespace) -> int:
    from slotline.registry.negotiation import diff

    if arguments.json:
        print_json({"before": before.to_json(), "after": after.to_json(), "lines": diff(before, after).splitlines()})
    else:
        print(diff(before, after), end="")
    return 0


COMMAND = Command(
    name="explain",
    summary="show which plugins a configuration runs, and why not the others",
    examples=(
        "slotline explain run.toml",
        "slotline explain run.toml --why-not torch",
        "slotline explain run.toml --set attention.backend=torch --json",
        "slotline explain run.toml --diff other.toml",
        "slotline explain N191",
    ),
    configure=_configure,
    run=_run,
)
