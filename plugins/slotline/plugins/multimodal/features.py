"""Features of a request: the items beside its text, with the positions of their embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.request import Request
from slotline.registry.contracts import Modality, ProcessedItem

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class Feature:
    """An item of a prompt, with the positions of its embeddings and the inputs that the model encodes.

    Attributes:
        modality: name of its modality.
        mm_hash: hash of the item's inputs and the model. Features of equal hash share their embeddings.
        positions: [n] int64, ascending: the prompt's tokens that take the embeddings, in order.
        inputs: the tensors that the model encodes.
        cross: True if cross-attention reads the embeddings, so that they replace no tokens. The first token then needs
            all of them, and `positions` are 0.
    """

    modality: str
    mm_hash: str
    positions: Int
    inputs: Mapping[str, torch.Tensor]
    cross: bool = False

    @property
    def size(self) -> int:
        """Return the number of embeddings."""
        return len(self.positions)

    @property
    def start(self) -> int:
        """Return the position of the first token that takes an embedding."""
        return int(self.positions[0])

    @property
    def end(self) -> int:
        """Return the position after the last token that takes an embedding."""
        return int(self.positions[-1]) + 1


def features_of(request: Request) -> tuple[Feature, ...]:
    """Return the features of a request, in the prompt's order."""
    features: tuple[Feature, ...] = request.inputs.get("features") or ()
    return features


def hash_extra(features: Sequence[Feature], start: int, end: int) -> bytes:
    """Return bytes that distinguish the tokens [start, end) by the items among them and the places of these items."""
    return b"".join(
        bytes.fromhex(feature.mm_hash) + (feature.start - start).to_bytes(8, "little", signed=True)
        for feature in features
        if feature.start < end and feature.end > start
    )


def num_embeddings(item: ProcessedItem, modality: Modality) -> int:
    """Count the item's tokens that take embeddings."""
    return sum(token == modality.placeholder_token_id for token in item.token_ids)
