"""Encoder outputs of requests that another engine has computed: they arrive as blocks do, and no encoder runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from attrs import define, field

from slotline.core.batch.request import Request
from slotline.plugins.kv_transfer.agreement import Agreement
from slotline.plugins.multimodal.encoder_runner import EncoderRunner
from slotline.plugins.multimodal.features import features_of
from slotline.registry.contracts import ItemKVConnector

logger = logging.getLogger("slotline")
_MOST = 64
"""Outputs that have arrived and were not taken."""


@define(eq=False)
class ItemTransfers:
    """Loads of encoder outputs, and the rows that wait for them. Implements `ItemShare`.

    What is not there in time is encoded here. Ranks agree on when a load has ended.

    Attributes:
        connector: the plan's connector.
        encoder: takes the outputs, and gives those that it has made.
        agreement: with the other ranks.
        timeout: seconds that a request waits.
        name: the plugin's name, for the log.
        loaded: outputs that were taken.
    """

    connector: ItemKVConnector
    encoder: EncoderRunner
    agreement: Agreement
    timeout: float
    name: str
    loaded: int = field(default=0, init=False)
    _coming: dict[str, float] = field(factory=dict, init=False)  # by hash, when its load began
    _ended: dict[str, torch.Tensor | None] = field(factory=dict, init=False)
    _there: dict[str, torch.Tensor] = field(factory=dict, init=False)
    _rows: dict[int, set[str]] = field(factory=dict, init=False)  # by row, the items that it waits for

    def __attrs_post_init__(self) -> None:
        self.encoder.share = self

    @property
    def waiting(self) -> Mapping[int, set[str]]:
        """Return the rows that wait for items."""
        return self._rows

    def lacking(self, request: Request, computed: int) -> list[str]:
        """Return the items that a request needs after `computed` tokens and that are not here."""
        needed = dict.fromkeys(one.mm_hash for one in features_of(request) if one.end > computed or one.cross)
        return [one for one in needed if one not in self.encoder.outputs and one not in self._there]

    def begin(self, request: Request, computed: int, params: Mapping[str, Any]) -> None:
        """Load what an admitted request lacks. Its row waits for it."""
        if not (lacking := self.lacking(request, computed)):
            return
        fresh = [one for one in lacking if one not in self._coming]
        self._coming |= dict.fromkeys(fresh, time.monotonic())
        self._rows[request.row] = set(lacking)
        try:
            self.connector.load_items(fresh, params)
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot load %d encoder outputs", self.name, len(fresh))
            self._ended |= dict.fromkeys(fresh)

    def poll(self) -> None:
        """Ask what has arrived, and let rows run whose items are there, or are to be encoded."""
        if not self._coming:
            return
        try:
            self._ended |= {one: output for one, output in self.connector.items().items() if one in self._coming}
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot say which encoder outputs have arrived", self.name)
            self._ended |= dict.fromkeys(self._coming)
        oldest = time.monotonic() - self.timeout
        own = [one in self._ended or begun < oldest for one, begun in self._coming.items()]
        over = self.agreement.everywhere(own)
        for one in [one for one, is_over in zip(list(self._coming), over, strict=True) if is_over]:
            del self._coming[one]
            output = self._ended.pop(one, None)
            if output is not None and any(one in needed for needed in self._rows.values()):
                self._there[one] = output
                if len(self._there) > _MOST:  # of requests that have ended since
                    del self._there[next(iter(self._there))]
            for row, needed in list(self._rows.items()):
                needed.discard(one)
                if not needed:
                    del self._rows[row]

    def leave(self, row: int) -> None:
        """Forget that a row waits."""
        self._rows.pop(row, None)

    def clear(self) -> None:
        """Forget all rows, and what has arrived for them."""
        self._rows.clear()
        self._there.clear()

    def encoded(self, mm_hash: str, output: torch.Tensor) -> None:
        """Hand on an output that was made here."""
        try:
            self.connector.item_encoded(mm_hash, output)
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot keep an encoder output", self.name)

    def take(self, mm_hash: str) -> torch.Tensor | None:
        """Return an output of another engine, once, None if there is none."""
        output = self._there.pop(mm_hash, None)
        self.loaded += output is not None
        return output
