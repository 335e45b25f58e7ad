"""`/pooling`, and scores of pairs over HTTP: of embeddings, and of a model that reads both texts."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pooling_folders import bert
from running_server import RunningServer, running_server

from slotline.core import LLM


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    path = bert(tmp_path_factory.mktemp("cross") / "bert", "BertForSequenceClassification", num_labels=1)
    with running_server(model=str(path), device="cpu") as running:
        yield running, path


@pytest.mark.behaviour(35)
def test_pooling_gives_a_vector_for_each_token_or_for_the_text(embedding_server: RunningServer) -> None:
    texts = ["def main(", "x = 1"]
    answer = post(embedding_server, "/pooling", input=texts).json()
    assert (answer["object"], [one["object"] for one in answer["data"]]) == ("list", ["pooling"] * 2)
    whole = post(embedding_server, "/pooling", input=texts, task="embed").json()["data"]
    for tokens, one in zip(answer["data"], whole, strict=True):
        assert tokens["data"][-1] == pytest.approx(one["data"], abs=1e-2)
    for route in ("/pooling", "/v1/embeddings"):
        assert post(embedding_server, route, input=texts[0], truncate_prompt_tokens=2).json()["usage"] == {
            "prompt_tokens": 2,
            "total_tokens": 2,
        }
    short = post(embedding_server, "/pooling", input=texts[0], encoding_format="base64").json()["data"][0]["data"]
    packed = np.frombuffer(base64.b64decode(short), np.float32)
    assert packed.tolist() == pytest.approx(np.array(answer["data"][0]["data"]).ravel().tolist(), abs=1e-2)
    for body, says in (
        ({"task": "score"}, "'score' cannot run"),
        ({"task": "embed", "dimensions": 3}, "dimensions=3 is not served"),
        ({"prompt_name": "query"}, "'query' is not known"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 is not allowed"),
    ):
        refused = post(embedding_server, "/pooling", input="x", **body)
        assert (refused.status_code, says in refused.json()["error"]["message"]) == (400, True)
    embedding_server.everything_returned()


@pytest.mark.behaviour(35)
def test_pairs_come_under_either_path(embedding_server: RunningServer) -> None:
    given = post(embedding_server, "/v1/score", text_1="def main(", text_2=["def main(", "x = 1"]).json()["data"]
    named = post(embedding_server, "/score", text_1="def main(", text_2=["def main(", "x = 1"]).json()["data"]
    assert [one["score"] for one in named] == pytest.approx([one["score"] for one in given], abs=1e-3)
    for body, says in (
        ({"text_1": "a"}, "text_2"),
        ({"text_1": "a", "text_2": "b", "instruction": "c"}, "only a cross-encoder"),
    ):
        refused = post(embedding_server, "/score", **body)
        assert (refused.status_code, says in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.behaviour(35, 49)
def test_a_cross_encoder_scores_and_ranks(cross_encoder: tuple[RunningServer, Path]) -> None:
    server, path = cross_encoder
    documents = ["a dog", "the cat sat", "mat"]
    expected = [one.outputs.score for one in LLM(path, device="cpu").score("the cat", documents)]
    found = post(server, "/v1/score", text_1="the cat", text_2=documents).json()
    assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-5)
    assert found["usage"]["prompt_tokens"] == 7 + 8 + 6
    order = sorted(range(3), key=lambda index: -expected[index])
    for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = post(server, route, query="the cat", documents=[{"text": one} for one in documents], top_n=2).json()
        assert [one["index"] for one in ranked["results"]] == order[:2]
        assert ranked["results"][0]["document"]["text"] == documents[order[0]]
    refused = post(server, "/v1/score", text_1="the cat", text_2=["a dog", "a " * 100])
    assert refused.status_code == 400
    assert "at most 64 fit" in refused.json()["error"]["message"]
    cut = post(server, "/v1/score", text_1="the cat", text_2=["a dog", "a " * 100], truncate_prompt_tokens=9).json()
    assert cut["usage"]["prompt_tokens"] == 7 + 9
    refused = post(server, "/v1/embeddings", input="x")
    assert refused.status_code == 400
    server.everything_returned()
