"""What Acme brings to slotline. Descriptors alone: nothing here imports torch."""

from __future__ import annotations

from slotline.registry import Align, Choice, ContractRange, Descriptor, Flag, Kind, Max, Range, Set
from slotline.registry.contracts import (
    AttentionCapabilities,
    CommunicatorCapabilities,
    DrafterCapabilities,
    ExtensionCapabilities,
    KVConnectorCapabilities,
    KVSpecCapabilities,
    LinearCapabilities,
    LogitsProcessorCapabilities,
    ResponseParserCapabilities,
)

paged = Descriptor(
    kind=Kind.ATTENTION,
    name="acme_paged",
    contract=ContractRange(1, 1),
    capabilities=AttentionCapabilities(
        devices=Set(("cpu",)),
        dtypes=Set((("float32", "float32"), ("bfloat16", "bfloat16"))),
        head_sizes=Range(8, 256, 8),
        kernel_block_sizes=Align(exact=(48,)),
        layouts=Choice(("HND",)),
    ),
    factory="acme_slotline.paged:PagedAttention",
    summary="pages of 48 tokens, heads first, a padded batch at once",
)

full = Descriptor(
    kind=Kind.KV_SPEC,
    name="acme_full",
    contract=ContractRange(1, 1),
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(("full",)), exact_kinds=Set(("full",)), block_sizes=Align(multiple_of=48), priority=-1
    ),
    factory="acme_slotline.full:FullCache",
    summary="all keys of a layer, then all values; blocks of multiples of 48 tokens",
)

repeat = Descriptor(
    kind=Kind.DRAFTER,
    name="acme_repeat",
    contract=ContractRange(1, 1),
    capabilities=DrafterCapabilities(devices=Set(("cpu",)), needs_history=True),
    factory="acme_slotline.repeat:RepeatDrafter",
    summary="what followed the newest token when it last came up",
)

blocks = Descriptor(
    kind=Kind.DRAFTER,
    name="acme_blocks",
    contract=ContractRange(1, 1),
    capabilities=DrafterCapabilities(
        devices=Set(("cpu",)),
        max_tokens=Max(8),
        needs_layers=True,
        needs_computed=True,
        needs_kv_group=True,
        needs_checkpoint=True,
        block_attention="full",
        on_device=True,
    ),
    factory="acme_slotline.blocks:BlockDrafter",
    summary="block diffusion: masks that become tokens in two passes",
)

ban = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="acme_ban",
    contract=ContractRange(1, 1),
    capabilities=LogitsProcessorCapabilities(
        parameters=("acme_ban",),
        speculation=Flag(True, "looks at no history"),
        order=90,
        examples=({"acme_ban": [3]}, {"acme_ban": [0, 5, 31]}),
        bad_examples=({"acme_ban": 3}, {"acme_ban": [-1]}, {"acme_ban": ["a"]}),
    ),
    factory="acme_slotline.ban:BanTokens",
    options="acme_slotline.options:BanOptions",
    summary="keeps tokens out: those of the configuration, and those that a request names",
)

rate = Descriptor(
    kind=Kind.EXTENSION,
    name="acme_rate",
    contract=ContractRange(1, 1),
    capabilities=ExtensionCapabilities(
        parameters=("acme_tokens_per_second",), provides=("token_rate",), excludes=("drafts", "pooling")
    ),
    factory="acme_slotline.rate:TokenRate",
    options="acme_slotline.options:RateOptions",
    summary="at most so many new tokens of a request for each second of wall time",
)

codes = Descriptor(
    kind=Kind.LINEAR,
    name="acme_codes",
    contract=ContractRange(1, 1),
    capabilities=LinearCapabilities(
        devices=Set(("cpu", "cuda")),
        dtypes=Set(("float32", "bfloat16", "float16")),
        schemes=Set(("int8", "int4")),
        granularities=Set(("channel", "group")),
        priority=-20,
    ),
    factory="acme_slotline.codes:CodeLinear",
    summary="int8 and int4: a group of inputs is added up before it meets its scale",
)

wire = Descriptor(
    kind=Kind.COMMUNICATOR,
    name="acme_wire",
    contract=ContractRange(1, 1),
    capabilities=CommunicatorCapabilities(
        devices=Set(("cpu",)),
        dtypes=Set(("float32", "bfloat16", "float16")),
        batch_invariant=Flag(True),
        priority=-20,
    ),
    factory="acme_slotline.wire:Wire",
    summary="a socket between each two ranks, and sums in order of the ranks",
)

fences = Descriptor(
    kind=Kind.RESPONSE_PARSER,
    name="acme_fences",
    contract=ContractRange(1, 1),
    capabilities=ResponseParserCapabilities(evidence=(("```call ",),), reasoning=False),
    factory="acme_slotline.fences:FenceParser",
    summary="calls in fences: a line ```call NAME, the arguments, a line ```",
)

zip = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="acme_zip",
    contract=ContractRange(1, 1),
    capabilities=KVConnectorCapabilities(devices=Set(("cpu",)), counts=Flag(True), spills=Flag(True)),
    factory="acme_slotline.zip:ZippedBlocks",
    options="acme_slotline.options:ZipOptions",
    summary="compressed blocks in host memory, each with a checksum",
)
