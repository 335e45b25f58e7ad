"""The `mla` cache spec: one latent a token, which is key and value, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from slotline.plugins.kv_specs.mla_cache import MLASpec
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.kv_spec import KVSpecContext
from slotline.registry.errors import CapacityError, PluginError

LAYER = AttentionLayer(
    name="attn", index=0, num_heads=16, num_kv_heads=1, head_size=40, head_size_v=32, scale=0.1, mla=True, kv_kind="mla"
)


def spec(layer: AttentionLayer = LAYER, dtype: str = "float32") -> MLASpec:
    return MLASpec(
        KVSpecContext(
            contract=1,
            layers=(layer,),
            block_size=16,
            kernel_block_size=4,
            layout="NHD",
            kv_dtype=dtype,
            max_model_len=100,
        )
    )


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_a_page_holds_one_latent_for_each_token_and_no_values(dtype: str, size: int) -> None:
    assert spec(dtype=dtype).page_bytes(LAYER) == 16 * 40 * size


def test_values_are_the_first_numbers_of_the_keys() -> None:
    raw = torch.zeros(3 * spec().page_bytes(LAYER), dtype=torch.uint8)
    cache = spec().bind(raw, LAYER, 3)
    assert (cache.key.shape, cache.value.shape) == ((12, 4, 1, 40), (12, 4, 1, 32))
    cache.key.copy_(torch.randn(cache.key.shape))
    assert torch.equal(cache.value, cache.key[..., :32])
    assert raw.view(torch.float32).view(12, 4, 1, 40).equal(cache.key)


def test_every_token_is_kept_until_the_end() -> None:
    assert [spec().blocks_needed(n) for n in (0, 1, 16, 17, 100)] == [0, 1, 1, 2, 7]
    assert (spec().max_blocks_held(), spec().blocks_freeable(99)) == (7, 0)
    assert spec().prefix_hit([b"a", b"b", b"c"], {b"a": 3, b"c": 4}.get) == [3]


@pytest.mark.parametrize("change", [{"mla": False}, {"num_kv_heads": 2}, {"head_size_v": 48}])
def test_layers_that_keep_no_latents_are_refused_with_their_figures(change: dict[str, object]) -> None:
    with pytest.raises(PluginError, match=r"'attn' .* keeps no latents"):
        spec(evolve(LAYER, **change))


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(CapacityError, match="4 kernel blocks of 4 tokens need 2560"):
        spec().bind(torch.zeros(2400, dtype=torch.uint8), LAYER, 1)
