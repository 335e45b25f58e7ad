"""Explanation of NaN in a request's logits or answer."""

from __future__ import annotations

from slotline.builder.served_attention import CheckedDispatcher
from slotline.core.batch.extensions import Extensions
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher


def nan_cause(router: AttentionDispatcher, extensions: Extensions) -> str:
    """Return the error that ends a request with NaN, with the plugins that may have made it.

    Without checks only the result is looked at, which every backend has a part in.
    """
    if isinstance(router, CheckedDispatcher) and router.checks.found is not None:
        return f"PluginError: the model gave NaN: {router.checks.found}\n  fix: name another backend"
    plugins = [group.plugin for group in router.groups]
    for computed_by in extensions.computed_by:
        plugins += computed_by()
    names = " or ".join(dict.fromkeys(filter(None, plugins))) or "a backend"
    return (
        f"PluginError: the model gave NaN: {names} made it, or the weights did\n"
        "  fix: set observability.check_integrity = true, which names the layer and its backend, or name another in "
        "attention.backend"
    )
