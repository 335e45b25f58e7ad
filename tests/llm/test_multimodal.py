"""Images through the whole engine: transformers' own text, whatever chunks, sharing, caches and preemption do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine_driver import GREEDY, mixes_decode_and_prefill, recorded, recorded_items
from head_folders import build as build_head
from tiny_vision import TOKENS_PER_IMAGE, VARIANTS, greedy_reference, image

from slotline.core import LLM, SamplingParams
from slotline.plugins.multimodal.encoder_runner import EncoderRunner

pytest.importorskip("PIL", reason="image processors need Pillow")
pytestmark = pytest.mark.usefixtures("one_thread")

Vision = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = [
    ("def <image> main(", [0]),
    ("class Row <image><image> pass", [1, 0]),
    ("import os, sys, json", []),
    ("The quick <image> jumps over the <image>", [2, 2]),
    ("<image>", [3]),
]
KIB_PER_TOKEN = 4 * 2 * (16 + 16) * 4 // 1024


def prompt(text: str, seeds: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [image(seed) for seed in seeds]}, **more}


def generate(llm: LLM, prompts: Sequence[tuple[str, Sequence[int]]], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate([prompt(text, seeds) for text, seeds in prompts], params)


def expected(path: Path, prompts: Sequence[tuple[str, Sequence[int]]]) -> list[list[int]]:
    return [greedy_reference(path, text, seeds, 20) for text, seeds in prompts]


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def counted(llm: LLM) -> Iterator[list[int]]:
    """The number of items in each call of the model's `encode` inside."""
    model: Any = llm.engine.extension("multimodal").encoder.model
    original, calls = model.encode, list[int]()

    def encode(modality: str, items: Sequence[Mapping[str, Any]]) -> Any:
        calls.append(len(items))
        return original(modality, items)

    model.encode = encode
    try:
        yield calls
    finally:
        del model.encode


@pytest.mark.spread(1, slow=1)
@pytest.mark.parametrize("optimize", [False, True])
def test_pipeline_stages_give_transformers_tokens(optimize: bool, tiny_vision_model: Vision, engines: Engines) -> None:
    path = tiny_vision_model(VARIANTS[0])
    settings = {"parallel.pipeline": ("cpu", "cpu"), "optimize": optimize, "scheduler.async": True}
    llm, one = engines(path, **settings), engines(path)
    assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)
    first, last = llm.plan.stages
    assert first.num_parameters > last.num_parameters  # the encoder lies on the first
    assert first.num_parameters + last.num_parameters == one.plan.facts["parameters"]
    llm.reload_weights()
    assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("backend", "optimize"), [("torch", False), ("cpu", True)])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.behaviour(76, 77, 79, 80, 83)
def test_a_batch_of_images_and_text_gives_transformers_tokens(
    name: str, backend: str, optimize: bool, tiny_vision_model: Vision, engines: Engines
) -> None:
    path = tiny_vision_model(name)
    llm = engines(path, backend=backend, optimize=optimize)
    assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)
    swapped = [(text, [seed + 10 for seed in seeds]) for text, seeds in PROMPTS]
    found = tokens(generate(llm, swapped))
    assert found == expected(path, swapped)
    assert found[0] != expected(path, PROMPTS)[0]  # what the image shows matters


@pytest.mark.spread(2)
@pytest.mark.parametrize("sizes", [{}, {"multimodal.cache_tokens": 9}, {"multimodal.max_tokens_per_step": 10}])
@pytest.mark.parametrize("max_batched_tokens", [1, 5, 12])
@pytest.mark.behaviour(32, 80)
def test_chunks_that_end_inside_images_give_transformers_tokens(
    max_batched_tokens: int, sizes: dict[str, int], tiny_vision_model: Vision, engines: Engines
) -> None:
    path = tiny_vision_model()
    settings = {"scheduler.max_batched_tokens": max_batched_tokens, "cache.prefix_caching": False, **sizes}
    llm = engines(path, block_size=4, **settings)
    with recorded(llm) as steps, recorded_items(llm) as items:
        assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)
    both = list(zip(steps, items, strict=True))
    cut = [
        feature
        for step, of_step in both
        for row, feature in of_step.features
        for first, count in [_window(step, row)]
        if feature.start < first + count < feature.end
    ]
    assert cut
    assert any(mixes_decode_and_prefill(step) and each.features for step, each in both) or max_batched_tokens == 1
    if sizes:
        assert any(each.dropped for each in items) or "multimodal.cache_tokens" not in sizes


def _window(step: Any, row: int) -> tuple[int, int]:
    place = step.rows.tolist().index(row)
    return int(step.num_computed[place]), int(step.num_scheduled[place])


@pytest.mark.behaviour(79)
def test_an_image_is_encoded_once_for_all_requests_that_show_it(tiny_vision_model: Vision, engines: Engines) -> None:
    path = tiny_vision_model()
    llm = engines(path, **{"cache.prefix_caching": False})
    asked = [("def <image> main(", [0]), ("a <image> b <image>", [0, 0]), ("<image> pass", [0]), ("<image>", [1])]
    with counted(llm) as calls:
        assert tokens(generate(llm, asked)) == expected(path, asked)
        llm.generate(prompt("x <image> y", [0]), SamplingParams(n=3, max_tokens=3))
    assert sum(calls) == 2


@pytest.mark.behaviour(77)
def test_images_of_one_step_are_encoded_together(tiny_vision_model: Vision, engines: Engines) -> None:
    llm = engines(tiny_vision_model(), **{"cache.prefix_caching": False})
    with counted(llm) as calls:
        generate(llm, [("<image>", [seed]) for seed in range(4)])
    assert calls == [4]


def test_a_prefix_is_shared_only_by_requests_with_the_same_image(tiny_vision_model: Vision, engines: Engines) -> None:
    path = tiny_vision_model()
    llm = engines(path, block_size=4)
    text = "def main <image> return sum(int(word) for word in argv)"
    (first,) = generate(llm, [(text, [5])])
    encoding = llm.engine.extension("multimodal")
    assert encoding is not None
    encoding.reset()
    with counted(llm) as calls:
        (same,) = generate(llm, [(text, [5])])
    assert calls == []  # the whole image stands in cached blocks
    assert same.metrics.num_cached_tokens > TOKENS_PER_IMAGE
    (other,) = generate(llm, [(text, [6])])
    start = first.prompt_token_ids.index(encoding.reader.placeholders["image"])
    assert other.metrics.num_cached_tokens <= start
    assert tokens([first, same, other]) == expected(path, [(text, [5]), (text, [5]), (text, [6])])


def test_a_prefix_that_ends_inside_an_image_is_continued(tiny_vision_model: Vision, engines: Engines) -> None:
    path = tiny_vision_model()
    llm = engines(path, block_size=4)
    asked = [("a <image> b", [5]), ("a <image> quite another text behind it", [5])]
    outputs = [generate(llm, [one])[0] for one in asked]
    assert tokens(outputs) == expected(path, asked)
    llm.engine.extension("multimodal").reset()
    with counted(llm) as calls:
        (short,) = llm.generate({**prompt("a <image>", [5])}, GREEDY)
    assert 0 < short.metrics.num_cached_tokens < len(short.prompt_token_ids)
    assert calls == [1]
    assert tokens([short]) == expected(path, [("a <image>", [5])])


@pytest.mark.parametrize(("prefix_caching", "asynchronous"), [(False, False), (True, False), (False, True)])
@pytest.mark.behaviour(16, 32, 33, 39)
def test_preempted_requests_with_images_give_transformers_tokens(
    prefix_caching: bool, asynchronous: bool, tiny_vision_model: Vision, engines: Engines
) -> None:
    path = tiny_vision_model()
    llm = engines(
        path,
        block_size=4,
        memory=f"{72 * KIB_PER_TOKEN}KiB",
        **{
            "scheduler.max_batched_tokens": 11,
            "cache.prefix_caching": prefix_caching,
            "scheduler.async": asynchronous,
            "multimodal.cache_tokens": 2 * TOKENS_PER_IMAGE,
        },
    )
    outputs = generate(llm, PROMPTS)
    assert tokens(outputs) == expected(path, PROMPTS)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.spread(1, slow=1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_crowds_with_images_and_aborts_give_what_requests_give_alone(
    asynchronous: bool, tiny_vision_model: Vision, engines: Engines
) -> None:
    path, rng, dropped = tiny_vision_model(), Random(3), 0
    words = ["def", "main", "return", "<image>", "<image>", "word", "fox"]
    for budget, cache_tokens in ((7, 9), (13, 20), (40, 27)):
        llm = engines(
            path,
            block_size=4,
            max_num_seqs=3,
            memory=f"{88 * KIB_PER_TOKEN}KiB",
            **{
                "scheduler.max_batched_tokens": budget,
                "scheduler.async": asynchronous,
                "multimodal.cache_tokens": cache_tokens,
            },
        )
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(8)]
        asked = [(text, rng.choices(range(3), k=text.count("<image>"))) for text in texts]
        asked = [one for one in asked if len(one[1]) < 4]
        groups = llm.submitter.submit_all([prompt(*one) for one in asked], [GREEDY] * len(asked), [None] * len(asked))
        aborted = {rng.randrange(len(groups)) for _ in range(3)}
        with recorded(llm) as steps, recorded_items(llm) as items:
            while llm.engine.has_work and len(steps) < 600:
                if len(steps) in (4, 9, 14):
                    llm.engine.abort(groups[sorted(aborted)[len(steps) % len(aborted)]][0].request_id)
                llm.engine.step()
        assert not llm.engine.has_work
        dropped += sum(len(each.dropped) for each in items)
        for index, (one, (request,)) in enumerate(zip(asked, groups, strict=True)):
            if request.finish_reason == "length":
                assert request.output_token_ids == expected(path, [one])[0]
            else:
                assert (request.finish_reason, index in aborted) == ("abort", True)
    assert dropped > 0


def test_drafts_beside_images_leave_the_text_as_it_is(tiny_vision_model: Vision, engines: Engines) -> None:
    path = tiny_vision_model()
    llm = engines(path, **{"drafter.name": "ngram", "scheduler.max_batched_tokens": 12})
    asked = [(f"{text} word word word", seeds) for text, seeds in PROMPTS]
    assert tokens(generate(llm, asked)) == expected(path, asked)


@pytest.mark.parametrize("expanded", [False, True])
def test_token_ids_may_hold_one_placeholder_for_each_image_or_all(
    expanded: bool, tiny_vision_model: Vision, engines: Engines
) -> None:
    path = tiny_vision_model()
    llm = engines(path)
    text, seeds = PROMPTS[3]
    ids = llm.tokenizer.encode(text)
    if expanded:
        placeholder = llm.engine.extension("multimodal").reader.placeholders["image"]
        ids = [t for token in ids for t in [token] * (TOKENS_PER_IMAGE if token == placeholder else 1)]
    data = {"image": [image(seed) for seed in seeds]}
    (output,) = llm.generate({"prompt_token_ids": ids, "multi_modal_data": data}, GREEDY)
    assert tokens([output]) == expected(path, [(text, seeds)])


def test_a_conversation_may_show_images(tiny_vision_model: Vision, engines: Engines) -> None:
    path = tiny_vision_model()
    llm = engines(path)
    template = (
        "{% for m in messages %}{{ m.role }}: {% for p in m.content %}"
        "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %} {% endfor %}"
    )
    llm.tokenizer._hf.chat_template = template
    parts = [
        {"type": "image", "image": image(4)},
        {"type": "text", "text": "what?"},
        {"type": "image", "image": image(5)},
    ]
    outputs = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert tokens(outputs) == expected(path, [("user: <image>what?<image> ", [4, 5])])


def test_new_weights_forget_the_old_ones_embeddings(tiny_vision_model: Vision, engines: Engines) -> None:
    llm = engines(tiny_vision_model())
    with counted(llm) as calls:
        first = tokens(generate(llm, PROMPTS[:1]))
        llm.reload_weights()
        assert tokens(generate(llm, PROMPTS[:1])) == first
    assert calls == [1, 1]


@pytest.mark.behaviour(28)
def test_room_for_embeddings_is_there_where_the_model_takes_items_alone_and_can_be_emptied(
    tiny_vision_model: Vision, tiny: Callable[..., Path], engines: Engines
) -> None:
    text = engines(tiny("llama")).engine
    assert (text.extension("multimodal"), text.extensions.limit_tokens) == (None, ())
    limits = {"multimodal.cache_tokens": 20, "multimodal.max_tokens_per_step": 10}
    llm = engines(tiny_vision_model(), **limits)
    encoding = llm.engine.extension("multimodal")
    assert encoding is not None
    assert llm.engine.scheduler.extensions is llm.engine.extensions
    assert encoding.items.cache is encoding.cache
    assert (encoding.cache.capacity, encoding.cache.max_tokens_per_step) == (20, 10)
    generate(llm, PROMPTS[:1])
    assert encoding.encoder.outputs
    encoding.reset()
    encoding.check()
    assert not encoding.encoder.outputs
    with counted(llm) as calls:
        generate(llm, PROMPTS[:1])
    assert calls == [1]


@pytest.mark.behaviour(85)
def test_steps_without_items_take_the_text_path(tiny_vision_model: Vision, engines: Engines) -> None:
    llm = engines(tiny_vision_model())
    model: Any = llm.engine.runner.model
    original, seen = model.forward, list[bool]()

    def forward(*args: Any) -> Any:
        seen.append(len(args) > 4)
        return original(*args)

    model.forward = forward
    try:
        generate(llm, PROMPTS[:1])
    finally:
        del model.forward
    assert seen == [True] + [False] * 19  # the prompt, then one token at a time


# ---- drafters


@pytest.mark.behaviour(121)
@pytest.mark.parametrize("tokens_per_step", [64, 24], ids=["whole", "chunks"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_drafter_sees_images_where_it_looks_one_token_ahead(
    asynchronous: bool,
    tokens_per_step: int,
    tiny_vision_model: Vision,
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_vision_model(VARIANTS[0])
    head = build_head(tmp_path / "head", path, "eagle")
    settings: dict[str, Any] = {"drafter.name": "eagle", "drafter.path": str(head), "drafter.tokens": 3}
    settings |= {"scheduler.async": asynchronous, "max_num_batched_tokens": tokens_per_step}
    llm = engines(path, **settings)
    encoding, drafting = llm.engine.extension("multimodal"), llm.engine.extension("drafts").drafting
    assert encoding is not None
    assert drafting is not None
    drafter: Any = drafting.drafter
    seen, ahead = dict[tuple[int, int], Any](), dict[tuple[int, int], Any]()  # by (row, position) of the image's token
    observe, embeds = drafter.observe, EncoderRunner.embeds

    def watched(self: EncoderRunner, inputs: Any, items: Any, shift: int = 0) -> Any:
        found = embeds(self, inputs, items, shift)
        if found is not None and not shift:
            counts = inputs.num_scheduled
            computed = inputs.seq_lens_cpu[: len(counts)] - counts
            spans = zip(inputs.rows.tolist(), computed.tolist(), counts, strict=True)
            places = [(row, position) for row, first, n in spans for position in range(first, first + n)]
            for index, value in zip(found.index.tolist(), found.values, strict=True):
                seen[places[index]] = value.clone()
        return found

    def observed(computed: Any) -> Any:
        embed = encoding.encoder.model.embed(computed.next_token_ids)
        shown = embed if computed.next_embeds is None else computed.next_embeds
        starts = computed.query_start_loc.tolist()
        for row, start, end in zip(computed.rows.tolist(), starts[:-1], starts[1:], strict=True):
            for i in range(start, end):
                if not bool((shown[i] == embed[i]).all()):
                    ahead[row, int(computed.positions[i]) + 1] = shown[i].clone()
        return observe(computed)

    monkeypatch.setattr(EncoderRunner, "embeds", watched)
    monkeypatch.setattr(drafter, "observe", observed)
    assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)
    assert drafting.counts.failures == 0
    assert len(ahead) > 3 * TOKENS_PER_IMAGE
    assert all(bool((seen[place] == value).all()) for place, value in ahead.items())
    missed = seen.keys() - ahead.keys()  # an item's first token where a step ends in front of it, or a prompt's first
    assert len(missed) <= len([0 for _, seeds in PROMPTS for _ in seeds])
