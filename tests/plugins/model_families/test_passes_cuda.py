"""The fused passes on a CUDA device: the untouched model's logits in every dtype, eagerly and in replayed graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from slotline.plugins.model_families.passes.equality import relative_difference
from slotline.plugins.model_families.passes.lean_attention import LeanForward
from slotline.plugins.model_families.passes.lean_layer import LeanLayer
from slotline.plugins.model_families.passes.lean_mlp import LeanMLP
from tests.plugins.model_families.test_model_family import dense_attention, load, prompt
from tests.plugins.model_families.test_model_family_cuda import MIXTURES, captured, logits_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DENSE = tuple(name for name in tiny_models.FAMILIES if name not in MIXTURES)
PLAIN_MLP = ("starcoder2",)
OTHER_LAYERS = ("granite", *PLAIN_MLP)
"""Families whose residuals are scaled, or whose norms are no RMS norms."""
DENSE_LAYERS = {"glm4_moe": 1}
"""Layers without experts, of the mixtures that have such."""
DENSE_MLPS = {"glm4_moe": 4}
"""Their MLPs, and those of experts that all tokens share."""
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Of the largest logit; the weights are wide, so that roundings grow from layer to layer."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds each family's checkpoint once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(name: str) -> Path:
        return root / name if (root / name).is_dir() else tiny_models.build(name, root / name)

    return get


def forwards(model: Any, kind: type) -> int:
    return sum(type(module.__dict__.get("forward")) is kind for module in model.hf_model.modules())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_a_fused_model_gives_the_logits_of_the_untouched_one(
    name: str, dtype: str, checkpoints: Callable[[str], Path]
) -> None:
    if name in MIXTURES and dtype != "float32":
        pytest.skip("a rounding may choose another expert")
    path, token_ids = checkpoints(name), prompt(300).cuda()
    positions = torch.arange(300, device="cuda")
    fused, plain = (load(path, device="cuda", dtype=dtype, optimize=optimize) for optimize in (True, False))
    for count in (1, 5, 300):
        expected = logits_of(plain, token_ids[:count], positions[:count])
        found = logits_of(fused, token_ids[:count], positions[:count])
        assert relative_difference(found, expected) <= TOLERANCES[dtype], count


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_every_layer_gets_the_fused_passes_made_for_it(
    name: str, dtype: str, checkpoints: Callable[[str], Path]
) -> None:
    model = load(checkpoints(name), device="cuda", dtype=dtype, optimize=True)
    layers = model.hf_model.config.num_hidden_layers
    assert forwards(model, LeanForward) == layers
    dense = DENSE_LAYERS.get(name, 0 if name in MIXTURES else layers)
    assert forwards(model, LeanMLP) == (0 if name in PLAIN_MLP else DENSE_MLPS.get(name, dense))
    assert forwards(model, LeanLayer) == (0 if name in OTHER_LAYERS else dense)


@pytest.mark.parametrize("count", [1, 24, 200])
@pytest.mark.parametrize("name", DENSE)
def test_a_captured_fused_forward_replays_what_it_computes_eagerly(
    name: str, count: int, checkpoints: Callable[[str], Path]
) -> None:
    model = load(checkpoints(name), device="cuda", dtype="bfloat16", optimize=True)
    replay = captured(model, count)
    positions = torch.arange(count, device="cuda")
    for seed in (1, 2):
        token_ids = torch.randint(3, tiny_models.VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))
        expected = logits_of(model, token_ids.cuda(), positions).cpu()
        assert relative_difference(replay(token_ids), expected) <= 2e-2


@pytest.mark.parametrize("wanted", [[4, 290], []])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "phi3"])
def test_the_wanted_tokens_alone_go_past_the_last_attention(
    name: str, wanted: list[int], checkpoints: Callable[[str], Path]
) -> None:
    model = load(checkpoints(name), device="cuda", optimize=True)
    token_ids, positions = prompt(300).cuda(), torch.arange(300, device="cuda")
    index = torch.tensor(wanted, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        whole = model.forward(token_ids, positions, dense_attention)
        found = model.forward(token_ids, positions, dense_attention, index)
    torch.testing.assert_close(found, whole[index], atol=1e-4, rtol=1e-4)
