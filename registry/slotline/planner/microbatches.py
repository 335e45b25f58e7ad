"""Choice of microbatches: splitting a step's forward pass into pieces (`scheduler.microbatches`)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from attrs import evolve

from slotline.planner.experts import replicas_share_experts
from slotline.planner.offers import Offers
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Asked, Plan, PlanRequest, Setting

KEY = "scheduler.microbatches"


def choose_microbatches(
    loaded: LoadedConfig,
    facts: ModelFacts,
    *,
    task: str,
    drafter: Descriptor[Any] | None,
    lora: Descriptor[Any] | None,
    stages: int,
    family: Descriptor[Any],
) -> tuple[Setting, ...]:
    """Return the setting that records the request for microbatches. Empty if steps stay whole.

    Raises:
        NegotiationError: with every reason why steps must stay whole.
    """
    scheduler, origin = loaded.config.scheduler, loaded.origins[KEY].where
    if scheduler.microbatches == 1:
        return ()
    texts = []
    if task != "generate":
        texts.append(f"task {task!r} reads hidden states of whole prompts")
    if facts.state_layers:
        texts.append(f"{facts.architecture} keeps states, and a state is advanced once in a step")
    if any(layer.attention_type != "decoder" for layer in facts.layers):
        texts.append(f"{facts.architecture} has layers whose tokens see later ones, or an encoder's")
    if any(layer.keys_ahead for layer in facts.layers):
        texts.append(f"{facts.architecture} has images whose tokens see each other, and a piece might end inside one")
    if facts.layer_embeds:
        texts.append(f"{facts.architecture} adds embeddings behind its first layers, which are given for whole steps")
    if facts.position_axes > 1:
        texts.append(f"{facts.architecture} has positions on several axes, which are given for whole steps")
    if lora is not None:
        texts.append(f"lora.name = {lora.name!r}: adapters are planned for all tokens of a step")
    if drafter is not None and (drafter.capabilities.needs_computed or drafter.capabilities.needs_layers):
        texts.append(f"drafter {drafter.name!r} reads hidden states of whole steps")
    if drafter is not None and drafter.capabilities.tree.support:
        texts.append(f"drafter {drafter.name!r} proposes trees, and their masks are of whole steps")
    overlaps = replicas_share_experts(loaded)
    if overlaps and (refusal := family.capabilities.overlap.refusal(True)):
        texts.append(f"model family {family.name!r}: overlap {refusal}")
    if overlaps and loaded.config.cache.calculate_kv_scales:
        texts.append("cache.calculate_kv_scales = true: the step that gives scales is whole on one replica alone")
    if overlaps and find_spec("greenlet") is None:
        texts.append("replicas that share experts, without the package greenlet (pip install 'slotline[overlap]')")
    if texts:
        raise _refused(loaded, texts)
    use = "" if stages > 1 else "; without pipeline stages nothing overlaps"
    if overlaps:
        use = "; while tokens of one are on their way to experts, another one computes"
    return (
        Setting(
            key=KEY,
            asked=str(scheduler.microbatches),
            resolved=str(scheduler.microbatches),
            origin=f"{origin}; pieces of {scheduler.microbatch_tokens} tokens and more, replays stay whole{use}",
            explicit=True,
        ),
    )


def without_cascade(loaded: LoadedConfig, request: PlanRequest) -> PlanRequest:
    """Return the request without cascade attention if steps are split.

    Raises:
        NegotiationError: if cascade attention was asked for.
    """
    if loaded.config.scheduler.microbatches == 1 or request.cascade.value is False:
        return request
    if request.cascade.value is True:
        raise _refused(loaded, [f"attention.cascade = true ({request.cascade.origin})"])
    because = f"auto: {KEY} = {loaded.config.scheduler.microbatches}, and a common prefix is one of a whole step"
    return evolve(request, cascade=Asked(False, because))


def refuse_single_plans(loaded: LoadedConfig, plan: Plan, offers: Offers) -> None:
    """Refuse backends that keep only one plan at a time if steps are split.

    Raises:
        NegotiationError: naming the backends.
    """
    if loaded.config.scheduler.microbatches == 1:
        return
    texts = [
        f"attention backend {name!r} keeps one plan at a time (several_plans is not declared)"
        for name in dict.fromkeys(group.backend for group in plan.groups)
        if not offers[Kind.ATTENTION, name].capabilities.several_plans
    ]
    if texts:
        raise _refused(loaded, texts)


def _refused(loaded: LoadedConfig, texts: list[str]) -> NegotiationError:
    asked = loaded.config.scheduler.microbatches
    return NegotiationError(
        f"{KEY} = {asked} ({loaded.origins[KEY].where}) cannot hold beside {'; '.join(texts)}",
        fix=f"remove what it cannot hold beside, or set {KEY} = 1",
    )
