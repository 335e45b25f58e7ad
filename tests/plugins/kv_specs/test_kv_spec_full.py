"""The `full` cache spec: how many blocks, which prefix, and how a page lies in memory."""

from __future__ import annotations

import pytest
import torch

from slotline.plugins.kv_specs.full_cache import FullSpec
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.kv_spec import KVSpecContext
from slotline.registry.errors import CapacityError, PluginError


def layer(head_size_v: int = 8) -> AttentionLayer:
    return AttentionLayer(
        name="attn", index=0, num_heads=4, num_kv_heads=2, head_size=8, head_size_v=head_size_v, scale=1.0
    )


def spec(layout: str = "NHD", block_size: int = 16, kernel_block_size: int = 4, dtype: str = "float32") -> FullSpec:
    return FullSpec(
        KVSpecContext(
            contract=1,
            layers=(layer(),),
            block_size=block_size,
            kernel_block_size=kernel_block_size,
            layout=layout,
            kv_dtype=dtype,
            max_model_len=100,
        )
    )


def test_a_request_needs_a_block_for_each_begun_stretch_of_tokens() -> None:
    assert [spec().blocks_needed(n) for n in (0, 1, 16, 17, 100)] == [0, 1, 1, 2, 7]
    assert spec().max_blocks_held() == 7


def test_no_block_is_freed_early() -> None:
    assert spec().blocks_freeable(99) == 0


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_a_page_holds_keys_and_values_of_one_block(dtype: str, size: int) -> None:
    assert spec(dtype=dtype).page_bytes(layer()) == 16 * 2 * (8 + 8) * size
    assert spec(dtype=dtype).page_bytes(layer(head_size_v=3)) == 16 * 2 * (8 + 3) * size


def test_the_prefix_ends_at_the_first_block_that_is_not_cached() -> None:
    cached = {b"a": 3, b"b": 9, b"d": 4}
    assert spec().prefix_hit([b"a", b"b", b"c", b"d"], cached.get) == [3, 9]
    assert spec().prefix_hit([b"c", b"a"], cached.get) == []
    assert spec().prefix_hit([], cached.get) == []


@pytest.mark.parametrize("head_size_v", [8, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_views_cover_the_buffer_exactly_once(layout: str, head_size_v: int) -> None:
    own = layer(head_size_v)
    raw = torch.zeros(3 * spec(layout).page_bytes(own), dtype=torch.uint8)
    key, value = spec(layout).bind(raw, own, 3)
    assert key.shape == (12, 4, 2, 8)
    assert value.shape == (12, 4, 2, head_size_v)
    key.copy_(torch.arange(key.numel()).view(key.shape))
    value.copy_(-1.0 - torch.arange(value.numel()).view(value.shape))
    assert sorted(raw.view(torch.float32).tolist()) == list(range(-value.numel(), key.numel()))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_manager_block_is_consecutive_kernel_blocks_and_one_piece_of_memory(layout: str) -> None:
    own, page = layer(), spec(layout).page_bytes(layer())
    raw = torch.zeros(3 * page, dtype=torch.uint8)
    key, value = spec(layout).bind(raw, own, 3)
    key[4:8], value[4:8] = 1.0, 2.0  # the four kernel blocks of manager block 1
    assert not raw[:page].any()
    assert not raw[2 * page :].any()
    assert raw[page : 2 * page].view(torch.float32).all()


def test_the_layout_decides_what_is_next_to_what() -> None:
    strides = {}
    for layout in ("NHD", "HND"):
        raw = torch.zeros(2 * spec(layout).page_bytes(layer()), dtype=torch.uint8)
        strides[layout] = spec(layout).bind(raw, layer(), 2).key.stride()
    assert strides == {"NHD": (2 * 4 * 16, 16, 8, 1), "HND": (2 * 4 * 16, 8, 4 * 8, 1)}


def test_a_buffer_of_another_length_is_refused() -> None:
    with pytest.raises(CapacityError, match="8 kernel blocks"):
        spec().bind(torch.zeros(100, dtype=torch.uint8), layer(), 2)


def test_unknown_names_and_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PluginError, match="float7"):
        spec(dtype="float7")
    with pytest.raises(PluginError, match="does not divide"):
        spec(block_size=16, kernel_block_size=5)
    with pytest.raises(PluginError, match="HDN"):
        spec("HDN").bind(torch.zeros(2 * spec().page_bytes(layer()), dtype=torch.uint8), layer(), 2)
