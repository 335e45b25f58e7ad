"""Compressed caches: what is kept, what is freed, and what other requests see, against direct computations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engine_driver import add, random_prompts, run_all, tokens_of
from repository import SUPPORT
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM, SamplingParams
from slotline.core.scheduler.integrity import check_integrity
from slotline.plugins.kv_compression.snapkv import SnapKV
from slotline.registry.contracts import KVCompressorContext
from slotline.registry.errors import ConfigError, IntegrityError, NegotiationError, PluginError, PluginLoadError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Array = npt.NDArray[np.float64]
PROMPT, OTHER, SHORT = random_prompts([45, 37, 9], seed=7)
KEPT: dict[str, Any] = {"keep": 0.5, "first": 2, "last": 3}
AGAIN: dict[str, Any] = {"keep": 1.0, "most": 16, "interval": 5, "first": 2, "last": 3}
SMALL: dict[str, Any] = {**DEFAULTS, "block_size": 4, "max_model_len": 64, "scheduler.async": False}
SCORED: dict[str, Any] = {**KEPT, "method": f"{__name__}:Attended"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def engine(path: Path, options: dict[str, Any] | None = None, **more: Any) -> LLM:
    compression = {} if options is None else {"extensions.kv_compression": options}
    return LLM(path, **{**SMALL, **compression, **more})


def cached(llm: LLM, row: int, count: int) -> list[tuple[Array, Array]]:
    """Keys and values in the first slots of a row, [count, num_kv_heads, size] each, by layer."""
    group = llm.engine.scheduler.cache.groups[0]
    blocks = torch.from_numpy(group.kernel_blocks(group.blocks[row]).astype(np.int64))
    return [
        tuple(each[blocks].flatten(0, 1)[:count].double().numpy() for each in cache)  # type: ignore[misc]
        for cache in llm.engine.runner.router.caches()
    ]


def keydiff(keys: Array, kept: int, first: int, last: int) -> list[list[int]]:
    """The tokens that stay, by head: as the paper says, one after the other."""
    chosen = []
    for head in range(keys.shape[1]):
        unit = [key / np.sqrt((key**2).sum()) for key in keys[:, head]]
        mean = sum(unit) / len(unit)
        likeness = [float(one @ mean) for one in unit]
        fixed = {*range(first), *range(len(unit) - last, len(unit))}
        rest = sorted((at for at in range(len(unit)) if at not in fixed), key=lambda at: likeness[at])
        chosen.append(sorted([*fixed, *rest[: kept - len(fixed)]]))
    return chosen


def test_what_stays_in_the_cache_is_what_a_direct_computation_keeps(tiny: Tiny) -> None:
    plain, compressed = engine(tiny("llama")), engine(tiny("llama"), KEPT)
    for llm in (plain, compressed):
        add(llm, "one", PROMPT, GREEDY)
        llm.engine.step()
    full = cached(plain, 0, 45)
    compressed.engine.step()
    for (keys, values), (kept_keys, kept_values) in zip(full, cached(compressed, 0, 23), strict=True):
        chosen = keydiff(keys, 23, 2, 3)
        assert chosen[0] != chosen[1]  # the heads keep tokens of their own
        for head, places in enumerate(chosen):
            np.testing.assert_allclose(kept_keys[:, head], keys[places, head], atol=1e-5)
            np.testing.assert_allclose(kept_values[:, head], values[places, head], atol=1e-5)


def reference_tokens(path: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers on a cache that was cut down after the prompt."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False).eval()
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True)
        cut = DynamicCache()
        for index, layer in enumerate(out.past_key_values.layers):
            keys = layer.keys[0].transpose(0, 1).double().numpy()
            chosen = torch.tensor(keydiff(keys, -(-len(prompt) // 2), 2, 3))[None, :, :, None]
            cut.update(
                *(each.gather(2, chosen.expand(-1, -1, -1, each.shape[3])) for each in (layer.keys, layer.values)),
                index,
            )
        tokens = [int(out.logits[0, -1].argmax())]
        for position in range(len(prompt), len(prompt) + count - 1):
            mask = torch.ones((1, cut.get_seq_length() + 1), dtype=torch.long)
            out = model(
                torch.tensor([tokens[-1:]]),
                past_key_values=cut,
                position_ids=torch.tensor([[position]]),
                attention_mask=mask,
            )
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens


def test_tokens_are_those_of_transformers_on_a_cache_that_was_cut_down(tiny: Tiny) -> None:
    path = tiny("llama")
    assert tokens_of(engine(path, KEPT), [PROMPT, OTHER], GREEDY) == [
        reference_tokens(path, prompt, 12) for prompt in (PROMPT, OTHER)
    ]


def test_nothing_changes_where_all_tokens_are_kept(tiny: Tiny) -> None:
    want = tokens_of(engine(tiny("llama")), [PROMPT, SHORT], GREEDY)
    for options in ({"keep": 1.0}, {"keep": 0.1, "last": 60}, {"keep": 1.0, "most": 60, "interval": 4, "last": 4}):
        assert tokens_of(engine(tiny("llama"), options), [PROMPT, SHORT], GREEDY) == want
    assert tokens_of(engine(tiny("llama"), KEPT), [PROMPT, SHORT], GREEDY)[0] != want[0]


def test_blocks_behind_the_kept_tokens_go_back_to_the_pool(tiny: Tiny) -> None:
    for caching in (False, True):
        llm = engine(tiny("llama"), {**KEPT, "keep": 0.25}, **{"cache.prefix_caching": caching})
        pool, group = llm.engine.scheduler.cache.pool, llm.engine.scheduler.cache.groups[0]
        add(llm, "one", PROMPT, GREEDY)
        llm.engine.step()
        assert len(group.blocks[0]) >= 12
        llm.engine.step()
        assert len(group.blocks[0]) in (4, 5)  # 12 tokens and those of the next steps, of 46
        assert pool.num_free == pool.num_blocks - 1 - len(group.blocks[0])
        run_all(llm)
        everything_returned(llm)


def test_a_running_request_never_holds_more_than_it_may(tiny: Tiny) -> None:
    llm = engine(tiny("llama"), AGAIN, max_model_len=96)
    group, most = llm.engine.scheduler.cache.groups[0], 0
    request = add(llm, "one", PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
        held = int(llm.engine.rows.num_computed_tokens[0]) - int(group.freed.count[0])  # type: ignore[attr-defined]
        most = max(most, held if request.row >= 0 else 0)
    assert most == 16 + 5
    everything_returned(llm)


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        pytest.param(KEPT, True, id="prompts-async"),
        pytest.param(KEPT, False, id="prompts-sync"),
        pytest.param(AGAIN, True, id="decodes-async"),
        pytest.param(AGAIN, False, id="decodes-sync", marks=pytest.mark.slow),
        pytest.param(SCORED, True, id="scores-async"),
        pytest.param(SCORED, False, id="scores-sync", marks=pytest.mark.slow),
    ],
)
def test_texts_depend_on_no_other_request_whatever_happens(tiny: Tiny, options: dict[str, Any], overlap: bool) -> None:
    """In a small pool: requests wait, give way, hit prefixes, and share blocks when they are compressed."""
    path = tiny("llama")
    prompts = [PROMPT, OTHER, PROMPT, SHORT, PROMPT[:24] + OTHER[:13], PROMPT[:30], OTHER, PROMPT]
    alone = engine(path, options, **{"cache.prefix_caching": False})
    want = [tokens_of(alone, [prompt], GREEDY)[0] for prompt in prompts]
    small = {"memory": "84KiB", "max_num_seqs": 4, "max_num_batched_tokens": 24, "scheduler.async": overlap}
    llm = engine(path, options, **small, **{"cache.prefix_wait": 0})
    preempted = found = 0
    for _ in range(3):
        outputs = llm.generate([list(one) for one in prompts], GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == want
        everything_returned(llm)
        preempted += sum(output.metrics.num_preemptions for output in outputs)
        found += sum(output.metrics.num_cached_tokens for output in outputs)
    assert preempted > 0
    assert found > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_a_second_request_finds_the_whole_prefix_of_a_compressed_one(tiny: Tiny, overlap: bool) -> None:
    path = tiny("llama")
    want = tokens_of(engine(path, KEPT), [PROMPT], GREEDY)[0]
    llm = engine(path, KEPT, **{"scheduler.async": overlap})
    first = add(llm, "one", PROMPT, GREEDY)
    for _ in range(4):
        llm.engine.step()
    second = add(llm, "two", PROMPT, GREEDY)
    rows, groups = llm.engine.rows, llm.engine.scheduler.cache.groups
    llm.engine.step()
    assert second.metrics.num_cached_tokens == 44
    assert not {*groups[0].blocks[first.row]} & {*groups[0].blocks[second.row]}
    run_all(llm)
    assert [rows.max_requests - rows.num_free, llm.engine.has_work] == [0, False]
    assert tokens_of(llm, [PROMPT], GREEDY)[0] == want


def test_blocks_that_others_share_are_not_written_to(tiny: Tiny) -> None:
    """Two requests with one prompt, in a pool that cannot give either of them blocks of its own."""
    path = tiny("llama")
    want = tokens_of(engine(path, KEPT), [PROMPT], GREEDY)[0]
    llm = engine(path, KEPT, memory="68KiB", max_num_batched_tokens=8, **{"cache.prefix_wait": 0})
    outputs = llm.generate([PROMPT, PROMPT, PROMPT], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [want] * 3
    everything_returned(llm)


def test_a_row_that_lacks_blocks_computes_nothing_until_it_has_them(tiny: Tiny) -> None:
    """Others hold its blocks and the pool is empty: it waits, and is compressed as if nothing had happened."""
    want = tokens_of(engine(tiny("llama"), KEPT), [PROMPT], GREEDY)[0]
    llm = engine(tiny("llama"), KEPT)
    pool, group = llm.engine.scheduler.cache.pool, llm.engine.scheduler.cache.groups[0]
    request = add(llm, "one", PROMPT, GREEDY)
    llm.engine.step()
    shared, taken = list(group.blocks[request.row]), pool.allocate(pool.num_free)
    pool.share(shared)
    compression, rows = llm.engine.extension("kv_compression"), np.array([request.row])
    compression.before_schedule(rows)
    assert compression.limit_tokens(rows, np.array([5])).tolist() == [0]
    assert list(compression.requeue()) == [request]  # the last one to run gives way
    assert compression.requeue() == []
    pool.release(taken)
    pool.release(shared)
    compression.before_schedule(rows)
    assert compression.limit_tokens(rows, np.array([5])).tolist() == [5]
    run_all(llm)
    assert request.output_token_ids == want
    everything_returned(llm)


def test_pieces_of_steps_read_the_same_slots(tiny: Tiny) -> None:
    path, pieces = tiny("llama"), {"scheduler.microbatches": 2, "scheduler.microbatch_tokens": 2}
    want = tokens_of(engine(path, AGAIN), [PROMPT, OTHER, SHORT], GREEDY)
    assert tokens_of(engine(path, AGAIN, **pieces), [PROMPT, OTHER, SHORT], GREEDY) == want


def test_what_an_extension_frees_wrongly_is_found(tiny: Tiny) -> None:
    llm = engine(tiny("llama"), KEPT)
    cache, rows = llm.engine.scheduler.cache, llm.engine.rows
    add(llm, "one", PROMPT, GREEDY)
    for _ in range(3):
        llm.engine.step()
    freed, computed = cache.groups[0].freed, int(rows.num_computed_tokens[0])  # type: ignore[attr-defined]
    held = computed - int(freed.count[0])
    for kept in (0, held + 1):
        with pytest.raises(IntegrityError, match=f"row 0 holds {held} tokens, and {kept} were to be kept"):
            freed.keep(0, computed, kept)
    assert freed.keep(0, computed, held) == []
    check_integrity(llm.engine.scheduler)
    cache.pool.remember(0, cache.groups[0].blocks[0][:1], [b"findable"])
    with pytest.raises(IntegrityError, match="row 0, which has freed tokens, is shared or can be found"):
        check_integrity(llm.engine.scheduler)


def test_an_exception_in_a_step_leaves_nothing_freed(tiny: Tiny) -> None:
    llm = engine(tiny("llama"), KEPT)
    want = tokens_of(llm, [PROMPT, OTHER], GREEDY)
    calls, launch = list[int](), llm.engine.runner.launch

    def fail(inputs: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise OSError("a step fails")
        return launch(inputs)

    llm.engine.runner.launch = fail  # type: ignore[method-assign]
    requests = [add(llm, name, prompt, GREEDY) for name, prompt in (("one", PROMPT), ("two", OTHER))]
    with pytest.raises(OSError, match="a step fails"):
        run_all(llm)
    assert not llm.engine.scheduler.cache.groups[0].freed.count.any()  # type: ignore[attr-defined]
    tokens: dict[str, list[int]] = {}
    while llm.engine.has_work:
        for ended in llm.engine.step().finished:
            tokens[ended.request_id] = llm.engine.output([ended]).outputs[0].token_ids
    assert [tokens[request.request_id] for request in requests] == want
    everything_returned(llm)


REFUSED: Sequence[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {}, "have a window"),
    ("deepseek_v3", {}, "keep latents"),
    ("bloom", {}, "have ALiBi slopes"),
    ("llama", {"drafter.name": "ngram"}, "drafter.name"),
    ("llama", {"cache.dtype": "int8"}, "has the format 'int8_token_head'"),
    ("llama", {"kv_connector.name": "host_memory"}, "kv_connector.name"),
    ("llama", {"parallel.pipeline": ("cpu", "cpu")}, "parallel.pipeline"),
]


@pytest.mark.parametrize(("family", "settings", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_what_cannot_be_right_is_refused_by_name(
    tiny: Tiny, family: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NegotiationError, match=reason) as caught:
        engine(tiny(family), KEPT, **settings)
    assert "kv_compression" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"keep": 0.0}, ConfigError, "keep is 0.0"),
        ({"most": 20}, ConfigError, "most = 20 leaves nothing to choose"),
        ({"interval": 4}, ConfigError, "interval = 4 without most"),
        ({"method": "snapkv", "most": 60, "interval": 4}, ConfigError, "interval = 4 beside method = 'snapkv'"),
        ({"method": "snapkv", "options": {"kernel": 4}}, ConfigError, "'kernel': 4"),
        ({"method": "keydif"}, PluginLoadError, "known: keydiff, newest, snapkv"),
        ({"method": "no.such.module:Method"}, PluginLoadError, "no.such.module"),
    ],
)
def test_wrong_options_are_named(tiny: Tiny, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        engine(tiny("llama"), options)


class Newest:
    """A stranger's method: the newest tokens stay."""

    window = 0

    def __init__(self, context: Any) -> None:
        self.options = dict(context.options)

    def importance(self, layer: Any, keys: torch.Tensor, values: torch.Tensor, scores: Any) -> torch.Tensor:
        places = torch.arange(len(keys))[:, None].expand(-1, keys.shape[1]).float()
        return places[:, : self.options.get("heads", 9)]


def test_a_method_of_ones_own_is_named_by_its_path(tiny: Tiny) -> None:
    options = {"method": f"{__name__}:Newest", "keep": 0.4, "first": 2, "last": 0}
    plain, compressed = engine(tiny("llama")), engine(tiny("llama"), options)
    for llm in (plain, compressed):
        add(llm, "one", PROMPT, GREEDY)
        llm.engine.step()
    full = cached(plain, 0, 45)
    compressed.engine.step()
    for (keys, _), (kept, _) in zip(full, cached(compressed, 0, 18), strict=True):
        np.testing.assert_allclose(kept, keys[[0, 1, *range(29, 45)]], atol=1e-5)
    with pytest.raises(PluginError, match=r"importance gave \[45, 1\], expected \[45, 2\]"):
        tokens_of(engine(tiny("llama"), {**options, "options": {"heads": 1}}), [PROMPT], GREEDY)


class Attended:
    """Tokens that the last eight attend to stay. It notes what it reads."""

    window = 8
    read: ClassVar[list[Array]] = []

    def __init__(self, context: Any) -> None:
        pass

    def importance(self, layer: Any, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert (scores.shape, scores.dtype) == (keys.shape[:2], torch.float32)
        self.read.append(scores.double().numpy())
        return scores


@pytest.mark.parametrize("chunk", [64, 17])
@pytest.mark.parametrize("optimize", [False, True])
def test_scores_are_the_mean_attention_of_the_last_tokens(tiny: Tiny, chunk: int, optimize: bool) -> None:
    """Also where the prompt is divided over steps, and where the model skips queries in its last layer."""
    from transformers import AutoModelForCausalLM

    path = tiny("llama")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()
    with torch.inference_mode():
        weights = model(torch.tensor([PROMPT]), output_attentions=True).attentions  # [1, 4, 45, 45] each
    Attended.read.clear()
    tokens_of(engine(path, SCORED, max_num_batched_tokens=chunk, optimize=optimize), [PROMPT], GREEDY)
    assert len(Attended.read) == len(weights) == 2
    for found, probabilities in zip(Attended.read, weights, strict=True):
        of_heads = probabilities[0, :, -8:].double().numpy().mean(1)  # [4, 45]
        np.testing.assert_allclose(found, of_heads.reshape(2, 2, 45).mean(1).T, atol=1e-5)


def test_snapkv_keeps_what_the_last_tokens_attend_to_and_its_neighbours(tiny: Tiny) -> None:
    rng = np.random.default_rng(3)
    scores = torch.from_numpy(rng.random((60, 2), np.float32))
    method = SnapKV(KVCompressorContext(layers=()))
    found = method.importance(None, scores, scores, scores.clone()).double().numpy()  # type: ignore[arg-type]
    padded = np.pad(scores.double().numpy(), ((2, 2), (0, 0)))
    np.testing.assert_allclose(found[:28], [padded[at : at + 5].mean(0) for at in range(28)], rtol=1e-5)
    assert np.isinf(found[28:]).all()
    options = {"method": "snapkv", "keep": 0.8, "first": 1, "last": 1}
    texts = tokens_of(engine(tiny("llama"), options), [PROMPT, SHORT], GREEDY)
    whole = tokens_of(engine(tiny("llama")), [PROMPT, SHORT], GREEDY)
    assert texts[0] != whole[0]
    assert len(texts[1]) == len(whole[1])


def test_scores_are_negotiated(tiny: Tiny) -> None:
    """A backend that does not tell is refused, and `auto` takes one that does."""
    llm = engine(tiny("llama"), SCORED, backend="auto")
    assert llm.engine.plan.groups[0].backend in ("cpu", "torch")
    with pytest.raises(NegotiationError, match="N189") as caught:
        engine(tiny("llama"), SCORED, backend="flex")
    assert "extensions.kv_compression" in str(caught.value)
    with pytest.raises(NegotiationError, match="no room for the last 8 tokens"):
        engine(tiny("llama"), SCORED, max_num_batched_tokens=15)
    with pytest.raises(NegotiationError, match=r"scheduler.microbatches = 2"):
        engine(tiny("llama"), SCORED, **{"scheduler.microbatches": 2})


def test_plugins_hear_of_blocks_that_tokens_were_moved_to(tiny: Tiny) -> None:
    """The extension keeps a sum of each block, and checks before each step that none is stale."""
    sums = {"plugins.inline": (f"{SUPPORT / 'summing_extension.py'}:descriptor",), "extensions.sums": {}}
    llm = engine(tiny("llama"), AGAIN, memory="72KiB", **sums)
    want = tokens_of(engine(tiny("llama"), AGAIN), [PROMPT, OTHER, PROMPT], GREEDY)
    for _ in range(2):
        assert tokens_of(llm, [PROMPT, OTHER, PROMPT], GREEDY) == want
    heard = llm.engine.extension("sums").heard
    assert heard["moved"] > 0
    assert heard["returned"] > 0
    everything_returned(llm)
