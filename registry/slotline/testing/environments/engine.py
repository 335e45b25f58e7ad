"""Whole engine on the small model that ships, with the plugin under test in its slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from slotline.registry.descriptor import Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.records import installed_records
from slotline.testing.check import NotApplicable
from slotline.testing.reference import attention as reference
from slotline.testing.subject import Subject

Tokens = tuple[tuple[int, ...], ...]
PROMPTS = tuple(tuple((7 * i * i + 13 * i + start) % 4000 + 4 for i in range(length)) for start, length in
                ((1, 3), (2, 70), (3, 33), (4, 16), (5, 1), (2, 70)))  # fmt: skip
"""Token ids; the last prompt is cached by then."""
NEW_TOKENS = 20
COMMON: dict[str, Any] = {"dtype": "float32", "scheduler.max_model_len": 128, "observability.progress": False}
WHOLE: dict[str, Any] = {}
CHUNKED: dict[str, Any] = {"scheduler.max_batched_tokens": 24, "scheduler.max_requests": 4}
REFERENCE = f"{Path(reference.__file__)}:descriptor"


def selection(subject: Subject) -> list[str]:
    """Return the inline plugins that let the engine find the subject by its name.

    Raises:
        NotApplicable: if no configuration can name it.
    """
    row = (subject.kind, subject.name)
    installed = any((found.kind, found.name) == row for found in installed_records())
    if installed and subject.distribution:
        return []
    path, _, attribute = subject.target.rpartition(":")
    if path.endswith(".py") and attribute:
        return [str(Path(path).resolve()) + f":{attribute}"]
    raise NotApplicable("a configuration can name an installed plugin, or one in a file")


@contextmanager
def engine(device: str, **settings: Any) -> Iterator[Any]:
    """Give an `LLM` with the small model. It is closed behind the block.

    Raises:
        NotApplicable: if no plan is possible with the plugin.
    """
    from slotline.core import LLM

    try:
        llm = LLM(device=device, **settings)
    except NegotiationError as error:
        raise NotApplicable(f"the small model cannot use it: {error.message}") from error
    with closing(llm):
        yield llm


def text(device: str, plugins: tuple[str, ...], settings: tuple[tuple[str, Any], ...]) -> Tokens:
    """Return greedy tokens of the prompts, generated together and then once more with the cached prefixes.

    Raises:
        NotApplicable: if no plan is possible with the plugin.
    """
    from slotline.core import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [list(prompt) for prompt in PROMPTS]
    with engine(device, **{"plugins.inline": plugins, **COMMON, **dict(settings)}) as llm:
        first, again = ([tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, params)] for _ in range(2))
    if first != again:
        raise AssertionError(f"the second time, over cached prefixes, other tokens came: {_difference(first, again)}")
    return tuple(first)


@cache
def expected(device: str) -> Tokens:
    """Return the tokens of the suite's own reference backend."""
    return text(device, (REFERENCE,), (("attention.backend", reference.descriptor.name), ("graphs.mode", "none")))


def compare(subject: Subject, key: str, value: Any, settings: dict[str, Any]) -> None:
    """Generate with the subject named by a configuration key and compare with the reference.

    Raises:
        AssertionError: naming the first prompt and token that differ.
    """
    plugins = selection(subject)
    if subject.kind is not Kind.ATTENTION:
        plugins.append(REFERENCE)
        settings = {**settings, "attention.backend": reference.descriptor.name, "graphs.mode": "none"}
    device = subject.device.type
    found = text(device, tuple(plugins), tuple({**settings, key: value}.items()))
    if found != expected(device):
        raise AssertionError(f"other tokens than the reference backend gives: {_difference(expected(device), found)}")


def _difference(wanted: Any, found: Any) -> str:
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                length = len(PROMPTS[number])
                return f"prompt {number} of {length} tokens, output token {place}: {b} instead of {a}"
    return "the numbers of tokens differ"
