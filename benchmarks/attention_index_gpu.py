"""Attention to the latents that an index picks, alone on a GPU: time of one layer's call beside the bytes it must read.

    python benchmarks/attention_index_gpu.py [--only decode] [--json FILE]

Latents of 512 and 64, an index of 64 heads of 128 that picks 2,048 keys (DeepSeek-V3.2), bfloat16, pages of 64 tokens;
128 heads as the whole model has, and 16 as one of eight devices. Caches of three layers in turn, so that nothing is
found in the L2 cache. Times are medians of replays of a captured graph of 12 calls; `shared` is that of a layer that
uses the picks of another. Bytes are all keys of the index and the picked latents of each query token, at the rate at
which a copy reads; operations those of scores and of attention to the picks. `apart` is how far outputs are from those
of the `torch` backend.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from attention_mla_gpu import LAYERS, PAGE, RANK, ROPE, Shape, World, decode, seconds
from attrs import evolve
from command_line import require_gpus

from slotline.registry.contracts.attention import AttentionContext, LayerInput
from slotline.registry.contracts.cache_tensors import LATENT_INDEX, CacheTensors
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.loading import resolve_factory

SHORT = "--only decode"
HEADS, SIZE, PICKED = 64, 128, 2048
CHECKED = 4 * 4096
"""Most keys of a batch that the `torch` backend computes as well."""
SHAPES = (
    decode(128, 4, 4096),
    decode(128, 64, 8192),
    decode(128, 16, 32768),
    decode(128, 1, 32768),
    decode(16, 64, 8192),
    decode(16, 16, 32768),
    decode(16, 1, 32768),
    Shape(16, ((4, 8192),) * 16, "16 heads, verify 16 x 4 of 8,192"),
    Shape(16, ((2048, 8192),), "16 heads, prompt 2,048 of 8,192"),
)


class IndexedWorld(World):
    """One shape made real, with an index."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        inputs = (
            LayerInput("index_query", (HEADS, SIZE)),
            LayerInput("index_key", (SIZE,)),
            LayerInput("index_weight", (HEADS,), "float32"),
        )
        self.layer = evolve(self.layer, kv_kind="dsa", index_topk=PICKED, inputs=inputs)
        self.shared = evolve(self.layer, name="shared", index=1, index_from=0, inputs=())
        counts = [count for count, _ in shape.requests]
        places = [torch.arange(length - count, length) for count, length in shape.requests]
        self.batch = evolve(self.batch, positions=torch.cat(places).cuda())
        tokens, half = sum(counts), torch.bfloat16
        keys = [torch.randn(*each.key.shape[:2], SIZE, device="cuda", dtype=half) for each in self.caches]
        self.tensors = [
            CacheTensors({"key": each.key, "index_key": key}) for each, key in zip(self.caches, keys, strict=True)
        ]
        self.inputs = {
            "index_query": torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=half),
            "index_key": torch.randn(tokens, SIZE, device="cuda", dtype=half),
            "index_weight": torch.rand(tokens, HEADS, device="cuda"),
        }

    def context(self) -> AttentionContext:
        return evolve(super().context(), layers=(self.layer, self.shared), cache_format=LATENT_INDEX)

    def call(self, backend: Any, *, shared: bool = False) -> Callable[[int], torch.Tensor]:
        """A call for a layer, or for one that uses the picks that were made last."""
        plan = backend.plan(self.batch)
        out = torch.empty(self.batch.num_tokens, self.shape.heads, RANK, device="cuda", dtype=torch.bfloat16)
        new = self.query[:, :1]

        def picked(layer: int) -> torch.Tensor:
            given = None if shared else self.inputs
            at = self.shared if shared else self.layer
            backend.forward(at, self.query, new, new[..., :RANK], self.tensors[layer], plan, out, inputs=given)
            return out

        if shared:
            backend.forward(
                self.layer, self.query, new, new[..., :RANK], self.tensors[0], plan, out, inputs=self.inputs
            )
        return picked

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes that must be read for the scores, and for attention to the picks.

        Query tokens of a request read the keys once, and a latent once for each token that picks it.
        """
        scored = sum(length for _, length in self.shape.requests) * SIZE * 2
        tokens = sum(count * min(length, PICKED) for count, length in self.shape.requests)
        if self.batch.max_query_len > 1:
            tokens = min(tokens, self.shape.keys)
        return scored, tokens * (RANK + ROPE) * 2

    @property
    def num_operations(self) -> int:
        pairs = sum(count * length - count * (count - 1) // 2 for count, length in self.shape.requests)
        picks = sum(count * min(length, PICKED) for count, length in self.shape.requests)
        return 2 * HEADS * SIZE * pairs + 2 * self.shape.heads * (2 * RANK + ROPE) * picks


def reading_rate() -> float:
    """Bytes a second that a copy of 2 GiB moves, read and written."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda _: target.copy_(source))


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes whose name holds this")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    require_gpus()
    registry = PluginRegistry.discover(tolerant=True)
    ours, reference = (resolve_factory(registry.load(Kind.ATTENTION, name)) for name in ("triton", "torch"))
    rate = reading_rate()
    print(f"{torch.cuda.get_device_name()}, a copy moves {rate / 1e12:.2f} TB/s")
    figures = []
    for shape in SHAPES:
        if arguments.only not in shape.name:
            continue
        world = IndexedWorld(shape)
        backend = ours(world.context())
        call = world.call(backend)
        found = call(0).float()
        apart = None
        if shape.keys <= CHECKED:
            exact = world.call(reference(world.context()))(0).float()
            apart = float((found - exact).norm() / exact.norm())
        whole, attending = seconds(call), seconds(world.call(backend, shared=True))
        scored, attended = world.num_bytes
        limits = (scored + attended) / rate, attended / rate
        figures.append(
            {
                "shape": shape.name,
                "seconds": whole,
                "shared_seconds": attending,
                "bytes": scored + attended,
                "operations": world.num_operations,
                "apart": apart,
            }
        )
        print(
            f"{shape.name:34} {whole * 1e6:9.1f} us, {whole / limits[0]:5.2f} times its bytes; shared "
            f"{attending * 1e6:9.1f} us, {attending / limits[1]:5.2f} times; "
            f"{world.num_operations / whole / 1e12:6.1f} TFLOP/s" + ("" if apart is None else f"; apart {apart:.1e}"),
            flush=True,
        )
        del world, call, backend
        torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"layers": LAYERS, "page": PAGE, "rate": rate, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
