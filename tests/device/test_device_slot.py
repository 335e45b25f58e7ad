"""The device slot: which device a name means, and what is told of a name that means none."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_cases import pretend_installed
from repository import TESTS

from slotline.core import LLM
from slotline.core.device import TorchDevice, TorchOps
from slotline.core.device.torch_device import clock_of, compiler_of
from slotline.registry import (
    ConfigError,
    ContractError,
    Descriptor,
    DeviceInfo,
    Flag,
    Kind,
    PluginConflictError,
    PluginRegistry,
    Set,
    load_config,
    probe,
)
from slotline.registry.capability import AnyOf
from slotline.registry.contracts import AttentionCapabilities, DeviceCapabilities, DeviceContext
from slotline.registry.devices import Devices

PACKAGE = """
from slotline.core.device import TorchDevice
from slotline.registry import Descriptor, Flag, Kind
from slotline.registry.contracts import DeviceCapabilities


class Factory:
    def count(self):
        return 2

    def __call__(self, context):
        return TorchDevice(f"{context.name}:{context.index or 0}", "cpu")


factory = Factory()
offer = DeviceCapabilities(priority=7, compatible_with=("cpu",))
descriptor = Descriptor(kind=Kind.DEVICE, name="acme", capabilities=offer, factory=factory)
unsound = Descriptor(
    kind=Kind.DEVICE, name="unsound", capabilities=offer, factory=lambda context: TorchDevice("x", "cpu")
)


class Lean:
    def argmax(self, logits):
        return logits.argmax(-1)


class Early:

    def __init__(self):
        self._base = TorchDevice("early", "cpu")

    def __getattr__(self, name):
        if name in ("compiler", "time_point"):
            raise AttributeError(name)
        return getattr(self._base, name)


early = Descriptor(kind=Kind.DEVICE, name="early", capabilities=offer, factory=lambda context: Early())


lean = Descriptor(
    kind=Kind.DEVICE, name="lean", capabilities=offer, factory=lambda context: TorchDevice("lean", "cpu", Lean())
)
"""

Write = Callable[[str], str]


@pytest.fixture
def inline(tmp_path: Path) -> Callable[[str], PluginRegistry]:
    """Return a registry with one inline device of `PACKAGE`."""
    file = tmp_path / "acme_device.py"
    file.write_text(PACKAGE, encoding="utf-8")

    def found(attribute: str) -> PluginRegistry:
        return PluginRegistry.discover(load_config(environ={}), inline=[f"{file}:{attribute}"])

    return found


def test_a_name_means_the_first_device_and_a_number_its_own(inline: Callable[[str], PluginRegistry]) -> None:
    devices = Devices(inline("descriptor"))
    assert [devices.named(name).name for name in ("acme", "acme:0", "acme:1", "cpu")] == [
        "acme:0",
        "acme:0",
        "acme:1",
        "cpu",
    ]
    assert devices.named("acme") is devices.named("acme")
    assert devices.count("acme") == 2


def test_auto_is_the_device_of_the_highest_priority_that_is_there(inline: Callable[[str], PluginRegistry]) -> None:
    devices = Devices(inline("descriptor"))
    expected = "cuda" if devices.count("cuda") else "acme:0"
    assert devices.named("auto").name == expected
    assert [name for name in devices.there() if not name.startswith("cuda")] == ["acme:0", "acme:1", "cpu"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("acme:7", "device = 'acme:7' is not there: 2 acme devices\n  fix: use one that `slotline doctor` lists"),
        ("xpu", "(?s)device = 'xpu' is not known.*fix: use 'auto' or one of 'acme', 'cpu', 'cuda'.*slotline.device"),
        ("acme:one", "device = 'acme:one' is not known"),
        ("acne", "did you mean 'acme'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_a_remedy(
    asked: str, message: str, inline: Callable[[str], PluginRegistry]
) -> None:
    with pytest.raises(ConfigError, match=message):
        Devices(inline("descriptor")).named(asked)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("unsound", "device:unsound of the inline plugin .*its name is 'x', expected 'unsound'"),
        ("lean", "device:lean of the inline plugin .*Lean has no method 'argmax_checked'"),
    ],
)
def test_an_unsound_device_is_an_error_that_names_plugin_and_remedy(
    attribute: str, message: str, inline: Callable[[str], PluginRegistry]
) -> None:
    with pytest.raises(ContractError, match=f"(?s){message}.*fix: .*name another in device"):
        Devices(inline(attribute)).named(attribute)


def test_two_packages_that_offer_one_device_are_named(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"acme{number}.py").write_text(PACKAGE, encoding="utf-8")
    with pytest.raises(PluginConflictError, match=r"(?s)'device:acme' is offered by .*acme1\.py.* and .*acme2\.py"):
        PluginRegistry.discover(
            load_config(environ={}), inline=[f"{tmp_path}/acme{number}.py:descriptor" for number in (1, 2)]
        )


def test_two_installed_packages_that_offer_one_device_are_named_until_the_configuration_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_twice.py").write_text(PACKAGE, encoding="utf-8")
    for name in ("acme-one", "acme-two"):
        pretend_installed(monkeypatch, tmp_path, name, {"slotline.device": {"acme": "acme_twice:descriptor"}})
    monkeypatch.delitem(sys.modules, "acme_twice", raising=False)
    with pytest.raises(PluginConflictError) as raised:
        LLM(device="acme")
    said = str(raised.value)
    assert all(part in said for part in ("'device:acme'", "acme-one 0.1.0", "acme-two 0.1.0", "distribution")), said
    chosen = load_config(values={"plugins.distribution": {"device:acme": "acme-two"}}, environ={})
    registry = PluginRegistry.discover(chosen)
    assert registry.source(registry.load(Kind.DEVICE, "acme")) == "acme-two 0.1.0"


def test_an_engine_on_a_device_that_is_not_installed_names_the_slot_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"device = 'acme:0' is not known") as raised:
        LLM(device="acme:0")
    assert "a package brings another by the entry-point group 'slotline.device'" in str(raised.value)


def test_graphs_are_asked_of_the_descriptor(inline: Callable[[str], PluginRegistry]) -> None:
    devices = Devices(inline("descriptor"))
    assert not devices.info(devices.named("acme")).graphs.support
    assert DeviceInfo(type="cuda").graphs.support  # as contract 1 had it
    assert not DeviceInfo(type="acme").graphs.support


def test_plugins_of_compatible_devices_are_candidates_and_probed_as_if_on_one() -> None:
    info = DeviceInfo(type="acme", compatible_with=("cpu",))
    assert info.need == AnyOf(("acme", "cpu"))
    assert Set(("cpu",)).refusal(info.need) is None
    assert Set(("cuda",)).refusal(info.need) == "needs acme or cpu, offers cuda"
    seen: list[str] = []

    def asked(device: DeviceInfo) -> AttentionCapabilities:
        seen.append(device.type)
        return AttentionCapabilities(devices=Set(("cpu",)), dtypes=Set((("float32", "float32"),)))

    plugin = Descriptor(
        kind=Kind.ATTENTION,
        name="one",
        capabilities=AttentionCapabilities(devices=Set(("cpu",)), dtypes=Set((("float32", "float32"),))),
        factory="json:loads",
        probe=asked,
    )
    probe(plugin, info)
    probe(plugin, DeviceInfo(type="acme"))
    assert seen == ["cpu", "acme"]


def test_capabilities_are_checked_like_those_of_other_slots() -> None:
    with pytest.raises(ContractError, match=r"DeviceCapabilities.graphs is True, expected a Flag"):
        DeviceCapabilities(graphs=True)  # type: ignore[arg-type]
    assert DeviceCapabilities(graphs=Flag(True)).graphs.support


def test_the_base_class_is_a_device_with_torchs_operations() -> None:
    device = TorchDevice("acme:0", "cpu")
    assert isinstance(device.ops, TorchOps)
    assert device.info().type == "acme"
    assert 0 < device.memory().free <= device.memory().total
    assert DeviceContext(contract=1, name="acme").index is None


def test_a_device_may_lack_a_compiler_and_a_clock(inline: Callable[[str], PluginRegistry]) -> None:
    device = Devices(inline("early")).named("early")
    assert not hasattr(device, "compiler")
    assert compiler_of(device) is None
    first, later = clock_of(device)(), clock_of(device)()
    assert first.passed
    assert 0 <= first.until(later) < 60


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (TESTS.parent / "docs" / "devices.md").read_text(encoding="utf-8")
    described, made, operations = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    package = tmp_path / "acme_device"
    package.mkdir()
    (package / "__init__.py").write_text(described, encoding="utf-8")
    (package / "device.py").write_text(made, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_device", raising=False)
    monkeypatch.delitem(sys.modules, "acme_device.device", raising=False)
    registry = PluginRegistry.discover(load_config(environ={}), inline=[f"{package}/__init__.py:descriptor"])
    assert Devices(registry).named("acme:1").name == "acme:1"
    exec(operations, {})
    for name in ("acme_device", "acme_device.device"):
        sys.modules.pop(name, None)
