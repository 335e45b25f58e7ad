"""The contract checks of all six kinds: what they pass, what they refuse, and which capabilities they ask beyond."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import define, evolve, frozen

from slotline.registry.capability import Align, Choice, Flag, GraphSupport, Limit, Max, Range, Set
from slotline.registry.capability import Level as Rung
from slotline.registry.contracts.attention import AttentionCapabilities
from slotline.registry.contracts.drafter import DrafterCapabilities
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import ContractRange, DeviceInfo, Kind
from slotline.registry.records import PluginRecord
from slotline.testing import import_check
from slotline.testing.check import CHECK_MODULES, Family, Level, all_checks
from slotline.testing.reference.attention import backend
from slotline.testing.reference.attention import descriptor as reference
from slotline.testing.runner import Outcome, Record, check_plugin

CPU = DeviceInfo(type="cpu")
BUILT_IN = (
    "attention:torch",
    "attention:cpu",
    "kv_spec:full",
    "drafter:ngram",
    "logits_processor:logit_bias",
    "logits_processor:min_tokens",
    "logits_processor:penalties",
)


def contract_records(target: Any, family: str = "", **options: Any) -> dict[str, list[Record]]:
    """The records of level 0 by the end of the check's id."""
    options.setdefault("device", CPU)
    records = check_plugin(target, level=Level.CONTRACT, only=lambda item: family in ("", item.family), **options)
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.id.partition(".")[2], []).append(record)
    return found


def outcome(target: Any, name: str, **options: Any) -> Record:
    (record,) = contract_records(target, **options)[name]
    return record


@pytest.mark.parametrize("kind", CHECK_MODULES)
def test_each_kind_has_the_contract_checks_and_a_family_of_refusals(kind: Kind) -> None:
    items = [item for item in all_checks(kind) if item.level is Level.CONTRACT]
    names = {item.id.partition(".")[2] for item in items}
    assert names >= {f"contract.{name}" for name in ("descriptor", "capabilities", "methods", "versions", "options")}
    assert any(item.family is Family.REFUSED for item in items)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_plugins_hold_the_contract(name: str) -> None:
    records = [record for group in contract_records(name).values() for record in group]
    assert [(record.key, record.reason) for record in records if record.bad] == []
    assert {record.id for record in records if record.outcome is Outcome.PASSED} >= {
        f"{name.partition(':')[0]}.contract.{check}" for check in ("no_torch", "methods", "unknown_context_fields")
    }


@pytest.mark.parametrize(
    ("module", "expected"), [("", Outcome.PASSED), (".backend", Outcome.FAILED)], ids=["light", "heavy"]
)
def test_the_import_check_sees_torch_behind_an_entry_point(
    monkeypatch: pytest.MonkeyPatch, module: str, expected: Outcome
) -> None:
    row = PluginRecord(
        kind=Kind.ATTENTION,
        name=reference.name,
        value=f"slotline.testing.reference.attention{module}:descriptor",
    )
    monkeypatch.setattr(import_check, "installed_records", lambda: [row])
    monkeypatch.setattr(backend, "descriptor", reference, raising=False)
    assert outcome(row.value, "contract.no_torch").outcome is expected


def test_an_object_is_not_asked_for_its_module() -> None:
    record = outcome(reference, "contract.no_torch")
    assert record.outcome is Outcome.SKIPPED
    assert "entry point" in record.reason


# --- versions


def test_a_plugin_for_contract_1_stays_bound_when_the_host_speaks_1_to_2() -> None:
    assert outcome(reference, "contract.versions").outcome is Outcome.PASSED


def test_a_plugin_for_contracts_1_to_2_is_bound_to_1_today() -> None:
    record = outcome(evolve(reference, contract=ContractRange(1, 2)), "contract.versions")
    assert record.outcome is Outcome.PASSED


# --- options


@frozen
class Options:
    parts: int = 1


@define
class Loose:
    parts: int = 1


@pytest.mark.parametrize(("options", "expected"), [(Options, Outcome.PASSED), (Loose, Outcome.FAILED)])
def test_options_must_be_frozen(options: type, expected: Outcome) -> None:
    assert outcome(evolve(reference, options=options), "contract.options").outcome is expected


# --- limits and probes


@pytest.mark.parametrize(
    ("when", "capability", "fault"),
    [
        ("sliding_window", "graphs", ""),
        ("attention_types=cross", "graphs", ""),
        ("speculation", "query_len", ""),
        ("sliding_windows", "graphs", "sliding_windows"),
        ("sliding_window", "graph", "'graph'"),
        ("head_sizes", "graphs", "head_sizes"),
        ("unknown=1", "graphs", "unknown=1"),
    ],
)
def test_limits_name_what_there_is(when: str, capability: str, fault: str) -> None:
    limit = Limit(when=when, capability=capability, offer=Rung(GraphSupport.NEVER))
    changed = evolve(reference, capabilities=evolve(reference.capabilities, limits=(limit,)))
    record = outcome(changed, "contract.limits")
    assert (record.outcome is Outcome.FAILED) == bool(fault)
    assert fault in record.reason


def test_a_probe_may_narrow_and_refuse() -> None:
    def probe(device: DeviceInfo) -> Any:
        return reference.capabilities if device.type == "cpu" else f"no kernels for {device.type}"

    assert outcome(evolve(reference, probe=probe), "contract.probe").outcome is Outcome.PASSED


# --- refusals

NARROW = AttentionCapabilities(
    devices=Set(("cpu",)),
    dtypes=Set((("float32", "float32"),)),
    head_sizes=Range(16, 128, 16),
    group_sizes=Range(1, 4),
    kernel_block_sizes=Align(exact=(48,)),
    layouts=Choice(("HND",)),
    query_len=Max(8),
    sliding_window=Flag(True),
    limits=(Limit(when="sliding_window", capability="query_len", offer=Max(1)),),
)


def test_everything_that_is_not_declared_is_refused_with_its_code() -> None:
    narrow = evolve(reference, name="narrow", capabilities=NARROW)
    found = contract_records(narrow, Family.REFUSED)
    outcomes = {name: {record.outcome for record in records} for name, records in found.items()}
    assert {name for name, seen in outcomes.items() if seen != {Outcome.PASSED}} == {
        "refuse.sliding_window",  # declared
        "refuse.approximate",  # it attends to all keys
        "refuse.latent_sizes",  # no latents are
        "refuse.min_compute_capability",  # none is asked for
        "refuse.graphs",  # the device has none
    }
    assert found["refuse.kernel_block_sizes"][0].case == {"value": 1}
    assert [record.case for record in found["refuse.limits"]] == [
        {"limit": 0, "when": "sliding_window", "capability": "query_len"}
    ]


@pytest.mark.parametrize("level", [GraphSupport.NEVER, GraphSupport.SINGLE_TOKEN, GraphSupport.UNIFORM])
def test_graphs_above_the_level_are_refused_or_a_downgrade(level: GraphSupport) -> None:
    offer = evolve(reference.capabilities, graphs=Rung(level))
    assert outcome(evolve(reference, capabilities=offer), "refuse.graphs").outcome is Outcome.PASSED


def test_what_is_declared_must_be_accepted() -> None:
    offer = evolve(reference.capabilities, dtypes=Set((("float32", "float32"),)))
    assert outcome(evolve(reference, capabilities=offer), "negotiation.declared").outcome is Outcome.PASSED


def test_a_cache_spec_is_asked_beyond_what_it_declares() -> None:
    from slotline.testing.reference.kv_spec import descriptor

    offer = KVSpecCapabilities(
        kv_kinds=Set(("full",)),
        exact_kinds=Set(("full",)),
        block_sizes=Align(exact=(32,)),
        splittable=Flag(False),
        prefix_caching=Flag(False),
    )
    found = contract_records(evolve(descriptor, capabilities=offer), Family.REFUSED)
    assert {record.outcome for records in found.values() for record in records} == {Outcome.PASSED}
    assert set(found) >= {f"refuse.{name}" for name in ("kv_kinds", "block_sizes", "prefix_caching", "splittable")}


def test_a_drafter_is_asked_beyond_what_it_declares() -> None:
    from slotline.testing.reference.drafter import descriptor

    offer = DrafterCapabilities(devices=Set(("cpu",)), max_tokens=Max(3), needs_history=True)
    found = contract_records(evolve(descriptor, capabilities=offer), Family.REFUSED)
    assert {record.outcome for records in found.values() for record in records} == {Outcome.PASSED}
    assert [record.case for record in found["refuse.max_tokens"]] == [{"value": 4}, {"value": 15}]


# --- what works though it is not declared


def test_an_undeclared_feature_that_works_is_noted_and_does_not_count() -> None:
    offer = evolve(reference.capabilities, sinks=Flag(False))
    records = check_plugin(
        evolve(reference, capabilities=offer), device=CPU, only="attention.underdeclared.sinks", level=Level.NUMERICS
    )
    (record,) = records
    assert record.outcome is Outcome.PASSED
    assert not record.mandatory
    assert record.details["note"] == "sinks works though it is not declared"


def test_a_declared_feature_has_no_such_note() -> None:
    records = check_plugin(reference, device=CPU, only="attention.underdeclared.sinks", level=Level.NUMERICS)
    assert [record.outcome for record in records] == [Outcome.SKIPPED]
