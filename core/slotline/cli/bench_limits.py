"""Hardware limits: measured rates of the machine, and the bytes and operations that a model cannot avoid.

Decoding reads the weights once a step and each request's cache. A prompt costs two operations a weight and token, and
attention. Prompts and decoding are counted one after the other, so a step that mixes them could in principle gain the
weights that it reads once. Mixtures of experts have no limit here, since the experts that a step reads depend on its
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from slotline.planner.auto_config import auto_config
from slotline.registry.contracts import FORMAT_DTYPES, AttentionLayer
from slotline.registry.contracts.cache_tensors import stored_size

if TYPE_CHECKING:
    from slotline.cli.bench_run import Served
    from slotline.registry.negotiation import Plan

SCALE_BYTES = 4
"""Bytes of a scale in the formats of `FORMAT_DTYPES`."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_REPEATS = 7


@frozen(kw_only=True)
class Machine:
    """Measured rates.

    Attributes:
        read_bytes_per_s: reading a large tensor, as a sum does.
        copy_bytes_per_s: copying one, bytes read and written.
        flops_per_s: of a large matrix product in the model's dtype.
        dtype: of that product.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: float
    dtype: str

    @property
    def bytes_per_s(self) -> float:
        """The higher of the two: a write that first fetches its line makes a copy move more than it counts."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    def better_of(self, other: Machine) -> Machine:
        """Return the higher of two measurements of each rate, since other load can only lower them."""
        return Machine(
            read_bytes_per_s=max(self.read_bytes_per_s, other.read_bytes_per_s),
            copy_bytes_per_s=max(self.copy_bytes_per_s, other.copy_bytes_per_s),
            flops_per_s=max(self.flops_per_s, other.flops_per_s),
            dtype=self.dtype,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the machine as JSON types."""
        return {
            "read_bytes_per_s": self.read_bytes_per_s,
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "flops_per_s": self.flops_per_s,
            "dtype": self.dtype,
        }


@frozen(kw_only=True)
class ModelCost:
    """Least cost of a model.

    Attributes:
        body, head: parameters that each token, or each sampled position, is multiplied with.
        itemsize, kv_itemsize: bytes of a weight and of a cache element.
        kv_scale_bytes: bytes of the scale beside each vector of a cache with codes, 0 for others.
        layers: attention layers.
        max_requests: rows.
    """

    body: int
    head: int
    itemsize: int
    kv_itemsize: float
    layers: tuple[AttentionLayer, ...]
    max_requests: int
    kv_scale_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Read by a step."""
        return (self.body + self.head) * self.itemsize

    def prompt_seconds(self, requests: Sequence[Served], machine: Machine) -> float:
        """Return the least time for the prompts' tokens that are not cached, first output tokens included."""
        new = sum(r.prompt - r.cached for r in requests)
        pairs = sum(self._attention(r.cached, r.prompt) for r in requests)
        operations = 2 * self.body * new + 2 * self.head * len(requests) + pairs
        return max(operations / machine.flops_per_s, self.weight_bytes / machine.bytes_per_s)

    def decode_steps(self, requests: Sequence[Served]) -> int:
        """Return the fewest steps that give all tokens after the first."""
        later = [r.output - 1 for r in requests]
        return max(max(later), -(-sum(later) // self.max_requests))

    def decode_seconds(self, requests: Sequence[Served], machine: Machine) -> float:
        """Return the least time for all tokens after the first."""
        cache = sum(self._cache_bytes(r.prompt, r.prompt + r.output - 1) for r in requests)
        moved = self.decode_steps(requests) * self.weight_bytes + cache
        pairs = sum(self._attention(r.prompt, r.prompt + r.output - 1) for r in requests)
        operations = 2 * (self.body + self.head) * sum(r.output - 1 for r in requests) + pairs
        return max(moved / machine.bytes_per_s, operations / machine.flops_per_s)

    def _attention(self, first: int, end: int) -> float:
        """Count the operations of the queries at positions first .. end - 1."""
        return sum(2 * x.num_heads * (x.head_size + x.head_size_v) * _keys(first, end, x.window) for x in self.layers)

    def _cache_bytes(self, first: int, end: int) -> float:
        """Count the bytes of keys and values that these queries read. Latents hold their values."""
        return sum(self._token_bytes(x) * _keys(first, end, x.window) for x in self.layers)

    def _token_bytes(self, layer: AttentionLayer) -> float:
        vectors = (layer.head_size,) if layer.mla else (layer.head_size, layer.head_size_v)
        return layer.num_kv_heads * sum(size * self.kv_itemsize + self.kv_scale_bytes for size in vectors)


def cost_of(plan: Plan, folder: Path, max_requests: int) -> ModelCost | None:
    """Return the least cost of the plan's model, or None for a mixture of experts."""
    config = auto_config(folder).get_text_config()
    if any(getattr(config, name, None) for name in _EXPERTS):
        return None
    head = int(plan.facts["vocab_size"]) * int(plan.facts["hidden_size"])
    embedding = 0 if config.tie_word_embeddings else head  # a table of which a step reads a few rows
    coded = [group.cache_format for group in plan.groups if group.cache_format in FORMAT_DTYPES]
    return ModelCost(
        body=int(plan.facts["parameters"]) - head - embedding,
        head=head,
        itemsize=getattr(torch, plan.dtype).itemsize,
        kv_itemsize=getattr(torch, plan.kv_dtype).itemsize * (stored_size(coded[0], 2) / 2 if coded else 1),
        kv_scale_bytes=SCALE_BYTES if coded else 0,
        layers=tuple(layer for group in plan.groups for layer in group.layers),
        max_requests=max_requests,
    )


def measure_machine(device: str, dtype: str) -> Machine:
    """Measure the machine now, best of several: about a second on a CPU."""
    on_gpu = device.startswith("cuda")
    data = torch.ones(2**29 if on_gpu else 2**26, device=device)  # 2 GiB or 256 MiB: far beyond any cache
    other, size = torch.empty_like(data), 8192 if on_gpu else 1536
    matrix = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    return Machine(
        read_bytes_per_s=_rate(data.sum, data.nbytes),
        copy_bytes_per_s=_rate(lambda: other.copy_(data), 2 * data.nbytes),
        flops_per_s=_rate(lambda: matrix @ matrix, 2 * size**3),
        dtype=dtype,
    )


def _rate(work: Callable[[], Any], amount: float) -> float:
    return amount / min(_seconds(work) for _ in range(_REPEATS))


def _seconds(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - start


def _keys(first: int, end: int, window: int | None) -> int:
    """Return the keys seen by the queries at positions first .. end - 1, summed."""
    seen = np.arange(first + 1, end + 1)
    return int((seen if window is None else np.minimum(seen, window)).sum())
