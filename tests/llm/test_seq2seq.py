"""Text to text through the runner: transformers' tokens, whatever steps, memory and neighbours do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_driver import GREEDY, recorded, recorded_items
from running_server import running_server
from tiny_models import VOCAB_SIZE
from tiny_seq2seq import build, by_transformers, greedy_reference, oracle

from slotline.core import LLM, BeamSearchParams, SamplingParams
from slotline.registry.errors import ModelError, NegotiationError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Engines = Callable[..., LLM]
START = 2
SLOW, OTHERS = pytest.mark.slow, ("marian", "mbart", "pegasus")
ENCODED = [[5, 6, 7, 2], list(range(20, 50)), [9, 2], list(range(90, 107)), [301, 44, 2]]
DECODED = [[START], [START, 11], [START, *range(200, 221)], [START, 7, 9], [START]]
BLOCK_KIB = 24  # keys and values of 16 tokens in three layers of either kind


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a family."""
    paths: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in paths:
            paths[family] = build(tmp_path_factory.mktemp("seq2seq") / family, family)
        return paths[family]

    return get


def prompts() -> list[Any]:
    """Prompts for the encoder alone, and for both sides, the decoder's with and without its start."""
    with_start = zip(ENCODED[1:3], DECODED[1:3], strict=True)
    both = [{"encoder_prompt": one, "decoder_prompt": {"prompt_token_ids": other}} for one, other in with_start]
    last = {"encoder_prompt": {"prompt_token_ids": ENCODED[3]}, "decoder_prompt": DECODED[3][1:]}
    return [ENCODED[0], *both, last, {"prompt_token_ids": ENCODED[4]}]


def expected(path: Path, count: int = 20) -> list[list[int]]:
    return [greedy_reference(path, one, other, count) for one, other in zip(ENCODED, DECODED, strict=True)]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", ["bart", "m2m100", "t5", *(pytest.param(one, marks=SLOW) for one in OTHERS)])
def test_a_batch_gives_transformers_tokens(family: str, made: Callable[[str], Path], engines: Engines) -> None:
    path = made(family)
    wanted = expected(path)
    assert len({tuple(tokens) for tokens in wanted}) > 3  # what is read matters
    assert max(len(set(tokens)) for tokens in wanted) > 5
    outputs = engines(path, max_num_batched_tokens=7).generate(prompts(), GREEDY)
    assert tokens_of(outputs) == wanted
    assert [output.prompt_token_ids for output in outputs] == DECODED


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted_requests_read_their_encoder_again(
    asynchronous: bool, made: Callable[[str], Path], engines: Engines
) -> None:
    settings = {"scheduler.async": asynchronous, "multimodal.cache_tokens": 64, "multimodal.max_tokens_per_step": 64}
    llm = engines(made("bart"), memory=f"{BLOCK_KIB * 10}KiB", **settings)
    with recorded(llm) as steps, recorded_items(llm) as items:
        assert tokens_of(llm.generate(prompts(), GREEDY)) == expected(made("bart"))
    assert sum(len(step.preempted) for step in steps) > 0
    assert max(len(each.encode) for each in items) > 1  # prompts of one step are encoded together


def test_equal_prompts_are_encoded_once(made: Callable[[str], Path], engines: Engines) -> None:
    llm = engines(made("bart"))
    with recorded_items(llm) as items:
        first = llm.generate([ENCODED[1], ENCODED[0], ENCODED[1]], GREEDY)
        again = llm.generate([{"encoder_prompt": ENCODED[1], "decoder_prompt": [17]}], GREEDY)
    assert sum(len(each.encode) for each in items) == 2
    assert tokens_of(first)[0] == tokens_of(first)[2] != tokens_of(again)[0]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_log_probabilities_are_transformers(temperature: float, made: Callable[[str], Path], engines: Engines) -> None:
    path = made("bart")
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)
    for output, encoded, decoded in zip(engines(path).generate(prompts(), params), ENCODED, DECODED, strict=True):
        chosen = output.outputs[0]
        given = torch.tensor([[*decoded, *chosen.token_ids]])
        with torch.no_grad():
            logits = oracle(path)(input_ids=torch.tensor([encoded]), decoder_input_ids=given).logits[0]
        wanted = logits[len(decoded) - 1 : -1].log_softmax(-1)
        for place, entry in enumerate(chosen.logprobs or ()):
            for token, value in entry.items():
                assert value.logprob == pytest.approx(wanted[place, token].item(), abs=1e-4)
    assert chosen.logprobs is not None


FORCED = {"forced_bos_token_id": 33, "forced_eos_token_id": 2, "bad_words_ids": [[0], [40]]}


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose generation_config.json forces tokens and bans some."""
    return build(tmp_path_factory.mktemp("seq2seq") / "forced", "mbart", generation=FORCED)


@pytest.mark.parametrize("language", [None, 51])
def test_forced_and_banned_tokens_are_those_of_generate(language: int | None, forced: Path, engines: Engines) -> None:
    own = {} if language is None else {"forced_bos_token_id": language}
    params = SamplingParams(temperature=0, max_tokens=9, extra_args=own or None)
    outputs = engines(forced).generate(prompts(), params)
    for output, encoded, decoded in zip(outputs, ENCODED, DECODED, strict=True):
        found = by_transformers(forced, encoded, decoded, 9, **own).sequences[0, len(decoded) :].tolist()
        assert output.outputs[0].token_ids == found
    assert {output.outputs[0].token_ids[0] == (language or 33) for output in outputs} == {True, False}


@pytest.mark.parametrize(
    "settings",
    [
        {"beam_width": 3, "max_tokens": 9},
        {"beam_width": 4, "max_tokens": 7, "length_penalty": 2.0, "early_stopping": True, "forced_bos_token_id": 51},
    ],
    ids=str,
)
def test_beams_are_those_of_generate(settings: dict[str, Any], forced: Path, engines: Engines) -> None:
    width, count = settings["beam_width"], settings["max_tokens"]
    rest = {name: value for name, value in settings.items() if name not in ("beam_width", "max_tokens")}
    found = engines(forced).beam_search(prompts(), BeamSearchParams(**settings))
    for output, encoded, decoded in zip(found, ENCODED, DECODED, strict=True):
        wanted = by_transformers(forced, encoded, decoded, count, num_beams=width, num_return_sequences=width, **rest)
        scores = wanted.sequences_scores.tolist()
        assert [beam.score for beam in output.sequences] == pytest.approx(scores, rel=1e-4)
        for beam, sequence in zip(output.sequences, wanted.sequences.tolist(), strict=True):
            assert beam.tokens == sequence[: len(beam.tokens)]
            assert set(sequence[len(beam.tokens) :]) <= {0}


def test_texts_are_read_on_both_sides(made: Callable[[str], Path], engines: Engines) -> None:
    llm = engines(made("bart"))
    encode = llm.tokenizer.encode
    plain, both = llm.generate(["def main(", {"encoder_prompt": "def main(", "decoder_prompt": "import os"}], GREEDY)
    assert (plain.prompt, plain.prompt_token_ids) == ("def main(", [START])
    assert both.prompt_token_ids == [START, *encode("import os")]
    found = [greedy_reference(made("bart"), encode("def main("), one.prompt_token_ids, 20) for one in (plain, both)]
    assert tokens_of([plain, both]) == found


def test_the_server_takes_plain_prompts(made: Callable[[str], Path]) -> None:
    path = made("bart")
    with running_server(model=str(path), device="cpu", dtype="float32", **{"cache.memory": "4MiB"}) as server:
        body = {"prompt": ENCODED[1], "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        wrong = httpx.post(f"{server.url}/v1/completions", json={**body, "prompt": [5] * 65}, timeout=60)
        wanted = greedy_reference(path, ENCODED[1], [START], 9)
        text = server.state.llm.tokenizer.decode(wanted, skip_special_tokens=True)
    assert answer["choices"][0]["text"] == text != ""
    assert answer["usage"]["prompt_tokens"] == len(ENCODED[1]) + 1, "what the encoder reads, and the decoder's start"
    assert answer["usage"]["total_tokens"] == len(ENCODED[1]) + 1 + 9
    assert wrong.status_code == 400
    assert "the encoder prompt has 65 tokens" in wrong.text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (list(range(65)), "the encoder prompt has 65 tokens, and the encoder reads from 1 to 64"),
        ({"encoder_prompt": []}, "the encoder prompt has 0 tokens"),
        ("", "the encoder_prompt is empty"),
        ([5, VOCAB_SIZE], f"the encoder prompt has token {VOCAB_SIZE}, and the model knows {VOCAB_SIZE} tokens"),
        ({"encoder_prompt": [5], "decoder_prompt": [VOCAB_SIZE]}, f"{VOCAB_SIZE}"),
        ({"encoder_prompt": [5], "decoder_prompt": list(range(64))}, "65 tokens"),
        ({"encoder_prompt": 5}, "5"),
        ({"encoder_prompt": {"text": "a"}}, "encoder_prompt={'text': 'a'} cannot be read"),
        ({"encoder_prompt": [5], "prompt": "a"}, "a prompt has prompt beside encoder_prompt"),
        ({"decoder_prompt": [5]}, "a decoder_prompt without an encoder_prompt"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data has image"),
    ],
)
def test_a_wrong_prompt_is_refused_by_name(
    prompt: Any, message: str, made: Callable[[str], Path], engines: Engines
) -> None:
    llm = engines(made("bart"))
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate([prompt], GREEDY)
    assert caught.value.fix
    assert not llm.engine.has_work


def test_t5_needs_a_backend_that_adds_its_bias(made: Callable[[str], Path], engines: Engines, tmp_path: Path) -> None:
    llm = engines(made("t5"))
    assert {group.backend for group in llm.plan.groups} == {"torch"}
    with pytest.raises(NegotiationError, match="position bias"):
        engines(made("t5"), backend="triton")
    with pytest.raises(ModelError, match="other relative positions"):
        llm.engine.reload_weights(build(tmp_path / "other", "t5", seed=1))


def test_an_encoder_prompt_needs_an_encoder(tiny: Callable[..., Path], engines: Engines) -> None:
    with pytest.raises(RequestError, match="whose encoder, if it has one, reads no prompt"):
        engines(tiny("llama")).generate({"encoder_prompt": [5], "decoder_prompt": [6]}, GREEDY)


def test_prefixes_are_not_shared(made: Callable[[str], Path], engines: Engines) -> None:
    with pytest.raises(NegotiationError, match="prefix"):
        engines(made("bart"), enable_prefix_caching=True)
