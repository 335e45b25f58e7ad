"""Workspaces that attention backends declare: in the plan, counted and handed to the backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slotline.core import LLM
from slotline.registry.errors import ContractError

Tiny = Callable[..., Path]
PLUGIN = """
from attrs import evolve
from slotline.registry import Descriptor
from slotline.testing.reference.attention import descriptor as reference
from slotline.testing.reference.attention.backend import EagerAttention


class Roomy(EagerAttention):
    def __init__(self, context):
        super().__init__(context)
        self.context = context


def size(context):
    return {size}


descriptor = evolve(
    reference, name="roomy", factory=Roomy, capabilities=evolve(reference.capabilities, workspace=size)
)
"""


def engine(tmp_path: Path, model: Path, size: str) -> LLM:
    file = tmp_path / "roomy.py"
    file.write_text(PLUGIN.replace("{size}", size), encoding="utf-8")
    settings: dict[str, Any] = {"plugins": [f"{file}:descriptor"], "attention.backend": "roomy", "dtype": "float32"}
    return LLM(model=str(model), device="cpu", max_model_len=64, memory="1MiB", max_num_seqs=3, **settings)


def test_a_declared_workspace_is_in_the_plan_and_the_backend_gets_it(tmp_path: Path, tiny: Tiny) -> None:
    llm = engine(tmp_path, tiny("llama"), "1000 * context.max_requests + len(context.layers)")
    (group,) = llm.plan.groups
    wanted = 3000 + len(group.layers)
    assert group.workspace == group.decision()["workspace"] == wanted
    assert f"workspace   {wanted:,} bytes beside the cache" in llm.plan.explain()
    backend: Any = llm.engine.runner.router.groups[0].backend
    assert (tuple(backend.context.workspace.shape), str(backend.context.workspace.dtype)) == ((wanted,), "torch.uint8")


def test_without_a_declaration_there_is_none(tiny: Tiny) -> None:
    llm = LLM(model=str(tiny("llama")), device="cpu", max_model_len=64, memory="1MiB", backend="torch")
    assert "workspace" not in llm.plan.groups[0].decision()


def test_what_is_no_number_of_bytes_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    with pytest.raises(ContractError, match="workspace gives -1"):
        engine(tmp_path, tiny("llama"), "-1")
