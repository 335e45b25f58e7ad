"""Whole texts: a speculative loop with the drafter gives the target model's text.

**The statistical test under temperature.** A target of five tokens whose next token depends on the last two is decoded
from one prompt by 4,000 requests, four tokens each, at temperature 1. The joint counts of the second and third token
(the first comes from the prompt, before any draft) are compared with the exact probabilities of the target, 25 cells
given each first token, by Pearson's chi-square at level `SIGNIFICANCE`. Drafts with probabilities are verified by
rejection sampling, drafts without as one-point proposals. Seeds are fixed, so the answer does not change from run to
run.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.drafter import World
from slotline.testing.environments.speculative_loop import SpeculativeLoop, TableModel
from slotline.testing.oracles.drafter import SIGNIFICANCE, chi_square

PROMPTS, LENGTH, GREEDY_VOCABULARY = 300, 32, 12  # few enough tokens that greedy text repeats itself and drafts hit
TEXTS, VOCABULARY = 4000, 5


@check(Kind.DRAFTER, "drafter.engine.greedy", Level.ENGINE, cost=3.0, profile="greedy")
def engine_greedy(run: Run) -> None:
    """Greedy text with the drafter equals greedy text without, for 300 prompts that come and go on 16 rows."""
    rng = run.rng
    model = TableModel(GREEDY_VOCABULARY, seed=run.seed)
    world = World(run.subject, vocab_size=GREEDY_VOCABULARY, max_requests=16, garbage="tempting", seed=run.seed)
    prompts = [tuple(rng.randrange(GREEDY_VOCABULARY) for _ in range(rng.randint(1, 12))) for _ in range(PROMPTS)]
    loop = SpeculativeLoop(world, model, rng)
    for prompt, text in zip(prompts, loop.generate(prompts, LENGTH, 0.0), strict=True):
        plain: tuple[int, ...] = ()
        while len(plain) < LENGTH:
            plain += (model.greedy(prompt + plain),)
        if text != plain:
            raise Failed(f"prompt {list(prompt)}: speculative text {list(text)}, plain greedy text {list(plain)}")
    run.measured.update(drafted=loop.drafted, accepted=loop.accepted)


@check(Kind.DRAFTER, "drafter.engine.distribution", Level.ENGINE, cost=5.0, profile="sampling")
def engine_distribution(run: Run) -> None:
    """Under temperature the tokens follow the target's distribution (a chi-square test over 4,000 texts)."""
    if run.subject.refusal({"tree": True, "probabilities": True}) is None:
        raise NotApplicable("the loop has no rejection sampling over trees with probabilities")
    model = TableModel(VOCABULARY, seed=run.seed, spread=1.0)
    world = World(run.subject, max_requests=64, vocab_size=VOCABULARY, garbage="garbage", seed=run.seed)
    prompt = (1, 2, 3, 1, 2, 3, 1, 2)
    loop = SpeculativeLoop(world, model, run.rng)
    texts = Counter(text[:3] for text in loop.generate([prompt] * TEXTS, 4, 1.0))
    groups: dict[int, tuple[Any, Any]] = {}
    for first in range(VOCABULARY):
        seen = np.zeros((VOCABULARY, VOCABULARY))
        expected = np.zeros((VOCABULARY, VOCABULARY))
        for second, p in enumerate(model.probabilities((*prompt, first), 1.0)):
            expected[second] = p * model.probabilities((*prompt, first, second), 1.0)
            seen[second] = [texts[first, second, third] for third in range(VOCABULARY)]
        if seen.sum():
            groups[first] = seen.ravel(), expected.ravel() * seen.sum()
    result = chi_square(groups)
    run.measured.update(
        statistic=result.statistic, freedom=result.freedom, p_value=result.p_value, accepted=loop.accepted
    )
    if result.p_value < SIGNIFICANCE:
        seen, expected = max(groups.values(), key=lambda pair: float(np.abs(pair[0] - pair[1]).max()))
        worst = int(np.abs(seen - expected).argmax())
        raise Failed(
            f"the text does not follow the target: chi-square {result.statistic:.0f} with {result.freedom} degrees of "
            f"freedom, p = {result.p_value:.1g} < {SIGNIFICANCE}. Worst pair of tokens {divmod(worst, VOCABULARY)}: "
            f"{int(seen[worst])} times, expected {expected[worst]:.1f}; the drafter's probabilities are not those it "
            f"draws from"
        )
