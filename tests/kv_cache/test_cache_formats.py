"""Caches other than plain keys and values: negotiated, laid out, written, read, shared, copied, and their error."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from engine_driver import GREEDY, random_prompts, tokens_of
from negotiation_cases import FULL, FULL_SPEC, backend, explicit, layer, request, spec
from repository import SUPPORT

from slotline.backends import cache_codes
from slotline.core import LLM, SamplingParams
from slotline.plugins.kv_specs.quantized import FullQuantized
from slotline.registry.cache_pages import bind_tensors, block_bytes
from slotline.registry.capability import Set
from slotline.registry.contracts import CacheTensor, KVSpecContext
from slotline.registry.errors import CapacityError, ConfigError, NegotiationError, PluginError
from slotline.registry.negotiation import negotiate
from slotline.testing.oracles import cache_formats as oracle

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
PROMPTS = random_prompts([33, 17, 40, 1, 25])
CODES = spec("codes", FULL_SPEC, formats=Set(("int8_token_head",)))
EIGHT = {"dtypes": Set((("float32", "float32"), ("float32", "int8")))}
READS = {**EIGHT, "cache_formats": Set(("plain", "int8_token_head"))}


def engine(path: Path, **settings: Any) -> LLM:
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 96, "memory": "1MiB", "block_size": 4}
    return LLM(model=str(path), **{**options, **settings})


# --- negotiation


def test_a_cache_dtype_of_int8_asks_spec_and_backend_for_the_format() -> None:
    backends = [backend("plain", priority=5), backend("pair", priority=3, **EIGHT), backend("reads", **READS)]
    plan = negotiate(request(kv_dtype=explicit("int8")), backends, [FULL, CODES])
    (group,), (cache,) = plan.groups, plan.cache_groups
    assert (group.backend, group.kv_spec, group.kv_dtype) == ("reads", "codes", "int8")
    assert group.cache_format == cache.format == "int8_token_head"
    assert "format      int8_token_head" in plan.explain()
    refused = {item.name: {reason.code for reason in item.reasons} for item in group.rejected}
    assert refused == {"plain": {"N120", "N122"}, "pair": {"N122"}}
    assert [(item.name, item.reasons[0].code) for item in cache.rejected] == [("full", "N122")]


def test_without_it_the_cache_is_plain_and_a_spec_of_codes_is_refused() -> None:
    plan = negotiate(request(), [backend("reads", **READS)], [CODES, FULL])
    assert plan.cache_groups[0].format == plan.groups[0].cache_format == "plain"
    assert plan.cache_groups[0].kv_spec == "full"
    assert "format" not in plan.groups[0].decision()
    with pytest.raises(NegotiationError, match="N122 cache format: needs plain, offers int8_token_head"):
        negotiate(request(kv_specs={"full": explicit("codes")}), [backend("reads", **READS)], [CODES, FULL])


def test_a_refusal_names_a_setting_that_works() -> None:
    asked = request(kv_dtype=explicit("int8"), backend=explicit("plain"))
    with pytest.raises(NegotiationError) as refused:
        negotiate(asked, [backend("plain"), backend("reads", **READS)], [FULL, CODES])
    remedies = refused.value.failure.remedies  # type: ignore[union-attr]
    assert set(remedies) == {'attention.backend = "reads"', 'cache.dtype = "float32"'}


def test_a_named_spec_decides_a_format_of_its_own() -> None:
    own = spec("summaries", FULL_SPEC, formats=Set(("acme",)))
    knows = backend("knows", cache_formats=Set(("acme",)))
    plan = negotiate(
        request(kv_specs={"full": explicit("summaries")}), [backend("plain", priority=5), knows], [FULL, own]
    )
    assert (plan.groups[0].backend, plan.groups[0].cache_format) == ("knows", "acme")
    with pytest.raises(NegotiationError, match="N122 cache format: needs acme, offers plain"):
        negotiate(request(kv_specs={"full": explicit("summaries")}), [backend("plain")], [FULL, own])


def test_a_kind_that_only_one_format_holds_needs_no_setting() -> None:
    own = spec("indexed", FULL_SPEC, kv_kinds=Set(("dsa",)), exact_kinds=Set(("dsa",)), formats=Set(("rows",)))
    both = backend("both", cache_formats=Set(("plain", "rows")))
    plan = negotiate(request(layer(0), layer(1, kv_kind="dsa")), [both], [FULL, own])
    assert {group.name: group.cache_format for group in plan.groups} == {"full": "plain", "dsa": "rows"}


def test_kinds_of_layers_that_share_a_spec_share_its_format() -> None:
    names, kinds = ("plain", "acme", "bounds", "rows"), ("full", "sliding", "dsa")
    reads = backend("reads", cache_formats=Set(names))
    layers = [layer(i, kv_kind=kind, window=64 if kind == "sliding" else None) for i, kind in enumerate(kinds)]
    shared = 0
    for seed in range(200):
        rng = random.Random(seed)
        specs = []
        for number in range(rng.randint(1, 4)):
            held, formats = rng.sample(kinds, rng.randint(1, 3)), rng.sample(names, rng.randint(1, 3))
            own = {"kv_kinds": Set(held), "exact_kinds": Set(held), "priority": rng.randint(0, 3)}
            specs.append(spec(f"spec{number}", FULL_SPEC, formats=Set(formats), **own))
        asked = {kind: explicit(rng.choice(specs).name) for kind in kinds if rng.random() < 0.3}
        try:
            plan = negotiate(request(*layers, kv_specs=asked), [reads], specs)
        except NegotiationError:
            continue
        formats_of = {cache.name: cache.format for cache in plan.cache_groups}
        assert all(formats_of[group.cache_group] == group.cache_format for group in plan.groups), f"seed {seed}"
        shared += sum(len(cache.kinds) > 1 for cache in plan.cache_groups)
    assert shared > 30


# --- memory


def test_tensors_lie_where_they_say_and_blocks_hold_all_of_them() -> None:
    tensors = (
        CacheTensor("rows", "uint8", (13,)),
        CacheTensor("scale", "float32", (3,), by_head=True, alignment=4),
        CacheTensor("summary", "bfloat16", (3, 5), per="block", alignment=64),
    )
    size = block_bytes(tensors, 4)  # 52 bytes, then 48 from 52 on, then 30 from 128 on
    assert size == 192
    raw = torch.zeros(2 * size, dtype=torch.uint8)
    for layout, strides in (("NHD", (48, 3, 1)), ("HND", (48, 1, 4))):
        found = bind_tensors(raw, tensors, 2, 4, layout)
        assert [tuple(view.shape) for view in found.values()] == [(2, 4, 13), (2, 4, 3), (2, 3, 5)]
        assert found["scale"].stride() == strides
        assert [view.data_ptr() - raw.data_ptr() for view in found.values()] == [0, 52, 128]
    with pytest.raises(CapacityError, match="has 384 bytes, 3 kernel blocks of 4 tokens need 576"):
        bind_tensors(raw, tensors, 3, 4, "NHD")
    with pytest.raises(PluginError, match="'scale' has alignment 2"):
        block_bytes((CacheTensor("scale", "float32", (3,), alignment=2),), 4)
    with pytest.raises(PluginError, match="same name"):
        block_bytes((tensors[0], tensors[0]), 4)


@pytest.mark.parametrize("kernel", [4, 16])
def test_a_page_of_codes_has_its_scales(kernel: int) -> None:
    own = layer(0, head_size=64, head_size_v=32)
    context = KVSpecContext(
        contract=1,
        layers=(own,),
        block_size=16,
        kernel_block_size=kernel,
        layout="HND",
        kv_dtype="int8",
        max_model_len=64,
        format="int8_token_head",
    )
    wanted = 16 * 2 * (64 + 32) + 2 * 16 * 2 * 4  # codes, then a float32 for each of two heads of keys and of values
    assert FullQuantized(context).page_bytes(own) == wanted
    four = evolve(context, kv_dtype="uint8", format="int4_rotated")
    assert FullQuantized(four).page_bytes(own) == 16 * 2 * (32 + 16) + 2 * 16 * 2 * 4
    odd = evolve(own, head_size=7, head_size_v=5)
    assert [each.shape for each in FullQuantized(four).tensors(odd)[:2]] == [(2, 4), (2, 3)]
    with pytest.raises(PluginError, match="format 'plain' is not laid out"):
        FullQuantized(evolve(context, format="plain"))


# --- engines


@pytest.mark.parametrize(
    ("family", "name"), [("llama_deep", "int8"), ("gemma3", "int8"), ("llama_deep", "fp8_token_head")]
)
def test_backends_write_and_read_the_same_codes_and_the_pool_holds_more(family: str, name: str, tiny: Tiny) -> None:
    path = tiny(family)
    plain = engine(path, backend="torch")
    llms = [engine(path, backend=backend, **{"cache.dtype": name}) for backend in ("torch", "cpu")]
    first, second = (tokens_of(llm, PROMPTS) for llm in llms)
    assert first == second
    same = [
        a == b
        for of, other in zip(first, tokens_of(plain, PROMPTS), strict=True)
        for a, b in zip(of, other, strict=True)
    ]
    least = 0.6 if name == "int8" else 0.3
    assert sum(same) > least * len(
        same
    )  # random weights have close calls, and a text that differs once goes its own way
    assert llms[0].plan.kv_dtype == ("int8" if name == "int8" else "float8_e4m3fn")
    pools = [llm.plan.pool.block_bytes for llm in (plain, llms[0])]  # type: ignore[union-attr]
    assert pools[1] < 0.5 * pools[0]  # float32 elements become int8, and four bytes for each head come on top


@pytest.mark.slow
def test_shared_prefixes_and_blocks_from_host_memory_keep_their_scales(tiny: Tiny) -> None:
    path = tiny("llama")
    settings: dict[str, Any] = {"cache.dtype": "int8", "max_num_seqs": 2, "max_num_batched_tokens": 24}
    want = [
        tokens_of(engine(path, **settings, **{"cache.prefix_caching": False}), [prompt])[0] for prompt in PROMPTS[:3]
    ]
    pool = engine(path, **settings).plan.pool
    assert pool is not None
    tight = f"{-(-26 * pool.block_bytes // 1024)}KiB"
    host = {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "1MiB"}
    llm = engine(path, **{**settings, "memory": tight}, **host)
    for _ in range(2):
        assert [tokens_of(llm, [prompt])[0] for prompt in PROMPTS[:3]] == want
    again = [llm.generate([prompt], GREEDY)[0].metrics for prompt in PROMPTS[:3]]
    assert sum(each.num_loaded_tokens for each in again) > 0
    roomy = engine(path, **settings)
    for _ in range(2):
        outputs = [roomy.generate([prompt], GREEDY)[0] for prompt in PROMPTS[:3]]
        assert [output.outputs[0].token_ids for output in outputs] == want
    assert all(output.metrics.num_cached_tokens for output in outputs if len(output.prompt_token_ids) > 8)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "change", "mean"), [("int8", 0.02, 0.005), ("fp8_token_head", 0.06, 0.01), ("int4", 0.25, 0.06)]
)
def test_codes_change_the_shipped_models_probabilities_little(name: str, change: float, mean: float) -> None:
    text = Path(torch.__file__).with_name("functional.py").read_text()[:3000]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for dtype in ("auto", name):
        llm = LLM(max_model_len=1024, memory="64MiB", **{"cache.dtype": dtype, "scheduler.max_batched_tokens": 64})
        (output,) = llm.generate([text[:2000]], params)
        assert output.prompt_logprobs is not None
        found.append([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:] if each])
    plain, coded = (torch.tensor(each) for each in found)
    assert len(plain) > 300
    off = (plain - coded).abs()
    assert 0 < float(off.mean()) < change, f"mean {off.mean():.4f}, largest {off.max():.3f}"
    assert abs(float(plain.mean() - coded.mean())) < mean


def test_a_third_partys_summaries_of_blocks_are_kept_and_read(tiny: Tiny) -> None:
    path = tiny("llama_deep")
    plugins = [f"{SUPPORT / 'block_summaries.py'}:{name}" for name in ("spec", "attention")]
    settings: dict[str, Any] = {"plugins": plugins, "cache.kv_spec.full": "acme_summaries"}
    want = tokens_of(engine(path, backend="torch"), PROMPTS)
    llm = engine(path, **settings)
    group = llm.plan.groups[0]
    assert (group.backend, group.cache_format) == ("acme_quest", "acme_summaries")
    assert tokens_of(llm, PROMPTS) == want
    assert tokens_of(llm, PROMPTS) == want  # from shared prefixes, whose summaries are read too
    built: Any = llm.engine.runner.router.groups[0].backend
    assert built.skipped == 0
    built.most_blocks = 3
    assert len(tokens_of(llm, PROMPTS)) == len(PROMPTS)
    assert built.skipped > 0


@pytest.mark.parametrize("size", [128, 80, 7, 1])
def test_rotations_are_their_own_inverse_by_products_and_by_butterflies(size: int) -> None:
    vectors, piece = torch.randn(300, size), size & -size
    by_product, few = cache_codes.rotate(vectors.repeat(64, 1))[:300], cache_codes.rotate(vectors)
    torch.testing.assert_close(few, by_product)
    torch.testing.assert_close(few, oracle.rotate(vectors))
    torch.testing.assert_close(cache_codes.rotate(few) / piece, vectors)


def test_context_shards_refuse_codes(tiny: Tiny) -> None:
    with pytest.raises((ConfigError, NegotiationError), match="'int8' stores scales beside keys and values"):
        engine(tiny("llama"), **{"cache.dtype": "int8", "parallel.context_shards": 2})
