"""Encoding a step's items and putting their embeddings in the place of placeholder tokens.

The device's side of the encoder cache: it keeps the tensors, and encodes and drops the items that a schedule names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, evolve, field

from slotline.core.api.multimodal_inputs import Feature, PromptReader, num_embeddings
from slotline.core.batch.embeds import Embeds
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.encoder_cache import EncoderCache
from slotline.registry.config import MultimodalConfig
from slotline.registry.contracts import ModelFacts, MultimodalModel
from slotline.registry.errors import IntegrityError, ModelError, RequestError

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")


@define(eq=False)
class EncoderRunner:
    """Encoder runs and embeddings for inputs besides text.

    Attributes:
        model: encodes items.
        reader: reads prompts.
        cache: the scheduler's cache of encoder outputs.
        device: torch device string.
        chunked_prefill: whether a prompt's items may be encoded in several steps.
        outputs: embeddings [n, hidden_size] by the hash of their item.
    """

    model: MultimodalModel
    reader: PromptReader
    cache: EncoderCache
    device: str
    chunked_prefill: bool
    outputs: dict[str, torch.Tensor] = field(factory=dict)

    @property
    def note(self) -> str:
        """The sizes, in words."""
        cache = self.cache
        return f"encoder cache: {cache.capacity} embeddings, at most {cache.max_tokens_per_step} made in a step"

    def validate(self, request: Request) -> None:
        """Refuse a request whose items do not fit, or whose placeholders have none.

        Raises:
            RequestError: with the sizes.
        """
        self.reader.validate(request.prompt_token_ids, request.features)
        sizes = [feature.size for feature in request.features]
        needed, what = max(sizes, default=0), "an item"
        if not self.chunked_prefill:
            needed, what = sum({f.mm_hash: f.size for f in request.features}.values()), "a prompt that is not split"
        for name, limit in (
            ("cache_tokens", self.cache.capacity),
            ("max_tokens_per_step", self.cache.max_tokens_per_step),
        ):
            if needed > limit:
                raise RequestError(
                    f"{what} has {needed} embeddings, above multimodal.{name}={limit}",
                    fix=f"set multimodal.{name} = {needed} or more, or give smaller or fewer items",
                )

    @torch.inference_mode()
    def run(self, schedule: SchedulerOutput) -> dict[str, Exception]:
        """Drop and encode the items of a step. Return, by hash, the errors of items that could not be encoded."""
        for mm_hash in schedule.dropped:
            del self.outputs[mm_hash]
        failed: dict[str, Exception] = {}
        for modality, group in groupby(schedule.encode, key=lambda feature: feature.modality):
            features = list(group)
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

    def encoded(self, inputs: ModelInputs, schedule: SchedulerOutput, *, following: bool) -> ModelInputs:
        """Return a step's inputs with what was encoded for them.

        Args:
            following: whether a drafter looks one token ahead.
        """
        embeds, states = self.embeds(schedule), self.states(schedule)
        ahead = self.following(schedule) if following else None
        if embeds is None and states is None and ahead is None:
            return inputs
        return evolve(inputs, embeds=embeds, encoder_states=states, following=ahead)

    def embeds(self, schedule: SchedulerOutput) -> Embeds | None:
        """Return the embeddings that the step's tokens take, or None if they take none."""
        return self._embeds(schedule)

    def following(self, schedule: SchedulerOutput) -> Embeds | None:
        """Return the embeddings of the tokens that follow the step's tokens, for drafters that look one token ahead.

        The token after a request's last token of the step is among them if it belongs to an item of the step.
        """
        return self._embeds(schedule, shift=1)

    def states(self, schedule: SchedulerOutput) -> torch.Tensor | None:
        """Return the states [n, hidden_size] that cross-attention stores in this step, in batch order, or None."""
        found = [self.outputs[feature.mm_hash] for _, feature in schedule.features if feature.cross]
        return torch.cat(found) if found else None

    def made_up_states(self, num_requests: int) -> torch.Tensor | None:
        """Make up the states for cross-attention if `num_requests` requests began with the longest encoder inputs.

        Returns None without cross-attention.
        """
        facts = self.model.facts
        if not facts.max_encoder_len:
            return None
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        return self.model.embed(token).new_zeros((num_requests * facts.max_encoder_len, facts.hidden_size))

    @torch.inference_mode()
    def profile(self) -> torch.Tensor:
        """Encode as many example items as a step may.

        Returns:
            Memory as large as a full cache, for the caller to hold while it measures.
        """
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        held = self.model.embed(token).new_empty((self.cache.capacity, self.model.facts.hidden_size))
        for modality in self.model.facts.modalities:
            example = self.model.example(modality.name)
            count = max(1, self.cache.max_tokens_per_step // num_embeddings(example, modality))
            self.model.encode(modality.name, [example.inputs] * count)
        return held

    def reset(self) -> None:
        """Forget all embeddings. No request may hold any."""
        self.cache.reset()
        self.outputs.clear()

    def restore(self) -> None:
        """Forget all embeddings, even those that requests hold. Requests that need them have them encoded again."""
        self.cache.restore()
        self.outputs.clear()

    def check(self) -> None:
        """Raise IntegrityError unless the kept embeddings are those that the cache counts, after a step."""
        if differ := self.outputs.keys() ^ self.cache.hashes:
            raise IntegrityError(f"encoder outputs and their cache differ on {sorted(differ)[0][:12]}")

    def _encode(self, modality: str, features: list[Feature]) -> None:
        outputs = self.model.encode(modality, [feature.inputs for feature in features])
        found, wanted = [len(output) for output in outputs], [feature.size for feature in features]
        if found != wanted:
            raise ModelError(
                f"the model encoded {len(wanted)} items of modality {modality!r} to {found} embeddings, not {wanted}",
                fix="tell the author of the model family",
            )
        self.outputs |= {feature.mm_hash: output for feature, output in zip(features, outputs, strict=True)}

    def _embeds(self, schedule: SchedulerOutput, shift: int = 0) -> Embeds | None:
        found = list(self._overlaps(schedule, shift))
        if not found:
            return None
        index, values = zip(*found, strict=True)
        return Embeds(torch.from_numpy(np.concatenate(index)).to(self.device, non_blocking=True), torch.cat(values))

    def _overlaps(self, schedule: SchedulerOutput, shift: int) -> Iterator[tuple[Int, torch.Tensor]]:
        """Yield, for each item of the step, the tokens `shift` places before its embeddings, and the embeddings."""
        offsets = np.cumsum(schedule.num_scheduled) - schedule.num_scheduled - schedule.num_computed
        place = {row: i for i, row in enumerate(schedule.rows.tolist())}
        for row, feature in schedule.features:
            if feature.cross:
                continue
            i = place[row]
            first = int(schedule.num_computed[i]) + shift
            low, high = np.searchsorted(feature.positions, [first, first + int(schedule.num_scheduled[i])])
            yield feature.positions[low:high] - shift + offsets[i], self.outputs[feature.mm_hash][low:high]


def build_encoding(
    model: MultimodalModel,
    facts: ModelFacts,
    config: MultimodalConfig,
    *,
    device: str,
    max_batched_tokens: int,
    chunked_prefill: bool,
) -> EncoderRunner:
    """Build the encoder runner of a model, in the sizes that the configuration sets."""
    largest = max(num_embeddings(model.example(modality.name), modality) for modality in facts.modalities)
    asked = config.max_tokens_per_step, config.cache_tokens
    per_step = max(max_batched_tokens, largest) if asked[0] == "auto" else asked[0]
    cache = EncoderCache(max(per_step, largest) if asked[1] == "auto" else asked[1], per_step)
    return EncoderRunner(model, PromptReader(model, facts), cache, device, chunked_prefill)
