"""A step's sampling parameters: gathered on the host, packed into one array for the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from slotline.core.batch.request_table import RequestTable
from slotline.kernels.packed_parameters import PACKED, PACKED_WIDTH, STRIDE, PackedParameters, counters, uniforms

__all__ = ["PACKED_WIDTH", "STRIDE", "PackedParameters", "SamplingMetadata", "uniforms"]

Int = npt.NDArray[np.int64]
_LEAST_TEMPERATURE = np.float32(1e-6)
"""Below that a quotient may overflow."""


@frozen(kw_only=True, eq=False)
class SamplingMetadata:
    """The sampling parameters of the logits' rows, gathered.

    Attributes:
        rows: [n] int64, permanent rows.
        positions: [n] int64, position that the sampled token will have.
        temperature, top_p: [n] float32; top_k: [n] int64, 0 for all.
        log_floor: [n] float32, the least log-probability of a kept token minus that of the most likely one, at most 0,
            minus infinity for all.
        seed: [n] uint64.
        all_greedy: whether every row takes the most likely token.
    """

    rows: Int
    positions: Int
    temperature: npt.NDArray[np.float32]
    top_k: Int
    top_p: npt.NDArray[np.float32]
    log_floor: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    all_greedy: bool = field(init=False)

    @all_greedy.default
    def _all_greedy(self) -> bool:
        return not self.temperature.any()

    @classmethod
    def gather(cls, rows: RequestTable, which: Int, spec_positions: Int | None = None) -> SamplingMetadata:
        """Gather the parameters of the permanent rows `which`, each after the tokens to verify in `spec_positions`."""
        known = rows.num_tokens[which]
        return cls(
            rows=which,
            positions=known if spec_positions is None else known + spec_positions,
            temperature=rows.temperature[which],
            top_k=rows.top_k[which],
            top_p=rows.top_p[which],
            log_floor=rows.log_floor[which],
            seed=rows.seed[which],
        )

    def packed(self) -> npt.NDArray[np.int32]:
        """Pack the parameters into [n, PACKED_WIDTH] int32, sent in one copy and read by `PackedParameters`.

        Greedy rows have temperature 1 and a flag. The counter of the row's random number is included. It grows by
        `STRIDE` for each token.
        """
        out = np.zeros(len(self.rows), PACKED)
        greedy = self.temperature == 0
        out["temperature"] = np.where(greedy, np.float32(1), np.maximum(self.temperature, _LEAST_TEMPERATURE))
        out["top_p"] = self.top_p
        out["log_floor"] = self.log_floor
        out["top_k"] = np.minimum(self.top_k, np.iinfo(np.int32).max)
        out["greedy"] = greedy
        out["counter"] = counters(self.seed, self.positions)
        return out.view(np.int32).reshape(-1, PACKED_WIDTH)
