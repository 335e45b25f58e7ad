"""Hook specifications: every slot of slotline, and the hooks for policy and observation.

A package fills slots in one of two ways.

* **Hook implementations**, for a package with several plugins. One entry point of group ``slotline`` names a module
  that implements the hooks below::

      # pyproject.toml
      [project.entry-points.slotline]
      acme = "acme.hooks"

      # acme/hooks.py
      from slotline.registry import hookimpl

      @hookimpl
      def slotline_attention():
          from acme.paged import descriptor
          return [descriptor]

* **One descriptor by its slot's group**, for a single plugin. Its name is known without an import, and the registry
  makes the hook implementation for it::

      [project.entry-points."slotline.attention"]
      acme_paged = "acme.paged:descriptor"

A slot's hook returns descriptors. A descriptor says what the plugin can do and where its factory lives, and the factory
is called with the slot's context when an engine is built. Planning and building call hooks. No hook is called between
two steps.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pluggy
from attrs import frozen

if TYPE_CHECKING:
    from slotline.registry.config.schema import Config
    from slotline.registry.contracts import (
        AttentionCapabilities,
        CommunicatorCapabilities,
        DeviceCapabilities,
        DrafterCapabilities,
        ExpertPlacementCapabilities,
        ExpertsCapabilities,
        ExtensionCapabilities,
        KVConnectorCapabilities,
        KVSpecCapabilities,
        LinearCapabilities,
        LogitsProcessorCapabilities,
        LoraCapabilities,
        ModelFamilyCapabilities,
        ResponseParserCapabilities,
        SchedulerPolicyCapabilities,
        StateCapabilities,
        StructuredOutputCapabilities,
        WeightFormatCapabilities,
    )
    from slotline.registry.descriptor import Descriptor, DeviceInfo
    from slotline.registry.negotiation import Plan, PlanRequest

PROJECT = "slotline"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Registrar(Protocol):
    """Receiver of the descriptors that `slotline_register` offers."""

    def add(self, descriptor: Descriptor[Any]) -> None:
        """Offer a plugin."""
        ...


@frozen
class PlanNote:
    """A reviewer's remark on a plan. A veto refuses the plan."""

    text: str
    veto: bool = False


# Slots


@hookspec
def slotline_attention() -> Iterable[Descriptor[AttentionCapabilities]]:
    """Offer attention backends: kernels that write the KV cache and attend to it.

    The factory gets an `AttentionContext` and returns an `AttentionBackend`, once for each attention group of a plan
    and pipeline stage. Contract 1, `slotline.registry.contracts.attention`.
    """


@hookspec
def slotline_state() -> Iterable[Descriptor[StateCapabilities]]:
    """Offer state backends: kernels of layers that keep a state (Mamba, linear attention, short convolutions).

    The factory gets a `StateContext` and returns a `StateBackend`, once for each group of state layers. Contract 1,
    `slotline.registry.contracts.state`.
    """


@hookspec
def slotline_kv_spec() -> Iterable[Descriptor[KVSpecCapabilities]]:
    """Offer KV-cache specs: which blocks of a layer are kept, shared and freed (full, sliding, chunked, latent).

    The factory gets a `KVSpecContext` and returns a `KVSpec`, once for each cache group of a plan. Contract 1,
    `slotline.registry.contracts.kv_spec`.
    """


@hookspec
def slotline_kv_connector() -> Iterable[Descriptor[KVConnectorCapabilities]]:
    """Offer KV connectors: stores that blocks are saved to and loaded from.

    The factory gets a `KVConnectorContext` and returns a `KVConnector`, once for each engine. Contract 1,
    `slotline.registry.contracts.kv_connector`.
    """


@hookspec
def slotline_drafter() -> Iterable[Descriptor[DrafterCapabilities]]:
    """Offer drafters for speculative decoding (n-gram, EAGLE, Medusa, draft models).

    The factory gets a `DrafterContext` and returns a `Drafter`, once for each engine. Contract 1,
    `slotline.registry.contracts.drafter`.
    """


@hookspec
def slotline_logits_processor() -> Iterable[Descriptor[LogitsProcessorCapabilities]]:
    """Offer logits processors.

    The factory gets a `LogitsProcessorContext` and returns a `LogitsProcessor`, once for each engine. Contract 1,
    `slotline.registry.contracts.logits_processor`.
    """


@hookspec
def slotline_lora() -> Iterable[Descriptor[LoraCapabilities]]:
    """Offer LoRA backends: products with the adapters of a mixed batch.

    The factory gets a `LoraContext` and returns a `Lora`, once for each engine with adapters. Contract 1,
    `slotline.registry.contracts.lora`.
    """


@hookspec
def slotline_model_family() -> Iterable[Descriptor[ModelFamilyCapabilities]]:
    """Offer model families: the architectures that run, how they are inspected and their forward pass.

    The factory takes no argument and returns a `ModelFamily`, once for each plan. Contract 1,
    `slotline.registry.contracts.model_family`.
    """


@hookspec
def slotline_structured_output() -> Iterable[Descriptor[StructuredOutputCapabilities]]:
    """Offer grammar compilers for structured output.

    The factory gets a `StructuredOutputContext` and returns a `StructuredOutput`, once for each engine that samples
    tokens. Contract 1, `slotline.registry.contracts.structured_output`.
    """


@hookspec
def slotline_response_parser() -> Iterable[Descriptor[ResponseParserCapabilities]]:
    """Offer response parsers: what the text of an answer means as reasoning, content and tool calls.

    The factory gets a `ResponseParserContext` and returns a `ResponseParser`, once for each engine that generates text.
    Contract 1, `slotline.registry.contracts.response_parser`.
    """


@hookspec
def slotline_device() -> Iterable[Descriptor[DeviceCapabilities]]:
    """Offer devices: where tensors live, their memory, transfers, graphs and the operations of a step.

    The factory has a method `count()`, the devices that the machine has. It gets a `DeviceContext` and returns a
    `Device`, once for each device of a plan. Contract 1, `slotline.registry.contracts.device`.
    """


@hookspec
def slotline_extension() -> Iterable[Descriptor[ExtensionCapabilities]]:
    """Offer step extensions: features that take part in a step.

    The factory gets an `ExtensionContext` and returns an object with any methods of `StepExtension`, once for each
    engine. Contract 1, `slotline.registry.contracts.extension`.
    """


@hookspec
def slotline_communicator() -> Iterable[Descriptor[CommunicatorCapabilities]]:
    """Offer communicators: collectives among the ranks of an engine.

    The factory gets a `CommunicatorContext` and returns a `Communicator`, on every rank once for each group.
    Contract 1, `slotline.registry.contracts.communicator`.
    """


@hookspec
def slotline_expert_placement() -> Iterable[Descriptor[ExpertPlacementCapabilities]]:
    """Offer expert placements: which rank has which experts of a mixture.

    The factory gets an `ExpertPlacementContext` and returns an `ExpertPlacement`, once for each engine. Contract 1,
    `slotline.registry.contracts.expert_placement`.
    """


@hookspec
def slotline_scheduler_policy() -> Iterable[Descriptor[SchedulerPolicyCapabilities]]:
    """Offer scheduler policies: the order of requests, who gives way, and how much a step takes.

    The factory gets a `SchedulerPolicyContext` and returns a `SchedulerPolicy`, once for each engine. Contract 1,
    `slotline.registry.contracts.scheduler_policy`.
    """


@hookspec
def slotline_weight_format() -> Iterable[Descriptor[WeightFormatCapabilities]]:
    """Offer weight formats: readers of quantized checkpoints, and quantizers of plain ones at load.

    The factory gets a `WeightFormatContext` and returns a `WeightFormat`, once for each plan. Contract 1,
    `slotline.registry.contracts.weight_format`.
    """


@hookspec
def slotline_linear() -> Iterable[Descriptor[LinearCapabilities]]:
    """Offer linear plugins: products with quantized weights.

    The factory gets a `LinearContext` and returns a `Linear`, once for each group of modules of one scheme and size.
    Contract 1, `slotline.registry.contracts.linear`.
    """


@hookspec
def slotline_experts() -> Iterable[Descriptor[ExpertsCapabilities]]:
    """Offer experts plugins: mixtures of experts with quantized weights.

    The factory gets an `ExpertsContext` and returns an `Experts`, once for each group of layers of one scheme and size.
    Contract 1, `slotline.registry.contracts.experts`.
    """


# Policy and observation


@hookspec
def slotline_register(registrar: Registrar) -> None:
    """Offer plugins of any slot by calling `registrar.add(descriptor)`.

    Plugins of contract 1 use it. New ones implement their slots' hooks.
    """


@hookspec
def slotline_rank_candidates(
    kind: str, group: str, candidates: Sequence[str], device: DeviceInfo
) -> Sequence[str] | None:
    """Reorder the candidates that fit, best first.

    The order ranks right after an order in the configuration, and before measurements, graphs and priorities.
    Candidates that are missing in the answer follow in their usual order. The first plugin by name that returns an
    order decides.

    Args:
        kind: the slot, `attention` or `state`.
        group: the group of layers, as in `slotline explain`.
        candidates: names of the plugins that can serve the group.
        device: the device that is planned for.

    Returns:
        Names out of `candidates`, or None to keep the order.
    """


@hookspec
def slotline_review_plan(plan: Plan, request: PlanRequest) -> Sequence[PlanNote] | None:
    """Look at a finished plan and return notes on it. A note with a veto refuses the plan."""


@hookspec
def slotline_engine_built(engine: Any) -> None:
    """Look at an engine that has just been built. It has not run a step yet, and it must not be changed."""


@hookspec
def slotline_report_header(config: Config) -> str | Sequence[str] | None:
    """Return lines for the head of a report of `slotline explain`, `doctor`, `bench` or `conform`."""
