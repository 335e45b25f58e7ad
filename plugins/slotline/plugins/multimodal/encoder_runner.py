"""Encoding a step's items and finding the places of their embeddings among its tokens.

The device's side of the encoder cache: it keeps the tensors, and encodes and drops the items that a step names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Set
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from slotline.core.batch.model_inputs import ModelInputs
from slotline.plugins.multimodal.embeds import Embeds, StepEmbeds
from slotline.plugins.multimodal.features import Feature, num_embeddings
from slotline.plugins.multimodal.item_scheduler import StepItems
from slotline.registry.contracts import CopyStream, MultimodalModel
from slotline.registry.errors import IntegrityError, ModelError

Int = npt.NDArray[np.int64]
Taken = Sequence[tuple[int, Feature, torch.Tensor]]
"""Items of a step, each with its row and its embeddings."""
logger = logging.getLogger("slotline")


class ItemShare(Protocol):
    """Encoder outputs that engines hand to each other."""

    def encoded(self, mm_hash: str, output: torch.Tensor) -> None:
        """Hand on an output that was made here."""
        ...

    def take(self, mm_hash: str) -> torch.Tensor | None:
        """Return an output of another engine, once, None if there is none."""
        ...


@define(eq=False)
class EncoderRunner:
    """Encoder runs and embeddings for inputs besides text.

    Attributes:
        model: encodes items.
        device: torch device string.
        queue: of the device, where encoding runs while the step before computes. A device without streams has one
            order for both.
        outputs: embeddings [n, (1 + layer_embeds) * hidden_size] by the hash of their item.
        share: gives and takes those of other engines. None without any.
    """

    model: MultimodalModel
    device: str
    queue: CopyStream
    outputs: dict[str, torch.Tensor] = field(factory=dict)
    share: ItemShare | None = field(default=None, kw_only=True)
    _behind: bool = field(default=True, init=False)  # whether encoding has to wait for what computes

    def run(self, items: StepItems) -> dict[str, Exception]:
        """Drop and encode the items of a step. Return, by hash, the errors of items that could not be encoded."""
        for mm_hash in items.dropped:
            del self.outputs[mm_hash]
        self._behind |= bool(items.dropped)  # a step in flight may read what new embeddings are written over
        if not items.encode:
            return {}
        if self._behind:
            self.queue.wait_for_compute()
            self._behind = False
        with self.queue.scope():
            return self._encode_all(items.encode)

    def clear(self) -> None:
        """Forget all embeddings."""
        self.outputs.clear()
        self._behind = True

    @torch.inference_mode()
    def _encode_all(self, items: Sequence[Feature]) -> dict[str, Exception]:
        failed: dict[str, Exception] = {}
        of_modality: dict[str, list[Feature]] = {}
        for feature in items:
            of_modality.setdefault(feature.modality, []).append(feature)
        for modality, features in of_modality.items():
            try:
                self._encode(modality, features)
            except Exception:  # one of them may be at fault, and the others not
                for feature in features:
                    try:
                        self._encode(modality, [feature])
                    except Exception as error:
                        logger.exception("an item of modality %r could not be encoded", modality)
                        failed[feature.mm_hash] = error
        return failed

    def of_step(self, inputs: ModelInputs, features: Sequence[tuple[int, Feature]]) -> StepEmbeds:
        """Return what was encoded for a step, whose items are `features`, each with its row."""
        self.queue.compute_waits()
        there = set(inputs.rows.tolist())
        items = [(row, feature, self.outputs[feature.mm_hash]) for row, feature in features if row in there]
        crossing = [output for _, feature, output in items if feature.cross]
        states = torch.cat(crossing) if crossing else None
        return StepEmbeds(self.embeds(inputs, items), states, partial(self.embeds, inputs, items, shift=1))

    def embeds(self, inputs: ModelInputs, items: Taken, shift: int = 0) -> Embeds | None:
        """Return the embeddings that the tokens `shift` places after a step's tokens take. None if they take none."""
        found = list(_overlaps(inputs, items, shift))
        if not found:
            return None
        index, values = zip(*found, strict=True)
        return Embeds(torch.from_numpy(np.concatenate(index)).to(self.device, non_blocking=True), torch.cat(values))

    def made_up_states(self, count: int) -> torch.Tensor:
        """Make up `count` states [count, hidden_size] for cross-attention."""
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        return self.model.embed(token).new_zeros((count, self.model.facts.hidden_size))

    @torch.inference_mode()
    def profile(self, capacity: int, max_tokens_per_step: int) -> torch.Tensor:
        """Encode as many example items as a step of `max_tokens_per_step` embeddings may.

        Returns:
            Memory as large as a full cache of `capacity` embeddings, for the caller to hold while it measures.
        """
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        width = self.model.facts.hidden_size * (1 + self.model.facts.layer_embeds)
        held = self.model.embed(token).new_empty((capacity, width))
        for modality in self.model.facts.modalities:
            example = self.model.example(modality.name)
            count = max(1, max_tokens_per_step // num_embeddings(example, modality))
            with self.queue.scope():
                self.model.encode(modality.name, [example.inputs] * count)
        self.queue.compute_waits()
        return held

    def check(self, hashes: Set[str]) -> None:
        """Raise IntegrityError unless the kept embeddings are those of `hashes`, which the cache counts."""
        if differ := self.outputs.keys() ^ hashes:
            raise IntegrityError(f"encoder outputs and their cache differ on {sorted(differ)[0][:12]}")

    def _encode(self, modality: str, features: list[Feature]) -> None:
        given = {} if self.share is None else self._given(self.share, features)
        self.outputs |= given
        if not (features := [feature for feature in features if feature.mm_hash not in given]):
            return
        outputs = self.model.encode(modality, [feature.inputs for feature in features])
        found, wanted = [len(output) for output in outputs], [feature.size for feature in features]
        if found != wanted:
            raise ModelError(
                f"the model encoded {len(wanted)} items of modality {modality!r} to {found} embeddings, not {wanted}",
                fix="tell the author of the model family",
            )
        self.outputs |= {feature.mm_hash: output for feature, output in zip(features, outputs, strict=True)}
        if self.share is not None:
            for feature in features:
                self.share.encoded(feature.mm_hash, self.outputs[feature.mm_hash])

    def _given(self, share: ItemShare, features: Sequence[Feature]) -> dict[str, torch.Tensor]:
        """Return the outputs that another engine has made, of those of some items that fit."""
        width = self.model.facts.hidden_size * (1 + self.model.facts.layer_embeds)
        found = {feature.mm_hash: share.take(feature.mm_hash) for feature in features}
        fits = {f.mm_hash: (f.size, width) for f in features}
        return {
            mm_hash: output.to(self.device, non_blocking=True)
            for mm_hash, output in found.items()
            if output is not None and tuple(output.shape) == fits[mm_hash]
        }


def _overlaps(inputs: ModelInputs, items: Taken, shift: int) -> Iterator[tuple[Int, torch.Tensor]]:
    """Yield, for each item of a step, the tokens `shift` places before its embeddings, and the embeddings."""
    counts = inputs.num_scheduled
    computed = inputs.seq_lens_cpu[: len(counts)] - counts
    offsets = np.cumsum(counts) - counts - computed
    place = {row: i for i, row in enumerate(inputs.rows.tolist())}
    for row, feature, output in items:
        if feature.cross:
            continue
        i = place[row]
        first = int(computed[i]) + shift
        low, high = np.searchsorted(feature.positions, [first, first + int(counts[i])])
        yield feature.positions[low:high] - shift + offsets[i], output[low:high]
