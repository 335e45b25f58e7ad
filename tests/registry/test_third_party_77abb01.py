"""The third party's distribution of commit 77abb01: plugins written for contract 1 work unchanged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cli_cases import pretend_project_installed
from repository import TESTS
from small_sizes import in_small

from slotline.cli import main
from slotline.core import LLM, SamplingParams
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ConfigError, NegotiationError, RequestError
from slotline.testing.check import Level
from slotline.testing.runner import check_plugin, level_reached

ACME = TESTS / "third_party_77abb01" / "acme-slotline"
PLUGINS = {
    Kind.ATTENTION: "acme_paged",
    Kind.KV_SPEC: "acme_full",
    Kind.DRAFTER: "acme_repeat",
    Kind.LOGITS_PROCESSOR: "acme_ban",
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
    assert {row["kind"]: row["name"] for row in rows} == {kind.value: name for kind, name in PLUGINS.items()}
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


@pytest.mark.parametrize("kind", PLUGINS)
def test_it_conforms(kind: Kind) -> None:
    attribute = PLUGINS[kind].removeprefix("acme_")
    records = check_plugin(f"acme_slotline.descriptors:{attribute}", level=Level.NUMERICS, only=in_small)
    assert [f"{record.id} {record.case}: {record.reason}" for record in records if record.bad] == []
    assert level_reached(records) is Level.NUMERICS
