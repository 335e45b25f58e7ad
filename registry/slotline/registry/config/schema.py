"""The configuration as frozen classes: one class a table, one attribute a key, with its meaning beside it.

These classes are the single source: the loader, the JSON Schema and docs/configuration.md are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

from slotline.registry.config.validators import (
    AtLeast,
    at_least,
    counts_or_auto,
    fraction_or_size,
    number_or_names,
    positive,
    positive_or_auto,
    version_is,
)

CONFIG_VERSION = 1

GraphMode = Literal["auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


def _doc(text: str, **more: Any) -> dict[str, Any]:
    """Metadata of a key: `doc`; `key`, its name in the file; `rest`, takes the sub-tables that no key has; `short`,
    the key of the sub-table that a plain value stands for; `path`, a relative path counts from the naming file."""
    return {"doc": text, **more}


@frozen(kw_only=True)
class AttentionConfig:
    """Which attention backend runs."""

    backend: str | tuple[str, ...] | Mapping[str, str] = field(
        default="auto",
        metadata=_doc("'auto', a name, a list in order of preference, or a table from cache kind to name"),
    )
    layout: str = field(default="auto", metadata=_doc("physical order inside a cache page: 'auto', 'NHD' or 'HND'"))
    cascade: bool | Literal["auto"] = field(
        default="auto",
        metadata=_doc(
            "serve a prefix that all requests of a step share once for all: 'auto' where the backend can and it pays, "
            "true to insist on backends that can"
        ),
    )


@frozen(kw_only=True)
class StateConfig:
    """Layers that keep a state instead of keys and values (Mamba, gated delta nets, short convolutions)."""

    backend: str | tuple[str, ...] | Mapping[str, str] = field(
        default="auto",
        metadata=_doc("'auto', a name, a list in order of preference, or a table from state kind to name"),
    )
    checkpoints: int | Literal["auto"] = field(
        default="auto",
        validator=AtLeast(0, auto=True),
        metadata=_doc(
            "states kept for prefix caching; 'auto' is `scheduler.max_requests`, in a quarter of what their states "
            "leave of the cache's memory at most"
        ),
    )


@frozen(kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int | Literal["auto"] = field(
        default="auto",
        validator=positive_or_auto,
        metadata=_doc("tokens in one block of the pool; in a cache group with smaller pages a multiple of it"),
    )
    dtype: str = field(
        default="auto",
        metadata=_doc(
            "element type of the cache: 'auto' is the model's; 'fp8' is float8_e4m3fn, 'fp8_e5m2' is float8_e5m2"
        ),
    )
    calculate_kv_scales: bool = field(
        default=False,
        metadata=_doc(
            "take the scales of an eight-bit cache from the first step's keys and values instead of the checkpoint"
        ),
    )
    memory: float | str = field(
        default=0.9,
        validator=fraction_or_size,
        metadata=_doc(
            "share of the device's memory for weights and cache together, or a size for the cache alone such as '2GiB'"
        ),
    )
    prefix_caching: bool = field(default=True, metadata=_doc("reuse the blocks of equal prefixes"))
    kv_sharing_fast_prefill: bool = field(
        default=False,
        metadata=_doc(
            "in models whose last layers read the caches of earlier ones, run those for the tokens alone whose logits "
            "are wanted; refused for other models"
        ),
    )
    kv_spec: Mapping[str, str] = field(
        factory=dict, metadata=_doc("table from layer kind to the kv_spec plugin that holds it; empty chooses")
    )


@frozen(kw_only=True)
class KVConnectorConfig:
    """Where blocks of the cache are kept that the pool has no room for."""

    name: str = field(default="", metadata=_doc("KV connector plugin; empty for none"))
    options: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("the connector's own options, in a table `[kv_connector.NAME]`", rest=True)
    )


@frozen(kw_only=True)
class GraphsConfig:
    """CUDA graphs."""

    mode: GraphMode = field(default="auto", metadata=_doc("which batches run as captured graphs"))
    sizes: tuple[int, ...] | Literal["auto"] = field(
        default="auto",
        validator=counts_or_auto,
        metadata=_doc(
            "token counts to capture graphs for; 'auto': 1, 2, 4, then in steps of 8 to 256 and of 16 to 512; mixed "
            "batches in larger ones"
        ),
    )


@frozen(kw_only=True)
class SchedulerConfig:
    """What runs in a step."""

    max_requests: int = field(default=256, validator=positive, metadata=_doc("rows, so requests that run at a time"))
    max_batched_tokens: int = field(default=8192, validator=positive, metadata=_doc("tokens of one step"))
    max_model_len: int | Literal["auto"] = field(
        default="auto",
        validator=positive_or_auto,
        metadata=_doc("longest sequence; 'auto' is the model's, at most 8192"),
    )
    chunked_prefill: bool = field(default=True, metadata=_doc("split long prompts over steps"))
    policy: Literal["fcfs", "priority"] = field(default="fcfs", metadata=_doc("order of waiting requests"))
    async_: bool | Literal["auto"] = field(
        default="auto", alias="async_", metadata=_doc("prepare step n+1 while step n runs", key="async")
    )
    microbatches: int = field(
        default=1,
        validator=positive,
        metadata=_doc("pieces that a step's forward pass is cut into, so that pipeline stages work at the same time"),
    )
    microbatch_tokens: int = field(
        default=512, validator=positive, metadata=_doc("fewest tokens of a piece; steps with fewer stay whole")
    )


@frozen(kw_only=True)
class MultimodalConfig:
    """Images and other inputs besides text, where the model takes any; sizes count embeddings."""

    cache_tokens: int | Literal["auto"] = field(
        default="auto",
        validator=positive_or_auto,
        metadata=_doc("embeddings kept on the device; 'auto' is what a step may make, or one large item"),
    )
    max_tokens_per_step: int | Literal["auto"] = field(
        default="auto",
        validator=positive_or_auto,
        metadata=_doc("embeddings made in one step; 'auto' is `scheduler.max_batched_tokens`, or one large item"),
    )


@frozen(kw_only=True)
class ParallelConfig:
    """A model over several devices."""

    pipeline: int | tuple[str, ...] = field(
        default=1,
        validator=number_or_names,
        metadata=_doc("devices that hold the layers one part after the other, or how many of `device`'s type"),
    )
    layers: tuple[int, ...] = field(
        default=(), metadata=_doc("layers of each pipeline stage; empty balances the stages by their parameters")
    )
    context_shards: int | tuple[str, ...] = field(
        default=1,
        validator=number_or_names,
        metadata=_doc(
            "devices that hold the keys of each request in turn, block by block, the model's own first; or how many of "
            "`device`'s type"
        ),
    )


@frozen(kw_only=True)
class SamplingConfig:
    """Sampling, where it is the engine's business and not a request's."""

    seed: int = field(default=0, validator=at_least(0), metadata=_doc("seeds the requests that bring no seed"))
    generation_config: Literal["auto", "none"] = field(
        default="auto",
        metadata=_doc(
            "where parameters that a request leaves out come from: 'auto' is the model's generation_config.json "
            "(temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens, do_sample), 'none' leaves it unread"
        ),
    )
    logprobs_mode: LogprobsMode = field(default="raw_logprobs", metadata=_doc("what `logprobs` of an output holds"))
    max_logprobs: int = field(
        default=20, validator=at_least(0), metadata=_doc("most log-probabilities a request may ask for")
    )


@frozen(kw_only=True)
class DrafterConfig:
    """Speculative decoding."""

    name: str = field(default="", metadata=_doc("drafter plugin; empty for none"))
    tokens: int = field(default=4, validator=positive, metadata=_doc("draft tokens of a step"))
    adaptive: bool | Literal["auto"] = field(
        default="auto",
        metadata=_doc(
            "verify as many drafts as pay, down to none, by measured acceptance and cost; auto where no seed's text "
            "depends on that"
        ),
    )
    graphs: bool | Literal["auto"] = field(
        default="auto", metadata=_doc("capture the drafter's own steps in CUDA graphs; auto where that is possible")
    )
    path: str = field(default="", metadata=_doc("folder of the draft checkpoint", path=True))
    options: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("the drafter's own options, in a table `[drafter.NAME]`", rest=True)
    )


@frozen(kw_only=True)
class LoraConfig:
    """LoRA adapters."""

    name: str = field(default="", metadata=_doc("LoRA plugin; empty for none"))
    max_adapters: int = field(default=4, validator=positive, metadata=_doc("adapters on the device at a time"))
    max_rank: int = field(default=16, validator=positive, metadata=_doc("highest rank"))
    max_cpu_adapters: int = field(
        default=16,
        validator=positive,
        metadata=_doc("adapters kept in host memory, those on the device included"),
    )
    target_modules: tuple[str, ...] = field(
        default=(),
        metadata=_doc(
            "layers that may carry an adapter, by the last part of their name, as 'q_proj'; empty for all linear ones "
            "but the output projection 'lm_head'; it and the embedding 'embed_tokens' must be named"
        ),
    )
    merge: bool = field(
        default=False, metadata=_doc("add the one adapter to the weights: no cost in a step, and no other adapter")
    )
    specialize_graphs: bool = field(
        default=True,
        metadata=_doc("capture graphs for no adapter, one and several; false captures them for several alone"),
    )
    adapters: Mapping[str, str] = field(
        factory=dict, metadata=_doc("adapters to load at the start: name to folder", path=True)
    )
    options: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("the LoRA plugin's own options, in a table `[lora.NAME]`", rest=True)
    )


@frozen(kw_only=True)
class StructuredOutputConfig:
    """Output that follows a JSON schema, a regular expression or a grammar."""

    backend: str = field(
        default="auto",
        metadata=_doc("structured-output plugin: 'auto' takes the best that is installed, 'none' none"),
    )
    compile_threads: int = field(
        default=2, validator=positive, metadata=_doc("grammars compiled at a time, beside the steps")
    )
    cached_grammars: int = field(
        default=256, validator=positive, metadata=_doc("compiled grammars kept for later requests")
    )
    options: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("the plugin's own options, in a table `[structured_output.NAME]`", rest=True)
    )


@frozen(kw_only=True)
class PluginsConfig:
    """Which plugins may load."""

    require: tuple[str, ...] = field(
        default=(), metadata=_doc("distributions that must be installed, e.g. 'my-attn>=1.2'")
    )
    allow: tuple[str, ...] | None = field(
        default=None,
        metadata=_doc("if given, plugins of other distributions load only if named here ('NAME' or 'KIND:NAME')"),
    )
    block: tuple[str, ...] = field(default=(), metadata=_doc("'NAME' or 'KIND:NAME' that never loads, ours included"))
    distribution: Mapping[str, str] = field(
        factory=dict, metadata=_doc("which distribution a 'NAME' or 'KIND:NAME' comes from, where two offer it")
    )
    inline: tuple[str, ...] = field(
        default=(),
        metadata=_doc("plugins in single files, such as './mine.py:Mine': code that every command runs", path=True),
    )
    allow_inline_from: tuple[str, ...] = field(
        default=(),
        metadata=_doc(
            "folders, or files, outside the first file's folder whose configurations may name inline plugins where "
            "they are extended; counts in the first file, the environment, `--set` and arguments only",
            path=True,
        ),
    )


def _plugin_rules(value: PluginsConfig | Sequence[str]) -> PluginsConfig:
    return value if isinstance(value, PluginsConfig) else PluginsConfig(inline=tuple(value))


@frozen(kw_only=True)
class ObservabilityConfig:
    """What is measured and logged."""

    profile: bool = field(default=False, metadata=_doc("time the parts of each step"))
    count_nans: bool = field(
        default=False, metadata=_doc("count NaN logits of each request, or NaNs in its embedding or class scores")
    )
    check_integrity: bool = field(
        default=False,
        metadata=_doc(
            "check rows, blocks and references after each step, and in it what attention and state backends write"
        ),
    )
    progress: bool = field(default=True, metadata=_doc("show a progress bar on long work"))


@frozen(kw_only=True)
class Config:
    """The whole file."""

    config_version: int = field(
        default=CONFIG_VERSION, validator=version_is(CONFIG_VERSION), metadata=_doc("version of this format")
    )
    model: str = field(
        default="", metadata=_doc("a local Hugging Face folder; empty for the small model that ships", path=True)
    )
    task: Literal["auto", "generate", "embed", "classify"] = field(
        default="auto",
        metadata=_doc("what requests get: text, an embedding or class scores; 'auto' is the model's own"),
    )
    tokenizer: str = field(default="", metadata=_doc("a local folder; empty for the model's own", path=True))
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata=_doc("dtype of weights and activations")
    )
    device: str = field(default="auto", metadata=_doc("'auto', 'cpu', 'cuda' or 'cuda:N'; see `parallel` for several"))
    optimize: bool = field(
        default=True, metadata=_doc("run the optimising passes over the model; false keeps transformers' modules")
    )
    batch_invariant: bool = field(
        default=False,
        metadata=_doc(
            "a request's log-probabilities are bitwise the same alone and in any batch; slower, and refused where a "
            "part cannot"
        ),
    )
    offload_gib: float = field(default=0.0, validator=at_least(0), metadata=_doc("GiB of weights kept in host memory"))
    strict: bool = field(
        default=False, metadata=_doc("every downgrade and every plugin that fails to load is an error")
    )
    allow: tuple[str, ...] = field(default=(), metadata=_doc("codes that strict mode lets pass, e.g. 'N301'"))
    plugins: PluginsConfig = field(
        factory=PluginsConfig,
        converter=_plugin_rules,
        metadata=_doc("a table of rules; a plain list stands for its `inline`", short="inline"),
    )
    attention: AttentionConfig = field(factory=AttentionConfig)
    state: StateConfig = field(factory=StateConfig)
    cache: CacheConfig = field(factory=CacheConfig)
    kv_connector: KVConnectorConfig = field(factory=KVConnectorConfig)
    graphs: GraphsConfig = field(factory=GraphsConfig)
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    multimodal: MultimodalConfig = field(factory=MultimodalConfig)
    parallel: ParallelConfig = field(factory=ParallelConfig)
    sampling: SamplingConfig = field(factory=SamplingConfig)
    drafter: DrafterConfig = field(factory=DrafterConfig)
    lora: LoraConfig = field(factory=LoraConfig)
    structured_output: StructuredOutputConfig = field(factory=StructuredOutputConfig)
    observability: ObservabilityConfig = field(factory=ObservabilityConfig)
    logits_processors: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each logits processor: names it and configures it")
    )
    backend: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each attention or state backend's own options")
    )
    kv_spec: Mapping[str, Any] = field(factory=dict, metadata=_doc("one table for each cache spec's own options"))
    model_family: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each model family's own options")
    )
