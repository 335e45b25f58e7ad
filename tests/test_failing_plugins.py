"""A plugin that lacks a method, or raises at run time, is named with its source, the cause and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import DEFAULTS
from test_broken_plugins import REMEDIES, SETTINGS

from slotline.core import LLM, SamplingParams
from slotline.core.cli import main
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.built import BUILT, methods_of
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ContractError, PluginError

Tiny = Callable[..., Path]
PLUGINS = Path(__file__).parent / "failing_plugins.py"
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def settings_of(kind: Kind, method: str, how: str) -> tuple[dict[str, Any], str]:
    """The settings of an engine with such a plugin, and its source as messages have it."""
    inline = f"{PLUGINS}:{kind.value}__{method}__{how}"
    settings = {key.replace("broken", "failing"): value for key, value in SETTINGS[kind].items()}
    settings |= {key: "failing" for key, value in settings.items() if value == "broken"}
    return {**DEFAULTS, **settings, "plugins.inline": (inline,)}, f"{kind.value}:failing of the inline plugin {inline}"


def model_of(tiny: Tiny, kind: Kind) -> Path | None:
    """A model that the kind has work for; None for the small one, which has a tokenizer."""
    return None if kind is Kind.STRUCTURED_OUTPUT else tiny("mamba2" if kind is Kind.STATE else "llama")


ASKED = [
    (kind, name)
    for kind, contract in BUILT.items()
    for name, _ in methods_of(contract.protocol)
    if name not in contract.optional
]
FIRST = {kind: name for kind, name in reversed(ASKED)}


@pytest.mark.parametrize("how", ["absent", "few"])
@pytest.mark.parametrize(("kind", "method"), FIRST.items())
def test_a_method_that_is_missing_or_takes_other_arguments_is_refused_when_the_plugin_is_built(
    kind: Kind, method: str, how: str, tiny: Tiny
) -> None:
    settings, source = settings_of(kind, method, how)
    with pytest.raises(ContractError) as raised:
        LLM(model_of(tiny, kind), **settings)
    assert raised.value.message.startswith(f"{source}: what its factory made does not fit the contract: ")
    want = f"has no method {method!r}" if how == "absent" else f"{method}() cannot be called with "
    assert want in raised.value.message
    raised.match(f"fix: .*{REMEDIES[kind]}")


@pytest.mark.parametrize(("kind", "method"), ASKED)
def test_every_method_of_every_contract_is_looked_at(kind: Kind, method: str) -> None:
    from slotline.registry.built import misfits

    import failing_plugins

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
