"""State layers in captured steps without a GPU: on a device whose graphs are recorded operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import pretend_project_installed
from engine_driver import GREEDY, random_prompts
from repository import SUPPORT, TESTS

from slotline.core import LLM

Tiny = Callable[..., Path]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([5, 20, 1, 9], seed=1)


@pytest.fixture(autouse=True)
def acme_is_installed(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
            monkeypatch.delitem(sys.modules, name)
        pretend_project_installed(monkeypatch, tmp_path / "site", TESTS / "third_party" / "acme-device")
        yield


@pytest.mark.parametrize("family", ["mamba2", "lfm2"])
def test_captured_states_give_transformers_tokens_from_checkpoints_too(family: str, tiny: Tiny, greedy: Greedy) -> None:
    path = tiny(family)
    settings: dict[str, Any] = {
        "plugins.inline": (f"{SUPPORT / 'recorded_state.py'}:descriptor",), "state.backend": "recorded_state",
        "graphs.sizes": (1, 2, 4), "observability.check_integrity": True,
    }  # fmt: skip
    llm = LLM(path, device="acme:0", dtype="float32", memory="16MiB", max_model_len=64, max_num_seqs=4, **settings)
    assert llm.engine.graphs is not None
    assert {dict(group.graphs)["decode"] for group in llm.plan.state_groups} == {"captured"}
    replayed, original = list[int](), llm.engine.graphs.replay

    def remember(inputs: Any) -> Any:
        replayed.append(inputs.shape.num_tokens)
        return original(inputs)

    llm.engine.graphs.replay = remember  # type: ignore[method-assign]
    expected = [greedy(path, prompt, 20) for prompt in PROMPTS]
    for _ in range(2):  # the second time from checkpoints
        outputs = llm.generate(PROMPTS, GREEDY, progress=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert {1, 2, 4} >= set(replayed) >= {4}
    assert llm.engine.extension("states").checkpoints.counts.restored
