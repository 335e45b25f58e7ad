"""What tests of whole engines share: tiny checkpoints, transformers' answers on them, and engines, each made once."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import tiny_models
import tiny_vision
import torch
from interpreter_patches import quicken
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM
from slotline.registry import records
from slotline.registry.records import PluginRecord


def pytest_configure() -> None:
    """One thread for each test process: small tensors gain nothing from more, and threads of several processes that
    wait for each other made the suite ten times slower. Tests run on the CPU unless they ask for a GPU."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SLOTLINE_DEVICE", "cpu")
    os.environ["SLOTLINE_CACHE"] = mkdtemp(prefix="slotline-tests-")  # what was measured here decides nothing
    # Compiled kernels serve all test processes, and later runs.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parent / "__pycache__" / "kernels"))
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, so before any test does
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 10, 10)  # an engine is a hundred thousand objects: the usual 700 cost 6 % of the time


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries complain of leaks when the process ends


LONGEST = (
    "test_verification.py",
    "test_conformance_linear.py",
    "test_lora.py",
    "test_state_layers.py",
    "test_serve_process.py",
    "test_structured_output.py",
    "test_latent_families.py",
    "test_engine_equality.py",
    "test_kv_connector.py",
    "test_fused_passes.py",
    "test_overlapped_drafts.py",
    "test_eagle.py",
    "test_state_checkpoints.py",
    "test_conformance_structured_output.py",
    "test_conformance_kv_spec.py",
    "test_conformance_state.py",
    "test_inspected_families.py",
    "test_triton_backend.py",
    "test_conformance_lora.py",
    "test_conformance_logits_processor.py",
    "test_alibi.py",
    "test_conformance_drafter.py",
    "test_every_drafter.py",
    "test_last_queries.py",
    "test_multimodal.py",
    "test_triton_prompts.py",
    "test_tune.py",
    "test_third_party.py",
    "test_pipeline.py",
    "test_cli_conform.py",
    "test_draft_model.py",
    "test_mtp.py",
    "test_context_shards.py",
    "test_pooling.py",
    "test_sliding_engine.py",
    "test_conformance_experts.py",
    "test_conformance_kv_connector.py",
    "test_conformance_device.py",
)
"""Files that take longest: begun at the end, one would run on while the other process has nothing left to do."""


_SLOW = 2


def _spread(items: list[pytest.Item]) -> None:
    """Mark as slow all but some parameters of a test that has the mark `spread`, and as exhaustive those beyond the
    mark's `slow`, two if it says nothing. Which ones are kept is the same for any choice of tests on the command
    line, as long as all parameters of a test are collected.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("spread"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for parameters in tests.values():
        mark = parameters[0].get_closest_marker("spread")
        left = _left_by(mark.args[0], parameters)
        for item in left:
            item.add_marker(pytest.mark.slow)
        for item in _left_by(mark.kwargs.get("slow", _SLOW), left):
            item.add_marker(pytest.mark.exhaustive)


def _left_by(count: int, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items without `count` of them that are evenly spread."""
    size = max(len(items), 1)
    return [item for at, item in enumerate(items) if at * count // size == (at - 1) * count // size]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; `--no-loadscope-reorder` keeps it so where processes share the files."""
    _spread(items)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_runtest_setup() -> None:
    quicken()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """What lives on after a file is no concern of the collector: with the modules that were imported and the engines
    that are kept, a collection takes seconds, and `slotline tune` begins each measurement with one.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for each other on more threads: ten times as long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _installed_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The metadata of what is installed are read once, and again where a test puts a folder of its own on the path."""
    known: dict[tuple[str, ...], list[PluginRecord]] = {}
    original, temporary = records.installed_records, str(tmp_path_factory.getbasetemp())

    def installed_records() -> list[PluginRecord]:
        if any(path.startswith(temporary) for path in sys.path):
            return original()
        return list(known.get(key := tuple(sys.path)) or known.setdefault(key, original()))

    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in [module for name, module in sys.modules.items() if name.startswith("slotline.")]:
            if vars(module).get("installed_records") is original:
                monkeypatch.setattr(module, "installed_records", installed_records)
        yield


@pytest.fixture
def c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a C compiler, for what only looks for one."""
    monkeypatch.setenv("CC", sys.executable)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds the tiny checkpoint of a family, once for each set of settings."""
    root, made = tmp_path_factory.mktemp("tiny"), dict[str, Path]()

    def get(family: str, **settings: Any) -> Path:
        key = repr((family, sorted(settings.items())))
        if key not in made:
            made[key] = tiny_models.build(family, root / f"{family}-{len(made)}", **settings)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny_vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds the tiny checkpoint of a model with a vision encoder, once each."""
    root, made = tmp_path_factory.mktemp("vision"), dict[str, Path]()

    def get(name: str = "llava") -> Path:
        if name not in made:
            made[name] = tiny_vision.build(name, root / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def greedy() -> Callable[[Path, list[int], int], list[int]]:
    """transformers' greedy tokens; each checkpoint is loaded once and each answer computed once."""
    oracles: dict[Path, Any] = {}
    known: dict[tuple[Path, tuple[int, ...], int], list[int]] = {}

    def get(path: Path, prompt: list[int], max_tokens: int) -> list[int]:
        key = (path, tuple(prompt), max_tokens)
        if key not in known:
            oracle = oracles[path] = oracles.get(path) or tiny_models.oracle(path)
            tiny_models.forget(oracle)
            known[key] = _greedy_tokens(oracle, prompt, max_tokens)
        return known[key]

    return get


def _greedy_tokens(oracle: Any, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])  # [1, len(prompt)]
    with torch.no_grad():
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.fixture(scope="session")
def engines() -> Iterator[Callable[..., LLM]]:
    """Builds an engine on a checkpoint, once for each set of settings that differ from `DEFAULTS`."""
    made: dict[str, LLM] = {}

    def get(path: Path | None, **settings: Any) -> LLM:
        key = repr((path, sorted(settings.items())))
        if key not in made:
            made[key] = LLM(path, **{**DEFAULTS, **settings})
        llm = made[key]
        everything_returned(llm)
        llm.engine.scheduler.cache.reset()  # no prefix hits from the tests before
        return llm

    yield get
    for llm in made.values():
        everything_returned(llm)
    made.clear()
    gc.collect()
