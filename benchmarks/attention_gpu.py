"""Paged attention alone on a GPU: time of a decode step's kernel, and the share of copy bandwidth that it reaches.

    python benchmarks/attention_gpu.py [--backend triton] [--block-size 16] [--kv-dtype float8_e4m3fn] [--json out.json]
    python benchmarks/attention_gpu.py --cascade
    python benchmarks/attention_gpu.py --prefill

Requests of 2,048 tokens by default, 32 query and 8 KV heads of 128, bfloat16; caches of four layers in turn, so that
nothing is found in the L2 cache. Times are medians of replays of a captured graph of 20 calls. `--cascade` compares
requests that share a prefix with and without serving it apart; `--prefill` gives the rate of causal prompts.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache, KVScales
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.loading import resolve_factory

CALLS = 20


def context(layer: AttentionLayer, block_size: int, requests: int, length: int, kv_dtype: str) -> AttentionContext:
    return AttentionContext(
        contract=1,
        layers=(layer,),
        device="cuda",
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        block_size=block_size,
        kernel_block_size=block_size,
        layout="NHD",
        max_query_len=length,
        max_requests=requests,
        max_tokens=8192,
        max_model_len=length,
        kv_scales={}
        if kv_dtype == "bfloat16"
        else {0: KVScales(*(torch.tensor(0.5, device="cuda") for _ in range(2)))},
    )


def batch(
    requests: int,
    query_len: int,
    length: int,
    block_size: int,
    num_blocks: int,
    shared: int = 0,
    *,
    apart: bool = False,
) -> AttentionBatch:
    """Requests of equal length over shuffled blocks; their first `shared` tokens lie in the same ones."""
    width = -(-length // block_size)
    blocks = torch.randperm(num_blocks - 1)[: requests * width] + 1
    table = blocks.view(requests, width).int().cuda()
    table[:, : shared // block_size] = table[:1, : shared // block_size]
    starts, lens = np.arange(requests + 1, dtype=np.int32) * query_len, np.full(requests, length, np.int32)
    positions = torch.arange(length - query_len, length).repeat(requests).cuda()
    rows = torch.arange(requests).repeat_interleave(query_len).cuda()
    slots = table[rows, positions // block_size].long() * block_size + positions % block_size
    return AttentionBatch(
        num_requests=requests,
        num_tokens=requests * query_len,
        max_query_len=query_len,
        max_seq_len=length,
        query_start_loc=torch.from_numpy(starts).cuda(),
        seq_lens=torch.from_numpy(lens).cuda(),
        block_table=table,
        slot_mapping=slots,
        positions=positions,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
        num_decodes=requests if query_len == 1 else 0,
        common_prefix_len=shared if apart else 0,
        common_prefix=torch.tensor([shared], dtype=torch.int32, device="cuda") if apart else None,
    )


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 4 GiB, read and write counted, best of ten."""
    source = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return max(2 * source.nbytes / elapsed(lambda: target.copy_(source)) for _ in range(10)) / 1e12


def elapsed(work: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(
    name: str,
    requests: int,
    query_len: int,
    length: int,
    block_size: int,
    kv_dtype: str = "bfloat16",
    shared: int = 0,
    *,
    apart: bool = False,
) -> dict[str, Any]:
    """Median seconds of one call, and the bytes of keys and values that it must read."""
    layer = AttentionLayer(
        name="layer", index=0, num_heads=32, num_kv_heads=8, head_size=128, head_size_v=128, scale=128**-0.5
    )
    num_blocks = requests * -(-length // block_size) + 1
    descriptor = PluginRegistry.discover(tolerant=True).load(Kind.ATTENTION, name)
    backend = resolve_factory(descriptor)(context(layer, block_size, requests, length, kv_dtype))
    shape = (num_blocks, block_size, 8, 128)
    dtype = getattr(torch, kv_dtype)
    caches = [
        KVCache(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)))
        for _ in range(4)
    ]
    plan = backend.plan(batch(requests, query_len, length, block_size, num_blocks, shared, apart=apart))
    query = torch.randn(requests * query_len, 32, 128, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(requests * query_len, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)

    def call(index: int) -> None:
        backend.forward(layer, query, new, new, caches[index % 4], plan, out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(4):
            call(index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(index)
    times = sorted(elapsed(graph.replay) / CALLS for _ in range(30))
    read = 2 * requests * length * 8 * 128 * dtype.itemsize
    return {"seconds": times[len(times) // 2], "bytes": read}


def cascade(name: str, block_size: int, kv_dtype: str) -> None:
    """Requests with a common prefix and 128 tokens of their own: time with and without serving it apart."""
    for requests, shared in (
        (8, 512),
        (8, 8192),
        (16, 1024),
        (32, 512),
        (64, 512),
        (64, 2048),
        (64, 8192),
        (256, 1024),
    ):
        shape = (name, requests, 1, shared + 128, block_size, kv_dtype, shared)
        without, apart = (measure(*shape, apart=flag)["seconds"] for flag in (False, True))
        print(
            f"{requests:4} requests, {shared:5} shared tokens: {without * 1e6:8.1f} us, apart {apart * 1e6:8.1f} us, "
            f"{without / apart:5.2f} times"
        )


def prefill(name: str, block_size: int, kv_dtype: str) -> None:
    """Causal prompts: time, and the rate of the two matrix products over what the mask leaves."""
    for requests, length in ((1, 1024), (1, 8192), (4, 2048), (1, 16384)):
        seconds = measure(name, requests, length, length, block_size, kv_dtype)["seconds"]
        work = requests * 4 * 32 * 128 * length * (length + 1) / 2
        print(
            f"{requests:3} prompts of {length:6} tokens: {seconds * 1e6:9.1f} us  {work / seconds / 1e12:6.1f} TFLOP/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--cascade", action="store_true")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.cascade:
        cascade(arguments.backend, arguments.block_size, arguments.kv_dtype)
    elif arguments.prefill:
        prefill(arguments.backend, arguments.block_size, arguments.kv_dtype)
    else:
        decode(arguments)


def decode(arguments: argparse.Namespace) -> None:
    """Decode and verification over a range of batches, against copy bandwidth."""
    limit = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy bandwidth {limit:.2f} TB/s; backend {arguments.backend}")
    figures = []
    for requests, query_len, length in ((64, 1, 2048), (1, 1, 2048), (256, 1, 512), (8, 1, 32768), (32, 5, 2048)):
        found = measure(arguments.backend, requests, query_len, length, arguments.block_size, arguments.kv_dtype)
        rate = found["bytes"] / found["seconds"] / 1e12
        figures.append({"requests": requests, "query_len": query_len, "length": length, **found})
        print(
            f"{requests:4} requests x {query_len} query tokens, {length:6} keys: {found['seconds'] * 1e6:8.1f} us  "
            f"{rate:5.2f} TB/s  {rate / limit:4.0%} of copy bandwidth"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"copy_tb_per_s": limit, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
