"""Descriptors: frozen data about a plugin that can be read without importing torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar

from attrs import Factory, field, frozen

from slotline.registry.capability import AnyOf, Flag
from slotline.registry.declared import declared
from slotline.registry.errors import ContractError

C = TypeVar("C")


class Kind(StrEnum):
    """Slots that a plugin can fill. Each has an entry-point group `slotline.<kind>`."""

    ATTENTION = "attention"
    STATE = "state"
    KV_SPEC = "kv_spec"
    KV_CONNECTOR = "kv_connector"
    DRAFTER = "drafter"
    LOGITS_PROCESSOR = "logits_processor"
    LORA = "lora"
    MODEL_FAMILY = "model_family"
    STRUCTURED_OUTPUT = "structured_output"
    RESPONSE_PARSER = "response_parser"
    DEVICE = "device"
    EXTENSION = "extension"
    LINEAR = "linear"
    EXPERTS = "experts"
    WEIGHT_FORMAT = "weight_format"
    COMMUNICATOR = "communicator"
    EXPERT_PLACEMENT = "expert_placement"
    SCHEDULER_POLICY = "scheduler_policy"

    @property
    def entry_point_group(self) -> str:
        """Name of the slot's entry-point group."""
        return f"slotline.{self.value}"

    @property
    def hook(self) -> str:
        """Name of the slot's hook in `slotline.registry.hookspecs`."""
        return f"slotline_{self.value}"


def _kind(value: Any) -> Kind:
    try:
        return Kind(value)
    except ValueError as error:
        kinds = ", ".join(kind.value for kind in Kind)
        raise ContractError(f"Descriptor.kind is {value!r:.60}, expected one of {kinds}", fix="correct kind") from error


@frozen(field_transformer=declared)
class ContractRange:
    """Range of supported contract versions, both ends included."""

    lowest: int = field()
    highest: int = field()

    @highest.validator
    def _ordered(self, _attribute: object, value: int) -> None:
        if not 1 <= self.lowest <= value:
            raise ValueError(f"contract range {self.lowest}..{value} must satisfy 1 <= lowest <= highest")

    def common(self, other: ContractRange) -> int | None:
        """Return the highest version that both sides support, or None."""
        version = min(self.highest, other.highest)
        return version if version >= max(self.lowest, other.lowest) else None

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest}..{self.highest}"


HOST_CONTRACTS: dict[Kind, ContractRange] = {kind: ContractRange(1, 1) for kind in Kind}
"""The versions that this slotline speaks, by kind."""


@frozen(kw_only=True, eq=False, field_transformer=declared)
class Descriptor(Generic[C]):
    """Name, capabilities and factory of one plugin.

    Attributes:
        kind: the slot it fills.
        name: the name used in configuration files, unique within its kind.
        capabilities: the offer, a frozen attrs class of `slotline.registry.contracts` for this kind.
        factory: called with the kind's build context, returns the built object. It is called once per engine. For a
            cache spec and a backend it is called once for each group of layers, for a backend also once for each
            pipeline stage. Either a callable or a dotted path ``"package.module:attribute"``, which is imported only
            when the plugin is built.
        contract: the contract versions that the plugin supports.
        options: a frozen attrs class (or its dotted path) for the plugin's own configuration table.
        probe: optional callable or dotted path. It gets a `DeviceInfo` and returns capabilities no wider than these, or
            a string with the reason why the plugin cannot run there. It runs before negotiation, on the real machine.
        summary: one line for tables.
    """

    kind: Kind = field(converter=_kind)
    name: str = field()
    capabilities: C
    factory: Any
    contract: ContractRange = ContractRange(1, 1)
    options: Any = None
    probe: Any = field(default=None)
    summary: str = ""

    @name.validator
    def _plain(self, _attribute: object, value: str) -> None:
        if not value or not value.replace("_", "a").replace("-", "a").isalnum():
            raise ValueError(f"plugin name {value!r}: use letters, digits, '_' and '-' only")

    @probe.validator
    def _callable_or_path(self, _attribute: object, value: Any) -> None:
        if value is not None and not isinstance(value, str) and not callable(value):
            raise ContractError(
                f"Descriptor.probe is {value!r:.60}, expected a function or its path",
                fix="write probe='module:function'",
            )


@frozen(kw_only=True)
class DeviceInfo:
    """Device that a plan is made for.

    Attributes:
        type: name of the device plugin, as `cpu` or `cuda`.
        name: the marketing name.
        compute_capability: (major, minor) on CUDA, else None.
        features: instruction sets and similar features, e.g. `avx512_bf16`.
        total_memory: bytes.
        cores: processor cores (CPU) or multiprocessors (CUDA).
        graphs: captured launches can be replayed; the default is that of contract 1, CUDA only.
        compatible_with: names of other devices whose plugins run here as well.
    """

    type: str
    name: str = ""
    compute_capability: tuple[int, int] | None = None
    features: frozenset[str] = frozenset()
    total_memory: int = 0
    cores: int = 1
    graphs: Flag = Factory(lambda self: Flag(self.type == "cuda"), takes_self=True)
    compatible_with: tuple[str, ...] = ()

    @property
    def need(self) -> str | AnyOf:
        """Value that a plugin's `devices` must cover."""
        return AnyOf((self.type, *self.compatible_with)) if self.compatible_with else self.type
