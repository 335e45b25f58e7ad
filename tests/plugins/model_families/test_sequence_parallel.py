"""Hidden states divided by tokens: each rank adds and norms its own, and all give one process's text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensor_sweep
import tiny_speech
import torch
from attrs import evolve
from engine_driver import random_prompts
from family_table import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from lora_cases import PeftOracle
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams
from slotline.core.batch.graph_dispatcher import GraphDispatcher
from slotline.plugins.model_families.tensor_parallel import threads
from slotline.plugins.model_families.tensor_parallel.token_division import TokenDivision
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.registry.contracts.model_family import Shard
from slotline.registry.errors import NegotiationError
from tests.proposers.test_drafters_ranks import checkpoints

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(87, 90)]

Tiny = Callable[..., Path]
FAST = ("gemma2", "mamba")
"""A decoder that norms what it adds, and one without attention, which runs in transformers' own forward."""
SLOW = ("llama", "qwen3_next", "deepseek_v3", "gpt_oss", "falcon_h1", "nemotron_h")
REFUSED = {
    "gemma3n": "read more of the tokens",
    "gemma4": "read more of the tokens",
    "zamba2": "read more of the tokens",
}
PROMPTS = random_prompts([5, 40, 17, 2, 30], seed=3)
SEQUENCE: dict[str, Any] = {"parallel.sequence": True, "dtype": "float32"}


def _marked(name: str) -> Any:
    marks = () if name in FAST else pytest.mark.slow if name in SLOW else pytest.mark.exhaustive
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [_marked(name) for name in FAMILIES if name != "mpt"])
def test_a_family_gives_its_text_or_is_refused_by_name(name: str, tiny: Tiny) -> None:
    word, reason = tensor_sweep.verdict(tiny(name), 2, sequence=True)
    assert word == ("REFUSED" if name in REFUSED else "EQUAL"), reason
    assert REFUSED.get(name, "") in reason


def test_each_rank_has_an_equal_share_of_the_tokens_between_the_products(tiny: Tiny) -> None:
    """The last tokens are padding, and those that sample are all that the last MLP sees."""
    path = tiny("llama")
    shapes: dict[str, list[tuple[int, ...]]] = {"reduce_scatter": [], "all_reduce": []}

    class Listening(threads.ThreadCommunicator):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            if self.rank == 0:
                shapes["all_reduce"].append(tuple(x.shape))
            return super().all_reduce(x)

        def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
            if self.rank == 0:
                shapes["reduce_scatter"].append(tuple(x.shape))
            return torch.stack(self.gather(x)).sum(0).chunk(self.size)[self.rank].clone()

    def run(shard: Shard, ranks: Any) -> torch.Tensor:
        model = tensor_sweep.load(path, evolve(shard, sequence=True), ranks)
        if shard.rank == 0:  # loading has probed it
            shapes["all_reduce"].clear()
            shapes["reduce_scatter"].clear()
        cache = tensor_sweep.TrialCache()
        cache.counts = [(0, 9)]
        tokens = torch.arange(9)
        hidden = model.forward(tokens, tokens, cache.attend, torch.tensor([8]), advance=cache.advance)
        return hidden.clone()  # type: ignore[no-any-return]

    hidden = threads.run(4, run, Listening)
    assert all(torch.equal(one, hidden[0]) for one in hidden)
    size = hidden[0].shape[-1]
    assert set(shapes["reduce_scatter"]) == {(12, size)}
    assert set(shapes["all_reduce"]) == {(1, 1, size)}
    assert len(shapes["reduce_scatter"]) == 1 + 2  # embedding and first layer
    assert len(shapes["all_reduce"]) == 1 + 2  # the wanted token, and the last layer's two sums of it


@given(count=st.integers(1, 9), ranks=st.integers(2, 4), wanted=st.lists(st.integers(0, 8), max_size=4))
def test_tokens_are_divided_and_joined(count: int, ranks: int, wanted: list[int]) -> None:
    x = torch.randn(ranks, 1, count, 3)
    chosen = torch.tensor([one % count for one in wanted], dtype=torch.int64)

    def run(_: Shard, communicator: Any) -> None:
        tokens, own = TokenDivision(communicator), x[communicator.rank]
        with tokens.step(count):
            part = tokens.sum(own)
            assert part.shape == (1, -(-count // ranks), 3)  # equal, and never empty
            total = tokens.whole(part)
            torch.testing.assert_close(total, x.sum(0))
            assert torch.equal(tokens.own(total), part)
            assert torch.equal(tokens.some(part, chosen), total[:, chosen])
            assert not tokens.divided
            torch.testing.assert_close(tokens.sum(own), total)
        assert tokens.enter(own) is own

    threads.run(ranks, run)


def test_what_does_not_fit_is_refused_in_the_plan(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(NegotiationError, match=r"parallel.sequence = true .*: no ranks share a layer"):
        LLM(tiny("llama"), **{"parallel.sequence": True})
    with pytest.raises(NegotiationError, match="Gemma3nForCausalLM cannot be divided by tokens"):
        TransformersDecoder().inspect(tiny("gemma3n"), shard=Shard(rank=0, size=2, sequence=True))
    with pytest.raises(NegotiationError, match=r"parallel.sequence = true .*: model family 'transformers_speech'"):
        LLM(tiny_speech.build(tmp_path / "whisper"), tensor=2, **{"parallel.sequence": True})


def test_shapes_of_graphs_are_multiples_of_the_ranks() -> None:
    phases = {"decode": "full", "mixed": "piecewise"}
    shapes = GraphDispatcher(phases, (1, 2, 5, 8), query_len=1, max_requests=8, max_tokens=64, ranks=4)
    assert [(shape.num_tokens, shape.query_len) for shape in shapes.largest_first] == [(8, 0), (8, 1), (4, 0), (4, 1)]


def answered(llm: LLM) -> list[tuple[list[int], list[float]]]:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=2)
    drawn = SamplingParams(temperature=0.9, seed=7, max_tokens=8, ignore_eos=True, detokenize=False, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, [greedy, drawn, greedy, drawn, greedy], progress=False)
    found = []
    for one in outputs:
        entries = [*(one.prompt_logprobs or ()), *(one.outputs[0].logprobs or ())]
        found.append(
            (list(one.outputs[0].token_ids), [p.logprob for entry in entries if entry for p in entry.values()])
        )
    return found


def same(found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, own), (_, other) in zip(found, expected, strict=True):
        assert own == pytest.approx(other, abs=1e-4)


def test_text_and_log_probabilities_are_one_engines_with_chunks_and_few_blocks(tiny: Tiny) -> None:
    """Three ranks, so that most steps are filled up and single tokens leave ranks without any."""
    path = tiny("qwen3", num_attention_heads=6, num_key_value_heads=3)
    settings: dict[str, Any] = {**DEFAULTS, "dtype": "float32", "scheduler.max_batched_tokens": 23}
    ranks = ThreadRanks(path, tensor=3, **{**settings, **SEQUENCE})
    same(ranks.same(answered), answered(LLM(path, **settings)))
    assert "parallel.sequence" in [setting.key for setting in ranks.llms[0].engine.plan.settings]
    ranks.close()


def compare(path: Path, call: Callable[[LLM], Any] = answered, tensor: int = 2, **settings: Any) -> None:
    """Ranks with divided tokens give what one process gives."""
    settings = {**DEFAULTS, "dtype": "float32", "scheduler.max_batched_tokens": 24, **settings}
    ranks = ThreadRanks(path, tensor=tensor, **{**settings, **SEQUENCE})
    found = ranks.same(call)
    ranks.close()
    same(found, call(LLM(path, **settings)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "ngram"])
def test_drafters_read_the_hidden_states_of_all_tokens(name: str, tiny: Tiny, tmp_path: Path) -> None:
    model, folder = checkpoints(name, tiny, tmp_path)
    settings = {"drafter.name": name, "drafter.tokens": 3, "cache.memory": "8MiB"}
    compare(model, **settings, **({} if folder is None else {"drafter.path": str(folder)}))


@pytest.mark.slow
def test_adapters_add_to_the_products_of_all_tokens(tiny: Tiny, tmp_path: Path) -> None:
    oracle = PeftOracle(tiny("llama"), tmp_path, {"plain": {}, "ends": {"target_modules": ["embed_tokens", "o_proj"]}})
    adapters = [oracle.request(name) for name in ("plain", None, "ends", "ends", "plain")]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

    def adapted(llm: LLM) -> list[tuple[list[int], list[float]]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, greedy, lora_request=adapters, progress=False)
        return [(list(one.outputs[0].token_ids), []) for one in outputs]

    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
    compare(tiny("llama"), adapted, **{"lora.name": "torch", "lora.max_adapters": 2, "lora.target_modules": targets})


@pytest.mark.slow
def test_a_mixture_of_whole_experts_is_given_all_tokens(tiny: Tiny) -> None:
    settings = {**DEFAULTS, "dtype": "float32"}
    ranks = ThreadRanks(tiny("mixtral"), tensor=2, **{**settings, **SEQUENCE, "parallel.expert": 2})
    same(ranks.same(answered), answered(LLM(tiny("mixtral"), **settings)))
    ranks.close()


@pytest.mark.slow
def test_embeddings_are_of_all_tokens(tiny: Tiny) -> None:
    def embedded(llm: LLM) -> list[tuple[list[int], list[float]]]:
        return [([], one.outputs.data.tolist()) for one in llm.embed(prompts)]

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    compare(tiny("llama"), embedded, task="embed", **{"model_family.transformers_decoder.pooling": "mean"})


@pytest.mark.slow
def test_a_request_has_the_same_bits_alone(tiny: Tiny) -> None:
    invariant = {"batch_invariant": True, "scheduler.max_batched_tokens": 24}
    ranks = ThreadRanks(tiny("llama", intermediate_size=128), tensor=4, **SEQUENCE, **invariant)
    together = ranks.same(answered)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=2)
    for place in (0, 2):
        (alone,) = ranks.same(
            lambda llm, place=place: [
                [p.logprob for entry in one.outputs[0].logprobs or () for p in entry.values()]
                for one in llm.generate([{"prompt_token_ids": PROMPTS[place]}], greedy, progress=False)
            ]
        )
        assert alone == together[place][1]
    ranks.close()


@pytest.mark.slow
def test_stages_send_each_other_the_hidden_states_of_all_tokens(tiny: Tiny) -> None:
    settings = {**DEFAULTS, "dtype": "float32", "scheduler.max_batched_tokens": 24}
    ranks = ThreadRanks(tiny("llama"), tensor=2, pipeline=2, **{**settings, **SEQUENCE})
    same(ranks.same(answered), answered(LLM(tiny("llama"), **settings)))
    ranks.close()


@pytest.mark.slow
def test_two_processes_join_their_tokens_by_gloo(tiny: Tiny) -> None:
    settings: dict[str, Any] = {**DEFAULTS, "dtype": "float32"}
    pair = LLM(tiny("llama"), tensor=2, **{**settings, **SEQUENCE})
    try:
        same(answered(pair), answered(LLM(tiny("llama"), **settings)))
    finally:
        pair.close()
