"""L5 of model families: the greedy tokens of a whole engine on an example are those of its own steps."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from slotline.registry.descriptor import Kind
from slotline.registry.errors import NegotiationError
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.engine import REFERENCE, selection
from slotline.testing.environments.model_calls import KeptKeys
from slotline.testing.environments.model_family import FamilyWorld, Text, generating
from slotline.testing.reference import attention as reference

NEW_TOKENS = 12
NEAR_TIE = 1e-3
"""Greedy texts may part where the two best logits are closer than this part of the largest one."""
SETTINGS: dict[str, Any] = {
    "graphs.mode": "none",
    "scheduler.max_requests": 4,
    "scheduler.max_batched_tokens": 16,
    "memory": "8MiB",
    "observability.progress": False,
}


@check(Kind.MODEL_FAMILY, "model_family.engine.text", Level.ENGINE, cases=generating, cost=3.0)
def engine_gives_the_same_text(run: Run) -> None:
    """A batch of prompts in an engine, cut into chunks, gives the greedy tokens of each alone."""
    from slotline.core import LLM, SamplingParams

    world = FamilyWorld(run)
    model, rng = world.load(), run.rng
    if model.facts.modalities:
        raise NotApplicable("its prompts have items, which are compared step by step")
    length = min(30, model.facts.max_model_len - NEW_TOKENS)
    prompts = [world.text(model, rng, size) for size in (3, length, 9, 1, length - 4)]
    inline = (*selection(run.subject), REFERENCE)
    settings: dict[str, Any] = {"plugins.inline": inline, "dtype": world.example.dtypes[0], **SETTINGS}
    settings["plugins.block"] = [f"model_family:{name}" for name in _families() if name != run.subject.name]
    if model.facts.layers and not model.facts.state_layers:
        settings["attention.backend"] = reference.descriptor.name
    try:
        llm = LLM(model=str(world.folder()), device=world.device, **settings)
    except NegotiationError as error:
        raise NotApplicable(f"no plan serves the example: {error.message}") from error
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    with closing(llm):
        outputs = llm.generate([text.tokens for text in prompts], params)
    for number, (text, output) in enumerate(zip(prompts, outputs, strict=True)):
        _expect_text(world, model, text, list(output.outputs[0].token_ids), f"prompt {number}")


def _families() -> list[str]:
    """Return the names of all installed model families."""
    from slotline.registry.records import installed_records

    return sorted({found.name for found in installed_records() if found.kind is Kind.MODEL_FAMILY})


def _expect_text(world: FamilyWorld, model: Any, text: Text, tokens: list[int], what: str) -> None:
    """Compare tokens with the greedy ones, up to a tie of two logits."""
    if len(tokens) != NEW_TOKENS:
        raise Failed(f"{what}: {len(tokens)} tokens came, {NEW_TOKENS} were asked for")
    longer = text.again()
    longer.tokens = [*text.tokens, *tokens]
    hidden = world.step(model, KeptKeys(model.facts), [(longer, longer.left)])
    logits = world.answers(model, hidden)[len(text.tokens) - 1 : -1]
    best = logits.topk(2).values
    for place, token in enumerate(tokens):
        if token != int(logits[place].argmax()):
            if float(best[place, 0] - best[place, 1]) < NEAR_TIE * float(logits[place].abs().max()):
                return
            right = int(logits[place].argmax())
            raise Failed(f"{what} of {len(text.tokens)} tokens, token {place}: {token} instead of {right}")
