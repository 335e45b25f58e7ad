"""L2 of model families: views, paddings, failures, several models, the ends of what is allowed, storing models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.model_calls import KeptKeys, StoringKeys
from slotline.testing.environments.model_family import FamilyWorld, by_example, cuttable, empty_folder, require_cuttable

_INPUTS = ("input_ids", "positions", "wanted", "position_offsets")


class Failing(Exception):  # noqa: N818  what a backend raises
    """Raised by attention in the middle of a step."""


@check(Kind.MODEL_FAMILY, "model_family.hostile.views", Level.HOSTILE, cases=by_example, cost=0.3)
def inputs_are_views(run: Run) -> None:
    """Inputs that are views of larger tensors give the same numbers, and neither they nor what is around changes."""
    world = FamilyWorld(run)
    model = world.load()
    text = world.text(model, run.rng, 11)
    expected = world.whole(model, text)
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def as_views(inputs: dict[str, Any]) -> None:
        for name in _INPUTS:
            tensor = inputs.get(name)
            if tensor is not None and tensor.dim() == 1:
                base = torch.full((len(tensor) + 7,), 3, dtype=tensor.dtype, device=tensor.device)
                base[4 : 4 + len(tensor)] = tensor
                kept[name] = base, base.clone()
                inputs[name] = base[4 : 4 + len(tensor)]

    own = text.again()
    hidden = world.step(model, KeptKeys(model.facts), [(own, own.left)], wanted=[2, 10], change=as_views)
    world.compare(hidden.float().cpu(), expected[[2, 10]], "a step whose inputs are views")
    for name, (base, before) in kept.items():
        if not torch.equal(base, before):
            raise Failed(f"the forward pass wrote into {name}, or beside it")


class StridedKeys(KeptKeys):
    """Attention whose outputs are columns of a larger tensor, with NaN beside them."""

    def _computed(self, layer: Any, *args: Any) -> torch.Tensor:
        out = super()._computed(layer, *args)
        base = torch.full((len(out) + 2, layer.num_heads, layer.head_size_v + 3), float("nan"), dtype=out.dtype)
        base = base.to(out.device)
        base[1 : 1 + len(out), :, 2 : 2 + layer.head_size_v] = out
        return base[1 : 1 + len(out), :, 2 : 2 + layer.head_size_v]


@check(Kind.MODEL_FAMILY, "model_family.hostile.strided_outputs", Level.HOSTILE, cases=by_example, cost=0.3)
def outputs_are_strided(run: Run) -> None:
    """Outputs of attention that are no contiguous tensors are read right."""
    world = FamilyWorld(run)
    model = world.load()
    text = world.text(model, run.rng, 9)
    world.compare(world.whole(model, text, StridedKeys(model.facts)), world.whole(model, text), "strided outputs")


@check(Kind.MODEL_FAMILY, "model_family.hostile.padding", Level.HOSTILE, cases=by_example, cost=0.3)
def paddings_change_nothing(run: Run) -> None:
    """Tokens that fill a step up to the size of a graph change nothing of the others."""
    world = FamilyWorld(run)
    model = world.load()
    require_cuttable(model.facts)
    text = world.text(model, run.rng, 9)
    expected = world.whole(model, text)
    for count in (1, 7):
        own, filler = text.again(), world.text(model, run.rng, count)
        filler.tokens = [0] * len(filler.tokens) if filler.embeds is None and filler.states is None else filler.tokens
        parts = [(own, 6), (filler, filler.left)]
        cache = KeptKeys(model.facts)
        first = world.step(model, cache, parts)[:6].float().cpu()
        rest = world.step(model, cache, [(own, own.left)]).float().cpu()
        world.compare(torch.cat((first, rest)), expected, f"a text beside {count} tokens that fill the step")


class FailingKeys(KeptKeys):
    """Attention that raises in one layer."""

    def _computed(self, layer: Any, *args: Any) -> torch.Tensor:
        if layer.index == len(self.facts.layers) // 2:
            raise Failing
        return super()._computed(layer, *args)


@check(Kind.MODEL_FAMILY, "model_family.hostile.failing_step", Level.HOSTILE, cases=by_example, cost=0.3)
def a_failing_step_leaves_nothing(run: Run) -> None:
    """After a step in which attention raised, its error reaches the caller and the next step is right."""
    world = FamilyWorld(run)
    model = world.load()
    if not model.facts.layers:
        raise NotApplicable("not declared: it has no attention layers")
    text = world.text(model, run.rng, 8)
    expected = world.whole(model, text)
    for _ in range(2):
        try:
            world.whole(model, text, FailingKeys(model.facts))
        except Failing:
            pass
        else:
            raise Failed("what attention raised did not reach the caller")
        world.compare(world.whole(model, text), expected, "the step after one that failed")


@check(Kind.MODEL_FAMILY, "model_family.hostile.two_models", Level.HOSTILE, cases=by_example, cost=0.6)
def two_models_are_apart(run: Run) -> None:
    """Two models of one family with different weights run in turns, and neither changes the other."""
    world = FamilyWorld(run)
    first = world.load()
    text = world.text(first, run.rng, 10)
    alone = world.whole(first, text)
    second = world.load(world.folder(1))
    other = world.text(second, run.rng, 7)
    expected = world.whole(second, other)
    for _ in range(2):
        world.compare(world.whole(first, text), alone, "the first model beside a second one")
        world.compare(world.whole(second, other), expected, "the second model beside the first one")


@check(Kind.MODEL_FAMILY, "model_family.hostile.ends", Level.HOSTILE, cases=by_example, cost=0.4)
def ends_are_allowed(run: Run) -> None:
    """The first and the last token of the vocabulary and the last position that the facts allow give numbers."""
    world = FamilyWorld(run)
    model = world.load()
    facts = model.facts
    first, end = world.example.tokens or (0, facts.vocab_size)
    text = world.text(model, run.rng, 6)
    if text.embeds is None and not any(m.prompt for m in facts.modalities):
        text.tokens = [first, end - 1, first, end - 1, *text.tokens[4:]]
    hidden = world.whole(model, text)
    answers = world.answers(model, hidden.to(world.device, getattr(torch, world.example.dtypes[0])))
    if not answers.isfinite().all():
        raise Failed("the answers for the ends of the vocabulary are not finite")
    if world.example.task == "generate" and facts.eos_token_ids and max(facts.eos_token_ids) >= answers.shape[1]:
        raise Failed(f"there is no logit for the end token {max(facts.eos_token_ids)}")
    if not cuttable(facts) or facts.position_axes > 1:
        return
    last = facts.max_model_len - 1
    text = world.text(model, run.rng, 1)

    def at_the_end(inputs: dict[str, Any]) -> None:
        inputs["positions"] = torch.full_like(inputs["positions"], last)

    hidden = world.step(model, KeptKeys(facts), [(text, 1)], change=at_the_end)
    if not hidden.isfinite().all():
        raise Failed(f"a token at position {last}, the last of max_model_len, gives hidden states that are not finite")


@check(Kind.MODEL_FAMILY, "model_family.hostile.long", Level.HOSTILE, cases=by_example, cost=0.5, profile="prefill")
def long_texts_equal_their_chunks(run: Run) -> None:
    """Two long texts, as long as the positions allow up to 200 tokens, equal their chunks of 64 tokens."""
    world = FamilyWorld(run)
    model, rng = world.load(), run.rng
    require_cuttable(model.facts)
    length = min(200, model.facts.max_model_len)
    texts = [world.text(model, rng, length), world.text(model, rng, length - 3)]
    expected = [world.whole(model, text) for text in texts]
    cache, found = KeptKeys(model.facts), [list[torch.Tensor](), list[torch.Tensor]()]
    while any(text.left for text in texts):
        parts = [(text, min(64, text.left)) for text in texts if text.left]
        hidden, start = world.step(model, cache, parts).float().cpu(), 0
        for text, count in parts:
            found[texts.index(text)].append(hidden[start : start + count])
            start += count
    for pieces, whole in zip(found, expected, strict=True):
        world.compare(torch.cat(pieces), whole, f"a text of {len(whole)} tokens in chunks")


@check(Kind.MODEL_FAMILY, "model_family.hostile.storing", Level.HOSTILE, cases=by_example, cost=0.3)
def a_storing_model_stores_right(run: Run) -> None:
    """Keys that a model stores itself lie in their slots, and with fewer queries in the last layer all is the same."""
    world = FamilyWorld(run)
    model, rng = world.load(), run.rng
    require_cuttable(model.facts)
    texts = [world.text(model, rng, length) for length in (9, 6)]
    everything = world.step(model, KeptKeys(model.facts), [(t.again(), t.left) for t in texts]).float().cpu()
    for wanted in (None, [8, 14], [3]):
        cache = StoringKeys(model.facts)
        parts = [(t.again(), t.left) for t in texts]
        found = world.step(model, cache, parts, wanted=wanted).float().cpu()
        rows = everything if wanted is None else everything[wanted]
        world.compare(found, rows, f"a step that may store, wanted {wanted}")
        run.measured.update(stored=cache.stored, reduced=cache.reduced)


@check(Kind.MODEL_FAMILY, "model_family.hostile.surroundings", Level.HOSTILE, cases=by_example, cost=0.4)
def surroundings_stay(run: Run) -> None:
    """Loading and running leave the folder, torch's defaults, its random state and its grad mode as they were."""
    world = FamilyWorld(run)
    folder = empty_folder()
    world.example.write(folder, 0)
    files = _files(folder)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(run.seed)
        before = _surroundings()
        model = world.load(folder)
        world.whole(model, world.text(model, run.rng, 5))
        for name, value in _surroundings().items():
            if value != before[name]:
                raise Failed(f"loading and running changed {name}: {before[name]!r:.40} became {value!r:.40}")
    if changed := sorted(_files(folder).items() ^ files.items()):
        raise Failed(f"loading changed the checkpoint's folder: {changed[0][0]}")


def _surroundings() -> Mapping[str, Any]:
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
    }


def _files(folder: Any) -> dict[str, int]:
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
