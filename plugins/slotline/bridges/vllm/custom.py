"""A slotline attention backend as a class with vLLM's v1 attention interface.

`Slotline_NAME` of this module is the class for the attention plugin NAME. It is made when it is asked for, since vLLM
finds its backends by the path of a class.

The cache is vLLM's, of keys and values in one tensor [blocks, heads, tokens, sizes], and the backend sees two views of
it. New tokens are stored in `forward`, where the plan of the step is at hand.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import frozen

from slotline.bridges.vllm.declaration import CACHE_DTYPES
from slotline.bridges.vllm.registration import PREFIX
from slotline.registry.config import load_config
from slotline.registry.contracts.attention import (
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    KVCache,
    KVScales,
)
from slotline.registry.contracts.cache_tensors import PLAIN
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.devices import Devices
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import PluginError
from slotline.registry.loading import bind_contract, building, label_of, resolve_factory, resolve_options
from slotline.registry.probing import probe
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

LAYOUTS = {"NHD": KVCacheLayout.LBNHC, "HND": KVCacheLayout.LBHNC}


def __getattr__(name: str) -> type:
    if name.startswith(PREFIX):
        return backend_class(name.removeprefix(PREFIX))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def backend_class(name: str) -> type:
    """Return the class for vLLM of the attention plugin `name`.

    Raises:
        PluginError: if there is no such plugin, or it cannot run on vLLM's device or with plain caches.
    """
    registry = PluginRegistry.discover(tolerant=True)
    descriptor = registry.load(Kind.ATTENTION, name, required=True)
    offer = probe(descriptor, Devices(registry).named(current_platform.device_type).info())
    if isinstance(offer, str):
        raise PluginError(f"{label_of(descriptor)} cannot run in vLLM here: {offer}", fix="choose another backend")
    if (text := offer.cache_formats.refusal(PLAIN)) is not None:
        raise PluginError(
            f"{label_of(descriptor)} cannot run in vLLM: cache format {text}", fix="choose another backend"
        )
    builder = type(f"{PREFIX}{name}_builder", (_Builder,), {"descriptor": descriptor, "offer": offer})
    members = {"offer": offer, "builder": builder, "supported_dtypes": _dtypes(offer), "__module__": __name__}
    members["supported_kv_cache_dtypes"] = _cache_dtypes(offer)
    return type(f"{PREFIX}{name}", (_Backend,), members)


def _dtypes(offer: AttentionCapabilities) -> list[torch.dtype]:
    usual = ("bfloat16", "float16", "float32")
    return [getattr(torch, name) for name in usual if offer.dtypes.refusal((name, name)) is None]


def _cache_dtypes(offer: AttentionCapabilities) -> list[str]:
    usual = [str(dtype).removeprefix("torch.") for dtype in _dtypes(offer)]
    found = ["auto", *(name for name in usual if name != "float32")]
    scaled = offer.kv_scales.refusal(True) is None
    for name, dtype in CACHE_DTYPES.items():
        if scaled and all(offer.dtypes.refusal((own, dtype)) is None for own in usual):
            found.append(name)
    return found


class _Backend(AttentionBackend):  # type: ignore[misc]  # vLLM has no types here
    """What vLLM asks before it builds a layer, answered by a plugin's capabilities on this machine."""

    forward_includes_kv_cache_update = True
    offer: ClassVar[AttentionCapabilities]
    builder: ClassVar[type]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return _Impl

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        sizes = cls.offer.kernel_block_sizes
        if not sizes.exact and sizes.multiple_of is None:
            return [MultipleOf(1)]
        return [*sizes.exact, *([] if sizes.multiple_of is None else [MultipleOf(sizes.multiple_of)])]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return cls.offer.head_sizes.refusal(head_size) is None

    @classmethod
    def supports_sink(cls) -> bool:
        return cls.offer.sinks.refusal(True) is None

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return cls.offer.sliding_window.refusal(True) is None

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return tuple(LAYOUTS[name] for name in cls.offer.layouts.options if name in LAYOUTS)


@frozen
class _Step:
    """Metadata of one step: the plugin's plan."""

    plan: Any


class _Builder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds the plugin for a group of vLLM's layers, and its plan for each step."""

    descriptor: ClassVar[Descriptor[Any]]
    offer: ClassVar[AttentionCapabilities]

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        found = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        layers = tuple(made.impl.layer(made.layer_name, index) for index, made in enumerate(found))
        self._refuse_undeclared(layers[0])
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        dtype = str(model.dtype).removeprefix("torch.")
        kv_dtype = CACHE_DTYPES.get(found[0].kv_cache_dtype, dtype)
        scaled = kv_dtype != dtype
        options = resolve_options(self.descriptor)
        context = AttentionContext(
            contract=bind_contract(self.descriptor),
            layers=layers,
            device=str(device),
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=kv_cache_spec.block_size,
            kernel_block_size=kv_cache_spec.block_size,
            layout=_layout(self.offer, vllm_config),
            max_query_len=scheduler.max_num_batched_tokens,
            max_requests=scheduler.max_num_seqs,
            max_tokens=scheduler.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            kv_scales={n: KVScales(made._k_scale, made._v_scale) for n, made in enumerate(found) if scaled},
            options=load_config(environ={}).options(Kind.ATTENTION, self.descriptor.name, options),
        )
        with building(self.descriptor, "slotline in vLLM"):
            self.plugin = resolve_factory(self.descriptor)(context)
        for made, layer in zip(found, layers, strict=True):
            made.impl.bind(self.plugin, layer, kv_dtype, self.offer.writes_cache)

    def _refuse_undeclared(self, layer: AttentionLayer) -> None:
        """Refuse a layer that needs what the plugin does not declare. vLLM asks for some of it only, on a CPU for none.

        Raises:
            PluginError: naming the layer and the feature.
        """
        needs = {
            "attention_types": layer.attention_type,
            "group_sizes": layer.num_heads // layer.num_kv_heads,
            "head_sizes": layer.head_size,
            "sliding_window": layer.window is not None,
            "soft_cap": layer.soft_cap is not None,
            "sinks": layer.sinks,
            "alibi": layer.alibi_slopes is not None,
        }
        for name, need in needs.items():
            text = getattr(self.offer, name).refusal(need)
            if text is not None:
                raise PluginError(
                    f"{label_of(self.descriptor)} cannot compute {layer.name}: {name.replace('_', ' ')} {text}",
                    fix="choose another slotline backend, or one of vLLM's",
                )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> _Step:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy().astype(np.int32)
        lengths = common.seq_lens[: common.num_reqs].cpu().numpy().astype(np.int32)
        counts = np.diff(starts)
        positions = common.positions
        if positions is None:
            rows = np.repeat(lengths - counts - starts[:-1], counts) + np.arange(starts[-1])
            positions = torch.from_numpy(rows).to(common.seq_lens.device)
        singles = np.flatnonzero(counts != 1)
        batch = AttentionBatch(
            num_requests=common.num_reqs,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=int(lengths.max(initial=0)),
            query_start_loc=common.query_start_loc[: common.num_reqs + 1].int(),
            seq_lens=common.seq_lens[: common.num_reqs].int(),
            block_table=common.block_table_tensor[: common.num_reqs].int(),
            slot_mapping=common.slot_mapping.long(),
            positions=positions.long(),
            query_start_loc_cpu=starts,
            seq_lens_cpu=lengths,
            num_decodes=int(singles[0]) if len(singles) else common.num_reqs,
            causal=bool(common.causal),
        )
        return _Step(self.plugin.plan(batch))


def _layout(offer: AttentionCapabilities, vllm_config: Any) -> str:
    """Return the order inside vLLM's pages, or the backend's preferred one where vLLM has not decided."""
    found = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    names = {layout: name for name, layout in LAYOUTS.items()}
    return names.get(found, offer.layouts.options[0])


class _Impl(AttentionImpl):  # type: ignore[misc]
    """One attention layer of vLLM, computed by a plugin."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self._stores = kv_sharing_target_layer_name is None
        self._facts: dict[str, Any] = {
            "alibi_slopes": None if alibi_slopes is None else tuple(alibi_slopes),
            "window": sliding_window,
            "soft_cap": logits_soft_cap or None,
            "sinks": sinks is not None,
            "attention_type": str(getattr(attn_type, "value", attn_type)),
        }

    def layer(self, name: str, index: int) -> AttentionLayer:
        """Return the layer's facts for a plugin."""
        return AttentionLayer(
            name=name,
            index=index,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size,
            scale=self.scale,
            kv_kind="full" if self._facts["window"] is None else "sliding",
            **self._facts,
        )

    def bind(self, plugin: Any, layer: AttentionLayer, kv_dtype: str, writes_cache: bool) -> None:
        """Take the built plugin, whose layer this is."""
        self._plugin, self._layer, self._writes = plugin, layer, writes_cache
        self._kv_dtype: torch.dtype = getattr(torch, kv_dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: _Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new tokens and attend to the cache. See vLLM's `AttentionImpl.forward` for the arguments."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("slotline backends do not quantize their output")
        if attn_metadata is None:  # vLLM measures memory
            return output.zero_()
        plan, pages = attn_metadata.plan, kv_cache.view(self._kv_dtype).transpose(1, 2)
        cache = KVCache(*pages.split(self.head_size, dim=-1))
        if not self._writes and self._stores:
            self._plugin.write(self._layer, key, value, cache, plan)
        self._plugin.forward(self._layer, query, key, value, cache, plan, output, self.sinks)
        return output
