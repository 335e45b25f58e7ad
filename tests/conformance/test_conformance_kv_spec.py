"""The kv_spec checks: no broken spec survives them, no right one fails, and the model says what windows need."""

from __future__ import annotations

import pytest
import torch
from mutant_trials import until_killed

from slotline.registry.contracts import AttentionLayer
from slotline.registry.descriptor import Kind
from slotline.testing import Level, Outcome, all_checks, check_plugin
from slotline.testing.environments.kv_spec import element_bytes, layer_of
from slotline.testing.environments.kv_traffic import prefix_numbers
from slotline.testing.mutants.kv_spec import CORRECT, MUTANTS
from slotline.testing.oracles.kv_spec import freeable_blocks, longest_prefix, oldest_visible, unbroken_prefix


def sliding(window: int) -> AttentionLayer:
    return layer_of(kind="sliding", window=window)


@pytest.mark.spread(41, slow=13)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [*(c.descriptor for c in CORRECT), "kv_spec:full", "kv_spec:mamba"], ids=lambda t: getattr(t, "name", t)
)
def test_a_right_spec_passes_and_skips_only_what_it_does_not_declare(target):
    records = check_plugin(target)
    assert [f"{r.key}: {r.reason}" for r in records if r.bad] == []
    skipped = {r.reason for r in records if r.outcome is Outcome.SKIPPED and Level.CONTRACT < r.level < Level.ENGINE}
    assert all("declared" in reason for reason in skipped), skipped


@pytest.mark.parametrize("name", ["rounds-up", "window-less-one", "values-over-keys", "null-for-holes"])
def test_traffic_alone_sees_what_the_arithmetic_checks_see(name):
    mutant = next(item for item in MUTANTS if item.name == name)
    records = check_plugin(mutant.descriptor, only="kv_spec.fuzz.traffic", stop_at_first=True)
    assert records[-1].bad
    assert "what went before" in records[-1].reason


def test_requests_really_share_prefixes_in_the_traffic():
    """Reading back would prove little if no request ever went on from another's blocks."""
    records = check_plugin(CORRECT[0].descriptor, only="kv_spec.fuzz.traffic")
    assert all(record.details["prefix_hits"] > 3 for record in records)


def test_requests_with_states_go_on_from_checkpoints_in_the_traffic():
    records = check_plugin("kv_spec:mamba", only="kv_spec.state.traffic")
    assert all(record.details["prefix_hits"] > 0 for record in records)
    assert len(records) == 6  # the contract's kinds, one of them in two dtypes, and one with several tensors


STATES = [mutant for mutant in MUTANTS if mutant.descriptor.capabilities.state.support]


@pytest.mark.parametrize("name", ["state-overlap", "state-one-slot", "state-keeps-everything", "state-hit-not-kept"])
def test_traffic_of_states_sees_by_itself_what_the_other_checks_see(name):
    mutant = next(item for item in STATES if item.name == name)
    records = check_plugin(mutant.descriptor, only="kv_spec.state.traffic", stop_at_first=True)
    assert records[-1].bad
    assert len(STATES) >= 12


@pytest.mark.parametrize("target", ["kv_spec:full", "kv_spec:mamba"])
def test_a_spec_is_asked_about_what_it_holds_and_about_nothing_else(target):
    """Blocks or states: no check of the other sort runs, and the contract's methods are those of its own protocol."""
    records = check_plugin(target, level=Level.HOSTILE)
    ran = {record.id for record in records if record.outcome is Outcome.PASSED}
    assert "kv_spec.contract.methods" in ran
    of_states = {name for name in ran if name.startswith("kv_spec.state.")}
    of_blocks = {name for name in ran if name.startswith(("kv_spec.blocks", "kv_spec.free", "kv_spec.bind."))}
    assert (bool(of_states), bool(of_blocks)) == ((True, False) if target == "kv_spec:mamba" else (False, True))


def test_a_spec_of_states_in_a_file_gives_the_text_of_an_engine_without_prefix_caching(tmp_path):
    file = tmp_path / "acme_states.py"
    file.write_text(
        "from attrs import evolve\n"
        "from slotline.registry.capability import Set\n"
        "from slotline.testing.reference import state_spec\n"
        "offer = evolve(state_spec.descriptor.capabilities, kv_kinds=Set(('mamba2',)), exact_kinds=Set(('mamba2',)))\n"
        "acme = evolve(state_spec.descriptor, name='acme_states', capabilities=offer)\n"
    )
    (record,) = check_plugin(f"{file}:acme", only="kv_spec.state.engine.text")
    assert record.outcome is Outcome.PASSED, record.reason
    assert record.details["cached_tokens"][:2] == [0, 0]
    assert min(record.details["cached_tokens"][2:]) > 0


def test_there_are_checks_at_each_level_that_a_spec_has():
    levels = {item.level for item in all_checks(Kind.KV_SPEC) if item.mandatory}
    assert levels >= {Level.NUMERICS, Level.HOSTILE, Level.STATEFUL}


def test_a_window_counts_the_query_itself():
    assert oldest_visible([sliding(1)], 4).tolist() == [0, 1, 2, 3]
    assert oldest_visible([sliding(3)], 5).tolist() == [0, 0, 0, 1, 2]
    assert oldest_visible([sliding(3), layer_of()], 5).tolist() == [0] * 5


def test_a_block_may_go_once_the_next_query_has_left_it():
    # blocks of 4, a window of 3: with 5 computed the next query, 5, reads 3, 4, 5; with 6 it reads 4, 5, 6
    assert freeable_blocks([sliding(3)], 12, 4)[[0, 4, 5, 6, 9, 10]].tolist() == [0, 0, 0, 1, 1, 2]
    assert freeable_blocks([layer_of()], 12, 4)[:12].max() == 0


def test_a_window_resumes_over_a_hole_that_it_does_not_read():
    hashes, cached = [b"a", b"b", b"c"], {b"a": 1, b"c": 3}
    assert longest_prefix(hashes, cached.get, freeable_blocks([sliding(4)], 20, 4), 4) == 3
    assert longest_prefix(hashes, cached.get, freeable_blocks([sliding(6)], 20, 4), 4) == 1
    assert longest_prefix(hashes, cached.get, freeable_blocks([layer_of()], 20, 4), 4) == 1
    assert unbroken_prefix(hashes, cached.get) == 1


def test_bytes_of_elements_follow_strides_and_offsets():
    raw = torch.zeros(64, dtype=torch.uint8)[16:]
    view = raw.view(torch.float32).view(3, 4).t()
    assert element_bytes(view, raw).tolist() == [[0, 16, 32], [4, 20, 36], [8, 24, 40], [12, 28, 44]]
    assert element_bytes(view[1:], raw)[0].tolist() == [4, 20, 36]


def test_a_number_stands_for_a_token_and_all_before_it():
    assert torch.equal(prefix_numbers([1, 2, 3])[:2], prefix_numbers([1, 2, 9])[:2])
    assert prefix_numbers([1, 2, 3])[2] != prefix_numbers([2, 1, 3])[2]
