"""The attention checks: they fit whatever is declared, ask for nothing else, and see what they say they see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from small_sizes import in_small

from slotline.registry.capability import Align, Choice, Flag, Limit, Max, Range, Set
from slotline.registry.contracts.attention import AttentionCapabilities, AttentionContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing import Failed, Level, NotApplicable, Outcome, Run, all_checks, check_plugin
from slotline.testing.environments.attention import Case, World
from slotline.testing.environments.attention_choice import choose, head_sizes, pairwise
from slotline.testing.environments.attention_history import Pool
from slotline.testing.environments.attention_variants import plant
from slotline.testing.oracles.attention import attention, tolerance
from slotline.testing.reference.attention.backend import EagerAttention
from slotline.testing.runner import cases_of
from slotline.testing.subject import subject_of

PLAIN = AttentionCapabilities(devices=Set(("cpu",)), dtypes=Set((("float32", "float32"),)))


class Narrow(EagerAttention):
    """Refuses at once what its descriptor does not declare."""

    declared = PLAIN

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        offer, layer = self.declared, context.layers[0]
        assert offer.dtypes.refusal((context.dtype, context.kv_dtype)) is None
        assert offer.kernel_block_sizes.refusal(context.kernel_block_size) is None
        assert offer.layouts.refusal(context.layout) is None
        assert offer.head_sizes.refusal(layer.head_size) is None
        assert offer.group_sizes.refusal(layer.num_heads // layer.num_kv_heads) is None
        assert offer.different_value_head.support or layer.head_size_v == layer.head_size
        assert offer.sliding_window.support or layer.window is None
        assert offer.soft_cap.support or layer.soft_cap is None
        assert offer.sinks.support or not layer.sinks
        assert offer.attention_types.refusal(layer.attention_type) is None

    def plan(self, batch: Any) -> Any:
        assert self.declared.query_len.refusal(batch.max_query_len) is None
        return super().plan(batch)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, plan: Any, out: Any, sinks: Any = None
    ) -> None:
        """No LSE is declared."""
        super().forward(layer, query, key, value, cache, plan, out, sinks)


def narrow(**capabilities: Any) -> Descriptor[Any]:
    offer = evolve(PLAIN, **capabilities)
    backend = type("Declared", (Narrow,), {"declared": offer})
    return Descriptor(kind=Kind.ATTENTION, name="narrow", capabilities=offer, factory=backend)


DECLARATIONS: dict[str, dict[str, Any]] = {
    "nothing but one dtype": {},
    "bfloat16, heads first, pages of 48, head of 128": {
        "dtypes": Set((("bfloat16", "bfloat16"),)),
        "layouts": Choice(("HND",)),
        "kernel_block_sizes": Align(exact=(48,)),
        "head_sizes": Range(128, 128),
        "group_sizes": Range(1, 4),
    },
    "decode only": {"query_len": Max(1), "kernel_block_sizes": Align(multiple_of=16)},
    "windows for single tokens, groups of one": {
        "sliding_window": Flag(True),
        "group_sizes": Range(1, 1),
        "limits": (Limit(when="sliding_window", capability="query_len", offer=Max(1)),),
    },
    "larger blocks preferred for caches of another dtype": {
        "dtypes": Set((("float32", "float32"), ("float32", "float16"))),
        "limits": (
            Limit(when="kv_dtype", capability="preferred_block_sizes", offer=Align(multiple_of=64), note="tiles"),
        ),
    },
    "mixed dtypes with an eight-bit cache": {"dtypes": Set((("bfloat16", "float8_e4m3fn"), ("float32", "float16")))},
}


@pytest.mark.spread(0, slow=1)
@pytest.mark.parametrize("declared", DECLARATIONS)
def test_a_backend_is_asked_for_nothing_that_it_does_not_declare(declared: str) -> None:
    records = check_plugin(narrow(**DECLARATIONS[declared]), device="cpu", level=Level.STATEFUL, only=in_small)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    passed = {record.id for record in records if record.outcome is Outcome.PASSED}
    assert {"attention.decode", "attention.hostile", "attention.stateful.random_history"} <= passed
    assert all(record.reason for record in records if record.outcome is Outcome.SKIPPED)


def test_every_declared_value_has_a_case() -> None:
    descriptor = narrow(
        kernel_block_sizes=Align(exact=(48, 160), multiple_of=32),
        layouts=Choice(("HND", "NHD")),
        head_sizes=Range(64, 64, extra=(72, 192)),
        group_sizes=Range(1, 8),
        dtypes=Set((("float32", "float32"), ("bfloat16", "float16"))),
    )
    subject = subject_of(descriptor, device="cpu")
    assert set(head_sizes(subject)) == {64, 72, 192}
    found: dict[str, set[Any]] = {}
    for item in all_checks(subject.kind):
        for case in cases_of(item, subject)[0] if item.level <= Level.HOSTILE else ():
            for name, value in case.items():
                found.setdefault(name, set()).add(value)
    assert {48, 160, 32, 64, 96} <= found["block_size"]
    assert {"HND", "NHD"} == found["layout"]
    assert set(range(1, 9)) <= found["group"]
    assert {"float32", "bfloat16"} == found["dtype"]
    assert {"float32", "float16"} == found["kv_dtype"]


def test_what_is_fixed_but_not_declared_does_not_apply() -> None:
    subject = subject_of(narrow(), device="cpu")
    with pytest.raises(NotApplicable, match="not declared: sliding window"):
        choose(subject, window=3)


def test_a_window_of_an_encoder_needs_more_than_a_window_and_encoders() -> None:
    subject = subject_of(narrow(attention_types=Set(("encoder_only",)), sliding_window=Flag(True)), device="cpu")
    with pytest.raises(NotApplicable, match="not declared: encoder window"):
        choose(subject, attention_type="encoder_only", causal=False, window=3)


def test_query_tokens_are_cut_to_the_longest_query() -> None:
    subject = subject_of(narrow(query_len=Max(3)), device="cpu")
    assert choose(subject, ((40, 50), (1, 2))).requests == ((3, 50), (1, 2))


def test_pairwise_covers_each_pair_with_fewer_rows_than_the_product() -> None:
    axes = {"a": [1, 2, 3], "b": [1, 2], "c": [1, 2, 3], "d": [1, 2]}
    rows = list(pairwise(axes))
    assert len(rows) < 18
    for one in axes:
        for other in axes:
            if one < other:
                assert {(row[one], row[other]) for row in rows} == {(i, j) for i in axes[one] for j in axes[other]}


def one_by_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
    """The definition, in loops."""
    out = torch.zeros(len(query), query.shape[1], values.shape[2], dtype=torch.float64)
    for i in range(len(query)):
        own = len(keys) - len(query) + i
        for head in range(query.shape[1]):
            kv = head // (query.shape[1] // keys.shape[1])
            seen = range(max(0, own - window + 1), own + 1)
            scores = [float(query[i, head].double() @ keys[j, kv].double()) * 0.3 for j in seen]
            weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
            for weight, j in zip(weights, seen, strict=True):
                out[i, head] += weight * values[j, kv].double()
    return out


def test_the_oracle_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(n, h, 5, generator=generator) for n, h in ((4, 6), (11, 2), (11, 2)))
    answer = attention(query, keys, values, scale=0.3, window=3)
    torch.testing.assert_close(answer.out, one_by_one(query, keys, values, 3), rtol=1e-12, atol=1e-12)


def test_the_rule_allows_rounding_and_not_a_lost_needle() -> None:
    world = World(Case(requests=((1, 2000),), dtype=torch.bfloat16))
    plant(world, 0, 1000)
    exact, eager = world.answers()[0], world.answers(torch.bfloat16)[0]
    allowed = tolerance(exact, eager, world.values[0], torch.bfloat16)
    kept = [i for i in range(2000) if i != 1000]
    lost = attention(world.queries[0], world.keys[0][kept], world.values[0][kept], scale=world.layer.scale)
    assert float((exact.out.to(torch.bfloat16).double() - exact.out).abs().max()) < allowed.out
    assert float((lost.out - exact.out).abs().max()) > 10 * allowed.out


class StaleTable(EagerAttention):
    """Keeps the block table of the first batch of each size."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.kept: dict[Any, torch.Tensor] = {}

    def plan(self, batch: Any) -> Any:
        table = self.kept.setdefault(batch.block_table.shape, batch.block_table.clone())
        return super().plan(evolve(batch, block_table=table))


def test_a_random_history_finds_a_stale_block_table_and_tells_the_history() -> None:
    descriptor = Descriptor(kind=Kind.ATTENTION, name="stale", capabilities=PLAIN, factory=StaleTable)
    records = check_plugin(descriptor, device="cpu", only="attention.stateful.random_history")
    assert [record.outcome for record in records] == [Outcome.FAILED]
    assert "history (request: new tokens): admit 1" in records[0].reason
    again = check_plugin(descriptor, device="cpu", only="attention.stateful.random_history")
    assert again[0].reason == records[0].reason


def test_a_failure_names_request_position_head_and_block() -> None:
    world = World(Case(requests=((1, 3), (2, 20))))
    out, _ = world.run(EagerAttention(world.case.context()))
    out[2, 4] += 1.0
    with pytest.raises(Failed, match=r"request 1 \(2 query tokens, 20 in all\) at position 19, head 4 \(block 1\)"):
        world.check(out)


def test_a_pool_shares_copies_and_frees_blocks() -> None:
    case = Case(requests=(), block_size=4, head_size=8)
    pool = Pool(case, EagerAttention(case.context()), num_blocks=8, longest=32)
    parent = pool.admit()
    pool.step({parent: 6})
    child = pool.fork(parent)
    assert pool.requests[child].blocks == pool.requests[parent].blocks
    pool.step({child: 1})
    assert pool.requests[child].blocks[0] == pool.requests[parent].blocks[0]
    assert pool.requests[child].blocks[1] != pool.requests[parent].blocks[1]
    last = pool.requests[child].blocks[1]
    pool.roll_back(child, 4)
    assert pool.free[-1] == last
    assert bool(pool.home.cache.key[last].isnan().all())
    pool.finish(child)
    pool.finish(parent)
    assert sorted(pool.free) == list(range(2, 10))


def test_a_run_keeps_its_worst_error() -> None:
    subject = subject_of(narrow(), device="cpu")
    run = Run(subject, {}, 0)
    world = World(Case(requests=((1, 9), (4, 30))))
    world.check(*world.run(EagerAttention(world.case.context())), run)
    assert 0 < run.measured["error"] <= run.measured["allowed"]


@pytest.mark.parametrize(
    ("fill", "declared", "outcome"),
    [(-5e4, None, Outcome.FAILED), (-5e4, -5e4, Outcome.PASSED), (-1e3, -5e4, Outcome.FAILED)],
)
def test_a_figure_for_minus_infinity_is_right_as_far_down_as_it_is_declared(
    fill: float, declared: float | None, outcome: Outcome
) -> None:
    """As FlashInfer's kernels have one: it stands among products of queries and keys, before their scale."""

    class Finite(EagerAttention):
        def attend(
            self, layer: Any, query: Any, keys: Any, values: Any, seen: Any, sinks: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            scores = self.scores(layer, query, keys).masked_fill(~seen, fill * layer.scale)
            weights, lse = self.softmax(scores, sinks)
            return self.combine(weights, self.expand(layer, values)), lse

    offer = evolve(PLAIN, lowest_score=declared)
    descriptor = Descriptor(kind=Kind.ATTENTION, name="finite", capabilities=offer, factory=Finite)
    (record,) = check_plugin(descriptor, only="attention.large_scores.negative", device="cpu")
    assert record.outcome is outcome, record.reason


def test_a_lowest_score_without_a_sign_is_refused() -> None:
    records = check_plugin(narrow(lowest_score=1.0), only="attention.contract.capabilities", device="cpu")
    assert "lowest_score is 1.0" in records[0].reason
