"""What a descriptor declares is of the type that its fields say, or the plugin is refused when it is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from slotline.cli import main
from slotline.registry import contracts
from slotline.registry.capability import Align, Choice, Flag, GraphSupport, Level, Limit, Max, Range, Set
from slotline.registry.contracts import KVConnectorCapabilities, LogitsProcessorCapabilities
from slotline.registry.descriptor import ContractRange, Descriptor, Kind
from slotline.registry.errors import ContractError
from slotline.registry.loading import _CAPABILITIES

CLASSES = {kind: getattr(contracts, name) for kind, name in _CAPABILITIES.items()}
FLOATS = ("float32", "float32")
PAIRS = (Kind.ATTENTION, Kind.STATE)  # kinds whose dtypes are pairs


def made(kind: Kind, **values: Any) -> Any:
    """Capabilities with nothing but what they must have, and the values."""
    required = {
        item.name: Set((FLOATS,)) if item.name == "dtypes" and kind in PAIRS else Set(("cpu",))
        for item in attrs.fields(CLASSES[kind])
        if item.default is attrs.NOTHING
    }
    return CLASSES[kind](**{**required, **values})


FIELDS = [(kind, item.name) for kind, cls in CLASSES.items() for item in attrs.fields(cls)]


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_every_field_of_every_kind_refuses_what_is_not_of_its_type_and_names_itself(kind: Kind, name: str) -> None:
    made(kind)
    with pytest.raises(ContractError, match=rf"^{CLASSES[kind].__name__}\.{name} is <object .*, expected .*\n  fix: "):
        made(kind, **{name: object()})


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"sliding_window": True}, "write sliding_window=Flag(True)"),
        ({"sliding_window": Flag}, "correct sliding_window"),
        ({"devices": "cpu"}, "write devices=Set(('cpu',))"),
        ({"devices": ("cpu", "cuda")}, "write devices=Set(('cpu', 'cuda'))"),
        ({"devices": Set((1,))}, "correct devices"),
        ({"dtypes": Set(FLOATS)}, "correct dtypes"),
        ({"graphs": GraphSupport.ALWAYS}, "write graphs=Level(GraphSupport.ALWAYS)"),
        ({"query_len": 8}, "write query_len=Max(8)"),
        ({"head_sizes": 64}, "write head_sizes=Range(64, 64)"),
        ({"kernel_block_sizes": 16}, "write kernel_block_sizes=Align(exact=(16,))"),
        ({"layouts": "NHD"}, "write layouts=Choice(('NHD',))"),
        ({"writes_cache": Flag(True)}, "correct writes_cache"),
        ({"writes_cache": 1}, "correct writes_cache"),
        ({"priority": True}, "correct priority"),
        ({"lowest_score": "low"}, "correct lowest_score"),
        ({"min_compute_capability": 8}, "correct min_compute_capability"),
        ({"limits": Limit(when="mla", capability="graphs", offer=Flag(False))}, "correct limits"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_value_of_another_type_says_what_to_write(values: dict[str, Any], fix: str) -> None:
    with pytest.raises(ContractError) as raised:
        made(Kind.ATTENTION, **values)
    (name,) = values
    assert raised.value.message.startswith(f"AttentionCapabilities.{name} is ")
    assert fix in str(raised.value.fix)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Flag("yes"),
        lambda: Flag(1),  # type: ignore[arg-type]
        lambda: Set("cpu"),
        lambda: Set(5),  # type: ignore[arg-type]
        lambda: Set([["cpu"]]),
        lambda: Level(3),  # type: ignore[type-var]
        lambda: Level(True),  # type: ignore[type-var]
        lambda: Max("8"),  # type: ignore[arg-type]
        lambda: Align(16),  # type: ignore[arg-type]
        lambda: Align(multiple_of=0),
        lambda: Choice("NHD"),  # type: ignore[arg-type]
        lambda: Range(step=0),
        lambda: Range("1"),  # type: ignore[arg-type]
        lambda: Limit(when="mla", capability="graphs", offer=True),  # type: ignore[arg-type]
        lambda: KVConnectorCapabilities(devices=Set(None), saves="never"),  # type: ignore[arg-type]
        lambda: ContractRange("1", 2),  # type: ignore[arg-type]
        lambda: Descriptor(kind="attn", name="a", capabilities=None, factory="a:b"),  # type: ignore[arg-type]
        lambda: Descriptor(kind=Kind.LORA, name=5, capabilities=None, factory="a:b"),  # type: ignore[arg-type]
        lambda: Descriptor(kind=Kind.LORA, name="a", capabilities=None, factory="a:b", contract=1),  # type: ignore[arg-type]
        lambda: Descriptor(kind=Kind.LORA, name="a", capabilities=None, factory="a:b", probe=5),
    ],
)
def test_capability_classes_and_descriptors_look_at_their_own_fields(make: Any) -> None:
    with pytest.raises(ContractError) as raised:
        make()
    assert raised.value.fix


def test_a_list_where_a_tuple_is_declared_is_taken_as_one() -> None:
    offer = LogitsProcessorCapabilities(parameters=["a"], examples=[{"a": 1}])  # type: ignore[arg-type]
    assert (offer.parameters, offer.examples) == (("a",), ({"a": 1},))
    assert Align(exact=[16, 32]) == Align(exact=(16, 32))  # type: ignore[arg-type]


def test_what_can_be_compared_with_a_need_is_a_capability_whatever_its_class() -> None:
    class Own:
        def refusal(self, need: Any) -> str | None:
            return None

        def describe(self) -> str:
            return "anything"

    offer: Any = Own()
    assert made(Kind.ATTENTION, query_len=offer, lowest_score=-5).query_len is offer


SOURCE = """
from slotline.registry.capability import Set
from slotline.registry.contracts import AttentionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.ATTENTION,
    name="mine",
    capabilities=AttentionCapabilities(
        devices=Set(("cpu",)), dtypes=Set((("float32", "float32"),)), sliding_window=True
    ),
    factory="mine:build",
)
"""


@pytest.mark.parametrize("command", ["explain", "conform"])
def test_explain_and_conform_name_the_field_in_an_error_of_two_lines(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    target = f"{file}:descriptor"
    assert main([command, target] if command == "conform" else [command, "--set", f'plugins.inline=["{target}"]']) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0].endswith("ContractError: AttentionCapabilities.sliding_window is True, expected a Flag")
    assert error[1] == "  fix: write sliding_window=Flag(True)"
    assert len(error) == 2
