"""Packed weights in huge pages: the same numbers from other memory, and where they stay."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from slotline.plugins.model_families.passes import huge_pages
from slotline.plugins.model_families.passes.cpu_products import ONEDNN, Way
from slotline.plugins.model_families.passes.huge_pages import Room, page_bytes
from slotline.plugins.model_families.passes.packed_linear import PackedLinear
from slotline.plugins.model_families.passes.pipeline import optimize
from slotline.plugins.model_families.passes.target import target_of

PLAIN = Way("plain", ("torch",) * 4)

pytestmark = pytest.mark.skipif(not page_bytes(), reason="the system gives no huge pages")


def build(products: Any = "onednn") -> tuple[Any, tuple[str, ...]]:
    """A small Llama whose weights fill some huge pages, and the passes' notes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4
    )
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval().requires_grad_(False)
    return model, optimize(model, device="cpu", dtype="float32", products=products)


def weights_of(model: Any) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("way", [ONEDNN, PLAIN], ids=["onednn", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_weight_gives_the_same_products_and_can_be_loaded_again(dtype: torch.dtype, way: Way) -> None:
    if not target_of("cpu", dtype).packs:
        pytest.skip("no packed kernels of this dtype here")
    torch.manual_seed(0)
    linear, other = nn.Linear(300, 200, dtype=dtype), nn.Linear(300, 200, dtype=dtype)
    packed, x = PackedLinear(linear.weight, linear.bias, way), torch.randn(33, 300).to(dtype)
    with torch.no_grad():
        expected = {rows: packed(x[:rows]) for rows in (1, 33)}
        room = Room(2 << 20, page_bytes())
        room.copy(packed.packed)  # what follows begins at another place
        packed.move(room.copy(packed.packed), room)
        del room
        gc.collect()
        torch.full((1 << 21,), 7.0)  # would be where a freed room was
        for rows, wanted in expected.items():
            assert torch.equal(packed(x[:rows]), wanted)
        assert torch.equal(packed.weight, linear.weight)
        packed.packed.copy_(packed.pack(other.weight))
        assert torch.equal(packed.weight, other.weight)


def test_a_model_is_moved_as_a_whole_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_ratio", lambda *_: 0.5)
    stays, notes = build()
    assert "weights in pages of the usual size: 0.50 times the speed in huge ones" in notes
    assert all(linear._room is None for linear in weights_of(stays))
    monkeypatch.setattr(huge_pages, "_ratio", lambda *_: 1.5)
    moved, notes = build()
    assert any(note.startswith("weights in huge pages") for note in notes), notes
    rooms = {id(linear._room) for linear in weights_of(moved)}
    assert len(rooms) == 1
    assert weights_of(moved)[0]._room is not None
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(moved(ids).logits, stays(ids).logits)


def test_both_places_are_timed_and_the_weights_are_back_behind_it() -> None:
    linears = [PackedLinear(torch.randn(256, 256), None) for _ in range(3)]
    before = [linear.packed for linear in linears]
    room = Room(1 << 20, page_bytes())
    assert 0.01 < huge_pages._ratio(linears, [room.copy(weight) for weight in before]) < 100
    assert all(linear.packed is weight for linear, weight in zip(linears, before, strict=True))
    assert 0 <= room.given() <= 3 * 256 * 1024


def test_a_system_without_huge_pages_and_a_small_model_say_so_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "SYSTEM", tmp_path)
    _, notes = build()
    assert "weights in pages of the usual size: the system gives no huge ones" in notes
    (tmp_path / "enabled").write_text("always madvise [never]")
    (tmp_path / "hpage_pmd_size").write_text("2097152")
    assert page_bytes() == 0
    (tmp_path / "enabled").write_text("always [madvise] never")
    assert page_bytes() == 1 << 21
    monkeypatch.setattr(huge_pages, "FEWEST_BYTES", 1 << 40)
    assert not any("pages" in note for note in build()[1])
