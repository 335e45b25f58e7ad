"""When an output ends, what its text is, and that a streamed text never takes anything back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import SUPPORT
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from slotline.core import LLM, CompletionOutput, SamplingParams
from slotline.text.detokenizer import Detokenizer
from slotline.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
EOS = 2
SCRIPT = f"{SUPPORT / 'scripted_tokens.py'}:Script"
PROMPT = "def main("


@pytest.fixture
def llm(tiny: Tiny, engines: Engines) -> LLM:
    """An engine whose requests can be told what to say, token by token."""
    return engines(tiny("llama", eos_token_id=EOS), **{"plugins.inline": (SCRIPT,)})


def ids(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text)


def say(llm: LLM, script: list[int], prompt: Any = PROMPT, **params: Any) -> CompletionOutput:
    """The output of a request that says `script`, then whatever the model likes."""
    settings = {"temperature": 0, "max_tokens": len(script), **params}
    return llm.generate(prompt, SamplingParams(extra_args={"script": script}, **settings))[0].outputs[0]


def streamed(llm: LLM, script: list[int], **params: Any) -> list[CompletionOutput]:
    settings = {"temperature": 0, "max_tokens": len(script), **params}
    return [o.outputs[0] for o in llm.stream(PROMPT, SamplingParams(extra_args={"script": script}, **settings))]


def test_the_end_of_sequence_token_ends_the_output_and_is_no_part_of_the_text(llm: LLM) -> None:
    word = ids(llm, "class Row")
    output = say(llm, [*word, EOS, *word])
    assert output.token_ids == [*word, EOS]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", None, "class Row")


def test_the_end_of_sequence_token_can_be_ignored(llm: LLM) -> None:
    word = ids(llm, "class Row")
    output = say(llm, [*word, EOS, *word], ignore_eos=True)
    assert (output.finish_reason, len(output.token_ids)) == ("length", 2 * len(word) + 1)
    assert output.text == "class Rowclass Row"  # special tokens are left out
    assert say(llm, [*word, EOS], ignore_eos=True, skip_special_tokens=False).text == "class Row</s>"


def test_a_stop_token_ends_the_output_and_is_named(llm: LLM) -> None:
    word, stop = ids(llm, "sum"), ids(llm, "!")
    output = say(llm, [*word, *stop, *word], stop_token_ids=[5, *stop])
    assert output.token_ids == [*word, *stop]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", stop[0], "sum")
    kept = say(llm, [*word, *stop, *word], stop_token_ids=stop, include_stop_str_in_output=True)
    assert (kept.text, kept.stop_reason) == ("sum!", stop[0])


def test_a_stop_token_counts_even_if_end_of_sequence_is_ignored(llm: LLM) -> None:
    output = say(llm, [9, EOS, 9], ignore_eos=True, stop_token_ids=[EOS])
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([9, EOS], "stop", EOS)


@pytest.mark.parametrize("stop", ["brown fox", "n fo", "fox", " ", "T"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_across_tokens_and_cut_off(llm: LLM, stop: str, include: bool) -> None:
    text = "The quick brown fox jumps"
    output = say(llm, ids(llm, text), stop=["zzz", stop], include_stop_str_in_output=include)
    want = text[: text.index(stop) + (len(stop) if include else 0)]
    assert (output.text, output.finish_reason, output.stop_reason) == (want, "stop", stop)


def test_the_first_of_several_stop_strings_wins(llm: LLM) -> None:
    output = say(llm, ids(llm, "import os, sys, json"), stop=["json", "sys", "os, s"])
    assert (output.text, output.stop_reason) == ("import ", "os, s")


def test_a_stop_string_in_the_prompt_stops_nothing(llm: LLM) -> None:
    output = say(llm, ids(llm, "argv):"), stop=["def main"])
    assert (output.text, output.finish_reason) == ("argv):", "length")


def test_a_stop_string_that_only_begins_at_the_end_stays_in_the_text(llm: LLM) -> None:
    output = say(llm, ids(llm, "lazy do"), stop=["dog"])
    assert (output.text, output.finish_reason) == ("lazy do", "length")


def test_nothing_stops_before_the_minimum(llm: LLM) -> None:
    tokens = ids(llm, "a b a b a b")
    early = say(llm, tokens, stop=["b"])
    late = say(llm, tokens, stop=["b"], min_tokens=len(tokens) - 1)
    assert early.text == "a "
    assert (late.finish_reason, late.stop_reason) == ("stop", "b")
    assert len(late.token_ids) >= len(tokens) - 1
    assert late.text.startswith("a b a ")


@pytest.mark.parametrize("other", [[], ["never in the text"]], ids=["one", "beside a longer one"])
def test_a_stop_string_that_is_completed_by_the_last_token_too_few_does_not_count(other: list[str], llm: LLM) -> None:
    tokens = [ids(llm, letter)[-1] for letter in "abcd"]
    for index, letter in enumerate("abc"):
        ends = say(llm, tokens, stop=[letter, *other], min_tokens=index + 1)
        assert (ends.token_ids, ends.finish_reason, ends.stop_reason) == (tokens[: index + 1], "stop", letter)
        too_few = say(llm, tokens, stop=[letter, *other], min_tokens=index + 2)
        assert (too_few.token_ids, too_few.finish_reason, too_few.stop_reason) == (tokens, "length", None)
        assert too_few.text.strip() == "abcd"
        assert [one.text.strip() for one in streamed(llm, tokens, stop=[letter, *other], min_tokens=index + 2)][
            -1
        ] == "abcd"


@pytest.mark.behaviour(7, 110)
def test_the_longest_output_is_max_tokens_or_what_the_model_length_allows(llm: LLM) -> None:
    assert len(say(llm, [9] * 5, max_tokens=1).token_ids) == 1
    for max_tokens in (None, 1000):
        output = say(llm, [9], prompt=random_prompts([60])[0], max_tokens=max_tokens, ignore_eos=True)
        assert (len(output.token_ids), output.finish_reason) == (4, "length")
    last = say(llm, [9], prompt=random_prompts([63])[0], max_tokens=None, ignore_eos=True)
    assert last.token_ids == [9]


def test_a_stop_in_the_last_allowed_token_is_a_stop(llm: LLM) -> None:
    assert say(llm, [9, EOS], max_tokens=2).finish_reason == "stop"
    tokens = ids(llm, "sum!")
    output = say(llm, tokens, stop=["!"], max_tokens=len(tokens))
    assert (output.text, output.finish_reason, output.stop_reason) == ("sum", "stop", "!")


def test_without_detokenising_there_is_no_text_and_stop_strings_still_stop(llm: LLM) -> None:
    assert say(llm, ids(llm, "lazy dog"), detokenize=False).text == ""
    output = say(llm, ids(llm, "lazy dog."), detokenize=False, stop=["dog"])
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "dog")


@pytest.mark.parametrize(
    "text", ["", " leading space", "  two", "emoji 😀 end", "é日本語", "👩‍👩‍👧 family", "tab\tnew\nline", "a \x7f b"]
)
def test_the_text_is_exactly_what_the_tokens_say(llm: LLM, text: str) -> None:
    assert say(llm, [*ids(llm, text), EOS], max_tokens=100).text == text


def test_leading_spaces_are_kept_in_a_stream(llm: LLM) -> None:
    assert streamed(llm, ids(llm, "  sum"))[-1].text == "  sum"


@pytest.mark.parametrize("stop", [(), ("jumps over",), ("ZZZZZZZZ",), ("😀x", "d.")])
def test_a_streamed_text_only_grows_and_ends_as_the_whole_one(llm: LLM, stop: tuple[str, ...]) -> None:
    script = ids(llm, "The quick 😀 brown fox jumps over the lazy dog.")
    outputs = streamed(llm, script, stop=stop)
    texts = [output.text for output in outputs]
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)
    whole = say(llm, script, stop=stop)
    assert (texts[-1], outputs[-1].finish_reason, outputs[-1].stop_reason) == (
        whole.text,
        whole.finish_reason,
        whole.stop_reason,
    )
    assert outputs[-1].token_ids == whole.token_ids
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert len(set(texts)) > 3


def test_a_stream_never_shows_half_a_character(llm: LLM) -> None:
    script = ids(llm, "a😀b日c")
    texts = [output.text for output in streamed(llm, script)]
    assert len(script) > 5  # the emoji takes several tokens
    assert not any("\ufffd" in text for text in texts)
    assert texts[-1] == "a😀b日c"


def test_an_output_that_ends_inside_a_character_shows_it_as_unknown(llm: LLM) -> None:
    script = ids(llm, "a😀")
    assert say(llm, script[:-1]).text.rstrip("\ufffd") == "a"
    assert say(llm, script[:-1]).text != "a"
    assert streamed(llm, script[:-1])[-1].text == say(llm, script[:-1]).text


def test_a_stream_ends_with_its_finished_output_even_if_another_call_ran_its_steps(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    next(stream)
    llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    rest = list(stream)
    assert [output.finished for output in rest] == [True]
    assert len(rest[-1].outputs[0].token_ids) == 3


def test_a_stream_that_is_dropped_leaves_no_request(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    assert llm.engine.has_work
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work


# ---- the detokeniser alone


@given(
    text=st.text(alphabet="ab😀é日 \n", max_size=20), stop=st.lists(st.text("ab ", min_size=1, max_size=5), max_size=2)
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_settled_text_is_always_a_prefix_of_what_comes_out(
    detokenizer_of: Callable[..., Detokenizer], encode: Callable[[str], list[int]], text: str, stop: list[str]
) -> None:
    detokenizer = detokenizer_of(stop=stop)
    shown, found = [""], None
    for token in encode(text):
        found = detokenizer.append(token)
        if found is not None:
            break
        shown.append(detokenizer.settled)
    detokenizer.finish()
    if not any(s in text for s in stop):
        assert detokenizer.text == text
    else:  # the first to be complete; of those that one token completes, the first to begin
        assert found in stop
        start = len(detokenizer.text)
        assert detokenizer.text == text[:start]
        assert text.startswith(found, start)
        places = [(text.index(s), text.index(s) + len(s)) for s in stop if s in text]
        assert not any(begin < start and end <= start + len(found) for begin, end in places)
    for before, after in zip(shown, [*shown[1:], detokenizer.text], strict=True):
        assert after.startswith(before)


@pytest.fixture(scope="module")
def tokenizer(tiny: Tiny) -> Tokenizer:
    return Tokenizer(tiny("llama"))


@pytest.fixture(scope="module")
def encode(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return tokenizer.encode


@pytest.fixture(scope="module")
def detokenizer_of(tokenizer: Tokenizer) -> Callable[..., Detokenizer]:
    return lambda **params: tokenizer.detokenizer(tokenizer.encode("def f("), SamplingParams(**params))


def byte_fallback_tokenizer() -> FastTokenizer:
    """In the manner of Llama 2 and Gemma: unknown characters are spelt in byte tokens, spaces are marked."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁quick", "fox", "a"]:
        vocab[token] = len(vocab)
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_words_of_a_marked_space_tokenizer_keep_their_spaces() -> None:
    tokenizer = byte_fallback_tokenizer()
    vocab = tokenizer.get_vocab()
    detokenizer = Detokenizer(tokenizer, [vocab["<s>"], vocab["▁the"]])
    for token in ("▁quick", "fox", "▁the"):
        detokenizer.append(vocab[token])
    assert detokenizer.text == " quickfox the"


@given(
    prompt=st.lists(st.integers(3, 263), max_size=8),
    tokens=st.lists(st.one_of(st.integers(3, 263), st.sampled_from([262, 263, 3 + 0xF0, 3 + 0x9F])), max_size=25),
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_bytes_that_are_no_text_break_no_request(prompt: list[int], tokens: list[int]) -> None:
    """Such a decoder reads good bytes as unknown once a bad one follows; the stream must live with that."""
    tokenizer = byte_fallback_tokenizer()
    detokenizer, shown = Detokenizer(tokenizer, prompt), ""
    for token in tokens:
        detokenizer.append(token)
        assert detokenizer.settled.startswith(shown)
        shown = detokenizer.settled
    detokenizer.finish()
    assert detokenizer.text.startswith(shown)
