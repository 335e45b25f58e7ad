"""Stable codes of negotiation, as data. docs/generate.py makes the page of codes.

A code keeps its meaning forever: a removed rule leaves a gap, and a new rule gets a new number.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from attrs import frozen


class Severity(Enum):
    """Effect of a code on a plan."""

    REJECTION = "rejection"  # excludes one candidate from one group
    DOWNGRADE = "downgrade"  # the plan differs from the request or the usual plan, an error under strict
    NOTE = "note"  # information without a cost, never an error
    WARNING = "warning"  # deserves attention, does not change the plan
    ERROR = "error"  # no plan


@frozen(kw_only=True)
class Code:
    """Stable code with a title for tables, an explanation, and a fix."""

    name: str
    severity: Severity
    title: str
    explanation: str
    fix: str


def _code(name: str, severity: Severity, title: str, explanation: str, fix: str) -> Code:
    return Code(name=name, severity=severity, title=title, explanation=explanation, fix=fix)


_R, _D, _N, _W, _E = (
    Severity.REJECTION,
    Severity.DOWNGRADE,
    Severity.NOTE,
    Severity.WARNING,
    Severity.ERROR,
)

_ALL = (
    # --- the plugin cannot be used at all
    _code(
        "N001",
        _R,
        "not installed",
        "A name was asked for that no installed or inline plugin has.",
        "Install the distribution that offers it, or correct the name; `slotline plugins` lists what there is.",
    ),
    _code(
        "N002",
        _R,
        "failed to load",
        "The plugin's module raised an error when it was imported. If nobody named the plugin the plan goes "
        "on without it, but strict mode treats it as an error, because an environment that was meant to have "
        "the plugin is broken.",
        "Read the error's first line; repair or uninstall the distribution, or block the name.",
    ),
    _code(
        "N003",
        _R,
        "contract version",
        "The plugin and this slotline have no contract version in common.",
        "Upgrade the older of the two.",
    ),
    _code(
        "N004",
        _R,
        "blocked",
        "The rules in `plugins` keep this name from loading.",
        "Take the name off `plugins.block`, or put it on `plugins.allow`.",
    ),
    _code(
        "N005",
        _R,
        "probe refused",
        "The plugin looked at this machine and said that it cannot run here.",
        "Read the plugin's own reason: usually a missing library, driver or instruction set.",
    ),
    # --- the machine
    _code(
        "N101",
        _R,
        "device type",
        "The backend does not run on this type of device.",
        "Choose a backend for this device, or another `device`.",
    ),
    _code(
        "N102",
        _R,
        "compute capability",
        "The GPU is older than the backend's kernels require.",
        "Choose another backend, or run on a newer GPU.",
    ),
    # --- the model
    _code(
        "N110",
        _R,
        "cache kind",
        "The cache spec cannot hold layers of this kind.",
        "Install a kv_spec plugin for the kind, or name another in `cache.kv_spec`.",
    ),
    _code(
        "N111",
        _R,
        "attention type",
        "The backend lacks the layer's type: decoder, encoder-only or cross attention.",
        "Choose another backend for the layers' kind with a table in `attention.backend`.",
    ),
    _code(
        "N120",
        _R,
        "dtype pair",
        "The backend lacks this pair of compute and cache element types. Pairs are compared, because a "
        "backend may have both types and still lack their combination.",
        "Set `dtype` or `cache.dtype` to a pair that it offers, or choose another backend.",
    ),
    _code(
        "N121",
        _R,
        "cache scales",
        "The eight-bit cache has scales, from the checkpoint or to be calculated, and the backend takes every "
        "scale for 1.",
        "Choose another backend or cache dtype, or drop `cache.calculate_kv_scales` where that asks for them.",
    ),
    _code(
        "N122",
        _R,
        "cache format",
        "The cache spec does not lay out, or the backend does not read and write, the format of the cache: plain keys "
        "and values, or tensors such as int8 codes with their scales. `cache.dtype` or the named cache spec decides "
        "the format.",
        "Choose a cache spec and a backend that both declare the format, or another `cache.dtype`.",
    ),
    _code(
        "N130",
        _R,
        "head size",
        "The backend's kernels do not cover the size of a query and key head.",
        "Choose another backend.",
    ),
    _code(
        "N131",
        _R,
        "value head size",
        "Value heads differ in size from key heads, and the backend needs them equal.",
        "Choose another backend.",
    ),
    _code(
        "N132",
        _R,
        "group size",
        "The backend's kernels do not cover the number of query heads per KV head.",
        "Choose another backend.",
    ),
    # --- blocks and layout
    _code(
        "N140",
        _R,
        "kernel block size",
        "No block size that the backend's kernels accept divides the block size that was asked for. A kernel "
        "block must equal the manager's block or divide it.",
        "Set `cache.block_size` to a multiple of a size that the backend offers, or leave it on 'auto'.",
    ),
    _code(
        "N141",
        _R,
        "manager block size",
        "The cache spec does not accept the block size that was asked for.",
        "Set `cache.block_size` to a size that it offers, or leave it on 'auto'.",
    ),
    _code(
        "N142",
        _R,
        "prefix caching",
        "Prefix caching was asked for, and the cache spec cannot share blocks.",
        "Set `cache.prefix_caching = false`, or choose another spec.",
    ),
    _code(
        "N145",
        _R,
        "nothing in common with the other groups",
        "The candidate fits its group, but no block size and layout suits it together with what the groups "
        "that share its block table or pool can take.",
        "Choose backends whose sizes meet, or put the layers into another cache group with `cache.kv_spec`.",
    ),
    _code(
        "N150",
        _R,
        "layout",
        "The backend cannot read pages in the order that was asked for.",
        "Leave `attention.layout` on 'auto', or choose another backend.",
    ),
    # --- features
    _code(
        "N160",
        _R,
        "query length",
        "A request can bring more query tokens in one step than the backend takes: through speculation (1 + "
        "draft tokens) or through prefill.",
        "Propose fewer draft tokens, lower `scheduler.max_batched_tokens`, or choose another backend.",
    ),
    _code(
        "N168",
        _R,
        "multi-head latent attention",
        "The model keeps one latent for all heads in place of keys and values, and the backend does not read such a "
        "cache.",
        "Choose a backend that serves it, such as `torch`.",
    ),
    _code(
        "N169",
        _R,
        "chunked attention",
        "The model attends within chunks of so many tokens, and the backend cannot leave out the chunks before.",
        "Choose a backend that can.",
    ),
    _code(
        "N170",
        _R,
        "sliding window",
        "Layers have a window and the backend cannot mask by it.",
        "Choose another backend for the sliding kind.",
    ),
    _code(
        "N171",
        _R,
        "soft cap",
        "Layers cap their scores with tanh and the backend does not.",
        "Choose another backend.",
    ),
    _code(
        "N172",
        _R,
        "sinks",
        "Layers have a learned sink logit per head and the backend cannot add it.",
        "Choose another backend.",
    ),
    _code(
        "N173",
        _R,
        "tree mask",
        "The drafter proposes a tree and the backend has causal masks only.",
        "Use a drafter that proposes a chain, or choose another backend.",
    ),
    _code(
        "N174",
        _R,
        "cascade",
        "`attention.cascade = true` insists on backends that serve a prefix which all requests share once for all; "
        "this one cannot.",
        "Set `attention.cascade` to 'auto' or false, or choose another backend.",
    ),
    _code(
        "N175",
        _R,
        "batch invariance",
        "Bitwise equal results in any batch were asked for; the backend or plugin does not promise them.",
        "Choose one that does, or give up the demand.",
    ),
    _code(
        "N176",
        _R,
        "log-sum-exp",
        "Partial results are to be merged and the backend cannot return its log-sum-exp.",
        "Choose another backend.",
    ),
    _code(
        "N179",
        _R,
        "another capability",
        "A plugin needs something of attention backends that has no code of its own.",
        "The reason names the capability and who needs it; choose another backend or do without that plugin.",
    ),
    _code(
        "N180",
        _R,
        "graph level",
        "Graphs of all batches were asked for by name, and the backend's forward can never be captured.",
        "Choose another backend, or set `graphs.mode` to 'auto'.",
    ),
    _code(
        "N181",
        _R,
        "ALiBi",
        "Layers lower their scores by the distance between query and key, each head by a slope of its own, and the "
        "backend does not.",
        "Choose a backend that does, such as `torch`.",
    ),
    _code(
        "N182",
        _R,
        "keys ahead",
        "Tokens of an image see all of that image, or those of a drafted block all of that block, also what comes "
        "after them, and the backend masks every later token.",
        "Choose a backend that serves it, such as `torch`.",
    ),
    _code(
        "N183",
        _R,
        "layer inputs",
        "The model hands its layers an input beside query, key and value, and the backend does not read one of that "
        "name.",
        "Choose a backend that declares it among its `layer_inputs`.",
    ),
    _code(
        "N184",
        _R,
        "exact attention",
        "The backend approximates, for instance by leaving keys out, and nobody has named or allowed it.",
        "Name it in `attention.backend`, or set `attention.approximate = true`.",
    ),
    _code(
        "N185",
        _R,
        "index top-k",
        "In longer texts the layers attend only to the keys that an index picks, and the backend attends to all.",
        "Choose a backend that declares `index_topk`, or set `scheduler.max_model_len` to what the index picks.",
    ),
    _code(
        "N186",
        _N,
        "edge of attention",
        "The model can leave a computation at the edges of attention to its backend, such as the rotation of queries "
        "and keys, and computes it itself.",
        "Nothing: texts are the same. The reason names the backend that does not take it over, or the setting.",
    ),
    _code(
        "N189",
        _R,
        "attention scores",
        "A plugin reads how much the last tokens of a prompt attend to each key, and the backend does not tell.",
        "Choose a backend that does, such as `torch`, or another method of the plugin.",
    ),
    # --- drafters, logits processors, state backends, LoRA
    _code(
        "N112",
        _R,
        "state kind",
        "The state backend does not serve layers of this kind.",
        "Install or name a state backend that lists the kind.",
    ),
    _code(
        "N161",
        _R,
        "draft length",
        "More draft tokens were asked for than the drafter proposes in a row.",
        "Lower `drafter.tokens`, or choose another drafter.",
    ),
    _code(
        "N162",
        _R,
        "draft positions",
        "The logits processor is not right at draft positions, and a drafter is configured.",
        "Do without the drafter or without the processor.",
    ),
    _code(
        "N177",
        _R,
        "rollback",
        "Drafts may be rejected, and the state backend cannot go back to the accepted position.",
        "Do without the drafter, or choose another state backend.",
    ),
    _code(
        "N178",
        _R,
        "checkpoints",
        "Prefix caching needs copies of a state, and the state backend cannot make them.",
        "Set `cache.prefix_caching = false`, or choose another state backend.",
    ),
    _code(
        "N133",
        _R,
        "target modules",
        "The LoRA plugin has no kernels for this kind of module.",
        "Use an adapter for other modules, or choose another LoRA plugin.",
    ),
    _code(
        "N134",
        _R,
        "adapter rank",
        "The rank is above what the LoRA plugin holds.",
        "Lower `lora.max_rank`, or choose another LoRA plugin.",
    ),
    _code(
        "N135",
        _R,
        "number of adapters",
        "More adapters at a time were asked for than the LoRA plugin holds.",
        "Lower `lora.max_adapters`, or choose another LoRA plugin.",
    ),
    _code(
        "N136",
        _R,
        "adapter variant",
        "The adapter is of a variant (rank-stabilised, DoRA) that the LoRA plugin does not do.",
        "Use a plain adapter, or choose another LoRA plugin.",
    ),
    # --- quantized weights
    _code(
        "N113",
        _R,
        "weight scheme",
        "The plugin has no product with weights of this scheme.",
        "Install or name a linear or experts plugin that lists the scheme.",
    ),
    _code(
        "N114",
        _R,
        "scales of a weight",
        "The plugin does not multiply by weights whose scales are shared in this way: per tensor, channel, block, or "
        "group of this many inputs.",
        "Name another plugin, or quantize with other groups.",
    ),
    _code(
        "N115",
        _R,
        "offsets or act order",
        "The weights have offsets or act order, and the plugin has no product for them.",
        "Name another plugin.",
    ),
    _code(
        "N116",
        _R,
        "sizes of a weight",
        "The plugin's product does not take weights of this number of inputs or outputs.",
        "Name another plugin.",
    ),
    _code(
        "N117",
        _R,
        "activation of experts",
        "The plugin does not compute the activation or the bias of these experts.",
        "Name another experts plugin.",
    ),
    _code(
        "N118",
        _R,
        "rounded activations",
        "The plugin rounds activations, and the checkpoint's scheme does not permit it.",
        "Name another plugin.",
    ),
    _code(
        "N119",
        _R,
        "number of ranks",
        "The communicator joins fewer ranks than were asked for, or the expert placement divides among fewer.",
        "Name another plugin, or ask for fewer ranks.",
    ),
    _code(
        "N126",
        _R,
        "redundant experts",
        "The expert placement does not place copies of experts.",
        "Name another one in `parallel.expert_placement`, or set `parallel.redundant_experts = 0`.",
    ),
    # --- choice
    _code(
        "N190",
        _R,
        "not asked for",
        "The configuration names other plugins for these layers.",
        "Name it in `attention.backend`, `state.backend` or `cache.kv_spec`, or leave the key on 'auto'.",
    ),
    _code(
        "N191",
        _R,
        "another was better",
        "The candidate could have run. The reason says which criterion decided: the order in the file, "
        "what was measured here, graphs, changes to what is usual, priority, or the name.",
        "Name it to have it.",
    ),
    # --- changes
    _code(
        "N301",
        _D,
        "block size changed",
        "The block size was left on 'auto' and the usual one does not suit what was chosen; the nearest size "
        "that does was taken. Larger blocks waste more memory at the end of each request and share shorter "
        "prefixes.",
        "Set the size that was taken to make it your own choice, or choose a backend that takes the usual one.",
    ),
    _code(
        "N302",
        _N,
        "blocks split for the kernel",
        "The manager's block is kept, and the kernel sees each as several smaller ones. The block table is "
        "expanded accordingly; nothing is lost.",
        "Nothing needs to be done.",
    ),
    _code(
        "N303",
        _D,
        "later choice taken",
        "The first names of the list in `attention.backend` could not be used, so a later one was.",
        "Read the reasons of the first; or name only what was taken.",
    ),
    _code(
        "N304",
        _N,
        "block sizes differ",
        "Cache groups share one pool, and a block is as many bytes in each of them. A group whose layers need fewer "
        "bytes for a token therefore has more tokens in a block; `explain` says how many, and how much is padding.",
        "Nothing needs to be done.",
    ),
    _code(
        "N305",
        _N,
        "preferred block size",
        "A chosen backend says which block sizes its kernels are fastest with for such layers. Where "
        "`cache.block_size` is 'auto' the nearest one that all groups can have is taken, unless another was measured "
        "to be faster; a size in the file stands. Larger blocks share shorter prefixes and waste more memory at the "
        "end of each request.",
        "Set `cache.block_size` to decide for yourself.",
    ),
    _code(
        "N306",
        _N,
        "architecture found by inspection",
        "The architecture is not on the family's list. Inspection found its attention and states, and a check "
        "compares it with transformers when it is loaded, unless its decoder is on the list. Of a model that also "
        "reads images or sound only the text part may be served.",
        "Nothing needs to be done.",
    ),
    _code(
        "N310",
        _D,
        "graphs cut back",
        "The graph mode cannot be had for every group and phase. A group that cannot be captured runs between "
        "graphs, and the other groups keep theirs.",
        "Choose backends with a higher graph level for the groups named, or ask for the mode that was reached.",
    ),
    _code(
        "N311",
        _D,
        "no graphs on this device",
        "Graphs were asked for on a device type that has none.",
        "Leave `graphs.mode` on 'auto'.",
    ),
    _code(
        "N312",
        _D,
        "forward not captured",
        "The model's forward pass cannot be captured in a graph, whichever backends serve its attention: it "
        "waits for the device on its way, or it runs over several devices.",
        'Set `graphs.mode = "none"` to make it your own choice, or take away the reason that is named.',
    ),
    _code(
        "N320",
        _D,
        "another dtype",
        "`dtype` was left on 'auto' and nothing runs in the model's own; a fallback was taken, which costs "
        "memory or precision.",
        "Set `dtype`, or choose a backend that has the model's.",
    ),
    _code(
        "N330",
        _D,
        "cache kind held with waste",
        "No plugin holds this kind of layer exactly, so a more general one does. Results are the same; "
        "sliding layers, for one, then keep blocks that nothing will read again.",
        "Install a spec for the kind, or name the general one in `cache.kv_spec` to accept the waste.",
    ),
    _code(
        "N331",
        _D,
        "no prefix caching",
        "Prefix caching is on unless switched off, and a cache spec that was chosen cannot share blocks, or the "
        "backend of layers that keep a state makes no checkpoints to go on from.",
        "Set `cache.prefix_caching = false`, or choose another spec or state backend.",
    ),
    _code(
        "N332",
        _D,
        "cache groups do not share memory",
        "A cache spec cannot have its pages lie apart, so a block takes memory in every group, and what the other "
        "groups have of it stays unused.",
        "Name specs that declare `page_stride` in `cache.kv_spec`, or one spec that holds all layers.",
    ),
    # --- warnings
    _code(
        "N401",
        _W,
        "table entry without layers",
        "A table in the file names a kind of layer that the model lacks, so the entry has no effect.",
        "Remove the entry, or correct the kind.",
    ),
    _code(
        "N402",
        _W,
        "unknown code in allow",
        "`allow` lists a code that does not exist, so it lets nothing pass.",
        "Correct the code.",
    ),
    _code(
        "N403",
        _W,
        "remark of a reviewer",
        "A plugin that reviews finished plans has something to say about this one.",
        "Read the remark; the plugin that made it is named.",
    ),
    # --- no plan
    _code(
        "N500",
        _E,
        "no plan",
        "No combination of plugins satisfies what was asked. The error lists, for every group, every "
        "candidate with all its reasons, and a smallest set of needs that cannot hold together.",
        "Give up one member of the set; those that suffice alone are marked, with what to set.",
    ),
    _code(
        "N501",
        _E,
        "conflict between choices",
        "Values that were set explicitly exclude each other; without any one of them the others could hold.",
        "Give up one of them.",
    ),
    _code(
        "N502",
        _E,
        "nothing offers it",
        "What the model or the device needs is offered by no candidate, whatever is set.",
        "Install a plugin that offers it.",
    ),
    _code(
        "N503",
        _E,
        "no common block size",
        "Each group has a backend, but those that share a block table have no kernel block size (or no "
        "layout) in common. The error lists every backend with its sizes.",
        "Choose backends whose sizes meet.",
    ),
    _code(
        "N510",
        _E,
        "strict",
        "A plan exists, but it differs from what was asked, and `strict = true` forbids that.",
        "Do what the notes say, or list their codes in `allow`.",
    ),
    _code(
        "N511",
        _E,
        "vetoed",
        "A plan exists, and a plugin that reviews finished plans refused it.",
        "Read its reason and change what it objects to, or block that plugin.",
    ),
)

CODES: Mapping[str, Code] = MappingProxyType({code.name: code for code in _ALL})
"""Every code by its name."""

CAPABILITY_CODES: Mapping[str, str] = MappingProxyType(
    {
        "devices": "N101",
        "min_compute_capability": "N102",
        "kv_kinds": "N110",
        "attention_types": "N111",
        "dtypes": "N120",
        "kv_scales": "N121",
        "formats": "N122",
        "cache_formats": "N122",
        "head_sizes": "N130",
        "different_value_head": "N131",
        "group_sizes": "N132",
        "kernel_block_sizes": "N140",
        "block_sizes": "N141",
        "prefix_caching": "N142",
        "layouts": "N150",
        "query_len": "N160",
        "sliding_window": "N170",
        "encoder_window": "N170",
        "soft_cap": "N171",
        "sinks": "N172",
        "alibi": "N181",
        "keys_ahead": "N182",
        "layer_inputs": "N183",
        "exact": "N184",
        "index_topk": "N185",
        "scores": "N189",
        "chunked": "N169",
        "mla": "N168",
        "latent_sizes": "N130",
        "tree_mask": "N173",
        "cascade": "N174",
        "batch_invariant": "N175",
        "lse": "N176",
        "graphs": "N180",
        "state_kinds": "N112",
        "target_modules": "N133",
        "embeddings": "N133",
        "max_rank": "N134",
        "max_adapters": "N135",
        "rslora": "N136",
        "dora": "N136",
        "max_tokens": "N161",
        "speculation": "N162",
        "rollback": "N177",
        "checkpoints": "N178",
        "schemes": "N113",
        "granularities": "N114",
        "scale_groups": "N114",
        "ragged": "N114",
        "offsets": "N115",
        "act_order": "N115",
        "split_order": "N115",
        "in_features": "N116",
        "out_features": "N116",
        "activations": "N117",
        "bias": "N117",
        "max_ranks": "N119",
        "redundant": "N126",
    }
)
"""Which code a refusal by a capability carries; N179 for those not listed."""


def code_of(capability: str) -> str:
    """Return the code of a refusal by a capability."""
    return CAPABILITY_CODES.get(capability, "N179")
