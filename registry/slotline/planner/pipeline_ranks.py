"""Pipeline parallelism over ranks: which ranks have which layers, and what does not work beside it.

Every rank plans the whole model, so that all of them schedule alike and have the same plan. It then loads only its own
stage. `pipeline_parallel` has the division itself, and stages over devices of one process.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve

from slotline.planner.pipeline_parallel import Stages, divide
from slotline.planner.refusals import cannot_hold
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts, Stage
from slotline.registry.descriptor import Descriptor
from slotline.registry.negotiation import Setting
from slotline.registry.ranks import Place

KEY = "parallel.pipeline"


def stages_of_ranks(loaded: LoadedConfig, facts: ModelFacts, family: Descriptor[Any], place: Place) -> Stages:
    """Give each rank its layers. A stage's `device` names its ranks. A single stage if the layers are not divided.

    Raises:
        NegotiationError: if the family or the model cannot be divided that way.
    """
    count, inner = place.layout.pipeline, place.layout.tensor
    names = [
        f"rank {first}" if inner == 1 else f"ranks {first} to {first + inner - 1}"
        for first in range(0, count * inner, inner)
    ]
    return divide(loaded, names, facts, family, capability="pipeline_ranks")


def own_stages(stages: Stages, place: Place, device: str) -> Stages:
    """Return the placement of what a rank has itself: one stage, and -1 for layers that other ranks have."""
    index = place.index("pipeline")

    def owners(of: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(0 if stage == index else -1 for stage in of)

    return Stages(
        (evolve(stages.stages[index], device=device),), owners(stages.of_layer), of_state=owners(stages.of_state)
    )


def with_draft_layers(stages: Stages, count: int, place: Place) -> Stages:
    """Return the placement with a drafter's own layers, which are behind the model's and with the last rank."""
    is_last = place.index("pipeline") == place.layout.pipeline - 1
    return evolve(stages, of_layer=(*stages.of_layer, *(0 if is_last else -1 for _ in range(count))))


def refuse_beside_stages(
    loaded: LoadedConfig, facts: ModelFacts, drafter: Descriptor[Any] | None, place: Place, *, form: str
) -> None:
    """Refuse what does not work over several stages of ranks, beside what no ranks can do (`ranks`).

    Args:
        form: of the weights, see `ModelContext.load_format`.

    Raises:
        NegotiationError: with every reason.
    """
    if place.layout.pipeline == 1:
        return
    config, texts = loaded.config, list[str]()
    if facts.parts is not None and not facts.parts.chained:
        texts.append(f"layers of {facts.architecture} read more of the tokens than hidden states")
    if facts.layer_embeds:
        texts.append(f"{facts.architecture} adds embeddings of items behind layers, and the first rank has them")
    if facts.modalities and drafter is not None and drafter.capabilities.needs_computed:
        texts.append(f"drafter {drafter.name!r} reads embeddings of items, which the first rank has")
    if any(layer.attention_type != "decoder" for layer in facts.layers):
        texts.append(f"{facts.architecture} has layers that are no decoder's")
    if config.scheduler.microbatches > 1:
        texts.append(
            f"scheduler.microbatches = {config.scheduler.microbatches}: the ranks work on different steps at a time"
        )
    if config.parallel.expert_loads:
        texts.append("parallel.expert_loads = true: experts are placed again over all layers at once")
    if form == "sharded":
        texts.append(f"weights in {str(facts.path)!r} were saved from one device, with all layers")
    if config.extensions:
        texts.append(f"extensions {', '.join(map(repr, config.extensions))} see the steps of one rank")
    if texts:
        raise cannot_hold(loaded, KEY, place.layout.pipeline, texts, 1)


def pipeline_setting(loaded: LoadedConfig, stages: tuple[Stage, ...], turns: int) -> tuple[Setting, ...]:
    """Return the record of the stages of ranks. Empty for one rank."""
    if not stages:
        return ()
    held = "; ".join(
        f"layers {one.first_layer} to {one.end_layer - 1}, {one.num_parameters:,} parameters on {one.device}"
        for one in stages
    )
    ahead = f"{turns} steps of different requests at a time" if turns > 1 else "one step at a time"
    return (
        Setting(
            key=KEY,
            asked=str(len(stages)),
            resolved=str(len(stages)),
            origin=f"{loaded.origins[KEY].where}: {held}; {ahead}",
            explicit=True,
        ),
    )


def proposes_on_last(drafter: Descriptor[Any] | None) -> bool:
    """Return whether a drafter works on the last rank alone: it reads more than the tokens on the host."""
    if drafter is None:
        return False
    has = drafter.capabilities
    reads = has.needs_hidden_states or has.needs_layers or has.needs_computed or has.needs_kv_group
    return bool(reads or has.on_device or has.tree.support)


def turns_of(place: Place, drafter: Descriptor[Any] | None, *, has_states: bool) -> int:
    """Return the number of steps with different requests that are under way at a time, so that all stages have work.

    One if states are rolled back to accepted drafts, or if the last rank proposes drafts: it does so between steps.
    """
    return 1 if drafter is not None and (has_states or proposes_on_last(drafter)) else place.layout.pipeline
