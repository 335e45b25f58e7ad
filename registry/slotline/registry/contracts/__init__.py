"""Contracts, version 1 of each kind: one module per kind, each with capabilities, build context and protocol."""

from slotline.registry.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    CascadeBackend,
    KVCache,
    KVScales,
)
from slotline.registry.contracts.drafter import Draft, DraftBatch, Drafter, DrafterCapabilities, DrafterContext
from slotline.registry.contracts.kv_spec import BlockHash, KVSpec, KVSpecCapabilities, KVSpecContext
from slotline.registry.contracts.logits_processor import (
    LogitsBatch,
    LogitsProcessor,
    LogitsProcessorCapabilities,
    LogitsProcessorContext,
)
from slotline.registry.contracts.lora import Lora, LoraCapabilities, LoraContext
from slotline.registry.contracts.model_family import (
    Modality,
    Model,
    ModelContext,
    ModelFacts,
    ModelFamily,
    ModelFamilyCapabilities,
    ModelParts,
    MultimodalModel,
    ProcessedItem,
    Stage,
)
from slotline.registry.contracts.pooling import POOLING_TASKS, Pooler, PoolingMethod, PoolingParams
from slotline.registry.contracts.state import (
    StateBackend,
    StateBatch,
    StateCapabilities,
    StateContext,
    StateLayer,
    StateTensorSpec,
)

__all__ = [
    "POOLING_TASKS",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionCapabilities",
    "AttentionContext",
    "AttentionLayer",
    "BlockHash",
    "CascadeBackend",
    "Draft",
    "DraftBatch",
    "Drafter",
    "DrafterCapabilities",
    "DrafterContext",
    "KVCache",
    "KVScales",
    "KVSpec",
    "KVSpecCapabilities",
    "KVSpecContext",
    "LogitsBatch",
    "LogitsProcessor",
    "LogitsProcessorCapabilities",
    "LogitsProcessorContext",
    "Lora",
    "LoraCapabilities",
    "LoraContext",
    "Modality",
    "Model",
    "ModelContext",
    "ModelFacts",
    "ModelFamily",
    "ModelFamilyCapabilities",
    "ModelParts",
    "MultimodalModel",
    "Pooler",
    "PoolingMethod",
    "PoolingParams",
    "ProcessedItem",
    "Stage",
    "StateBackend",
    "StateBatch",
    "StateCapabilities",
    "StateContext",
    "StateLayer",
    "StateTensorSpec",
]
