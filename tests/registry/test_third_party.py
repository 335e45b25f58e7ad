"""A distribution that is not ours: its plugins are found, negotiated against ours, conform, and give the right text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from cli_cases import pretend_project_installed
from repository import TESTS
from small_sizes import in_small
from tool_model import CITY, EMPTY, make_tool_model

from slotline.cli import main
from slotline.core import LLM, SamplingParams
from slotline.planner.plan import SMALL_MODEL
from slotline.registry.contracts import DrafterContext
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ConfigError, NegotiationError, RequestError
from slotline.testing.check import Level
from slotline.testing.runner import check_plugin, level_reached

ACME = TESTS / "third_party" / "acme-slotline"
PLUGINS = {
    Kind.ATTENTION: "acme_paged",
    Kind.KV_SPEC: "acme_full",
    Kind.DRAFTER: "acme_repeat",
    Kind.LOGITS_PROCESSOR: "acme_ban",
    Kind.LINEAR: "acme_codes",
    Kind.RESPONSE_PARSER: "acme_fences",
    Kind.KV_CONNECTOR: "acme_zip",
    Kind.COMMUNICATOR: "acme_wire",
}
PROMPTS = ["def main(", "import os\nimport sys\n\n\nclass Reader:\n" * 4, "for", "return self._values[" * 9]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "memory": "64MiB",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 256,
}


@pytest.fixture(scope="module", autouse=True)
def acme_is_installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_slotline"]:
            monkeypatch.delitem(sys.modules, name)  # of its other version, which a test file before installed
        pretend_project_installed(monkeypatch, tmp_path_factory.mktemp("site"), ACME)
        yield


def tokens(llm: LLM, **params: Any) -> list[list[int]]:
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **params)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, asked, progress=False)]


@pytest.fixture(scope="module")
def built_in() -> list[list[int]]:
    """Greedy tokens of the small model with our own backend, cache and no processor."""
    return tokens(LLM(backend="torch", **SMALL))


@pytest.fixture(scope="module")
def ours() -> LLM:
    return LLM(ACME / "run.toml", **SMALL, **{"drafter.adaptive": False})


def test_the_plugins_are_listed_with_their_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--load", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["distribution"] == "acme-slotline"]
    assert {row["kind"]: row["name"] for row in rows} == {
        **{kind.value: name for kind, name in PLUGINS.items()},
        "extension": "acme_rate",
    }
    assert all(row["state"] == "loaded" for row in rows)


def test_the_configuration_selects_them_and_the_plan_fits_both_sides(ours: LLM) -> None:
    (group,), (cache,) = ours.plan.groups, ours.plan.cache_groups
    assert (group.backend, cache.kv_spec) == ("acme_paged", "acme_full")
    assert (group.layout, group.block_size, group.kernel_block_size) == ("HND", 48, 48)
    assert {"acme_ban", "acme_repeat"} < {part.name for part in ours.plan.parts}


def test_the_text_is_the_built_in_backends(ours: LLM, built_in: list[list[int]]) -> None:
    assert tokens(ours) == built_in
    assert ours.engine.extension("drafts") is not None
    assert ours.engine.extension("drafts").drafting.counts.accepted > 0  # some of it was drafted
    assert ours.engine.extension("drafts").drafting.counts.failures == 0


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "setting",
    [
        {"backend": "acme_paged"},
        {"backend": "torch", "cache.kv_spec": {"full": "acme_full"}},
        {"backend": "torch", "cache.kv_spec": {"full": "acme_full"}, "attention.layout": "HND"},
        {"backend": "acme_paged", "cache.block_size": 96, "cache.kv_spec": {"full": "acme_full"}},
    ],
    ids=["its backend on our cache", "our backend on its cache", "the same, heads first", "two pages in a block"],
)
def test_each_part_works_with_ours(setting: dict[str, Any], built_in: list[list[int]]) -> None:
    assert tokens(LLM(**SMALL, **setting)) == built_in


def test_a_block_size_that_its_pages_do_not_divide_is_refused_with_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NegotiationError, match="48"):
        LLM(backend="acme_paged", block_size=16, **SMALL)
    assert main(["explain", str(ACME / "run.toml"), "--set", "cache.block_size=16"]) == 1
    printed = capsys.readouterr().out
    assert "acme_paged N140 kernel block size: needs a size that divides 16, offers 48" in " ".join(printed.split())
    assert "acme_full N141 manager block size: needs 16, offers multiples of 48" in " ".join(printed.split())
    assert "cache.block_size = 48" in printed  # what would make it possible


def test_banned_tokens_stay_out(ours: LLM, built_in: list[list[int]]) -> None:
    banned = sorted({token for output in built_in for token in output})[:5]
    changed = tokens(ours, extra_args={"acme_ban": banned})
    assert not {token for output in changed for token in output} & set(banned)


def test_a_token_outside_the_vocabulary_is_refused_at_admission(ours: LLM) -> None:
    with pytest.raises(RequestError, match="acme_ban names 4096"):
        tokens(ours, extra_args={"acme_ban": [4096]})


def test_its_own_table_is_typed_by_the_plugin(built_in: list[list[int]]) -> None:
    banned = built_in[0][0]
    llm = LLM(ACME / "run.toml", **SMALL, **{"logits_processors.acme_ban": {"always": [banned]}})
    assert banned not in {token for output in tokens(llm) for token in output}
    with pytest.raises(ConfigError, match="alway"):
        LLM(ACME / "run.toml", **SMALL, **{"logits_processors.acme_ban": {"alway": [banned]}})


def test_its_blocks_go_on_to_a_tier_of_ours(tmp_path: Path) -> None:
    names = {"kv_connector.name": "tiers", "kv_connector.tiers.tiers": ("acme_zip", "disk")}
    names |= {"kv_connector.acme_zip.kilobytes": 1, "kv_connector.disk.folder": str(tmp_path)}
    names |= {"kv_connector.disk.staging": "8MiB", "max_model_len": 128, "memory": "1MiB", "max_num_seqs": 1}
    llm = LLM(backend="torch", **{**SMALL, **names})
    first = tokens(llm)
    assert tokens(llm) == first
    assert llm.engine.extension("kv_transfer").transfers.connector.flush(20.0)
    assert tokens(llm) == first
    events = llm.engine.extension("kv_transfer").counts.events[0]
    assert events["acme_zip_evicted"] > 0
    assert events["disk_saved"] > 0


_LONG = {Kind.COMMUNICATOR: pytest.mark.exhaustive, Kind.ATTENTION: pytest.mark.slow}
"""Kinds whose checks take long; `.ci/third_party` runs them to L1."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=_LONG.get(kind, ())) for kind in PLUGINS])
def test_it_conforms(kind: Kind) -> None:
    attribute = PLUGINS[kind].removeprefix("acme_")
    records = check_plugin(f"acme_slotline.descriptors:{attribute}", level=Level.STATEFUL, only=in_small)
    assert [f"{record.id} {record.case}: {record.reason}" for record in records if record.bad] == []
    assert level_reached(records) is (Level.HOSTILE if kind is Kind.RESPONSE_PARSER else Level.STATEFUL)


@pytest.mark.exhaustive
def test_its_block_drafter_conforms() -> None:
    records = check_plugin("acme_blocks")
    bad = [f"{record.key}: {record.reason}" for record in records if record.bad]
    assert bad == []
    assert level_reached(records) is Level.ENGINE


def test_its_block_drafter_drafts_in_blocks_and_gives_the_same_text(tmp_path: Path, built_in: list[list[int]]) -> None:
    """Whether its guesses are taken or not: they are random here."""
    from acme_slotline.blocks import BlockDrafter

    sizes: dict[str, Any] = {
        "num_tokens": 3,
        "max_requests": 4,
        "max_model_len": 256,
        "device": "cpu",
        "dtype": "float32",
    }
    config = json.loads((SMALL_MODEL / "config.json").read_text(encoding="utf-8"))
    sizes |= {"vocab_size": config["vocab_size"], "hidden_size": config["hidden_size"]}
    BlockDrafter.write_example(tmp_path, DrafterContext(contract=1, **sizes))
    settings = {"drafter.name": "acme_blocks", "drafter.path": str(tmp_path), "drafter.tokens": 3}
    llm = LLM(backend="torch", **SMALL, **settings, **{"drafter.adaptive": False})
    assert tokens(llm) == built_in
    assert llm.engine.extension("drafts").drafting.counts.proposed > 20
    assert llm.engine.extension("drafts").drafting.counts.failures == 0


@pytest.mark.slow
def test_its_communicator_joins_two_processes_that_give_the_text_of_one(built_in: list[list[int]]) -> None:
    llm = LLM(tensor=2, backend="torch", **SMALL, **{"parallel.communicator": "acme_wire"})
    try:
        assert "acme_wire" in llm.plan.explain()
        assert tokens(llm) == built_in
    finally:
        llm.close()


def test_its_parser_is_chosen_for_a_template_with_its_form_and_reads_the_calls(tmp_path: Path) -> None:
    model = make_tool_model(tmp_path / "tools")
    (model / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool | tojson }} as ```call NAME {% endfor %}"
        "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    )
    llm = LLM(model, **SMALL)
    clock = {"type": "function", "function": {"name": "clock", "parameters": EMPTY}}
    city = {"type": "function", "function": {"name": "city", "parameters": CITY}}
    asked = SamplingParams(temperature=0, max_tokens=80)
    for choice in ("required", {"type": "function", "function": {"name": "city"}}):
        (output,) = llm.chat([{"role": "user", "content": "x"}], asked, tools=[clock, city], tool_choice=choice)
        message: Any = output.outputs[0].message
        for call in message["tool_calls"]:
            assert call["function"]["name"] in (("clock", "city") if choice == "required" else ("city",))
            assert isinstance(call["function"]["arguments"], dict)
    reason = next(one.origin for one in llm.plan.settings if one.key == "response_parser.name")
    assert "```call" in reason


def test_its_extension_limits_tokens_by_wall_time_and_edits_no_file_of_ours(built_in: list[list[int]]) -> None:
    llm = LLM(backend="torch", **SMALL, **{"extensions.acme_rate": {"tokens_per_second": 1e6}})
    assert tokens(llm) == built_in
    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    slow = SamplingParams(**asked, extra_args={"acme_tokens_per_second": 10.0})
    begun = monotonic()
    (limited,) = llm.generate(PROMPTS[:1], slow, progress=False)
    assert monotonic() - begun >= 0.4  # the sixth token is due after four tenths of a second
    assert limited.outputs[0].token_ids == built_in[0][:6]
    with pytest.raises(RequestError, match="acme_tokens_per_second=0 is not allowed"):
        tokens(llm, extra_args={"acme_tokens_per_second": 0})


def test_its_extension_beside_a_drafter_is_refused_with_the_part_that_is_against_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", str(ACME / "run.toml"), "--set", "extensions.acme_rate.tokens_per_second=5"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"'acme_rate' of acme-slotline [\d.]+ excludes 'drafts', which this plan has", printed)
    assert "drafter.name decides it" in printed
