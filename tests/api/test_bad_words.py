"""`bad_words` as texts: whatever tokens spell one, the token that would complete it is banned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from slotline.core import LLM, SamplingParams
from slotline.plugins.logits_processors.bad_words.texts import BadText, Tails
from slotline.plugins.logits_processors.bad_words.vocabulary import Vocabulary, pieces_of
from tests.api.test_stop_rules import byte_fallback_tokenizer

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "asynchronous": {"scheduler.async": True},
    "drafted": {"drafter.name": "ngram", "drafter.tokens": 4, "drafter.adaptive": False},
}


@pytest.fixture(params=MODES)
def llm(request: pytest.FixtureRequest, tiny: Tiny, engines: Engines) -> LLM:
    return engines(tiny("llama"), **MODES[request.param])


# ---- bytes of tokens


def word_pieces() -> Tokenizer:
    vocab = {"[UNK]": 0, "[CLS]": 1, "b": 2, "##ad": 3, "bad": 4, "##!": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "word pieces"])
def test_the_bytes_of_tokens_side_by_side_are_the_text_that_they_decode_to(kind: str, tiny: Tiny) -> None:
    if kind == "byte level":
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny("llama"), trust_remote_code=False)
    else:
        backend = byte_fallback_tokenizer() if kind == "byte fallback" else word_pieces()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(["<think>"])
    pieces = pieces_of(tokenizer, len(tokenizer) + 3)
    assert pieces[len(tokenizer) :] == [b""] * 3
    assert pieces[tokenizer.convert_tokens_to_ids("<think>")] == b"<think>"
    assert {pieces[token] for token in tokenizer.all_special_ids} <= {b""}
    words = ["b", "##ad", "bad"] if kind == "word pieces" else ["a", "fox", "▁the", "<0xC3>", "<0xA9>", "▁", "fox"]
    ids = tokenizer.convert_tokens_to_ids(words)
    if kind == "byte level":
        ids = tokenizer.encode("naïve badgers, 漢字 and\n\ttabs")
    first = ids[0]
    assert (
        pieces[first] + b"".join(pieces[token] for token in ids[1:])
        == (
            tokenizer.backend_tokenizer.decode([first, *ids]).removeprefix(tokenizer.backend_tokenizer.decode([first]))
        ).encode()
    )


# ---- which tokens complete a word


pieces = st.lists(st.text("abc ", max_size=4).map(str.encode), min_size=1, max_size=12)
texts = st.lists(st.text("abc ", min_size=1, max_size=5).map(str.encode), min_size=1, max_size=3)


@given(pieces=pieces, words=texts, data=st.data())
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_a_token_is_banned_if_and_only_if_a_word_would_end_in_it(
    pieces: list[bytes], words: list[bytes], data: st.DataObject
) -> None:
    vocabulary = Vocabulary(pieces)
    texts = [BadText(word, vocabulary, 2) for word in words]
    for text in texts:
        text.set(1, True)
    tails = Tails(vocabulary, max(map(len, words)) - 1 + data.draw(st.integers(0, 2)))
    tokens = st.lists(st.integers(0, len(pieces) - 1), max_size=12)
    histories = [data.draw(tokens) for _ in range(3)]
    shown = np.full((3, tails.num_tokens), -1)
    for i, history in enumerate(histories):
        last = history[-tails.num_tokens :]
        shown[i, tails.num_tokens - len(last) :] = last
    ends = tails.of(shown)
    rows = np.array([1, 0, 1])
    found = {
        (e, t) for text in texts for pair in text.banned(rows, ends) for e, t in zip(*map(list, pair), strict=True)
    }
    wanted = set()
    for i in (0, 2):
        before = b"".join(pieces[token] for token in shown[i].tolist() if token >= 0)
        for token, piece in enumerate(pieces):
            if any(word in before[len(before) - min(len(word) - 1, len(before)) :] + piece for word in words):
                wanted.add((i, token))
    assert found == wanted


# ---- engines


def spelt(llm: LLM, *pieces: str) -> list[int]:
    """The tokens with just these texts."""
    tokenizer = llm.tokenizer.transformers
    names = [piece.replace(" ", "Ġ") for piece in pieces]
    ids: list[int] = tokenizer.convert_tokens_to_ids(names)
    assert None not in ids
    return ids


@pytest.mark.spread(2)
@pytest.mark.parametrize("word", ["def", " def", "fed", "e"])
def test_a_text_does_not_come_out_in_whatever_tokens_it_is_spelt(word: str, llm: LLM) -> None:
    letters = spelt(llm, "d", "e", "f", " ")
    for seed in range(3):
        common = {
            "max_tokens": 40,
            "ignore_eos": True,
            "seed": seed,
            "logit_bias": dict.fromkeys(letters, 60.0),
            "temperature": 0.9,
        }
        (free,) = llm.generate([letters], SamplingParams(**common))
        (kept,) = llm.generate([letters], SamplingParams(bad_words=[word], **common))
        assert kept.outputs[0].finish_reason == "length"
        assert word.strip() not in kept.outputs[0].text
        if word == "e":
            assert word in free.outputs[0].text


def test_a_word_that_begins_at_the_prompts_end_is_not_completed(llm: LLM) -> None:
    d, e, f = spelt(llm, "d", "e", "f")
    common = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "logit_bias": {f: 80.0, d: 60.0}}
    (free,) = llm.generate([[d, e]], SamplingParams(**common))
    (kept,) = llm.generate([[d, e]], SamplingParams(bad_words=["def"], **common))
    assert (free.outputs[0].text[:1], kept.outputs[0].text) == ("f", "df")


def test_several_words_and_none_of_another_request_are_kept_out_together(llm: LLM) -> None:
    letters = spelt(llm, "d", "e", "f")
    common = {"max_tokens": 30, "ignore_eos": True, "logit_bias": dict.fromkeys(letters, 60.0), "seed": 4}
    both = SamplingParams(bad_words=["de", "ff"], **common)
    plain, bad, again = llm.generate([letters] * 3, [SamplingParams(**common), both, SamplingParams(**common)])
    assert plain.outputs[0].token_ids == again.outputs[0].token_ids
    assert "de" in plain.outputs[0].text
    assert not {"de", "ff"} & {bad.outputs[0].text[i : i + 2] for i in range(30)}
