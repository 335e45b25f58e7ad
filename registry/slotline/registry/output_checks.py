"""Checks of the outputs of attention and state backends, layer by layer.

They run in the made-up steps before the first request, where a fault ends the start. If `observability` asks for
integrity checks they run in every eager step too. There a fault ends the requests whose logits it reaches, or the step
if a backend changed its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from attrs import define, fields

from slotline.registry.contracts import AttentionBatch, AttentionLayer, StateBatch, StateLayer
from slotline.registry.errors import ContractError

_FIX = "name another backend, and tell the author of this one (`slotline conform` shows its faults)"


@define(eq=False)
class OutputChecks:
    """Checks outputs, and remembers the first wrong output.

    Attributes:
        strict: whether a wrong output is raised at once.
        found: the first error, with the plugin's name. None for no error.
    """

    strict: bool
    found: str | None = None

    def attention(
        self,
        plugin: str,
        layer: AttentionLayer,
        inputs: tuple[torch.Tensor, ...],
        batch: AttentionBatch,
        out: torch.Tensor,
        returned: object,
    ) -> None:
        """Look at one layer's output, which was filled with NaN before.

        Args:
            plugin: its name and package.
            inputs: query, key and value.
            returned: what `forward` returned.

        Raises:
            ContractError: if it is wrong and the checks are strict.
        """
        own = out[: int(batch.query_start_loc_cpu[batch.num_requests])]
        if not bool(own.sum(dtype=torch.float32).isnan()) or not all(_finite(tensor) for tensor in inputs):
            return
        wrong = own.isnan().flatten(1).any(1) & _asked(batch, own)
        if not bool(wrong.any()):
            return
        what = f"{plugin} left NaN in `out` of attention layer {layer.name!r}"
        if bool(own.isnan().all()):
            what = f"{plugin} wrote nothing, or NaN only, to `out` of attention layer {layer.name!r}"
            if isinstance(returned, torch.Tensor) and returned.shape == out.shape:
                what += ", and returned its output instead"
        self._tell(what)

    def state(self, plugin: str, layer: StateLayer, tokens: torch.Tensor, found: object) -> None:
        """Check one state layer's output. `tokens` is an input with a row for each token.

        Raises:
            ContractError: if it is no tensor with the same number of rows, or holds NaN under strict checks.
        """
        what = f"{plugin} gave, for state layer {layer.name!r},"
        if not isinstance(found, torch.Tensor):
            raise ContractError(f"{what} {found!r:.40}, which is no tensor", fix=_FIX)
        if len(found) != len(tokens) or found.dtype != tokens.dtype or found.device != tokens.device:
            raise ContractError(
                f"{what} {found.dtype} {list(found.shape)} on {found.device}, not {tokens.dtype} of {len(tokens)} rows "
                f"on {tokens.device}",
                fix=_FIX,
            )
        if not _finite(found) and bool(found.isnan().any()) and _finite(tokens):
            self._tell(f"{what} an output with NaN")

    def _tell(self, what: str) -> None:
        if self.strict:
            raise ContractError(what, fix=_FIX)
        self.found = self.found or what


@define(eq=False)
class ShownBatch:
    """A copy of a batch, to see whether a backend changed it."""

    batch: AttentionBatch | StateBatch
    _kept: dict[str, Any]

    @classmethod
    def of(cls, batch: AttentionBatch | StateBatch) -> ShownBatch:
        """Copy the tables and lengths of a batch."""
        kept = {name: value.clone() if isinstance(value, torch.Tensor) else value.copy() for name, value in _of(batch)}
        return cls(batch, kept)

    def check(self, plugin: str, method: str) -> None:
        """Raise ContractError if the batch has changed since. The error names the plugin and the changed field."""
        for name, value in _of(self.batch):
            kept = self._kept[name]
            equal = torch.equal(kept, value) if isinstance(value, torch.Tensor) else np.array_equal(kept, value)
            if not equal:
                raise ContractError(f"{plugin} wrote into `{name}` of its batch in {method}()", fix=_FIX)


def _of(batch: AttentionBatch | StateBatch) -> Iterator[tuple[str, Any]]:
    for item in fields(type(batch)):
        value = getattr(batch, item.name)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            yield item.name, value


def _finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def _asked(batch: AttentionBatch, own: torch.Tensor) -> torch.Tensor:
    """Return which tokens [n] bool a backend must write: not those of requests without a length."""
    starts = batch.query_start_loc_cpu[: batch.num_requests + 1]
    seen = np.repeat(batch.seq_lens_cpu[: batch.num_requests] > 0, np.diff(starts))
    return torch.from_numpy(seen).to(own.device)
