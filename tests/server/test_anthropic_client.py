"""The official client of Anthropic against a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from running_server import RunningServer

from slotline.core import LLM, SamplingParams

MODEL = "slotline-small"
MESSAGES: list[Any] = [{"role": "user", "content": "def read_file(path"}]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "extra_body": {"seed": 7, "temperature": 0.8}}
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=24)


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client
    server.everything_returned()


def test_a_message_is_that_of_llm(client: anthropic.Anthropic, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, PARAMS)
    message = client.messages.create(messages=MESSAGES, **ASKED)
    assert [block.text for block in message.content if block.type == "text"] == [expected.outputs[0].text]
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "max_tokens")
    assert message.usage.output_tokens == 24
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == len(expected.prompt_token_ids)


def test_a_stream_adds_up_to_the_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=MESSAGES, **ASKED)
    with client.messages.stream(messages=MESSAGES, **ASKED) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 2
    assert "".join(texts) == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 24)


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=MESSAGES, stop_sequences=["\n"], **{**ASKED, "max_tokens": 60})
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\n")


def test_a_system_text_and_blocks_are_read(client: anthropic.Anthropic, llm: LLM) -> None:
    system = {"role": "system", "content": "be brief"}
    (expected,) = llm.chat([system, *MESSAGES], PARAMS)
    text = {"type": "text", "text": "def read_file(path", "cache_control": {"type": "ephemeral"}}
    blocks: list[Any] = [{"role": "user", "content": [text]}]
    for asked in ("be brief", [{"type": "text", "text": "be brief"}]):
        message = client.messages.create(system=asked, messages=blocks, **ASKED)  # type: ignore[arg-type]
        assert message.content[0].text == expected.outputs[0].text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (anthropic.NotFoundError, {"model": "claude"}),
        (anthropic.BadRequestError, {"max_tokens": 0}),
        (anthropic.BadRequestError, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (anthropic.BadRequestError, {"extra_body": {"unknown": 1}}),
    ],
)
def test_errors_have_the_clients_form(
    error: type[anthropic.APIStatusError], asked: dict[str, Any], client: anthropic.Anthropic
) -> None:
    with pytest.raises(error) as raised:
        client.messages.create(**{"messages": MESSAGES, **ASKED, **asked})
    body: Any = raised.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert "Traceback" not in body["error"]["message"]
