"""The smallest batch on which an attention backend still fails, found by leaving out and making small.

The search is greedy, as in Zeller and Hildebrandt's delta debugging (2002): each round tries changes of the failing
batch, large ones first, and goes on from the first that still fails. It ends when none does or the time is over.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, fields, frozen

from slotline.registry.descriptor import Kind
from slotline.registry.errors import ConfigError
from slotline.testing.check import NotApplicable, Run, all_checks
from slotline.testing.environments.attention import Case
from slotline.testing.environments.attention_choice import block_sizes, head_sizes, needs_of, prove, refusal
from slotline.testing.keys import key_of, split_key
from slotline.testing.pytest_files import pytest_file, reproduces
from slotline.testing.runner import cases_of, seed_of
from slotline.testing.subject import Subject, subject_of

SECONDS = 60.0
_SEEDS = 8
_PLAIN: Mapping[str, Any] = {
    "soft_cap": None,
    "sinks": False,
    "alibi": False,
    "position_bias": False,
    "scale": None,
    "amplitude": 1.0,
    "manager_blocks": 1,
    "spare_blocks": 0,
    "max_query_len": None,
    "freed_before_window": False,
    "padding": 0,
    "shuffled": False,
    "strided": False,
    "merged": False,
}
"""Fields of a batch that a smaller one may do without."""


@frozen(eq=False)
class Shrunk:
    """A failing batch.

    Attributes:
        case: the batch.
        reason: how the backend fails on it, in a line.
        tried: batches that were run.
        seconds: what the search took.
    """

    case: Case
    reason: str
    tried: int
    seconds: float

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields of the batch that are not the usual ones, as plain values."""
        return {
            each.name: _plain(value)
            for each in fields(Case)
            if (value := getattr(self.case, each.name)) != each.default or each.name == "requests"
        }


def failing_batch(subject: Subject, key: str) -> Case:
    """Run one case of a check and return the batch on which it fails.

    Raises:
        ConfigError: if there is no such check or case, if it passes, or if it does not fail on one batch.
    """
    check_id, _ = split_key(key)
    item = next((each for each in all_checks(subject.kind) if each.id == check_id), None)
    cases = () if item is None else cases_of(item, subject)[0]
    case = next((each for each in cases if key_of(check_id, each) == key), None)
    if item is None or case is None or subject.kind is not Kind.ATTENTION:
        raise ConfigError(
            f"there is no run {key!r} of an attention check", fix="name one that `slotline conform` shows"
        )
    run = Run(subject, case, seed_of(item, case, subject.seed))
    try:
        item.function(run)
    except NotApplicable as why:
        raise ConfigError(f"{key} does not apply: {why}") from why
    except Exception as error:
        if run.batch is None:
            raise ConfigError(f"{key} fails on no single batch: {error}") from error
        return run.batch  # type: ignore[no-any-return]
    raise ConfigError(f"{key} passes", fix="name a run that fails")


def shrink(subject: Subject, case: Case, *, seconds: float = SECONDS) -> Shrunk:
    """Return the smallest failing batch that is found.

    Args:
        subject: the backend.
        case: a batch on which it fails.
        seconds: after which the search ends.

    Raises:
        ConfigError: if no batch of this form fails with random values: the check plants values of its own.
    """
    started, tried = time.monotonic(), 0
    found = _first(subject, (evolve(case, seed=case.seed + more) for more in range(_SEEDS)))
    if found is None:
        raise ConfigError("the backend fails on planted values alone", fix="run the check itself under a debugger")
    case, reason = found
    while time.monotonic() - started < seconds:
        for smaller in _changes(subject, case):
            tried += 1
            if (why := failure(subject, smaller)) is not None:
                case, reason = smaller, why
                break
            if time.monotonic() - started >= seconds:
                break
        else:
            break
    return Shrunk(case, reason, tried, time.monotonic() - started)


def failure(subject: Subject, case: Case) -> str | None:
    """Return how the backend fails on a batch, in a line, or None if it does not."""
    try:
        prove(Run(subject, {}, case.seed), case)
    except NotApplicable:
        return None
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
    return None


def prove_batch(target: str, *, device: str | None = None, **facts: Any) -> None:
    """Run one batch on a backend and compare it with the exact values.

    Args:
        target: the backend, as `slotline conform` takes it.
        device: as there.
        facts: fields of the batch. Dtypes are names.

    Raises:
        AssertionError: if an output or the cache is wrong.
    """
    case = Case(**{name: _parsed(name, value) for name, value in facts.items()})
    prove(Run(subject_of(target, device=device), {}, case.seed), case)


def _first(subject: Subject, cases: Iterator[Case]) -> tuple[Case, str] | None:
    for case in cases:
        if (why := failure(subject, case)) is not None:
            return case, why
    return None


def _changes(subject: Subject, case: Case) -> Iterator[Case]:
    """Yield smaller batches that the backend declares, the largest steps first."""
    for changed in (case.friendly(), *_of_requests(case), *_of_fields(case), *_of_sizes(subject, case)):
        if changed != case and refusal(subject, needs_of(changed)) is None:
            yield changed


def _of_requests(case: Case) -> Iterator[Case]:
    if case.num_nodes or case.images or case.beginning or case.request_parents:
        return  # their parts belong to requests by number
    requests = case.requests
    half = len(requests) // 2
    if half:
        yield evolve(case, requests=requests[:half])
        yield evolve(case, requests=requests[half:])
    for index in range(len(requests)):
        if len(requests) > 1:
            yield evolve(case, requests=requests[:index] + requests[index + 1 :])
    for index, (query_len, length) in enumerate(requests):
        for pair in _shorter(query_len, length, case.attention_type == "encoder_only"):
            yield evolve(case, requests=(*requests[:index], pair, *requests[index + 1 :]))


def _shorter(query_len: int, length: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Yield shorter requests: halved and one less, of the query tokens and of what is before them."""
    before = length - query_len
    for count in dict.fromkeys((1, query_len // 2, query_len - 1)):
        if 1 <= count < query_len:
            yield count, count if whole else before + count
    for known in dict.fromkeys((0, before // 2, before - 1)):
        if 0 <= known < before:
            yield query_len, query_len + known


def _of_fields(case: Case) -> Iterator[Case]:
    for name, value in _PLAIN.items():
        if getattr(case, name) != value:
            yield evolve(case, **{name: value})
    for place in sorted(case.poisoned):
        yield evolve(case, poisoned=case.poisoned - {place})  # type: ignore[arg-type]
    if case.window is not None:
        yield evolve(case, window=None, freed_before_window=False)
        for window in dict.fromkeys((1, case.window // 2, case.window - 1)):
            if 1 <= window < case.window:
                yield evolve(case, window=window)


def _of_sizes(subject: Subject, case: Case) -> Iterator[Case]:
    group = case.num_heads // case.num_kv_heads
    if case.num_kv_heads > 1:
        yield evolve(case, num_kv_heads=1, num_heads=group)
    for smaller in range(1, group):
        yield evolve(case, num_heads=smaller * case.num_kv_heads)
    for size in sorted(head_sizes(subject)):
        if size < case.head_size and not case.mla:
            yield evolve(case, head_size=size, head_size_v=None)
    for size in sorted(block_sizes(subject)):
        if size < case.block_size:
            yield evolve(case, block_size=size)
    if case.dtype is not torch.float32 and case.kv_scales is None:
        yield evolve(case, dtype=torch.float32, kv_dtype=None)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return tuple(sorted(value)) if isinstance(value, frozenset) else value


def _parsed(name: str, value: Any) -> Any:
    return getattr(torch, value) if name in ("dtype", "kv_dtype") and isinstance(value, str) else value


def one_line(subject: Subject, shrunk: Shrunk) -> str:
    """Return a shell command of one line that runs the batch again."""
    words = [repr(subject.target), f"device={subject.device.type!r}"]
    words += [f"{name}={value!r}" for name, value in shrunk.facts.items()]
    call = f"prove_batch({', '.join(words)})".replace("'", '"')  # the shell's quotes are single ones
    return shlex.join(["python", "-c", f"from slotline.testing.shrinking import prove_batch; {call}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Shrink one failing run and write what is left: `python -m slotline.testing.shrinking NAME KEY`."""
    parser = argparse.ArgumentParser(prog="python -m slotline.testing.shrinking", description=main.__doc__)
    parser.add_argument("plugin")
    parser.add_argument("key", help="the run, such as 'attention.mixed[dtype=float32,kv_dtype=float32,layout=NHD]'")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exhaustive", action="store_true")
    parser.add_argument("--settings", default="{}", help="the plugin's own table, as JSON")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--file", help="where to write a pytest file of the batch")
    given = parser.parse_args(arguments)
    subject = subject_of(
        given.plugin,
        device=given.device,
        seed=given.seed,
        exhaustive=given.exhaustive,
        options=json.loads(given.settings),
    )
    shrunk = shrink(subject, failing_batch(subject, given.key), seconds=given.seconds)
    lines = [
        f"{given.key}: {shrunk.reason} ({shrunk.tried} batches in {shrunk.seconds:.0f} s)",
        one_line(subject, shrunk),
    ]
    if given.file:
        text = pytest_file(subject, shrunk.case, given.key)
        if reproduces(text):
            Path(given.file).write_text(text, encoding="utf-8")
            lines.append(f"pytest {given.file}")
        else:
            lines.append("no pytest file: the outputs are right, and what else is wrong takes the suite to see")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
