"""Step extensions: resolved when an engine is built, called in order, refused with reasons, named when they fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import extension_plugins
import pytest
from engine_driver import random_prompts
from repository import SUPPORT
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams
from slotline.core.batch.extensions import NO_EXTENSIONS
from slotline.registry.contracts.extension import METHODS
from slotline.registry.errors import ConfigError, ContractError, NegotiationError, PluginError

Tiny = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts([5, 9], seed=3)]


def settings(*names: str) -> dict[str, Any]:
    """The configuration that names extensions of `tests/support/extension_plugins.py`."""
    inline = tuple(f"{SUPPORT / 'extension_plugins.py'}:{name}" for name in names)
    return {**DEFAULTS, "plugins.inline": inline, **{f"extensions.{name}": {} for name in names}}


def noted(llm: LLM) -> list[str]:
    """Return the calls that the extension noted, in the module that the registry loaded from its file."""
    (bound,) = llm.engine.extensions.validate
    found: list[str] = bound.__func__.__globals__["CALLS"]
    return found


def test_an_engine_without_extensions_has_empty_tuples(tiny: Tiny, engines: Callable[..., LLM]) -> None:
    plain = {"plugins.block": ("logits_processor:guidance",), "attention.cascade": False, "cache.prefix_wait": 0}
    engine = engines(tiny("llama"), **plain).engine
    assert engine.extensions == NO_EXTENSIONS
    assert not any(getattr(engine.extensions, name) for name in METHODS)
    assert engine.scheduler.extensions == engine.runner.extensions == NO_EXTENSIONS


def test_every_method_takes_part_in_its_place(tiny: Tiny) -> None:
    llm = LLM(tiny("llama"), **settings("everywhere"))
    found = noted(llm)
    found.clear()
    outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    assert set(found) == set(METHODS)
    assert all(7 not in output.outputs[0].token_ids for output in outputs)
    assert (found.count("validate"), found.count("admit"), found.count("release")) == (2, 2, 2)
    first = dict.fromkeys(found[found.index("before_step") :])
    order = ["before_step", "prepare_inputs", "plan", "forward_kwargs", "process_logits", "after_sample", "commit"]
    assert [name for name in first if name in order] == order


def test_an_extension_is_a_part_and_a_setting_of_the_plan(tiny: Tiny) -> None:
    llm = LLM(tiny("llama"), **settings("everywhere"))
    assert ("extension", "everywhere") in {(part.kind, part.name) for part in llm.plan.parts}
    line = next(one for one in llm.plan.settings if one.key == "extensions.everywhere")
    assert line.resolved == "order 50; excludes graphs"
    assert "extensions.everywhere" in llm.plan.explain()


def test_requirements_that_a_plan_does_not_meet_are_refused_together(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError) as raised:
        LLM(tiny("llama"), **settings("needs_drafts"))
    said = str(raised.value)
    assert "'needs_drafts' of " in said
    assert "requires 'drafts', which this plan does not have (drafter.name decides it)" in said
    assert "requires 'lanes', which this plan does not have (no extension of this plan provides it)" in said


def test_an_extension_that_another_excludes_is_refused_with_both_names(tiny: Tiny) -> None:
    with pytest.raises(
        NegotiationError, match=r"'no_lanes' of .* excludes 'lanes', .*extension 'lanes' of .* provides"
    ):
        LLM(tiny("llama"), **settings("lanes", "no_lanes"))


def test_a_requirement_that_another_extension_refuses_names_all_three_and_the_remedy(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError) as raised:
        LLM(tiny("llama"), **settings("wants_lanes", "lanes", "no_lanes"))
    said = str(raised.value)
    assert re.search(r"extensions cannot be used: 'no_lanes' of the inline plugin \S+ excludes 'lanes'", said)
    assert re.search(r"extension 'lanes' of the inline plugin \S+ provides it", said)
    assert "remove its table under [extensions]" in said
    with pytest.raises(NegotiationError, match=r"'wants_lanes' of .* requires 'lanes', .*no extension of this plan"):
        LLM(tiny("llama"), **settings("wants_lanes", "no_lanes"))


def test_an_extension_for_another_device_is_refused(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match="extension 'on_tpu' cannot be used"):
        LLM(tiny("llama"), **settings("on_tpu"))


def test_an_extension_that_is_not_installed_is_named(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="no extension plugin 'nowhere' is installed"):
        LLM(tiny("llama"), **DEFAULTS, **{"extensions.nowhere": {}})


def test_arguments_of_the_forward_pass_need_a_plan_without_graphs(tiny: Tiny) -> None:
    with pytest.raises(ContractError, match="has forward_kwargs and does not exclude graphs"):
        LLM(tiny("llama"), **settings("kwargs"))


def test_two_extensions_cannot_choose_the_variants_of_graphs(tiny: Tiny) -> None:
    said = "extension:also_chooses of .* and extension:chooses of .* choose variants of graphs, and one may"
    with pytest.raises(ContractError, match=said):
        LLM(tiny("llama"), **settings("chooses", "also_chooses"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong_limits", r"limit_tokens gave int64 \[1\] with a minimum of 0, expected integers \[0\] from 0"),
        ("wrong_logits", r"process_logits gave torch.float32 \[\d+, 383\], expected torch.float32 \[\d+, 384\]"),
        ("wrong_inputs", r"prepare_inputs gave None, expected ModelInputs"),
        ("raises", r"extension:raises of .*ZeroDivisionError: a plan that fails"),
    ],
)
def test_an_extension_that_fails_in_a_step_is_named(tiny: Tiny, name: str, said: str) -> None:
    def run() -> None:
        LLM(tiny("llama"), **settings(name)).generate(PROMPTS, GREEDY, progress=False)

    with pytest.raises(PluginError, match=said) as raised:
        run()
    assert name in str(raised.value)


def test_names_on_both_sides_of_a_declaration_are_refused() -> None:
    with pytest.raises(ContractError, match="excludes names drafts, which it requires or provides"):
        extension_plugins.ExtensionCapabilities(requires=("drafts",), excludes=("drafts",))
