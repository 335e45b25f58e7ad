"""`slotline bench` and its workloads: the same work for every engine, and figures beside the machine's limits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import transformers
from cli_cases import tiny_checkpoint

from slotline.cli import main
from slotline.cli.bench_limits import Machine, ModelCost, cost_of
from slotline.cli.bench_run import Served, Wave
from slotline.cli.workloads import WORKLOADS, workload
from slotline.planner.plan import make_plan
from slotline.registry.config import load_config
from slotline.registry.contracts import AttentionLayer
from slotline.registry.errors import ConfigError

PUBLISHED = {"nano": "199c6f016a1bff73", "latency": "3600211ebb1301fa", "prefill": "828dfc060ab9a875"}
"""SHA-256 of [prompts, max_tokens] as JSON, of the workloads whose figures for other engines are known."""
FAST = [f"--set={key}" for key in ("cache.memory=16MiB", "attention.backend=torch", "scheduler.max_batched_tokens=128")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("bench") / "llama")
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_workloads_are_token_for_token_the_known_ones(name: str) -> None:
    work = workload(name)
    text = json.dumps([work.waves[0], work.max_tokens[0]])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == PUBLISHED[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_scale_shrinks_requests_and_lengths_and_keeps_the_shape(name: str) -> None:
    whole, small = workload(name), workload(name, 0.1)
    assert len(small.waves) == len(whole.waves)
    assert sum(map(len, small.waves[-1])) < sum(map(len, whole.waves[-1]))
    assert all(prompt for wave in small.waves for prompt in wave)
    assert workload(name, 0.1) == small


def test_the_waves_of_prefix_share_512_tokens_and_no_more() -> None:
    first, second = workload("prefix").waves
    assert len({tuple(prompt[:512]) for prompt in (*first, *second)}) == 1
    assert len({tuple(prompt[512:]) for prompt in (*first, *second)}) == 32


def test_an_unknown_workload_and_a_senseless_scale_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no workload 'nono'"):
        workload("nono")
    with pytest.raises(ConfigError, match="a scale of 0"):
        workload("nano", 0)


def test_limits_count_weights_once_a_step_and_cache_and_operations_of_each_request() -> None:
    layer = AttentionLayer(
        name="l", index=0, num_heads=2, num_kv_heads=1, head_size=4, head_size_v=4, scale=1.0, window=None
    )
    cost = ModelCost(body=900, head=100, itemsize=4, kv_itemsize=2, layers=(layer,), max_requests=8)
    slow_memory = Machine(read_bytes_per_s=1.0, copy_bytes_per_s=0.5, flops_per_s=1e12, dtype="float32")
    slow_matrix = Machine(read_bytes_per_s=1e12, copy_bytes_per_s=1.0, flops_per_s=1.0, dtype="float32")
    two = [Served(prompt=3, cached=0, output=3, first=0.0)] * 2
    # Two steps read 4000 bytes of weights each; queries at positions 3 and 4 see 4 + 5 keys of 8 elements of 2 bytes.
    assert cost.decode_seconds(two, slow_memory) == 2 * 4000 + 2 * 9 * 8 * 2
    # Four tokens of 1000 parameters; 9 pairs a request, 2 heads, 8 multiply-adds in all.
    assert cost.decode_seconds(two, slow_matrix) == 2 * 1000 * 4 + 2 * 9 * 2 * 2 * 8
    # Six prompt tokens through the body, two rows through the head, 1 + 2 + 3 pairs a request.
    assert cost.prompt_seconds(two, slow_matrix) == 2 * 900 * 6 + 2 * 100 * 2 + 2 * 6 * 2 * 2 * 8
    cached = [Served(prompt=3, cached=2, output=1, first=0.0)]
    assert cost.prompt_seconds(cached, slow_matrix) == 2 * 900 + 2 * 100 + 3 * 2 * 2 * 8


def test_limits_count_the_scales_of_codes() -> None:
    layer = AttentionLayer(
        name="l", index=0, num_heads=2, num_kv_heads=3, head_size=8, head_size_v=4, scale=1.0, window=None
    )
    cost = ModelCost(body=1, head=1, itemsize=4, kv_itemsize=1, kv_scale_bytes=4, layers=(layer,), max_requests=8)
    machine = Machine(read_bytes_per_s=1.0, copy_bytes_per_s=0.5, flops_per_s=1e12, dtype="float32")
    one = [Served(prompt=3, cached=0, output=2, first=0.0)]
    # A step of 8 bytes of weights; 4 keys of 3 heads, each 8 + 4 codes and two scales of 4 bytes.
    assert cost.decode_seconds(one, machine) == 8 + 4 * 3 * (12 + 8)


def test_a_plan_of_codes_has_scales_in_its_cost(checkpoint: Path) -> None:
    given = {"model": str(checkpoint), "device": "cpu", "dtype": "float32"}
    plans = [make_plan(load_config(values={**given, "cache.dtype": name})).plan for name in ("auto", "int8", "int4")]
    costs = [cost_of(plan, checkpoint, 8) for plan in plans]
    assert [(cost.kv_itemsize, cost.kv_scale_bytes) for cost in costs if cost] == [(4, 0), (1, 4), (0.5, 4)]


def test_more_requests_than_rows_need_more_steps() -> None:
    cost = ModelCost(body=1, head=1, itemsize=4, kv_itemsize=4, layers=(), max_requests=2)
    assert cost.decode_steps([Served(prompt=1, cached=0, output=5, first=0.0)] * 4) == 8


def test_pure_decoding_starts_after_the_last_first_token() -> None:
    served = tuple(Served(prompt=1, cached=0, output=2, first=first) for first in (1.0, 2.0))
    steps = ((1.0, 1.0, 1), (2.0, 1.0, 2), (3.0, 1.0, 1))
    wave = Wave(seconds=3.0, served=served, steps=steps, prompt_steps=2)
    assert wave.prompt_seconds == 2.0
    assert wave.later_steps == ((3.0, 1.0, 1),)


def test_bench_prints_each_figure_with_its_limit_and_share(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(checkpoint), *FAST]
    assert main(["bench", "decode16", *options, "--scale", "0.25", "--runs", "2"]) == 0
    shown = capsys.readouterr().out
    assert "4 requests, 32 tokens in, 64 out" in shown
    assert "GB/s read" in shown
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    for label in ("output tokens/s", "prompt tokens/s", "time to first token, median", "decoding step, median"):
        assert lines[label].endswith("%")


def test_a_folder_without_weights_gets_random_ones_and_prefix_finds_its_second_wave_cached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=256, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    options = [*FAST]
    assert main(["bench", "prefix", "--model", str(tmp_path), *options, "--scale", "0.2", "--runs", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 3
    assert len(report["runs_s"]) == 1
    assert report["machine"]["flops_per_s"] > 0
    figures = report["figures"]
    assert "step_median" not in figures  # one token a request: no step is pure decoding
    assert {"seconds", "output_tokens_per_s", "ttft_median", "first_wave_ttft_median"} <= figures.keys()
    assert figures["ttft_median"]["limit"] <= figures["first_wave_ttft_median"]["limit"]
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_model_that_is_too_short_is_refused_with_a_scale_that_fits(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(checkpoint), *FAST]
    assert main(["bench", "latency", *options]) == 2
    shown = capsys.readouterr().err
    assert "sequences of 640 tokens, and max_model_len is 512" in shown
    assert "--scale 0.76" in shown


def test_the_bench_of_a_drafter_shows_how_its_drafts_fared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Machine(read_bytes_per_s=1e10, copy_bytes_per_s=1e10, flops_per_s=1e11, dtype="bfloat16")
    monkeypatch.setattr("slotline.cli.bench_limits.measure_machine", lambda *_: rates)  # seconds, four times
    command = ["bench", "decode1", "--scale", "0.5", "--runs", "1", "--set", "drafter.name=ngram"]
    assert main([*command, "--json"]) == 0
    drafts = json.loads(capsys.readouterr().out)["drafts"]
    assert drafts["accepted"] <= drafts["proposed"] <= 4 * drafts["steps"]
    assert drafts["acceptance_length"] == pytest.approx(1 + drafts["accepted"] / max(drafts["steps"], 1))
    assert len(drafts["acceptance_by_position"]) == 4
    assert main(command) == 0
    assert "drafts: " in capsys.readouterr().out
