"""Large weights go to a GPU in pieces, by several threads."""

from __future__ import annotations

import threading

import pytest
import torch

from slotline.plugins.model_families import offload, pinned_copies
from slotline.plugins.model_families.pinned_copies import SMALLEST, copy_all, is_large, move, pieces


class Recorded:
    """A lane on the host."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.copied, self.finished = fails, 0, False
        self.thread = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self.fails:
            raise RuntimeError("no more")
        assert not self.finished
        self.thread = threading.get_ident()
        self.copied += source.numel()
        target.copy_(source)

    def finish(self) -> None:
        self.finished = True


def test_every_byte_arrives_once_whatever_the_pieces_and_the_lanes() -> None:
    sources = [torch.randn(7, 31), torch.randn(129, dtype=torch.float64), torch.randn(5, 3).bfloat16()]
    targets = [torch.full_like(source, torch.nan) for source in sources]
    lanes = [Recorded() for _ in range(3)]
    copy_all(pieces(sources, targets, most=100), lanes)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)
    assert sum(lane.copied for lane in lanes) == sum(source.nbytes for source in sources)
    assert all(lane.finished for lane in lanes)
    assert threading.get_ident() not in {lane.thread for lane in lanes}


def test_what_a_lane_raises_comes_out() -> None:
    with pytest.raises(RuntimeError, match="no more"):
        copy_all(pieces([torch.zeros(9)], [torch.zeros(9)], most=4), [Recorded(fails=True)])


def test_only_large_plain_contiguous_tensors_of_the_host_are_worth_threads() -> None:
    large = torch.empty(SMALLEST // 4)
    assert is_large(large)
    assert not is_large(large[1:])
    assert not is_large(torch.empty(2, SMALLEST // 4).t())
    assert not is_large(large.to("meta"))
    assert not is_large(torch.nn.Parameter(large))  # a model's tensors are taken without what wraps them


class ToHost:
    """Takes the place of `PinnedLane`: it copies to what stands for the GPU."""

    made = 0

    def __init__(self, device: torch.device) -> None:
        type(self).made += 1
        self.copy, self.finish = Recorded().copy, Recorded().finish


def test_a_model_moves_with_tied_weights_and_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Module()
    model.first = torch.nn.Linear(640, 640)
    model.second = torch.nn.Linear(640, 640, bias=False)
    model.second.weight = model.first.weight
    model.register_buffer("small", torch.ones(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    at = model.first.weight.data_ptr()
    empty_like, moved = torch.empty_like, []
    monkeypatch.setattr(pinned_copies, "PinnedLane", ToHost)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, device: empty_like(tensor))
    monkeypatch.setattr(model, "to", moved.append)
    offload.place(model, torch.device("cuda"), 0)
    assert ToHost.made == 1  # one large tensor, tied
    assert moved == [torch.device("cuda")]
    assert model.second.weight is model.first.weight
    assert model.first.weight.data_ptr() != at
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_without_pinned_memory_weights_are_copied_plainly_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, moved = torch.nn.Linear(1024, 1024), []

    def refuse(device: torch.device) -> None:
        raise RuntimeError("cudaHostAlloc failed")

    monkeypatch.setattr(pinned_copies, "PinnedLane", refuse)
    monkeypatch.setattr(model, "to", moved.append)
    move(model, torch.device("cuda"))
    assert moved == [torch.device("cuda")]
    assert "ordinary memory, which takes longer: cudaHostAlloc failed" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_weights_are_the_same() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3000, 2999) for _ in range(3)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    move(model, torch.device("cuda"))
    for name, tensor in model.state_dict().items():
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), before[name])
