"""The transformers model family on a CUDA device: the same logits, also in graphs, and weights kept on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch

from slotline.plugins.model_families.transformers_model import DecoderModel
from tests.plugins.model_families.test_model_family import dense_attention, load, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIXTURES = ("glm4_moe", "gpt_oss", "mixtral", "qwen3_moe")
DENSE = tuple(name for name in tiny_models.FAMILIES if name not in MIXTURES)
TOLERANCE = 2e-3
"""Matrix products in float32 on a GPU sum in another order."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds each family's checkpoint once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(name: str) -> Path:
        return root / name if (root / name).is_dir() else tiny_models.build(name, root / name)

    return get


def logits_of(model: DecoderModel, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.compute_logits(model.forward(token_ids, positions, dense_attention))


def captured(model: DecoderModel, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's logits for `count` tokens as the replay of a graph that was captured with other tokens."""
    token_ids = torch.zeros(count, dtype=torch.int64, device="cuda")  # [count]
    positions = torch.arange(count, device="cuda")  # [count]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # else it may read the two tensors before they are written
    with torch.cuda.stream(stream):
        for _ in range(2):
            logits_of(model, token_ids, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits = logits_of(model, token_ids, positions)  # [count, vocab_size]

    def replay(new: torch.Tensor) -> torch.Tensor:
        token_ids.copy_(new)
        positions.copy_(torch.arange(count))  # also keeps the memory that the graph reads alive
        graph.replay()
        return logits.cpu()

    return replay


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_logits_on_cuda_equal_those_of_transformers_on_the_cpu(
    name: str, optimize: bool, checkpoints: Callable[[str], Path]
) -> None:
    path, token_ids = checkpoints(name), prompt()
    model = load(path, device="cuda", optimize=optimize)
    logits = logits_of(model, token_ids.cuda(), torch.arange(len(token_ids), device="cuda"))
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    torch.testing.assert_close(logits.cpu(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", DENSE)
def test_a_forward_can_be_captured_in_a_cuda_graph(name: str, checkpoints: Callable[[str], Path]) -> None:
    path = checkpoints(name)
    replay = captured(load(path, device="cuda", optimize=True), count=24)
    for seed in (1, 2):
        token_ids = torch.randint(3, tiny_models.VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(seed))
        expected = tiny_models.logits_reference(path, token_ids.tolist())
        torch.testing.assert_close(replay(token_ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_can_be_captured_in_bfloat16(name: str, checkpoints: Callable[[str], Path]) -> None:
    model = load(checkpoints(name), device="cuda", dtype="bfloat16", optimize=True)
    replay = captured(model, count=24)
    positions = torch.arange(24, device="cuda")
    for seed in (1, 2):
        token_ids = torch.randint(3, tiny_models.VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(seed))
        expected = logits_of(model, token_ids.cuda(), positions).cpu()
        torch.testing.assert_close(replay(token_ids), expected, atol=1e-2, rtol=0)


@pytest.mark.behaviour(2, 132)
@pytest.mark.parametrize("optimize", [False, True])
def test_offloaded_layers_live_in_host_memory_and_give_the_same_logits(
    optimize: bool, checkpoints: Callable[[str], Path]
) -> None:
    path, token_ids = checkpoints("llama_deep"), prompt(24)
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    layer_bytes = sum(4 * p.numel() for p in tiny_models.oracle(path).model.layers[0].parameters())
    model = load(path, device="cuda", offload_bytes=2 * layer_bytes + 1, optimize=optimize)
    layers = model.hf_model.model.layers
    assert [next(layer.parameters()).device.type for layer in layers] == ["cuda", "cuda", "cpu", "cpu"]
    assert all(parameter.is_pinned() for parameter in layers[3].parameters())
    replay = captured(model, count=24)
    torch.testing.assert_close(replay(token_ids), expected, atol=TOLERANCE, rtol=0)
    with torch.no_grad():
        for parameter in model.hf_model.parameters():
            parameter.zero_()
    assert (replay(token_ids) - expected).abs().max() > 0.1
    model.reload_weights()
    torch.testing.assert_close(replay(token_ids), expected, atol=TOLERANCE, rtol=0)
