"""Memory of states: slots for rows, slots for checkpoints, and the bytes of a request in addition to its blocks."""

from __future__ import annotations

from typing import Any

from attrs import asdict, frozen

from slotline.registry.negotiation.pages import PoolPlan, in_percent, in_units


@frozen(kw_only=True)
class StateMemory:
    """Division of the memory of states.

    Attributes:
        slot_bytes: bytes of one slot over all state layers, padding included.
        used_bytes: the same without padding.
        num_layers: number of state layers.
        num_rows: rows of the scheduler, each with a slot from the start.
        alignment: alignment in bytes of each tensor in a slot.
        checkpoints: slots for checkpoints, or ``auto``. 0 without prefix caching.
        unit: tokens. Checkpoints are taken at multiples of it.
        interval: tokens. A request leaves a checkpoint at each multiple.
        rollback_bytes: bytes that backends allocate to go back to accepted drafts.
    """

    slot_bytes: int
    used_bytes: int
    num_layers: int
    num_rows: int
    alignment: int
    checkpoints: int | str
    unit: int
    interval: int
    rollback_bytes: int = 0

    @property
    def padding(self) -> float:
        """Fraction of a slot that no tensor uses."""
        return 1 - self.used_bytes / self.slot_bytes

    def bytes_per_request(self, pool: PoolPlan | None) -> int:
        """Return the most bytes of a decoding request of the pool's longest length."""
        return self.slot_bytes + (pool.bytes_per_request if pool else 0)

    def optimal_bytes_per_request(self, pool: PoolPlan | None) -> int:
        """Return the bytes without padding and blocks: the state, and the keys and values that the next token reads."""
        return self.used_bytes + (pool.optimal_bytes_per_request if pool else 0)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return asdict(self)

    def lines(self, pool: PoolPlan | None) -> list[str]:
        """Return the numbers in words."""
        need, best = self.bytes_per_request(pool), self.optimal_bytes_per_request(pool)
        slots = (
            f"{in_units(self.slot_bytes)} a request in {self.num_layers} state layers, held for each of "
            f"{self.num_rows} rows from the start: {in_units(self.num_rows * self.slot_bytes)}"
        )
        if self.padding > 0:
            why = f"each tensor begins at a multiple of {self.alignment} bytes"
            slots += f"; {in_percent(self.padding)} padding because {why}"
        beside = "" if pool is None else f" of {pool.max_model_len} tokens holds states and blocks,"
        request = (
            f"a request{beside or ' holds'} {in_units(need)}: {in_percent(need / best - 1)} above the "
            f"{in_units(best)} that are read, or {2**30 / need:.1f} requests per GiB where {2**30 / best:.1f} is the "
            "optimum"
        )
        back = f"{in_units(self.rollback_bytes)} more to go back to accepted drafts: the rows' states before a step"
        return [slots, *([back] if self.rollback_bytes else []), self._checkpoints(), request]

    def _checkpoints(self) -> str:
        if self.checkpoints == 0:
            return "no checkpoints, so that no prefix is reused"
        count = (
            f"up to {self.num_rows} checkpoints, in a quarter of what the rows leave at most,"
            if self.checkpoints == "auto"
            else f"{self.checkpoints} checkpoints"
        )
        return (
            f"{count} of {in_units(self.slot_bytes)} for prefix caching: behind a prompt's last multiple of "
            f"{self.unit} tokens, where prompts part, and behind each {self.interval} tokens"
        )
