"""From a configuration file and discovered plugins to a request and candidates."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from negotiation_cases import CPU, FULL, PLAIN, backend, layer, request, sliding

from slotline.registry.capability import Flag
from slotline.registry.config import LoadedConfig, load_config
from slotline.registry.contracts.model_family import ModelFacts
from slotline.registry.descriptor import ContractRange, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.hooks import HookHost, PlanNote, hookimpl
from slotline.registry.negotiation import (
    Candidate,
    Part,
    attention_candidates,
    kv_spec_candidates,
    negotiate,
    prepare_request,
    review,
)
from slotline.registry.records import PluginRecord, PluginState

FACTS = ModelFacts(
    architecture="LlamaForCausalLM",
    path=Path("model"),
    vocab_size=512,
    hidden_size=64,
    max_model_len=2048,
    dtype="bfloat16",
    layers=(layer(0), sliding(1)),
    num_parameters=1000,
)


def loaded(tmp_path: Path, text: str = "") -> LoadedConfig:
    path = tmp_path / "run.toml"
    path.write_text("config_version = 1\n" + text)
    return load_config(path, environ={})


def record(candidate: Candidate, **changes: object) -> PluginRecord:
    found = candidate.descriptor
    assert found is not None
    row = PluginRecord(
        kind=found.kind,
        name=found.name,
        value="nowhere:nothing",
        distribution="dist",
        version="2.1",
        state=PluginState.LOADED,
        descriptor=found,
    )
    return evolve(row, **changes)


def test_an_empty_file_asks_for_nothing_explicitly(tmp_path: Path) -> None:
    asked = prepare_request(loaded(tmp_path), FACTS, CPU, max_model_len=1024)
    assert (asked.backend.value, asked.block_size.value, asked.backend.explicit) == ("auto", "auto", False)
    assert (asked.dtype.value, asked.dtype.explicit, asked.dtype.origin) == ("bfloat16", False, "checkpoint: bfloat16")
    assert (asked.max_query_len.value, asked.query_len.value) == (1024, 1)
    assert [group.name for group in asked.groups] == ["full", "sliding"]


def test_each_value_of_the_file_brings_its_line(tmp_path: Path) -> None:
    text = """dtype = "float32"
[attention]
backend = ["a", "b"]
layout = "HND"
[cache]
block_size = 32
dtype = "float16"
prefix_caching = true
[cache.kv_spec]
sliding = "full"
[graphs]
mode = "full"
"""
    asked = prepare_request(loaded(tmp_path, text), FACTS, CPU, max_model_len=1024)
    assert asked.backend.value == ("a", "b")
    for value, line, key in (
        (asked.dtype, 2, "dtype"),
        (asked.backend, 4, "attention.backend"),
        (asked.layout, 5, "attention.layout"),
        (asked.block_size, 7, "cache.block_size"),
        (asked.kv_dtype, 8, "cache.dtype"),
        (asked.prefix_caching, 9, "cache.prefix_caching"),
        (asked.kv_specs["sliding"], 11, "cache.kv_spec.sliding"),
        (asked.graphs, 13, "graphs.mode"),
    ):
        assert value.explicit
        assert value.origin.endswith(f"run.toml:{line} {key}")


def test_a_table_of_backends_keeps_its_kinds(tmp_path: Path) -> None:
    asked = prepare_request(
        loaded(tmp_path, '[attention]\nbackend = { sliding = "b" }\n'), FACTS, CPU, max_model_len=64
    )
    assert asked.backend_for("sliding").value == ("b",)
    assert asked.backend_for("sliding").explicit
    assert asked.backend_for("full").value == ()


def test_the_first_fallback_is_what_a_device_computes_in_and_no_downgrade(tmp_path: Path) -> None:
    asked = prepare_request(loaded(tmp_path), FACTS, CPU, max_model_len=64, dtype_fallbacks=("float32",))
    plan = negotiate(asked, [backend("a")], [FULL])
    assert (plan.dtype, [note.code for note in plan.downgrades]) == ("float32", ["N330"])
    assert asked.dtype.origin == "checkpoint: bfloat16; cpu computes in float32"


def test_an_explicit_auto_is_no_demand(tmp_path: Path) -> None:
    text = 'dtype = "auto"\n[attention]\nbackend = "auto"\n[cache]\nblock_size = "auto"\n'
    asked = prepare_request(loaded(tmp_path, text), FACTS, CPU, max_model_len=64, dtype_fallbacks=("float32",))
    assert [asked.backend.explicit, asked.block_size.explicit, asked.dtype.explicit] == [False] * 3


def test_draft_tokens_raise_the_uniform_query_length(tmp_path: Path) -> None:
    config = loaded(tmp_path, '[drafter]\nname = "ngram"\ntokens = 4\n')
    asked = prepare_request(config, FACTS, CPU, max_model_len=64, draft_tokens=4)
    assert (asked.query_len.value, asked.query_len.origin) == (5, "drafter ngram: 1+4 tokens")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"state": PluginState.FAILED, "descriptor": None, "error": "ImportError: libfoo"}, "N002"),
        ({"state": PluginState.INCOMPATIBLE, "descriptor": None, "error": "speaks contract 7"}, "N003"),
        ({"state": PluginState.BLOCKED, "descriptor": None, "error": "plugins.block"}, "N004"),
    ],
)
def test_rows_that_cannot_load_become_candidates_with_the_reason(changes: dict[str, object], code: str) -> None:
    rows = [record(backend("good")), record(backend("bad"), **changes)]
    found = attention_candidates(PluginRegistry(rows), CPU)
    assert [item.name for item in found] == ["bad", "good"]
    plan = negotiate(
        prepare_request(load_config(environ={}), FACTS, CPU, max_model_len=64, dtype_fallbacks=("float32",)),
        found,
        kv_spec_candidates(PluginRegistry([record(FULL)]), CPU),
    )
    (rejection,) = plan.groups[0].rejected
    assert [reason.code for reason in rejection.reasons] == [code]
    assert str(changes["error"]) in rejection.reasons[0].text
    assert (plan.groups[0].distribution, plan.groups[0].version) == ("dist", "2.1")


def test_a_probe_narrows_the_offer_or_refuses() -> None:
    descriptor = backend("narrow").descriptor
    assert descriptor is not None
    narrow = evolve(descriptor, probe=lambda _device: evolve(PLAIN, sliding_window=Flag(False)))
    refusing = evolve(descriptor, name="refusing", probe=lambda device: f"no kernels for {device.name}")
    rows = [evolve(record(backend("x")), name=item.name, descriptor=item) for item in (narrow, refusing)]
    first, second = attention_candidates(PluginRegistry(rows), CPU)
    assert not first.capabilities.sliding_window.support
    assert second.probe_refusal == "no kernels for a laptop"


def test_a_shadowed_plugin_is_no_candidate() -> None:
    rows = [record(backend("a")), record(backend("a"), state=PluginState.SHADOWED, distribution="other")]
    assert [item.distribution for item in attention_candidates(PluginRegistry(rows), CPU)] == ["dist"]


def test_the_bound_contract_is_the_highest_that_both_speak() -> None:
    descriptor = backend("wide").descriptor
    assert descriptor is not None
    wide = evolve(descriptor, contract=ContractRange(1, 4))
    (found,) = attention_candidates(PluginRegistry([record(backend("wide"), descriptor=wide)]), CPU)
    assert (found.contract, wide.kind) == (1, Kind.ATTENTION)


def test_parts_and_facts_are_on_record(tmp_path: Path) -> None:
    part = Part(kind="model_family", name="decoder", distribution="slotline", version="0.1.0", origin="architecture")
    asked = prepare_request(loaded(tmp_path), FACTS, CPU, max_model_len=64, dtype_fallbacks=("float32",), parts=(part,))
    plan = negotiate(asked, [backend("a")], [FULL])
    assert plan.parts == (part,)
    assert "model_family decoder (slotline 0.1.0): architecture" in plan.explain()
    assert "architecture LlamaForCausalLM" in plan.explain()


class _Reviewer:
    def __init__(self, *notes: PlanNote) -> None:
        self._notes = notes

    @hookimpl
    def slotline_review_plan(self, plan: object) -> tuple[PlanNote, ...]:
        return self._notes


def test_reviewers_add_remarks_and_leave_the_decisions() -> None:
    plan = negotiate(request(), [backend("a")], [FULL])
    host = HookHost()
    host.add(_Reviewer(PlanNote("small blocks waste bandwidth here")), "hooks:ours")
    after = review(plan, request(), host)
    assert [(note.code, note.key) for note in after.warnings] == [("N403", "hooks:ours")]
    assert after.digest == plan.digest


def test_a_veto_refuses_the_plan_and_says_who_and_why() -> None:
    host = HookHost()
    host.add(_Reviewer(PlanNote("not on this cluster", veto=True)), "hooks:ours")
    with pytest.raises(NegotiationError, match="not on this cluster") as caught:
        review(negotiate(request(), [backend("a")], [FULL]), request(), host)
    assert "hooks:ours" in caught.value.message
