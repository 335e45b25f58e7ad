"""Values of logits: those of the processor's own oracle, at the ends of the vocabulary too, in float32 throughout."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slotline.conformance.logits_processor.form import FORMS
from slotline.registry.descriptor import Kind
from slotline.registry.loading import import_dotted
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.logits_processor import (
    VOCAB_SIZE,
    Entry,
    Request,
    by_example,
    examples,
    parameters,
    random_logits,
    random_request,
    some_requests,
    world_of,
)
from slotline.testing.oracles.logits_processor import value_fault
from slotline.testing.subject import Subject

LENGTHS = (1, 2, 7, 8, 9, 30, 60)
FEW = 8
"""Finite logits that a row must have left to tell whether they were rounded."""


def with_oracle(subject: Subject) -> Iterable[Case]:
    """Return a case for each example of a processor with an oracle.

    Raises:
        NotApplicable: if there is none, or the processor's effect depends on more than an oracle is told.
    """
    if subject.capabilities.oracle is None:
        raise NotApplicable("not declared: oracle, a slow function that says what is right")
    if subject.capabilities.sequential or subject.capabilities.companions:
        raise NotApplicable("an oracle sees one row at one position, and no companion")
    return by_example(subject)


def compare(run: Run, request: Request, form: str) -> None:
    """Compare one row of logits with the oracle's.

    Raises:
        Failed: naming the token and the request.
    """
    oracle = run.subject.capabilities.oracle
    if isinstance(oracle, str):
        oracle = import_dotted(oracle, f"the oracle of {run.subject.name}")
    logits = random_logits(run.rng, 1, run.subject.device.type, form)
    found = world_of(run.subject, {0: request}).apply([Entry(0)], logits)[0].tolist()
    given = [float(logit) for logit in logits[0]]
    wanted = oracle(parameters(request.settings), list(request.prompt), list(request.output), given)
    fault = value_fault(wanted, found)
    if fault is not None:
        raise Failed(f"{fault}, of {form} logits; {request}")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.oracle.values", Level.NUMERICS, cases=with_oracle)
def oracle_values(run: Run) -> None:
    """Each logit is what the processor's own oracle says, for short and long histories and all kinds of logits."""
    settings, rng = examples(run.subject)[run["example"]], run.rng
    for length in LENGTHS:
        for form in FORMS:
            compare(run, random_request(rng, settings, length=length), form)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.oracle.ends", Level.NUMERICS, cases=with_oracle)
def oracle_ends(run: Run) -> None:
    """Token 0 and the last token of the vocabulary are tokens like all others, in prompts and in outputs."""
    settings, last = examples(run.subject)[run["example"]], VOCAB_SIZE - 1
    for tokens in ((0,), (last,), (0, last), (last, 0, 0), (5, 0, 9, last), (0, 5, 0, 5, last)):
        for prompt in range(1, len(tokens) + 1):
            compare(run, Request(settings, tokens[:prompt], tokens[prompt:]), "plain")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.logits.precision", Level.NUMERICS)
def precision(run: Run) -> None:
    """Logits that differ in float32 only still differ: nothing is rounded to half precision on the way."""
    for sign in (1.0, -1.0):
        for number in range(4):
            requests = some_requests(run.subject, run.rng)
            world = world_of(run.subject, requests)
            generator = torch.Generator().manual_seed(run.seed % (1 << 31) + number)
            close = 4 + torch.rand(len(requests), VOCAB_SIZE, generator=generator) / 64
            logits = (sign * close).to(run.subject.device.type)
            after = world.apply([Entry(row) for row in requests], logits)
            for row, request in requests.items():
                left = after[row][torch.isfinite(after[row])]
                distinct = len(left.unique())
                if len(left) >= FEW and distinct * 2 < len(left):
                    raise Failed(
                        f"row {row}: {len(left)} different logits between {sign * 4} and {sign * 4.016} became "
                        f"{distinct}: they were rounded; {request}"
                    )
