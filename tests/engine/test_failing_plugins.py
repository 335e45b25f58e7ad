"""A plugin that lacks a method, or raises at run time, is named with its source, the cause and a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import broken_plugins
import failing_plugins
import pytest
from attrs import evolve
from repository import SUPPORT
from tiny_engines import DEFAULTS

from slotline.cli import main
from slotline.core import LLM, SamplingParams
from slotline.planner.plan import make_plan
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.built import BUILT, methods_of, misfits
from slotline.registry.config import load_config
from slotline.registry.contracts import StructuredOutputsParams
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ContractError, PluginError
from tests.engine.test_broken_plugins import FAMILY, REMEDIES, SETTINGS, build

Tiny = Callable[..., Path]
PLUGINS = SUPPORT / "failing_plugins.py"
REGEX = StructuredOutputsParams(regex="[ab]{4}")
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def settings_of(kind: Kind, method: str, how: str) -> tuple[dict[str, Any], str]:
    """The settings of an engine with such a plugin, and its source as messages have it."""
    inline = f"{PLUGINS}:{kind.value}__{method}__{how}"
    settings = {key.replace("broken", "failing"): value for key, value in SETTINGS[kind].items()}
    settings |= {key: "failing" for key, value in settings.items() if value == "broken"}
    return {**DEFAULTS, **settings, "plugins.inline": (inline,)}, f"{kind.value}:failing of the inline plugin {inline}"


def model_of(tiny: Tiny, kind: Kind) -> Path | None:
    """A model that the kind has work for; None for the small one, which has a tokenizer."""
    return None if kind is Kind.STRUCTURED_OUTPUT else tiny(FAMILY.get(kind, "llama"))


ASKED = [
    (kind, name)
    for kind, contract in BUILT.items()
    for name, _ in methods_of(contract.protocol)
    if name not in contract.optional
]
TAKING = [
    (kind, name)
    for kind, name in ASKED
    if len(inspect.signature(getattr(BUILT[kind].protocol, name)).parameters) > 1  # beside self
]
FIRST = dict(reversed(TAKING))


@pytest.mark.parametrize("how", ["absent", "few"])
@pytest.mark.parametrize(("kind", "method"), FIRST.items())
def test_a_method_that_is_missing_or_takes_other_arguments_is_refused_when_the_plugin_is_built(
    kind: Kind, method: str, how: str, tiny: Tiny
) -> None:
    settings, source = settings_of(kind, method, how)
    with pytest.raises(ContractError) as raised:
        build(kind, model_of(tiny, kind), settings)
    assert raised.value.message.startswith(f"{source}: what its factory made does not fit the contract: ")
    want = f"has no method {method!r}" if how == "absent" else f"{method}() cannot be called with "
    assert want in raised.value.message
    raised.match(f"fix: .*{REMEDIES[kind]}")


@pytest.mark.parametrize(("kind", "method"), ASKED)
def test_every_method_of_every_contract_is_looked_at(kind: Kind, method: str) -> None:
    descriptor = getattr(failing_plugins, f"{kind.value}__{method}__absent")
    shown = failing_plugins.Failing(None, method, "absent")
    for name, _ in methods_of(BUILT[kind].protocol):
        if name != method:
            shown.__dict__[name] = lambda *arguments: None
    assert [text for text in misfits(descriptor, shown) if repr(method) in text]


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Kind.ATTENTION, "plan"),
        (Kind.ATTENTION, "write"),
        (Kind.ATTENTION, "forward"),
        (Kind.STATE, "plan"),
        (Kind.STATE, "forward"),
        (Kind.KV_SPEC, "page_bytes"),
        (Kind.KV_SPEC, "blocks_needed"),
        (Kind.KV_SPEC, "max_blocks_held"),
        (Kind.KV_SPEC, "prefix_hit"),
        (Kind.KV_SPEC, "bind"),
        (Kind.MODEL_FAMILY, "inspect"),
        (Kind.MODEL_FAMILY, "load"),
    ],
)
@pytest.mark.parametrize(
    ("how", "cause"), [("raises", "KeyError: 'no such table'"), ("exits", "SystemExit: 0")], ids=["raises", "exits"]
)
def test_what_a_plugin_raises_names_it_and_its_source_and_the_cause_and_a_remedy(
    kind: Kind, method: str, how: str, cause: str, tiny: Tiny
) -> None:
    settings, source = settings_of(kind, method, how)
    with pytest.raises(PluginError) as raised:
        LLM(model_of(tiny, kind), **settings)
    assert raised.value.message == f"{source} failed: {cause}"
    assert raised.value.__cause__ is not None
    raised.match(f"fix: .*{REMEDIES[kind]}")


@pytest.fixture
def armed() -> Iterator[list[bool]]:
    """Has methods fail from the time that something is put into it."""
    broken_plugins.armed.clear()
    yield broken_plugins.armed
    broken_plugins.armed.clear()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Kind.ATTENTION, "plan"),
        (Kind.ATTENTION, "forward"),
        (Kind.STATE, "forward"),
        (Kind.STATE, "copy"),
        (Kind.KV_SPEC, "blocks_needed"),
        (Kind.KV_SPEC, "prefix_hit"),
    ],
)
def test_what_a_plugin_raises_in_a_step_names_it_and_the_command_line_gives_no_traceback(
    kind: Kind, method: str, armed: list[bool], tiny: Tiny
) -> None:
    settings, source = settings_of(kind, method, "later")
    llm = LLM(model_of(tiny, kind), **settings)
    armed.append(True)
    if method in ("copy", "prefix_hit"):  # called while a request is scheduled, which ends alone
        (output,) = llm.generate([5, 6, 7] * 10, PARAMS)
        assert output.outputs[0].finish_reason == "error"
        assert source in str(output.outputs[0].stop_reason)
        assert "KeyError: 'no such table'" in str(output.outputs[0].stop_reason)
    else:
        with pytest.raises(PluginError) as raised:
            llm.generate([[5, 6, 7] * 10] * 2, PARAMS)
        assert raised.value.message == f"{source} failed: KeyError: 'no such table'"
    assert not llm.engine.has_work
    armed.clear()
    assert llm.generate([5, 6, 7] * 10, PARAMS)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("kind", "method", "params"),
    [
        (Kind.LOGITS_PROCESSOR, "admit", SamplingParams(max_tokens=4)),
        (Kind.LOGITS_PROCESSOR, "apply", SamplingParams(max_tokens=4, extra_args={"no_repeat_ngram_size": 2})),
        (Kind.STRUCTURED_OUTPUT, "compile", SamplingParams(structured_outputs=REGEX)),
        (Kind.STRUCTURED_OUTPUT, "start", SamplingParams(structured_outputs=REGEX)),
        (Kind.STRUCTURED_OUTPUT, "fill", SamplingParams(structured_outputs=REGEX)),
    ],
)
def test_what_a_plugin_raises_for_one_request_ends_that_request_with_the_plugins_name(
    kind: Kind, method: str, params: SamplingParams, armed: list[bool], tiny: Tiny
) -> None:
    settings, source = settings_of(kind, method, "later")
    llm = LLM(model_of(tiny, kind), **settings)
    armed.append(True)
    (output,) = llm.generate([5, 6, 7], params)
    assert output.outputs[0].finish_reason == "error"
    assert str(output.outputs[0].stop_reason).startswith(f"KeyError: 'no such table', raised by {source}\n  fix: ")


@pytest.mark.parametrize("method", ["admit", "propose", "release"])
def test_a_drafters_failures_name_the_drafter_and_who_brings_it(
    method: str, armed: list[bool], tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    settings, source = settings_of(Kind.DRAFTER, method, "later")
    llm = LLM(tiny("llama"), **settings)
    armed.append(True)
    llm.generate([5, 6, 7] * 5, PARAMS)
    assert llm.engine.extension("drafts") is not None
    assert llm.engine.extension("drafts").drafting.counts.last_failure.startswith(f"{source}: {method}")
    assert f"{source}: {method}" in caplog.text


def test_the_command_line_names_the_plugin_that_raised_and_exits_with_2(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    inline = f"{PLUGINS}:attention__forward__raises"
    settings = ["--set", 'attention.backend="failing"', "--set", f'plugins.inline=["{inline}"]']
    assert main(["generate", "--model", str(tiny("llama")), *settings, "a"]) == 2
    assert "error: attention:failing of the inline plugin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("blocks_needed", "its spec does not fit the contract: blocks_needed(0) is None, not a number of 0 or more"),
        ("max_blocks_held", "max_blocks_held() is None, not a number of 0 or more"),
        ("prefix_hit", "prefix_hit([], lookup) is None, not an empty list"),
        ("bind", "what bind() made does not fit the contract: the keys of layer"),
    ],
)
def test_a_cache_specs_answers_are_looked_at_when_it_is_built(method: str, found: str, tiny: Tiny) -> None:
    settings, source = settings_of(Kind.KV_SPEC, method, "none")
    with pytest.raises(ContractError) as raised:
        LLM(tiny("llama"), **settings)
    assert raised.value.message.startswith(f"{source}: ")
    assert found in raised.value.message


def test_errors_of_no_plugin_and_of_too_little_memory_stay_as_they_are() -> None:
    plugins = BuiltPlugins()
    for error in (ValueError("ours"), MemoryError(), KeyboardInterrupt()):
        assert plugins.named(error) is error


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[logits_processors.thinking_budget]", 1),
        ("[logits_processors.thinking_budget]\nstart_token_ids = [3]\nend_token_ids = [4]", 1),
        ("[logits_processors]\n\nthinking_budget = {start_token_ids = [3], end_token_ids = [4]}", 3),
    ],
    ids=["empty", "table", "inline"],
)
def test_a_processor_that_a_file_names_has_that_file_as_its_origin(text: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    parts = {part.name: part for part in make_plan(load_config(file, environ={})).plan.parts}
    assert parts["thinking_budget"].origin == f"{file}:{line} logits_processors.thinking_budget"
    assert parts["penalties"].origin == parts["transformers_decoder"].origin == "default"


WRITERS = SUPPORT / "writing_plugins.py"


@pytest.mark.parametrize("checks", [True, False])
def test_a_drafter_that_writes_into_the_token_table_changes_no_text_and_is_named_where_checks_are_on(
    *, checks: bool, tiny: Tiny
) -> None:
    prompts = [[5, 6, 7] * 5, [9, 8] * 4]
    wanted = LLM(tiny("llama"), **DEFAULTS).generate(prompts, PARAMS)
    settings = {"drafter.name": "writing", "drafter.tokens": 2, "plugins.inline": (f"{WRITERS}:drafter",)}
    llm = LLM(tiny("llama"), **{**DEFAULTS, **settings, "observability.check_integrity": checks})
    found = llm.generate(prompts, PARAMS)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
    assert [o.prompt_token_ids for o in found] == prompts
    assert llm.engine.extension("drafts") is not None
    failure = llm.engine.extension("drafts").drafting.counts.last_failure
    assert ("wrote into token_table" in failure and "drafter:writing of the inline plugin" in failure) == checks


@pytest.mark.parametrize("mode", [{}, {"scheduler.async": True}], ids=["plain", "asynchronous"])
def test_a_processor_that_writes_into_the_token_table_fails_its_own_requests_and_is_named(
    mode: dict[str, Any], tiny: Tiny
) -> None:
    prompts = [[5, 6, 7] * 5, [9, 8] * 4]
    wanted = LLM(tiny("llama"), **DEFAULTS).generate(prompts, PARAMS)
    settings = {"logits_processors.writing": {}, "plugins.inline": (f"{WRITERS}:processor",)}
    llm = LLM(tiny("llama"), **{**DEFAULTS, **mode, **settings})
    writes = evolve(PARAMS, extra_args={"writes": True})
    good, bad = llm.generate(prompts, [PARAMS, writes])
    assert good.outputs[0].token_ids == wanted[0].outputs[0].token_ids
    assert bad.outputs[0].finish_reason == "error"
    assert "read-only" in str(bad.outputs[0].stop_reason)
    assert "raised by logits_processor:writing of the inline plugin" in str(bad.outputs[0].stop_reason)
    assert [output.prompt_token_ids for output in (good, bad)] == prompts
