"""Mirostat, version 2: Basu, Ramachandran, Keskar, Varshney, "Mirostat" (ICLR 2021), algorithm 2, surprise in bits."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.kernels.async_copy import to_device
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import ContractError, RequestError
from slotline.registry.safe_repr import safe_repr

Int = npt.NDArray[np.int64]
_NEW = -1
_LEAST_TEMPERATURE = np.float32(1e-6)  # as in the sampler


class Mirostat:
    """Ban of tokens with a surprise above the row's bound, except the likeliest.

    The bound begins at twice the target. With each token it moves by eta times the difference between the target and
    the token's surprise among the kept tokens.

    The surprise of a token is known only in the next step, together with the token. The log-probabilities of a row's
    last step therefore stay on the device, [vocab_size] float32 for each row that uses this, and so does its bound. The
    host never waits. A second call for the same position changes nothing.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._tau = np.zeros(context.max_requests, np.float32)
        self._eta = np.zeros(context.max_requests, np.float32)
        self._temperature = np.ones(context.max_requests, np.float32)
        self._length = np.full(context.max_requests, _NEW, np.int64)  # of the history when the row was last shown
        self._slot = np.full(context.max_requests, -1, np.int64)  # its place in the two below
        self._free: list[int] = []
        self._bound = torch.zeros(0, device=context.device)  # [slots]
        self._log2 = torch.zeros(0, context.vocab_size, device=context.device)  # [slots, vocab_size], of those kept

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that both are numbers above 0, and that no other parameter restricts the tokens afterwards."""
        for name in ("mirostat_tau", "mirostat_eta"):
            value = params.get(name)
            if value is not None and (
                not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e9
            ):
                raise RequestError(
                    f"{name}={safe_repr(value, 80)} is not allowed", fix="give a number in (0, 1e9], or leave it out"
                )
        if params.get("mirostat_tau") is None:
            if params.get("mirostat_eta") is not None:
                raise RequestError(
                    f"mirostat_eta={params['mirostat_eta']!r} without mirostat_tau",
                    fix="give mirostat_tau, the surprise in bits to hold",
                )
            return
        for name, off in (("top_k", (0, -1)), ("top_p", (1,)), ("min_p", (0,)), ("structured_outputs", (None,))):
            if name in params and params[name] not in off:
                raise RequestError(
                    f"{name}={params[name]!r} beside mirostat_tau, which must know what its tokens are drawn from",
                    fix=f"leave out {name} or mirostat_tau",
                )

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's numbers and assign it a slot. Greedy requests need none."""
        tau, temperature = params.get("mirostat_tau"), params.get("temperature", 1.0)
        if tau is None or temperature == 0:
            return False
        eta = params.get("mirostat_eta")
        self._tau[row], self._eta[row] = tau, 0.1 if eta is None else eta
        self._temperature[row] = max(temperature, _LEAST_TEMPERATURE)
        if not self._free:
            self._grow()
        self._slot[row], self._length[row] = self._free.pop(), _NEW
        return True

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Move the bounds of rows that have a new token, then ban what lies above them."""
        rows, lengths = batch.rows, batch.lengths
        before = self._length[rows]
        follows = before + 1 == lengths
        follows &= before != _NEW
        known = follows | (before == lengths) | (before == _NEW)
        if not known.all():
            place = int(np.flatnonzero(~known)[0])
            raise ContractError(
                f"mirostat saw row {rows[place]} after {before[place]} tokens and then after {lengths[place]}",
                fix="show a row at each place where it samples, one after another",
            )
        slots = to_device(self._slot[rows], logits.device)
        tau, eta, temperature = (
            to_device(values[rows], logits.device) for values in (self._tau, self._eta, self._temperature)
        )
        newest = to_device(np.where(follows, batch.tail(1)[:, 0], 0), logits.device)
        off = -self._log2[slots, newest] - tau
        # a token that was banned here, which only NaN among the model's logits can bring about, says nothing
        off = torch.where(to_device(follows, logits.device) & off.isfinite(), off, 0)
        is_new = to_device(before == _NEW, logits.device)
        bound = torch.where(is_new, 2 * tau, self._bound[slots] - eta * off)
        scaled = logits / temperature[:, None]
        likely = _log2_softmax(scaled) >= -bound[:, None]
        banned = ~likely & (scaled < scaled.amax(dim=-1, keepdim=True))
        self._bound[slots] = bound
        self._log2[slots] = _log2_softmax(scaled.masked_fill_(banned, -torch.inf))
        self._length[rows] = lengths
        return logits.masked_fill(banned, -torch.inf)

    def release(self, row: int) -> None:
        """Free the row's slot, and the memory if no slot is used."""
        self._free.append(int(self._slot[row]))
        self._slot[row] = -1
        if len(self._free) == len(self._bound):
            self._free, self._bound, self._log2 = [], self._bound[:0].clone(), self._log2[:0].clone()

    def _grow(self) -> None:
        """Double the number of slots."""
        count = len(self._bound)
        more = max(1, count)
        self._free = list(range(count + more - 1, count - 1, -1))
        self._bound = torch.cat([self._bound, self._bound.new_zeros(more)])
        self._log2 = torch.cat([self._log2, self._log2.new_zeros(more, self._log2.shape[1])])


def _log2_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(dim=-1).div_(log(2))
