"""L1 of a model's steps: chunks of a text equal the whole, wanted tokens a part of all, a batch its texts."""

from __future__ import annotations

from itertools import pairwise

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.model_calls import KeptKeys
from slotline.testing.environments.model_family import (
    FamilyWorld,
    by_example,
    cuttable,
    require_cuttable,
)

LENGTH = 37
CUTS = {"ones": (1,), "halves": (19,), "sevens": (7,), "one, then all": (1, LENGTH), "all but one": (LENGTH - 1, 1)}


@check(Kind.MODEL_FAMILY, "model_family.steps.chunks", Level.NUMERICS, cases=by_example, cost=0.5, profile="prefill")
def chunks_equal_the_whole(run: Run) -> None:
    """A text that is computed in chunks gives the hidden states of the whole text, the first and the last token too."""
    world = FamilyWorld(run)
    model = world.load()
    require_cuttable(model.facts)
    text, free = world.text(model, run.rng, LENGTH), world.free_ids(model.facts)
    if text.embeds is None and text.states is None:
        text.tokens[1:3] = [free[0], free[-1]]
    whole = world.whole(model, text)
    for cut, sizes in CUTS.items():
        own, found, cache, step = text.again(), list[torch.Tensor](), KeptKeys(model.facts), 0
        while own.left:
            size = min(sizes[min(step, len(sizes) - 1)], own.left)
            found.append(world.step(model, cache, [(own, size)]).float().cpu())
            step += 1
        world.compare(torch.cat(found), whole, f"a text in chunks ({cut})")


@check(Kind.MODEL_FAMILY, "model_family.steps.wanted", Level.NUMERICS, cases=by_example, cost=0.3)
def wanted_equals_a_part(run: Run) -> None:
    """Hidden states of wanted tokens are those rows of all, whether the last, the first, some, or none are wanted."""
    world = FamilyWorld(run)
    model, rng = world.load(), run.rng
    texts = [world.text(model, rng, length) for length in (11, 4, 6)]
    parts = [(text, text.left) for text in texts]
    total = sum(count for _, count in parts)
    everything = world.step(model, KeptKeys(model.facts), [(t.again(), n) for t, n in parts]).float().cpu()
    ends = [sum(count for _, count in parts[: number + 1]) - 1 for number in range(3)]
    for wanted in (ends, [0], [total - 1], sorted(rng.sample(range(total), 5)), list(range(total)), []):
        cache = KeptKeys(model.facts)
        found = world.step(model, cache, [(t.again(), n) for t, n in parts], wanted=wanted)
        if len(found) != len(wanted):
            raise Failed(f"{len(wanted)} tokens are wanted, and {len(found)} hidden states came")
        world.compare(found.float().cpu(), everything[wanted], f"wanted {wanted}")
        _goes_on(world, model, cache, texts, wanted)


def _goes_on(world: FamilyWorld, model: object, cache: KeptKeys, texts: list, wanted: list[int]) -> None:  # type: ignore[type-arg]
    """Compute one more token of each text: the keys of tokens that were not wanted must be there."""
    if not cuttable(cache.facts) or wanted:
        return
    longer = []
    for text in texts:
        more = text.again()
        more.tokens = [*text.tokens, text.tokens[0]]
        for name in ("embeds", "axes", "layer_embeds"):
            if getattr(more, name) is not None:
                return
        longer.append(more)
    expected = [world.whole(model, text)[-1:] for text in longer]
    for text in longer:
        text.computed = len(text.tokens) - 1
    found = world.step(model, cache, [(text, 1) for text in longer]).float().cpu()
    world.compare(found, torch.cat(expected), "the next tokens, after a step in which none was wanted")


@check(Kind.MODEL_FAMILY, "model_family.steps.batch", Level.NUMERICS, cases=by_example, cost=0.4, profile="mixed")
def a_batch_equals_its_texts(run: Run) -> None:
    """Texts that share steps, some at their beginning and some later, give the hidden states of each alone."""
    world = FamilyWorld(run)
    model, rng = world.load(), run.rng
    texts = [world.text(model, rng, length) for length in (23, 5, 14, 1)]
    expected = [world.whole(model, text) for text in texts]
    cache = KeptKeys(model.facts)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    turns = [{0: 8}, {0: 1, 1: 5, 2: 9}, {3: 1, 2: 5, 0: 14}] if cuttable(model.facts) else [{0: 23, 1: 5, 2: 14, 3: 1}]
    for turn in turns:
        parts = [(texts[number], min(count, texts[number].left)) for number, count in turn.items()]
        hidden, start = world.step(model, cache, parts).float().cpu(), 0
        for number, (_, count) in zip(turn, parts, strict=True):
            found[number].append(hidden[start : start + count])
            start += count
    for number, (pieces, whole) in enumerate(zip(found, expected, strict=True)):
        joined = torch.cat(pieces)
        world.compare(joined, whole[: len(joined)], f"text {number} of {len(whole)} tokens in a batch")


@check(Kind.MODEL_FAMILY, "model_family.steps.taps", Level.NUMERICS, needs={"taps": True}, cases=by_example, cost=0.3)
def taps_see_each_layer(run: Run) -> None:
    """A tap is called before each decoder layer with its index and its input, and changes nothing."""
    world = FamilyWorld(run)
    model = world.load()
    text = world.text(model, run.rng, 9)
    plain = world.whole(model, text)
    calls: list[tuple[int, torch.Tensor]] = []

    def tap(index: int, hidden_states: torch.Tensor) -> None:
        calls.append((index, hidden_states.detach().clone()))

    own = text.again()
    hidden = world.step(model, KeptKeys(model.facts), [(own, own.left)], tap=tap).float().cpu()
    world.compare(hidden, plain, "a step with a tap")
    indices = [index for index, _ in calls]
    if indices != list(range(len(calls))) or not calls:
        raise Failed(f"the tap was called with the indices {indices}, expected 0, 1, ...")
    if model.facts.parts is not None and len(calls) != len(model.facts.parts.layers):
        raise Failed(f"the tap was called {len(calls)} times, the parts have {len(model.facts.parts.layers)} layers")
    for index, states in calls:
        if tuple(states.shape) != (9, model.facts.hidden_size):
            raise Failed(f"the tap got {list(states.shape)} before layer {index}, expected [9, hidden_size]")
    if any(torch.equal(one, other) for (_, one), (_, other) in pairwise(calls)):
        raise Failed("the tap got the same states before two layers")
    if getattr(model, "embed", None) is not None and world.example.embeds_first:
        with torch.inference_mode():
            embedded = model.embed(torch.tensor(text.tokens, device=world.device))
        world.compare(calls[0][1].float().cpu(), embedded.float().cpu(), "the tap before layer 0 and the embeddings")


@check(
    Kind.MODEL_FAMILY,
    "model_family.steps.fast_prefill",
    Level.NUMERICS,
    needs={"fast_prefill": True},
    cases=by_example,
    cost=0.3,
)
def fast_prefill_changes_nothing(run: Run) -> None:
    """Layers after the last one with a cache of its own run for wanted tokens alone, and give the same numbers."""
    world = FamilyWorld(run)
    model, rng = world.load(), run.rng
    if not any(layer.shares_kv_with is not None for layer in model.facts.layers):
        raise NotApplicable("no layer reads the cache of another")
    texts = [world.text(model, rng, length) for length in (9, 5)]
    everything = world.step(model, KeptKeys(model.facts), [(t.again(), t.left) for t in texts]).float().cpu()
    for wanted in ([8, 13], [2, 5, 8], []):
        cache = KeptKeys(model.facts)
        cache.fast = True
        parts = [(t.again(), t.left) for t in texts]
        found = world.step(model, cache, parts, wanted=wanted, fast_prefill=True).float().cpu()
        world.compare(found, everything[wanted], f"fast prefill with {len(wanted)} wanted tokens")


@check(
    Kind.MODEL_FAMILY,
    "model_family.steps.types",
    Level.NUMERICS,
    needs={"token_types": True},
    cases=by_example,
    cost=0.3,
)
def types_are_read(run: Run) -> None:
    """Tokens without types are of type 0, and another type gives other numbers."""
    world = FamilyWorld(run)
    model = world.load()
    if model.facts.token_types < 2:
        raise NotApplicable("the example has one type of tokens")
    text = world.text(model, run.rng, 8)
    plain = world.whole(model, text)
    for kind, same in ((0, True), (1, False)):
        own = text.again()
        types = torch.full((8,), kind, dtype=torch.int64, device=world.device)
        hidden = world.step(model, KeptKeys(model.facts), [(own, 8)], token_types=types).float().cpu()
        if same:
            world.compare(hidden, plain, "tokens of type 0")
        elif torch.allclose(hidden, plain, rtol=1e-3):
            raise Failed("tokens of type 1 give the numbers of type 0")
