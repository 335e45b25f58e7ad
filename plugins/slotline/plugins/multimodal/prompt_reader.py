"""Reading of a prompt: from its items to spans of its tokens and a hash of each item."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from slotline.media.reader import MediaReader
from slotline.plugins.multimodal.features import Feature
from slotline.plugins.multimodal.processed_items import ProcessedItems
from slotline.registry.config.schema import MultimodalConfig
from slotline.registry.config.validators import size_in_bytes
from slotline.registry.contracts import ModelFacts, MultimodalModel, ProcessedItem, PruningModel
from slotline.registry.errors import ModelError, RequestError
from slotline.text.items import as_items

Int = npt.NDArray[np.int64]
Join = Callable[[Sequence[int], Sequence[int]], list[int]]
"""See `slotline.registry.contracts.model_family.JoiningModel.join`."""


class PromptReader:
    """Reader of a prompt's `multi_modal_data`.

    Args:
        model, facts: of the model.
        config: limits of images and videos that are named by a path, URL or data URI.

    Attributes:
        placeholders: the token that represents an item in the user's prompt, by modality.
        cross: the modalities that cross-attention reads.
        raw: the placeholder that stands for a prompt of one item, None for a model that reads tokens.
        prompt: the modality whose items are an encoder's prompts, None for a model without one.
        decoder_start: the token that a decoder's prompt begins with.
        pruned: the modalities whose items lose tokens.
    """

    def __init__(self, model: MultimodalModel, facts: ModelFacts, config: MultimodalConfig) -> None:
        self._model, self._config = model, config
        self._processed = ProcessedItems(self._process, size_in_bytes(config.processed_cache))
        self._hashes: WeakKeyDictionary[ProcessedItem, str] = WeakKeyDictionary()
        self._embedded = {m.name: m.placeholder_token_id for m in facts.modalities}  # what takes embeddings
        self.placeholders = self._embedded | {
            m.name: m.prompt_token_id for m in facts.modalities if m.prompt_token_id is not None
        }
        self._join: Join = getattr(model, "join", _concatenated)
        self.cross = frozenset(m.name for m in facts.modalities if m.cross)
        self.raw = next((m.placeholder_token_id for m in facts.modalities if m.raw), None)
        self.prompt = next((m.name for m in facts.modalities if m.prompt), None)
        self.decoder_start = facts.decoder_start
        self.pruned = frozenset(m.name for m in facts.modalities if m.prunable and config.video_pruning_rate)
        self._max_encoder_len = facts.max_encoder_len
        self._model_name = f"{facts.architecture} {facts.path} {facts.num_parameters}"

    def read(self, token_ids: Sequence[int], data: Mapping[str, Any]) -> tuple[list[int], tuple[Feature, ...]]:
        """Return the prompt's tokens as the model reads them, and its features in order.

        Args:
            token_ids: with one placeholder token for each item, or already expanded as the model's processor does it.
            data: by modality, an item or a list of items in the prompt's order.

        Raises:
            RequestError: if the model does not take a modality, an item cannot be read, or items and placeholders
                differ.
        """
        unknown = sorted(map(str, data.keys() - self.placeholders.keys()))
        if unknown:
            raise RequestError(
                f"multi_modal_data has {', '.join(unknown)}; this model takes {', '.join(self.placeholders)}",
                fix="leave it out, or use a model that takes it",
            )
        tokens, features = list(token_ids), list[Feature]()
        media = MediaReader(self._config, remote=False)
        for modality, given in data.items():
            items = [self._processed.get(modality, media.read(modality, item)) for item in self._items(modality, given)]
            if modality in self.cross:
                features += [self._feature(item, self._embedded[modality], 0) for item in items]
            else:
                tokens, features = self._place(modality, tokens, items, features)
        features.sort(key=lambda feature: feature.start)
        return tokens, tuple(features)

    def _items(self, modality: str, given: Any) -> list[Any]:
        """Return the items of a modality. A prompt is one, though it is a list."""
        return [given] if modality == self.prompt else as_items(given)

    def validate(self, token_ids: Sequence[int], features: Sequence[Feature]) -> None:
        """Refuse a prompt with placeholders without an item, or without its one item for cross-attention.

        Raises:
            RequestError: with the counts.
        """
        self._validate_cross(features)
        for modality in self.placeholders.keys() - self.cross:
            placeholder = self._embedded[modality]
            taken = sum(feature.size for feature in features if feature.modality == modality)
            found = token_ids.count(placeholder)
            if not taken:
                placeholder = self.placeholders[modality]
                found = found or token_ids.count(placeholder)
            if found != taken:
                raise RequestError(
                    f"the prompt has {found} {modality} placeholder tokens (token {placeholder}) and items for {taken}",
                    fix=f"give multi_modal_data with one {modality} for each placeholder",
                )

    def _process(self, modality: str, item: Any) -> ProcessedItem:
        processed = self._model.process(modality, item)
        if modality not in self.pruned:
            return processed
        model: PruningModel = self._model  # type: ignore[assignment]  # a model with prunable modalities is one
        return model.prune(processed, self._config.video_pruning_rate)

    def _validate_cross(self, features: Sequence[Feature]) -> None:
        found = [feature for feature in features if feature.cross]
        if self.cross and len(found) != 1:
            names = ", ".join(sorted(self.cross))
            raise RequestError(
                f"the prompt has {len(found)} items of {names}, and the model's cross-attention reads one",
                fix=f"give multi_modal_data with exactly one {names} for each prompt",
            )
        if found and found[0].size > self._max_encoder_len:
            raise RequestError(
                f"the {found[0].modality} has {found[0].size} embeddings, and cross-attention reads "
                f"{self._max_encoder_len} at most",
                fix="give a shorter one",
            )

    def _place(
        self, modality: str, tokens: list[int], items: list[ProcessedItem], others: list[Feature]
    ) -> tuple[list[int], list[Feature]]:
        """Insert items into the prompt and shift the features of other modalities."""
        placeholder, embedded = self.placeholders[modality], self._embedded[modality]
        found = [index for index, token in enumerate(tokens) if token == placeholder]
        expanded = _expanded_starts(tokens, embedded, items, joined=self._join is not _concatenated)
        if expanded is None and len(found) != len(items):
            raise RequestError(
                f"the prompt has {len(found)} {modality} placeholder tokens (token {placeholder}) and multi_modal_data "
                f"{len(items)} items",
                fix=f"put one placeholder into the prompt for each {modality}",
            )
        moved = list(others)
        if expanded is None:
            tokens, expanded, moved = _expand(tokens, found, items, others, self._join)
        return tokens, moved + [
            self._feature(item, embedded, start) for item, start in zip(items, expanded, strict=True)
        ]

    def _feature(self, item: ProcessedItem, placeholder: int, start: int) -> Feature:
        positions = start + np.flatnonzero(np.asarray(item.token_ids) == placeholder)
        cross = item.modality in self.cross
        if len(positions) == 0:
            raise ModelError(
                f"a processed item of modality {item.modality!r} has no placeholder token {placeholder}",
                fix="tell the author of the model family",
            )
        return Feature(
            modality=item.modality,
            mm_hash=self._hash(item),
            positions=np.zeros(len(positions), np.int64) if cross else positions.astype(np.int64),
            inputs=item.inputs,
            cross=cross,
        )

    def _hash(self, item: ProcessedItem) -> str:
        if (known := self._hashes.get(item)) is not None:
            return known
        digest = hashlib.sha256(f"{self._model_name}\0{item.modality}\0{list(item.token_ids)}".encode())
        for name, value in sorted(item.inputs.items()):
            digest.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._hashes[item] = digest.hexdigest()
        return self._hashes[item]


def _concatenated(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [*left, *right]


def _expand(
    tokens: list[int], found: list[int], items: list[ProcessedItem], others: list[Feature], join: Join
) -> tuple[list[int], list[int], list[Feature]]:
    """Replace the placeholders at `found` by the items' tokens. Return the new tokens, starts, and moved features.

    Tokens that `join` makes anew are none of an item's special ones, so these keep their distance to one end.
    """
    longer: list[int] = []
    starts, before = [], 0
    moves = np.zeros(len(tokens), np.int64)  # shift of each old token
    for index, item in zip([*found, len(tokens)], [*items, None], strict=True):
        longer = join(longer, tokens[before:index])
        moves[before:index] = len(longer) - index
        if item is not None:
            longer = join(longer, item.token_ids)
            starts.append(len(longer) - len(item.token_ids))
        before = index + 1
    return longer, starts, [_moved(feature, moves) for feature in others]


def _moved(feature: Feature, moves: Int) -> Feature:
    return Feature(
        modality=feature.modality,
        mm_hash=feature.mm_hash,
        positions=feature.positions + moves[feature.positions],
        inputs=feature.inputs,
    )


def _expanded_starts(
    tokens: list[int], placeholder: int, items: list[ProcessedItem], *, joined: bool
) -> list[int] | None:
    """Return the starts of the items' tokens in a prompt that already has them, else None.

    Args:
        joined: True if text at the ends of an item may have been joined with the prompt's. It is not compared then.
    """
    starts = []
    position = 0
    for item in items:
        wanted = list(item.token_ids)
        own = [index for index, token in enumerate(wanted) if token == placeholder] or [0]
        first, end = (own[0], own[-1] + 1) if joined else (0, len(wanted))
        start = _next(tokens, placeholder, position) - own[0]
        if start + first < position or tokens[start + first : start + end] != wanted[first:end]:
            return None
        starts.append(start)
        position = start + end
    return starts if _next(tokens, placeholder, position) == len(tokens) else None


def _next(tokens: list[int], token: int, position: int) -> int:
    rest: Iterator[int] = (i for i in range(position, len(tokens)) if tokens[i] == token)
    return next(rest, len(tokens))
