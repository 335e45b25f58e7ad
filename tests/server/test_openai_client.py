"""The official client of OpenAI against a real socket: what it gets is what `LLM` gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from running_server import RunningServer

from slotline.core import LLM, SamplingParams

MODEL = "slotline-small"
SEEDED: dict[str, Any] = {"model": MODEL, "temperature": 0.8, "seed": 7, "max_tokens": 24}
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=24)
PROMPT = "def read_file(path"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_is_left(server: RunningServer) -> Iterator[None]:
    yield
    server.everything_returned()


def test_a_completion_is_that_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, PARAMS)
    answer = client.completions.create(prompt=PROMPT, **SEEDED)
    (choice,) = answer.choices
    assert choice.text == expected.outputs[0].text
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_several_prompts_and_outputs_have_their_places(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "class A"]
    expected = llm.generate(prompts, SamplingParams(temperature=0.8, seed=7, max_tokens=24, n=2))
    answer = client.completions.create(prompt=prompts, n=2, **SEEDED)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(
        enumerate(one.text for output in expected for one in output.outputs)
    )
    texts = ["", "", "", ""]
    for chunk in client.completions.create(prompt=prompts, n=2, stream=True, **SEEDED):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


def test_token_ids_are_taken_as_a_prompt(client: openai.OpenAI, llm: LLM) -> None:
    tokens = llm.tokenizer.encode(PROMPT)
    (expected,) = llm.generate({"prompt_token_ids": tokens}, PARAMS)
    for prompt in (tokens, [tokens]):
        assert client.completions.create(prompt=prompt, **SEEDED).choices[0].text == expected.outputs[0].text


@pytest.mark.parametrize("stop", ["\n", ["\n", "retu"]])
def test_a_stop_string_ends_the_text(stop: Any, client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0.8, seed=7, max_tokens=24, stop=stop))
    answer = client.completions.create(prompt=PROMPT, stop=stop, **SEEDED)
    streamed = list(client.completions.create(prompt=PROMPT, stop=stop, stream=True, **SEEDED))
    assert answer.choices[0].text == expected.outputs[0].text
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.outputs[0].text
    assert answer.choices[0].finish_reason == streamed[-1].choices[0].finish_reason == "stop"


def test_usage_comes_at_the_end_of_a_stream_if_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **SEEDED)
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 24


def test_echoed_log_probabilities_are_those_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=4, logprobs=2, prompt_logprobs=2)
    (expected,) = llm.generate(PROMPT, params)
    answer = client.completions.create(prompt=PROMPT, echo=True, logprobs=2, **{**SEEDED, "max_tokens": 4})
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    tokens = [*expected.prompt_token_ids, *expected.outputs[0].token_ids]
    entries = [*(expected.prompt_logprobs or ()), *(expected.outputs[0].logprobs or ())]
    wanted = [None if entry is None else entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
    assert found.token_logprobs == wanted
    assert "".join(found.tokens or ()) == answer.choices[0].text == PROMPT + expected.outputs[0].text
    assert found.text_offset == [len("".join((found.tokens or ())[:index])) for index in range(len(tokens))]
    assert [one and len(one) for one in found.top_logprobs] == [None] + [2] * (len(tokens) - 1)


def test_a_prompt_is_scored_without_a_token(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert len(choice.logprobs.token_logprobs or ()) == len(llm.tokenizer.encode(PROMPT))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_chat_is_that_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, PARAMS)
    answer = client.chat.completions.create(messages=MESSAGES, **SEEDED)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.outputs[0].text
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **SEEDED))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


def test_a_chat_may_have_parts_and_roles_of_its_own(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=[{"role": "system", "content": "be brief"}, *MESSAGES], **SEEDED)
    parts: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
    ]
    assert client.chat.completions.create(messages=parts, **SEEDED).choices[0].message == plain.choices[0].message


def test_log_probabilities_of_a_chat(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0.8, seed=7, max_tokens=6, logprobs=3))
    asked: Any = {**SEEDED, "max_tokens": 6, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    found = client.chat.completions.create(**asked).choices[0].logprobs
    assert found is not None
    assert found.content is not None
    whole = expected.outputs[0]
    assert [one.logprob for one in found.content] == [
        entry[token].logprob for token, entry in zip(whole.token_ids, whole.logprobs or (), strict=True)
    ]
    assert [len(one.top_logprobs) for one in found.content] == [3] * 6
    assert all(bytes(one.bytes or ()).decode() == one.token for one in found.content)
    streamed = client.chat.completions.create(stream=True, **asked)
    parts = [one for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content or ()]
    assert parts == found.content


class Point(BaseModel):
    x: int
    y: bool


def test_a_parsed_answer_has_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Point, temperature=0, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Point)


def test_own_parameters_go_into_the_extra_body(client: openai.OpenAI, llm: LLM) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "top_k": 3, "cache_salt": "mine"}
    answer = client.completions.create(prompt=PROMPT, extra_body=extra, **SEEDED)
    assert answer.choices[0].text in ("yes", "no")
    allowed = llm.tokenizer.encode_word("x")
    biased = client.completions.create(prompt=PROMPT, logit_bias={str(allowed[0]): 100}, **{**SEEDED, "max_tokens": 3})
    assert biased.choices[0].text == "x" * 3


def test_an_adapter_is_a_model(server: RunningServer, client: openai.OpenAI, llm: LLM) -> None:
    folder = llm.engine.runner.model.facts.path / "adapters" / "typed"
    from slotline.core import LoRARequest

    (expected,) = llm.generate(PROMPT, PARAMS, lora_request=LoRARequest("typed", 1, folder))
    server.state.llm._thread.call(lambda: server.state.llm.submitter.know(LoRARequest("typed", 1, folder))).result(30)
    server.state.adapters["typed"] = 1
    try:
        answer = client.completions.create(prompt=PROMPT, **{**SEEDED, "model": "typed"})
        names = [model.id for model in client.models.list()]
    finally:
        del server.state.adapters["typed"]
    assert (answer.model, answer.choices[0].text) == ("typed", expected.outputs[0].text)
    assert names == [MODEL, "typed"]
    assert client.models.retrieve(MODEL).id == MODEL


def test_many_asynchronous_calls_at_once(server: RunningServer, llm: LLM) -> None:
    expected = [
        output.outputs[0].text
        for output in llm.generate(
            [f"def f{i}(" for i in range(24)], [SamplingParams(seed=i, max_tokens=12) for i in range(24)]
        )
    ]

    async def call(client: openai.AsyncOpenAI, i: int) -> str:
        asked: Any = {"model": MODEL, "prompt": f"def f{i}(", "temperature": 1, "seed": i, "max_tokens": 12}
        if i % 2:
            return (await client.completions.create(**asked)).choices[0].text
        stream = await client.completions.create(stream=True, **asked)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_calls() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            return await asyncio.gather(*(call(client, i) for i in range(24)))

    assert asyncio.run(all_calls()) == expected


def test_a_stream_that_is_closed_early_is_aborted(client: openai.OpenAI) -> None:
    stream = client.completions.create(prompt=PROMPT, stream=True, **{**SEEDED, "max_tokens": 1500})
    next(iter(stream))
    stream.close()


@pytest.mark.parametrize(
    ("error", "asked", "param"),
    [
        (openai.NotFoundError, {"model": "gpt-4"}, "model"),
        (openai.BadRequestError, {"temperature": -1}, "temperature"),
        (openai.BadRequestError, {"prompt": "x" * 30000}, None),
        (openai.BadRequestError, {"suffix": "end"}, "suffix"),
        (openai.BadRequestError, {"extra_body": {"promt": 1}}, "promt"),
        (openai.BadRequestError, {"extra_body": {"structured_outputs": {"regex": "("}}}, None),
        (openai.BadRequestError, {"n": 2, "best_of": 3, "stream": True}, "best_of"),
    ],
)
def test_a_wrong_request_raises_the_clients_error(
    error: type[openai.APIStatusError], asked: dict[str, Any], param: str | None, client: openai.OpenAI
) -> None:
    with pytest.raises(error) as raised:
        client.completions.create(**{"prompt": PROMPT, **SEEDED, **asked})
    assert raised.value.type == "invalid_request_error"
    assert raised.value.param == param
    assert "Traceback" not in raised.value.message
    assert client.completions.create(prompt=PROMPT, **SEEDED).choices[0].text


def test_tools_are_refused_where_no_parser_reads_calls(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(messages=MESSAGES, tools=tools, **SEEDED)
    assert raised.value.param == "tools"
