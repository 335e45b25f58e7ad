"""A plugin whose factory fails is a typed error, whatever its kind and however it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import SUPPORT
from tiny_engines import DEFAULTS
from torch import distributed

from slotline.core import LLM
from slotline.llm.settings import load_settings
from slotline.planner.plan import make_plan
from slotline.registry.contracts import CommunicatorContext, ExpertPlacementContext
from slotline.registry.descriptor import Kind
from slotline.registry.errors import CapacityError, PluginError, PluginLoadError

Tiny = Callable[..., Path]
PLUGINS = SUPPORT / "broken_plugins.py"
FAMILIES = tuple(f"model_family:transformers_{name}" for name in ("decoder", "vision", "encoder", "seq2seq", "speech"))
SETTINGS: dict[Kind, dict[str, Any]] = {
    Kind.ATTENTION: {"backend": "broken"},
    Kind.STATE: {"state.backend": "broken"},
    Kind.KV_SPEC: {"cache.kv_spec.full": "broken"},
    Kind.KV_CONNECTOR: {"kv_connector.name": "broken"},
    Kind.DRAFTER: {"drafter.name": "broken", "drafter.tokens": 2, "drafter.adaptive": False},
    Kind.LOGITS_PROCESSOR: {"logits_processors.broken": {}},
    Kind.LORA: {"lora.name": "broken"},
    Kind.MODEL_FAMILY: {"plugins.block": FAMILIES},
    Kind.STRUCTURED_OUTPUT: {"structured_output.backend": "broken"},
    Kind.DEVICE: {"device": "broken"},
    Kind.EXTENSION: {"extensions.broken": {}},
    Kind.LINEAR: {"weights.quantize": "int8", "weights.linear": "broken"},
    Kind.EXPERTS: {"weights.quantize": "int8", "weights.experts": "broken"},
    Kind.WEIGHT_FORMAT: {"weights.quantize": "int8", "plugins.block": ("weight_format:online",)},
    Kind.RESPONSE_PARSER: {"response_parser.name": "broken"},
    Kind.COMMUNICATOR: {"parallel.tensor": 2, "parallel.communicator": "broken"},
    Kind.EXPERT_PLACEMENT: {"parallel.tensor": 2, "parallel.expert": 2, "parallel.expert_placement": "broken"},
    Kind.SCHEDULER_POLICY: {"scheduler.policy": "broken"},
}
"""What makes an engine take the plugin of a kind."""
REMEDIES = {
    Kind.ATTENTION: r"attention\.backend",
    Kind.STATE: r"state\.backend",
    Kind.KV_SPEC: r"cache\.kv_spec",
    Kind.KV_CONNECTOR: r"kv_connector\.name",
    Kind.DRAFTER: r"drafter\.name",
    Kind.LOGITS_PROCESSOR: r"its table",
    Kind.LORA: r"lora\.name",
    Kind.MODEL_FAMILY: r"\[plugins\] block",
    Kind.STRUCTURED_OUTPUT: r"structured_output\.backend",
    Kind.DEVICE: r"in device",
    Kind.EXTENSION: r"its table",
    Kind.LINEAR: r"weights\.linear",
    Kind.EXPERTS: r"weights\.experts",
    Kind.WEIGHT_FORMAT: r"\[plugins\] block",
    Kind.RESPONSE_PARSER: r"response_parser\.name",
    Kind.COMMUNICATOR: r"parallel\.communicator",
    Kind.EXPERT_PLACEMENT: r"parallel\.expert_placement",
    Kind.SCHEDULER_POLICY: r"scheduler\.policy",
}
OF_RANKS = (Kind.COMMUNICATOR, Kind.EXPERT_PLACEMENT)
"""Built by engines of several processes only. Here their plan builds them, in one."""
FAMILY = {Kind.STATE: "mamba2", Kind.EXPERTS: "mixtral", Kind.EXPERT_PLACEMENT: "mixtral"}
"""The model that a kind has work for."""


def start(tiny: Tiny, kind: Kind, how: str) -> None:
    """Build an engine with the plugin of `broken_plugins.py`."""
    path = FAMILY.get(kind)
    build(kind, path and tiny(path), {**DEFAULTS, **SETTINGS[kind], "plugins.inline": (inline(kind, how),)})


def build(kind: Kind, path: Path | None, settings: dict[str, Any]) -> None:
    """Build what takes the plugin of a kind: an engine, or what ranks build beside it."""
    if kind not in OF_RANKS:
        LLM(path, **settings)
        return
    planned = make_plan(load_settings(path, (), settings))
    descriptor = planned.registry.load(kind, SETTINGS[kind][f"parallel.{kind.value}"], required=False) or (
        planned.registry.load(kind, "failing", required=True)
    )
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        context: Any = ExpertPlacementContext(contract=1, ranks=2)
        if kind is Kind.COMMUNICATOR:
            context = CommunicatorContext(contract=1, name="tensor", ranks=(0,), rank=0, device="cpu")
        planned.registry.build(descriptor, context)
    finally:
        distributed.destroy_process_group()


def inline(kind: Kind, how: str) -> str:
    return f"{PLUGINS}:{kind.value}_{how}"


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(
    ("how", "cause"),
    [("raises", "KeyError: 'no such table'"), ("exits", "SystemExit: this machine is not supported")],
)
def test_a_factory_that_raises_is_an_error_that_names_plugin_and_source_and_remedy(
    kind: Kind, how: str, cause: str, tiny: Tiny
) -> None:
    with pytest.raises(PluginError) as raised:
        start(tiny, kind, how)
    assert raised.value.message == (
        f"{kind.value}:broken of the inline plugin {inline(kind, how)} cannot be built for this model: {cause}"
    )
    assert raised.value.__cause__ is not None
    raised.match(f"fix: .*{REMEDIES[kind]}")


@pytest.mark.parametrize("kind", Kind)
def test_a_factory_that_cannot_be_imported_is_an_error_that_names_plugin_and_source_and_remedy(
    kind: Kind, tiny: Tiny
) -> None:
    with pytest.raises(PluginLoadError) as raised:
        start(tiny, kind, "absent")
    assert raised.value.message == (
        f"the factory of {kind.value}:broken of the inline plugin {inline(kind, 'absent')}: cannot load "
        "'absent_package.module:Factory': ModuleNotFoundError: No module named 'absent_package'"
    )
    raised.match("fix: install what provides the module 'absent_package', or ask for another plugin")


@pytest.mark.parametrize(
    "kind", [Kind.ATTENTION, Kind.STATE, Kind.KV_CONNECTOR, Kind.DRAFTER, Kind.LOGITS_PROCESSOR, Kind.LORA]
)
def test_a_factory_that_takes_more_memory_than_there_is_says_so(kind: Kind, tiny: Tiny) -> None:
    with pytest.raises(CapacityError, match=rf"{kind.value}:broken.* does not fit into memory\n  fix: \w+"):
        start(tiny, kind, "fills")
