"""Hook specs: one for each slot, both forms of offering, and the hooks for policy and observation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pluggy
import pytest
from cli_cases import pretend_installed
from engine_driver import random_prompts

from slotline.cli import main
from slotline.core import LLM, SamplingParams
from slotline.core.engine.engine import Engine
from slotline.registry import (
    Kind,
    PluginError,
    PluginLoadError,
    PluginRegistry,
    PluginsConfig,
    PluginState,
    hookspecs,
    load_config,
)
from slotline.registry.descriptor import HOST_CONTRACTS
from slotline.registry.loading import capabilities_class

PACKAGE = """
from slotline.registry import Descriptor, Kind, Set, hookimpl
from slotline.registry.contracts import DrafterCapabilities, LogitsProcessorCapabilities


@hookimpl
def slotline_drafter():
    offer = DrafterCapabilities(devices=Set(("cpu",)))
    return [Descriptor(kind=Kind.DRAFTER, name="acme_draft", capabilities=offer, factory="json:loads")]


@hookimpl
def slotline_logits_processor():
    for name in ("acme_one", "acme_two"):
        yield Descriptor(
            kind=Kind.LOGITS_PROCESSOR, name=name, capabilities=LogitsProcessorCapabilities(), factory="json:loads"
        )
"""

POLICY = """
from slotline.registry import hookimpl

asked, engines = [], []


@hookimpl
def slotline_rank_candidates(kind, group, candidates, device):
    asked.append((kind, group, candidates, device.type))
    return ["flex"] if kind == "attention" else None


@hookimpl
def slotline_engine_built(engine):
    engines.append(engine)


@hookimpl
def slotline_report_header(config):
    return [f"acme: site policy 7, dtype {config.dtype}"]
"""

Install = Callable[[str], str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package `acme` with one entry point of group `slotline`. Returns the module's name."""

    def run(code: str) -> str:
        module = f"acme_hooks_{len(code)}_{tmp_path.name.rpartition('-')[2]}"
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.delitem(sys.modules, module, raising=False)
        pretend_installed(monkeypatch, tmp_path, "acme", {"slotline": {"acme": module}})
        return module

    return run


# ---- slots


def test_every_slot_has_a_hookspec_that_says_context_capabilities_and_contract() -> None:
    for kind in Kind:
        spec = getattr(hookspecs, kind.hook)
        document, offered = " ".join(spec.__doc__.split()), spec.__annotations__
        assert f"Contract {HOST_CONTRACTS[kind]}, `slotline.registry.contracts.{kind.value}`" in document, kind
        assert capabilities_class(kind).__name__ in offered["return"], kind
    slots = {name for name in vars(hookspecs) if name.startswith("slotline_")}
    others = {"register", "rank_candidates", "review_plan", "engine_built", "report_header"}
    assert slots == {kind.hook for kind in Kind} | {f"slotline_{name}" for name in others}


def test_a_package_offers_plugins_of_several_slots_by_one_entry_point(install: Install) -> None:
    install(PACKAGE)
    registry = PluginRegistry.discover(PluginsConfig())
    rows = {row.label: row for row in registry.records() if row.distribution == "acme"}
    assert set(rows) == {"hooks:acme", "drafter:acme_draft", "logits_processor:acme_one", "logits_processor:acme_two"}
    assert rows["drafter:acme_draft"].state is PluginState.AVAILABLE
    assert registry.load(Kind.DRAFTER, "acme_draft").name == "acme_draft"
    assert registry.record(Kind.DRAFTER, "acme_draft").state is PluginState.LOADED
    assert "acme_two" in registry.names(Kind.LOGITS_PROCESSOR)
    assert set(registry.hooks.labels()) == {"hooks:acme", "hooks:cpu_linear", "hooks:cpu_threads"}


def test_our_own_plugins_are_reached_through_their_slots_hooks() -> None:
    registry = PluginRegistry.discover(PluginsConfig())
    for kind in set(Kind) - {Kind.EXTENSION}:  # that slot is filled by other packages so far
        own = [row for row in registry.records() if row.kind is kind and row.distribution == "slotline"]
        assert own, kind
        for row in own:
            (descriptor,) = registry.hooks.offered(row.label, kind)
            assert (descriptor.kind, descriptor.name) == (kind, row.name)


def test_the_packages_plugins_obey_the_lists_of_the_configuration(install: Install) -> None:
    module = install(PACKAGE)
    registry = PluginRegistry.discover(PluginsConfig(block=("acme_one",)))
    assert registry.record(Kind.LOGITS_PROCESSOR, "acme_one").state is PluginState.BLOCKED
    assert registry.record(Kind.LOGITS_PROCESSOR, "acme_two").state is PluginState.AVAILABLE
    del sys.modules[module]
    registry = PluginRegistry.discover(PluginsConfig(block=("hooks:acme",)))
    assert module not in sys.modules
    assert "acme_draft" not in registry.names(Kind.DRAFTER)


DRAFTER = "slotline_drafter"
OF_ANOTHER_SLOT = PACKAGE.replace(DRAFTER, "slotline_lora")
NO_DESCRIPTOR = PACKAGE.replace("return [Descriptor", "return [1, Descriptor")
NO_LIST = PACKAGE.replace("    offer = ", "    return 7\n    offer = ")
RAISING = PACKAGE.replace("    offer = ", "    1 / 0\n    offer = ")
MISSPELT = PACKAGE.replace(DRAFTER, "slotline_drafters")
WRONG_ARGUMENT = PACKAGE.replace("def slotline_drafter():", "def slotline_drafter(device):")


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (OF_ANOTHER_SLOT, ("'drafter:acme_draft'", "return it from slotline_drafter")),
        (NO_DESCRIPTOR, ("1 is not a descriptor",)),
        (NO_LIST, ("slotline_drafter of 'hooks:acme' returned 7",)),
        (RAISING, ("slotline_drafter of 'hooks:acme' failed: ZeroDivisionError",)),
        (MISSPELT, ("slotline_drafters",)),
        (WRONG_ARGUMENT, ("hooks:acme", "slotline_drafter", "{'device'}", "the hooks are")),
    ],
)
def test_a_package_that_offers_wrongly_is_a_row_that_says_why(
    install: Install, code: str, parts: tuple[str, ...]
) -> None:
    install(code)
    registry = PluginRegistry.discover(PluginsConfig(), tolerant=True)
    (row,) = [row for row in registry.records() if row.label == "hooks:acme"]
    assert row.state is PluginState.FAILED
    with pytest.raises(PluginError) as raised:
        PluginRegistry.discover(PluginsConfig(), strict=True)
    text = f"{raised.value} {raised.value.fix}"
    assert all(part in text for part in parts), text


# ---- policy and observation


def test_a_plugin_reorders_the_candidates_that_fit_and_explain_says_so(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    module = install(POLICY)
    assert main(["explain", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (group,) = plan["groups"]
    assert group["backend"] == "flex"
    assert "hooks:acme puts it first" in group["reason"]
    (lost,) = [item for item in group["rejected"] if item["name"] == "cpu"]
    assert lost["reasons"][0]["text"] == "ranking: hooks:acme puts flex first"
    assert ("attention", "full", ("cpu", "flex", "torch"), "cpu") in sys.modules[module].asked


def test_a_name_in_the_configuration_outranks_a_plugins_order(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(POLICY)
    assert main(["explain", "--json", "--set", "attention.backend=['torch','auto']"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["backend"] == "torch"


@pytest.mark.parametrize(
    ("answer", "part"),
    [('["nope"]', "names 'nope'"), ('["cpu", "cpu"]', "names a candidate twice"), ("1 / 0", "ZeroDivisionError")],
)
def test_an_order_that_is_none_is_an_error_naming_the_plugin(
    install: Install, capsys: pytest.CaptureFixture[str], answer: str, part: str
) -> None:
    install(POLICY.replace('["flex"] if kind == "attention" else None', answer))
    assert main(["explain"]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert "slotline_rank_candidates of 'hooks:acme'" in error


@pytest.mark.parametrize(
    ("right", "wrong", "parts"),
    [
        ("(kind, group, candidates, device)", "(kind, groups)", ("slotline_rank_candidates", "{'groups'}")),
        ("engines.append(engine)", "engine.no_such_thing", ("slotline_engine_built of 'hooks:acme' failed",)),
        ("config.dtype}", "config.no_such_thing}", ("slotline_report_header of 'hooks:acme' failed",)),
    ],
)
def test_a_hook_of_a_wrong_signature_or_that_raises_is_an_error_naming_plugin_and_remedy(
    install: Install, tiny: Callable[..., Path], right: str, wrong: str, parts: tuple[str, ...]
) -> None:
    install(POLICY.replace('["flex"] if kind == "attention" else None', "None").replace(right, wrong))

    def ask() -> None:
        loaded = load_config(environ={})
        PluginRegistry.discover(loaded).hooks.report_header(loaded.config)
        LLM(str(tiny("llama")), dtype="float32", max_model_len=128)

    with pytest.raises(PluginError) as raised:
        ask()
    text = f"{raised.value} {raised.value.fix}"
    assert "hooks:acme" in text
    assert all(part in text for part in parts), text
    assert raised.value.fix


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "command",
    [
        ["explain"],
        ["doctor"],
        ["bench", "decode1", "--scale", "0.02", "--runs", "1"],
        ["conform", "logits_processor:min_p", "--level", "L0"],
    ],
)
def test_reports_begin_with_the_lines_of_plugins(
    install: Install, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    install(POLICY.replace('["flex"] if kind == "attention" else None', "None"))
    main(command)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "acme: site policy 7, dtype auto"
    assert len(lines) > 3


def test_planning_and_building_call_hooks_and_a_hundred_steps_call_none(
    install: Install, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install(POLICY.replace('["flex"] if kind == "attention" else None', "None"))
    calls: list[str] = []
    original = pluggy.PluginManager.__init__

    def watched(manager: pluggy.PluginManager, *arguments: Any, **keywords: Any) -> None:
        original(manager, *arguments, **keywords)
        manager.add_hookcall_monitoring(lambda name, *_: calls.append(name), lambda *_: None)

    monkeypatch.setattr(pluggy.PluginManager, "__init__", watched)
    llm = LLM(str(tiny("llama")), dtype="float32", max_model_len=128)
    for name in ("slotline_attention", "slotline_kv_spec", "slotline_rank_candidates", "slotline_engine_built"):
        assert name in calls
    (engine,) = sys.modules[module].engines
    assert isinstance(engine, Engine)
    assert engine is llm.engine
    calls.clear()
    steps = _counted_steps(monkeypatch)
    llm.generate(random_prompts([9, 4]), SamplingParams(max_tokens=101, ignore_eos=True))
    assert len(steps) > 100
    assert calls == []


def _counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    original = Engine.step

    def step(engine: Engine) -> Any:
        steps.append(1)
        return original(engine)

    monkeypatch.setattr(Engine, "step", step)
    return steps


def test_a_descriptor_of_a_group_that_is_another_slots_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strange.py").write_text("from slotline.backends.torch_sdpa import descriptor\n")
    pretend_installed(monkeypatch, tmp_path, "strange", {"slotline.drafter": {"torch": "strange:descriptor"}})
    registry = PluginRegistry.discover(PluginsConfig())
    with pytest.raises(PluginLoadError, match="its descriptor says 'attention:torch'"):
        registry.load(Kind.DRAFTER, "torch")
