"""Names of single runs: the key of a check with a case, and the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slotline.registry.config.toml_text import toml_value

if TYPE_CHECKING:
    from slotline.testing.check import Case
    from slotline.testing.subject import Subject


def key_of(check_id: str, case: Case) -> str:
    """Return the key, e.g. ``attention.window.inclusive[window=17]``, or only the id for a check without parameters."""
    return f"{check_id}[{case_text(case)}]" if case else check_id


def case_text(case: Case) -> str:
    """Return the parameters as one word: ``window=17,dtypes=float32+bfloat16``."""
    return ",".join(f"{name}={_value_text(value)}" for name, value in case.items())


def split_key(key: str) -> tuple[str, str]:
    """Return the check id and the case's text, which is empty if the key has none."""
    check_id, _, case = key.partition("[")
    return check_id, case.removesuffix("]")


def reproducer(subject: Subject, key: str) -> str:
    """Return one line that repeats exactly this run: a shell command, or Python if the plugin has no name."""
    if not subject.target:
        return f"check_plugin(descriptor, only={key!r})  # in Python, with the descriptor of {subject.name!r}"
    words = ["slotline", "conform", subject.target, "--check", key, "--device", subject.device.type]
    words += [f"--set={name}={toml_value(value)}" for name, value in subject.settings.items()]
    words += ["--exhaustive"] if subject.exhaustive else []
    words += ["--seed", str(subject.seed)] if subject.seed else []
    return shlex.join(words)


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + case_text(value) + "}"
    if isinstance(value, (set, frozenset)):
        return "+".join(sorted(map(_value_text, value))) or "none"
    if isinstance(value, (list, tuple)):
        return "+".join(map(_value_text, value)) or "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)
