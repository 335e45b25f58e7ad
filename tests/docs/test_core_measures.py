"""The core stays small enough to be read in an afternoon, and names no feature that an extension holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import median

from repository import TESTS
from step_calls import calls_of, changes

from slotline.core import LLM, SamplingParams

CORE = TESTS.parent / "core" / "slotline" / "core"
FILES = sorted(CORE.rglob("*.py"))
PACKAGES = ("batch", "scheduler", "kv_cache", "model_runner", "sampling", "engine")
FEATURES = re.compile(
    r"lora|adapter|draft|eagle|medusa|grammar|guidance|companion|pooling|encoder|microbatch|context_shard"
    r"|pipeline stage",
    re.IGNORECASE,
)


def lengths(file: Path) -> list[int]:
    """The lines of each function of a file, with its docstring."""
    tree = ast.parse(file.read_text("utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [function.end_lineno - function.lineno + 1 for function in functions if function.end_lineno]


def test_the_core_has_at_most_7000_lines_in_90_files() -> None:
    assert 40 < len(FILES) <= 90
    assert sum(len(file.read_text("utf-8").splitlines()) for file in FILES) <= 7_000


def test_functions_of_the_core_are_short() -> None:
    found = [length for file in FILES for length in lengths(file)]
    assert len(found) > 300
    assert median(found) <= 8
    assert max(found) <= 60


def test_no_package_of_the_core_names_a_feature() -> None:
    found = {
        f"{file.relative_to(CORE)}: {match[0]}"
        for package in PACKAGES
        for file in (CORE / package).rglob("*.py")
        if (match := FEATURES.search(file.read_text("utf-8")))
    }
    assert found == set(), "hold it in an extension: slotline.registry.contracts.extension"


def test_a_plain_step_makes_few_calls_and_changes_of_file() -> None:
    llm = LLM(device="cpu", memory="64MiB", max_model_len=512)
    for index in range(2):
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.engine.add(f"r{index}", list(range(5 + index, 15 + index)), params)
    for _ in range(8):
        llm.engine.step()
    steps = [calls_of(llm.engine.step) for _ in range(9)]
    assert 20 < median(map(len, steps)) <= 90
    assert median(map(changes, steps)) <= 45


def test_the_measures_see_lines_and_words(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def f():\n    return 1\n\n\nclass A:\n    def g(self): ...\n")
    assert lengths(tmp_path / "one.py") == [2, 1]
    assert FEATURES.search("class DraftRunner")
