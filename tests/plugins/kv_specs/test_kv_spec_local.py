"""The `sliding` and `chunked_local` cache specs: what is held, what goes back, and which prefix can be gone on from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotline.plugins.kv_specs.local_cache import ChunkedLocalSpec, SlidingSpec
from slotline.registry.contracts import KVSpecContext
from slotline.registry.errors import PluginError
from slotline.testing.environments.kv_spec import layer_of
from slotline.testing.oracles.kv_spec import freeable_blocks, longest_prefix, resumable

SPECS = {"sliding": SlidingSpec, "chunked": ChunkedLocalSpec}
LENGTH = 60


def layer(kind: str, reach: int | None) -> Any:
    return layer_of(kind=kind, **{"window" if kind == "sliding" else "chunk": reach})


def spec(
    kind: str, reach: int, block_size: int, ahead: int = 1, length: int = LENGTH
) -> SlidingSpec | ChunkedLocalSpec:
    return SPECS[kind](
        KVSpecContext(
            contract=1,
            layers=(layer(kind, reach),),
            block_size=block_size,
            kernel_block_size=block_size,
            layout="NHD",
            kv_dtype="float32",
            max_model_len=length,
            max_tokens_in_flight=ahead,
        )
    )


kinds = st.sampled_from(sorted(SPECS))
small = st.integers(1, 20)


def test_a_window_of_three_in_blocks_of_four() -> None:
    own = spec("sliding", 3, 4)
    # with 5 computed the next query reads 3, 4, 5; with 6 it reads 4, 5, 6
    assert [own.blocks_freeable(n) for n in (0, 5, 6, 9, 10)] == [0, 0, 1, 1, 2]
    assert own.max_blocks_held() == 2
    assert spec("sliding", 3, 4, ahead=8).max_blocks_held() == 4  # 2 before and 8 new ones, over an edge at both ends


def test_a_chunk_of_eight_in_blocks_of_four() -> None:
    own = spec("chunked", 8, 4)
    assert [own.blocks_freeable(n) for n in (0, 7, 8, 15, 16)] == [0, 0, 2, 2, 4]
    assert own.max_blocks_held() == 2
    assert spec("chunked", 8, 4, ahead=4).max_blocks_held() == 3  # 7 computed, 11 in the table


@given(kinds, small, st.integers(1, 7), st.integers(1, 15), st.integers(1, LENGTH))
def test_max_blocks_held_is_what_a_request_really_holds_at_most(
    kind: str, reach: int, block_size: int, ahead: int, length: int
) -> None:
    own = spec(kind, reach, block_size, ahead, length)
    held = [own.blocks_needed(min(n + ahead, length)) - own.blocks_freeable(n) for n in range(length)]
    assert own.max_blocks_held() == max(held)


@given(kinds, small, st.integers(1, 7))
def test_exactly_the_blocks_that_no_later_token_reads_go_back(kind: str, reach: int, block_size: int) -> None:
    own, allowed = spec(kind, reach, block_size), freeable_blocks([layer(kind, reach)], LENGTH, block_size)
    assert [own.blocks_freeable(n) for n in range(LENGTH)] == allowed[:LENGTH].tolist()


@given(kinds, small, st.integers(1, 7), st.lists(st.booleans(), max_size=8))
def test_the_hit_is_the_longest_prefix_whose_read_blocks_are_cached(
    kind: str, reach: int, block_size: int, cached: list[bool]
) -> None:
    own, freeable = spec(kind, reach, block_size), freeable_blocks([layer(kind, reach)], LENGTH, block_size)
    hashes = [bytes([i]) for i in range(len(cached))]
    pool = {h: i + 1 for i, (h, there) in enumerate(zip(hashes, cached, strict=True)) if there}
    asked: list[bytes] = []

    def lookup(block_hash: bytes) -> int | None:
        asked.append(block_hash)
        return pool.get(block_hash)

    found = own.prefix_hit(hashes, lookup)
    assert len(asked) == len(set(asked))  # long prompts are not looked through twice
    assert len(found) >= longest_prefix(hashes, pool.get, freeable, block_size)
    assert resumable(hashes, pool.get, len(found), freeable, block_size)
    first = int(freeable[len(found) * block_size])
    assert found == [0] * first + [pool[h] for h in hashes[first : len(found)]]
    assert not found or hashes[len(found) - 1] in pool  # nobody computed it: no hit, even where nothing is read


@pytest.mark.parametrize("reach", [0, -1, None])
@pytest.mark.parametrize("kind", sorted(SPECS))
def test_a_layer_without_a_token_to_read_is_refused_by_name(kind: str, reach: int | None) -> None:
    with pytest.raises(PluginError, match=rf"'layers.0' \(kind '{kind}'\) has (window|chunk) {reach}"):
        spec(kind, reach, 4)  # type: ignore[arg-type]


def test_unequal_chunks_do_not_share_a_table() -> None:
    context = KVSpecContext(
        contract=1,
        layers=(layer("chunked", 8), layer("chunked", 16)),
        block_size=4,
        kernel_block_size=4,
        layout="NHD",
        kv_dtype="float32",
        max_model_len=64,
    )
    with pytest.raises(PluginError, match=r"chunks of \[8, 16\]"):
        ChunkedLocalSpec(context)
