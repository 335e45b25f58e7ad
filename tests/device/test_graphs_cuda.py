"""Captured graphs on a GPU: the same text as without them, whatever is captured and whatever breaks it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import random_prompts

from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ModelError, NegotiationError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25, 9])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
SIZES = (1, 2, 4, 8, 16, 24)


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


def engine(path: Path, **settings: Any) -> LLM:
    options = {"dtype": "float32", "max_model_len": 96, "max_num_batched_tokens": 24, "memory": "64MiB"}
    options |= {"graphs.sizes": SIZES, "observability.check_integrity": True, "observability.progress": False}
    return LLM(model=str(path), device="cuda", **{**options, **settings})


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("family", ["llama_deep", "qwen3", "gemma2", "gemma3", "mistral", "phi3"])
@pytest.mark.behaviour(21, 23, 27, 87, 149)
def test_every_graph_mode_and_backend_gives_the_same_text(family: str, tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path, 0)
    expected = tokens(LLM(model=str(path), device="cpu", dtype="float32", backend="torch", max_model_len=96))
    for backend, modes in (("torch", MODES), ("triton", (*MODES, "full"))):
        for mode in modes:
            llm = engine(path, backend=backend, **{"graphs.mode": mode})
            assert tokens(llm) == expected, (backend, mode)
            assert tokens(llm) == expected, (backend, mode, "again, over cached prefixes")


def test_a_model_that_cannot_be_captured_runs_without_graphs_and_says_why(tmp_path: Path) -> None:
    path = tiny_models.build("gpt_oss", tmp_path, 0)
    expected = tokens(LLM(model=str(path), device="cpu", dtype="float32", backend="torch", max_model_len=96))
    for backend in ("torch", "triton"):
        llm = engine(path, backend=backend)
        assert llm.plan.graphs.resolved == "none"
        assert "synchronise with the host in float32" in llm.plan.explain()
        assert tokens(llm) == expected
    with pytest.raises(NegotiationError, match="cannot be captured: experts synchronise"):
        engine(path, **{"graphs.mode": "piecewise"})


def test_a_group_that_cannot_be_captured_breaks_the_graph_at_its_own_layers(tmp_path: Path) -> None:
    path = tiny_models.build("gemma3", tmp_path, 0)
    expected = tokens(engine(path, **{"graphs.mode": "none"}))
    llm = engine(path, **{"attention.backend": {"full": "triton", "sliding": "torch"}})
    sliding = sum(layer.kv_kind == "sliding" for layer in llm.plan.cache_groups[0].layers)
    decode = [c for shape, c in llm.engine.graphs.captured.items() if shape.query_len == 1]
    assert {len(c.parts) for c in decode} == {2 * sliding + 1}
    assert tokens(llm) == expected
    whole = engine(path, backend="triton")
    assert {len(c.parts) for s, c in whole.engine.graphs.captured.items() if s.query_len == 1} == {1}


@pytest.mark.behaviour(149)
def test_full_graphs_hold_the_attention_of_mixed_batches(tmp_path: Path) -> None:
    llm = engine(tiny_models.build("llama_deep", tmp_path, 0), backend="triton", **{"graphs.mode": "full"})
    captured = llm.engine.graphs.captured
    assert {len(c.parts) for shape, c in captured.items() if shape.query_len == 0} == {1}
    assert llm.plan.graphs.resolved == "full"
    path = tiny_models.build("gemma3", tmp_path / "two", 0)
    expected = tokens(engine(path, **{"graphs.mode": "none"}))
    backends = {"full": "triton", "sliding": "torch"}
    assert tokens(engine(path, **{"attention.backend": backends, "graphs.mode": "full"})) == expected


@pytest.mark.behaviour(143, 144)
def test_capturing_reports_what_it_took_and_leaves_garbage_collection_on(tmp_path: Path) -> None:
    frozen = gc.get_freeze_count()
    llm = engine(tiny_models.build("llama_deep", tmp_path, 0), backend="triton", **{"graphs.mode": "full"})
    report = llm.engine.graphs.report
    assert report.shapes == report.graphs == len(llm.engine.graphs.shapes.largest_first)
    assert report.seconds > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


@pytest.mark.behaviour(145)
def test_a_stray_capture_is_an_error(tmp_path: Path) -> None:
    llm = engine(tiny_models.build("llama_deep", tmp_path, 0), backend="triton")
    with pytest.raises(ModelError, match="captured already"):
        llm.engine.graphs.capture()
    inputs = made_up_inputs(llm.engine.gatherer, [1])
    torch.cuda.synchronize()
    with pytest.raises(ModelError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        llm.engine.runner.run(inputs)
    assert tokens(llm) == tokens(llm)


def test_steps_are_replayed_and_padded(tmp_path: Path) -> None:
    llm = engine(tiny_models.build("llama_deep", tmp_path, 0), backend="triton")
    seen = []
    original = llm.engine.graphs.replay
    llm.engine.graphs.replay = lambda inputs: (seen.append((inputs.num_tokens, inputs.shape)), original(inputs))[1]
    tokens(llm)
    decodes = [(n, shape.num_tokens) for n, shape in seen if shape.query_len == 1]
    assert (7, 8) in decodes
    assert any(shape.query_len == 0 for _, shape in seen)
    assert llm.engine.graphs.memory > 0


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_drafts_are_verified_inside_graphs(backend: str, tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path, 0)
    repeated = [[5, 6, 7, 8] * 6, [9, 10] * 5]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={5: 50.0})
    plain = engine(path, backend=backend)
    llm = engine(path, backend=backend, **{"drafter.name": "ngram", "drafter.tokens": 3, "drafter.adaptive": False})
    assert any(shape.query_len == 4 for shape in llm.engine.graphs.shapes.largest_first)
    expected = [o.outputs[0].token_ids for o in plain.generate(repeated, params)]
    assert [o.outputs[0].token_ids for o in llm.generate(repeated, params)] == expected
    assert llm.engine.extension("drafts").drafting.counts.accepted > 0
    assert tokens(llm) == tokens(plain)


def test_sampled_text_and_logprobs_do_not_depend_on_graphs(tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path, 0)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True, logprobs=2)
    a, b = (engine(path, backend="triton", **{"graphs.mode": m}).generate(PROMPTS, params) for m in ("none", "auto"))
    for one, other in zip(a, b, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for x, y in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert [v.logprob for v in x.values()] == pytest.approx([v.logprob for v in y.values()], abs=1e-4)


COLD = """
import logging, sys
import torch
from slotline.core import LLM, SamplingParams
from slotline.kernels import triton_precompile as compiling

torch.set_float32_matmul_precision("highest")
found, compiled_in_turn = [], []
logging.getLogger("slotline").addHandler(handler := logging.Handler())
handler.emit = lambda record: found.append(record.getMessage())
logging.getLogger("slotline").setLevel(logging.INFO)
before, called = compiling.compile_all, []

def watched(*arguments):
    called.append(len(compiled_in_turn[0].kernels) if compiled_in_turn else 0)
    before(*arguments)
    compiled_in_turn.append(compiling.listen())

compiling.compile_all = watched
options = {"dtype": "float32", "max_model_len": 96, "max_num_batched_tokens": 24, "memory": "64MiB"}
llm = LLM(model=sys.argv[1], device="cuda", backend="triton", **options, **{"graphs.sizes": (1, 2, 4, 8, 16, 24)})
ahead = [line for line in found if "kernels ahead" in line]
later = compiled_in_turn[1].count
print(ahead, later)
assert len(ahead) == 2 and not any("not all compiled ahead" in line for line in found), found
first = {kernel.name for kernel in compiled_in_turn[0].kernels[:called[1]] if not kernel.on_disk}
assert not first & {"attend", "rms_norm", "add_rms_norm", "rotate", "group_stats", "draw_rows"}, first
assert later == 0, f"captures compiled {later} kernels by themselves"
params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
for lens in ((1, 2, 7, 20, 60), (60,), (33, 2)):
    llm.generate([list(range(1, 1 + n)) for n in lens], params)
late = {kernel.name for kernel in llm.engine.late_kernels if not kernel.on_disk}
assert not late, late
"""


def test_what_captures_launch_is_compiled_before_them_where_no_kernel_is_cached(tmp_path: Path) -> None:
    path = tiny_models.build("gemma3", tmp_path / "model", 0)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", COLD, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = tokens(engine(path, backend="triton", **{"graphs.mode": "none"}))
    assert tokens(engine(path, backend="triton")) == expected
