"""Random traffic over a small pool of real memory."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.kv_spec import build_group, group_cases, kernel_block_sizes
from slotline.testing.environments.kv_traffic import Traffic
from slotline.testing.subject import Subject

STEPS = 70
MOST_REQUESTS = 4


def fuzz_cases(subject: Subject) -> Iterable[Case]:
    """Return groups of known kinds, with changing layouts and kernel block sizes.

    All windows, three times, if exhaustive.
    """
    cases: list[Case] = []
    for number, case in enumerate(group_cases(subject)):
        size = case["block_size"]
        if not subject.exhaustive and case.get("window") not in (None, size + 1, 2 * size + 1):
            continue
        kernels = kernel_block_sizes(subject, size)
        memory = {"layout": ("NHD", "HND")[number % 2], "kernel_block_size": kernels[number % len(kernels)]}
        cases += [{**case, **memory, "history": n} for n in range(3 if subject.exhaustive else 1)]
    return cases


@check(Kind.KV_SPEC, "kv_spec.fuzz.traffic", Level.STATEFUL, cases=fuzz_cases, explores=True, cost=2.0, profile="mixed")
def fuzz_traffic(run: Run) -> None:
    """Requests come, share prefixes, grow, free blocks and leave, and each reads its own tokens at every step."""
    group, rng = build_group(run), run.rng
    caching = bool(run.subject.capabilities.prefix_caching.support)
    traffic = Traffic(group, 2 * group.spec.blocks_needed(group.max_model_len) + 2, run.subject.device.type, caching)
    texts = _texts(rng, group.max_model_len)
    for number in range(STEPS):
        if len(traffic.requests) < MOST_REQUESTS and rng.random() < 0.5:
            text = rng.choice(texts)
            length = rng.choice((len(text), len(text) // 2, rng.randint(1, len(text))))  # often one that came before
            traffic.admit(f"request {number}", text[:length])
        for request in tuple(traffic.requests):
            done = request.computed == len(request.numbers)
            if done or not traffic.step(request, rng.choice((1, 1, 1, 2, group.block_size, 2 * group.block_size + 1))):
                traffic.finish(request)  # it is done, or the pool is empty and it is preempted
                continue
            if request.freed and request.held > group.spec.max_blocks_held():
                raise Failed(
                    f"{request.name} holds {request.held} blocks between two steps at {request.computed} tokens, "
                    f"max_blocks_held is {group.spec.max_blocks_held()}; {group.describe()}"
                )
    run.measured["prefix_hits"] = traffic.hits


def _texts(rng: Random, length: int) -> list[list[int]]:
    """Return token ids of a few texts, which share beginnings of different lengths with the first."""
    first = [rng.randrange(1000) for _ in range(length)]
    texts = [first]
    for _ in range(4):
        shared = rng.randrange(length)
        texts.append(first[:shared] + [rng.randrange(1000) for _ in range(length - shared)])
    return texts
