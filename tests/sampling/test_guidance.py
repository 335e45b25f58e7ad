"""Classifier-free guidance: the texts of transformers, whatever the batch and however little room."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import torch
from attrs import evolve
from engine_driver import add, random_prompts
from lora_cases import PeftOracle
from tiny_models import oracle

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.registry.errors import RequestError
from tests.engine.test_engine_equality import pool_of

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]

CASES = [
    ("def main(", "import os\nimport sys\n", 1.5),
    ("class Foo", "class Bar:\n    def f(self):\n        return 1\n", 2.0),
    ("x = ", None, 1.7),
    ("for i in range(", "while True:\n", 0.5),
]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "observability.check_integrity": True}
TOKENS = 20


@pytest.fixture(scope="module")
def path(tiny: Tiny) -> Path:
    return tiny("llama", eos_token_id=2)


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "overlapped"])
def llm(request: pytest.FixtureRequest, path: Path) -> LLM:
    return LLM(path, **SETTINGS, max_num_seqs=6, **{"scheduler.async": request.param})


def greedy(negative: str | None, scale: float, **more: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=TOKENS, guidance_scale=scale, negative_prompt=negative, ignore_eos=True, **more
    )


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[list[int]]:
    """What transformers generates."""
    tokenizer = LLM(path, **SETTINGS).tokenizer
    model = oracle(path)
    found = []
    for prompt, negative, scale in CASES:
        ids = tokenizer.encode(prompt)
        more = {} if negative is None else {"negative_prompt_ids": torch.tensor([tokenizer.encode(negative)])}
        output = model.generate(
            torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, guidance_scale=scale, pad_token_id=0, **more
        )
        found.append(output[0, len(ids) :].tolist())
    return found


def texts(llm: LLM, cases: Any = CASES) -> list[list[int]]:
    outputs = llm.generate([case[0] for case in cases], [greedy(case[1], case[2]) for case in cases])
    assert not llm.engine.requests
    assert llm.engine.rows.num_free == llm.engine.rows.max_requests
    return [output.outputs[0].token_ids for output in outputs]


def test_texts_are_those_of_transformers(llm: LLM, wanted: list[list[int]]) -> None:
    assert texts(llm) == wanted
    free = llm.generate([case[0] for case in CASES], SamplingParams(temperature=0, max_tokens=TOKENS))
    assert all(output.outputs[0].token_ids != want for output, want in zip(free, wanted, strict=True))


def test_unguided_requests_beside_them_change_nothing(llm: LLM, wanted: list[list[int]]) -> None:
    plain = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    (alone,) = llm.generate("import ", plain)
    mixed = llm.generate(["import ", CASES[1][0], "import "], [plain, greedy(*CASES[1][1:]), plain])
    assert [output.outputs[0].token_ids for output in mixed] == [
        alone.outputs[0].token_ids,
        wanted[1],
        alone.outputs[0].token_ids,
    ]


@pytest.mark.spread(4, slow=1)
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(
    "little",
    [
        {"scheduler.max_batched_tokens": 7, "max_num_seqs": 3},
        {"scheduler.max_batched_tokens": 4, "max_num_seqs": 8, "cache.block_size": 16, "memory": pool_of(8, 16)},
        {"max_num_seqs": 2, "cache.prefix_caching": False},
    ],
    ids=["few tokens a step", "few blocks", "two rows"],
)
def test_little_room_delays_them_and_changes_nothing(
    little: dict[str, Any], overlapped: bool, path: Path, wanted: list[list[int]]
) -> None:
    llm = LLM(path, **SETTINGS | {"max_model_len": 64} | little, **{"scheduler.async": overlapped})
    assert texts(llm, CASES * 2) == wanted * 2


def test_both_of_a_pair_are_preempted(path: Path, wanted: list[list[int]]) -> None:
    for overlapped in (False, True):
        llm = LLM(path, **SETTINGS, max_num_seqs=8, **{"scheduler.async": overlapped})
        engine = llm.engine
        partner = engine.extension("guidance").pairs.other
        requests = [
            engine.add(f"r{i}", llm.tokenizer.encode(case[0]), greedy(*case[1:])) for i, case in enumerate(CASES)
        ]
        steps = 0
        while engine.has_work:
            engine.step()
            steps += 1
            if steps % 5 == 0 and engine.scheduler.running:
                victims = engine.scheduler._preempt()
                assert [*map(partner, victims)] == victims[::-1]
        assert [request.output_token_ids for request in requests] == wanted
        assert sum(request.metrics.num_preemptions for request in requests) > 2


def run_out(llm: LLM) -> None:
    """Step until nothing is left; a run that does not end is a failure."""
    for _ in range(300):
        if not llm.engine.has_work:
            return
        llm.engine.step()
    raise AssertionError(f"unfinished: {[(r.request_id, r.status.value, r.row) for r in llm.engine.requests.values()]}")


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("lacking", ["rows", "blocks"])
def test_pairs_that_overtake_one_another_do_not_wait_for_ever(lacking: str, overlapped: bool, tiny: Tiny) -> None:
    """A pair of higher priority comes when the first one's negative prompt is not running yet."""
    few = {"max_num_seqs": 2} if lacking == "rows" else {"memory": pool_of(17, 4), "block_size": 4}
    policy = {"scheduler.policy": "priority", "scheduler.max_batched_tokens": 27, "scheduler.async": overlapped}
    llm = LLM(tiny("llama"), **SETTINGS | {"max_model_len": 64} | few | policy)
    prompts, negatives = random_prompts([30, 28]), random_prompts([26, 28], seed=1)
    params = [
        SamplingParams(temperature=0, max_tokens=3, guidance_scale=1.5, negative_prompt_token_ids=n) for n in negatives
    ]
    expected = [llm.generate([p], one)[0].outputs[0].token_ids for p, one in zip(prompts, params, strict=True)]
    llm.engine.scheduler.cache.reset()
    late = add(llm, "late", prompts[0], params[0], priority=5)
    llm.engine.step()
    partner = llm.engine.extension("guidance").pairs.other
    assert partner(late) is not None
    assert (late.row, partner(late).row) == (0, -1)
    early = add(llm, "early", prompts[1], params[1], priority=0)
    run_out(llm)
    assert [late.output_token_ids, early.output_token_ids] == expected


def test_a_pair_keeps_its_adapters_slot_until_both_have_used_it(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("llama")
    peft = PeftOracle(path, tmp_path, {name: {"target_modules": r".*\.q_proj"} for name in ("first", "second")})
    more = {"lora.name": "torch", "lora.max_adapters": 1, "scheduler.policy": "priority"}
    llm = LLM(path, **SETTINGS | more, max_num_seqs=4, **{"scheduler.max_batched_tokens": 8})
    params, prompts = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), random_prompts([20, 6])
    pair = add(
        llm, "pair", prompts[0], evolve(params, guidance_scale=1.5), priority=5, lora_request=peft.request("first")
    )
    llm.engine.step()
    other = add(llm, "other", prompts[1], params, priority=0, lora_request=peft.request("second"))
    run_out(llm)
    assert len(pair.output_token_ids) == 4
    assert other.output_token_ids == peft.greedy("second", prompts[1], 4)


@pytest.mark.spread(2)
@pytest.mark.parametrize("seed", range(3))
def test_pairs_of_all_priorities_come_go_and_are_preempted(seed: int, tiny: Tiny) -> None:
    """Few rows and few blocks: whatever is missing, somebody goes on, and the texts stay."""
    rng, path = Random(seed), tiny("llama")
    few = {"max_model_len": 64, "scheduler.policy": "priority", "scheduler.max_batched_tokens": 16, "block_size": 4}
    llm = LLM(path, **SETTINGS | few, max_num_seqs=3, memory=pool_of(22, 4), **{"scheduler.async": bool(seed % 2)})
    prompts, negatives = (random_prompts([rng.randrange(1, 30) for _ in range(14)], seed=s) for s in (seed, seed + 9))
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randrange(1, 9), ignore_eos=True)
        if rng.random() < 0.3
        else SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, guidance_scale=1.5, negative_prompt_token_ids=negative
        )
        for negative in negatives
    ]
    expected = [llm.generate([p], one)[0].outputs[0].token_ids for p, one in zip(prompts, params, strict=True)]
    requests = []
    for step in range(600):
        if len(requests) < 14 and rng.random() < 0.4:
            requests.append(
                add(llm, str(step), prompts[len(requests)], params[len(requests)], priority=rng.randrange(4))
            )
        if rng.random() < 0.1 and llm.engine.scheduler.running:
            llm.engine.scheduler._preempt()
        llm.engine.step()
        if len(requests) == 14 and not llm.engine.has_work:
            break
    assert [request.output_token_ids for request in requests] == expected


def test_processors_stops_and_grammars_see_the_guided_request_alone(llm: LLM) -> None:
    prompt, negative, scale = CASES[0]
    banned = texts(llm, CASES[:1])[0][3]
    (output,) = llm.generate(prompt, greedy(negative, scale, logit_bias={banned: -100.0}))
    assert banned not in output.outputs[0].token_ids
    (output,) = llm.generate(prompt, greedy(negative, scale, stop_token_ids=[banned]))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", banned)
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    schema["additionalProperties"] = False
    made = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = SamplingParams(temperature=0, max_tokens=40, guidance_scale=1.5, structured_outputs=made)
    jsonschema.validate(json.loads(llm.generate("value = ", params)[0].outputs[0].text), schema)


def test_samples_follow_their_seeds_alone(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=0.9, max_tokens=12, guidance_scale=1.4, logprobs=1)
    first, second = (llm.generate(["def f(", "import "][:count], params)[0].outputs for count in (1, 2))
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert len({tuple(one.token_ids) for one in first}) == 3
    assert all(len(one.logprobs or ()) == len(one.token_ids) for one in first)


def test_a_step_hands_out_the_tokens_that_were_asked_for_and_no_more(llm: LLM) -> None:
    """Each token once, though the negative prompt's row gets it too."""
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    requests = [
        add(llm, f"r{i}", llm.tokenizer.encode("def f("), params)
        for i, params in enumerate((plain, evolve(plain, guidance_scale=1.5)))
    ]
    given: list[int] = []
    while llm.engine.has_work:
        given += llm.engine.step().token_ids.tolist()
    assert sorted(given) == sorted(token for request in requests for token in request.output_token_ids)


def test_an_aborted_request_takes_its_companion_along(llm: LLM) -> None:
    engine = llm.engine
    engine.add("leaves", llm.tokenizer.encode("def f("), greedy(None, 1.5))
    for _ in range(4):
        engine.step()
    assert len(engine.requests) == 2
    engine.abort("leaves")
    assert not engine.requests
    while engine._in_flight:
        engine.step()
    assert engine.rows.num_free == engine.rows.max_requests


def test_the_pair_ends_where_the_longer_prompt_meets_the_models_length(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=None, ignore_eos=True, guidance_scale=2, negative_prompt_token_ids=[5] * 100
    )
    (output,) = llm.generate("def f(", params)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (28, "length")


@pytest.mark.parametrize(
    ("settings", "params", "says"),
    [
        ({"drafter.name": "ngram"}, {}, "drafter"),
        ({"max_num_seqs": 1}, {}, "two rows"),
        ({"scheduler.chunked_prefill": False}, {}, "divided"),
        ({}, {"negative_prompt_token_ids": [10**6]}, "negative_prompt: token id 1000000"),
        ({}, {"negative_prompt_token_ids": [1] * 200}, "negative_prompt: the prompt has 200 tokens"),
    ],
)
def test_what_cannot_be_guided_is_refused(
    settings: dict[str, Any], params: dict[str, Any], says: str, path: Path
) -> None:
    llm = LLM(path, **SETTINGS | settings)
    with pytest.raises(RequestError, match=says):
        llm.generate("def f(", SamplingParams(guidance_scale=1.5, **params))
    assert not llm.engine.requests
    assert llm.generate("def f(", SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"guidance_scale": -1}, "guidance_scale=-1"),
        ({"negative_prompt": "x"}, "without guidance"),
        ({"guidance_scale": 2, "negative_prompt": ""}, "negative_prompt=''"),
        ({"guidance_scale": 2, "negative_prompt": "x", "negative_prompt_token_ids": [1]}, "together"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**params)
