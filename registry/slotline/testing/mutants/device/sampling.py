"""Draws with a bug."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from slotline.core.device import TorchOps
from slotline.registry.contracts.device import Drawn
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.mutants.device.making import of_ops

Tensor = torch.Tensor


class Changed(TorchOps):
    """Draws with the rows' parameters changed on the host, and packed again."""

    def change(self, rows: Any) -> Any:
        raise NotImplementedError

    def sample(self, logits: Tensor, rows: Any, params: Tensor, *, keep_final: bool = False) -> Drawn:
        rows = self.change(rows)
        return super().sample(logits, rows, torch.from_numpy(rows.packed()), keep_final=keep_final)


class OneMore(Changed):
    def change(self, rows: Any) -> Any:
        return evolve(rows, top_k=rows.top_k + (rows.top_k > 0))


class IgnoresTopP(Changed):
    def change(self, rows: Any) -> Any:
        return evolve(rows, top_p=rows.top_p * 0 + 1)


class PastTopP(Changed):
    def change(self, rows: Any) -> Any:
        return evolve(rows, top_p=rows.top_p + 0.05 * (rows.top_p < 0.95))


class IgnoresFloor(Changed):
    def change(self, rows: Any) -> Any:
        return evolve(rows, log_floor=rows.log_floor - float("inf"))


class ColdIsHot(Changed):
    def change(self, rows: Any) -> Any:
        return evolve(rows, temperature=(1 / rows.temperature.clip(0.01)) * (rows.temperature > 0))


class AllDraw(Changed):
    def change(self, rows: Any) -> Any:
        return evolve(rows, temperature=rows.temperature + (rows.temperature == 0).astype("float32"))


class ByRow(Changed):
    def change(self, rows: Any) -> Any:
        return evolve(rows, seed=rows.seed + rows.rows.astype("uint64"))


class NextPosition(Changed):
    def change(self, rows: Any) -> Any:
        return evolve(rows, positions=rows.positions + 1)


class SeedAlone(Changed):
    def change(self, rows: Any) -> Any:
        return evolve(rows, positions=rows.positions * 0)


class Backwards(TorchOps):
    def sample(self, logits: Tensor, rows: Any, params: Tensor, *, keep_final: bool = False) -> Drawn:
        found = super().sample(logits.flip(1), rows, params, keep_final=keep_final)
        final = None if found.final is None else found.final.flip(1)
        return Drawn(logits.shape[1] - 1 - found.tokens, final, found.holds_nan)


class NoFinal(TorchOps):
    def sample(self, logits: Tensor, rows: Any, params: Tensor, *, keep_final: bool = False) -> Drawn:
        return super().sample(logits, rows, params)


class UnscaledFinal(TorchOps):
    def sample(self, logits: Tensor, rows: Any, params: Tensor, *, keep_final: bool = False) -> Drawn:
        found = super().sample(logits, rows, params, keep_final=keep_final)
        if found.final is None:
            return found
        return found._replace(final=torch.where(found.final.isfinite(), logits, found.final))


class NanUnseen(TorchOps):
    def sample(self, logits: Tensor, rows: Any, params: Tensor, *, keep_final: bool = False) -> Drawn:
        return super().sample(logits, rows, params, keep_final=keep_final)._replace(holds_nan=None)


class ScalesInPlace(TorchOps):
    def sample(self, logits: Tensor, rows: Any, params: Tensor, *, keep_final: bool = False) -> Drawn:
        found = super().sample(logits, rows, params, keep_final=keep_final)
        logits[0] -= logits[0].max()
        return found


class LastOfMass(TorchOps):
    """Draws among all tokens up to the one at which the sum passes a number, in steps of a coarse sum."""

    def sample(self, logits: Tensor, rows: Any, params: Tensor, *, keep_final: bool = False) -> Drawn:
        found = super().sample(logits, rows, params, keep_final=True)
        assert found.final is not None
        sampled = torch.from_numpy(rows.temperature > 0)
        banned = found.final.gather(1, (found.tokens + 1).clamp(max=logits.shape[1] - 1)[:, None]).squeeze(1)
        after = torch.where(sampled & (banned == -torch.inf), found.tokens + 1, found.tokens)
        return Drawn(after.clamp(max=logits.shape[1] - 1), found.final if keep_final else None, found.holds_nan)


class Packed(TorchOps):
    def sample(self, logits: Tensor, rows: Any, params: Tensor, *, keep_final: bool = False) -> Drawn:
        n, size = logits.shape
        spread = logits.stride(1) != 1
        logits = logits.as_strided((n, size), (logits.stride(0), 1)) if spread and logits.stride(0) >= size else logits
        return super().sample(logits, rows, params, keep_final=keep_final)


L1, L2 = Level.NUMERICS, Level.HOSTILE
ALL: tuple[Mutant, ...] = (
    of_ops("top-k-one-more", "top-k leaves one token more", L1, OneMore),
    of_ops("ignores-top-p", "top-p is ignored", L1, IgnoresTopP),
    of_ops("past-top-p", "top-p takes the token behind its border", L1, PastTopP),
    of_ops("ignores-floor", "the floor is ignored", L1, IgnoresFloor),
    of_ops("cold-is-hot", "logits are multiplied by the temperature", L1, ColdIsHot),
    of_ops("all-draw", "greedy rows draw", L1, AllDraw),
    of_ops("draws-by-row", "a draw depends on its row", L1, ByRow),
    of_ops("draws-by-next-position", "a draw is that of the next position", L1, NextPosition),
    of_ops("draws-by-seed-alone", "a draw does not depend on its position", L1, SeedAlone),
    of_ops("draws-backwards", "the distribution is summed from the last token", L1, Backwards),
    of_ops("no-final", "the logits that were drawn from are not returned", L1, NoFinal),
    of_ops("unscaled-final", "the logits that were drawn from are not scaled", L1, UnscaledFinal),
    of_ops("scales-in-place", "the given logits are changed by draws", L1, ScalesInPlace),
    of_ops("draws-banned", "a banned token behind the drawn one is drawn", L1, LastOfMass),
    of_ops("nan-unseen", "draws do not see NaN", L2, NanUnseen),
    of_ops("draws-packed", "draws take a row's logits to be side by side", L2, Packed),
)
