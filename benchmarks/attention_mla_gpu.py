"""Attention over latents alone on a GPU: time of one layer's call, beside FlashInfer's kernel for the same.

    python benchmarks/attention_mla_gpu.py [--backend triton] [--flashinfer] [--json FILE]

Latents of 512 and 64 (DeepSeek-V2 and V3), bfloat16, pages of 64 tokens; 128 heads as a whole DeepSeek-V3 has, and 16
as DeepSeek-V2-Lite or one of eight devices. Caches of three layers in turn, so that nothing is found in the L2 cache.
Times are medians of replays of a captured graph of 12 calls. Bytes are the latents that must be read, operations those
of the two products under the mask. With `--flashinfer`, outputs are compared as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from command_line import require_gpus

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.loading import resolve_factory

SHORT = ""
CALLS, ROUNDS, LAYERS = 12, 20, 3
RANK, ROPE, PAGE = 512, 64, 64
SCALE = 192**-0.5


class Shape(NamedTuple):
    """A batch: heads, and (query tokens, keys) of each request."""

    heads: int
    requests: tuple[tuple[int, int], ...]
    name: str

    @property
    def keys(self) -> int:
        return sum(length for _, length in self.requests)

    @property
    def operations(self) -> int:
        pairs = sum(count * length - count * (count - 1) // 2 for count, length in self.requests)
        return 2 * self.heads * (2 * RANK + ROPE) * pairs


def decode(heads: int, requests: int, length: int) -> Shape:
    return Shape(heads, ((1, length),) * requests, f"{heads} heads, decode {requests} x {length:,}")


SHAPES = (
    decode(128, 64, 4096),
    decode(128, 16, 8192),
    decode(128, 1, 32768),
    decode(16, 128, 4096),
    decode(16, 64, 4096),
    decode(16, 16, 8192),
    decode(16, 1, 32768),
    Shape(16, ((4, 4096),) * 32, "16 heads, verify 32 x 4 of 4,096"),
    Shape(16, ((4096, 4096),), "16 heads, prefill 1 x 4,096"),
)


class World:
    """One shape made real: the batch, the latents of some layers, a query."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        counts, lens = (np.array(column, np.int32) for column in zip(*shape.requests, strict=True))
        widths = -(-lens // PAGE)
        order = torch.randperm(int(widths.sum())).int() + 1
        table = torch.zeros(len(lens), int(widths.max()), dtype=torch.int32)
        for row, part in enumerate(order.split(widths.tolist())):
            table[row, : len(part)] = part
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.pages, self.page_starts, self.lens = order, np.concatenate([[0], np.cumsum(widths)]).astype(np.int32), lens
        tokens = int(starts[-1])
        self.batch = AttentionBatch(
            num_requests=len(lens),
            num_tokens=tokens,
            max_query_len=int(counts.max()),
            max_seq_len=int(lens.max()),
            query_start_loc=torch.from_numpy(starts).cuda(),
            seq_lens=torch.from_numpy(lens).cuda(),
            block_table=table.cuda(),
            slot_mapping=torch.full((tokens,), -1, device="cuda"),
            positions=torch.zeros(tokens, dtype=torch.int64, device="cuda"),
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
            num_decodes=len(lens) if counts.max() == 1 else 0,
        )
        size = RANK + ROPE
        self.layer = AttentionLayer(
            name="layer",
            index=0,
            num_heads=shape.heads,
            num_kv_heads=1,
            head_size=size,
            head_size_v=RANK,
            scale=SCALE,
            mla=True,
            kv_kind="mla",
        )
        pages = (int(widths.sum()) + 1, PAGE, 1, size)
        latents = [torch.randn(pages, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.caches = [KVCache(each, each[..., :RANK]) for each in latents]
        self.query = torch.randn(tokens, shape.heads, size, device="cuda", dtype=torch.bfloat16)

    def context(self) -> AttentionContext:
        return AttentionContext(
            contract=1,
            layers=(self.layer,),
            device="cuda",
            dtype="bfloat16",
            kv_dtype="bfloat16",
            block_size=PAGE,
            kernel_block_size=PAGE,
            layout="NHD",
            max_query_len=self.batch.max_query_len,
            max_requests=self.batch.num_requests,
            max_tokens=8192,
            max_model_len=self.batch.max_seq_len,
        )

    def ours(self, backend: Any) -> Callable[[int], torch.Tensor]:
        """A call for a layer, by a built backend."""
        plan = backend.plan(self.batch)
        out = torch.empty(self.batch.num_tokens, self.shape.heads, RANK, device="cuda", dtype=torch.bfloat16)
        new = self.query[:, :1]

        def call(layer: int) -> torch.Tensor:
            backend.forward(self.layer, self.query, new, new[..., :RANK], self.caches[layer], plan, out)
            return out

        return call

    def flashinfer(self, kernel: str = "auto") -> Callable[[int], torch.Tensor]:
        """The same by FlashInfer's wrapper; its latents lie in two tensors."""
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        starts, pages = self.batch.query_start_loc, torch.from_numpy(self.page_starts).cuda()
        buffers = [starts.clone(), pages.clone(), self.pages.cuda(), self.batch.seq_lens.clone()]
        wrapper = BatchMLAPagedAttentionWrapper(workspace, True, *buffers, backend=kernel)
        lens, dtype = torch.from_numpy(self.lens).cuda(), torch.bfloat16
        causal = self.batch.max_query_len > 1
        wrapper.plan(
            starts, pages, self.pages.cuda(), lens, self.shape.heads, RANK, ROPE, PAGE, causal, SCALE, dtype, dtype
        )
        nope, rope = self.query[..., :RANK].contiguous(), self.query[..., RANK:].contiguous()
        parts = [
            (cache.key[:, :, 0, :RANK].contiguous(), cache.key[:, :, 0, RANK:].contiguous()) for cache in self.caches
        ]
        out = torch.empty_like(nope)

        def call(layer: int) -> torch.Tensor:
            wrapper.run(nope, rope, *parts[layer], out=out)
            return out

        return call


def seconds(call: Callable[[int], torch.Tensor]) -> float:
    """Median time of one call, in replays of a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(index % LAYERS)
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS)
    return float(sorted(times)[ROUNDS // 2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--flashinfer", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    require_gpus()
    factory = resolve_factory(PluginRegistry.discover(tolerant=True).load(Kind.ATTENTION, arguments.backend))
    print(torch.cuda.get_device_name())
    figures = []
    for shape in SHAPES:
        world = World(shape)
        call = world.ours(factory(world.context()))
        found: dict[str, Any] = {"shape": shape.name, "seconds": seconds(call)}
        out = call(0).clone()
        size = shape.keys * (RANK + ROPE) * 2
        text = (
            f"{shape.name:36} {found['seconds'] * 1e6:9.1f} us  {size / found['seconds'] / 1e12:5.2f} TB/s  "
            f"{shape.operations / found['seconds'] / 1e12:6.1f} TFLOP/s"
        )
        if arguments.flashinfer:
            other = world.flashinfer()
            found["flashinfer"] = seconds(other)
            apart = (other(0).float() - out.float()).norm() / out.float().norm()
            text += (
                f"  flashinfer {found['flashinfer'] * 1e6:9.1f} us, ours / theirs "
                f"{found['seconds'] / found['flashinfer']:5.2f}, outputs apart {apart:.1e}"
            )
        figures.append(found)
        print(text, flush=True)
        del world, call
        torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
