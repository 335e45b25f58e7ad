"""Choice of the LoRA plugin: checks that the configured plugin can be used."""

from __future__ import annotations

from typing import Any

from slotline.planner.component_selection import device_need, texts_of
from slotline.planner.offers import narrowed
from slotline.registry.config import LoadedConfig
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Need, part_reasons


def choose_lora(
    loaded: LoadedConfig,
    registry: PluginRegistry,
    info: DeviceInfo,
    family: Descriptor[Any],
    *,
    stages: int,
    ranks: int = 1,
) -> Descriptor[Any] | None:
    """Return the LoRA plugin that the configuration names, if any, with the capabilities that its probe left.

    Raises:
        NegotiationError: with every reason why it cannot be used.
    """
    config = loaded.config.lora
    if not config.name:
        if config.adapters:
            raise NegotiationError(
                f"[lora.adapters] ({loaded.origins['lora.adapters'].where}) without a LoRA plugin",
                fix='set lora.name, for instance to "torch"',
            )
        return None
    descriptor = registry.load(Kind.LORA, config.name, required=True)
    descriptor = narrowed(descriptor, info, f"lora plugin {config.name!r}", "name another")
    rank, most = f"lora.max_rank = {config.max_rank}", f"lora.max_adapters = {config.max_adapters}"
    needs = [
        device_need(info),
        Need(capability="max_rank", value=config.max_rank, origin=rank),
        Need(capability="max_adapters", value=config.max_adapters, origin=most),
    ]
    if loaded.config.batch_invariant and not config.merge:  # merged adapters add nothing to a step
        where = loaded.origins["batch_invariant"].where
        needs.append(Need(capability="batch_invariant", value=True, origin=f"batch_invariant = true ({where})"))
    if stages > 1:
        needs.append(Need(capability="staged", value=True, origin=f"the model runs over {stages} pipeline stages"))
    if ranks > 1:
        needs.append(Need(capability="divided", value=True, origin=f"each layer is divided among {ranks} ranks"))
    texts = texts_of(part_reasons(descriptor.capabilities, needs))
    for module in config.target_modules:
        need = Need(capability="target_modules", value=module, origin=f"lora.target_modules names {module!r}")
        texts += texts_of(part_reasons(descriptor.capabilities, [need]))
    if not family.capabilities.adapters.support:
        texts.append(f"model family {family.name!r} lets no adapters join its models")
    if stages > 1 and (refusal := family.capabilities.staged_adapters.refusal(True)):
        texts.append(f"model family {family.name!r}, over {stages} pipeline stages: staged_adapters {refusal}")
    if texts:
        raise NegotiationError(
            f"lora plugin {config.name!r} cannot be used: {'; '.join(texts)}",
            fix="change what the reasons name, take another LoRA plugin, or remove [lora]",
        )
    return descriptor


def refuse_lora_dtype(lora: Descriptor[Any] | None, dtype: str) -> None:
    """Refuse a LoRA plugin that does not support the model's dtype.

    Raises:
        NegotiationError: naming the dtypes that it supports.
    """
    if lora is not None and (refusal := lora.capabilities.dtypes.refusal(dtype)):
        raise NegotiationError(f"lora plugin {lora.name!r}, dtype: {refusal}", fix="set dtype, or take another plugin")
