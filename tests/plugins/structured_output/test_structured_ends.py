"""End-of-sequence tokens that are ordinary text: they may come where a text may end, and nowhere inside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structured_texts import PLUGINS, byte_tokens, context, tokenizer, tokens_of

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.planner.plan import SMALL_MODEL
from slotline.registry.errors import RequestError
from slotline.testing.oracles.structured_output import unpacked
from slotline.testing.subject import subject_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(102)]

PERSON = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
WANTED: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "json_object": {"json_object": True},
    "regex": {"regex": r"(a[\n ]?)*b"},
    "forced": {"regex": r"a\n\}c"},
    "grammar": {"grammar": 'root ::= "a" ws "b"\nws ::= [ \\n]*'},
    "choice": {"choice": ["x\ny", "x z"]},
}


def whole(text: str) -> bool:
    try:
        return set(json.loads(text)) == {"a"}
    except ValueError:
        return False


def allowed(backend: Any, state: Any, size: int, drafts: list[int]) -> Any:
    """The tokens that may come next and behind each draft."""
    words = np.full((1 + len(drafts), -(-size // 32)), -1, np.int32)
    backend.fill([state], [drafts], [0], words)
    return unpacked(words, size)


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("others", [(0, 3), (), (4099,)], ids=str)
@pytest.mark.parametrize("end", ["\n", " ", '"', "}"], ids=repr)
def test_an_end_that_is_text_is_masked_until_the_text_may_end(plugin: str, end: str, others: tuple[int, ...]) -> None:
    ends, size = (*others, byte_tokens()[ord(end)]), len(tokenizer()) + 7
    backend = subject_of(f"structured_output:{plugin}").build(context(ends, size))
    grammar = backend.compile(StructuredOutputsParams(json=PERSON).constraint)
    for text in ("", "{", '{"', '{"a":"x', '{"a":"x"', '{"a":"x"}'):
        tokens = tokens_of(text)
        if not set(ends).isdisjoint(tokens):
            continue
        state = backend.start(grammar)
        for drafts in ([], tokens):
            known = tokens if not drafts else []
            fresh = backend.start(grammar)
            assert fresh.accept(known) == len(known)
            mask = allowed(backend, fresh, size, drafts)[-1]
            assert mask[list(ends)].tolist() == [whole(text)] * len(ends), (text, drafts)
        assert state.accept(tokens) == len(tokens)
        assert state.count_legal([ends[-1]]) == whole(text)
        assert set(ends).isdisjoint(state.forced())


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("name", WANTED)
def test_texts_that_force_what_an_end_stands_for_are_cut_otherwise_or_refused(plugin: str, name: str) -> None:
    """A newline that ends the text cannot be one of its characters: larger tokens with it may."""
    ends, size = (0, byte_tokens()[ord("\n")]), len(tokenizer())
    backend = subject_of(f"structured_output:{plugin}").build(context(ends))
    state = backend.start(backend.compile(StructuredOutputsParams(**WANTED[name]).constraint))
    for character in {"forced": "a", "choice": "x", "regex": "a", "grammar": "a"}.get(name, '{"'):
        assert state.accept(tokens_of(character)) == 1
        try:
            mask = allowed(backend, state, size, [])[0]
        except RequestError:  # no text fits: llguidance says so itself
            assert (plugin, name) == ("llguidance", "forced")
            return
        assert not mask[list(ends)].any()


@pytest.fixture(scope="module")
def newline_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with a newline among its end-of-sequence tokens."""
    folder = tmp_path_factory.mktemp("newline") / "model"
    shutil.copytree(SMALL_MODEL, folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "eos_token_id": [0, 3, byte_tokens()[ord("\n")]]}))
    return folder


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("drafter", [{}, {"drafter.name": "ngram"}], ids=str)
def test_a_text_never_ends_in_the_middle_at_a_newline(plugin: str, drafter: dict[str, Any], newline_ends: Path) -> None:
    llm = LLM(newline_ends, max_model_len=128, memory="4MiB", **{"structured_output.backend": plugin}, **drafter)
    newline = byte_tokens()[ord("\n")]
    schema = {**PERSON, "properties": {"a": {"enum": ["one", "two"]}}}
    wanted = SamplingParams(
        temperature=1,
        seed=3,
        max_tokens=60,
        logit_bias={newline: 50},
        structured_outputs=StructuredOutputsParams(json=schema),
    )
    for output in llm.generate(['{"a": "one"}', "x ="], wanted):
        (found,) = output.outputs
        assert found.finish_reason == "stop"
        assert json.loads(found.text)["a"] in ("one", "two")
    endless = SamplingParams(
        temperature=1,
        seed=3,
        max_tokens=8,
        ignore_eos=True,
        logit_bias={newline: 50},
        structured_outputs=StructuredOutputsParams(regex=r"(a|\n)*"),
    )
    (found,) = llm.generate("x =", endless)[0].outputs
    assert (found.finish_reason, newline in found.token_ids) == ("length", False)
