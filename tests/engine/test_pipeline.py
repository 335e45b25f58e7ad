"""Pipeline stages on a CPU, where several stages share one device: the same text as one stage, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from attrs import evolve
from devices import tables_on_a_device
from engine_driver import GREEDY, mixes_decode_and_prefill, random_prompts, recorded, tokens_of
from tiny_engines import DEFAULTS

from slotline.builder.made_up import made_up_inputs
from slotline.cli.tuning.cases import cases_for
from slotline.cli.tuning.tuner import Tuner
from slotline.core import LLM, SamplingParams
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.kv_cache.block_table import DeviceTables
from slotline.planner.pipeline_parallel import balanced
from slotline.planner.plan import make_plan
from slotline.plugins.model_families import logits, stages
from slotline.registry.capability import Flag
from slotline.registry.config import load_config
from slotline.registry.contracts import ModelParts
from slotline.registry.descriptor import DeviceInfo
from slotline.registry.errors import CapacityError, ConfigError, NegotiationError, SlotlineError
from tests.llm.test_llm_api import FixedBuffers

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 24}
MODEL = ModelParts(embedding=100, layers=(50, 50, 50, 50), head=100, attention=(0, 1, 2, 3))


def over(stages: int, **settings: Any) -> dict[str, Any]:
    return {**SETTINGS, "parallel.pipeline": ("cpu",) * stages, **settings}


def planned(path: Path, **settings: Any) -> Any:
    values = {"model": str(path), "device": "cpu", "dtype": "float32", **settings}
    return make_plan(load_config(values=values))


@pytest.mark.spread(1)
@pytest.mark.behaviour(9, 98)
@pytest.mark.parametrize(
    ("family", "stages", "backend", "optimize"),
    [
        ("llama_deep", 2, "torch", False),
        ("llama_deep", 3, "torch", False),
        ("llama_tied", 3, "cpu", True),
        ("gemma3", 2, "cpu", True),
        ("gpt_oss", 3, "torch", False),
    ],
)
def test_stages_give_the_text_of_one_in_mixed_chunked_batches_and_over_prefixes(
    family: str, stages: int, backend: str, optimize: bool, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(family)
    llm = engines(path, backend=backend, optimize=optimize, **over(stages))
    expected = [greedy(path, prompt, 20) for prompt in PROMPTS]
    with recorded(llm) as steps:
        assert tokens_of(llm, PROMPTS) == expected
    assert any(mixes_decode_and_prefill(step) for step in steps)
    assert max(int(step.num_scheduled.max()) for step in steps) < 40  # the longest prompt came in chunks
    again = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == expected
    assert [o.metrics.num_cached_tokens for o in again] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]
    one = engines(path, backend=backend, optimize=optimize, **SETTINGS)
    overlapped = engines(path, backend=backend, optimize=optimize, **over(stages), **{"scheduler.async": True})
    assert tokens_of(overlapped, PROMPTS) == expected
    assert tokens_of(overlapped, PROMPTS, SEEDED) == tokens_of(llm, PROMPTS, SEEDED)
    assert tokens_of(llm, PROMPTS, SEEDED) == tokens_of(one, PROMPTS, SEEDED)
    assert len(llm.plan.stages) == stages
    assert not one.plan.stages


@pytest.mark.behaviour(33, 39)
def test_preempted_requests_go_on_over_stages(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny("llama_deep")
    llm = engines(path, **over(2, memory=f"{20 * 4}KiB"))
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [greedy(path, prompt, 20) for prompt in PROMPTS]
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


@pytest.mark.behaviour(15)
def test_drafts_and_log_probabilities_are_those_of_one_stage(tiny: Tiny, engines: Engines) -> None:
    path, drafting = tiny("llama_deep"), {"drafter.name": "ngram", "drafter.tokens": 3, "drafter.adaptive": False}
    repeating = [[5, 6, 7, 8] * 8, *PROMPTS]
    scored = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    llm, one = engines(path, **over(3), **drafting), engines(path, **SETTINGS, **drafting)
    ours, theirs = llm.generate(repeating, scored), one.generate(repeating, scored)
    assert llm.engine.extension("drafts") is not None
    assert llm.engine.extension("drafts").drafting.counts.accepted > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-4)
        assert [e and list(e) for e in mine.prompt_logprobs] == [e and list(e) for e in other.prompt_logprobs]


@pytest.mark.behaviour(43)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sampled_tokens_reach_every_stage_at_the_positions_that_follow(
    asynchronous: bool, tiny: Tiny, engines: Engines
) -> None:
    """The rows are the only copy: what the last stage sampled is the first one's input, and all count alike."""
    engine = engines(tiny("llama_deep"), **over(3), **{"scheduler.async": asynchronous}).engine
    launch, seen = engine.runner.launch, list[tuple[ModelInputs, list[int]]]()
    requests = [engine.add(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS[:3])]
    rows: dict[int, int] = {}

    def launched(inputs: ModelInputs) -> Any:
        seen.append((inputs, engine.runner.token_ids(inputs).tolist()))  # what the first stage computes
        _check_stages(inputs)
        rows.update({request.row: i for i, request in enumerate(requests) if request.row >= 0})
        return launch(inputs)

    engine.runner.launch = launched  # type: ignore[method-assign]
    try:
        while engine.has_work:
            engine.step()
    finally:
        del engine.runner.launch
    given = 0
    for inputs, ids in seen:
        starts = inputs.batches[0].query_start_loc_cpu.tolist()
        for row, start, end in zip(inputs.rows.tolist(), starts, starts[1:], strict=False):
            request = requests[rows[row]]
            whole = [*request.prompt_token_ids, *request.output_token_ids]
            computed = int(inputs.positions[start])
            assert inputs.positions[start:end].tolist() == list(range(computed, computed + end - start))
            if computed < len(whole):  # under asynchronous scheduling a finished request takes part once more
                assert ids[start:end] == whole[computed : computed + end - start]
                given += computed >= len(request.prompt_token_ids)
    assert given == 3 * 19  # each sampled token but the last was computed once, where it stands


def _check_stages(inputs: ModelInputs) -> None:
    """Every stage's batch has the same counters, positions, tables and slots."""
    first, *later = inputs.batches
    assert len(later) == 2
    np.testing.assert_array_equal(first.positions, inputs.positions)
    for batch in later:
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(first, name))
        assert (batch.num_tokens, batch.num_requests) == (first.num_tokens, first.num_requests)


@pytest.mark.spread(2)
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaModel"])
@pytest.mark.parametrize("pooling", ["last", "cls", "mean"])
def test_embeddings_are_those_of_one_stage(
    pooling: str, architecture: str, optimize: bool, tiny: Tiny, engines: Engines
) -> None:
    path = tiny("llama_deep", architecture=architecture)
    settings = {"task": "embed", "model_family.transformers_decoder.pooling": pooling, "optimize": optimize}
    ours, theirs = (engines(path, **over(stages, **settings)).embed(PROMPTS) for stages in (2, 1))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.outputs.data, other.outputs.data, atol=1e-5, rtol=0)


def test_class_scores_are_those_of_one_stage_and_the_score_head_lies_on_the_last(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama_deep", architecture="LlamaForSequenceClassification", num_labels=3)
    two, one = engines(path, **over(2)), engines(path, **over(1))
    for mine, other in zip(two.classify(PROMPTS), one.classify(PROMPTS), strict=True):
        assert mine.outputs.probs == pytest.approx(other.outputs.probs, abs=1e-5)
    last = two.plan.stages[-1]
    parts = planned(path).facts.parts
    assert parts.head == 64 + 3 * 64
    assert last.num_parameters == sum(parts.layers[last.first_layer :]) + parts.head


@pytest.mark.spread(2, slow=1)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("family", ["llama_deep", "gemma3"])
def test_buffers_and_tables_of_each_stages_own_hold_what_its_device_needs(
    family: str, asynchronous: bool, tiny: Tiny, engines: Engines, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ways to a GPU, in host memory: a buffer and block tables for each stage, which hear of every change."""
    made: list[FixedBuffers] = []
    monkeypatch.setattr(
        "slotline.builder.engine_builder.transfer_buffer_for", lambda _: made.append(FixedBuffers()) or made[-1]
    )
    for module in ("builder.engine_builder", "builder.placement"):
        monkeypatch.setattr(f"slotline.{module}.tables_for", tables_on_a_device)
    path, settings = tiny(family), over(3, memory=f"{20 * 4}KiB", **{"scheduler.async": asynchronous})
    llm = LLM(path, **{**DEFAULTS, **settings})
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [greedy(path, prompt, 20) for prompt in PROMPTS]
    assert sum(o.metrics.num_preemptions for o in outputs) > 0  # blocks changed hands
    assert len(made) == 3
    made_up_inputs(llm.engine.gatherer, [1])  # what changed last is told with the next step
    for feed in llm.engine.gatherer.assembler.feeds:
        assert isinstance(feed.tables, DeviceTables)
        for table, group in zip(feed.tables._tables, feed.tables._groups, strict=True):
            np.testing.assert_array_equal(table, group.table)


def test_a_stage_gets_the_tables_of_its_own_cache_groups_alone(tiny: Tiny, engines: Engines) -> None:
    """One attention group for each kind and stage, with a batch of its own; each backend has its stage's layers."""
    llm = engines(tiny("qwen2_sliding"), **over(2))
    groups = llm.engine.runner.router.groups
    assert [(group.name, group.batch, [layer.index for layer in group.layers]) for group in groups] == [
        ("full", 0, [0, 1]),
        ("sliding", 2, [2, 3]),  # the first stage has the tables of all cache groups
    ]
    across = engines(tiny("gemma3"), **over(2)).engine.runner.router.groups
    assert [(group.name, group.batch, [layer.index for layer in group.layers]) for group in across] == [
        ("sliding", 0, [0]),
        ("sliding", 2, [2]),
        ("full", 1, [1]),
        ("full", 3, [3]),
    ]
    assert len({id(group.backend) for group in across}) == 4


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("family", "optimize", "lean"),
    [("llama_tied", True, True), ("llama_tied", False, True), ("gemma2", False, False)],
)
def test_reloaded_weights_reach_every_stage(
    family: str, optimize: bool, lean: bool, tmp_path: Path, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path, other = tiny(family), tiny_models.build(family, tmp_path / "other", 1)
    llm = engines(path, optimize=optimize, **over(2), **{"model_family.transformers_decoder.lean": lean})
    assert any("transformers' own forward" in note for note in llm.engine.notes) != lean
    assert tokens_of(llm, PROMPTS[:3]) == [greedy(path, prompt, 20) for prompt in PROMPTS[:3]]
    llm.update_config(model=other)
    llm.reload_weights()
    assert tokens_of(llm, PROMPTS[:3]) == [greedy(other, prompt, 20) for prompt in PROMPTS[:3]]
    llm.update_config(model=path)
    llm.reload_weights()
    assert tokens_of(llm, PROMPTS[:3]) == [greedy(path, prompt, 20) for prompt in PROMPTS[:3]]


def test_a_pass_sees_the_modules_of_its_stage_alone(tiny: Tiny, engines: Engines) -> None:
    notes = engines(tiny("llama_tied"), optimize=True, **over(2, **{"parallel.layers": (3, 1)})).engine.notes
    straight = [note for note in notes if "straight calls" in note or "merged query" in note]
    assert straight
    assert all(note.startswith("stage 0") == (" 3 layers" in note) for note in straight)
    assert all(note.startswith("stage 1") == (" 1 layers" in note) for note in straight)
    assert not any("is tied" in note for note in notes)  # each stage has its own copy


@pytest.mark.parametrize(
    ("parts", "stages", "layers"),
    [
        (MODEL, 2, (2, 2)),
        (MODEL, 3, (1, 2, 1)),
        (MODEL, 4, (1, 1, 1, 1)),
        (evolve(MODEL, embedding=0), 2, (3, 1)),
        (evolve(MODEL, head=1000), 2, (3, 1)),
        (evolve(MODEL, embedding=0, head=0, layers=(1, 1, 1, 9)), 2, (3, 1)),
        (evolve(MODEL, embedding=0, head=0, layers=(10,) * 7), 3, (2, 2, 3)),
        (evolve(MODEL, embedding=30, head=1000, layers=(10,) * 7), 3, (1, 5, 1)),
    ],
)
def test_stages_are_balanced_by_their_parameters(parts: ModelParts, stages: int, layers: Sequence[int]) -> None:
    assert balanced(parts, stages) == tuple(layers)


def test_a_model_of_many_layers_is_divided_at_once() -> None:
    parts = ModelParts(embedding=1000, layers=(218,) * 126, head=1000, attention=tuple(range(126)))
    counts = balanced(parts, 8)
    assert sum(counts) == 126
    assert max(counts) - min(counts[1:-1]) <= 1


def test_layers_may_be_given_and_explain_shows_each_stage(tiny: Tiny) -> None:
    plan = planned(tiny("llama_deep"), **{"parallel.pipeline": ("cpu", "cpu"), "parallel.layers": (3, 1)}).plan
    text = " ".join(plan.explain().split())
    assert "stages 0 on cpu: layers 0 to 2, " in text
    assert " 1 on cpu: layers 3 to 3, " in text
    stages = plan.to_json()["stages"]
    assert [(stage["device"], stage["first_layer"], stage["end_layer"]) for stage in stages] == [
        ("cpu", 0, 3),
        ("cpu", 3, 4),
    ]
    one = planned(tiny("llama_deep")).plan
    assert sum(stage["num_parameters"] for stage in stages) == one.facts["parameters"]
    assert one.to_json()["stages"] == []
    assert "stages" not in one.decision()
    assert one.digest != plan.digest != planned(tiny("llama_deep"), **{"parallel.pipeline": 2}).plan.digest


def test_a_tied_output_projection_counts_in_the_last_stage(tiny: Tiny) -> None:
    parts = planned(tiny("llama_tied")).facts.parts
    assert parts.embedding == tiny_models.VOCAB_SIZE * 64
    assert parts.head == parts.embedding + 64


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"parallel.pipeline": ("cpu", "tpu")}, ConfigError, "parallel.pipeline = 'tpu' is not known"),
        ({"parallel.pipeline": ("cpu", "cuda:99")}, ConfigError, "'cuda:99' is not there"),
        ({"parallel.pipeline": 0}, ConfigError, "0 is neither a number from 1 on nor a list of names"),
        ({"parallel.pipeline": ()}, ConfigError, "is neither a number from 1 on nor a list of names"),
        ({"parallel.pipeline": 5}, NegotiationError, "5 stages for 4 layers"),
        (
            {"parallel.pipeline": 2, "parallel.layers": (1, 2)},
            NegotiationError,
            "must sum to the model's 4 layers, not 3",
        ),
        ({"parallel.pipeline": 2, "parallel.layers": (1, 2, 1)}, NegotiationError, "2 stages need as many numbers"),
        ({"parallel.pipeline": 2, "parallel.layers": (4, 0)}, NegotiationError, "numbers from 1 on"),
        ({"parallel.layers": (2, 2)}, ConfigError, "without stages"),
        ({"parallel.pipeline": 2, "offload_gib": 0.5}, NegotiationError, "either divided or offloaded"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_a_remedy(
    settings: dict[str, Any], error: type[SlotlineError], message: str, tiny: Tiny
) -> None:
    with pytest.raises(error) as caught:
        planned(tiny("llama_deep"), **settings)
    assert message in " ".join(str(caught.value).split())
    assert caught.value.fix or "use" in str(caught.value)


def test_devices_of_different_types_are_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of devices alone is made up: what is compared are the names."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="devices of different types, cpu and cuda"):
        planned(tiny("llama_deep"), **{"parallel.pipeline": ("cpu", "cuda:1")})
    infos = {f"cuda:{i}": DeviceInfo(type="cuda", name=f"card {i}", compute_capability=(8 + i, 0)) for i in range(2)}
    monkeypatch.setattr("slotline.registry.devices.Devices.info", lambda _, device: infos[device.name])
    with pytest.raises(ConfigError, match=r"devices of different types \(cuda:0: card 0, cuda:1: card 1\)"):
        planned(tiny("llama_deep"), device="cuda", **{"parallel.pipeline": ("cuda:0", "cuda:1")})
    with pytest.raises(ConfigError, match="which names one device"):
        planned(tiny("llama_deep"), device="cuda:1", **{"parallel.pipeline": 2})
    with pytest.raises(ConfigError, match="there are 2 CUDA devices"):
        planned(tiny("llama_deep"), device="cuda", **{"parallel.pipeline": 3})


def test_a_family_that_does_not_declare_pipeline_is_refused_by_name(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slotline.plugins.model_families import decoder

    without = evolve(decoder.descriptor, capabilities=evolve(decoder.descriptor.capabilities, pipeline=Flag(False)))
    monkeypatch.setattr(decoder, "descriptor", without)
    with pytest.raises(NegotiationError, match="model family 'transformers_decoder' cannot divide the model: pipeline"):
        planned(tiny("llama_deep"), **{"parallel.pipeline": ("cpu", "cpu")})
    assert planned(tiny("llama_deep")).plan.stages == ()


def test_a_cache_read_across_stages_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.plugins.model_families.transformers_model import TransformersDecoder

    inspect = TransformersDecoder.inspect

    def sharing(self: TransformersDecoder, path: Path) -> Any:
        facts = inspect(self, path)
        *own, last = facts.layers
        return evolve(facts, layers=(*own, evolve(last, shares_kv_with=1)))

    monkeypatch.setattr(TransformersDecoder, "inspect", sharing)
    with pytest.raises(NegotiationError, match=r"in stage 1 reads the cache of .* in stage 0") as caught:
        planned(tiny("llama_deep"), **{"parallel.pipeline": 2})
    assert "parallel.layers" in str(caught.value.fix)
    assert planned(tiny("llama_deep"), **{"parallel.pipeline": 2, "parallel.layers": (1, 3)}).plan.stages


def test_a_pool_that_one_stage_cannot_hold_is_refused(tiny: Tiny) -> None:
    with pytest.raises(CapacityError, match="one block takes"):
        LLM(tiny("llama_deep"), device="cpu", memory="1KiB", **over(2))


def test_stages_are_not_tuned(tiny: Tiny) -> None:
    loaded = planned(tiny("llama_deep"), **{"parallel.pipeline": 2}).loaded
    cases = cases_for("cpu", max_requests=8, max_model_len=256, max_batched_tokens=64)
    with pytest.raises(NegotiationError, match="2 pipeline stages: what is measured is kept"):
        Tuner(lambda _: loaded, cases, date="2026-11-21").run()


def test_a_model_is_checked_with_its_logits_made_on_the_last_stage(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of ours runs on the current device, which is the first stage's while a loop is compared."""
    current, seen = list[int](), set[int]()
    enter, project = stages.Part.scope, logits.LogitsHead.__call__

    @contextmanager
    def scope(part: stages.Part) -> Iterator[None]:
        current.append(part.end)
        with enter(part):
            yield
        current.pop()

    def headed(head: logits.LogitsHead, hidden_states: torch.Tensor) -> torch.Tensor:
        seen.update(current[-1:])
        return project(head, hidden_states)

    monkeypatch.setattr(stages.Part, "scope", scope)
    monkeypatch.setattr(logits.LogitsHead, "__call__", headed)
    llm = LLM(tiny("llama_deep"), **{**DEFAULTS, **over(2)})
    assert seen == {llm.plan.stages[-1].end_layer}
