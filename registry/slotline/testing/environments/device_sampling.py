"""Rows to sample: logits, parameters, and what a draw may give."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve, frozen

from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.testing.check import Failed
from slotline.testing.environments.device import Array
from slotline.testing.oracles import device as oracle

SLACK = 2e-5
"""Share of the probability mass by which sums in float32 may differ."""
CLOSE = 1e-5
"""Relative error of a logit divided by a temperature in float32."""


@frozen(kw_only=True, eq=False)
class Rows:
    """Rows that are sampled together.

    Attributes:
        logits: [n, vocab_size] float32.
        temperature, top_p, floor: [n] float32; top_k: [n] int64. `floor` is the logarithm.
        seeds: [n] uint64; positions: [n] int64.
    """

    logits: Array
    temperature: Array
    top_k: Array
    top_p: Array
    floor: Array
    seeds: Array
    positions: Array

    @classmethod
    def random(cls, rng: np.random.Generator, n: int, vocab_size: int, *, plain: bool = False) -> Rows:
        """Return rows at temperature 1, greedy ones if `plain`, without any limit."""
        return cls(
            logits=(rng.normal(size=(n, vocab_size)) * 3).astype(np.float32),
            temperature=np.full(n, 0 if plain else 1, np.float32),
            top_k=np.zeros(n, np.int64),
            top_p=np.ones(n, np.float32),
            floor=np.full(n, -np.inf, np.float32),
            seeds=rng.integers(0, 2**63, n).astype(np.uint64),
            positions=rng.integers(0, 5000, n).astype(np.int64),
        )

    def limited(self, *, top_k: int = 0, top_p: int = 0, floor: int = 0) -> Rows:
        """Return the rows with limits that leave so many of the largest logits, each far from a limit's edge."""
        scaled = self.logits.astype(np.float64) / np.where(self.temperature, self.temperature, 1)[:, None]
        ordered = -np.sort(-scaled, axis=1)
        changed: dict[str, Any] = {}
        if top_k:
            changed["top_k"] = np.full(len(self.logits), top_k, np.int64)
        if floor:
            edge = (ordered[:, floor - 1] + ordered[:, floor]) / 2 - ordered[:, 0]
            changed["floor"] = edge.astype(np.float32)
        if top_p:
            left = np.where(np.arange(ordered.shape[1]) < min(top_k or 1 << 30, floor or 1 << 30), ordered, -np.inf)
            shares = np.exp(left - left[:, :1])
            before = np.cumsum(shares, axis=1) / shares.sum(axis=1, keepdims=True)
            low = before[:, top_p - 2] if top_p > 1 else 0.0
            changed["top_p"] = ((low + before[:, top_p - 1]) / 2).astype(np.float32)
        return evolve(self, **changed)

    def metadata(self) -> SamplingMetadata:
        """Return the parameters as an operation gets them on the host."""
        return SamplingMetadata(
            rows=np.arange(len(self.logits)),
            positions=self.positions,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            log_floor=self.floor,
            seed=self.seeds,
        )

    def packed(self) -> Array:
        """Return the parameters as an operation gets them on the device, [n, 8] int32."""
        return self.metadata().packed()

    def take(self, which: Array) -> Rows:
        """Return some of the rows."""
        names = ("logits", "temperature", "top_k", "top_p", "floor", "seeds", "positions")
        return Rows(**{name: getattr(self, name)[which] for name in names})

    def final(self, row: int) -> Array:
        """Return the logits [vocab_size] float64 that a row is drawn from."""
        if self.temperature[row] == 0:
            greedy: Array = self.logits[row].astype(np.float64)
            return greedy
        limits = float(self.floor[row]), int(self.top_k[row]), float(self.top_p[row])
        return oracle.kept(self.logits[row], float(self.temperature[row]), *limits)

    def allowed(self, row: int) -> set[int]:
        """Return the tokens that a row may draw: one, and its neighbour where its number lies on the border."""
        if self.temperature[row] == 0:
            return {int(oracle.argmax(self.logits[row : row + 1])["tokens"][0])}
        number = oracle.uniform(int(self.seeds[row]), int(self.positions[row]))
        return oracle.drawn(self.final(row), number, SLACK)


def expect_tokens(rows: Rows, found: Array, what: str) -> None:
    """Raise `Failed` unless each row's token is the one at its number."""
    if found.shape != (len(rows.logits),):
        raise Failed(f"{what}: tokens {list(found.shape)}, expected {[len(rows.logits)]}")
    for row, token in enumerate(found.tolist()):
        if token not in (allowed := rows.allowed(row)):
            raise Failed(
                f"{what}: row {row} (temperature {rows.temperature[row]:.3g}, top_k {rows.top_k[row]}, top_p "
                f"{rows.top_p[row]:.4g}, floor {rows.floor[row]:.3g}) drew {token}, expected {sorted(allowed)}"
            )


def expect_final(rows: Rows, found: Array, what: str) -> None:
    """Raise `Failed` unless the logits that were drawn from are those that the parameters leave."""
    for row, values in enumerate(found):
        wanted = rows.final(row)
        kept, left = np.isfinite(values), np.isfinite(wanted)
        if not np.array_equal(kept, left):
            raise Failed(f"{what}: row {row} leaves {int(kept.sum())} tokens to draw from, expected {int(left.sum())}")
        error = np.abs(values[left] - wanted[left]).max(initial=0)
        if error > CLOSE * max(1.0, float(np.abs(wanted[left]).max(initial=0))):
            raise Failed(f"{what}: row {row} is drawn from logits with an error of {error:.3g}")
