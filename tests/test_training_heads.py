"""Training draft heads: a few steps of each kind give a folder that serves."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slotline.core import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).parents[1]
PROMPTS = ["def main(", "import os\n\nclass Foo:\n"]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def heads() -> Iterator[Any]:
    """The script, as a module."""
    sys.path.insert(0, str(ROOT / "training"))
    yield importlib.import_module("heads")
    sys.path.remove(str(ROOT / "training"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources enough that some are held out."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(200):
        lines = (f"    value_{j} = compute_something_{i}_{j}(first_{j}, second_{i})" for j in range(8))
        (folder / f"module_{i}.py").write_text(f"def function_{i}(first, second):\n" + "\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The shipped model's own text."""
    llm = LLM(None, dtype="float32", device="cpu", memory="8MiB", max_model_len=256)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_a_few_steps_give_a_head_that_serves(
    heads: Any, corpus: Path, tmp_path: Path, plain: list[list[int]], kind: str
) -> None:
    small = ["--steps", "3", "--batch", "2", "--context", "96", "--tokens", "400", "--prompts", "2", "--held-out", "2"]
    model = ROOT / "core" / "slotline" / "core" / "small_model"
    out = tmp_path / kind
    found = heads.main(
        [kind, "--device", "cpu", "--model", str(model), "--text", str(corpus), "--out", str(out), *small]
    )
    assert found["steps"] == 3
    assert 1 <= found["accepted_length"] <= 5
    assert json.loads((out / "metrics.json").read_text()) == found
    more: dict[str, Any] = {"drafter.name": kind, "drafter.path": str(out), "drafter.tokens": 4}
    llm = LLM(None, dtype="float32", device="cpu", memory="8MiB", max_model_len=256, **more)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == plain
    assert llm.engine.drafting is not None
    assert llm.engine.drafting.counts.failures == 0


def test_acceptance_is_counted_as_a_chain_would_find_it(heads: Any) -> None:
    windows = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    drafts = torch.tensor([[[3, 4], [4, 9], [9, 6], [6, 7], [7, 8], [8, 0], [0, 0]]])
    # from entry 1 (the newest token is 3): 4 stands, 9 does not; then entry 3: 6 and 7 stand
    stood, steps, tokens = heads.accepted_lengths(drafts, windows, 1)
    assert (stood.tolist(), steps, tokens) == ([2, 1], 2, 5)


def test_medusa_heads_may_have_projections_of_their_own(
    heads: Any, corpus: Path, tmp_path: Path, plain: list[list[int]]
) -> None:
    small = ["--steps", "3", "--batch", "2", "--context", "96", "--tokens", "400", "--prompts", "2", "--held-out", "2"]
    model = ROOT / "core" / "slotline" / "core" / "small_model"
    more = ["--device", "cpu", "--model", str(model), "--text", str(corpus), "--out", str(tmp_path / "medusa")]
    heads.main(["medusa", *more, *small, "--draft-vocab-size", "300", "--layers", "3", "--optimizer", "muon"])
    settings: dict[str, Any] = {"drafter.name": "medusa", "drafter.path": str(tmp_path / "medusa")}
    llm = LLM(None, dtype="float32", device="cpu", memory="8MiB", max_model_len=256, **settings)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == plain
    assert llm.engine.drafting is not None
    assert llm.engine.drafting.counts.failures == 0
    assert llm.engine.drafting.counts.proposed > 0


def test_texts_come_from_processes_until_they_are_ended_and_prompts_may_have_other_names(
    heads: Any, corpus: Path
) -> None:
    """Greedy texts are the model's own; a token is exchanged at all its places, and only for another name."""
    model = str(ROOT / "core" / "slotline" / "core" / "small_model")
    given = ["--device", "cpu", "--model", model, "--prompts", "4", "--context", "64", "--writers", "1"]
    options = heads.parse_options(["medusa", *given, "--renamed", "0.5"])
    tokenizer = heads.AutoTokenizer.from_pretrained(model)
    text = heads.Text([file.read_text() for file in corpus.iterdir()], tokenizer, options)
    try:
        windows = text.sample(8, torch.Generator())
    finally:
        text.close()
    assert (windows.shape, windows.dtype) == ((8, 64), torch.int64)
    (first,) = LLM(None, dtype="float32", device="cpu", memory="8MiB", max_model_len=64).generate(
        [text.windows[0, :39].tolist()], SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    )
    assert first.outputs[0].token_ids == text.windows[0, 39:].tolist()  # prompts have 39 tokens at most

    renaming = importlib.import_module("text").Renaming(tokenizer)
    prompts = torch.tensor([tokenizer.encode("value = first(value, second) + value * first\n" * 4)])
    other = renaming(prompts, torch.Generator().manual_seed(0))
    changed = prompts != other
    assert 0 < changed.sum() < changed.numel()
    pairs = {(a, b) for a, b in zip(prompts[0].tolist(), other[0].tolist(), strict=True)}
    assert len(pairs) == len({a for a, _ in pairs})
    words = [tokenizer.decode([b]).strip() for a, b in pairs if a != b]
    assert all(word.isalpha() for word in words), words


def test_muon_s_steps_have_equal_singular_values() -> None:
    muon = importlib.import_module("muon")
    weight = torch.nn.Parameter(torch.zeros(3, 2, 16, 16))
    weight.grad = torch.randn(3, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    muon.Muon([weight], lr=1.0).step()
    values = torch.linalg.svdvals(weight.detach()) / (0.2 * 16**0.5)
    assert 0.4 < values.min() < values.max() < 1.3
