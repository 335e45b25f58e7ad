"""L1 of items besides text: the same item gives the same rows, alone or among others, and in chunks of its prompt."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.descriptor import Kind
from slotline.registry.errors import RequestError
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.model_calls import KeptKeys
from slotline.testing.environments.model_family import FamilyWorld, expect_shape, with_items


def _made(run: Run) -> tuple[FamilyWorld, Any, str]:
    world = FamilyWorld(run)
    assert world.example.item is not None
    return world, world.load(), world.example.item(0)[0]


def _rows(model: Any, name: str, processed: Any) -> int:
    placeholder = next(m.placeholder_token_id for m in model.facts.modalities if m.name == name)
    return sum(token == placeholder for token in processed.token_ids)


@check(Kind.MODEL_FAMILY, "model_family.items.encode", Level.NUMERICS, cases=with_items, cost=0.4)
def items_are_encoded(run: Run) -> None:
    """An item gives a row for each of its placeholders, the same rows each time and among other items."""
    world, model, name = _made(run)
    assert world.example.item is not None
    processed = [model.process(name, world.example.item(number)[1]) for number in range(3)]
    again = model.process(name, world.example.item(0)[1])
    if list(again.token_ids) != list(processed[0].token_ids) or again.inputs.keys() != processed[0].inputs.keys():
        raise Failed("the same item is processed to other tokens or inputs the second time")
    if any(not torch.equal(again.inputs[key], processed[0].inputs[key]) for key in again.inputs):
        raise Failed("the same item is processed to other inputs the second time")
    if bad := [one.modality for one in processed if one.modality != name]:
        raise Failed(f"an item of {name!r} is processed to one of {bad[0]!r}")
    with torch.inference_mode():
        together = model.encode(name, [one.inputs for one in processed])
        alone = [model.encode(name, [one.inputs])[0] for one in processed]
    if len(together) != 3:
        raise Failed(f"encode returned {len(together)} tensors for 3 items")
    size = (1 + model.facts.layer_embeds) * model.facts.hidden_size
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        expect_shape(f"encode of item {number}", one, (_rows(model, name, processed[number]), size))
        world.compare(one.float().cpu(), other.float().cpu(), f"item {number} among others")
    if together[0].shape == together[1].shape and torch.allclose(together[0], together[1], rtol=1e-3):
        raise Failed("two different items have the same rows")


@check(Kind.MODEL_FAMILY, "model_family.items.example", Level.NUMERICS, cases=with_items, cost=0.3)
def the_example_is_large(run: Run) -> None:
    """`example` gives an item that can be encoded, with no fewer rows than the items of the family's example."""
    world, model, name = _made(run)
    assert world.example.item is not None
    largest = model.example(name)
    with torch.inference_mode():
        (rows,) = model.encode(name, [largest.inputs])
    expect_shape("encode of example()", rows, (_rows(model, name, largest), rows.shape[1]))
    for number in range(3):
        if (count := _rows(model, name, model.process(name, world.example.item(number)[1]))) > len(rows):
            raise Failed(f"example() has {len(rows)} rows, and memory is measured with it: item {number} has {count}")


@check(Kind.MODEL_FAMILY, "model_family.items.chunks", Level.NUMERICS, cases=with_items, cost=0.4, profile="prefill")
def prompts_with_items_in_chunks(run: Run) -> None:
    """A prompt with an item in chunks, cut within the item, beside a text without one, equals the whole."""
    world, model, _ = _made(run)
    if any(m.cross for m in model.facts.modalities):
        raise NotApplicable("each of its texts has an item: the other checks cut them")
    if any(layer.keys_ahead for layer in model.facts.layers):
        raise NotApplicable("the tokens of its items see each other, which the suite's attention leaves out")
    rng = run.rng
    text, plain = world.text(model, rng, 12, item=0), world.text(model, rng, 9)
    expected = [world.whole(model, one) for one in (text, plain)]
    cache, found = KeptKeys(model.facts), [list[torch.Tensor](), list[torch.Tensor]()]
    while text.left:
        parts = [(text, min(5, text.left)), *([(plain, min(3, plain.left))] if plain.left else [])]
        hidden, start = world.step(model, cache, parts).float().cpu(), 0
        for pieces, (_, count) in zip(found, parts, strict=False):
            pieces.append(hidden[start : start + count])
            start += count
    for pieces, whole, what in zip(found, expected, ("the prompt with an item", "the text beside it"), strict=True):
        joined = torch.cat(pieces)
        world.compare(joined, whole[: len(joined)], what)


@check(Kind.MODEL_FAMILY, "model_family.items.matter", Level.NUMERICS, cases=with_items, cost=0.4)
def items_matter(run: Run) -> None:
    """The same text with another item gives other numbers behind the item."""
    world, model, _ = _made(run)
    answers = []
    for item in (0, 1):
        text = world.text(model, run.rng, 10, item=item)
        answers.append(world.whole(model, text)[-1])
    if torch.allclose(answers[0], answers[1], rtol=1e-3):
        raise Failed("another item gives the same numbers")


@check(Kind.MODEL_FAMILY, "model_family.items.refused", Level.HOSTILE, cases=with_items, cost=0.3)
def strange_items_are_refused(run: Run) -> None:
    """What is no item is refused with a RequestError that says why, never with another error."""
    _, model, name = _made(run)
    for strange in (object(), {}, "slotline_unknown_name", 3.5, b"\0\1", []):
        try:
            model.process(name, strange)
        except RequestError as error:
            if not error.message.strip():
                raise Failed(f"the refusal of {strange!r} says nothing") from error
        except Exception as error:  # a plugin may raise anything
            raise Failed(
                f"{strange!r:.40} as an item: {type(error).__name__} instead of a RequestError: {error}"
            ) from error
