"""Single query tokens over keys and values of eight or four bits in Triton.

The kernel is that of `kernels.attend` for one query token of each request, and the caches differ. It reads the cache in
words of 16 bits, which matrix instructions' operands are loaded as: a byte at a time, values could not be turned on
their way out of shared memory. A word holds two codes of eight bits or four of four, of dimensions that follow each
other. So there are two or four products, one for each place in a word: with every second or fourth dimension of the
queries, and into as many parts of the output. Codes become float16 two keys at a time by a few operations on their
bits, at no loss: a whole number is put behind the exponent of 1024, which is then taken away.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slotline.backends.triton.kernels import capped, power_of_two
from slotline.registry.contracts.attention import AttentionContext, AttentionLayer
from slotline.registry.contracts.cache_tensors import PLAIN

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run under Triton's interpreter, which knows no assembly."""
CODES = {torch.int8: "whole", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "nibbles"}
NIBBLE_0, NIBBLE_1, NIBBLE_2, NIBBLE_3 = (
    tl.constexpr(
        f"{{ .reg .b32 t, c; shr.u32 t, $1, {4 * place}; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; "
        "mov.b32 c, 0x64086408; sub.f16x2 $0, t, c; }"
    )
    for place in range(4)
)
"""(word & 15) | 1024 - 1032"""
INT8_0, INT8_1 = (
    tl.constexpr(
        f"{{ .reg .b32 t, c; shr.u32 t, $1, {8 * place}; lop3.b32 t, t, 0x00FF00FF, 0x64806480, 0x6A; "
        "mov.b32 c, 0x64806480; sub.f16x2 $0, t, c; }"
    )
    for place in range(2)
)
"""(word & 255) ^ 1152 - 1152"""
E4M3_0, E4M3_1 = (
    tl.constexpr(
        f"{{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, {bytes_of}; mov.b32 {{l, h}}, t; "
        "cvt.rn.f16x2.e4m3x2 $0, l; }"
    )
    for bytes_of in ("0x4420", "0x4431")
)
E5M2_0, E5M2_1 = (tl.constexpr(f"prmt.b32 $0, $1, 0, {bytes_of};") for bytes_of in ("0x2404", "0x3414"))
"""The upper half of float16."""
TILE, WARPS, STAGES = 128, 2, 3
"""Keys of a tile, warps of a program, stages of its pipeline."""
MOST_GROUP, MOST_SIZE = 64, 256


@triton.jit
def _code(words, place: tl.constexpr, codes: tl.constexpr):
    """Return the codes at a place of words, as float16."""
    if INTERPRETED:
        if codes == "nibbles":
            return (((words.to(tl.int32) >> (4 * place)) & 15) - 8).to(tl.float16)
        byte = ((words.to(tl.int32) >> (8 * place)) & 255).to(tl.uint8)
        if codes == "whole":
            return byte.to(tl.int8, bitcast=True).to(tl.float16)
        if codes == "e5m2":
            return byte.to(tl.float8e5, bitcast=True).to(tl.float16)
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if codes == "nibbles":
        if place == 0:
            return _unpacked(words, NIBBLE_0)
        if place == 1:
            return _unpacked(words, NIBBLE_1)
        if place == 2:
            return _unpacked(words, NIBBLE_2)
        return _unpacked(words, NIBBLE_3)
    if codes == "whole":
        if place == 0:
            return _unpacked(words, INT8_0)
        return _unpacked(words, INT8_1)
    if codes == "e5m2":
        if place == 0:
            return _unpacked(words, E5M2_0)
        return _unpacked(words, E5M2_1)
    if place == 0:
        return _unpacked(words, E4M3_0)
    return _unpacked(words, E4M3_1)


@triton.jit
def _unpacked(words, assembly: tl.constexpr):
    """Return float16 made of words by an assembly of two words at a time."""
    return tl.inline_asm_elementwise(assembly, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _queries(at, place: tl.constexpr, word, used, row_scale, per: tl.constexpr, size: tl.constexpr):
    """Load the dimensions of queries that are multiplied with one place of words, [rows, words] float16."""
    dim = word * per + place
    q = tl.load(at[:, None] + dim[None, :], mask=used[:, None] & (dim < size)[None, :], other=0.0)
    return (q.to(tl.float32) / row_scale[:, None]).to(tl.float16)


@triton.jit
def _put(at, place: tl.constexpr, word, used, result, per: tl.constexpr, size: tl.constexpr):
    """Store one part of results at its dimensions."""
    dim = word * per + place
    tl.store(at[:, None] + dim[None, :], result.to(at.dtype.element_ty), mask=used[:, None] & (dim < size)[None, :])


@triton.jit(do_not_specialize=["first", "num_splits", "first_part", "num_parts", "lse_head"])
def decode_codes(
    query,
    keys,
    values,
    out,
    lse,
    parts,
    part_norms,
    table,
    seq_lens,
    starts,
    sinks,
    slopes,
    prefix,
    key_scales,
    value_scales,
    first,
    scale,
    soft_cap,
    q_token,
    q_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    ks_block,
    ks_token,
    ks_head,
    vs_block,
    vs_token,
    vs_head,
    o_token,
    o_head,
    lse_head,
    table_row,
    num_heads,
    num_splits,
    first_part,
    num_parts,
    window,
    group: tl.constexpr,
    size: tl.constexpr,
    size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    parts_row: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    block_m: tl.constexpr,
    codes: tl.constexpr,
    scaled: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
    has_slopes: tl.constexpr,
    split: tl.constexpr,
    cascade: tl.constexpr,
    early: tl.constexpr,
):
    """Compute attention of one query token, KV head and split of the keys. Grid: (requests times heads, splits).

    `keys` and `values` are int16, their strides in words. `scaled` is "token" for scales of each token and KV head,
    "layer" for one of all, "" for none. `parts_row` is the size of a row of `parts`. All else is as in
    `kernels.attend`, whose `cascade` is never "prefix" or "segments" for a query token of each request.
    """
    if early:
        gdc_launch_dependents()
    kv_heads = num_heads // group
    head, request, index = tl.program_id(0) % kv_heads, first + tl.program_id(0) // kv_heads, tl.program_id(1)
    begin = tl.load(starts + request)
    length = tl.load(seq_lens + request)
    if tl.load(starts + request + 1) == begin:
        if early:
            gdc_wait()
        return
    row = tl.arange(0, block_m)
    query_head = head * group + row
    used = row < group
    start = 0
    if has_window:
        start = tl.maximum(0, length - window)
    if cascade == "rest":
        start = tl.maximum(start, tl.minimum(tl.load(prefix), length))
    if cascade == "own":
        start = tl.maximum(start, tl.minimum(tl.load(prefix + request), length))
    first_tile = start // tile
    last_tile = tl.cdiv(length, tile)
    if split:
        each = tl.cdiv(last_tile - first_tile, num_splits)
        first_tile += index * each
        last_tile = tl.minimum(last_tile, first_tile + each)
    table += request.to(tl.int64) * table_row
    keys += head * k_head
    values += head * v_head
    key_scales += head * ks_head
    value_scales += head * vs_head
    if early:
        gdc_wait()

    per: tl.constexpr = 4 if codes == "nibbles" else 2
    words: tl.constexpr = padded // per
    words_v: tl.constexpr = padded_v // per
    word, word_v, dim = tl.arange(0, words), tl.arange(0, words_v), tl.arange(0, padded)
    at = query + begin.to(tl.int64) * q_token + query_head * q_head
    whole = tl.load(at[:, None] + dim[None, :], mask=used[:, None] & (dim < size)[None, :], other=0.0).to(tl.float32)
    row_scale = power_of_two(whole)
    q0 = _queries(at, 0, word, used, row_scale, per, size)
    q1 = _queries(at, 1, word, used, row_scale, per, size)
    q2, q3 = q0, q1
    if per == 4:
        q2 = _queries(at, 2, word, used, row_scale, per, size)
        q3 = _queries(at, 3, word, used, row_scale, per, size)
    if scaled == "layer":
        scale = scale * tl.load(key_scales)
    factor = row_scale * scale
    slope = factor
    if has_slopes:
        slope = tl.load(slopes + query_head, mask=used, other=0.0) * 1.4426950408889634

    top = tl.full([block_m], -float("inf"), tl.float32)
    norm = tl.zeros([block_m], tl.float32)
    acc0 = tl.zeros([block_m, words_v], tl.float32)
    acc1 = tl.zeros([block_m, words_v], tl.float32)
    acc2 = tl.zeros([block_m, words_v], tl.float32)
    acc3 = tl.zeros([block_m, words_v], tl.float32)
    for number in tl.range(first_tile, last_tile):
        key = number * tile + tl.arange(0, tile)
        real = (key >= start) & (key < length)
        page_at = tl.load(table + key // page, mask=real, other=0).to(tl.int64)
        inside = key % page
        k_at = keys + (page_at * k_block + inside * k_token)[None, :] + word[:, None]
        v_at = values + (page_at * v_block + inside * v_token)[:, None] + word_v[None, :]
        k = tl.load(k_at, mask=real[None, :] & (word < size // per)[:, None], other=0)
        scores = tl.dot(q0, _code(k, 0, codes))
        scores = tl.dot(q1, _code(k, 1, codes), scores)
        if per == 4:
            scores = tl.dot(q2, _code(k, 2, codes), scores)
            scores = tl.dot(q3, _code(k, 3, codes), scores)
        if scaled == "token":
            own = tl.load(key_scales + page_at * ks_block + inside * ks_token, mask=real, other=0.0)
            scores = scores * own[None, :]
        scores = scores * factor[:, None]  # in base 2 unless capped
        if has_cap:
            scores = capped(scores, soft_cap) * 1.4426950408889634
        if has_slopes:  # ALiBi, in base 2
            scores = scores + slope[:, None] * (key - length + 1)[None, :]
        scores = tl.where(real[None, :], scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(best == -float("inf"), 0.0, best)  # a split without keys
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        norm = norm * shrink + tl.sum(weights, 1)
        most = 1.0
        if scaled == "token":
            # Weights times scales must stay within float16's range: relative to the tile's largest scale they do.
            own = tl.load(value_scales + page_at * vs_block + inside * vs_token, mask=real, other=0.0)
            most = tl.max(own, 0)
            most = tl.where(most > 0.0, most, 1.0)
            weights = weights * (own / most)[None, :]
        weights = weights.to(tl.float16)
        v = tl.load(v_at, mask=real[:, None] & (word_v < size_v // per)[None, :], other=0)
        acc0 = _add(acc0, shrink, weights, _code(v, 0, codes), most, scaled)
        acc1 = _add(acc1, shrink, weights, _code(v, 1, codes), most, scaled)
        if per == 4:
            acc2 = _add(acc2, shrink, weights, _code(v, 2, codes), most, scaled)
            acc3 = _add(acc3, shrink, weights, _code(v, 3, codes), most, scaled)
        top = best

    if scaled == "layer":
        last = tl.load(value_scales)
        acc0, acc1, acc2, acc3 = acc0 * last, acc1 * last, acc2 * last, acc3 * last
    where = begin.to(tl.int64)
    if split:
        slot = (where * num_heads + query_head) * num_parts + first_part + index
        at = parts + slot * parts_row
        _put(at, 0, word_v, used, acc0, per, parts_row)
        _put(at, 1, word_v, used, acc1, per, parts_row)
        if per == 4:
            _put(at, 2, word_v, used, acc2, per, parts_row)
            _put(at, 3, word_v, used, acc3, per, parts_row)
        tl.store(part_norms + slot * 2, top, mask=used)
        tl.store(part_norms + slot * 2 + 1, norm, mask=used)
        return
    if has_sinks:
        sink = tl.load(sinks + query_head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        best = tl.maximum(top, sink)
        shrink = tl.exp2(top - best)
        norm = norm * shrink + tl.exp2(sink - best)
        acc0, acc1 = acc0 * shrink[:, None], acc1 * shrink[:, None]
        acc2, acc3 = acc2 * shrink[:, None], acc3 * shrink[:, None]
        top = best
    share = (1.0 / tl.where(norm == 0.0, 1.0, norm))[:, None]
    at = out + where * o_token + query_head * o_head
    _put(at, 0, word_v, used, acc0 * share, per, size_v)
    _put(at, 1, word_v, used, acc1 * share, per, size_v)
    if per == 4:
        _put(at, 2, word_v, used, acc2 * share, per, size_v)
        _put(at, 3, word_v, used, acc3 * share, per, size_v)
    tl.store(lse + query_head.to(tl.int64) * lse_head + where, (top + tl.log2(norm)) * 0.6931471805599453, mask=used)


@triton.jit
def _add(acc, shrink, weights, v, most, scaled: tl.constexpr):
    """Return an output with the values of one more tile."""
    if scaled == "token":
        return acc * shrink[:, None] + tl.dot(weights, v) * most
    return tl.dot(weights, v, acc * shrink[:, None])


def codes_of(context: AttentionContext) -> str:
    """Return how the kernel reads a group's cache, "" if it cannot: of codes, queries of half precision."""
    layer = context.layers[0]
    codes = CODES.get(getattr(torch, context.kv_dtype), "")
    per = 4 if codes == "nibbles" else 2
    readable = codes in ("e4m3", "e5m2") if context.cache_format == PLAIN else bool(codes)
    whole = layer.head_size % per == layer.head_size_v % per == 0
    small = max(layer.head_size, layer.head_size_v) <= MOST_SIZE and layer.num_heads <= MOST_GROUP * layer.num_kv_heads
    served = readable and whole and small and not layer.mla and context.dtype in ("bfloat16", "float16")
    return codes if served else ""


def in_words(*stored: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return caches [blocks, page, heads, bytes] as int16 words, None if they lie across words."""
    for each in stored:
        if any(stride % 2 for stride in each.stride()[:3]) or each.data_ptr() % 2 or each.stride(3) != 1:
            return None
    return tuple(each.view(torch.int16) for each in stored)


def sizes_of(layer: AttentionLayer, codes: str) -> tuple[int, int]:
    """Return the padded sizes of keys and values: products take 16 words at least."""
    least = 16 * (4 if codes == "nibbles" else 2)
    return tuple(max(least, triton.next_power_of_2(size)) for size in (layer.head_size, layer.head_size_v))
