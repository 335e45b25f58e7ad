"""Requests that come and go: validation, admission, release."""

from __future__ import annotations

import numpy as np
import torch

from slotline.registry.descriptor import Kind
from slotline.registry.errors import RequestError
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.extension import MAX_REQUESTS, ExtendedEngine

TABLES = ("token_ids", "num_tokens", "num_computed_tokens", "num_prompt_tokens", "temperature", "top_p", "seed")


@check(Kind.EXTENSION, "extension.request.validate", Level.NUMERICS, cost=0.01)
def request_validate(run: Run) -> None:
    """A request that asks nothing of the extension is taken, or refused by a RequestError with a remedy."""
    engine = ExtendedEngine(run)
    if not engine.has("validate"):
        raise NotApplicable("it has no validate")
    for prompt_len in (1, 5, 40):
        try:
            found = engine.call("validate", engine.request(prompt_len))
        except RequestError as error:
            if not error.fix:
                raise Failed(f"a refusal without a remedy: {error}") from error
        else:
            if found is not None:
                raise Failed(f"validate gave {found!r:.80}, expected None")


@check(Kind.EXTENSION, "extension.request.unchanged", Level.NUMERICS, cost=0.01)
def request_unchanged(run: Run) -> None:
    """Validation and admission change neither a request's prompt and parameters nor the table of rows."""
    engine = ExtendedEngine(run)
    for _ in range(3):
        request = engine.request()
        engine.rows.admit(request, 0)
        before = list(request.prompt_token_ids), repr(request.params), request.row
        tables = {name: getattr(engine.rows, name).copy() for name in TABLES}
        for method in ("validate", "admit"):
            if (found := engine.call(method, request)) is not None:
                raise Failed(f"{method} gave {found!r:.80}, expected None")
        if before != (list(request.prompt_token_ids), repr(request.params), request.row):
            raise Failed("the request was changed")
        for name, table in tables.items():
            if not np.array_equal(table, getattr(engine.rows, name)):
                raise Failed(f"{name} of the table of rows was written")


@check(Kind.EXTENSION, "extension.release.unprepared", Level.HOSTILE, cost=0.01)
def release_unprepared(run: Run) -> None:
    """A row that was never prepared can be released, and one that was released again."""
    engine = ExtendedEngine(run)
    if not engine.has("release"):
        raise NotApplicable("it has no release")
    engine.call("release", MAX_REQUESTS - 1)
    request = engine.join()
    row = request.row
    engine.leave(request)
    engine.call("release", row)
    engine.call("check")


@check(Kind.EXTENSION, "extension.release.forgets", Level.HOSTILE, cost=0.03)
def release_forgets(run: Run) -> None:
    """The next request in a row finds nothing of the one before: limits and logits are those of a new extension."""
    fresh, used = ExtendedEngine(run), ExtendedEngine(run)
    for _ in range(2):
        earlier = [used.join() for _ in range(3)]
        for _ in range(5):
            _answers(used, [request.row for request in earlier])
        for request in earlier:
            used.leave(request)
    used.rng = np.random.default_rng(run.seed)
    rows = [[engine.join(7).row for _ in range(3)] for engine in (fresh, used)]
    for step in range(3):
        limits, logits = _answers(fresh, rows[0])
        again, others = _answers(used, rows[1])
        if not np.array_equal(limits, again):
            raise Failed(
                f"step {step}: limits {again.tolist()} in rows that were released, {limits.tolist()} in new ones"
            )
        if not torch.equal(logits, others):
            raise Failed(f"step {step}: logits of rows that were released differ from those of new rows")


@check(Kind.EXTENSION, "extension.rows.third", Level.HOSTILE, cost=0.05)
def rows_third(run: Run) -> None:
    """The third request of a row and those after it, with equal prompts and others, find a new row."""
    used = ExtendedEngine(run)
    for number, prompt_len in enumerate((7, 7, 7, 4, 4, 7), 1):
        fresh = ExtendedEngine(run)
        used.rng = np.random.default_rng(run.seed)
        requests = [engine.join(prompt_len) for engine in (fresh, used)]
        for step in range(2):
            limits, logits = _answers(fresh, [requests[0].row])
            again, others = _answers(used, [requests[1].row])
            if not np.array_equal(limits, again) or not torch.equal(logits, others):
                raise Failed(f"step {step} of request {number} of a row: limits or logits are not those of a new one")
        used.leave(requests[1])
        used.call("check")


@check(Kind.EXTENSION, "extension.release.others", Level.HOSTILE, cost=0.02)
def release_others(run: Run) -> None:
    """The end of a request changes nothing for the others."""
    alone, beside = ExtendedEngine(run), ExtendedEngine(run)
    rows = [[engine.join(6).row for _ in range(2)] for engine in (alone, beside)]
    for _ in range(3):
        beside.leave(beside.join(3))
        limits, logits = _answers(alone, rows[0])
        again, others = _answers(beside, rows[1])
        if not np.array_equal(limits, again) or not torch.equal(logits, others):
            raise Failed("limits or logits change when another request leaves")


def _answers(engine: ExtendedEngine, rows: list[int]) -> tuple[np.ndarray, torch.Tensor]:
    """Return the limits and the logits of a step of some rows."""
    which = np.array(rows, np.int64)
    requests = [engine.rows.request(row) for row in rows]
    limits = engine.limits(which, np.full(len(rows), 50)) if engine.has("limit_tokens") else which
    logits = engine.logits(engine.inputs(requests)) if engine.has("process_logits") else torch.zeros(0)
    return limits, logits
