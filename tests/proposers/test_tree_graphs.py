"""Trees of requests verified in captured steps, without a GPU: on a device whose graphs are recorded operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import pretend_project_installed
from engine_driver import GREEDY, random_prompts, tokens_of
from repository import SUPPORT, TESTS

from slotline.core import LLM
from slotline.core.batch.model_inputs import ModelInputs
from tests.proposers.test_draft_tree import PARENTS, TREE, TREE_DRAFTER, Branches
from tests.proposers.test_drafting import drafted_by

Tiny = Callable[..., Path]
Greedy = Callable[[Path, list[int], int], list[int]]


@pytest.fixture(autouse=True)
def acme_is_installed(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
            monkeypatch.delitem(sys.modules, name)
        pretend_project_installed(monkeypatch, tmp_path / "site", TESTS / "third_party" / "acme-device")
        yield


def test_graphs_verify_a_tree_of_each_request_with_a_fixed_number_of_tokens(tiny: Tiny, greedy: Greedy) -> None:
    """Accepted nodes that lie elsewhere are computed again in the place of nodes, so that the shape stays."""
    path, query_len = tiny("llama"), 1 + len(PARENTS)
    settings: dict[str, Any] = {
        **TREE, "plugins.inline": (TREE_DRAFTER, f"{SUPPORT / 'recorded_backend.py'}:descriptor"),
        "attention.backend": "recorded_attention", "graphs.sizes": (4, 2 * query_len, 4 * query_len),
        "observability.check_integrity": True,
    }  # fmt: skip
    llm = LLM(path, device="acme:0", dtype="float32", memory="16MiB", max_model_len=96, max_num_seqs=4, **settings)
    assert llm.engine.graphs is not None
    (setting,) = [s for s in llm.plan.settings if s.key == "drafter.tree"]
    assert (setting.resolved, "not captured" in setting.origin) == ("request_trees", False)
    replayed, original = list[tuple[int, int]](), llm.engine.graphs.replay

    def remember(inputs: ModelInputs) -> Any:
        nodes = inputs.extras["drafts"].mask.num_nodes
        replayed.extend((inputs.shape.query_len, count) for count in nodes[: len(inputs.rows)].tolist())
        return original(inputs)

    llm.engine.graphs.replay = remember  # type: ignore[method-assign,assignment]
    prompts = random_prompts([5, 20, 1, 9], seed=1)
    expected = [greedy(path, prompt, 20) for prompt in prompts]
    drafter = Branches(prompts, expected, 0.9, 384, differ=True)
    with drafted_by(llm, drafter):
        assert tokens_of(llm, prompts, GREEDY) == expected
    verified = [count for length, count in replayed if length == query_len]
    assert len(verified) > 10
    assert len(set(verified)) > 1, "no accepted node lay elsewhere"
    counts = llm.engine.extension("drafts").drafting.counts
    assert counts.failures == 0
    assert counts.accepted > 20
