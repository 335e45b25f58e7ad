"""Items that were processed before: found by their content, and by nothing less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slotline.plugins.multimodal.processed_items import ProcessedItems
from slotline.registry.contracts import ProcessedItem


class Counting:
    """A processor that counts its calls."""

    def __init__(self, capacity: int = 64) -> None:
        self.calls = 0
        self.items = ProcessedItems(self.process, capacity)

    def process(self, modality: str, given: Any) -> ProcessedItem:
        self.calls += 1
        return ProcessedItem(modality=modality, token_ids=[1], inputs={"x": torch.zeros(4)})  # 16 bytes

    def __call__(self, given: Any, modality: str = "image") -> ProcessedItem:
        return self.items.get(modality, given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(6).reshape(2, 3),
        lambda: torch.arange(6.0),
        lambda: b"abc",
        lambda: {"frames": np.ones((1, 2, 2, 3), np.uint8), "fps": 2.0},
        lambda: np.arange(12).reshape(3, 4)[:, ::2],
    ],
)
def test_the_same_content_is_processed_once(make: Any) -> None:
    counting = Counting()
    assert counting(make()) is counting(make())
    assert counting.calls == 1


def test_what_differs_in_anything_is_processed_anew() -> None:
    image: Any = pytest.importorskip("PIL.Image")
    array = np.zeros((2, 3, 3), np.uint8)
    given = [
        array,
        array.astype(np.int8),
        array.reshape(3, 2, 3),
        torch.from_numpy(array),
        torch.from_numpy(array).reshape(3, 2, 3),
        array.tobytes(),
        {"frames": array, "fps": 1},
        {"frames": array, "fps": 2},
        {"frames": array, "fps": 2.0},
        {"frames": array},
        image.fromarray(array),
        image.fromarray(array.reshape(3, 2, 3)),
        image.new("RGBA", (3, 2)),
        "a",
    ]
    counting = Counting(10_000)
    found = [counting(one) for one in given] + [counting(array, "video")]
    assert len({id(one) for one in found}) == counting.calls == len(given) + 1


def test_items_of_unknown_kinds_and_changed_ones_are_never_taken_from_before() -> None:
    image: Any = pytest.importorskip("PIL.Image")
    counting, array = Counting(), np.zeros(3)
    for given in (object(), image.new("P", (2, 2)), np.array([object()]), {"frames": [array]}):
        assert counting(given) is not counting(given)
    first = counting(array)
    array[0] = 1
    assert counting(array) is not first


def test_the_least_recently_used_go_first() -> None:
    counting = Counting(3 * 16)
    kept = [counting(b"%d" % index) for index in range(3)]
    assert counting(b"0") is kept[0]
    counting(b"3")
    assert counting(b"0") is kept[0]
    assert counting(b"2") is kept[2]
    assert counting(b"1") is not kept[1]
    small = Counting(15)
    assert small(b"0") is not small(b"0")
