"""A class written for vLLM's v1 attention interface, as an attention backend of contract 1.

The class runs in vLLM's own surroundings: a `VllmConfig`, a layer of type `Attention` with its scales, its builder for
the metadata of a step, and the forward context. What vLLM does for a backend, the adapter does:

* requests without query tokens are left out of a batch, since vLLM schedules none,
* requests are ordered as the builder's `reorder_batch_threshold` asks, short queries first,
* the output is contiguous, as in vLLM's layers, and its padded rows are zeroed, since vLLM reads none.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen

from slotline.bridges.vllm.pages import CACHE_NAMES, NAME, Page, element, page_spec
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer
from slotline.registry.contracts.cache_tensors import CacheTensors
from slotline.registry.errors import PluginError


@frozen
class StepPlan:
    """Step of a group.

    Attributes:
        metadata: what the class's builder made, None for a step without tokens.
        slot_mapping: [num_tokens] int64, in the order of the step's tokens.
        num_tokens: without padding.
        order: for each token of the batch that the class sees, its place in the step. None for the same order.
    """

    metadata: Any
    slot_mapping: torch.Tensor
    num_tokens: int
    order: torch.Tensor | None = None


class VllmAttention:
    """Attention backend that calls a class with vLLM's interface. Implements `AttentionBackend`.

    Args:
        backend: the class.
        context: the contract's context. All layers of a group are alike.

    Raises:
        PluginError: if the class stores new tokens neither in `forward` nor in `do_kv_cache_update`.
    """

    def __init__(self, backend: Any, context: AttentionContext) -> None:
        self._backend, self._context = backend, context
        self._stores = bool(getattr(backend, "forward_includes_kv_cache_update", True))
        self._config = _config(backend, context)
        self._sinks: dict[int, torch.Tensor] = {}
        first = context.layers[0]
        self._page = Page(backend, first, context.kv_dtype, context.kernel_block_size, context.layout)
        with self._surroundings():
            self._layers = {layer.index: self._layer(layer) for layer in context.layers}
            names = [layer.name for layer in context.layers]
            spec = page_spec(backend, first, element(context.kv_dtype), context.kernel_block_size)
            self._builder = backend.get_builder_cls()(spec, names, self._config, torch.device(context.device))
        if not self._stores and not hasattr(self._layers[first.index].impl, "do_kv_cache_update"):
            raise PluginError(
                f"{backend.__name__} declares that forward does not store new tokens, and has no do_kv_cache_update",
                fix="write do_kv_cache_update, or set forward_includes_kv_cache_update = True",
            )

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self._context.dtype))
        try:
            with set_current_vllm_config(self._config), torch.no_grad():
                yield
        finally:
            torch.set_default_dtype(before)

    def _layer(self, layer: AttentionLayer, sinks: torch.Tensor | None = None) -> Any:
        """Return vLLM's layer, registered in the configuration under its name."""
        from vllm.model_executor.layers.attention import Attention

        more: dict[str, Any] = {}
        if layer.sinks:
            dtype, device = getattr(torch, self._context.dtype), self._context.device
            more["sinks"] = torch.zeros(layer.num_heads, dtype=dtype, device=device) if sinks is None else sinks
        self._config.compilation_config.static_forward_context.pop(layer.name, None)
        made = Attention(
            layer.num_heads,
            layer.head_size,
            layer.scale,
            layer.num_kv_heads,
            alibi_slopes=None if layer.alibi_slopes is None else list(layer.alibi_slopes),
            cache_config=self._config.cache_config,
            logits_soft_cap=layer.soft_cap,
            per_layer_sliding_window=layer.window,
            prefix=layer.name,
            attn_type=layer.attention_type,
            attn_backend=self._backend,
            **more,
        ).to(self._context.device)
        made.process_weights_after_loading(getattr(torch, self._context.dtype))
        return made

    def plan(self, batch: AttentionBatch) -> StepPlan:
        if not batch.num_tokens:
            return StepPlan(None, batch.slot_mapping, 0)
        counts = np.diff(batch.query_start_loc_cpu)
        rows = self._rows(counts)
        order = None
        if (np.diff(rows) < 0).any():
            spans = [np.arange(batch.query_start_loc_cpu[row], batch.query_start_loc_cpu[row + 1]) for row in rows]
            order = torch.from_numpy(np.concatenate(spans)).to(batch.slot_mapping.device)
        common = _common_metadata(batch, rows, counts, order)
        with self._surroundings():
            metadata = self._builder.build(0, common)
        return StepPlan(metadata, batch.slot_mapping, batch.num_tokens, order)

    def _rows(self, counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the requests with query tokens, those within the builder's threshold first if it has one."""
        rows = np.flatnonzero(counts)
        threshold = getattr(self._builder, "reorder_batch_threshold", None)
        return rows if threshold is None else rows[np.argsort(counts[rows] > threshold, kind="stable")]

    def _refresh_scales(self, layer: AttentionLayer) -> None:
        """Give vLLM's layer the scales of its cache, which may change until the first token is stored."""
        scales, made = self._context.kv_scales.get(layer.index), self._layers[layer.index]
        for name, scale in () if scales is None else (("k", scales.key), ("v", scales.value)):
            number = float(scale)
            for tensor in (f"_{name}_scale", f"_{name}_scale_cpu"):
                if hasattr(made, tensor):
                    getattr(made, tensor).fill_(number)
            setattr(made, f"_{name}_scale_float", number)

    def write(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: CacheTensors, plan: StepPlan
    ) -> None:
        if plan.metadata is None:
            return
        self._refresh_scales(layer)
        made = self._layers[layer.index]
        with self._forward_context(layer, plan):
            made.impl.do_kv_cache_update(made, key, value, self._page.view(cache[NAME]), plan.slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: CacheTensors,
        plan: StepPlan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        out[plan.num_tokens :] = 0
        if plan.metadata is None:
            return
        self._refresh_scales(layer)
        made = self._with_sinks(layer, sinks)
        view = self._page.view(cache[NAME])
        direct = plan.order is None and out.is_contiguous()
        found = out if direct else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        if plan.order is not None:
            query, key, value = query[plan.order], key[plan.order], value[plan.order]
        with self._forward_context(layer, plan):
            made.impl.forward(made, query, key, value, view, plan.metadata, output=found)
        if plan.order is not None:
            out[plan.order] = found[: plan.num_tokens]
        elif not direct:
            out[: plan.num_tokens] = found[: plan.num_tokens]

    def _with_sinks(self, layer: AttentionLayer, sinks: torch.Tensor | None) -> Any:
        """Return vLLM's layer. Its implementation is made anew with sinks that it has not seen."""
        made = self._layers[layer.index]
        if sinks is not None and self._sinks.get(layer.index) is not sinks:
            with self._surroundings():
                made.impl = self._layer(layer, sinks).impl
            self._config.compilation_config.static_forward_context[layer.name] = made
            self._sinks[layer.index] = sinks
        return made

    @contextmanager
    def _forward_context(self, layer: AttentionLayer, plan: StepPlan) -> Iterator[None]:
        from vllm.forward_context import set_forward_context

        slots = {layer.name: plan.slot_mapping}
        with (
            self._surroundings(),
            set_forward_context(
                {layer.name: plan.metadata}, self._config, num_tokens=plan.num_tokens, slot_mapping=slots
            ),
        ):
            yield


def _common_metadata(
    batch: AttentionBatch, rows: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], order: torch.Tensor | None
) -> Any:
    """Return vLLM's metadata of a batch, of some of its requests in some order."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    same = len(rows) == batch.num_requests and order is None
    starts = np.concatenate([[0], np.cumsum(counts[rows])]).astype(np.int32)
    lengths = batch.seq_lens_cpu[rows]
    where = torch.from_numpy(rows).to(batch.seq_lens.device)
    tokens = slice(0, batch.num_tokens)
    slots, positions = batch.slot_mapping, batch.positions
    if order is not None:
        slots, positions = slots[order], positions[order]
    host = torch.from_numpy(starts.copy())
    values = {
        "query_start_loc": batch.query_start_loc if same else host.to(batch.seq_lens.device),
        "query_start_loc_cpu": host,
        "seq_lens": batch.seq_lens if same else batch.seq_lens[where],
        "seq_lens_cpu": torch.from_numpy(lengths.copy()),
        "_seq_lens_cpu": torch.from_numpy(lengths.copy()),
        "seq_lens_cpu_upper_bound": torch.from_numpy(lengths.copy()),
        "num_computed_tokens_cpu": torch.from_numpy(lengths - counts[rows]),
        "_num_computed_tokens_cpu": torch.from_numpy(lengths - counts[rows]),
        "num_reqs": len(rows),
        "num_actual_tokens": batch.num_tokens,
        "max_query_len": int(counts.max()),
        "max_seq_len": int(lengths.max(initial=0)),
        "block_table_tensor": batch.block_table if same else batch.block_table[where],
        "slot_mapping": slots[tokens],
        "positions": positions[tokens],
        "causal": batch.causal,
    }
    known = {field.name for field in fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in values.items() if name in known})


def _config(backend: Any, context: AttentionContext) -> Any:
    """Return the configuration of an engine of one layer, in which a backend of this context is built."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    _register(backend)
    layer = context.layers[0]
    longest = max(context.max_model_len, context.max_query_len)
    folder = str(_model_folder(layer.num_heads, layer.num_kv_heads, layer.head_size, longest))
    model = ModelConfig(
        model=folder,
        tokenizer=folder,
        skip_tokenizer_init=True,
        dtype=context.dtype,
        max_model_len=longest,
        enforce_eager=True,
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=context.kernel_block_size, cache_dtype=CACHE_NAMES.get(context.kv_dtype, "auto")
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=context.max_requests,
            max_num_batched_tokens=max(context.max_tokens, context.max_requests),
            max_model_len=longest,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig(context.device),
    )


def _register(backend: Any) -> None:
    """Let vLLM's registry know the class's name, which its layers look up."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    name = backend.get_name()
    if name not in AttentionBackendEnum.__members__:
        register_backend(name, f"{backend.__module__}.{backend.__qualname__}")


@cache
def _model_folder(num_heads: int, num_kv_heads: int, head_size: int, max_model_len: int) -> Path:
    """Write the configuration of a Llama of one layer, and return its folder, which ends with the process."""
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": num_heads * head_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": max_model_len,
    }
    folder = Path(_root().name) / f"{num_heads}x{num_kv_heads}x{head_size}x{max_model_len}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slotline-vllm-")
