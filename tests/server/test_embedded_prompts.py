"""Prompts of embeddings over HTTP: safetensors in base64."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from running_server import RunningServer
from safetensors.torch import save

from slotline.core import LLM

TEXT = "def total(values):\n    return"
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1}


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:
        yield client
    server.everything_returned()


def encoded(**tensors: torch.Tensor) -> str:
    return base64.b64encode(save(tensors)).decode()


@pytest.fixture(scope="module")
def embeds(llm: LLM) -> torch.Tensor:
    ids = llm.submitter.tokenizer.encode(TEXT)
    return llm.engine.runner.model.embed(torch.tensor(ids)).detach().clone()


def test_they_give_the_text_of_their_tokens(client: httpx.Client, embeds: torch.Tensor) -> None:
    body = {"prompt": "", "prompt_embeds": encoded(p=embeds), **GREEDY}
    whole = client.post("/completions", json={"prompt": TEXT, **GREEDY}).json()
    alone = client.post("/completions", json=body).json()
    assert alone["choices"][0]["logprobs"]["tokens"] == whole["choices"][0]["logprobs"]["tokens"]
    assert alone["usage"]["prompt_tokens"] == len(embeds)
    several = client.post("/completions", json={**body, "prompt_embeds": [body["prompt_embeds"]] * 2, "prompt": "x"})
    texts = [choice["text"] for choice in several.json()["choices"]]
    assert texts[:2] == [alone["choices"][0]["text"]] * 2  # those come first
    assert len(texts) == 3
    with client.stream("POST", "/completions", json={**body, "stream": True}) as stream:
        events = [line for line in stream.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("!", "prompt_embeds cannot be read"),
        ("AAAA", "prompt_embeds cannot be read"),
        (encoded(), "has 0 tensors"),
        (encoded(a=torch.zeros(1, 2), b=torch.zeros(1, 2)), "has 2 tensors"),
        (encoded(p=torch.zeros(2, 3)), "rows of 3 numbers"),
        (encoded(p=torch.zeros(2, 3, dtype=torch.int8)), "dtype torch.int8"),
        (encoded(p=torch.zeros(1, 2, 3)), r"has the shape [1, 2, 3]"),
        (encoded(p=torch.full((2, 128), torch.nan)), "NaN or infinity in row 0"),
        ([], "prompt is null"),
    ],
)
def test_a_wrong_one_is_refused_and_the_next_is_served(
    given: Any, says: str, client: httpx.Client, embeds: torch.Tensor
) -> None:
    answer = client.post("/completions", json={"prompt": None, "prompt_embeds": given, **GREEDY})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    good = {"prompt": None, "prompt_embeds": encoded(p=embeds), "max_tokens": 1}
    assert client.post("/completions", json=good).status_code == 200


@pytest.mark.parametrize("more", [{"echo": True}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.2}])
def test_what_needs_their_tokens_is_refused_by_name(
    more: dict[str, Any], client: httpx.Client, embeds: torch.Tensor
) -> None:
    answer = client.post("/completions", json={"prompt": None, "prompt_embeds": encoded(p=embeds), **more})
    assert answer.status_code == 400
    assert next(iter(more)) in answer.json()["error"]["message"]


def test_a_server_that_takes_none_says_how_to(embedding_server: RunningServer, embeds: torch.Tensor) -> None:
    answer = httpx.post(
        f"{embedding_server.url}/v1/completions", json={"prompt": "", "prompt_embeds": encoded(p=embeds)}
    )
    assert answer.status_code == 400
    assert "set prompt_embeds = true" in answer.json()["error"]["message"]
