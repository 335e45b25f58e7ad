"""Layout of a step's sampling parameters on a device, and the random numbers of its draws."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

PACKED_WIDTH = 8
"""int32 words of a row's packed parameters."""
PACKED = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("log_floor", np.float32),
        ("top_k", np.int32),
        ("greedy", np.int32),
        ("unused", np.int32),  # aligns the next field to its size
        ("counter", np.uint64),
    ]
)
STRIDE, FACTORS, SHIFTS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31)
"""SplitMix64's (Steele, Lea, Flood 2014, fig. 17): what its counter grows by for each number, and how it is mixed."""


@frozen(eq=False)
class PackedParameters:
    """Columns of `SamplingMetadata.packed`, as views [n] of its tensor on the device."""

    packed: torch.Tensor

    @property
    def temperature(self) -> torch.Tensor:
        """float32, 1 for greedy rows."""
        return self._column("temperature", torch.float32)

    @property
    def top_p(self) -> torch.Tensor:
        """float32."""
        return self._column("top_p", torch.float32)

    @property
    def log_floor(self) -> torch.Tensor:
        """float32, minus infinity for all."""
        return self._column("log_floor", torch.float32)

    @property
    def top_k(self) -> torch.Tensor:
        """int32, 0 for all."""
        return self._column("top_k", torch.int32)

    @property
    def greedy(self) -> torch.Tensor:
        """bool."""
        return self._column("greedy", torch.int32).bool()

    @property
    def uniform(self) -> torch.Tensor:
        """float64 in [0, 1), as `uniforms` of seeds and positions, computed on the device of the counters."""
        z = self._column("counter", torch.int64)
        for shift, factor in zip(SHIFTS, (*FACTORS, None), strict=True):
            z = z ^ _shifted(z, shift)
            z = z if factor is None else z * (factor - 2**64)  # modulo 2**64, as a signed number
        return _shifted(z, 11).double() * 2.0**-53

    def _column(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.packed.view(dtype)[:, PACKED.fields[name][1] // dtype.itemsize]  # type: ignore[index]


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shift unsigned numbers [n] held as int64 to the right."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def uniforms(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return numbers [n] in [0, 1) from the rows' seeds [n] and positions [n], by SplitMix64."""
    z = counters(seed, position)
    for shift, factor in zip(SHIFTS, (*FACTORS, None), strict=True):
        z = z ^ (z >> np.uint64(shift))
        z = z if factor is None else z * np.uint64(factor)
    numbers: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def counters(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's counters [n], modulo 2**64, of the rows' seeds [n] and positions [n]."""
    found: npt.NDArray[np.uint64] = seed + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(STRIDE)
    return found
