"""No byte of a prompt comes out with the output, whatever the prompt ends with, and stop strings do not see it."""

from __future__ import annotations

import codecs
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from slotline.core import LLM, SamplingParams
from slotline.text.detokenizer import Detokenizer
from tests.api.test_stop_rules import byte_fallback_tokenizer

SMILE = "😀".encode()
FALLBACK = byte_fallback_tokenizer()


def byte_level_tokenizer() -> FastTokenizer:
    """In the manner of GPT-2, without a merge: token b is byte b."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    vocab = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert sorted(vocab) == characters
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


LEVEL = byte_level_tokenizer()


def fallback(text: bytes) -> list[int]:
    return [3 + byte for byte in text]


def decoded(tokenizer: FastTokenizer, prompt: list[int], output: list[int], stop: tuple[str, ...] = ()) -> str:
    """The output's text; what is shown on the way grows into it."""
    detokenizer, shown = Detokenizer(tokenizer, prompt, stop=stop), [""]
    for token in output:
        if detokenizer.append(token) is not None:
            return detokenizer.text
        shown.append(detokenizer.settled)
    detokenizer.finish()
    for before, after in zip(shown, [*shown[1:], detokenizer.text], strict=True):
        assert after.startswith(before)
    return detokenizer.text


A = FALLBACK.token_to_id("a")
THE = FALLBACK.token_to_id("▁the")


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (SMILE * 2, [A], "a"),
        (SMILE * 3, [THE, A], " thea"),
        (SMILE + "漢字é".encode(), [A], "a"),
        (SMILE + b"\x80", [A], "a"),
        (b"\x80" * 9, [THE], " the"),
        (b"\x80" * 9, [*fallback(SMILE), A], "😀a"),
        ("x\ufffd".encode(), [A], "a"),
        (SMILE, [*fallback(b"\x80"), A], "\ufffda"),
        (SMILE + SMILE[:1], [A], "a"),
        (SMILE + SMILE[:2], [A], "a"),
        (SMILE + SMILE[:3], [A], "a"),
        (SMILE + SMILE[:1], [*fallback(SMILE[1:]), A], "😀a"),
        (SMILE + SMILE[:2], [*fallback(SMILE[2:]), A], "😀a"),
        (SMILE + SMILE[:3], [*fallback(SMILE[3:]), A], "😀a"),
        (SMILE + SMILE[:3], fallback(SMILE[3:]), "😀"),
        (SMILE[:3], [*fallback(SMILE), A], "😀a"),
    ],
)
def test_a_byte_fallback_tokenizer_shows_the_output_alone(prompt: bytes, output: list[int], text: str) -> None:
    assert decoded(FALLBACK, [1, THE, *fallback(prompt)], output) == text
    assert decoded(FALLBACK, [1, A, *fallback(prompt)], [*output, THE]) == f"{text} the"


def test_a_stop_string_does_not_see_the_prompt() -> None:
    prompt = [1, THE, *fallback(SMILE * 2)]
    assert decoded(FALLBACK, prompt, [A, A], stop=("\ufffd", "😀", "the")) == "aa"
    assert decoded(FALLBACK, [*prompt, *fallback(SMILE[:2])], [*fallback(SMILE[2:]), A], stop=("😀",)) == ""


def expected(prompt: bytes, output: bytes) -> str:
    """The output's text, with the prompt's last character if the output completes it."""
    reader = codecs.getincrementaldecoder("utf-8")(errors="replace")
    reader.decode(prompt)
    begun = reader.getstate()[0]
    if begun:
        whole = (begun + output).decode(errors="replace")
        if not whole.startswith("\ufffd"):
            return whole
    return output.decode(errors="replace")


PIECES = st.sampled_from(
    [b"a", b" ", SMILE, "漢".encode(), "é".encode(), SMILE[:2], SMILE[2:], b"\x80", b"\xe6", b"\xff"]
)


@given(prompt=st.lists(PIECES, min_size=1, max_size=8), output=st.lists(PIECES, min_size=1, max_size=8))
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_a_byte_level_tokenizer_shows_the_output_alone(prompt: list[bytes], output: list[bytes]) -> None:
    before, behind = b"".join(prompt), b"".join(output)
    assert decoded(LEVEL, list(before), list(behind)) == expected(before, behind)


WHOLE = st.sampled_from([b"a", SMILE, "漢".encode(), "é".encode()])


@given(prompt=st.lists(PIECES, min_size=1, max_size=8), output=st.lists(WHOLE, min_size=1, max_size=8))
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_whole_characters_come_out_of_a_byte_fallback_tokenizer_behind_any_prompt(
    prompt: list[bytes], output: list[bytes]
) -> None:
    before, behind = b"".join(prompt), b"".join(output)
    text = decoded(FALLBACK, [1, *fallback(before)], [*fallback(behind), A])
    assert text == behind.decode() + "a"


@pytest.mark.spread(2)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_streams_and_every_output_of_a_prompt_show_the_same_text(
    skip_special_tokens: bool, engines: Callable[..., LLM]
) -> None:
    llm = engines(None)
    tokens = [llm.tokenizer.transformers.convert_tokens_to_ids(one) for one in ("Ġ", "ð", "Ł", "ĺ")]
    asked = {"temperature": 0, "max_tokens": 12, "skip_special_tokens": skip_special_tokens, "ignore_eos": True}
    for prompt in (tokens, [*llm.tokenizer.encode("😀😀"), *tokens[1:3]], [*tokens[1:], 0]):
        params = SamplingParams(**asked)
        (whole,) = llm.generate(prompt, params)
        *_, last = llm.stream(prompt, params)
        (both,) = llm.generate(prompt, SamplingParams(**asked, n=2))
        assert {last.outputs[0].text, *(one.text for one in both.outputs)} == {whole.outputs[0].text}
