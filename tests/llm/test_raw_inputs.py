"""A model that reads items and no tokens, from somebody else's distribution: each goes to forward as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import pretend_project_installed
from repository import TESTS
from safetensors.torch import save_file
from tiny_engines import everything_returned

from slotline.core import LLM
from slotline.registry.errors import RequestError

pytestmark = pytest.mark.usefixtures("one_thread")
HIDDEN, WIDTH, LABELS = 8, 5, ("falling", "rising")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint that tells rising series from falling ones: filters of differences, by their sign."""
    folder = tmp_path_factory.mktemp("series")
    slope = torch.arange(WIDTH) - WIDTH // 2
    filters = torch.stack([slope if index % 2 else -slope for index in range(HIDDEN)])[:, None].float()
    head = torch.stack([torch.arange(HIDDEN) % 2 == label for label in (0, 1)], 1).float()
    save_file({"filters": filters, "head": head}, folder / "model.safetensors")
    config = {"architectures": ["AcmeSeriesClassifier"], "hidden_size": HIDDEN, "width": WIDTH}
    (folder / "config.json").write_text(json.dumps({**config, "id2label": dict(enumerate(LABELS))}))
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_project_installed(monkeypatch, folder / "site", TESTS / "third_party" / "acme-series")
        yield folder


def engine(path: Path, **settings: Any) -> LLM:
    return LLM(path, memory="4MiB", max_num_seqs=4, max_num_batched_tokens=16, **settings)


def alone(series: torch.Tensor, path: Path) -> torch.Tensor:
    """The probabilities by torch alone."""
    from safetensors.torch import load_file

    weights = load_file(path / "model.safetensors")
    seen = torch.nn.functional.conv1d(series[None, None], weights["filters"], padding="same").relu()
    return (seen.mean(-1) @ weights["head"]).softmax(-1)[0]


@pytest.mark.behaviour(6)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_series_of_many_lengths_are_classified_without_tokens_or_an_encoder_cache(
    asynchronous: bool, path: Path
) -> None:
    llm = engine(path, **{"scheduler.async": asynchronous, "observability.check_integrity": True})
    assert not hasattr(llm.engine.extension("multimodal"), "cache")
    generator = torch.Generator().manual_seed(0)
    series = [torch.rand(length, generator=generator).cumsum(0) * (-1) ** length for length in (7, 30, 1, 512, 12, 31)]
    prompts = [{"multi_modal_data": {"series": one}} for one in series]
    outputs = llm.classify(prompts)
    for one, output in zip(series, outputs, strict=True):
        assert torch.allclose(torch.tensor(output.outputs.probs), alone(one, path), atol=1e-6)
    winners = [LABELS[max((0, 1), key=output.outputs.probs.__getitem__)] for output in outputs]
    assert [winners[index] for index in (0, 1, 3)] == ["falling", "rising", "rising"]
    llm.reload_weights()
    assert llm.classify(prompts[0])[0].outputs.probs == pytest.approx(outputs[0].outputs.probs, abs=1e-6)
    everything_returned(llm)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"multi_modal_data": {"series": []}}, "1 series placeholder tokens .* 0 items"),
        ({"multi_modal_data": {"series": [[1.0], [2.0]]}}, "1 series placeholder tokens .* 2 items"),
        ({"multi_modal_data": {"series": "abc"}}, "is no list of numbers"),
        ({"multi_modal_data": {"series": torch.tensor([1.0, float("nan")])}}, "values that are not finite"),
        ({"multi_modal_data": {"image": [1.0]}}, "multi_modal_data has image; this model takes series"),
        ({"prompt_token_ids": [0]}, "0 items and 1 tokens"),
        ({"prompt_token_ids": [0, 0], "multi_modal_data": {"series": torch.ones(3)}}, "2 series placeholder"),
    ],
)
def test_what_is_not_one_series_is_refused_alone(prompt: dict[str, Any], message: str, path: Path) -> None:
    llm = engine(path)
    with pytest.raises(RequestError, match=message) as caught:
        llm.classify(prompt)
    assert caught.value.fix
    assert not llm.engine.has_work
    assert llm.classify({"multi_modal_data": {"series": torch.ones(3)}})[0].outputs.probs
