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
from repository import ROOT
from safetensors.torch import load_file

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
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


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash", "medusa"])
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
    more: dict[str, Any] = {
        "drafter.name": kind,
        "drafter.path": str(out),
        "drafter.tokens": 4,
        "drafter.adaptive": False,
    }
    llm = LLM(None, dtype="float32", device="cpu", memory="8MiB", max_model_len=256, **more)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == plain
    assert llm.engine.extension("drafts") is not None
    assert llm.engine.extension("drafts").drafting.counts.failures == 0


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
    shape = ["--draft-vocab-size", "300", "--layers", "3", "--optimizer", "muon", "--skipped", "0.3", "--likely", "0.5"]
    heads.main(["medusa", *more, *small, *shape])
    first = load_file(tmp_path / "medusa" / "model.safetensors")
    heads.main(["medusa", *more, *small, *shape, "--begin", str(tmp_path / "medusa"), "--lr", "0"])
    again = load_file(tmp_path / "medusa" / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    with pytest.raises(ConfigError, match=r"4 heads of 3 blocks, which know 300 tokens"):
        heads.main(["medusa", *more, *small, "--layers", "2", "--begin", str(tmp_path / "medusa")])
    measured = heads.main(["medusa", *more, *small, *shape, "--measure", "--begin", str(tmp_path / "medusa")])
    assert set(measured) <= {"library", "test"}
    assert len(measured) > 0
    assert all(1 <= found["accepted_length"] <= 5 and found["held_out_prompts"] == 2 for found in measured.values())
    assert all(torch.equal(load_file(tmp_path / "medusa" / "model.safetensors")[name], first[name]) for name in first)
    with pytest.raises(SystemExit):
        heads.main(["medusa", *more, *small, *shape, "--measure"])
    with pytest.raises(SystemExit):
        heads.main(["eagle", *more, *small, "--begin", str(tmp_path / "medusa")])
    settings: dict[str, Any] = {
        "drafter.name": "medusa",
        "drafter.path": str(tmp_path / "medusa"),
        "drafter.adaptive": False,
    }
    llm = LLM(None, dtype="float32", device="cpu", memory="8MiB", max_model_len=256, **settings)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == plain
    assert llm.engine.extension("drafts") is not None
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
    assert llm.engine.extension("drafts").drafting.counts.proposed > 0


def test_texts_come_from_processes_until_they_are_ended_and_prompts_may_have_other_names(
    heads: Any, corpus: Path, tmp_path: Path
) -> None:
    """Greedy texts are the model's own; a token is exchanged at all its places, and only for another name.

    A second training reads what the writers of the first have written.
    """
    model = str(ROOT / "core" / "slotline" / "core" / "small_model")
    given = ["medusa", "--device", "cpu", "--model", model, "--prompts", "4", "--context", "64", "--sampled", "0"]
    tokenizer = heads.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    text_module = importlib.import_module("text")
    tokens = heads.encode_documents([file.read_text() for file in corpus.iterdir()], tokenizer)
    options = heads.parse_options([*given, "--writers", "1", "--texts", str(tmp_path / "texts"), "--renamed", "0.5"])
    prompts = text_module.Prompts([tokens, tokens + 0], [0.3, 0.7], tokenizer, options.renamed)
    text = heads.Text(prompts, options)
    try:
        text.begin()
        windows = text.sample(8, torch.Generator())
    finally:
        text.close()
    assert (windows.shape, windows.dtype) == ((8, 64), torch.int64)
    second = heads.Text(prompts, heads.parse_options([*given, "--texts", str(tmp_path / "texts")]))
    second.begin()
    assert second.written >= text.written >= 4
    assert torch.equal(second.windows[:4], text.windows[:4])
    second.read = 0
    assert torch.equal(second.sample(4, torch.Generator()), second.windows[:4].long())  # each once, in order
    assert second.read == 4
    (first,) = LLM(None, dtype="float32", device="cpu", memory="8MiB", max_model_len=64).generate(
        [text.windows[0, :39].tolist()], SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    )
    assert first.outputs[0].token_ids == text.windows[0, 39:].tolist()  # prompts have 39 tokens at most

    renaming = text_module.Renaming(tokenizer)
    prompts = torch.tensor([tokenizer.encode("value = first(value, second) + value * first\n" * 4)])
    other = renaming(prompts, torch.Generator().manual_seed(0))
    changed = prompts != other
    assert 0 < changed.sum() < changed.numel()
    pairs = {(a, b) for a, b in zip(prompts[0].tolist(), other[0].tolist(), strict=True)}
    assert len(pairs) == len({a for a, _ in pairs})
    words = [tokenizer.decode([b]).strip() for a, b in pairs if a != b]
    assert all(word.isalpha() for word in words), words


def test_more_text_has_no_copies_of_held_out_files(heads: Any, tmp_path: Path) -> None:
    lines = [f"value_{i} = compute_something_long_{i}(value, other)\n" for i in range(20)]
    for name, text in {"copy.py": lines[:10], "own.py": lines[10:]}.items():
        (tmp_path / name).write_text("".join(text))
    assert heads.more_texts([tmp_path], ["".join(lines[:10])]) == ["".join(lines[10:])]
    assert heads.more_texts([], ["x"]) == []


def test_positions_with_a_verifying_step_are_those_that_a_chain_reaches(heads: Any) -> None:
    runs = torch.randint(0, 5, (6, 61), generator=torch.Generator().manual_seed(0))
    found = importlib.import_module("medusa_trainer").verified(runs)
    for row, reached in zip(runs.tolist(), found.tolist(), strict=True):
        at, wanted = 0, [0] * len(row)
        while at < len(row):
            wanted[at], at = 1, at + 1 + row[at]
        assert reached == wanted


def test_muon_s_steps_have_equal_singular_values() -> None:
    muon = importlib.import_module("muon")
    weight = torch.nn.Parameter(torch.zeros(3, 2, 16, 16))
    weight.grad = torch.randn(3, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    muon.Muon([weight], lr=torch.tensor(1.0)).step()
    values = torch.linalg.svdvals(weight.detach()) / (0.2 * 16**0.5)
    assert 0.4 < values.min() < values.max() < 1.3
