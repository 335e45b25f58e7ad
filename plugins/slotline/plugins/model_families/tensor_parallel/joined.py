"""What a division leaves to do and to say."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field

from slotline.plugins.model_families.naming import listed
from slotline.plugins.model_families.tensor_parallel.parts import Cuts
from slotline.registry.contracts.lora import ModulePart


@define
class Joined:
    """Modules of a divided model whose outputs the ranks join, by their paths.

    Attributes:
        summed: whose outputs are parts of a sum.
        within: the same, of a sum that a mixer makes on its way.
        embeddings: number of the first token and end of those whose embeddings a rank has.
        gathered: output projections by the number of all their outputs. Each rank gives as many, the last ones padding.
        joining: modules of ours that call the communicator themselves.
        whole: modules that each rank has whole, with the reason.
        mixtures: whose experts the ranks share, in order.
        own_tokens: whether the ranks of mixtures have tokens of their own, so that these exchange them.
        divided: number of layers that were divided.
        cuts: what a rank has of tensors.
        parts: what a rank has of linear layers and embeddings, by path.
    """

    summed: list[str] = field(factory=list)
    within: list[str] = field(factory=list)
    embeddings: dict[str, tuple[int, int]] = field(factory=dict)
    gathered: dict[str, int] = field(factory=dict)
    joining: list[str] = field(factory=list)
    whole: dict[str, str] = field(factory=dict)
    mixtures: list[str] = field(factory=list)
    own_tokens: bool = False
    divided: int = 0
    cuts: Cuts = field(factory=dict)
    parts: Mapping[str, ModulePart] = field(factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a note on the modules that are whole on each rank, for each reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.whole.items():
            by_reason.setdefault(reason, []).append(name)
        return tuple(f"whole on each rank, {reason}: {listed(names)}" for reason, names in by_reason.items())
