"""The drafter `medusa`: folders as they are published, heads as they are defined, texts as they are without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from engine_driver import random_prompts, tokens_of
from safetensors.torch import save_file
from torch import nn

from slotline.core import LLM, SamplingParams
from slotline.proposers.medusa import MedusaTreeOptions
from slotline.proposers.medusa.choices import likeliest, ordered, parents_of
from slotline.proposers.medusa.drafter import MedusaDrafter, MedusaTreeDrafter
from slotline.registry.contracts import DraftBatch, DrafterContext
from slotline.registry.errors import ConfigError, ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


class ResBlock(nn.Module):
    """As the authors define it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


def heads_of(size: int, vocab_size: int, *, num_heads: int = 4, num_layers: int = 2) -> nn.ModuleList:
    """Random heads, as the authors' module list."""
    torch.manual_seed(size + vocab_size)
    return nn.ModuleList(
        nn.Sequential(*(ResBlock(size) for _ in range(num_layers)), nn.Linear(size, vocab_size, bias=False))
        for _ in range(num_heads)
    )


def written(folder: Path, heads: nn.ModuleList, form: str = "pt", **settings: Any) -> Path:
    """Heads in a folder, in one of the published forms."""
    folder.mkdir(parents=True, exist_ok=True)
    count, layers = len(heads), len(heads[0]) - 1
    weights = {name: value.detach().clone() for name, value in heads.state_dict().items()}
    config: dict[str, Any] = {"medusa_num_heads": count, "medusa_num_layers": layers}
    if form == "vllm":
        config = {"num_heads": count, "num_hidden_layers": layers}
        renamed = {}
        for name, value in weights.items():
            head, layer, *rest = name.split(".")
            own = f"blocks.{head}.layers.{layer}.{rest[-1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"
            renamed[own] = value
        weights = renamed
    if form == "shared":
        config["original_lm_head"] = True
        weights = {name: value for name, value in weights.items() if "linear" in name}
    (folder / "config.json").write_text(json.dumps(config | settings))
    if form == "pt":
        torch.save(weights, folder / "medusa_lm_head.pt")
    else:
        save_file(weights, folder / ("medusa_lm_head.safetensors" if form == "safetensors" else "model.safetensors"))
    return folder


def context(path: Path | None, **settings: Any) -> DrafterContext:
    values: dict[str, Any] = {"num_tokens": 3, "vocab_size": 32, "hidden_size": 16, "path": path and str(path)}
    values |= {"contract": 1, "max_requests": 4, "max_model_len": 64, "device": "cpu", "dtype": "float32"}
    return DrafterContext(**{**values, **settings})


@pytest.mark.parametrize("form", ["pt", "safetensors", "vllm", "shared"])
@pytest.mark.behaviour(119)
def test_heads_of_each_published_form_predict_what_their_definition_says(tmp_path: Path, form: str) -> None:
    heads, projection = heads_of(16, 32), nn.Linear(16, 32, bias=False)
    drafter = MedusaDrafter(context(written(tmp_path, heads, form), compute_logits=projection))
    states = torch.randn(5, 16)
    with torch.no_grad():
        found = drafter.propose(
            DraftBatch(
                rows=torch.arange(5),
                token_table=torch.zeros(5, 8, dtype=torch.int32),
                num_tokens=torch.full((5,), 3, dtype=torch.int32),
                last_token_ids=torch.zeros(5, dtype=torch.int64),
                positions=torch.full((5,), 2),
                hidden_states=states,
            )
        )
        if form == "shared":
            for head in heads:
                head[-1] = projection
        expected = torch.stack([head(states).argmax(-1) for head in heads[:3]], 1)
    assert found.token_ids.tolist() == expected.tolist()


@pytest.mark.spread(2)
@pytest.mark.parametrize("form", ["pt", "shared"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16, "memory": "128KiB"}], ids=["roomy", "tight"])
def test_texts_are_the_same_with_it(
    tiny: Tiny, engines: Engines, tmp_path: Path, form: str, settings: dict[str, Any]
) -> None:
    path = tiny("llama", vocab_size=8)
    folder = written(tmp_path / form, heads_of(64, 8), form)
    plain = engines(path)
    llm = engines(
        path,
        **{"drafter.name": "medusa", "drafter.tokens": 4, "drafter.path": str(folder), "drafter.adaptive": False},
        **settings,
    )
    prompts = random_prompts((30, 25, 40, 10, 33, 28), seed=8, vocab_size=8)
    for params in (
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, presence_penalty=0.5),
    ):
        for _ in range(2):  # the second time with cached prefixes
            assert tokens_of(llm, prompts, params) == tokens_of(plain, prompts, params)
    assert llm.engine.extension("drafts").drafting.counts.accepted > 10
    assert llm.engine.extension("drafts").drafting.counts.failures == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"path": None}, ConfigError, r"has no heads(.|\n)*drafter.path"),
        ({"num_tokens": 5}, ConfigError, r"drafter.tokens = 5: there are 4 heads"),
        ({"hidden_size": 20}, ModelError, r"0.0.linear.weight is \[16, 16\], the model asks for \[20, 20\]"),
        ({"vocab_size": 33}, ModelError, r"0.2.weight is \[32, 16\], the model asks for \[33, 16\]"),
        ({"path": "/nowhere"}, ModelError, r"config.json' does not describe Medusa heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused_at_start(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MedusaDrafter(evolve(context(written(tmp_path, heads_of(16, 32))), **change))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "medusa_lm_head.pt").unlink(), "has none of medusa_lm_head.safetensors"),
        (lambda folder: (folder / "medusa_lm_head.pt").write_bytes(b"no"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{}"), "medusa_num_heads = None"),
        (lambda folder: (folder / "config.json").write_text("[]"), "does not describe Medusa heads"),
        (
            lambda folder: (folder / "config.json").write_text('{"medusa_num_heads": 6, "medusa_num_layers": 2}'),
            "lack 4.0.linear.weight or blocks.4.layers.0.weight",
        ),
    ],
)
def test_broken_folders_are_told(tmp_path: Path, break_it: Callable[[Path], None], message: str) -> None:
    folder = written(tmp_path, heads_of(16, 32))
    break_it(folder)
    with pytest.raises(ModelError, match=message):
        MedusaDrafter(context(folder))


def test_heads_that_share_the_projection_need_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share the model's output projection"):
        MedusaDrafter(context(written(tmp_path, heads_of(16, 32), "shared")))


# ---- trees


def test_a_tree_holds_the_ranks_that_its_choices_name(tmp_path: Path) -> None:
    heads, choices = heads_of(16, 32), ((1,), (0,), (0, 2), (0, 0), (0, 0, 1), (1, 0))
    folder = written(tmp_path, heads)
    drafter = MedusaTreeDrafter(context(folder, num_tokens=6, options=MedusaTreeOptions(choices=choices)))
    states = torch.randn(5, 16)
    batch = DraftBatch(
        rows=torch.arange(5),
        token_table=torch.zeros(5, 8, dtype=torch.int32),
        num_tokens=torch.full((5,), 3, dtype=torch.int32),
        last_token_ids=torch.zeros(5, dtype=torch.int64),
        positions=torch.full((5,), 2),
        hidden_states=states,
    )
    with torch.no_grad():
        found = drafter.propose(batch)
        ranked = [head(states).argsort(-1, descending=True) for head in heads]
    paths = [(0,), (0, 0), (1,), (0, 2), (1, 0), (0, 0, 1)]
    assert found.parents.tolist() == [-1, 0, -1, 0, 2, 1]
    for node, path in enumerate(paths):
        assert found.token_ids[:, node].tolist() == ranked[len(path) - 1][:, path[-1]].tolist()


def test_the_likeliest_tree_begins_with_the_chain_and_is_whole() -> None:
    for num_nodes in (1, 2, 4, 16, 64):
        paths = likeliest(num_nodes, 4)
        assert len(set(paths)) == num_nodes
        assert all(parent < node for node, parent in enumerate(parents_of(paths)))
        chain = [path for path in paths if not any(path)]
        assert paths[: len(chain)] == chain
        assert max(map(len, paths)) <= 4
    assert likeliest(4, 4) == [(0,), (0, 0), (0, 0, 0), (1,)]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (((0, 0),), "has \\[0, 0\\] and not \\[0\\]"),
        (((0,), (0,)), "twice"),
        (((-1,),), "no path of ranks"),
        (((),), "no path"),
    ],
)
def test_choices_that_are_no_tree_are_refused(choices: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ordered(choices)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_texts_are_the_same_with_the_tree(tiny: Tiny, engines: Engines, tmp_path: Path, backend: str) -> None:
    path, folder = tiny("llama", vocab_size=8), written(tmp_path / "heads", heads_of(64, 8), "shared")
    plain = engines(path)
    options = {
        "drafter.name": "medusa_tree",
        "drafter.tokens": 12,
        "drafter.path": str(folder),
        "drafter.adaptive": False,
    }
    llm = engines(path, **options, backend=backend, max_num_batched_tokens=48)
    prompts = random_prompts((30, 25, 40, 10, 33, 28), seed=8, vocab_size=8)
    for params in (
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, presence_penalty=0.5),
    ):
        assert tokens_of(llm, prompts, params) == tokens_of(plain, prompts, params)
    assert llm.engine.extension("drafts").drafting.counts.accepted > 10
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
    (setting,) = [s for s in llm.plan.settings if s.key == "drafter.tree"]
    assert setting.resolved == "request_trees"


def test_a_tree_that_is_larger_than_asked_for_or_deeper_than_the_heads_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, heads_of(16, 32))
    with pytest.raises(ConfigError, match=r"choices has 2 nodes, drafter.tokens is 1"):
        MedusaTreeDrafter(context(folder, num_tokens=1, options=MedusaTreeOptions(choices=((0,), (1,)))))
    deep = tuple((0,) * depth for depth in range(1, 6))
    with pytest.raises(ConfigError, match=r"there are 4 heads .* 5 places"):
        MedusaTreeDrafter(context(folder, num_tokens=5, options=MedusaTreeOptions(choices=deep)))
