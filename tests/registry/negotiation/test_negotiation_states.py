"""State layers in negotiation: groups, choices, refusals with every reason, and what states rule out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from negotiation_cases import CPU, explicit

from slotline.core import LLM
from slotline.planner.state_facts import refuse_unfit_states
from slotline.planner.state_specs import HeldStates, with_state_memory
from slotline.plugins.kv_specs.mamba import descriptor as mamba
from slotline.plugins.kv_specs.state_slots import StateSlots
from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import StateSpecContext
from slotline.registry.contracts.state import StateCapabilities, StateLayer, StateTensorSpec
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import CapacityError, ModelError, NegotiationError, SlotlineError
from slotline.registry.negotiation import Asked, Candidate, Plan, PlanRequest, group_states, negotiate, why_not

Tiny = Callable[..., Path]

OFFER = StateCapabilities(
    devices=Set(("cpu",)),
    state_kinds=Set(("mamba2", "short_conv")),
    dtypes=Set((("float32", "float32"),)),
)


def conv(index: int, channels: int = 8) -> StateLayer:
    spec = StateTensorSpec(name="conv", shape=(channels, 3), dtype="auto")
    facts = {"channels": channels, "width": 4, "activation": "silu"}
    return StateLayer(name=f"layers.{index}.conv", index=index, state_kind="short_conv", tensors=(spec,), facts=facts)


def ssm(index: int) -> StateLayer:
    spec = StateTensorSpec(name="ssm", shape=(2, 4, 8), dtype="float32")
    facts = {"num_heads": 2, "head_size": 4, "num_groups": 1, "state_size": 8, "dt_softplus": True}
    return StateLayer(name=f"layers.{index}.ssm", index=index, state_kind="mamba2", tensors=(spec,), facts=facts)


SPECS = (Candidate(descriptor=mamba, distribution="dist-mamba", version="1.0"),)
LAYERS = (conv(0), ssm(1), conv(2), ssm(3), conv(4, channels=16))


def backend(name: str, **changes: Any) -> Candidate:
    descriptor = Descriptor(
        kind=Kind.STATE, name=name, capabilities=evolve(OFFER, **changes), factory="nowhere:nothing"
    )
    return Candidate(descriptor=descriptor, distribution=f"dist-{name}", version="1.0")


def plan(*candidates: Candidate, **changes: Any) -> Plan:
    request = PlanRequest(device=CPU, groups=(), state_groups=group_states(LAYERS), **changes)
    return negotiate(request, (), SPECS, candidates)


def chosen(found: Plan) -> dict[str, str]:
    return {group.name: group.backend for group in found.state_groups}


def test_layers_of_equal_facts_form_groups() -> None:
    groups = {group.name: [layer.index for layer in group.layers] for group in group_states(LAYERS)}
    assert groups == {"short_conv": [0, 2], "mamba2": [1, 3], "short_conv_1": [4]}


def test_priority_decides_and_the_loser_hears_why() -> None:
    found = plan(backend("slow"), backend("fast", priority=10))
    assert chosen(found) == dict.fromkeys(("short_conv", "mamba2", "short_conv_1"), "fast")
    assert "N191 priority: 0, fast has 10" in why_not(found, "slow")
    assert "state group mamba2" in found.explain()
    assert "fast" in found.summary()


def test_a_backend_that_lacks_a_kind_serves_the_others() -> None:
    found = plan(backend("all"), backend("convs", priority=10, state_kinds=Set(("short_conv",))))
    assert chosen(found) == {"short_conv": "convs", "mamba2": "all", "short_conv_1": "convs"}
    assert "N112" in why_not(found, "convs")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("b", "bbb"), (("b", "a"), "bbb"), (("a", "auto"), "aaa"), ({"mamba2": "b"}, "aba"), ("auto", "aaa")],
)
def test_names_are_honoured(value: Any, expected: str) -> None:
    found = plan(backend("a"), backend("b"), state_backend=explicit(value))
    assert "".join(chosen(found).values()) == expected


def test_the_same_question_gives_the_same_digest_and_another_backend_another() -> None:
    first, again, other = plan(backend("a")), plan(backend("a")), plan(backend("b"))
    assert first.digest == again.digest != other.digest
    assert first.to_json()["state_groups"][0]["backend"] == "a"


def test_auto_dtypes_are_resolved_and_recurrent_states_stay_in_float32() -> None:
    pairs = Set((("bfloat16", "float32"),))
    found = plan(backend("a", dtypes=pairs), dtype=explicit("bfloat16"))
    dtypes = {group.name: group.layers[0].tensors[0].dtype for group in found.state_groups}
    assert dtypes == {"short_conv": "bfloat16", "mamba2": "float32", "short_conv_1": "bfloat16"}


def test_a_kind_that_nothing_serves_is_refused_with_layers_kinds_and_reasons() -> None:
    with pytest.raises(NegotiationError) as raised:
        plan(backend("a", state_kinds=Set(("short_conv",))), backend("b", query_len=Max(1)), max_query_len=Asked(64))
    assert "no state backend serves layers.1.ssm, layers.3.ssm of kind mamba2" in str(raised.value)
    failure = raised.value.failure
    assert failure is not None
    assert failure.code == "N502"
    codes = {item.name: {reason.code for reason in item.reasons} for item in failure.groups[0].rejected}
    assert codes == {"a": {"N112"}, "b": {"N160"}}
    assert "state group mamba2, 2 layers" in raised.value.explain()


def test_a_named_backend_that_cannot_serve_leaves_auto_as_the_remedy() -> None:
    with pytest.raises(NegotiationError) as raised:
        plan(backend("a"), backend("b", devices=Set(("cuda",))), state_backend=explicit("b"))
    assert raised.value.fix == 'state.backend = "auto"'


def test_a_backend_without_checkpoints_switches_prefix_caching_off_and_says_so() -> None:
    found = plan(backend("a"))
    assert not found.prefix_caching
    (note,) = found.downgrades
    assert note.code == "N331"
    assert "mamba2 layers: a makes no checkpoints of their states" in note.because
    assert note.to_avoid == ("cache.prefix_caching = false",)
    assert not plan(backend("a"), prefix_caching=explicit(False)).downgrades
    with_copies = plan(backend("a", checkpoints=Flag(True)))
    assert with_copies.prefix_caching
    assert not with_copies.downgrades


def test_prefix_caching_that_was_asked_for_needs_checkpoints() -> None:
    with pytest.raises(NegotiationError, match="no state backend serves") as raised:
        plan(backend("a"), prefix_caching=explicit(True))
    assert raised.value.fix == "cache.prefix_caching = false"
    assert "N178" in raised.value.explain()
    fast = backend("fast", priority=10)
    found = plan(fast, backend("careful", checkpoints=Flag(True)), prefix_caching=explicit(True))
    assert set(chosen(found).values()) == {"careful"}
    assert "N178" in why_not(found, "fast")


def test_a_drafter_needs_states_that_can_be_taken_back() -> None:
    drafter = Asked(5, "drafter ngram: 1+4 tokens", True)
    with pytest.raises(NegotiationError, match="no state backend serves") as raised:
        plan(backend("a"), query_len=drafter)
    assert raised.value.fix == 'drafter.name = ""'
    assert "N177" in raised.value.explain()
    found = plan(backend("a", priority=9), backend("b", rollback=Flag(True)), query_len=drafter)
    assert set(chosen(found).values()) == {"b"}


def test_what_a_backend_holds_to_go_back_is_counted_where_there_is_a_drafter() -> None:
    """Two layers of 3 * 8 numbers, two of 2 * 4 * 8, one of 3 * 16, four bytes each, for ten rows."""
    able = backend("a", rollback=Flag(True), rollback_copy=True)
    for length, expected in ((1, 0), (5, 10 * 4 * (2 * 24 + 2 * 64 + 48))):
        found = plan(able, query_len=Asked(length, "drafter ngram", True))
        (cache,) = found.state_caches
        context = StateSpecContext(contract=1, layers=cache.layers, prefix_unit=16, max_model_len=64)
        found = with_state_memory(found, [HeldStates("mamba", StateSlots(context), cache.layers)], 10, 0)
        assert found.states is not None
        assert found.states.rollback_bytes == expected
        assert ("more to go back to accepted drafts" in found.explain()) == (length > 1)


def test_a_table_entry_for_a_kind_that_the_model_lacks_is_a_warning() -> None:
    found = plan(backend("a"), state_backend=explicit({"gated_delta": "a"}))
    assert [(note.code, note.key) for note in found.warnings] == [("N401", "state.backend.gated_delta")]


BAD = {
    "a backend that is not installed": ({"state.backend": "nowhere"}, SlotlineError, "no state plugin 'nowhere'"),
    "no backend at all": (
        {"plugins.block": ["state:torch"]},
        NegotiationError,
        r"(?s)no state backend serves backbone.layers.0.mixer.conv, .* of kind short_conv;\s.* of kind mamba2",
    ),
    "too many checkpoints": (
        {"memory": "1MiB", "max_num_seqs": 2, "state.checkpoints": 500},
        CapacityError,
        "state.checkpoints = 500 beside the states of 2 requests take",
    ),
    "too many rows": (
        {"memory": "1MiB", "max_num_seqs": 64},
        CapacityError,
        "states of scheduler.max_requests = 64 requests take",
    ),
    "a longer sequence than tables hold": ({"max_model_len": 2**21}, NegotiationError, "positions end at"),
}


@pytest.mark.parametrize(("settings", "error", "text"), BAD.values(), ids=BAD)
def test_what_state_layers_rule_out_is_refused(
    settings: dict[str, Any], error: type[Exception], text: str, tiny: Tiny
) -> None:
    with pytest.raises(error, match=text) as raised:
        LLM(tiny("mamba2"), **{"dtype": "float32", "memory": "4MiB", "max_model_len": 64, **settings})
    assert getattr(raised.value, "fix", None)


def test_too_many_rows_are_answered_with_the_number_that_fits(tiny: Tiny) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "memory": "1MiB", "max_model_len": 64}
    with pytest.raises(CapacityError) as raised:
        LLM(tiny("mamba2"), max_num_seqs=64, **settings)
    fits = int(str(raised.value.fix).rsplit(" ", 1)[1])
    memory = LLM(tiny("mamba2"), max_num_seqs=fits, **settings).engine.memory
    assert memory is not None
    assert 2**20 * (fits - 1) // fits <= memory.states <= 2**20
    with pytest.raises(CapacityError):
        LLM(tiny("mamba2"), max_num_seqs=fits + 1, **settings)


def test_an_activation_that_state_backends_lack_is_named(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match="followed by 'relu', and state backends know silu and none"):
        LLM(tiny("mamba2", hidden_act="relu"), dtype="float32", memory="4MiB")


UNFIT = {
    "another number of heads": (
        evolve(ssm(1), facts={**ssm(1).facts, "num_heads": 3}),
        r"'layers.1.ssm' \(kind 'mamba2'\): its facts make its states ssm \[3, 4, 8\], and .* for ssm \[2, 4, 8\]",
    ),
    "no channels": (conv(0, channels=0), r"its state 'conv' of shape \[0, 3\] holds nothing"),
    "a missing fact": (
        evolve(ssm(1), facts={"num_heads": 2, "head_size": 4}),
        "a mamba2 layer needs the facts state_size",
    ),
    "another tensor": (
        evolve(ssm(1), tensors=(evolve(ssm(1).tensors[0], name="state"),)),
        r"make its states ssm \[2, 4, 8\], and its page is laid out for state \[2, 4, 8\]",
    ),
    "no dtype": (
        evolve(ssm(1), tensors=(evolve(ssm(1).tensors[0], dtype="float33"),)),
        "dtype 'float33', which is no torch dtype",
    ),
}


@pytest.mark.parametrize(("layer", "text"), UNFIT.values(), ids=UNFIT)
def test_a_state_that_does_not_fit_its_page_is_refused_with_layer_and_shapes(layer: StateLayer, text: str) -> None:
    with pytest.raises(ModelError, match=text) as raised:
        refuse_unfit_states([layer])
    assert raised.value.fix


def test_a_kind_of_a_plugins_own_is_left_to_negotiation() -> None:
    refuse_unfit_states([evolve(conv(0), state_kind="my_kind", facts={})])
