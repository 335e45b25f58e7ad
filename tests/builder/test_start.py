"""The steps before the first request: each is recorded, so that none can be left out unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import head_folders
import numpy as np
import pytest
import torch
from engine_driver import random_prompts, tokens_of
from repository import SUPPORT
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS

from slotline.backends.cuda import copies as staging
from slotline.builder import engine_builder
from slotline.builder.engine_builder import EngineBuilder
from slotline.builder.warmup import Warmup
from slotline.core import LLM, SamplingParams
from slotline.core.device import transfer_buffer
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.planner.plan import make_plan
from slotline.plugins.model_families.transformers_model import DecoderModel
from slotline.plugins.multimodal.encoder_runner import EncoderRunner
from slotline.plugins.pipeline_ranks.extension import PipelineRanks
from slotline.proposers.speculation import verification
from slotline.proposers.speculation.draft_runner import DraftRunner
from slotline.registry.config import load_config
from slotline.registry.contracts import Draft
from slotline.registry.errors import CapacityError, PluginError

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is called while an engine is built, in order; everything runs as ever."""
    seen: list[tuple[str, Any]] = []

    def record(owner: Any, name: str, told: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, told(*args, **kwargs)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    record(
        ModelRunner, "run", lambda _, inputs: (len(inputs.rows), inputs.num_tokens, inputs.input_ids.unique().numel())
    )
    record(engine_builder, "warm_up", lambda *args: args)
    record(DraftRunner, "rehearse", lambda _, states: states is not None)
    record(EncoderRunner, "profile", lambda *_: None)
    record(Warmup, "warm_up", lambda _: None)
    return seen


@pytest.mark.behaviour(134, 140)
def test_a_start_profiles_a_spread_step_and_the_sampler_and_warms_up(start: list[tuple[str, Any]], tiny: Tiny) -> None:
    LLM(tiny("mixtral"), **{**DEFAULTS, "max_num_seqs": 4, "max_num_batched_tokens": 48})
    (step, sampler), (warm, *small) = start[:2], start[start.index(("warm_up", None)) :]
    assert (step[0], step[1][:2]) == ("run", (4, 48))
    assert step[1][2] > 20, "a mixture of experts that meets one token would be profiled on one expert"
    assert (sampler[0], sampler[1][:3]) == ("warm_up", (1, 384, "cpu"))
    assert warm == ("warm_up", None)
    assert [told[:2] for name, told in small if name == "run"] == [(1, 1), (1, 16), (4, 16)]


@pytest.mark.behaviour(139, 142)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_start_shows_the_drafter_the_step_that_measures_memory(
    kind: str, start: list[tuple[str, Any]], tiny: Tiny, tmp_path: Path
) -> None:
    drafter = {"drafter.name": kind, "drafter.path": str(head_folders.build(tmp_path, tiny("llama_deep"), kind))}
    LLM(tiny("llama_deep"), **{**DEFAULTS, **drafter, "drafter.tokens": 2})
    assert [name for name, _ in start[:3]] == ["run", "rehearse", "warm_up"]
    assert start[1] == ("rehearse", True)


@pytest.mark.behaviour(139)
def test_a_start_cuts_its_steps_into_pieces(
    start: list[tuple[str, Any]], tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, forward = list[int](), DecoderModel.forward

    def recorded(model: Any, input_ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen.append(len(input_ids))
        return forward(model, input_ids, *rest, **more)

    monkeypatch.setattr(DecoderModel, "forward", recorded)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "pipeline": ("cpu", "cpu")}
    LLM(tiny("llama"), **{**DEFAULTS, **sizes, "scheduler.microbatches": 2, "scheduler.microbatch_tokens": 8})
    assert [told[1] for name, told in start if name == "run"] == [48, 48, 1, 16, 16]
    assert seen == [24, 24, 24, 24, 1, 8, 8, 8, 8], "also kernels for pieces are compiled before the first request"


@pytest.mark.behaviour(139)
def test_ranks_of_a_pipeline_warm_up_over_hidden_states_of_their_own(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, sent = list[tuple[int, tuple[int, ...] | None]](), list[int]()
    forward, send = DecoderModel.forward, PipelineRanks._send

    def recorded(model: Any, input_ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        received = more.get("received")
        assert received is None or sent or not received.any(), "made-up steps read zeros"
        given.append((len(input_ids), None if received is None else tuple(received.shape)))
        return forward(model, input_ids, *rest, **more)

    def recorded_send(ranks: PipelineRanks, computed: Any, count: int) -> None:
        sent.append(count)
        send(ranks, computed, count)

    monkeypatch.setattr(DecoderModel, "forward", recorded)
    monkeypatch.setattr(PipelineRanks, "_send", recorded_send)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48}
    ranks = ThreadRanks(tiny("llama"), tensor=1, pipeline=2, **{**DEFAULTS, **sizes})
    try:
        steps = (48, 48, 1, 16, 16)
        assert sorted(given, key=str) == sorted([*((n, None) for n in steps), *((n, (n, 64)) for n in steps)], key=str)
        assert not sent, "a rank would wait for another that is still loading"
        ranks.same(lambda llm: tokens_of(llm, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2)))
        assert sent[0] == 3
    finally:
        ranks.close()


@pytest.mark.behaviour(140)
def test_a_start_tries_rejection_sampling_on_finite_logits_and_it_must_fit(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = (f"{SUPPORT / 'guessing_drafter.py'}:Guesser",)
    drafter = {"plugins.inline": inline, "drafter.name": "guesser", "drafter.tokens": 2}
    plain, tried = verification.reject, list[tuple[int, torch.Tensor]]()

    def reject(logits: torch.Tensor, tokens: torch.Tensor, probabilities: torch.Tensor, rejections: Any) -> Any:
        assert logits.isfinite().all()
        found = plain(logits, tokens, probabilities, rejections)
        tried.append((len(rejections.packed), found))
        return found

    monkeypatch.setattr(verification, "reject", reject)
    LLM(tiny("llama"), **{**DEFAULTS, **drafter})
    count, found = tried[0]
    assert (count, found.shape, found.dtype) == (2, (3,), torch.int64)
    assert ((found >= 0) & (found < 384)).all()
    assert len(verification.rehearse_rejection(3, 2, 50, "cpu")) == 9
    before = len(tried)
    LLM(tiny("llama"), **{**DEFAULTS, "drafter.name": "ngram"})
    assert len(tried) == before, "drafts without a distribution are verified token by token"

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(verification, "reject", full)
    with pytest.raises(CapacityError, match=r"rejection sampling of 2 drafts over 384 tokens[\s\S]*drafter.tokens"):
        LLM(tiny("llama"), **{**DEFAULTS, **drafter})


def test_a_drafter_that_fails_at_its_rehearsal_fails_the_start(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slotline.proposers.eagle.drafter import EagleDrafter

    def failing(*_: Any) -> None:
        raise RuntimeError("no room for its work")

    monkeypatch.setattr(EagleDrafter, "observe", failing)
    drafter = {"drafter.name": "eagle", "drafter.path": str(head_folders.build(tmp_path, tiny("llama_deep"), "eagle"))}
    with pytest.raises(PluginError, match=r"drafter:eagle of slotline .*no room for its work"):
        LLM(tiny("llama_deep"), **{**DEFAULTS, **drafter, "drafter.tokens": 2})


@pytest.mark.behaviour(86, 142)
def test_the_profile_of_a_gpu_encodes_as_much_as_a_step_may_beside_a_full_cache_of_embeddings(
    start: list[tuple[str, Any]], tiny_vision_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    settings = {"model": str(tiny_vision_model("llava")), "device": "cpu", "dtype": "float32", "cache.memory": "4MiB"}
    sizes = {"scheduler.max_model_len": 64, "scheduler.max_requests": 3, "scheduler.max_batched_tokens": 64}
    builder = EngineBuilder(make_plan(load_config(values={**settings, **sizes})))
    engine = builder.build()
    assert [name for name, _ in start[:2]] == ["run", "warm_up"], "on a CPU memory is not measured so"
    first, encoding = Warmup(builder.planned, engine.gatherer, engine.runner), engine.extension("multimodal")
    assert encoding is not None
    encoded: list[int] = []
    original = encoding.encoder.model.encode

    def encode(modality: str, items: list[Any]) -> Any:
        encoded.append(len(items))
        return original(modality, items)

    monkeypatch.setattr(encoding.encoder.model, "encode", encode)
    start.clear()
    builder._profile(first, engine.extensions, 48, overlaps=True)
    assert [name for name, _ in start] == ["profile", "run", "warm_up"]
    assert start[-1][1][0] == 3, "the sampler draws for all requests"
    assert encoded == [max(1, encoding.cache.max_tokens_per_step // 9)]
    assert encoding.profile_memory().shape == (encoding.cache.capacity, builder.planned.facts.hidden_size)


# --- pinned memory, whose copies land late


class Late(torch.Tensor):
    """A tensor of a device whose copies wait in a stream until somebody waits for them."""

    stream: ClassVar[list[Callable[[], object]]] = []

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        target = self.as_subclass(torch.Tensor)
        Late.stream.append(lambda: target.copy_(source.as_subclass(torch.Tensor)))
        return self


class LateEvent:
    """An event of that stream."""

    def __init__(self) -> None:
        self._behind = 0

    def record(self, _: object) -> None:
        self._behind = len(Late.stream)

    def synchronize(self) -> None:
        for land in Late.stream[: self._behind]:
            land()
        Late.stream[: self._behind] = [lambda: None] * self._behind


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> staging.PinnedBuffer:
    """The staging of a GPU in host memory: its copies read what is copied when they land, as a GPU's do."""

    def empty(*size: int, dtype: torch.dtype, device: object = None, pin_memory: bool = False) -> torch.Tensor:
        assert not (pin_memory and device)
        made = torch.full(size, 0, dtype=dtype)
        return made if device is None and not pin_memory else made.as_subclass(Late)

    class Torch:
        cuda = SimpleNamespace(Event=LateEvent, current_device=lambda: 0, current_stream=lambda index: None)

        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    Late.stream.clear()
    monkeypatch.setattr(staging, "torch", Torch())
    monkeypatch.setattr(transfer_buffer, "torch", Torch())
    made = staging.PinnedBuffer("cuda:0")
    made.reserve(1 << 16)
    return made


@pytest.mark.behaviour(30, 88)
def test_a_pinned_buffer_is_written_again_only_when_its_copy_has_landed(late: staging.PinnedBuffer) -> None:
    for step in range(5):
        late.begin()
        if step:  # what the step before sent is there by now, whatever comes into the buffer next
            assert kept.as_subclass(torch.Tensor).tolist() == [step - 1] * 7  # noqa: F821
        kept = late.upload(np.full(7, step, np.int64))
        late.flush()
        late.mark()
    assert kept.as_subclass(torch.Tensor).tolist() == [3] * 7, "the last copy is still on its way"
    late.begin()
    assert kept.as_subclass(torch.Tensor).tolist() == [4] * 7


@pytest.mark.behaviour(88)
def test_a_result_is_read_only_when_its_copy_has_landed_and_is_the_callers_own(
    late: staging.PinnedBuffer,
) -> None:
    results = [late.download(torch.full((3, 2), value)) for value in range(4)]
    for value, result in enumerate(results):
        assert result.wait().tolist() == [[value, value]] * 3
    kept = [result.wait() for result in results]
    late.download(torch.full((3, 2), 9)).wait()
    assert [array[0, 0] for array in kept] == [0, 1, 2, 3]


# --- paths that two features share


@pytest.mark.behaviour(105)
@pytest.mark.parametrize("tokens", [1, 3])
def test_nan_logits_are_counted_for_their_request_beside_a_drafter(
    tokens: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that fall have logits of their own, which are nobody's."""
    drafter = {"drafter.name": "ngram", "drafter.tokens": tokens}
    more = {"drafter.adaptive": False, "observability.count_nans": True, "cache.prefix_caching": False}
    llm = LLM(tiny("llama"), **{**DEFAULTS, **drafter, **more})
    model: Any = llm.engine.runner.model
    model.hf_model.get_input_embeddings().weight.data[300] = torch.nan
    clean, other = random_prompts([40, 6], seed=40, vocab_size=290)
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logit_bias={token: 100.0})
        for n, token in ((1, 9), (1, 9), (9, 300), (9, 9))
    ]
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    guess = {1: [4], 3: [9, 4, 9]}[tokens]  # a 4 falls, and so does what stands behind it
    monkeypatch.setattr(
        drafting.drafter, "propose", lambda batch: Draft(token_ids=torch.tensor([guess] * len(batch.rows)))
    )
    outputs = llm.generate([clean, other, [5, 6], other], params, progress=False)
    counts = drafting.counts
    assert counts.proposed > counts.accepted
    assert (counts.accepted > 0) == (tokens == 3)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 1, 9]
    assert [output.metrics.num_nans for output in outputs] == [0, 0, 384, 0]


@pytest.mark.behaviour(73, 93)
def test_scales_of_the_cache_come_of_the_whole_first_step_also_with_microbatches(tiny: Tiny) -> None:
    prompts = random_prompts([20, 33, 7], seed=3)
    found = []
    for pieces in ({}, {"scheduler.microbatches": 2, "scheduler.microbatch_tokens": 2}):
        scales = {"cache.dtype": "fp8", "cache.calculate_kv_scales": True}
        llm = LLM(tiny("llama"), **{**DEFAULTS, **scales, **pieces})
        forwards: list[int] = []
        model: Any = llm.engine.runner.model
        original = model.forward
        model.forward = lambda ids, *rest, _run=original, _seen=forwards, **more: (
            _seen.append(len(ids)) or _run(ids, *rest, **more)
        )
        tokens = tokens_of(llm, prompts)
        router = llm.engine.runner.router
        found.append((tokens, [vars(group.backend) for group in router.groups] and scales_of(llm)))
        assert forwards[0] == 60, "the first step is run in one piece"
        if pieces:
            assert min(forwards) < 60
    assert found[0] == found[1]


def scales_of(llm: LLM) -> dict[int, tuple[float, float]]:
    from tests.kv_cache.test_kv_scales import scales_of as of_layers

    return of_layers(llm)
