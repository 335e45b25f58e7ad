"""Steps whose masks are all kept: what is sent to the device, and what is banned."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_for
from kept_masks import Pair
from structured_texts import EOS

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.plugins.structured_output.mask_cache import KeptMask
from slotline.plugins.structured_output.mask_table import MaskTable, StepMasks

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(102)]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB_SIZE = 70
RECORD = r"(\[[A-C]\d{3}\] (ok|late);)+"


def masks_of(count: int) -> list[KeptMask]:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (count, 3), dtype=np.int32)
    words[:, 2] &= (1 << VOCAB_SIZE - 64) - 1
    return [KeptMask(one) for one in words]


def test_each_row_has_its_mask_also_when_the_table_begins_anew() -> None:
    table, known, rng = MaskTable(VOCAB_SIZE, device_for(DEVICE), most=5), masks_of(9), Random(0)
    for _ in range(40):
        masked = np.array([rng.random() < 0.7 for _ in range(6)])
        masked[rng.randrange(6)] = True
        masks = rng.choices(known, k=int(masked.sum()))
        step = StepMasks.of(np.arange(6), masked, masks, table)
        if len(set(masks)) > 5:
            assert step is None
            continue
        assert step is not None
        bits = [np.unpackbits(mask.words.view(np.uint8), count=VOCAB_SIZE, bitorder="little") for mask in masks]
        want = torch.zeros(6, VOCAB_SIZE)
        want[masked] = want[masked].masked_fill(torch.from_numpy(np.stack(bits)) == 0, -torch.inf)
        logits = torch.zeros(6, VOCAB_SIZE, device=DEVICE)
        assert torch.equal(step.apply(logits).cpu(), want)
        assert not logits.any()
        step.apply(logits, in_place=True)
        assert torch.equal(logits.cpu(), want)


def test_a_step_like_the_one_before_sends_nothing_and_known_masks_are_sent_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, masks, sent = device_for("cpu"), masks_of(3), []
    table, place = MaskTable(VOCAB_SIZE, device), torch.device("cpu")
    whole = device.host_empty

    def counted(count: int, dtype: torch.dtype) -> Any:
        sent.append(count)
        return whole(count, dtype)

    monkeypatch.setattr(device, "host_empty", counted)
    table.gather([masks[0], masks[1], masks[0]], np.arange(3), place)
    assert sorted(sent) == [2 * 3, 2 * 3]  # two masks of three words, and two numbers for each row
    table.gather([masks[0], masks[1], masks[0]], np.arange(3), place)
    assert len(sent) == 2
    table.gather([masks[0], masks[1], masks[0]], np.array([0, 1, 3]), place)
    assert sent[2:] == [2 * 3]
    words, _ = table.gather([masks[2]], np.arange(1), place)
    assert sorted(sent[3:]) == [2, 3]
    assert np.array_equal(words.numpy(), masks[2].words[None])


def test_a_mask_without_ends_is_made_once() -> None:
    mask = KeptMask(np.array([0b1011, -1], np.int32))
    endless = mask.endless((1, 33))
    assert endless.words.tolist() == [0b1001, ~2]
    assert mask.words.tolist() == [0b1011, -1]
    assert mask.endless((1, 33)) is endless
    assert endless.endless((1, 33)) is endless
    assert (endless.leaves, KeptMask(np.zeros(2, np.int32)).leaves) == (True, False)
    assert not KeptMask(np.array([2], np.int32)).endless((1,)).leaves


def test_a_token_is_followed_only_where_the_graph_knows_that_the_text_goes_on() -> None:
    pair = Pair("llguidance", regex=RECORD)
    pair.walk_often(3, 20)
    state, followed = pair.grammar.start(pair.backend), 0
    for token in pair.text(Random(0), 20):
        last = state.own
        if state.follow(token):
            followed += 1
        else:
            assert state.accept([token]) == 1
        assert not state.finished
    assert followed > 10
    assert last is state.own
    assert not state.follow(EOS[0])


@pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "in turn"])
def llm(request: pytest.FixtureRequest) -> LLM:
    settings = {"structured_output.backend": "xgrammar", "scheduler.async": request.param}
    return LLM(max_model_len=96, memory="8MiB", **settings)


def texts_of(llm: LLM, regex: str, *, differ: bool = True) -> list[list[int]]:
    """Return the texts of requests under an expression, one of which is free."""
    wanted = StructuredOutputsParams(regex=regex)
    params = [
        SamplingParams(
            temperature=0.9,
            seed=i if differ else 0,
            max_tokens=24,
            ignore_eos=differ and i % 2 == 0,
            structured_outputs=None if i == 2 else wanted,
        )
        for i in range(5)
    ]
    outputs = llm.generate([[5, 6, 7]] * 5, params)
    assert {output.outputs[0].finish_reason for output in outputs} <= {"stop", "length"}
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_steps_of_kept_masks_write_the_same_texts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, apply = [], StepMasks.apply

    def counted(step: StepMasks, logits: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        steps.append(step)
        return apply(step, logits, in_place=in_place)

    monkeypatch.setattr(StepMasks, "apply", counted)
    grammars = llm.engine.extension("structured_output")
    table = MaskTable(llm.engine.limits.vocab_size, device_for("cpu"), most=3)
    monkeypatch.setattr(grammars, "_table", table)
    found = [texts_of(llm, RECORD) for _ in range(2)]
    assert found[0] == found[1]
    assert len(steps) > 20
    monkeypatch.setattr(StepMasks, "of", lambda *_: None)
    assert texts_of(llm, RECORD) == found[0]


def test_requests_at_one_place_ask_for_one_mask(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, asked = llm.engine.extension("structured_output").compiler.backend, list[int]()
    fill = backend.fill
    monkeypatch.setattr(backend, "fill", lambda states, *rest: (asked.append(len(states)), fill(states, *rest)))
    texts_of(llm, "<" + RECORD, differ=False)
    assert set(asked) == {1}
    assert len(asked) < 24


def test_where_the_plugin_fails_for_all_each_request_asks_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = llm.engine.extension("structured_output").compiler.backend
    want, fill = texts_of(llm, RECORD), backend.fill
    failed = list[int]()

    def picky(states: Any, drafts: Any, places: Any, bitmask: Any) -> None:
        if len(states) > 1:
            failed.append(len(states))
            bitmask[:] = 0
            raise ValueError("one at a time")
        fill(states, drafts, places, bitmask)

    monkeypatch.setattr(backend, "fill", picky)
    assert texts_of(llm, f"({RECORD})") == want  # the same texts, and no masks kept
    assert failed
