"""Search for supported architectures of the same family as an unsupported one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_STEM = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
_FAMILY = re.compile(r"[A-Za-z]+")
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_MANY = 4


def of_same_family(architecture: str, served: Iterable[str]) -> tuple[str, ...]:
    """Return the supported architectures of the same family, nearest first, or an empty tuple.

    A name's family is its first letters without the task and the version: Qwen of Qwen3_5ForConditionalGeneration.
    Plain similarity of spelling is not used, because most names end alike.
    """
    family = _family(architecture)
    found = [name for name in served if family and _family(name) == family]

    def nearness(name: str) -> tuple[bool, float]:
        return _task(name) == _task(architecture), difflib.SequenceMatcher(None, architecture, name).ratio()

    return tuple(sorted(found, key=nearness, reverse=True)[:_MANY])


def family_hint(architecture: str, served: Iterable[str]) -> str:
    """Return the end of a message that names supported architectures of the same family, or an empty string."""
    near = of_same_family(architecture, served)
    return f"; of the same family are served {', '.join(near)}" if near else ""


def _stem(architecture: str) -> str:
    return _STEM.sub("", architecture)


def _task(architecture: str) -> str:
    task = architecture.removeprefix(_stem(architecture))
    return "generate" if task in _GENERATING else task


def _family(architecture: str) -> str:
    match = _FAMILY.match(_stem(architecture))
    return match[0].lower() if match else ""
