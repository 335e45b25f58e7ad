"""`slotline tune`: real engines, built and timed one after the other, and what negotiation makes of the figures."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from attrs import evolve
from cli_cases import tiny_checkpoint
from negotiation_cases import FULL, backend, layer, request, sliding

from slotline.cli import main
from slotline.cli.tuning.cases import Cases, cases_for
from slotline.cli.tuning.timing import _Bench, time_cases
from slotline.cli.tuning.trials import backend_trials, feasible_backends, refused_backends
from slotline.core import LLM
from slotline.planner.measurements import asked_cache, load_measurements, measurement_key, save_measurements
from slotline.planner.plan import make_plan
from slotline.registry.cache_folder import cache_folder
from slotline.registry.capability import Flag
from slotline.registry.config import load_config
from slotline.registry.errors import ConfigError
from slotline.registry.negotiation import Asked, Measured, MeasuredRun, negotiate
from slotline.registry.negotiation.measured import from_json

PLUGINS = """
from attrs import evolve
from slotline.backends.torch_sdpa import descriptor as torch_descriptor
from slotline.backends.torch_sdpa.backend import TorchBackend
from slotline.registry.capability import Align


class Breaks(TorchBackend):
    def forward(self, *args, **kwargs):
        raise RuntimeError("this kernel is broken")


pages = evolve(
    torch_descriptor,
    name="pages",
    capabilities=evolve(torch_descriptor.capabilities, kernel_block_sizes=Align(multiple_of=32), priority=-5),
)
breaks = evolve(torch_descriptor, name="breaks", factory=Breaks, probe=None)
"""
QUICK = ["--batches", "1", "--context", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its configuration, and two more backends: one that takes other pages and one that breaks."""
    made = tmp_path_factory.mktemp("tune")
    tiny_checkpoint(made / "llama")
    (made / "more.py").write_text(PLUGINS)
    (made / "run.toml").write_text(
        'model = "llama"\ndtype = "float32"\nplugins = ["more.py:pages", "more.py:breaks"]\n[cache]\nmemory = "4MiB"\n'
        "[scheduler]\nmax_requests = 2\nmax_model_len = 96\nmax_batched_tokens = 64\n"
    )
    return made


@pytest.fixture(scope="module")
def tuned(folder: Path) -> dict[str, object]:
    """The report of one whole run; the cache folder is the test session's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOTLINE_CACHE", str(folder / "cache"))
        output = folder / "report.json"
        patch.setattr("slotline.cli.tune.print_json", lambda value: output.write_text(json.dumps(value)))
        assert main(["tune", str(folder / "run.toml"), *QUICK, "--output", str(folder / "tuned.toml"), "--json"]) == 0
    report: dict[str, object] = json.loads(output.read_text())
    return report


@pytest.fixture
def cached(folder: Path, tuned: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration, with the measurements in reach."""
    monkeypatch.setenv("SLOTLINE_CACHE", str(folder / "cache"))
    return folder / "run.toml"


@pytest.mark.slow
def test_every_feasible_backend_is_timed_in_every_case(tuned: dict) -> None:
    done = {t["settings"]["attention.backend"]: t for t in tuned["trials"] if t["varied"] == "backend"}
    assert set(done) == {"cpu", "torch", "flex", "pages", "breaks"}
    for name in ("cpu", "torch", "pages"):
        timings = done[name]["timings"]
        assert list(timings) == ["decode 1", "decode 2", "mixed 64", "prefill 64"]
        assert all(t["median_s"] > 0 and t["samples"] >= 3 and t["spread"] >= 0 for t in timings.values())
        assert done[name]["failure"] == ""
    assert sum(trial["chosen"] for trial in tuned["trials"]) == 1


def test_a_candidate_that_fails_is_a_row_with_its_reason_and_the_others_go_on(tuned: dict) -> None:
    rows = [trial for trial in tuned["trials"] if trial["failure"]]
    assert {row["settings"]["attention.backend"] for row in rows} == {"breaks"}
    assert all(row["failure"] == "RuntimeError: this kernel is broken" and not row["timings"] for row in rows)
    last = [trial["settings"]["attention.backend"] for trial in tuned["trials"] if trial["varied"] == "backend"][-1]
    assert last != "breaks" or len(tuned["trials"]) > 4


def test_what_negotiation_rules_out_is_named_with_its_code(tuned: dict) -> None:
    (refusal,) = [item["why"] for item in tuned["refused"] if item["what"] == "full=triton"]
    assert refusal.startswith("N101 ")


def test_the_block_sizes_of_the_others_are_tried_where_backends_differ(tuned: dict) -> None:
    sizes = {run["block_size"] for run in tuned["measured"]["runs"]}
    assert sizes == {16, 32}
    tried = {trial["settings"]["cache.block_size"] for trial in tuned["trials"] if trial["varied"] == "block size"}
    refused = {item["what"] for item in tuned["refused"] if "cache.block_size" in item["what"]}
    assert tried | refused  # which, depends on which was fastest: `pages` does not take 16
    assert tried <= {16, 32}
    assert refused <= {"attention.backend=pages, cache.block_size=16"}


def test_auto_takes_the_measured_choice_and_explains_it_with_figures(cached: Path, tuned: dict) -> None:
    (best,) = [trial for trial in tuned["trials"] if trial["chosen"]]
    plan = make_plan(load_config(cached)).plan
    assert plan.groups[0].backend == best["settings"]["attention.backend"]
    assert plan.measured == f"slotline tune {tuned['measured']['date']}: {tuned['kept']}"
    reasons = {item.name: item.reasons[0].text for item in plan.groups[0].rejected}
    assert reasons["breaks"].startswith("measured: failed (RuntimeError: this kernel is broken)")
    text = plan.explain()
    assert "not measured here" not in text
    assert tuned["measured"]["date"] in text


def test_without_measurements_the_same_configuration_goes_by_priority(folder: Path, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    plan = make_plan(load_config(folder / "run.toml")).plan
    assert plan.groups[0].backend == "cpu"
    assert "not measured here; decided by priority" in plan.groups[0].reason
    assert make_plan(load_config(folder / "run.toml"), use_measurements=False).plan.digest == plan.digest


def test_another_dtype_is_another_measurement(cached: Path) -> None:
    plan = make_plan(load_config(cached, overrides=["dtype=bfloat16"])).plan
    assert "not measured here" in plan.groups[0].reason


def test_the_tuned_file_is_a_configuration_to_extend(cached: Path, folder: Path, tuned: dict) -> None:
    (best,) = [trial for trial in tuned["trials"] if trial["chosen"]]
    text = (folder / "tuned.toml").read_text()
    for part in (
        "# Written by `slotline tune`",
        "# device: ",
        "# versions: ",
        "# timed: decode steps of 1, 2 requests",
    ):
        assert part in text
    (folder / "mine.toml").write_text('extends = ["run.toml", "tuned.toml"]\n')
    plan = make_plan(load_config(folder / "mine.toml"), use_measurements=False).plan
    assert plan.groups[0].backend == best["settings"]["attention.backend"]
    assert "tuned.toml" in plan.groups[0].reason
    assert plan.graphs.resolved == best["graphs"] == "none"


def test_nothing_that_the_user_fixed_is_varied(folder: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    fixed = ["--set", "attention.backend=torch", "--set", "cache.block_size=16", "--batches", "1", "--context", "4"]
    assert main(["tune", str(folder / "run.toml"), *fixed]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if " none " in line] == ["torch"]
    assert "refused  full=cpu: N190 not asked for" in shown


def test_if_nothing_runs_the_exit_code_says_so_and_nothing_is_written(
    folder: Path, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    output = tmp_path / "tuned.toml"
    broken = ["--set", "attention.backend=breaks", "--output", str(output), "--batches", "1", "--context", "4"]
    assert main(["tune", str(folder / "run.toml"), *broken]) == 1
    assert "failed: RuntimeError: this kernel is broken" in capsys.readouterr().out
    assert not output.exists()
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("name", ["int8", "int8_per_token_head"])
def test_measurements_of_a_cache_of_codes_are_found_by_each_of_its_names(
    name: str, folder: Path, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    fixed = ["--set", "attention.backend=torch", "--set", "cache.block_size=16", "--batches", "1", "--context", "4"]
    assert main(["tune", str(folder / "run.toml"), "--set", "cache.dtype=int8", *fixed]) == 0
    settings = ["attention.backend=torch", "cache.block_size=16"]
    assert make_plan(load_config(folder / "run.toml", overrides=[*settings, f"cache.dtype={name}"])).plan.measured
    assert not make_plan(load_config(folder / "run.toml", overrides=settings)).plan.measured


def test_measurements_of_an_eight_bit_cache_are_found_by_its_short_name() -> None:
    asked = Asked(value="fp8", explicit=True)
    assert asked_cache(request(kv_dtype=asked)) == "float8_e4m3fn"
    assert asked_cache(request()) == "float32"


def test_a_broken_measurement_file_is_passed_over_with_a_warning(cached: Path, tmp_path, monkeypatch, caplog) -> None:
    planned = make_plan(load_config(cached), use_measurements=False)
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    run = MeasuredRun(backends={"full": "torch"}, block_size=16, graphs="none", seconds={"decode 1": 1.0})
    figures = Measured(date="2026-11-21", dtype="float32", kv_dtype="float32", aim="none", runs=(run,))
    file = save_measurements(figures, planned.facts, planned.plan.device)
    assert load_measurements(planned.facts, planned.plan.device, "float32", "float32").runs == (run,)
    for text in ("{", '{"key": 1}', "[]"):
        file.write_text(text)
        with caplog.at_level(logging.WARNING, "slotline"):
            found = load_measurements(planned.facts, planned.plan.device, "float32", "float32")
        assert found is None
    assert "cannot be read and do not count" in caplog.text


def test_the_key_tells_devices_shapes_and_dtypes_apart(cached: Path) -> None:
    planned = make_plan(load_config(cached), use_measurements=False)
    key = measurement_key(planned.facts, planned.plan.device, "float32", "float32")
    assert {"device", "architecture", "shape", "dtype", "kv_dtype", "torch"} <= set(key)
    assert str(planned.facts.path) not in json.dumps(key)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLOTLINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "slotline"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "slotline"
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert load_config().config.cache == load_config(environ={}).config.cache


def test_a_cache_folder_that_cannot_be_written_is_an_error_with_a_way_out(cached: Path, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path / "file"))
    planned = make_plan(load_config(cached), use_measurements=False)
    figures = Measured(date="2026-11-21", dtype="float32", kv_dtype="float32", aim="none", runs=())
    with pytest.raises(ConfigError, match="set SLOTLINE_CACHE"):
        save_measurements(figures, planned.facts, planned.plan.device)


def test_cases_are_cut_to_what_the_engine_can_hold() -> None:
    bounds = {"max_requests": 256, "max_model_len": 4096, "max_batched_tokens": 8192}
    assert cases_for("cuda", **bounds) == Cases(
        batches=(1, 8, 64, 256), context=1024, prefill=2048, mixed=64, long=4028
    )
    assert cases_for("cuda", **bounds | {"max_model_len": 32768}).long == 8192
    assert cases_for("cuda", **bounds, context=3000).long == 0  # no other case by much
    small = cases_for("cpu", max_requests=2, max_model_len=80, max_batched_tokens=16)
    assert (small.batches, small.context, small.prefill, small.mixed, small.long) == ((1, 2), 12, 16, 16, 0)
    with pytest.raises(ConfigError, match="do not fit into max_model_len=80"):
        cases_for("cpu", max_requests=2, max_model_len=80, max_batched_tokens=16, context=20)
    with pytest.raises(ConfigError, match="a decode batch of 0"):
        cases_for("cpu", **bounds, batches=(0,))


def test_a_short_prompt_is_timed_beside_long_requests_too_where_there_is_room(
    engines: Callable[..., LLM], tiny: Callable[..., Path]
) -> None:
    cases = Cases(batches=(3,), context=8, prefill=16, mixed=16, long=40)
    assert "beside 2 that decode, and beside as many with 40 tokens of context" in cases.describe()
    most: list[int] = []

    class Watched(_Bench):
        def _first_token(self, length: int) -> float:
            most.append(int(self.engine.rows.num_computed_tokens.max()))
            return super()._first_token(length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slotline.cli.tuning.timing._Bench", Watched)
        engine = engines(tiny("llama"), max_num_seqs=4, max_model_len=160).engine
        timings, _ = time_cases(engine, cases)
        without, _ = time_cases(engine, evolve(cases, long=10**6))  # more than the cache holds
    assert list(timings) == ["decode 3", "mixed 16", "mixed 16 long", "prefill 16"]
    assert list(without) == ["decode 3", "mixed 16", "prefill 16"]
    assert min(most) < 40 <= max(most)


def test_one_kind_of_layers_is_varied_at_a_time() -> None:
    offers = [backend("one"), backend("two"), backend("no_window", sliding_window=Flag(False))]
    plan = negotiate(request(layer(0), sliding(1)), offers, [FULL])
    assert feasible_backends(plan) == {"full": ["no_window", "one", "two"], "sliding": ["one", "two"]}
    assert [trial.settings["attention.backend"] for trial in backend_trials(plan)] == [
        {"full": "no_window", "sliding": "one"},
        "one",
        {"full": "two", "sliding": "one"},
        {"full": "no_window", "sliding": "two"},
    ]
    (refusal,) = refused_backends(plan)
    assert refusal[0] == "sliding=no_window"
    assert refusal[1].startswith("N170 ")


@pytest.mark.slow
def test_the_best_backend_of_each_kind_is_timed_together_with_the_others(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    tiny_models.build("gemma3", tmp_path / "gemma3", 0)
    (tmp_path / "run.toml").write_text(
        'model = "gemma3"\ndtype = "float32"\n[cache]\nmemory = "4MiB"\n'
        "[scheduler]\nmax_requests = 1\nmax_model_len = 96\nmax_batched_tokens = 32\n"
    )
    capsys.readouterr()
    assert main(["tune", str(tmp_path / "run.toml"), "--batches", "1", "--context", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    runs = report["measured"]["runs"]
    assert {frozenset(run["backends"].items()) for run in runs[:5]} == {
        frozenset({("full", full), ("sliding", window)})
        for full, window in (("cpu", "cpu"), ("torch", "cpu"), ("flex", "cpu"), ("cpu", "torch"), ("cpu", "flex"))
    }
    figures = from_json(report["measured"])
    best = {}
    for kind in ("full", "sliding"):
        other = {"full": "sliding", "sliding": "full"}[kind]
        best[kind] = figures.cheapest(run for run in figures.runs[:3] if run.backends[other] == "cpu").backends[kind]
    assert best in [run.backends for run in figures.runs]
