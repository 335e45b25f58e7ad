"""The suite tells backends that hear of blocks of everything that it puts into their caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slotline.registry.capability import Set
from slotline.registry.contracts import AttentionContext, BlockEvents
from slotline.testing.mutants.attention.making import offer
from slotline.testing.reference.attention.backend import EagerAttention, raw
from slotline.testing.runner import check_plugin


class CopiedKeys(EagerAttention):
    """Reads keys from a copy of its own, which it fills from what is written and from blocks that it hears of."""

    deaf = False

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.copies: dict[int, torch.Tensor] = {}
        self.coming = {layer.index: set[int]() for layer in context.layers}

    def block_events(self, events: Sequence[BlockEvents]) -> None:
        for each in events:
            for blocks in self.coming.values():
                blocks -= set(each.returned.tolist())
                blocks |= set() if self.deaf else {*each.restored.tolist(), *each.loaded.tolist()}

    def copy(self, layer: Any, cache: Any) -> torch.Tensor:
        copy = self.copies.setdefault(cache.key.data_ptr(), torch.full_like(cache.key, torch.nan))
        blocks = sorted(self.coming[layer.index])
        raw(copy)[blocks] = raw(cache.key)[blocks]
        self.coming[layer.index].clear()
        return copy

    def write(self, layer: Any, key: Any, value: Any, cache: Any, plan: Any) -> None:
        super().write(layer, key, value, cache, plan)
        super().write(layer, key, value, cache._replace(key=self.copy(layer, cache)), plan)

    def forward(self, layer: Any, query: Any, key: Any, value: Any, cache: Any, *rest: Any) -> Any:
        return super().forward(layer, query, key, value, cache._replace(key=self.copy(layer, cache)), *rest)


class Deaf(CopiedKeys):
    deaf = True


CHECKS = ("attention.pages.shared", "attention.needle.pages", "attention.events.loaded")


def found(factory: Any, check: str) -> set[str]:
    changes = {"block_events": True, "attention_types": Set(("decoder",)), "limits": ()}
    return {
        record.id for record in check_plugin(offer("copies", "copies", factory, **changes), only=check) if record.bad
    }


@pytest.mark.parametrize("check", CHECKS)
def test_an_exact_listener_passes_and_a_deaf_one_does_not(check: str) -> None:
    assert not found(CopiedKeys, check)
    assert found(Deaf, check) == {check}
