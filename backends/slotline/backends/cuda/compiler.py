"""Triton's compiler as the compiler of a device, and the steps whose kernels it compiles ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from slotline.builder.made_up import even_split
from slotline.kernels import triton_precompile as compiling
from slotline.registry.contracts.device import MissingKernels

DECODES = 4
"""Requests with a single token in a batch with a prompt."""


def steps(max_tokens: int, max_requests: int, max_model_len: int) -> Iterator[tuple[Sequence[int], int | None]]:
    """Yield the query tokens of each request, and the tokens that each has with its past, or None for no past.

    The steps are prompts of every power of two alone, after a past and together with single tokens. Then numbers of
    requests with few tokens, as in a verifying step, with many, and with single tokens, and a token after every past:
    both alone, where a backend may do more in the same kernel, and beside two tokens. Backends choose blocks of queries
    and splits of keys by these.
    """
    most = min(max_tokens, max_model_len - 1)
    for past in powers_of_two(max_model_len):
        yield [1], past
        if past > 1 and max_requests > 1 and max_tokens >= 3:
            yield [1, 2], past
    for size in powers_of_two(most):
        yield [size], None
        yield [size], max_model_len
        if max_requests > DECODES and size + DECODES <= max_tokens:
            yield [*[1] * DECODES, size], max_model_len
    for count in powers_of_two(min(max_requests, max_tokens)):
        lens = even_split(min(max_tokens, count * most), count)
        yield lens, None
        yield lens, max_model_len
        for size in (1, 2, 4, 8, 16):
            if count * size <= max_tokens:
                yield [size] * count, max_model_len
        if count < max_requests and count + 2 <= max_tokens:
            yield [*[1] * count, 2], max_model_len


def powers_of_two(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most`."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


class TritonCompiler:
    """Triton's compiler for one GPU. Implements `KernelCompiler`.

    Args:
        device: torch device string.
    """

    log_to = staticmethod(compiling.log_to)  # called in every step
    leaving_out = staticmethod(compiling.leaving_out)
    waited_for = staticmethod(compiling.waited_for)
    steps = staticmethod(steps)

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        compiling.hash_ahead()

    def listen(self) -> None:
        """Listen to Triton, if it is loaded."""
        compiling.listen()

    def compile_all(self, missing: MissingKernels) -> None:
        """Compile in threads."""
        compiling.compile_all(missing, self._device)
