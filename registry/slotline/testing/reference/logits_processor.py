"""Small processors: a penalty over recent tokens, a limit on repeats with counts by row, floors, and a contrast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.registry.capability import Flag
from slotline.registry.contracts import Companion, LogitsBatch, LogitsProcessorCapabilities, LogitsProcessorContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import RequestError


class RecentPenalty:
    """Processor that penalises the last `recent_window` tokens and bans the tokens of `never`.

    Positive logits are divided by `recent_penalty`, negative ones multiplied. The rule is that of Keskar et al., "CTRL"
    (2019), section 4.1.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.vocab_size = context.vocab_size
        self.device = context.device
        self.rows: dict[int, tuple[float, int, list[int]]] = {}  # row -> penalty, window, banned tokens

    def validate(self, params: Mapping[str, Any]) -> None:
        penalty, window = params.get("recent_penalty", 1.0), params.get("recent_window", 8)
        if not isinstance(penalty, int | float) or not 0 < penalty < float("inf"):
            raise RequestError(f"recent_penalty={penalty!r} is not allowed", fix="give a number > 0")
        if not isinstance(window, int) or window < 1:
            raise RequestError(f"recent_window={window!r} is not allowed", fix="give an integer >= 1")
        for token in params.get("never", ()):
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(f"never names token {token!r}", fix=f"token ids are 0 to {self.vocab_size - 1}")

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        penalty, banned = params.get("recent_penalty", 1.0), list(params.get("never", ()))
        self.rows[row] = (penalty, params.get("recent_window", 8), banned)
        return bool(penalty != 1.0 or banned)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        for entry, row in enumerate(batch.rows.tolist()):
            penalty, window, banned = self.rows[row]
            self.penalise(logits[entry], self.history(batch, entry)[-window:], penalty)
            logits[entry, banned] = -torch.inf
        return logits

    def penalise(self, logits: torch.Tensor, recent: list[int], penalty: float) -> None:
        """Change one row [vocab_size] in place."""
        tokens = torch.tensor(sorted(set(recent)), dtype=torch.int64, device=logits.device)
        chosen = logits[tokens]
        logits[tokens] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)

    def history(self, batch: LogitsBatch, entry: int) -> list[int]:
        """Return the known tokens, then the assumed drafts."""
        return self.known(batch, entry) + self.drafts(batch, entry)

    def known(self, batch: LogitsBatch, entry: int) -> list[int]:
        return batch.token_table[batch.rows[entry], : batch.num_tokens[entry]].tolist()  # type: ignore[no-any-return]

    def drafts(self, batch: LogitsBatch, entry: int) -> list[int]:
        if batch.draft_token_ids is None:
            return []
        return batch.draft_token_ids[entry, : batch.draft_positions[entry]].tolist()  # type: ignore[no-any-return]

    def release(self, row: int) -> None:
        del self.rows[row]


def recent_penalty(params: Mapping[str, Any], prompt: list[int], output: list[int], logits: list[float]) -> list[float]:
    """Return one row as `RecentPenalty` should change it, token by token."""
    recent = (prompt + output)[-params.get("recent_window", 8) :]
    penalty, banned = params.get("recent_penalty", 1.0), params.get("never", ())
    changed = []
    for token, logit in enumerate(logits):
        if token in recent:
            logit = logit / penalty if logit > 0 else logit * penalty
        changed.append(-float("inf") if token in banned else logit)
    return changed


class RepeatLimit:
    """Processor that bans a token after `max_repeats` occurrences in the output. It counts by row."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.limits = np.zeros(context.max_requests, np.int64)
        self.counts = np.zeros((context.max_requests, context.vocab_size), np.int64)
        self.counted = np.zeros(context.max_requests, np.int64)  # output tokens that are in the counts

    def validate(self, params: Mapping[str, Any]) -> None:
        limit = params.get("max_repeats")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise RequestError(f"max_repeats={limit!r} is not allowed", fix="give an integer >= 1")

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        self.limits[row] = params.get("max_repeats") or 0
        self.counts[row] = 0
        self.counted[row] = 0
        return bool(self.limits[row])

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        self.count(batch)
        counts = self.counts[batch.rows]  # [num_logits, vocab_size]
        if batch.draft_token_ids is not None:
            for entry, position in enumerate(batch.draft_positions.tolist()):
                np.add.at(counts[entry], batch.draft_token_ids[entry, :position], 1)
        banned = torch.from_numpy(counts >= self.limits[batch.rows][:, None])
        return logits.masked_fill(banned.to(logits.device), -torch.inf)

    def count(self, batch: LogitsBatch) -> None:
        """Add the output tokens that are new since the last call."""
        for entry, row in enumerate(batch.rows.tolist()):
            prompt, end = int(batch.num_prompt_tokens[entry]), int(batch.num_tokens[entry])
            np.add.at(self.counts[row], batch.token_table[row, prompt + self.counted[row] : end], 1)
            self.counted[row] = end - prompt

    def release(self, row: int) -> None:
        self.limits[row] = 0


class Floor:
    """Processor that bans tokens more than `floor` below the best. The best stays, so greedy requests do not change."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.floors = np.zeros(context.max_requests, np.float32)

    def validate(self, params: Mapping[str, Any]) -> None:
        floor = params.get("floor", 0)
        if not isinstance(floor, int | float) or not floor >= 0:
            raise RequestError(f"floor={floor!r} is not allowed", fix="give a number >= 0; 0 keeps all tokens")

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        self.floors[row] = params.get("floor", 0)
        return bool(self.floors[row])

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        floors = torch.from_numpy(self.floors[batch.rows]).to(logits.device)[:, None]
        return logits.masked_fill(self.below(logits, floors), -torch.inf)

    def below(self, logits: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
        """Return the tokens to drop, [num_logits, vocab_size] bool."""
        return logits < logits.amax(dim=1, keepdim=True) - floors

    def release(self, row: int) -> None: ...


class SampledFloor(Floor):
    """Floor at the temperature, for the sampler."""

    def validate(self, params: Mapping[str, Any]) -> None:
        floor = params.get("sampled_floor", float("inf"))
        if not isinstance(floor, int | float) or not floor >= 0:
            raise RequestError(f"sampled_floor={floor!r} is not allowed", fix="give a number >= 0")

    def floor(self, params: Mapping[str, Any]) -> float:
        return -float(params.get("sampled_floor", float("inf")))

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        self.floors[row] = -self.floor(params) * self.scale(params)
        return bool(self.floors[row] < float("inf"))

    def scale(self, params: Mapping[str, Any]) -> float:
        """Return the divisor of the logits."""
        return float(params["temperature"] or 1.0)


class Contrast:
    """Processor that contrasts the prompt with its last `contrast_tokens`.

    It adds `contrast` times the difference of their log-probabilities.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.factors = np.zeros(context.max_requests, np.float32)

    def validate(self, params: Mapping[str, Any]) -> None:
        factor, count = params.get("contrast", 0.0), params.get("contrast_tokens", 1)
        if not isinstance(factor, int | float) or not 0 <= factor < float("inf"):
            raise RequestError(f"contrast={factor!r} is not allowed", fix="give a number >= 0")
        if not isinstance(count, int) or count < 1:
            raise RequestError(f"contrast_tokens={count!r} is not allowed", fix="give an integer >= 1")

    def companion(self, params: Mapping[str, Any], prompt_token_ids: list[int]) -> Companion | None:
        factor = params.get("contrast", 0.0)
        last = tuple(prompt_token_ids[-params.get("contrast_tokens", 1) :])
        return Companion(prompt=last, name="contrast_tokens", asked=f"contrast={factor}") if factor else None

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        self.factors[row] = params.get("contrast", 0.0)
        return bool(self.factors[row])

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        own, other = logits.log_softmax(dim=1), self.others(batch).log_softmax(dim=1)
        factors = torch.from_numpy(self.factors[batch.rows]).to(logits.device)[:, None]
        known = own.isfinite() & other.isfinite()
        return torch.where(known, own + factors * (own - other), own)

    def others(self, batch: LogitsBatch) -> torch.Tensor:
        """Return the companions' logits [num_logits, vocab_size]."""
        assert batch.companion_logits is not None  # as the descriptor declares
        return batch.companion_logits

    def release(self, row: int) -> None: ...


class MovingFloor(Floor):
    """Floor that rises by 1 with each token that was the best when it was drawn, and falls by 1 with each other."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.shown: dict[int, tuple[int, int]] = {}  # row -> tokens before the last shown position, and its best token

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        self.floors[row] = params.get("moving_floor", 0)
        self.shown.pop(row, None)
        return bool(self.floors[row])

    def validate(self, params: Mapping[str, Any]) -> None:
        floor = params.get("moving_floor", 0)
        if not isinstance(floor, int | float) or not floor >= 0:
            raise RequestError(f"moving_floor={floor!r} is not allowed", fix="give a number >= 0; 0 keeps all tokens")

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        for entry, row in enumerate(batch.rows.tolist()):
            length, best = int(batch.num_tokens[entry]), int(logits[entry].argmax())
            if row in self.shown and self.moves(self.shown[row][0], length):
                was_best = batch.token_table[row, length - 1] == self.shown[row][1]
                self.floors[row] = max(0, self.floors[row] + (1 if was_best else -1))
            self.shown[row] = length, best
        return super().apply(logits, batch)

    def moves(self, before: int, length: int) -> bool:
        """Return True if a position is the next, not the same shown again."""
        return length == before + 1


descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="reference_recent_penalty",
    summary="a repetition penalty over the most recent tokens, and a list of banned ones",
    capabilities=LogitsProcessorCapabilities(
        parameters=("recent_penalty", "recent_window", "never"),
        needs_history=True,
        speculation=Flag(True),
        examples=(
            {"recent_penalty": 1.5},
            {"recent_penalty": 0.5, "recent_window": 3, "never": [4, 30]},
            {"never": [0, 7, 8]},
        ),
        bad_examples=({"recent_penalty": 0}, {"recent_window": 0}, {"recent_penalty": "much"}, {"never": [10**9]}),
        oracle=recent_penalty,
    ),
    factory=RecentPenalty,
)

counting = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="reference_repeat_limit",
    summary="bans a token that stands too often in the output",
    capabilities=LogitsProcessorCapabilities(
        parameters=("max_repeats",),
        needs_history=True,
        speculation=Flag(True),
        examples=({"max_repeats": 1}, {"max_repeats": 2}, {"max_repeats": 4}),
        bad_examples=({"max_repeats": 0}, {"max_repeats": "two"}),
    ),
    factory=RepeatLimit,
)

invariant = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="reference_floor",
    summary="bans tokens far below the best",
    capabilities=LogitsProcessorCapabilities(
        parameters=("floor",),
        argmax_invariant=True,
        speculation=Flag(True),
        examples=({"floor": 3.0}, {"floor": 0.5}),
        bad_examples=({"floor": -1.0}, {"floor": "high"}),
    ),
    factory=Floor,
)

sequential = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="reference_moving_floor",
    summary="bans tokens far below the best, the more the less surprising the tokens so far",
    capabilities=LogitsProcessorCapabilities(
        parameters=("moving_floor",),
        argmax_invariant=True,
        needs_history=True,
        sequential=True,
        examples=({"moving_floor": 3.0}, {"moving_floor": 6.0}),
        bad_examples=({"moving_floor": -1.0}, {"moving_floor": "high"}),
    ),
    factory=MovingFloor,
)

sampled = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="reference_sampled_floor",
    summary="bans tokens far below the best at the temperature, in the sampler",
    capabilities=LogitsProcessorCapabilities(
        parameters=("sampled_floor",),
        argmax_invariant=True,
        speculation=Flag(True),
        floors=True,
        examples=({"sampled_floor": 3.0}, {"sampled_floor": 0.5, "temperature": 0.7}),
        bad_examples=({"sampled_floor": -1.0}, {"sampled_floor": "high"}),
    ),
    factory=SampledFloor,
)

paired = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="reference_contrast",
    summary="adds how much more likely the whole prompt makes a token than its end",
    capabilities=LogitsProcessorCapabilities(
        parameters=("contrast", "contrast_tokens"),
        speculation=Flag(True),
        companions=True,
        examples=({"contrast": 0.5}, {"contrast": 1.0, "contrast_tokens": 3}),
        bad_examples=({"contrast": -1.0}, {"contrast": "much"}, {"contrast": 1.0, "contrast_tokens": 0}),
    ),
    factory=Contrast,
)
