"""Drafters `eagle` and `eagle3`: one decoder layer that goes on from the model's own hidden states."""

from __future__ import annotations

from attrs import evolve, field, frozen, validators

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class EagleTreeOptions:
    """`[drafter.eagle_tree]` and `[drafter.eagle3_tree]`.

    Attributes:
        branches: children of a node, and nodes of a level that get children.
        levels: most levels of a tree. There are fewer if `drafter.tokens` slots do not hold the nodes with children.
        by_confidence: True for a tree of its own for each request, by the head's probabilities. False for one tree for
            all, by the ranks of tokens.
    """

    branches: int = field(default=4, validator=validators.ge(1))
    levels: int = field(default=6, validator=validators.ge(1))
    by_confidence: bool = True


descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="eagle",
    summary="an EAGLE head over the last hidden states",
    capabilities=DrafterCapabilities(
        devices=Set(("cpu", "cuda")),
        max_tokens=Max(),
        needs_hidden_states=True,
        needs_computed=True,
        needs_kv_group=True,
        needs_checkpoint=True,
        checkpoint_form="eagle",
        on_device=True,
        graphs=Flag(True),
        prompt_embeds=Flag(True),
    ),
    factory="slotline.proposers.eagle.drafter:EagleDrafter",
)
descriptor_3 = Descriptor(
    kind=Kind.DRAFTER,
    name="eagle3",
    summary="an EAGLE-3 head over hidden states of three layers",
    capabilities=DrafterCapabilities(
        devices=Set(("cpu", "cuda")),
        max_tokens=Max(),
        needs_layers=True,
        needs_computed=True,
        needs_kv_group=True,
        needs_checkpoint=True,
        checkpoint_form="eagle3",
        on_device=True,
        graphs=Flag(True),
        prompt_embeds=Flag(True),
    ),
    factory="slotline.proposers.eagle.drafter:Eagle3Drafter",
)
tree_descriptor = evolve(
    descriptor,
    name="eagle_tree",
    summary="an EAGLE head that proposes a tree by confidence",
    capabilities=evolve(
        descriptor.capabilities,
        tree=Flag(True),
        request_trees=Flag(True),
        on_device=False,
        graphs=Flag(False),
    ),
    factory="slotline.proposers.eagle.drafter:EagleTreeDrafter",
    options=EagleTreeOptions,
)
tree_descriptor_3 = evolve(
    descriptor_3,
    name="eagle3_tree",
    summary="an EAGLE-3 head that proposes a tree by confidence",
    capabilities=evolve(
        descriptor_3.capabilities,
        tree=Flag(True),
        request_trees=Flag(True),
        on_device=False,
        graphs=Flag(False),
    ),
    factory="slotline.proposers.eagle.drafter:Eagle3TreeDrafter",
    options=EagleTreeOptions,
)
