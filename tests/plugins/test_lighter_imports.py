"""A start imports no package that only other features need, and what it put off works once it is needed."""

from __future__ import annotations

import builtins
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from slotline.plugins.model_families.later_names import Later
from slotline.plugins.model_families.lighter_imports import lighter_imports
from slotline.plugins.model_families.plain_shapes import _PLAIN, plain_shapes

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "triton",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "scipy.optimize",
    "sympy",
    "accelerate",
    "huggingface_hub.hf_api",
    "peft",
    "copier",
    "datasets",
    "starlette",
    "uvicorn",
    "llguidance",
    "xgrammar",
    "hypothesis",
    "pytest",
)
"""Packages that a start of the small model does without."""


def run(code: str) -> str:
    """Run code in a process of its own. Return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_the_core_and_the_command_line_import_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numba", "rich.table", *HEAVY)
    said = run(f"""
        import sys, slotline.core, slotline.cli
        slotline.cli.build_parser()
        print([name for name in {heavy} if name in sys.modules])
    """)
    assert said == "[]\n"


@pytest.mark.slow
def test_a_start_imports_no_package_of_other_features() -> None:
    said = run(f"""
        import sys
        from slotline.core import LLM, SamplingParams
        llm = LLM(device="cpu", memory="64MiB", max_model_len=256)
        llm.generate(["def main("], SamplingParams(max_tokens=1, temperature=0), progress=False)
        print([name for name in {HEAVY} if name in sys.modules])
    """)
    assert said.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_what_was_put_off_is_as_if_it_had_been_imported() -> None:
    said = run("""
        import sys, torch
        import slotline.plugins.model_families.transformers_model
        from transformers import masking_utils
        from transformers.integrations import deepgemm, flex_attention
        from transformers.loss import loss_for_object_detection as loss
        plain = flex_attention.WrappedFlexAttention.__init__
        assert "torch._dynamo" not in sys.modules and "scipy.optimize" not in sys.modules
        doubled = torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1))
        from torch._dynamo import trace_rules
        print(doubled.item(), "torch._dynamo" in sys.modules)
        print(trace_rules.lookup_callable(deepgemm._load_deepgemm_kernel).__name__)
        print(flex_attention.WrappedFlexAttention.__init__ is plain, masking_utils.TransformGetItemToIndex.__name__)
        print(loss.linear_sum_assignment([[1, 2], [3, 0]])[1].tolist(), type(loss.linear_sum_assignment).__name__)
    """)
    assert said.splitlines() == [
        "2.0 True",
        "TorchInGraphFunctionVariable",
        "False TransformGetItemToIndex",
        "[0, 1] builtin_function_or_method",
    ]


@pytest.mark.slow
def test_classes_and_styles_that_were_put_off_are_those_of_torch_and_transformers() -> None:
    said = run("""
        import sys, torch
        import slotline.plugins.model_families.transformers_model
        from transformers.distributed import fsdp, mixin, parallel_utils, sharding_utils, utils
        from transformers.utils import hub
        late = "torch.distributed.tensor"
        plain = torch.ones(2)
        print(utils.is_dtensor(plain), isinstance(plain, sharding_utils.DTensor), late in sys.modules)
        print("colwise" in mixin.ALL_PARALLEL_STYLES, "grouped_gemm" in parallel_utils.ALL_PARALLEL_STYLES)
        print(type(mixin.ALL_PARALLEL_STYLES) is parallel_utils.ParallelInterface, late in sys.modules)
        from torch.distributed.tensor import DTensor
        class Known(DTensor):
            pass
        sharded = torch.Tensor._make_subclass(Known, plain)
        print(utils.is_dtensor(sharded), isinstance(sharded, parallel_utils.DTensor), parallel_utils.DTensor is DTensor)
        class Own(hub.HfApi):
            pass
        print(Own.__mro__[1].__module__, mixin.apply_tensor_parallelism.__name__, hub.hf_api().library_name)
    """)
    assert said.splitlines() == [
        "False False False",
        "True True",
        "True True",
        "True True True",
        "huggingface_hub.hf_api apply_tensor_parallelism transformers",
    ]


def test_functions_of_shapes_do_with_plain_numbers_what_torch_does_and_leave_it_the_others() -> None:
    from torch.fx.experimental import symbolic_shapes

    sizes = (True, False, 0, 3, (2, 3), [2, 3], (2,), 1.5, "x", None)
    names = (*_PLAIN,)
    ours = plain_shapes(names)
    assert plain_shapes(("guard_or_false", "something_new")) is None
    for name in names:
        function, real = getattr(ours, name), getattr(symbolic_shapes, name)
        for values in (*((one,) for one in sizes), *product(sizes, sizes)):
            assert outcome(function, values) == outcome(real, values), (name, values)
    size = symbolic_shapes.ShapeEnv().create_unbacked_symint()
    assert ours.guard_or_false(size == 3) is False
    assert ours.guard_or_true(size == 3) is True


def outcome(function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    """What a call gives or raises."""
    try:
        result = function(*values)
    except Exception as error:
        return type(error)
    return type(result), result


def test_a_function_put_off_takes_its_place_when_it_is_called() -> None:
    holder: dict[str, object] = {}
    later = holder["root"] = holder["alias"] = Later("math", "sqrt", holder)
    assert later(4.0) == 2.0
    assert holder["root"] is holder["alias"] is __import__("math").sqrt


def test_the_last_thread_that_leaves_puts_all_back() -> None:
    before = builtins.__import__, torch.compiler.disable, torch.compiler.allow_in_graph
    first, second = lighter_imports(), lighter_imports()
    first.__enter__()
    second.__enter__()
    assert builtins.__import__ is not before[0]
    first.__exit__(None, None, None)
    assert builtins.__import__ is not before[0]
    second.__exit__(None, None, None)
    assert (builtins.__import__, torch.compiler.disable, torch.compiler.allow_in_graph) == before


def test_imports_of_others_are_as_always_inside() -> None:
    names: dict[str, object] = {"__name__": "somebody"}
    with lighter_imports():
        exec("from scipy.optimize import linear_sum_assignment", names)
    assert not isinstance(names["linear_sum_assignment"], Later)


def test_a_model_family_is_there_without_numba() -> None:
    """Only a CPU's passes need it, and a GPU's start waits for no import that it does without."""
    assert run("import sys, slotline.plugins.model_families.transformers_model; print('numba' in sys.modules)") == (
        "False\n"
    )
