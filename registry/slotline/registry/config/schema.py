"""Configuration as frozen classes: one class per table, one attribute per key, with its description.

These classes are the only source. The loader, the JSON Schema and docs/configuration.md are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

from slotline.registry.config.validators import (
    AtLeast,
    at_least,
    below_one,
    counts_or_auto,
    fraction_or_size,
    networks,
    number_or_names,
    positive,
    positive_or_auto,
    size,
    version_is,
)

CONFIG_VERSION = 1

GraphMode = Literal["auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


def _doc(text: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a key.

    Args:
        text: description of the key.
        more: `key`, the name in the file. `rest`, True for the attribute that takes all other sub-tables. `short`, the
            key of a sub-table that a plain value sets. `path`, True for a path relative to the naming file.
    """
    return {"doc": text, **more}


@frozen(kw_only=True)
class AttentionConfig:
    """Choice of the attention backend."""

    backend: str | tuple[str, ...] | Mapping[str, str] = field(
        default="auto",
        metadata=_doc("'auto', a name, a list in order of preference, or a table from cache kind to name"),
    )
    layout: str = field(default="auto", metadata=_doc("physical order inside a cache page: 'auto', 'NHD' or 'HND'"))
    cascade: bool | Literal["auto"] = field(
        default="auto",
        metadata=_doc(
            "read a prefix that requests of a step share only once: 'auto' if the backend supports it and it is "
            "faster, true to require support of all backends"
        ),
    )
    approximate: bool = field(
        default=False,
        metadata=_doc(
            "let 'auto' choose backends that approximate, for instance by leaving keys out; one that "
            "`attention.backend` names needs no permission"
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
            "states kept for prefix caching; 'auto' is `scheduler.max_requests`, limited to a quarter of the cache's "
            "memory that remains after the requests' states"
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
            "element type of the cache: 'auto' is the model's; 'fp8' is float8_e4m3fn, 'fp8_e5m2' is float8_e5m2, "
            "'int8', 'fp8_token_head' and 'int4' are codes with a scale for each token and KV head"
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
            "share of the device's memory for weights and cache together, or a size of only the cache, e.g. '2GiB'"
        ),
    )
    prefix_caching: bool = field(default=True, metadata=_doc("reuse the blocks of equal prefixes"))
    prefix_wait: int = field(
        default=64,
        validator=at_least(0),
        metadata=_doc(
            "a new request waits while another computes so many tokens of a prefix that they share; 0 never waits"
        ),
    )
    kv_sharing_fast_prefill: bool = field(
        default=False,
        metadata=_doc(
            "if a model's last layers read the caches of earlier ones, run them only for the tokens whose logits are "
            "wanted; refused for other models"
        ),
    )
    kv_spec: Mapping[str, str] = field(
        factory=dict, metadata=_doc("table from layer kind to the kv_spec plugin that holds it; empty chooses")
    )


@frozen(kw_only=True)
class KVConnectorConfig:
    """Storage for cache blocks that the pool has no room for."""

    name: str = field(default="", metadata=_doc("KV connector plugin; empty for none"))
    max_loads: int = field(
        default=1024,
        validator=positive,
        metadata=_doc("blocks that an asynchronous connector may load at a time; what is beyond them is computed"),
    )
    max_saves: int = field(
        default=1024,
        validator=positive,
        metadata=_doc(
            "blocks that a connector with lasting saves may be saving at a time, half of the pool at most; what is "
            "beyond them waits, and is not saved if it has been overwritten by then"
        ),
    )
    load_timeout: float = field(
        default=30.0,
        validator=at_least(0),
        metadata=_doc(
            "seconds that a request waits for a block of an asynchronous connector before it computes it; the "
            "connector is not asked again until that load has ended"
        ),
    )
    leave_out_slow: bool = field(
        default=True,
        metadata=_doc("leave a connector out for some requests if loading takes longer than computing the same tokens"),
    )
    options: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("the connector's own options, in a table `[kv_connector.NAME]`", rest=True)
    )


@frozen(kw_only=True)
class GraphsConfig:
    """CUDA graphs."""

    mode: GraphMode = field(default="auto", metadata=_doc("batches that run as captured graphs"))
    sizes: tuple[int, ...] | Literal["auto"] = field(
        default="auto",
        validator=counts_or_auto,
        metadata=_doc(
            "token counts to capture graphs for; 'auto': 1, 2, 4, then in steps of 8 to 256 and of 16 to 512; mixed "
            "batches in larger steps"
        ),
    )


@frozen(kw_only=True)
class CompileConfig:
    """Compilation of the model by torch.compile, in place of the optimising passes."""

    mode: Literal["none", "stock"] = field(
        default="none", metadata=_doc("'stock': torch.compile takes each forward pass whole, and nothing is captured")
    )
    backend: str = field(default="inductor", metadata=_doc("of torch.compile, such as 'inductor' or 'aot_eager'"))


@frozen(kw_only=True)
class SchedulerConfig:
    """Composition of a step."""

    max_requests: int = field(default=256, validator=positive, metadata=_doc("most requests that run at a time"))
    max_batched_tokens: int = field(default=8192, validator=positive, metadata=_doc("most tokens in one step"))
    max_model_len: int | Literal["auto"] = field(
        default="auto",
        validator=positive_or_auto,
        metadata=_doc("longest sequence; 'auto' is the model's, at most 8192"),
    )
    chunked_prefill: bool = field(default=True, metadata=_doc("split long prompts over steps"))
    policy: str = field(
        default="fcfs",
        metadata=_doc("scheduler policy plugin: order of requests, who gives way, and how much a step takes"),
    )
    async_: bool | Literal["auto"] = field(
        default="auto", alias="async_", metadata=_doc("prepare step n+1 while step n runs", key="async")
    )
    microbatches: int = field(
        default=1,
        validator=positive,
        metadata=_doc(
            "pieces that a step's forward pass is cut into, so that pipeline stages work at the same time, or replicas "
            "that share experts compute while tokens are on their way"
        ),
    )
    microbatch_tokens: int = field(
        default=512, validator=positive, metadata=_doc("fewest tokens of a piece; steps with fewer stay whole")
    )


@frozen(kw_only=True)
class MultimodalConfig:
    """Images and other inputs besides text, if the model takes any. Sizes are counted in embeddings."""

    text_only: bool = field(
        default=False,
        metadata=_doc(
            "serve the text part of a model that also takes images or sound, without its encoders; its images and "
            "sound are refused then"
        ),
    )
    cache_tokens: int | Literal["auto"] = field(
        default="auto",
        validator=positive_or_auto,
        metadata=_doc("embeddings kept on the device; 'auto' is the most that a step computes, or one large item"),
    )
    max_tokens_per_step: int | Literal["auto"] = field(
        default="auto",
        validator=positive_or_auto,
        metadata=_doc("embeddings computed in one step; 'auto' is `scheduler.max_batched_tokens`, or one large item"),
    )
    processed_cache: str = field(
        default="256MiB",
        validator=size,
        metadata=_doc("host memory for what the model's processor made of items, for requests that show them again"),
    )
    urls: tuple[str, ...] = field(
        default=(),
        metadata=_doc(
            "hosts from which images and videos may be fetched, as 'example.com' or '*.example.com'; '*' for all at "
            "public addresses"
        ),
    )
    url_networks: tuple[str, ...] = field(
        default=(),
        validator=networks,
        metadata=_doc("networks that may be fetched from though they are not public, as '10.1.0.0/16'"),
    )
    url_timeout: float = field(
        default=10.0, validator=AtLeast(0.01, maximum=3600), metadata=_doc("seconds to fetch a file, with redirects")
    )
    folder: str = field(
        default="",
        metadata=_doc("folder whose files requests over HTTP may name as 'file:///...'; empty for none", path=True),
    )
    max_items: int = field(default=128, validator=positive, metadata=_doc("images and other items of a request"))
    max_bytes: str = field(
        default="64MiB", validator=size, metadata=_doc("bytes of a request's files of images and videos, together")
    )
    max_pixels: int = field(
        default=2**28,
        validator=positive,
        metadata=_doc("pixels of the images and frames in a request's files, together"),
    )
    video_fps: float = field(
        default=2.0,
        validator=AtLeast(0.01, maximum=1000),
        metadata=_doc("frames taken for each second of a video file"),
    )
    video_frames: int = field(default=32, validator=positive, metadata=_doc("frames taken of a video file at most"))
    video_pruning_rate: float = field(
        default=0.0,
        validator=below_one,
        metadata=_doc(
            "share of a video's tokens behind its first frame to leave out, those whose pixels change least (EVS); "
            "refused for models without such videos"
        ),
    )


@frozen(kw_only=True)
class ParallelConfig:
    """Distribution of a model over several devices."""

    tensor: int = field(
        default=1,
        validator=at_least(1),
        metadata=_doc("ranks that share each layer: heads, intermediate sizes and the vocabulary are divided"),
    )
    sequence: bool = field(
        default=False,
        metadata=_doc(
            "ranks of a tensor group add and norm the hidden states of their own tokens alone (sequence parallel)"
        ),
    )
    data: int = field(
        default=1,
        validator=at_least(1),
        metadata=_doc("replicas of the whole model, each with devices and a cache of its own, behind one front"),
    )
    routing: Literal["held", "sent", "load"] = field(
        default="held",
        metadata=_doc(
            "how a replica is chosen: 'held' by the prefixes that each one's cache holds, 'sent' by those of the "
            "prompts that it was sent, both unless its load is too high; 'load' by load alone"
        ),
    )
    expert: int = field(
        default=1,
        validator=at_least(1),
        metadata=_doc(
            "ranks that share the experts of each mixture, whole ones: those of `tensor`, or all replicas of `data`; 1 "
            "divides each expert by `tensor`"
        ),
    )
    redundant_experts: int = field(
        default=0,
        validator=at_least(0),
        metadata=_doc("copies of experts in each mixture beyond one of each, for experts with many tokens"),
    )
    expert_placement: str = field(
        default="auto", metadata=_doc("expert_placement plugin that says which rank has which experts; 'auto' chooses")
    )
    expert_loads: bool = field(
        default=False, metadata=_doc("count the tokens of each expert, which `LLM.rebalance_experts` needs")
    )
    rebalance_steps: int = field(
        default=0,
        validator=at_least(0),
        metadata=_doc("steps after which experts are placed anew by the tokens that they had; 0 never does"),
    )
    nodes: int = field(
        default=1, validator=at_least(1), metadata=_doc("machines of the ranks, each with as many of them")
    )
    launcher: Literal["auto", "local", "torchrun", "ray"] = field(
        default="auto",
        metadata=_doc(
            "what starts the other ranks: 'local' this process, on this machine; 'torchrun' has started them; 'ray' "
            "as actors; 'auto' is torchrun in its processes, else local for one node and ray for several"
        ),
    )
    decode_context: int = field(
        default=1,
        validator=at_least(1),
        metadata=_doc(
            "ranks of a tensor group that share the keys of each request block by block, in place of holding the same "
            "ones: for latents, and where there are fewer KV heads than ranks"
        ),
    )
    communicator: str = field(
        default="auto", metadata=_doc("communicator plugin for collectives among ranks; 'auto' chooses")
    )
    timeout: float = field(
        default=30.0,
        validator=at_least(0.1),
        metadata=_doc("seconds without a sign of life of a rank, or within a step, after which the engine ends"),
    )
    start_timeout: float = field(
        default=600.0, validator=at_least(1.0), metadata=_doc("seconds that all ranks have to build the engine")
    )
    pipeline: int | tuple[str, ...] = field(
        default=1,
        validator=number_or_names,
        metadata=_doc(
            "ranks among which the layers are divided; or devices of one process among which they are, in order"
        ),
    )
    layers: tuple[int, ...] = field(
        default=(), metadata=_doc("layers of each pipeline stage; empty balances the stages by their parameters")
    )
    context_shards: int | tuple[str, ...] = field(
        default=1,
        validator=number_or_names,
        metadata=_doc(
            "devices that share the keys of each request block by block, the model's own first; or the number of "
            "devices of `device`'s type"
        ),
    )


@frozen(kw_only=True)
class LoadConfig:
    """Reading of the weights."""

    format: Literal["auto", "hf", "sharded", "dummy"] = field(
        default="auto",
        metadata=_doc(
            "'hf' reads a Hugging Face checkpoint, 'sharded' what `LLM.save_weights` wrote, 'auto' whichever the "
            "folder holds; 'dummy' reads no weights and makes random ones, to measure a model from its config.json"
        ),
    )


@frozen(kw_only=True)
class WeightsConfig:
    """Quantized weights."""

    quantize: str = field(
        default="",
        metadata=_doc(
            "quantize a checkpoint in full precision while it is loaded: 'int8', 'int4', 'fp8' or what else a "
            "weight_format plugin offers; empty loads the weights as they are"
        ),
    )
    activation: Literal["auto", "none", "int8", "fp8"] = field(
        default="auto",
        metadata=_doc(
            "what plugins may round activations to where they multiply by quantized weights: 'auto' is what the "
            "checkpoint's maker permits, and for `weights.quantize` eight bits"
        ),
    )
    linear: str = field(
        default="auto", metadata=_doc("linear plugin for products with quantized weights; 'auto' chooses")
    )
    experts: str = field(default="auto", metadata=_doc("experts plugin for quantized mixtures; 'auto' chooses"))


@frozen(kw_only=True)
class SamplingConfig:
    """Sampling settings of the engine. Requests have their own sampling parameters."""

    seed: int = field(default=0, validator=at_least(0), metadata=_doc("seed for requests without a seed of their own"))
    generation_config: Literal["auto", "none"] = field(
        default="auto",
        metadata=_doc(
            "defaults of parameters that a request leaves out: 'auto' is the model's generation_config.json "
            "(temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens, do_sample), 'none' ignores it"
        ),
    )
    logprobs_mode: LogprobsMode = field(default="raw_logprobs", metadata=_doc("values in `logprobs` of an output"))
    max_logprobs: int = field(
        default=20, validator=at_least(0), metadata=_doc("most log-probabilities that a request may ask for")
    )


@frozen(kw_only=True)
class DrafterConfig:
    """Speculative decoding."""

    name: str = field(default="", metadata=_doc("drafter plugin; empty for none"))
    tokens: int = field(default=4, validator=positive, metadata=_doc("draft tokens of a step"))
    max_model_len: int = field(
        default=0,
        validator=at_least(0),
        metadata=_doc("tokens beyond which a request goes without drafts; 0 for as many as the model takes"),
    )
    adaptive: bool | Literal["auto"] = field(
        default="auto",
        metadata=_doc(
            "adapt the number of drafts, down to none, to measured acceptance and cost; 'auto' if no seed's text "
            "depends on it"
        ),
    )
    graphs: bool | Literal["auto"] = field(
        default="auto", metadata=_doc("capture the drafter's own steps in CUDA graphs; 'auto' if possible")
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
            "layers that may carry an adapter, by the last part of their name, e.g. 'q_proj'; empty for all linear "
            "layers except 'lm_head', which must be named like the embedding 'embed_tokens'"
        ),
    )
    merge: bool = field(
        default=False, metadata=_doc("add a single adapter to the weights: no cost per step, but no other adapter")
    )
    specialize_graphs: bool = field(
        default=True,
        metadata=_doc("capture separate graphs for no, one and several adapters; false captures only the last"),
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
        metadata=_doc("structured-output plugin: 'auto' is the best installed plugin, 'none' disables it"),
    )
    compile_threads: int = field(
        default=2, validator=positive, metadata=_doc("grammars compiled at a time, in separate threads")
    )
    cached_grammars: int = field(
        default=256, validator=positive, metadata=_doc("compiled grammars kept for later requests")
    )
    keep_masks: bool = field(
        default=True,
        metadata=_doc("reuse masks where texts can go on alike, if the plugin declares `reusable_masks`"),
    )
    options: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("the plugin's own options, in a table `[structured_output.NAME]`", rest=True)
    )


@frozen(kw_only=True)
class ResponseParserConfig:
    """What the text of a chat's answer means: reasoning, content, tool calls."""

    name: str = field(
        default="auto",
        metadata=_doc("response parser: 'auto' is the one that fits the chat template, 'none' reads nothing"),
    )
    options: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("the plugin's own options, in a table `[response_parser.NAME]`", rest=True)
    )


@frozen(kw_only=True)
class PluginsConfig:
    """Rules for plugins that may load."""

    require: tuple[str, ...] = field(
        default=(), metadata=_doc("distributions that must be installed, e.g. 'my-attn>=1.2'")
    )
    allow: tuple[str, ...] | None = field(
        default=None,
        metadata=_doc("if given, plugins of other distributions load only if named here ('NAME' or 'KIND:NAME')"),
    )
    block: tuple[str, ...] = field(default=(), metadata=_doc("'NAME' or 'KIND:NAME' that never loads, ours included"))
    distribution: Mapping[str, str] = field(
        factory=dict, metadata=_doc("distribution to take a 'NAME' or 'KIND:NAME' from if two offer it")
    )
    inline: tuple[str, ...] = field(
        default=(),
        metadata=_doc("plugins in single files, such as './mine.py:Mine': code that every command runs", path=True),
    )
    allow_inline_from: tuple[str, ...] = field(
        default=(),
        metadata=_doc(
            "folders or files outside the first file's folder whose configurations may name inline plugins when they "
            "are extended; allowed only in the first file, the environment, `--set` and arguments",
            path=True,
        ),
    )


def _plugin_rules(value: PluginsConfig | Sequence[str]) -> PluginsConfig:
    return value if isinstance(value, PluginsConfig) else PluginsConfig(inline=tuple(value))


@frozen(kw_only=True)
class ObservabilityConfig:
    """Measurement and logging."""

    profile: bool = field(default=False, metadata=_doc("time the parts of each step"))
    count_nans: bool = field(
        default=False, metadata=_doc("count NaN logits of each request, or NaNs in its embedding or class scores")
    )
    check_integrity: bool = field(
        default=False,
        metadata=_doc(
            "check rows, blocks and references after each step, and the writes of attention and state backends in it"
        ),
    )
    progress: bool = field(default=True, metadata=_doc("show a progress bar on long work"))


@frozen(kw_only=True)
class ServerConfig:
    """The HTTP server of `slotline serve`. Nothing else reads this table."""

    host: str = field(default="127.0.0.1", metadata=_doc("address to listen on; '0.0.0.0' for every network"))
    port: int = field(default=8000, validator=AtLeast(0, maximum=65535), metadata=_doc("0 takes a free one"))
    socket: str = field(
        default="", metadata=_doc("a Unix socket to listen on in place of an address and a port", path=True)
    )
    served_model_name: str | tuple[str, ...] = field(
        default=(), metadata=_doc("names of the model in requests; empty for the name or path of `model`")
    )
    api_keys: str = field(
        default="",
        metadata=_doc(
            "a file with a key a line, one of which each request must have; the variable SLOTLINE_API_KEY adds one; "
            "without either no key is asked for",
            path=True,
        ),
    )
    admin_keys: str = field(
        default="",
        metadata=_doc(
            "a file with a key a line for requests that change the server, such as loading an adapter; the variable "
            "SLOTLINE_ADMIN_KEY adds one; without either they are refused",
            path=True,
        ),
    )
    cors_origins: tuple[str, ...] = field(
        default=(), metadata=_doc("origins whose pages may call the server; '*' for all")
    )
    page: bool = field(default=True, metadata=_doc("show the page of `GET /`, with a chat and a view of the engine"))
    max_body: str = field(default="16MiB", validator=size, metadata=_doc("largest body of a request"))
    max_unfinished: int = field(
        default=1024, validator=positive, metadata=_doc("prompts at a time, waiting ones included; more get status 429")
    )
    request_timeout: float = field(
        default=0.0, validator=at_least(0), metadata=_doc("seconds after which a request is aborted; 0 for none")
    )
    drain_timeout: float = field(
        default=30.0, validator=at_least(0), metadata=_doc("seconds that requests have to finish after SIGTERM")
    )
    access_log: bool = field(default=True, metadata=_doc("log a line of JSON for each request, without its texts"))
    log_prompts: bool = field(default=False, metadata=_doc("put the texts of prompts into the access log"))
    log_prompts_limit: int = field(
        default=1000, validator=positive, metadata=_doc("characters of a request's prompts in the log; the rest is cut")
    )
    otlp_endpoint: str = field(
        default="",
        metadata=_doc(
            "URL of an OpenTelemetry collector that gets a trace of each request over HTTP, as "
            "'http://127.0.0.1:4318'; empty for that of the variable OTEL_EXPORTER_OTLP_ENDPOINT, or none"
        ),
    )
    profile_folder: str = field(
        default="",
        metadata=_doc(
            "folder for the traces of POST /profile/start and /profile/stop, which need an admin key; empty for none",
            path=True,
        ),
    )
    trusted_proxies: tuple[str, ...] = field(
        default=(), metadata=_doc("addresses of proxies whose X-Forwarded headers are believed")
    )
    root_path: str = field(default="", metadata=_doc("path under which a proxy shows the server"))
    ssl_certfile: str = field(default="", metadata=_doc("certificate for TLS; empty for none", path=True))
    ssl_keyfile: str = field(default="", metadata=_doc("its private key", path=True))


@frozen(kw_only=True)
class Config:
    """Settings of the whole file."""

    config_version: int = field(
        default=CONFIG_VERSION, validator=version_is(CONFIG_VERSION), metadata=_doc("version of this format")
    )
    model: str = field(
        default="",
        metadata=_doc(
            "a local Hugging Face folder or GGUF file, or the name of a model on the Hugging Face Hub, as 'org/name'; "
            "empty for the small model that ships",
            path=True,
        ),
    )
    revision: str = field(
        default="",
        metadata=_doc("branch, tag or commit of a model on the Hugging Face Hub; empty for its main branch"),
    )
    task: Literal["auto", "generate", "embed", "classify", "token_classify"] = field(
        default="auto",
        metadata=_doc(
            "output of requests: text, an embedding, or class scores of a text or of each token; 'auto' is the model's "
            "own"
        ),
    )
    tokenizer: str = field(default="", metadata=_doc("a local folder; empty for the model's own", path=True))
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata=_doc("dtype of weights and activations")
    )
    device: str = field(
        default="auto",
        metadata=_doc("'auto', or a device plugin's name: 'cpu', 'cuda' or 'cuda:N'; see `parallel` for several"),
    )
    optimize: bool = field(
        default=True, metadata=_doc("run the optimising passes over the model; false keeps transformers' modules")
    )
    prompt_embeds: bool = field(
        default=False, metadata=_doc("take prompts that are embeddings, as `prompt_embeds` of a prompt or over HTTP")
    )
    batch_invariant: bool = field(
        default=False,
        metadata=_doc(
            "a request's log-probabilities are bitwise the same in any batch; slower, and refused if a part does not "
            "support it"
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
    compile: CompileConfig = field(factory=CompileConfig)
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    multimodal: MultimodalConfig = field(factory=MultimodalConfig)
    parallel: ParallelConfig = field(factory=ParallelConfig)
    load: LoadConfig = field(factory=LoadConfig)
    weights: WeightsConfig = field(factory=WeightsConfig)
    sampling: SamplingConfig = field(factory=SamplingConfig)
    drafter: DrafterConfig = field(factory=DrafterConfig)
    lora: LoraConfig = field(factory=LoraConfig)
    structured_output: StructuredOutputConfig = field(factory=StructuredOutputConfig)
    response_parser: ResponseParserConfig = field(factory=ResponseParserConfig)
    observability: ObservabilityConfig = field(factory=ObservabilityConfig)
    server: ServerConfig = field(factory=ServerConfig)
    logits_processors: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each logits processor: names it and configures it")
    )
    extensions: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each step extension: names it and configures it")
    )
    backend: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each attention or state backend's own options")
    )
    kv_spec: Mapping[str, Any] = field(factory=dict, metadata=_doc("one table for each cache spec's own options"))
    model_family: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each model family's own options")
    )
    devices: Mapping[str, Any] = field(factory=dict, metadata=_doc("one table for each device plugin's own options"))
    linear: Mapping[str, Any] = field(factory=dict, metadata=_doc("one table for each linear plugin's own options"))
    experts: Mapping[str, Any] = field(factory=dict, metadata=_doc("one table for each experts plugin's own options"))
    weight_format: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each weight format's own options")
    )
    communicator: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each communicator's own options")
    )
    expert_placement: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each expert placement's own options")
    )
    scheduler_policy: Mapping[str, Any] = field(
        factory=dict, metadata=_doc("one table for each scheduler policy's own options")
    )
