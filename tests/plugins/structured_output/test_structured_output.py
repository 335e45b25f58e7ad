"""Structured output in the engine: whatever else a request asks for, its text is what the constraint says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from importlib import import_module
from time import sleep
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.planner.plan import SMALL_MODEL
from slotline.registry.contracts import Draft, DraftBatch, StructuredOutputContext
from slotline.testing.subject import subject_of
from slotline.text.tokenizer import Tokenizer
from tests.proposers.test_drafting import drafted_by

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(102)]

Engines = Callable[..., LLM]
PLUGINS = ("xgrammar", "llguidance")
MODES: dict[str, dict[str, Any]] = {
    "plain": {"scheduler.async": False, "structured_output.keep_masks": False},
    "asynchronous": {"scheduler.async": True},
    "drafted": {"drafter.name": "ngram", "drafter.tokens": 4, "drafter.adaptive": False},
    "overlapped": {"drafter.name": "eagle3", "drafter.tokens": 4, "drafter.adaptive": False, "scheduler.async": True},
    "forced": {"drafter.name": "grammar", "drafter.tokens": 6},
}
PROMPTS = ["def f(", "class Person:\n    name", "import", "return {'name': 1, 'age'", "x = [1, 2, "]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAGS = {"structures": [{"begin": "<p>", "schema": PERSON, "end": "</p>"}], "triggers": ["<p>"]}


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


CONSTRAINTS: dict[str, tuple[StructuredOutputsParams, Callable[[str], Any]]] = {
    "json": (StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), is_person),
    "regex": (
        StructuredOutputsParams(regex=r"[a-f]{2,5}-(\d{1,3}|é)"),
        lambda text: re.fullmatch(r"[a-f]{2,5}-(\d{1,3}|é)", text, re.ASCII),
    ),
    "choice": (
        StructuredOutputsParams(choice=['say "yes"', "no\n", "maybe\\later", "日本"]),
        lambda text: text in ('say "yes"', "no\n", "maybe\\later", "日本"),
    ),
    "grammar": (
        StructuredOutputsParams(grammar='root ::= "(" item ("," item)? ")"\nitem ::= [0-9]{1,3} | root'),
        lambda text: re.sub(r"\((\d{1,3})(,\d{1,3})?\)", "7", nested(text)) in ("7", ""),
    ),
    "json_object": (StructuredOutputsParams(json_object=True), lambda text: isinstance(json.loads(text), dict)),
}


def nested(text: str) -> str:
    """A text of the grammar without its innermost parentheses, again and again."""
    while (shorter := re.sub(r"\(\d{1,3}(,\d{1,3})?\)", "7", text)) != text:
        text = shorter
    return text


def engine(engines: Engines, plugin: str, mode: str = "plain", **settings: Any) -> LLM:
    return engines(
        None,
        **{"structured_output.backend": plugin, **MODES[mode], "max_model_len": 128, "max_num_seqs": 24, **settings},
    )


def params(constraint: str, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, "structured_outputs": CONSTRAINTS[constraint][0], **settings})


@pytest.fixture(scope="module")
def plain(engines: Engines) -> Callable[[str], list[Any]]:
    """What each plugin gives one step after the other, for every constraint, greedy and sampled."""
    known: dict[str, list[Any]] = {}

    def get(plugin: str) -> list[Any]:
        if plugin not in known:
            known[plugin] = everything(engine(engines, plugin))
        return known[plugin]

    return get


def everything(llm: LLM) -> list[Any]:
    """Each constraint greedily and sampled: its name, tokens, text and finish reason."""
    names = [name for name in CONSTRAINTS for _ in range(4)]
    wanted = [params(name, temperature=(0, 0.7, 1, 2)[i % 4], seed=i) for i, name in enumerate(names)]
    outputs = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(names))], wanted)
    found = [output.outputs[0] for output in outputs]
    return [(name, one.token_ids, one.text, one.finish_reason) for name, one in zip(names, found, strict=True)]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_text_is_what_its_constraint_says(plugin: str, plain: Callable[[str], list[Any]]) -> None:
    complete = dict.fromkeys(CONSTRAINTS, 0)
    for name, _, text, finish_reason in plain(plugin):
        assert finish_reason in ("stop", "length")
        if finish_reason == "stop":
            complete[name] += 1
            assert CONSTRAINTS[name][1](text), text
    assert min(complete.values()) >= 1
    assert sum(complete.values()) >= 14


@pytest.mark.spread(2)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("mode", ["asynchronous", "drafted", "forced"])
@pytest.mark.behaviour(113, 116)
def test_drafts_and_overlapping_steps_change_no_text(
    mode: str, plugin: str, plain: Callable[[str], list[Any]], engines: Engines
) -> None:
    assert everything(engine(engines, plugin, mode)) == plain(plugin)


class HalfBanned:
    """Drafts a or z with equal chances, and says so; z is never legal where these tests use it."""

    def __init__(self, a: int, z: int, vocab_size: int) -> None:
        self.tokens = torch.tensor([a, z])
        self.vocab_size = vocab_size

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def propose(self, batch: DraftBatch) -> Draft:
        assert batch.uniforms is not None
        drawn = self.tokens[(torch.from_numpy(batch.uniforms[:, :1]) >= 0.5).long()]
        probabilities = torch.zeros(len(batch.rows), 1, self.vocab_size)
        probabilities[..., self.tokens] = 0.5
        return Draft(token_ids=drawn, probabilities=probabilities)


@pytest.mark.behaviour(116)
def test_drafts_with_a_distribution_do_not_make_a_text_lean_towards_them(engines: Engines) -> None:
    """What a grammar cuts is chosen by what was drawn: rejection sampling of the rest would not be exact."""
    plain, llm = (engine(engines, "xgrammar", mode) for mode in ("plain", "drafted"))
    a, z = (llm.tokenizer.encode(letter)[-1] for letter in "az")
    letters = StructuredOutputsParams(regex="[ab]{3}")
    wanted = [SamplingParams(temperature=1.5, seed=i, max_tokens=3, structured_outputs=letters) for i in range(40)]
    expected = [output.outputs[0].token_ids for output in plain.generate(["x ="] * 40, wanted)]
    with drafted_by(llm, HalfBanned(a, z, plain.engine.limits.vocab_size)):
        accepted = llm.engine.extension("drafts").drafting.counts.accepted
        found = [output.outputs[0].token_ids for output in llm.generate(["x ="] * 40, wanted)]
        assert llm.engine.extension("drafts").drafting.counts.accepted > accepted
    assert found == expected


@pytest.mark.parametrize("plugin", PLUGINS)
def test_drafts_that_repeat_the_prompt_are_taken_where_the_grammar_allows_them(plugin: str, engines: Engines) -> None:
    llm = engine(engines, plugin, "drafted")
    text = '{"name": "aaaaaaaa", "age": 12, "tags": ["a", "bb"]}'
    before = llm.engine.extension("drafts").drafting.counts.accepted
    (output,) = llm.generate([text * 3], params("json", temperature=0))
    is_person(output.outputs[0].text)
    assert llm.engine.extension("drafts").drafting.counts.accepted > before


@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_the_grammar_forces_is_computed_in_one_step(plugin: str, engines: Engines) -> None:
    llm = engine(engines, plugin, "forced")
    word = "antidisestablishmentarianism"
    wanted = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(regex=f"[ab]{word}"))
    request = llm.engine.add("forced", llm.tokenizer.encode("x"), wanted)
    steps = 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    assert request.text[1:] == word
    assert steps < len(request.output_token_ids)
    assert llm.engine.extension("drafts").drafting.counts.accepted > 0


@pytest.mark.parametrize("plugin", PLUGINS)
def test_masks_are_made_while_the_forward_pass_runs(
    plugin: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(engines, plugin)
    llm.generate(PROMPTS, params("json"))  # the plugin is built
    running, made, seen = threading.Event(), threading.Event(), []
    forward, backend = llm.engine.runner.forward, llm.engine.extension("structured_output").compiler.backend
    fill = backend.fill

    def runs(*arguments: Any, **settings: Any) -> Any:
        running.set()
        result = forward(*arguments, **settings)
        seen.append(made.wait(10))
        running.clear()
        made.clear()
        return result

    def fills(*arguments: Any) -> None:
        assert running.wait(10)
        fill(*arguments)
        made.set()

    monkeypatch.setattr("slotline.plugins.structured_output.extension.WORTH_A_THREAD", 1)
    monkeypatch.setattr(llm.engine.runner, "forward", runs)
    monkeypatch.setattr(backend, "fill", fills)
    (output,) = llm.generate(PROMPTS[:1], params("json"))
    is_person(output.outputs[0].text)
    assert len(seen) > 5
    assert all(seen)


def test_requests_share_masks_and_those_that_ignore_the_end_have_their_own(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin is asked for fewer masks where they are kept, and the texts are the same."""
    wanted = [params("json", temperature=1, seed=i, ignore_eos=i % 2 == 0, max_tokens=24) for i in range(8)]
    found, asked = [], []
    for mode in ("plain", "asynchronous"):
        llm = engine(engines, "llguidance", mode)
        backend = llm.engine.extension("structured_output").compiler.build()
        fill, states = backend.fill, list[int]()

        def counts(given: Any, *others: Any, fill: Any = fill, states: list[int] = states) -> None:
            states.append(len(given))
            fill(given, *others)

        monkeypatch.setattr(backend, "fill", counts)
        outputs = [output.outputs[0] for output in llm.generate(["a = "] * 8, wanted)]
        found.append([(one.token_ids, one.finish_reason) for one in outputs])
        asked.append(sum(states))
    assert found[0] == found[1]
    assert asked[1] < 0.7 * asked[0]


def test_a_step_that_fails_leaves_no_thread_with_its_grammars(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States have one user at a time: those of a step whose forward pass failed are let go of by the masks' thread."""
    llm = engine(engines, "xgrammar")
    llm.generate(PROMPTS, params("json"))  # the plugin is built
    began, filled = threading.Event(), list[bool]()
    backend = llm.engine.extension("structured_output").compiler.backend
    fill = backend.fill

    def fills_slowly(*arguments: Any) -> None:
        began.set()
        sleep(0.3)
        fill(*arguments)
        filled.append(True)

    def fails(*_arguments: Any, **_settings: Any) -> Any:
        assert began.wait(10)
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr("slotline.plugins.structured_output.extension.WORTH_A_THREAD", 1)
        patched.setattr(llm.engine.runner, "forward", fails)
        patched.setattr(backend, "fill", fills_slowly)
        with pytest.raises(RuntimeError, match="out of luck"):
            llm.generate(PROMPTS[:1], params("json"))
        assert filled == [True]
    (output,) = llm.generate(PROMPTS[:1], params("json"))
    is_person(output.outputs[0].text)


def test_masks_that_fail_in_one_thread_are_nobody_s_any_more(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core asks again for each state alone, so XGrammar's other threads must be done with theirs."""
    llm = engine(engines, "xgrammar", **{"structured_output.xgrammar.mask_threads": 2})
    llm.generate(PROMPTS, params("json"))
    backend = llm.engine.extension("structured_output").compiler.backend
    grammar = backend.compile(CONSTRAINTS["regex"][0].constraint)
    states, done = [backend.start(grammar) for _ in range(2)], list[bool]()

    def slow_or_failing(batch: Any, states: Any, places: Any, bitmask: Any) -> None:
        if batch is backend._matchers[0]:
            raise RuntimeError("cannot fill")
        sleep(0.3)
        fill(batch, states, places, bitmask)
        done.append(True)

    module = "slotline.plugins.structured_output.xgrammar.backend"
    fill = import_module(module)._fill
    monkeypatch.setattr(f"{module}._fill", slow_or_failing)
    monkeypatch.setattr(backend, "_fewest", 1)
    words = -(-llm.engine.limits.vocab_size // 32)
    with pytest.raises(RuntimeError, match="cannot fill"):
        backend.fill(states, [[], []], [0, 1], np.full((2, words), -1, np.int32))
    assert done == [True]


def test_llguidance_s_threads_make_the_masks_that_one_makes() -> None:
    tokenizer = Tokenizer(SMALL_MODEL).transformers
    context = StructuredOutputContext(
        contract=1,
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        eos_token_ids=(tokenizer.eos_token_id,),
        max_requests=40,
    )
    text = tokenizer.encode('{"name": "Ada", "age": 36, "tags": ["bb", "a"]}', add_special_tokens=False)
    lengths = [i % len(text) for i in range(40)]
    drafts = [text[length : length + 2] if i % 5 == 0 else [] for i, length in enumerate(lengths)]
    places = np.cumsum([0, *(1 + len(drafted) for drafted in drafts)]).tolist()
    found = []
    for threads in (1, 3):
        backend = subject_of("structured_output:llguidance", options={"threads": threads}).build(context)
        grammar = backend.compile(StructuredOutputsParams(json=PERSON).constraint)
        states = [backend.start(grammar) for _ in lengths]
        assert len({state.lexer for state in states}) == threads
        for state, length in zip(states, lengths, strict=True):
            assert state.accept(text[:length]) == length
        words = np.full((places[-1], -(-len(tokenizer) // 32)), -1, np.int32)
        backend.fill(states, drafts, places[:-1], words)
        found.append(words)
    assert len(np.unique(found[0], axis=0)) > 10
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"regex": r"([A-Za-z_]\w*|[1-9][0-9]*|0x[0-9a-f]{2,8})( [^\n]{3,9}\n)?"}, "def_ x of\n"),
        ({"regex": r"[a-z0-9._]+@[a-z]+\.(com|org)"}, "print9.list@import.com"),
        ({"json": {"type": "array", "items": {"type": "number"}}}, "[10, 2048, 0.125, 99]"),
        ({"json": PERSON}, '{"name": "return", "age": 36}'),
    ],
)
def test_parts_of_the_vocabulary_change_no_mask_of_llguidance(wanted: dict[str, Any], text: str) -> None:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    from slotline.plugins.structured_output.llguidance.backend import _grammar

    tokenizer = Tokenizer(SMALL_MODEL).transformers
    context = StructuredOutputContext(
        contract=1,
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        eos_token_ids=(tokenizer.eos_token_id,),
        max_requests=1,
    )
    constraint = StructuredOutputsParams(**wanted).constraint
    backend = subject_of("structured_output:llguidance").build(context)
    state = backend.start(backend.compile(constraint))
    whole = from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[tokenizer.eos_token_id], slices=[])
    plain = LLMatcher(whole, _grammar(constraint), log_level=0)
    for token in tokenizer.encode(text, add_special_tokens=False):
        words = np.full((1, -(-len(tokenizer) // 32)), -1, np.int32)
        backend.fill([state], [[]], [0], words)
        assert words.tobytes() == plain.compute_bitmask()[: words.nbytes]  # it has a bit more
        assert state.accept([token]) == plain.try_consume_tokens([token]) == 1


@pytest.mark.spread(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.behaviour(16, 40)
def test_preempted_requests_give_the_same_text(mode: str, engines: Engines) -> None:
    prompts = PROMPTS * 2
    wanted = [params("json", temperature=0.8, seed=i) for i in range(len(prompts))]
    expected = [o.outputs[0].text for o in engine(engines, "xgrammar").generate(prompts, wanted)]
    llm = engine(engines, "xgrammar", mode, memory="1MiB", block_size=4, max_model_len=96)
    outputs = llm.generate(prompts, wanted)
    assert [o.outputs[0].text for o in outputs] == expected
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


def test_every_output_of_a_prompt_has_a_state_of_its_own(engines: Engines) -> None:
    llm = engine(engines, "xgrammar")
    (output,) = llm.generate(PROMPTS[:1], params("regex", n=4, temperature=1.5, seed=3))
    texts = [found.text for found in output.outputs]
    assert all(CONSTRAINTS["regex"][1](text) for text in texts)
    assert len(set(texts)) > 1


def test_requests_without_a_constraint_are_left_alone(engines: Engines) -> None:
    llm = engine(engines, "xgrammar")
    free = SamplingParams(temperature=0.9, seed=5, max_tokens=20)
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, free)]
    mixed = [free if i % 2 else params("json", seed=i) for i in range(len(PROMPTS))]
    for i, output in enumerate(llm.generate(PROMPTS, mixed)):
        if i % 2:
            assert output.outputs[0].token_ids == expected[i]
        else:
            is_person(output.outputs[0].text)


@pytest.mark.spread(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_grammars_end_goes_before_a_minimum_of_tokens(plugin: str, mode: str, engines: Engines) -> None:
    llm = engine(engines, plugin, mode)
    short, open_ended = (StructuredOutputsParams(regex=regex) for regex in ("[a-z]{3}", "[a-z]{3,}"))
    outputs = llm.generate(
        PROMPTS[:3],
        [
            SamplingParams(temperature=0, min_tokens=12, max_tokens=20, structured_outputs=short),
            SamplingParams(temperature=0, min_tokens=12, max_tokens=20, structured_outputs=open_ended),
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, structured_outputs=open_ended),
        ],
    )
    (first,), (second,), (third,) = (o.outputs for o in outputs)
    assert (first.finish_reason, first.stop_reason, len(first.text)) == ("stop", None, 3)
    assert len(second.token_ids) >= 12
    assert re.fullmatch("[a-z]{3,}", second.text)
    assert third.finish_reason == "length"
    assert re.fullmatch("[a-z]{20,}", third.text)


def test_a_text_that_ends_with_its_last_token_is_complete_not_too_long(engines: Engines) -> None:
    llm = engine(engines, "xgrammar")
    wanted = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
    (found,) = llm.generate(PROMPTS[:1], wanted)[0].outputs
    assert (found.text, found.finish_reason) == ("a", "stop")


def test_stop_strings_and_stop_tokens_end_a_text_inside_its_grammar(engines: Engines) -> None:
    llm = engine(engines, "xgrammar")
    letters = StructuredOutputsParams(regex="abcdef")
    token = llm.tokenizer.encode_word("c")[0]
    outputs = llm.generate(
        PROMPTS[:2],
        [
            SamplingParams(stop="d", structured_outputs=letters),
            SamplingParams(stop_token_ids=[token], allowed_token_ids=range(97 - 33, 128), structured_outputs=letters),
        ],
    )
    assert (outputs[0].outputs[0].text, outputs[0].outputs[0].stop_reason) == ("abc", "d")
    assert outputs[1].outputs[0].finish_reason == "stop"


@pytest.mark.behaviour(112)
def test_log_probabilities_of_the_prompt_do_not_see_the_grammar(engines: Engines) -> None:
    llm = engine(engines, "xgrammar")
    plain = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2)
    (free,) = llm.generate(PROMPTS[1:2], plain)
    (bound,) = llm.generate(PROMPTS[1:2], params("json", temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2))
    assert [e and {t: v.logprob for t, v in e.items()} for e in bound.prompt_logprobs] == [
        e and {t: v.logprob for t, v in e.items()} for e in free.prompt_logprobs
    ]
    first = bound.outputs[0].logprobs[0]
    assert {t: v.logprob for t, v in list(free.outputs[0].logprobs[0].items())[:1]}.items() <= {
        t: v.logprob for t, v in first.items()
    }.items()  # raw ones: the most likely token is among them though it is banned


def test_processed_log_probabilities_are_those_of_the_tokens_that_are_left(engines: Engines) -> None:
    llm = engine(engines, "xgrammar", **{"sampling.logprobs_mode": "processed_logprobs"})
    wanted = SamplingParams(logprobs=5, max_tokens=1, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    (found,) = llm.generate(PROMPTS[:1], wanted)[0].outputs
    likely = sorted((v.logprob for v in found.logprobs[0].values()), reverse=True)
    assert likely[2:] == [float("-inf")] * len(likely[2:])


@pytest.mark.parametrize("mode", MODES)
def test_contradictory_constraints_end_their_request_alone(mode: str, engines: Engines) -> None:
    llm = engine(engines, "xgrammar", mode)
    letters = StructuredOutputsParams(regex="[a-z]{4}")
    digits = [llm.tokenizer.encode_word(digit)[0] for digit in "0123456789"]
    outputs = llm.generate(
        PROMPTS[:2],
        [SamplingParams(structured_outputs=letters, allowed_token_ids=ids) for ids in (digits, None)],
    )
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "(allowed_token_ids, structured_outputs) ban all of them" in str(outputs[0].outputs[0].stop_reason)
    assert re.fullmatch("[a-z]{4}", outputs[1].outputs[0].text)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_free_text_around_structural_tags(plugin: str, engines: Engines) -> None:
    llm = engine(engines, plugin)
    wanted = StructuredOutputsParams(structural_tag=TAGS)
    outputs = llm.generate([PROMPTS[0], "x"], SamplingParams(temperature=0, structured_outputs=wanted))
    assert all(o.outputs[0].finish_reason in ("stop", "length") for o in outputs)
    backend = llm.engine.extension("structured_output").compiler.backend
    state = backend.start(backend.compile(wanted.constraint))
    inside = llm.tokenizer.encode_word('see <p>{"name":"a","age":1}</p> and')
    assert state.count_legal(inside) == len(inside)
    wrong = llm.tokenizer.encode_word('see <p>{"nome"')
    assert state.count_legal(wrong) < len(wrong)


def test_a_stream_ends_with_the_whole_text(engines: Engines) -> None:
    llm = engine(engines, "xgrammar")
    *_, last = llm.stream("def f(", params("json", temperature=0))
    assert is_person(last.outputs[0].text)
