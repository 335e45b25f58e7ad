"""Cache specs of states: how they are chosen, named and refused, and what several of them do in one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from cli_cases import pretend_installed
from engine_driver import GREEDY, random_prompts, tokens_of
from negotiation_cases import CPU, FULL_SPEC, explicit, spec

from slotline.cli import main
from slotline.core import LLM
from slotline.core.batch.request_table import RequestTable
from slotline.planner.plan import make_plan
from slotline.plugins.kv_specs.mamba import descriptor as mamba
from slotline.plugins.kv_specs.state_slots import StateSlots
from slotline.plugins.states.checkpoints import Checkpoints
from slotline.plugins.states.dispatcher import StateDispatcher
from slotline.plugins.states.rules import JointRules, rules_of
from slotline.registry.capability import Flag, Set
from slotline.registry.config import load_config
from slotline.registry.contracts import KVSpecCapabilities, StateLayer, StateSpecContext, StateTensorSpec
from slotline.registry.contracts.state import StateCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ContractError, NegotiationError
from slotline.registry.negotiation import Candidate, Plan, PlanRequest, group_states, negotiate
from slotline.testing.reference.state_spec import PlainStates

pytestmark = pytest.mark.usefixtures("one_thread")

INSTALLED = version("slotline")
Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

LAYERS = tuple(
    StateLayer(
        name=f"layers.{index}.{kind}",
        index=index,
        state_kind=kind,
        tensors=(StateTensorSpec(name="state", shape=(2, 4, 8), dtype="float32"),),
        facts={},
    )
    for index, kind in enumerate(("mamba2", "gated_delta", "mamba2"))
)
MAMBA = Candidate(descriptor=mamba, distribution="slotline", version="0.1.0")
STATES = KVSpecCapabilities(kv_kinds=Set(("mamba2",)), exact_kinds=Set(("mamba2",)), state=Flag(True))
BACKEND = Candidate(
    descriptor=Descriptor(
        kind=Kind.STATE,
        name="any",
        capabilities=StateCapabilities(
            devices=Set(None), state_kinds=Set(None), dtypes=Set(None), rollback=Flag(True), checkpoints=Flag(True)
        ),
        factory="nowhere:nothing",
    )
)


def states(name: str, **changes: Any) -> Candidate:
    """A third party's spec of states that holds mamba2, changed as said."""
    return spec(name, STATES, **changes)


def plan(*specs: Candidate, **changes: Any) -> Plan:
    request = PlanRequest(device=CPU, groups=(), state_groups=group_states(LAYERS), **changes)
    return negotiate(request, (), specs, [BACKEND])


def chosen(found: Plan) -> dict[str, str]:
    return {kind: cache.kv_spec for cache in found.state_caches for kind in cache.kinds}


# ---- negotiation


@pytest.mark.parametrize(
    ("other", "expected", "reason"),
    [
        (states("zeta"), "mamba", "name: equal in all that counts, and mamba comes first by name"),
        (states("acme"), "acme", "name: equal in all that counts, and acme comes first by name"),
        (states("zeta", priority=1), "zeta", "priority: 0, zeta has 1"),
        (states("acme", priority=-1), "mamba", "priority: -1, mamba has 0"),
        (
            states("acme", priority=9, exact_kinds=Set(())),
            "mamba",
            "cache spec: acme is not exact for mamba2 layers, mamba is",
        ),
    ],
)
def test_exactness_then_priority_then_the_name_decides(other: Candidate, expected: str, reason: str) -> None:
    for specs in ((MAMBA, other), (other, MAMBA)):
        found = plan(*specs)
        assert chosen(found) == {"mamba2": expected, "gated_delta": "mamba"}
        (cache,) = [cache for cache in found.state_caches if "mamba2" in cache.kinds]
        (lost,) = cache.rejected
        assert reason in [item.text for item in lost.reasons]


def test_a_spec_that_holds_a_kind_that_ours_is_not_exact_for_wins_it() -> None:
    pooled = evolve(LAYERS[0], state_kind="pooled")
    offer = evolve(STATES, kv_kinds=Set(("pooled",)), exact_kinds=Set(("pooled",)))
    request = PlanRequest(device=CPU, groups=(), state_groups=group_states((pooled, LAYERS[1])))
    found = negotiate(request, (), (MAMBA, spec("zeta", offer)), [BACKEND])
    assert chosen(found) == {"pooled": "zeta", "gated_delta": "mamba"}
    assert chosen(negotiate(request, (), (MAMBA,), [BACKEND])) == {"pooled": "mamba", "gated_delta": "mamba"}
    assert "inexact for pooled" in negotiate(request, (), (MAMBA,), [BACKEND]).explain()


def test_a_named_spec_is_taken_and_the_plan_says_where_it_was_named() -> None:
    found = plan(MAMBA, states("zeta", priority=-9), kv_specs={"mamba2": explicit("zeta")})
    assert chosen(found) == {"mamba2": "zeta", "gated_delta": "mamba"}
    text = " ".join(found.explain().split())
    assert "kv_spec zeta (slotline 0.1.0) holds the states of 2 layers of kind mamba2: named in run.toml:1" in text
    assert "kv_spec mamba (slotline 0.1.0) holds the states of 1 layer of kind gated_delta" in text


@pytest.mark.parametrize(
    ("named", "code", "part"),
    [
        ({"mamba2": explicit("nowhere")}, "N500", "not installed"),
        ({"mamba2": explicit("full")}, "N500", "needs mamba2, and it holds blocks, not states"),
        ({"gated_delta": explicit("acme")}, "N500", "needs gated_delta, offers mamba2"),
    ],
)
def test_a_name_that_cannot_hold_the_kind_is_refused_with_the_reason(named: Any, code: str, part: str) -> None:
    blocks = spec("full", evolve(FULL_SPEC, kv_kinds=Set(None)))
    with pytest.raises(NegotiationError) as raised:
        plan(MAMBA, states("acme"), blocks, kv_specs=named)
    assert raised.value.failure is not None
    assert raised.value.failure.code == code
    (kind,) = named
    assert raised.value.fix == f"remove cache.kv_spec.{kind}"
    assert part in " ".join(raised.value.explain().split())


def test_without_any_spec_of_states_the_kinds_are_named() -> None:
    with pytest.raises(NegotiationError, match="no cache spec holds the states of 2 layers of kind mamba2") as raised:
        plan(spec("full"))
    assert raised.value.fix == "install a kv_spec plugin for mamba2 states"


def test_a_spec_that_takes_no_checkpoints_turns_prefix_caching_off_unless_it_was_asked_for() -> None:
    forgetful = states("acme", priority=5, prefix_caching=Flag(False))
    found = plan(MAMBA, forgetful)
    assert chosen(found)["mamba2"] == "acme"
    assert not found.prefix_caching
    (note,) = found.downgrades
    assert (note.code, note.because) == ("N331", ("mamba2 layers: kv_spec acme takes no checkpoints",))
    insisting = plan(MAMBA, forgetful, prefix_caching=explicit(True))
    assert chosen(insisting)["mamba2"] == "mamba"
    assert insisting.prefix_caching
    with pytest.raises(NegotiationError, match="no cache spec holds the states") as raised:
        plan(MAMBA, forgetful, prefix_caching=explicit(True), kv_specs={"mamba2": explicit("acme")})
    assert "N142" in raised.value.explain()
    assert not plan(MAMBA, forgetful, prefix_caching=explicit(False)).downgrades


# ---- rules of several specs


def test_several_specs_stop_at_the_nearest_place_and_keep_what_one_of_them_wants() -> None:
    context = StateSpecContext(contract=1, layers=LAYERS, prefix_unit=16, max_model_len=2048)
    ours, theirs = StateSlots(context), PlainStates(context)
    joint = rules_of([ours, theirs])
    assert isinstance(joint, JointRules)
    assert rules_of([ours]) is ours
    one = {name: np.array([value]) for name, value in (("computed", 0), ("last", 320), ("branch", 48))}
    ends = np.array([300])
    assert [int(item.stops(ends=ends, **one)[0]) for item in (ours, theirs, joint)] == [48, 256, 48]
    at = np.array([48, 64, 50])
    wide = {name: np.full(3, int(value[0])) for name, value in one.items() if name != "computed"}
    assert [item.keeps(at, **wide).tolist() for item in (ours, theirs, joint)] == [
        [True, False, False],
        [False, True, False],
        [True, True, False],
    ]


def test_several_specs_agree_on_a_prefix_that_all_of_them_can_go_on_from() -> None:
    class Even(PlainStates):
        def prefix_hit(self, hashes: Sequence[bytes], is_kept: Callable[[bytes], bool]) -> int:
            found = super().prefix_hit(hashes, is_kept)
            return found if found % 2 == 0 else self.prefix_hit(hashes[: found - 1], is_kept)

    context = StateSpecContext(contract=1, layers=LAYERS, prefix_unit=16, max_model_len=2048)
    joint = JointRules([PlainStates(context), Even(context)])
    hashes = [bytes([number]) for number in range(6)]
    assert joint.prefix_hit(hashes, {hashes[4], hashes[3], hashes[0]}.__contains__) == 4
    assert joint.prefix_hit(hashes, {hashes[4], hashes[2]}.__contains__) == 0
    assert joint.prefix_hit([], hashes.__contains__) == 0


# ---- engines

ACME = """
from slotline.registry import Descriptor, Flag, Kind, Set
from slotline.registry.contracts import KVSpecCapabilities

offer = KVSpecCapabilities(kv_kinds=Set(("mamba2",)), exact_kinds=Set(("mamba2",)), state=Flag(True), priority=-1)
descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="acme_state",
    capabilities=offer,
    factory="slotline.testing.reference.state_spec:PlainStates",
)
"""
LYING = """
from attrs import evolve
from slotline.registry import Descriptor, Flag, Kind, Set
from slotline.registry.contracts import KVSpecCapabilities
from slotline.testing.reference.state_spec import PlainStates

class Acme(PlainStates):
    {body}

acme = Descriptor(
    kind=Kind.KV_SPEC,
    name="acme_lying",
    capabilities=KVSpecCapabilities(kv_kinds=Set(("mamba2",)), exact_kinds=Set(("mamba2",)), state=Flag(True)),
    factory=Acme,
)
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with a spec for mamba2 states that `auto` does not prefer."""
    (tmp_path / "acme_states.py").write_text(ACME)
    pretend_installed(
        monkeypatch, tmp_path, "acme-states", {"slotline.kv_spec": {"acme_state": "acme_states:descriptor"}}
    )


def test_a_third_partys_spec_and_ours_hold_a_hybrid_together_and_the_text_is_the_same(
    acme: None, tiny: Tiny, engines: Engines, greedy: Greedy, tmp_path: Path
) -> None:
    path = tiny("bamba")
    settings: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24}
    config = tmp_path / "run.toml"
    config.write_text(f'model = "{path}"\n[cache.kv_spec]\nmamba2 = "acme_state"\n')
    shared = random_prompts([20], seed=3)[0]
    prompts = [shared + tail for tail in random_prompts([5, 13, 9], seed=4)]
    expected = [greedy(path, prompt, 20) for prompt in prompts]
    alone = engines(path, **settings)
    both = engines(config, **settings)
    assert {kind: c.kv_spec for c in both.plan.state_caches for kind in c.kinds} == {
        "short_conv": "mamba",
        "mamba2": "acme_state",
    }
    text = " ".join(both.plan.explain().split())
    assert "kv_spec acme_state (acme-states 0.1.0) holds the states of 2 layers of kind mamba2: named in" in text
    assert f"kv_spec mamba (slotline {INSTALLED}) holds the states of 2 layers of kind short_conv" in text
    assert both.plan.states is not None
    assert both.plan.states.interval == 256  # of 256 and 16 tokens
    for llm in (alone, both):
        assert [tokens_of(llm, [prompt])[0] for prompt in prompts] == expected
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert min(output.metrics.num_cached_tokens for output in outputs) >= 20


def test_auto_prefers_ours_and_says_why_the_other_one_lost(acme: None, tiny: Tiny) -> None:
    found = make_plan(load_config(overrides=(f"model={tiny('bamba')}",)), use_measurements=False).plan
    text = " ".join(found.explain().split())
    assert f"kv_spec mamba (slotline {INSTALLED}) holds the states of 4 layers of kind short_conv, mamba2" in text
    assert "rejected acme_state N110 cache kind: needs short_conv, offers mamba2" in text
    assert "N191 priority: -1, mamba has 0" in text


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ("cache.kv_spec.mamba2=full", "no cache spec holds the states of 2 layers of kind mamba2"),
        ("cache.kv_spec.mamba2=nowhere", "no kv_spec plugin 'nowhere'"),
        ("cache.kv_spec.full=mamba", 'no candidate can serve cache.kv_spec.full = "mamba"'),
    ],
)
def test_a_wrong_name_in_the_configuration_is_refused(
    named: str, part: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--set", f"model={tiny('bamba')}", "--set", named]) in (1, 2)
    captured = capsys.readouterr()
    assert part in captured.out + captured.err


LIES = {
    "interval of no unit": ("interval = 6", "its interval is 6, which is no multiple of 4 tokens"),
    "interval of nothing": ("interval = 0", "its interval is 0"),
    "interval of no number": ("interval = 'often'", "its interval is 'often'"),
    "page too small": ("def page_bytes(self, layer): return 16", "has 16 bytes, and its state takes"),
    "page of no number": ("def page_bytes(self, layer): return None", "has None bytes, and its state takes"),
}


@pytest.mark.parametrize(("body", "part"), LIES.values(), ids=LIES)
def test_a_spec_that_lies_about_its_figures_is_a_contract_error_that_names_it(
    body: str, part: str, tiny: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "acme.py").write_text(LYING.format(body=body))
    with pytest.raises(ContractError) as raised:
        LLM(
            tiny("mamba2"),
            block_size=4,
            **{"plugins.inline": [f"{tmp_path / 'acme.py'}:acme"], "cache.kv_spec.mamba2": "acme_lying"},
        )
    assert "kv_spec 'acme_lying'" in str(raised.value)
    assert part in str(raised.value)
    assert "cache.kv_spec.mamba2" in (raised.value.fix or "")


WRONG_ANSWERS = {
    "step of no token": ("def stops(self, computed, ends, last, branch): return computed", "ends a step at 0 tokens"),
    "step beyond": ("def stops(self, computed, ends, last, branch): return ends + 3", "ends a step at 24 tokens"),
    "state between units": (
        "def keeps(self, computed, last, branch): return computed > 0",
        "keeps a state at 21 tokens, which is no multiple of 4",
    ),
    "prefix that is not kept": ("def prefix_hit(self, hashes, is_kept): return 5", "goes on from a prefix of 5 units"),
    "prefix beyond": ("def prefix_hit(self, hashes, is_kept): return 6", "goes on from a prefix of 6 units"),
}


@pytest.mark.parametrize(("body", "part"), WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
def test_an_answer_that_cannot_be_ends_the_request_or_the_run_with_an_error_that_names_the_spec(
    body: str, part: str, tiny: Tiny, tmp_path: Path
) -> None:
    code = LYING.format(body=body).replace('Set(("mamba2",))', "Set(None)")  # it holds short_conv as well
    (tmp_path / "acme.py").write_text(code)
    llm = LLM(
        tiny("mamba2"),
        dtype="float32",
        block_size=4,
        max_model_len=64,
        max_num_seqs=4,
        **{"plugins.inline": [f"{tmp_path / 'acme.py'}:acme"], "cache.kv_spec.mamba2": "acme_lying"},
    )
    try:
        (output,) = llm.generate(random_prompts([21], seed=1)[0], GREEDY)
        assert output.outputs[0].finish_reason == "error"  # while it is scheduled, one request is concerned
        said = str(output.outputs[0].stop_reason)
    except ContractError as error:  # between two steps, all are
        said = str(error)
    assert part in said
    assert "acme_lying" in said


def test_rules_are_asked_only_about_requests_that_compute_several_tokens() -> None:
    """A request without room in the step has no `ends` above what it has computed, which the contract rules out."""

    class Eager(PlainStates):
        def stops(self, computed: Any, ends: Any, last: Any, branch: Any) -> Any:
            assert (ends > computed).all()
            return computed + 1

    rows = RequestTable(4, 2048)
    context = StateSpecContext(contract=1, layers=LAYERS, prefix_unit=16, max_model_len=2048)
    found = Checkpoints(rows, StateDispatcher([], {}, 6, "cpu"), 16, Eager(context))
    counts = found.cut(np.array([0, 1, 2]), np.array([16, 40, 7]), np.array([0, 9, 1]))
    assert counts.tolist() == [0, 1, 1]


def test_a_spec_without_checkpoints_runs_without_prefix_hits(tiny: Tiny, greedy: Greedy, tmp_path: Path) -> None:
    code = LYING.format(body="pass").replace("state=Flag(True)", "state=Flag(True), prefix_caching=Flag(False)")
    (tmp_path / "acme.py").write_text(code)
    path = tiny("mamba2")
    llm = LLM(
        path,
        dtype="float32",
        block_size=4,
        max_model_len=64,
        **{
            "plugins.inline": [f"{tmp_path / 'acme.py'}:acme"],
            "cache.kv_spec.mamba2": "acme_lying",
            "observability.check_integrity": True,
        },
    )
    assert [note.code for note in llm.plan.downgrades] == ["N331"]
    (prompt,) = random_prompts([25], seed=5)
    outputs = [llm.generate(prompt, GREEDY)[0] for _ in range(2)]
    assert [output.outputs[0].token_ids for output in outputs] == [greedy(path, prompt, 20)] * 2
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 0]
