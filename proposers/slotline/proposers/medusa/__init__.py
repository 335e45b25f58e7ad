"""Drafters `medusa` and `medusa_tree`: heads that each predict a later token from only the last hidden state."""

from __future__ import annotations

from attrs import field, frozen

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class MedusaTreeOptions:
    """The table `[drafter.medusa_tree]`.

    Attributes:
        choices: the tree's nodes as paths of ranks, as in the authors' `medusa_choices`. Empty for the likeliest tree
            of `drafter.tokens` nodes.
    """

    choices: tuple[tuple[int, ...], ...] = field(default=())


descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="medusa",
    summary="heads on the last hidden state, one for each draft token",
    capabilities=DrafterCapabilities(
        devices=Set(None),
        max_tokens=Max(),
        needs_hidden_states=True,
        needs_checkpoint=True,
        checkpoint_form="medusa",
        on_device=True,
        graphs=Flag(True),
    ),
    factory="slotline.proposers.medusa.drafter:MedusaDrafter",
)
tree_descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="medusa_tree",
    summary="the same heads, several guesses of each as a tree",
    capabilities=DrafterCapabilities(
        devices=Set(None),
        max_tokens=Max(256),
        tree=Flag(True),
        needs_hidden_states=True,
        needs_checkpoint=True,
        checkpoint_form="medusa",
    ),
    factory="slotline.proposers.medusa.drafter:MedusaTreeDrafter",
    options=MedusaTreeOptions,
)
