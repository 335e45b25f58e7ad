"""Attention backends written for vLLM's v1 interface: a right one in each form of the interface, and wrong ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MultipleOf


@dataclass
class Metadata:
    starts: list[int]
    lengths: list[int]
    table: torch.Tensor
    slots: torch.Tensor


class Builder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Metadata:
        starts = common.query_start_loc_cpu.tolist()
        assert len(starts) == common.num_reqs + 1
        assert starts[-1] == common.num_actual_tokens == len(common.slot_mapping)
        assert min(b - a for a, b in itertools.pairwise(starts)) > 0, "vLLM schedules no empty request"
        return Metadata(starts, common.seq_lens.tolist(), common.block_table_tensor, common.slot_mapping)


class DecodesFirst(Builder):
    reorder_batch_threshold = 1

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Metadata:
        found = super().build(common_prefix_len, common)
        counts = [b - a for a, b in zip(found.starts, found.starts[1:], strict=False)]
        assert counts == sorted(counts, key=lambda count: count > 1), "decodes come first"
        return found


class Impl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError("no ALiBi")
        self.group, self.scale, self.window = num_heads // num_kv_heads, scale, sliding_window
        self.cap, self.sinks = logits_soft_cap, sinks

    def parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, [blocks, tokens, heads, size]."""
        keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
        return keys, values

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: torch.Tensor) -> None:
        kept = torch.nonzero(slots >= 0)[:, 0]
        for part, new in zip(self.parts(cache), (key, value), strict=True):
            size = part.shape[1]
            part[slots[kept] // size, slots[kept] % size] = new[kept]

    def blocks(self, length: int, size: int) -> int:
        return -(-length // size)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Metadata, output: Any, *_: Any
    ) -> torch.Tensor:
        for row, length in enumerate(metadata.lengths):
            first, end = metadata.starts[row : row + 2]
            keys, values = (self.gathered(part, metadata.table[row], length) for part in self.parts(cache))
            position = torch.arange(length - (end - first), length)[:, None]
            where = torch.arange(len(keys))[None]
            hidden = where > position
            if self.window is not None:
                hidden |= where <= position - self.window
            keys, values = (part.masked_fill(hidden.all(0)[:, None, None], 0.0) for part in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[first:end].float(), keys) * self.scale
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                sinks = self.sinks.float()[:, None, None].expand(-1, end - first, 1)
                weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            output[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(output.dtype)
        return output

    def gathered(self, part: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
        rows = part[table[: self.blocks(length, part.shape[1])].long()].flatten(0, 1)[:length]
        return rows.float().repeat_interleave(self.group, 1)


class LastBlockLost(Impl):
    """Counts the blocks before the last token, not the block that it begins."""

    def blocks(self, length: int, size: int) -> int:
        return max(1, -(-(length - 1) // size))


class RightBackend(AttentionBackend):
    """The interface of vLLM 0.32: the cache is [blocks, heads, tokens, keys and values]."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]
    forward_includes_kv_cache_update = False
    impl: ClassVar[type] = Impl
    builder: ClassVar[type] = Builder

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(8)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [32, 64]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


class WrongBackend(RightBackend):
    impl = LastBlockLost


class EarlierImpl(Impl):
    def parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = cache.unbind(0)
        return keys, values

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *more: Any, **names: Any
    ):
        self.do_kv_cache_update(layer, key[: len(metadata.slots)], value, cache, metadata.slots)
        return super().forward(layer, query, key, value, cache, metadata, *more, **names)


class EarlierBackend(RightBackend):
    """The interface before: the class names the cache's shape, `forward` stores, and decodes come first."""

    forward_includes_kv_cache_update = True
    impl = EarlierImpl
    builder = DecodesFirst

    @staticmethod
    def get_name() -> str:
        return "SLOTLINE_EARLIER"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class LatentBackend(RightBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True
