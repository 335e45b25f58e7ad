"""Plugins beside attention and cache in a plan: whether the drafter and the logits processors can be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slotline.registry.config import LoadedConfig
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Need, Reason, part_reasons
from slotline.registry.probing import probe

_NOT_SUPPLIED = {
    "needs_layers": "hidden states of chosen layers",
    "needs_kv_group": "a cache group for the drafter's own layers",
    "needs_grammar": "the state of a grammar",
}
"""What a drafter may need and this version of the runner does not hand over."""


def choose_drafter(
    loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo, max_model_len: int
) -> Descriptor[Any] | None:
    """The drafter that the configuration names, if any.

    Raises:
        NegotiationError: with every reason why it cannot be used.
    """
    config = loaded.config.drafter
    if not config.name:
        return None
    descriptor = registry.load(Kind.DRAFTER, config.name, required=True)
    origin = f"drafter.tokens = {config.tokens}"
    offer = probe(descriptor, info)
    if isinstance(offer, str):
        raise NegotiationError(f"drafter {config.name!r} cannot run on {info.type}: {offer}", fix="remove [drafter]")
    needs = (_device_need(info), Need(capability="max_tokens", value=config.tokens, origin=origin))
    texts = _texts(part_reasons(offer, needs))
    texts += [
        f"needs {what}, which this version does not supply" for n, what in _NOT_SUPPLIED.items() if getattr(offer, n)
    ]
    if offer.tree.support:
        texts.append("proposes trees, and this version verifies chains")
    if config.tokens >= max_model_len - 1:
        texts.append(f"{origin} does not fit beside a prompt into max_model_len={max_model_len}")
    if texts:
        raise NegotiationError(
            f"drafter {config.name!r} cannot be used: {'; '.join(texts)}",
            fix="lower drafter.tokens, name another drafter, or remove [drafter]",
        )
    return descriptor


def refuse_processors(
    loaded: LoadedConfig, processors: Sequence[Descriptor[Any]], info: DeviceInfo, *, drafting: bool
) -> None:
    """Refuse logits processors that are wrong on this device or beside a drafter.

    Raises:
        NegotiationError: with every reason.
    """
    drafter = f"drafter.name = {loaded.config.drafter.name!r}"
    needs = (_device_need(info), Need(capability="speculation", value=drafting, origin=drafter))
    for descriptor in processors:
        reasons = part_reasons(descriptor.capabilities, needs)
        if reasons:
            raise NegotiationError(
                f"logits processor {descriptor.name!r} cannot be used: {'; '.join(_texts(reasons))}",
                fix="do without it, or remove what it cannot work with",
            )


def _device_need(info: DeviceInfo) -> Need:
    return Need(capability="devices", value=info.type, origin=f"device {info.type}")


def _texts(reasons: Sequence[Reason]) -> list[str]:
    return [f"{reason.code} {reason.text} ({reason.origin})" for reason in reasons]
