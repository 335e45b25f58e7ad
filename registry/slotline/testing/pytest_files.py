"""A pytest file of one failing batch: tensors, calls and formula in plain sight, for a debugger and for a bug report.

It imports torch, the contract and the plugin, and nothing of the suite.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from slotline.registry.contracts.cache_tensors import PLAIN
from slotline.registry.errors import ConfigError
from slotline.registry.loading import resolve_factory
from slotline.testing.environments.attention import Case, World
from slotline.testing.oracles import attention as oracle
from slotline.testing.subject import Subject

_TEMPLATE = '''\
"""A batch on which {name} is wrong, made small from a run of `slotline conform`:

{key}
"""

{imports}import numpy as np
import torch

from slotline.registry.contracts import AttentionBatch, AttentionContext, AttentionLayer, KVCache
{own_import}
DEVICE, DTYPE, CACHE_DTYPE = {device!r}, {dtype}, {cache_dtype}
REQUESTS = {requests!r}  # (query tokens, length) of each; the query tokens are the last ones
HEADS, KV_HEADS, HEAD_SIZE, VALUE_SIZE, BLOCK_SIZE = {heads}, {kv_heads}, {head_size}, {value_size}, {block_size}
SCALE, WINDOW, SOFT_CAP, SLOPES = {scale!r}, {window!r}, {soft_cap!r}, {slopes!r}
SINKS, CAUSAL, LATENTS = {sinks!r}, {causal!r}, {mla!r}  # latents: values are the beginnings of keys
BLOCK_TABLE = {table!r}
NUM_BLOCKS, LAYOUT, GAP, PADDING = {num_blocks}, {layout!r}, {gap}, {padding}  # elements behind K and V, rows
FREE = {free}  # what a backend must not read holds
ALLOWED = {allowed!r}  # error of any output
{plugin}

def attention(query, key, value, sinks):
    """Return [q, H, Dv] by the formula, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    group = HEADS // KV_HEADS
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    if SOFT_CAP is not None:
        scores = SOFT_CAP * torch.tanh(scores / SOFT_CAP)
    own = torch.arange(len(key) - len(query), len(key))[:, None]
    other = torch.arange(len(key))[None, :]
    if SLOPES is not None:
        scores = scores - torch.tensor(SLOPES).double()[:, None, None] * (own - other).abs()
    seen = other <= own if CAUSAL else torch.ones(len(query), len(key), dtype=torch.bool)
    if WINDOW is not None:
        seen = seen & (own - other < WINDOW)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(HEADS, len(query), 1)], 2)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def test_the_output_is_that_of_the_formula():
    generator = torch.Generator().manual_seed({seed})

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    keys = [random(n, KV_HEADS, HEAD_SIZE).to(DTYPE).to(CACHE_DTYPE) for _, n in REQUESTS]
    if LATENTS:
        values = [key[..., :VALUE_SIZE] for key in keys]
    else:
        values = [random(n, KV_HEADS, VALUE_SIZE).to(DTYPE).to(CACHE_DTYPE) for _, n in REQUESTS]
    queries = [(random(q, HEADS, HEAD_SIZE) * {amplitude!r}).to(DTYPE) for q, _ in REQUESTS]
    sinks = random(HEADS).to(DTYPE) if SINKS else None

    sizes = [BLOCK_SIZE * KV_HEADS * size for size in (HEAD_SIZE, VALUE_SIZE)][: 1 if LATENTS else 2]
    memory = torch.full((NUM_BLOCKS, sum(sizes) + GAP), FREE, dtype=torch.float32).to(CACHE_DTYPE).to(DEVICE)
    shape = (BLOCK_SIZE, KV_HEADS) if LAYOUT == "NHD" else (KV_HEADS, BLOCK_SIZE)
    parts = [part.unflatten(1, (*shape, -1)) for part in memory[:, : sum(sizes)].split(sizes, 1)]
    parts = [part if LAYOUT == "NHD" else part.transpose(1, 2) for part in parts]
    cache = KVCache(parts[0], parts[0][..., :VALUE_SIZE] if LATENTS else parts[1])
    slots = []
    for request, (query_len, length) in enumerate(REQUESTS):
        for position in range(length):
            block, place = BLOCK_TABLE[request][position // BLOCK_SIZE], position % BLOCK_SIZE
            if position >= length - query_len:
                slots.append(block * BLOCK_SIZE + place)
            elif block:  # 0 is the null block, of what a window has left behind
                cache.key[block, place] = keys[request][position].to(DEVICE)
                if not LATENTS:
                    cache.value[block, place] = values[request][position].to(DEVICE)

    query_lens, lengths = [q for q, _ in REQUESTS], [n for _, n in REQUESTS]
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    positions = [p for q, n in REQUESTS for p in range(n - q, n)]

    def on_device(values, dtype):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    batch = AttentionBatch(
        num_requests=len(REQUESTS),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(lengths),
        query_start_loc=on_device(starts.tolist(), torch.int32),
        seq_lens=on_device(lengths, torch.int32),
        block_table=on_device(BLOCK_TABLE, torch.int32),
        slot_mapping=on_device(slots + [-1] * PADDING, torch.int64),
        positions=on_device(positions + [0] * PADDING, torch.int64),
        query_start_loc_cpu=starts,
        seq_lens_cpu=np.array(lengths, np.int32),
        num_decodes=next((i for i, q in enumerate(query_lens) if q != 1), len(query_lens)),
        causal=CAUSAL,
    )
    layer = AttentionLayer(
        name="model.layers.0.self_attn", index=0, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE,
        head_size_v=VALUE_SIZE, scale=SCALE, window=WINDOW, soft_cap=SOFT_CAP, sinks=SINKS, alibi_slopes=SLOPES,
        mla=LATENTS, kv_kind="mla" if LATENTS else "full" if WINDOW is None else "sliding",
        attention_type={attention_type!r},
    )
    context = AttentionContext(
        contract={contract}, layers=(layer,), device=DEVICE, dtype={dtype_name!r}, kv_dtype={cache_name!r},
        block_size={manager_size}, kernel_block_size=BLOCK_SIZE, layout=LAYOUT, max_query_len={max_query_len},
        max_requests=256, max_tokens=8192, max_model_len=65536, exact=True,
    )
    backend = BACKEND(context)
    new = [[part[n - q :] for part, (q, n) in zip(whole, REQUESTS)] for whole in (keys, values)]
    rows = [torch.cat([part.to(DTYPE) for part in parts]) for parts in (queries, *new)]
    rows = [torch.cat([part, torch.full((PADDING, *part.shape[1:]), FREE, dtype=DTYPE)]).to(DEVICE) for part in rows]
    out = torch.zeros(len(rows[0]), HEADS, VALUE_SIZE, dtype=DTYPE, device=DEVICE)
    plan = backend.plan(batch)
    if not {writes_cache!r}:
        backend.write(layer, rows[1], rows[2], cache, plan)
    backend.forward(layer, *rows, cache, plan, out, None if sinks is None else sinks.to(DEVICE))

    for request, (query, key, value) in enumerate(zip(queries, keys, values)):
        {whole}expected = attention(query, key, value, sinks)
        got = out[starts[request] : starts[request + 1]].cpu().double()
        error = (got - expected).abs().amax((1, 2)) if len(query) else torch.zeros(1)
        assert bool((error <= ALLOWED).all()), f"request {{request}}, errors of its query tokens {{error.tolist()}}"
'''


def pytest_file(subject: Subject, case: Case, key: str) -> str:
    """Return the text of a pytest file.

    Raises:
        ConfigError: if the batch has what the file has no words for, or the plugin's own table is set.
    """
    strange = [
        name
        for name, odd in {
            "a cache of another format": case.cache_format != PLAIN,
            "scales": case.kv_scales is not None,
            "a tree": bool(case.num_nodes),
            "inputs that are slices": case.merged,
            "keys ahead": case.keys_ahead,
            "a bias by position": case.position_bias,
            f"attention of type {case.attention_type}": case.attention_type not in ("decoder", "encoder_only"),
            "an own table of the plugin": bool(subject.settings),
        }.items()
        if odd
    ]
    if strange:
        raise ConfigError(f"no pytest file is written for {', '.join(strange)}", fix="use the command of one line")
    world, layer = World(case, subject.device.type), case.layer()
    plugin, own_import = _plugin(subject)
    dtype, cache_dtype = str(case.dtype), str(case.cache_dtype)
    return _TEMPLATE.format(
        name=subject.name,
        key=key,
        imports="" if own_import else "import importlib.util\n\n",
        own_import=own_import,
        plugin=plugin,
        device=subject.device.type,
        dtype=dtype,
        cache_dtype=cache_dtype,
        dtype_name=dtype.removeprefix("torch."),
        cache_name=cache_dtype.removeprefix("torch."),
        requests=case.requests,
        heads=case.num_heads,
        kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        value_size=layer.head_size_v,
        block_size=case.block_size,
        manager_size=case.block_size * case.manager_blocks,
        scale=layer.scale,
        window=case.window,
        soft_cap=case.soft_cap,
        slopes=case.alibi_slopes,
        sinks=case.sinks,
        causal=case.causal,
        mla=case.mla,
        table=world.host_table.tolist(),
        num_blocks=world.num_blocks,
        layout=case.layout,
        gap=64 if case.strided else 0,
        padding=case.padding,
        free='float("nan")' if case.poisoned else "0.0",
        allowed=_allowed(world),
        seed=case.seed,
        amplitude=case.amplitude,
        attention_type=case.attention_type,
        contract=subject.contract,
        max_query_len=case.context().max_query_len,
        writes_cache=bool(subject.capabilities.writes_cache),
        whole="key, value = key[len(key) - len(query) :], value[len(value) - len(query) :]\n        "
        if case.attention_type == "encoder_only"
        else "",
    )


def _allowed(world: World) -> float:
    """Return the largest error that the suite allows any request of the batch."""
    coarse = world.case.coarse_dtype
    pairs = zip(world.answers(), world.answers(coarse), world.dense, strict=True)
    return max(
        oracle.tolerance(exact, eager, value, coarse).out for exact, eager, (_, value) in pairs if len(exact.out)
    )


def _plugin(subject: Subject) -> tuple[str, str]:
    """Return lines that bind ``BACKEND`` to the plugin's factory, and those that import it."""
    factory: Any = resolve_factory(subject.descriptor)
    file, module, name = inspect.getsourcefile(factory), factory.__module__, factory.__qualname__
    if "<" in name:
        raise ConfigError(f"the factory {name} cannot be imported", fix="define it at the top of a module")
    if ".py" not in subject.target.partition(":")[0]:
        return f"BACKEND = {name}\n", f"from {module} import {name.partition('.')[0]}\n"
    assert file is not None  # it was read from one
    lines = [
        f"SPEC = importlib.util.spec_from_file_location('plugin', {str(Path(file).resolve())!r})",
        "MODULE = importlib.util.module_from_spec(SPEC)",
        "SPEC.loader.exec_module(MODULE)",
        f"BACKEND = MODULE.{name}",
    ]
    return "\n".join(lines) + "\n", ""


def reproduces(text: str) -> bool:
    """Return True if the file's test fails."""
    found: dict[str, Any] = {}
    exec(compile(text, "<pytest file>", "exec"), found)
    try:
        found["test_the_output_is_that_of_the_formula"]()
    except Exception:  # a backend may raise anything
        return True
    return False
