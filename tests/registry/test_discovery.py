"""Discovery: metadata first, imports only as needed, failures that say why."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from repository import ROOT

from slotline.registry import (
    ConfigError,
    ContractError,
    ContractRange,
    Descriptor,
    DeviceInfo,
    Flag,
    Kind,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    PluginRecord,
    PluginRegistry,
    PluginsConfig,
    PluginState,
    Set,
    Support,
    bind_contract,
    load_config,
    probe,
    resolve_factory,
    resolve_options,
)
from slotline.registry.contracts import LogitsProcessorCapabilities

PROCESSOR = Kind.LOGITS_PROCESSOR
CPU = DeviceInfo(type="cpu")
_numbers = itertools.count()

GOOD = """
from slotline.registry import Descriptor, Kind
from slotline.registry.contracts import LogitsProcessorCapabilities

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR, name="{name}", capabilities=LogitsProcessorCapabilities(), factory="{module}:build"
)


def build(context):
    return context
"""

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution on sys.path: real metadata files and a real module. Returns the module's name."""

    def run(
        distribution: str,
        name: str = "",
        code: str = GOOD,
        *,
        target: str = "descriptor",
        group: str = "slotline.logits_processor",
        version: str = "1.0",
        folder: str = "",
        entry: str = "",
    ) -> str:
        site = tmp_path / (folder or distribution)
        module = f"fake_plugin_{next(_numbers)}"
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        value = entry or (f"{module}:{target}" if target else module)
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n" if name else "")
        text = textwrap.dedent(code).replace("{name}", name).replace("{module}", module)
        (site / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(site))
        return module

    return run


def discover(rules: PluginsConfig | None = None, **keywords: Any) -> PluginRegistry:
    return PluginRegistry.discover(rules or PluginsConfig(), **keywords)


def row_of(registry: PluginRegistry, name: str, kind: Any = PROCESSOR) -> PluginRecord:
    (row,) = [row for row in registry.records() if (row.kind, row.name) == (kind, name)]
    return row


def test_our_own_plugins_are_found_like_any_others() -> None:
    rows = {row.label: row for row in discover().records()}
    assert rows["attention:torch"].distribution == "slotline"
    assert rows["attention:torch"].state is PluginState.AVAILABLE


def test_discovery_reads_metadata_without_importing(install: Install) -> None:
    module = install("my-dist", "quiet")
    registry = discover()
    row = row_of(registry, "quiet")
    assert (row.distribution, row.version, row.value) == ("my-dist", "1.0", f"{module}:descriptor")
    assert row.state is PluginState.AVAILABLE
    assert row.path.endswith("my-dist")
    assert module not in sys.modules
    descriptor = registry.load(PROCESSOR, "quiet")
    assert module in sys.modules
    assert row_of(registry, "quiet").state is PluginState.LOADED
    assert registry.load(PROCESSOR, "quiet") is descriptor
    assert registry.descriptor(PROCESSOR, "quiet") is descriptor
    registry.mark_selected(PROCESSOR, "quiet")
    assert row_of(registry, "quiet").state is PluginState.SELECTED
    assert registry.load(PROCESSOR, "quiet") is descriptor


def test_only_the_plugin_that_is_named_is_imported(install: Install) -> None:
    install("one", "wanted")
    other = install("two", "other")
    discover().load(PROCESSOR, "wanted")
    assert other not in sys.modules


def test_a_broken_candidate_is_a_row_with_its_error(install: Install) -> None:
    install("good", "good_one")
    install("bad", "bad_one", "import a_module_that_is_missing\n")
    registry = discover()
    assert "good_one" in {descriptor.name for descriptor in registry.candidates(PROCESSOR)}
    assert "bad_one" not in {descriptor.name for descriptor in registry.candidates(PROCESSOR)}
    row = row_of(registry, "bad_one")
    assert row.state is PluginState.FAILED
    assert row.error == "ModuleNotFoundError: No module named 'a_module_that_is_missing'"
    assert registry.load(PROCESSOR, "bad_one", required=False) is None


def test_a_broken_candidate_stops_a_strict_run(install: Install) -> None:
    install("bad", "bad_one", "1 / 0\n")
    with pytest.raises(PluginLoadError, match="bad_one"):
        discover(strict=True).candidates(PROCESSOR)


def test_a_named_plugin_that_fails_stops_with_its_cause(install: Install) -> None:
    module = install("bad-dist", "bad_one", "import a_module_that_is_missing\n")
    registry = discover()
    for _ in range(2):  # the second time it is known to be broken, and still says why
        with pytest.raises(PluginLoadError) as raised:
            registry.load(PROCESSOR, "bad_one", required=True)
        assert isinstance(raised.value.__cause__, ModuleNotFoundError)
        for part in ("logits_processor:bad_one", "bad-dist 1.0", f"{module}:descriptor", "'a_module_that_is_missing'"):
            assert part in str(raised.value)


@pytest.mark.parametrize(
    ("code", "target", "part"),
    [
        ("raise SystemExit(3)\n", "descriptor", "SystemExit: 3"),
        ("x = 1\n", "descriptor", "has no attribute 'descriptor'"),
        ("descriptor = 3\n", "descriptor", "3 is not a descriptor"),
        ("def descriptor():\n    return 3\n", "descriptor", "is not a descriptor"),
        ("def descriptor():\n    raise KeyError('lost')\n", "descriptor", "KeyError: 'lost'"),
        ("class Plain:\n    pass\n", "Plain", "is not a descriptor"),
        (GOOD.replace('"{name}"', '"renamed"'), "descriptor", "says 'logits_processor:renamed'"),
        (GOOD.replace("Kind.LOGITS_PROCESSOR", "Kind.LORA"), "descriptor", "must be LoraCapabilities, not Logits"),
        (GOOD.replace("LogitsProcessorCapabilities()", "None"), "descriptor", "must be LogitsProcessorCapabilities"),
        (GOOD.replace('"{module}:build"', '""'), "descriptor", "names no factory"),
        (GOOD.replace('"{name}"', '"a b"'), "descriptor", "use letters, digits"),
    ],
)
def test_what_is_no_proper_descriptor_is_a_load_error(install: Install, code: str, target: str, part: str) -> None:
    install("bad", "odd", code, target=target)
    with pytest.raises(PluginLoadError) as raised:
        discover().load(PROCESSOR, "odd")
    assert part in str(raised.value)


@pytest.mark.parametrize("entry", ["no colon", "x:", ":y", "a b:c"])
def test_an_entry_point_that_is_no_path_is_a_load_error(install: Install, entry: str) -> None:
    install("bad", "odd", entry=entry)
    with pytest.raises(PluginLoadError, match="odd"):
        discover().load(PROCESSOR, "odd")


def test_a_class_with_a_descriptor_is_its_own_factory(install: Install) -> None:
    code = GOOD.replace('"{module}:build"', '""') + "\n\nclass Processor:\n    descriptor = descriptor\n"
    module = install("my-dist", "by_class", code, target="Processor")
    descriptor = discover().load(PROCESSOR, "by_class")
    assert resolve_factory(descriptor) is sys.modules[module].Processor


def test_a_function_may_return_the_descriptor(install: Install) -> None:
    install("my-dist", "by_function", GOOD + "\n\ndef offer():\n    return descriptor\n", target="offer")
    assert discover().load(PROCESSOR, "by_function").name == "by_function"


def test_an_unknown_name_suggests_a_similar_one_and_lists_all(install: Install) -> None:
    install("my-dist", "temperature_x")
    with pytest.raises(PluginNotFoundError) as raised:
        discover().load(PROCESSOR, "temprature_x")
    assert "there is no logits_processor plugin 'temprature_x'; did you mean 'temperature_x'?" in str(raised.value)
    assert "no_repeat_ngram, penalties, speech_rules, temperature_x, thinking_budget" in str(raised.value)
    assert discover().load(PROCESSOR, "temprature_x", required=False) is None


def test_two_distributions_with_one_name_are_an_error_naming_both(install: Install) -> None:
    install("first-dist", "same")
    install("second-dist", "same", version="2.5")
    with pytest.raises(PluginConflictError) as raised:
        discover()
    for part in ("'logits_processor:same'", "first-dist 1.0", "second-dist 2.5", "[plugins] distribution"):
        assert part in str(raised.value)


def test_one_name_in_two_kinds_is_no_conflict(install: Install) -> None:
    install("first-dist", "same")
    install("second-dist", "same", group="slotline.lora")
    assert "same" in discover().names(PROCESSOR)
    assert "same" in discover().names(Kind.LORA)


@pytest.mark.parametrize("key", ["same", "logits_processor:same"])
def test_the_configuration_decides_between_two_distributions(install: Install, key: str) -> None:
    first = install("first-dist", "same")
    install("second-dist", "same")
    registry = discover(PluginsConfig(distribution={key: "First_Dist"}))
    assert registry.load(PROCESSOR, "same").factory == f"{first}:build"
    states = {row.distribution: row.state for row in registry.records() if row.name == "same"}
    assert states == {"first-dist": PluginState.LOADED, "second-dist": PluginState.SHADOWED}
    assert registry.warnings == ()


def test_a_distribution_that_does_not_offer_the_plugin_is_an_error(install: Install) -> None:
    install("first-dist", "same")
    with pytest.raises(PluginNotFoundError, match="from 'third-dist', which does not offer it"):
        discover(PluginsConfig(distribution={"same": "third-dist"}))


def test_blocking_by_kind_settles_nothing_but_blocking_both_does(install: Install) -> None:
    install("first-dist", "same")
    install("second-dist", "same")
    registry = discover(PluginsConfig(block=("same",)))
    assert {row.state for row in registry.records() if row.name == "same"} == {PluginState.BLOCKED}


def test_a_list_of_plugins_shows_a_conflict_as_rows(install: Install) -> None:
    install("first-dist", "same")
    install("second-dist", "same")
    registry = discover(tolerant=True)
    rows = [row for row in registry.records() if row.name == "same"]
    assert [row.state for row in rows] == [PluginState.FAILED] * 2
    assert all("first-dist 1.0" in row.error and "second-dist 1.0" in row.error for row in rows)
    with pytest.raises(PluginConflictError):
        registry.load(PROCESSOR, "same")


def test_one_distribution_seen_twice_is_no_conflict(install: Install) -> None:
    install("My.Dist", "same", folder="old")
    newest = install("my-dist", "same", folder="new", version="1.1")  # first on the path
    registry = discover()
    assert row_of(registry, "same").version == "1.1"
    assert registry.load(PROCESSOR, "same").factory == f"{newest}:build"


def test_a_named_plugin_with_another_contract_is_an_error_that_says_who_must_move(install: Install) -> None:
    code = GOOD.replace("import Descriptor", "import ContractRange, Descriptor")
    install("future", "too_new", code.replace('build"\n', 'build", contract=ContractRange(7, 9)\n'))
    registry = discover()
    with pytest.raises(ContractError) as raised:
        registry.load(PROCESSOR, "too_new")
    assert "speaks contract 7..9" in str(raised.value)
    assert "upgrade slotline" in str(raised.value)
    row = row_of(registry, "too_new")
    assert row.state is PluginState.INCOMPATIBLE
    assert "too_new" not in {descriptor.name for descriptor in registry.candidates(PROCESSOR)}


def test_block_lists_keep_a_plugin_out_by_name_or_label(install: Install) -> None:
    module = install("my-dist", "mine")
    for registry in (
        discover(PluginsConfig(block=("mine",))),
        discover(PluginsConfig(block=("logits_processor:mine",))),
        discover(blocked=["mine"]),
    ):
        assert row_of(registry, "mine").state is PluginState.BLOCKED
        assert "mine" not in registry.names(PROCESSOR)
        with pytest.raises(PluginError, match="is blocked: named in a block list"):
            registry.load(PROCESSOR, "mine")
    assert module not in sys.modules
    assert row_of(discover(PluginsConfig(block=("lora:mine",))), "mine").state is PluginState.AVAILABLE


def test_an_allow_list_concerns_other_distributions_only(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("one", "mine")
    install("two", "theirs")
    monkeypatch.setenv("SLOTLINE_PLUGINS", "mine,absent")
    registry = discover(load_config().plugin_rules)
    assert row_of(registry, "mine").state is PluginState.AVAILABLE
    assert row_of(registry, "theirs").state is PluginState.BLOCKED
    assert row_of(registry, "penalties").state is PluginState.AVAILABLE
    assert registry.warnings == ("[plugins] allow names 'absent', which is not installed",)
    assert PluginRegistry.discover().records() == registry.records(), "without rules, the environment counts"


def test_required_distributions_are_checked_all_at_once(install: Install) -> None:
    install("present", version="1.5")
    discover(PluginsConfig(require=("present>=1.2", "slotline")))
    with pytest.raises(PluginError) as raised:
        discover(PluginsConfig(require=("present>=2", "absent-dist", "present", "not a requirement!")))
    text = str(raised.value)
    for part in ("present>=2: version 1.5 is installed", "absent-dist: not installed", "is not a requirement"):
        assert part in text
    assert "pip install 'present>=2' 'absent-dist'" in text


def test_a_development_version_satisfies_a_requirement(install: Install) -> None:
    install("present", version="1.5.dev3")
    discover(PluginsConfig(require=("present>=1.2",)))


def inline(tmp_path: Path, code: str = GOOD, name: str = "inline_one") -> Path:
    path = tmp_path / f"{name}.py"
    text = code.replace("{name}", name).replace('"{module}:build"', '""')
    path.write_text(text + "\n\nclass Mine:\n    descriptor = descriptor\n")
    return path


def test_an_inline_plugin_is_registered_by_its_own_kind_and_name(tmp_path: Path) -> None:
    path = inline(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text('plugins = ["./inline_one.py:Mine"]\n')
    loaded = load_config(config, environ={})
    registry = discover(loaded.plugin_rules, inline=loaded.inline_plugins)
    row = row_of(registry, "inline_one")
    assert row.inline
    assert (row.state, row.path, row.distribution) == (PluginState.LOADED, str(path), "")
    descriptor = registry.load(PROCESSOR, "inline_one")
    assert resolve_factory(descriptor).__name__ == "Mine"
    assert descriptor in registry.candidates(PROCESSOR)


def test_a_whole_configuration_brings_its_rules_inline_plugins_and_tables(tmp_path: Path) -> None:
    inline(tmp_path)
    config = tmp_path / "run.toml"
    text = '[plugins]\ninline = ["inline_one.py:Mine"]\nblock = ["penalties"]\n'
    config.write_text(text + "[backend.absent]\n[logits_processors.inline_one]\n[logits_processors.penalties]\n")
    registry = PluginRegistry.discover(load_config(config, environ={}))
    assert registry.record(PROCESSOR, "inline_one").state is PluginState.LOADED
    assert registry.record(PROCESSOR, "penalties").state is PluginState.BLOCKED
    assert registry.warnings == (f"{config}:4: backend.absent: no attention or state plugin 'absent' is installed",)
    with pytest.raises(ConfigError, match="'absent' is installed"):
        PluginRegistry.discover(load_config(config, environ={}, overrides=["strict=true"]))
    config.write_text(text + "[logits_processors.inline_oen]\n")
    with pytest.raises(ConfigError, match="did you mean 'inline_one'"):
        PluginRegistry.discover(load_config(config, environ={}))
    with pytest.raises(PluginNotFoundError, match="there is no lora plugin 'x'"):
        registry.record(Kind.LORA, "x")


def test_an_inline_plugin_shadows_nothing(tmp_path: Path, install: Install) -> None:
    install("my-dist", "inline_one")
    with pytest.raises(PluginConflictError, match=r"my-dist 1\.0 .* the inline plugin .*inline_one\.py:Mine"):
        discover(inline=[f"{inline(tmp_path)}:Mine"])
    with pytest.raises(PluginConflictError):
        discover(PluginsConfig(block=("logits_processor:nothing",)), inline=[f"{inline(tmp_path)}:Mine"] * 2)


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("{path}", "is not of the form 'file.py:attribute'"),
        ("{path}:", "is not of the form 'file.py:attribute'"),
        ("{path}:Mien", "has no attribute 'Mien'"),
        ("{path}:build", "TypeError"),
        ("{path}x:Mine", "there is no file"),
    ],
)
def test_a_wrong_inline_plugin_says_what_is_wrong(tmp_path: Path, target: str, part: str) -> None:
    with pytest.raises(PluginLoadError) as raised:
        discover(inline=[target.replace("{path}", str(inline(tmp_path)))])
    assert part in str(raised.value)


def test_an_inline_plugin_that_fails_keeps_its_cause(tmp_path: Path) -> None:
    path = inline(tmp_path, "import a_module_that_is_missing\n")
    with pytest.raises(PluginLoadError, match="a_module_that_is_missing") as raised:
        discover(inline=[f"{path}:Mine"])
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_two_inline_plugins_of_one_file_share_its_module(tmp_path: Path) -> None:
    path = inline(tmp_path)
    path.write_text(path.read_text() + "\n\nfrom attrs import evolve\n\n" + "class Other:\n    pass\n\n\n")
    path.write_text(path.read_text() + "Other.descriptor = evolve(descriptor, name='other', factory=Mine)\n")
    registry = discover(inline=[f"{path}:Mine", f"{path}:Other"])
    mine = resolve_factory(registry.load(PROCESSOR, "inline_one"))
    assert resolve_factory(registry.load(PROCESSOR, "other")) is mine


def test_an_inline_plugin_is_read_again_each_time(tmp_path: Path) -> None:
    first = discover(inline=[f"{inline(tmp_path)}:Mine"]).load(PROCESSOR, "inline_one")
    second = discover(inline=[f"{inline(tmp_path)}:Mine"]).load(PROCESSOR, "inline_one")
    assert first is not second


HOOKS = """
from slotline.registry import Descriptor, Kind, PlanNote, hookimpl
from slotline.registry.contracts import LogitsProcessorCapabilities


@hookimpl
def slotline_register(registrar):
    registrar.add(
        Descriptor(
            kind=Kind.LOGITS_PROCESSOR,
            name="by_hook",
            capabilities=LogitsProcessorCapabilities(),
            factory="json:loads",
        )
    )


@hookimpl
def slotline_review_plan(plan):
    return [PlanNote("too large", veto=True)] if plan > 3 else [PlanNote(f"saw {plan}")]


@hookimpl
def slotline_report_header(config):
    return f"head {config}"
"""


def test_a_hook_plugin_registers_reviews_and_reports(install: Install) -> None:
    install("hook-dist", "helper", HOOKS, target="", group="slotline.hooks")
    own = ("hooks:cpu_linear", "hooks:cpu_threads")  # they want a real configuration
    registry = discover(PluginsConfig(block=own))
    assert registry.load(PROCESSOR, "by_hook").name == "by_hook"
    assert row_of(registry, "by_hook").distribution == "hook-dist"
    assert row_of(registry, "helper", "hooks").state is PluginState.LOADED
    assert registry.hooks.labels() == ("hooks:helper",)
    ((label, note),) = registry.hooks.review_plan(9, None)
    assert (label, note.text, note.veto) == ("hooks:helper", "too large", True)
    assert not registry.hooks.review_plan(1, None)[0][1].veto
    assert registry.hooks.report_header("c") == ("head c",)


def test_a_blocked_hook_plugin_is_not_imported(install: Install) -> None:
    module = install("hook-dist", "helper", HOOKS, target="", group="slotline.hooks")
    registry = discover(PluginsConfig(block=("hooks:helper",)))
    assert module not in sys.modules
    assert "by_hook" not in registry.names(PROCESSOR)
    assert registry.hooks.review_plan(1, None) == ()


def test_what_a_hook_registers_obeys_the_same_rules(install: Install) -> None:
    install("hook-dist", "helper", HOOKS, target="", group="slotline.hooks")
    assert row_of(discover(PluginsConfig(block=("by_hook",))), "by_hook").state is PluginState.BLOCKED
    install("other-dist", "by_hook")
    with pytest.raises(PluginConflictError, match=r"other-dist 1\.0 .* hook-dist 1\.0"):
        discover()


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (HOOKS.replace("def slotline_review_plan", "def slotline_reveiw_plan"), "slotline_reveiw_plan"),
        (HOOKS.replace("slotline_report_header(config)", "slotline_report_header(conf)"), "conf"),
        ("x = 1\n", "implements no hook"),
    ],
)
def test_a_misspelt_hook_is_an_error_naming_it(install: Install, code: str, part: str) -> None:
    install("hook-dist", "helper", code, target="", group="slotline.hooks")
    with pytest.raises(PluginLoadError) as raised:
        discover()
    assert part in str(raised.value)
    assert "hooks:helper" in str(raised.value)
    registry = discover(tolerant=True)
    assert row_of(registry, "helper", "hooks").state is PluginState.FAILED
    assert registry.hooks.labels() == ("hooks:cpu_linear", "hooks:cpu_threads")


def test_a_hook_plugin_that_breaks_is_a_row_and_stops_a_strict_run(install: Install) -> None:
    install("hook-dist", "helper", HOOKS.replace("registrar.add(", "registrar.ad("), target="", group="slotline.hooks")
    install("other-dist", "missing", "import a_module_that_is_missing\n", target="", group="slotline.hooks")
    registry = discover()
    assert "AttributeError" in row_of(registry, "helper", "hooks").error
    assert "ModuleNotFoundError" in row_of(registry, "missing", "hooks").error
    assert registry.hooks.labels() == ("hooks:cpu_linear", "hooks:cpu_threads")
    with pytest.raises(PluginError):
        discover(strict=True)


def test_a_review_that_raises_or_returns_nonsense_names_the_plugin(install: Install) -> None:
    code = HOOKS.replace('[PlanNote("too large", veto=True)]', '["no note"]')
    install("hook-dist", "helper", code, target="", group="slotline.hooks")
    registry = discover()
    with pytest.raises(PluginError, match="'hooks:helper' returned 'no note'"):
        registry.hooks.review_plan(9, None)
    with pytest.raises(PluginError, match="slotline_review_plan of 'hooks:helper' failed: TypeError") as raised:
        registry.hooks.review_plan("text", None)
    assert isinstance(raised.value.__cause__, TypeError)


def test_an_unhashable_hook_plugin_is_an_error(install: Install) -> None:
    code = (
        HOOKS + "\n\nclass Plugin(dict):\n    slotline_report_header = slotline_report_header\n\n\nplugin = Plugin()\n"
    )
    install("hook-dist", "helper", code, target="plugin", group="slotline.hooks")
    with pytest.raises(PluginLoadError, match="unhashable"):
        discover()


@frozen
class Options:
    n: int = 1


def descriptor(**changes: Any) -> Descriptor[Any]:
    base: dict[str, Any] = {"kind": PROCESSOR, "name": "x", "capabilities": LogitsProcessorCapabilities()}
    return Descriptor(**{**base, "factory": "json:loads", **changes})


def test_factories_and_options_resolve_from_objects_and_paths() -> None:
    import json

    assert resolve_factory(descriptor()) is json.loads
    assert resolve_factory(descriptor(factory="json:decoder.JSONDecoder")) is json.JSONDecoder
    assert resolve_factory(descriptor(factory=len)) is len
    assert resolve_options(descriptor()) is None
    assert resolve_options(descriptor(options=Options)) is Options
    assert resolve_options(descriptor(options="slotline.registry.config.schema:CacheConfig")).__name__ == "CacheConfig"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "factory", ["json", "json:absent", "absent_module:x", "json:decoder.absent", 3, "json:__doc__"]
)
def test_a_factory_that_cannot_be_had_is_a_load_error_naming_the_plugin(factory: Any) -> None:
    with pytest.raises(PluginLoadError, match="logits_processor:x"):
        resolve_factory(descriptor(factory=factory))


@pytest.mark.parametrize("options", [dict, 3, "json:loads", "json:absent"])
def test_an_options_class_must_be_an_attrs_class(options: Any) -> None:
    with pytest.raises(PluginLoadError, match="logits_processor:x"):
        resolve_options(descriptor(options=options))


def test_the_highest_common_contract_is_bound() -> None:
    assert bind_contract(descriptor(contract=ContractRange(1, 5))) == 1
    with pytest.raises(
        ContractError, match=r"speaks contract 2\.\.5 of kind 'logits_processor', this slotline speaks 1"
    ):
        bind_contract(descriptor(contract=ContractRange(2, 5)))


def test_a_probe_narrows_or_refuses() -> None:
    wide = LogitsProcessorCapabilities(devices=Set(("cpu", "cuda")), speculation=Flag(True))
    narrow = LogitsProcessorCapabilities(devices=Set(("cpu",)), speculation=Flag(False))
    assert probe(descriptor(capabilities=wide), CPU) is wide
    assert probe(descriptor(capabilities=wide, probe=lambda device: narrow), CPU) is narrow
    assert probe(descriptor(capabilities=wide, probe=lambda device: f"not on {device.type}"), CPU) == "not on cpu"


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda device: LogitsProcessorCapabilities(devices=Set(None)), "devices is any, declared cpu"),
        (lambda device: LogitsProcessorCapabilities(devices=Set(("cpu", "xpu"))), "devices is cpu, xpu, declared cpu"),
        (
            lambda device: LogitsProcessorCapabilities(devices=Set(("cpu",)), speculation=Flag(Support.FULL)),
            "speculation is supported, declared unsupported",
        ),
        (lambda device: None, "probe returned NoneType"),
        (lambda device: 1 / 0, "probe failed: ZeroDivisionError: division by zero"),
        ("absent_module:probe", "probe failed: the probe of logits_processor:x: cannot load 'absent_module:probe'"),
        (lambda device: "", "refuses without a reason"),
    ],
)
def test_a_probe_that_widens_or_breaks_is_a_refusal_with_the_reason(function: Any, part: str) -> None:
    answer = probe(descriptor(capabilities=LogitsProcessorCapabilities(devices=Set(("cpu",))), probe=function), CPU)
    assert isinstance(answer, str)
    assert part in answer


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_discovery_and_configuration_import_no_torch() -> None:
    code = """
        import sys
        import slotline.registry
        eager = set(sys.modules)
        from slotline.registry import *
        registry = PluginRegistry.discover()
        registry.option_classes()
        json_schema(); load_config(environ={})
        print("torch" in sys.modules, "numpy" in sys.modules, "cattrs" in eager, "pluggy" in eager)
    """
    assert run_python(textwrap.dedent(code)) == "False False False False"


def test_every_public_name_resolves() -> None:
    import slotline.registry as registry

    assert all(getattr(registry, name) is not None for name in registry.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        registry.absent  # noqa: B018


def test_a_checkout_that_is_not_installed_says_so(tmp_path: Path) -> None:
    for name in ("attr", "attrs", "pluggy", "packaging", "cattrs", "typing_extensions"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin)
        source = source.parent if source.name == "__init__.py" else source
        (tmp_path / source.name).symlink_to(source)
    folder = ROOT / "registry"
    code = f"""
        import sys
        sys.path += [{str(folder)!r}, {str(tmp_path)!r}]
        from slotline.registry import PluginError, PluginRegistry
        try:
            PluginRegistry.discover()
        except PluginError as error:
            print(error)
    """
    text = run_python(textwrap.dedent(code), "-I", "-S")
    assert text.startswith("slotline is not installed: its own plugins come from entry points")
    assert "pip install -e ." in text
