"""A pytest plugin that writes down the launches of Triton kernels under the interpreter, to compile them elsewhere.

`pytest -p record_launches --record-launches FILE TESTS` writes one launch a line, as `benchmarks/compile_kernels.py`
reads them. Launches that would need the same compiled kernel count once.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

OPTIONS = ("num_warps", "num_stages", "launch_pdl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-launches", metavar="FILE", help="write the launches of Triton kernels to a file")


@pytest.fixture(scope="session", autouse=True)
def _record_launches(request: pytest.FixtureRequest) -> Iterator[None]:
    target = request.config.getoption("--record-launches")
    if target is None:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    found: dict[str, None] = {}
    run = InterpretedFunction.run

    def recorded(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found[json.dumps(launch_of(self.fn, arguments, options))] = None
        return run(self, *arguments, grid=grid, warmup=warmup, **options)

    InterpretedFunction.run = recorded
    yield
    InterpretedFunction.run = run
    Path(target).write_text("".join(f"{line}\n" for line in found), encoding="utf-8")


def launch_of(function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launch as JSON types: the kernel, the kind of each argument, and Triton's options."""
    signature = inspect.signature(function)
    given = {name: value for name, value in options.items() if name in signature.parameters}
    bound = signature.bind(*arguments, **given)
    bound.apply_defaults()
    constants = {name for name, p in signature.parameters.items() if "constexpr" in str(p.annotation)}
    fixed = {name for name in bound.arguments if name in constants}
    return {
        "module": function.__module__,
        "kernel": function.__qualname__,
        "arguments": {name: kind_of(value, exact=name in fixed) for name, value in bound.arguments.items()},
        "options": {name: value for name, value in options.items() if name in OPTIONS},
    }


def kind_of(value: Any, *, exact: bool) -> list[Any]:
    """Return what a kernel is compiled for: a tensor's dtype, boxes, a constant, or a number's divisibility by 16."""
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), value.data_ptr() % 16 == 0]
    if hasattr(value, "block_shape"):
        return ["boxes", str(value.base.dtype).removeprefix("torch."), list(value.block_shape)]
    if isinstance(value, bool | str | float | None) or exact:
        return ["value", value]
    return ["value", value if value == 1 else 16 if value % 16 == 0 else 17 if abs(value) < 1 << 31 else (1 << 31) + 1]
