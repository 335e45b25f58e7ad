"""Products on a CPU: our kernel of few rows, the choice by timing, and that it is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families import linear_records
from slotline.plugins.model_families.linear_records import FOLDER, Record, slotline_report_header
from slotline.plugins.model_families.passes import cpu_products, panel_kernels
from slotline.plugins.model_families.passes.cpu_products import ONEDNN, Way, judge, way_for
from slotline.plugins.model_families.passes.packed_linear import PackedLinear
from slotline.registry.config import load_config

FACTS = {"processor": "a processor", "torch": "2.0", "dtype": "float32", "threads": 1, "shape": [1024, 512]}
PLAIN = Way("plain", ("numba", "numba", "numba", "torch"))
PANELS = Way("onednn", ("panels", "panels", "panels", "onednn"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    cpu_products._record.cache_clear()
    yield tmp_path / FOLDER
    cpu_products._record.cache_clear()


@pytest.mark.parametrize("way", [PLAIN, PANELS], ids=["plain", "panels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 7, 16, 17])
def test_a_layer_with_our_kernel_gives_what_torch_gives(rows: int, dtype: torch.dtype, way: Way) -> None:
    if way is PANELS and not panel_kernels.has_panels(dtype):
        pytest.skip("oneDNN's layout is another one on this processor")
    torch.manual_seed(rows)
    linear = nn.Linear(48, 133).to(dtype)  # outputs are no multiple of the kernels' four and 64
    plain = PackedLinear(linear.weight, linear.bias, way)
    x, other = torch.randn(rows, 48).to(dtype), torch.randn(rows, 133).to(dtype)
    exact = functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    with torch.no_grad():
        found = {
            "product": (plain(x), exact),
            "plus": (plain.plus(x, other), exact + other.double()),
            "times": (plain.times(x, other), exact * other.double()),
            "swish": (plain.activated(x, "swish", ""), functional.silu(exact)),
            "gelu": (plain.activated(x, "gelu", "tanh"), functional.gelu(exact, approximate="tanh")),
            "relu": (plain.activated(x, "relu", ""), exact.relu()),
        }
    assert torch.equal(plain.weight, linear.weight)
    for name, (got, wanted) in found.items():
        assert got.dtype == dtype, name
        error = (got.double() - wanted).abs().max() / wanted.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 1.6e-2), name


@pytest.mark.parametrize("way", [PLAIN, PANELS], ids=["plain", "panels"])
def test_a_row_is_the_same_among_any_number_of_rows(way: Way) -> None:
    if way is PANELS and not panel_kernels.has_panels(torch.float32):
        pytest.skip("oneDNN's layout is another one on this processor")
    torch.manual_seed(0)
    x, layer = torch.randn(16, 64), PackedLinear(torch.randn(20, 64), None, way)
    whole = layer(x)
    for rows in (1, 2, 3, 5, 15):
        assert torch.equal(layer(x[:rows]), whole[:rows])


def test_a_weight_that_is_loaded_anew_is_what_our_kernel_reads() -> None:
    if not panel_kernels.has_panels(torch.float32):
        pytest.skip("oneDNN's layout is another one on this processor")
    torch.manual_seed(0)
    x, first, second = torch.randn(2, 48), torch.randn(70, 48), torch.randn(70, 48)
    layer = PackedLinear(first, None, PANELS)
    layer(x)
    layer.packed.copy_(layer.pack(second))
    torch.testing.assert_close(layer(x), x @ second.T)
    layer.packed = layer.pack(first)
    torch.testing.assert_close(layer(x), x @ first.T)


def test_a_layout_that_is_not_as_told_has_no_kernel_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_kernels, "WIDTH", 32)  # as on a processor with panels of other sizes
    assert not panel_kernels.has_panels.__wrapped__(torch.float32)
    monkeypatch.setattr(cpu_products.panel_kernels(), "has_panels", lambda dtype: False)
    found = cpu_products.times(64, 32, torch.float32)
    assert found["panels"] == [math.inf] * 4
    assert set(judge(FACTS, found).kernels) <= {"onednn", "torch", "numba"}


def test_the_layout_with_the_least_time_is_taken_and_a_kernel_for_each_number_of_rows() -> None:
    onednn, torch_times = [4e-6, 4e-6, 4e-6, 4e-6], [2e-6, 9e-6, 9e-6, 4e-6]
    numba = [3e-6, 2e-6, 5e-6, math.inf]
    record = judge(FACTS, {"onednn": onednn, "torch": torch_times, "numba": numba})
    assert (record.layout, list(record.kernels)) == ("plain", ["torch", "numba", "numba", "torch"])
    assert "numba 3 2 5 -" in record.describe()
    blocked = judge(FACTS, {"onednn": onednn, "panels": [1e-6, 1e-6, 5e-6, math.inf], "torch": torch_times})
    assert (blocked.layout, list(blocked.kernels)) == ("onednn", ["panels", "panels", "onednn", "onednn"])
    assert "onednn (panels, panels, onednn, onednn), 2.09" in blocked.describe()
    loses = judge(FACTS, {"onednn": onednn, "torch": [1e-6, 1e-6, 9e-6, 4e-6], "numba": [math.inf] * 4})
    assert (loses.layout, loses.reason) == ("onednn", "the plain layout has 0.44 times the speed in a class of rows")
    slow = judge(FACTS, {"onednn": [1e-6] * 4, "torch": torch_times, "numba": numba})
    assert slow.layout == "onednn"
    equal = judge(FACTS, {"onednn": onednn, "torch": [t * 0.99 for t in onednn], "numba": [math.inf] * 4})
    assert equal.layout == "onednn"
    assert "within the margin" in equal.reason


def test_what_was_timed_first_is_kept_and_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def times(out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, list[float]]:
        timed.append((out_features, in_features))
        fast, slow = [1e-6] * 4, [2e-6] * 4
        return {"onednn": fast, "torch": slow, "numba": slow} if len(timed) > 1 else {"onednn": slow, "torch": fast}

    monkeypatch.setattr(cpu_products, "times", times)
    way = way_for("timed", 1024, 512, torch.float32)
    assert way == Way("plain", ("torch",) * 4)
    cpu_products._record.cache_clear()  # as in the next process
    assert way_for("timed", 1024, 512, torch.float32) == way
    assert timed == [(1024, 512)]
    lines = slotline_report_header(load_config(values={"device": "cpu"}).config)
    assert lines is not None
    assert any(line.startswith("linear 512x1024 float32") and "onednn 2 2 2 2" in line for line in lines)
    (file,) = folder.glob("*.json")
    cpu_products._keep(file, judge(FACTS, times(1024, 512, torch.float32)))  # by a process that was slower
    kept = Record.read(file)
    assert kept is not None
    assert kept.layout == "plain"
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(linear_records, "version", lambda name: "another one")
    assert slotline_report_header(load_config(values={"device": "cpu"}).config) is None
    monkeypatch.undo()
    monkeypatch.setenv("SLOTLINE_CACHE", str(folder.parent))
    monkeypatch.setattr(linear_records, "processor", lambda: "another one")
    assert slotline_report_header(load_config(values={"device": "cpu"}).config) is None


def test_a_broken_record_is_no_record_and_small_weights_are_not_timed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "times", lambda *shape: pytest.fail("timed"))
    assert way_for("timed", 64, 64, torch.float32) == ONEDNN
    assert ONEDNN.kernel(1) == "onednn"
    assert way_for("onednn", 1024, 512, torch.float32) == ONEDNN
    assert way_for("plain", 1024, 512, torch.float32).layout == "plain"
    folder.mkdir()
    for number, content in enumerate(("", "{}", json.dumps(FACTS | {"layout": "wide"}))):
        (folder / f"{number}.json").write_text(content)
        assert Record.read(folder / f"{number}.json") is None


def test_candidates_are_timed_for_each_number_of_rows() -> None:
    found = cpu_products.times(64, 32, torch.float32)
    assert {len(seconds) for seconds in found.values()} == {4}
    assert all(0 < seconds < 10 for seconds in found["onednn"] + found["torch"] + found["numba"][:3])
    assert found["numba"][3] == found["panels"][3] == math.inf


@pytest.mark.slow
def test_a_model_in_its_own_layout_answers_alike_and_is_saved_and_read(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "memory": "4MiB", "max_num_seqs": 2, "max_num_batched_tokens": 64}

    def answers(folder: Path, products: str) -> tuple[LLM, list[Any]]:
        table = {"transformers_decoder": {"cpu_products": products}}
        llm = LLM(model=str(folder), dtype="float32", **settings, model_family=table)
        prompts = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 3]}]
        return llm, [out.outputs[0].token_ids for out in llm.generate(prompts, SamplingParams(temperature=0))]

    plain, found = answers(tiny("llama_tied"), "plain")
    model: Any = plain.engine.runner.model
    layers = [module for module in model.hf_model.modules() if isinstance(module, PackedLinear)]
    assert {layer.way.layout for layer in layers} == {"plain"}
    embedding = model.hf_model.get_input_embeddings().weight
    assert all(layer.packed.data_ptr() != embedding.data_ptr() for layer in layers)  # adapters are merged into layers
    assert found == answers(tiny("llama_tied"), "onednn")[1]
    plain.save_weights(tmp_path / "saved")
    assert answers(tmp_path / "saved", "plain")[1] == found
