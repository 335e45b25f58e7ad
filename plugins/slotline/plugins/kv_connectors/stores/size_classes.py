"""Blocks of about the same size: those of caches, and states, which are a hundred times larger."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.registry.contracts import ConnectorGroup


def size_classes(groups: Sequence[ConnectorGroup]) -> list[list[int]]:
    """Return the indices of the groups whose blocks are of one kind: of caches, then of states."""
    kinds = [[index for index, one in enumerate(groups) if bool(one.states) == states] for states in (False, True)]
    return [kind for kind in kinds if kind]


def class_of(classes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the number of the class of each group."""
    return {group: number for number, own in enumerate(classes) for group in own}
