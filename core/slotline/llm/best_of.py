"""`best_of`: sample more outputs than are wanted and keep the most likely of them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from slotline.core.api.outputs import CompletionOutput, RequestOutput
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError


def check_best_of(params: Sequence[SamplingParams], logprobs_mode: str) -> None:
    """Check that outputs can be compared by the sums of their log-probabilities.

    Raises:
        RequestError: if this engine's `logprobs` are logits.
    """
    for one in params:
        if _selects(one) and not logprobs_mode.endswith("_logprobs"):
            raise RequestError(
                f"best_of={one.best_of} under sampling.logprobs_mode={logprobs_mode!r}",
                fix='set sampling.logprobs_mode = "raw_logprobs"',
            )


def single(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a single output out of several."""
    scored = 0 if _selects(params) and params.logprobs is None else params.logprobs
    return evolve(params, n=1, best_of=None, logprobs=scored)


def best_of(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """Return the `n` outputs with the highest `cumulative_logprob`, best first. Failed outputs come last."""
    if not _selects(params):
        return output
    kept = sorted(output.outputs, key=_worse)[: params.n]
    for index, completion in enumerate(kept):
        completion.index = index
        if params.logprobs is None:
            completion.logprobs = None
    return evolve(output, outputs=kept)


def _selects(params: SamplingParams) -> bool:
    return isinstance(params, SamplingParams) and (params.best_of or 0) > params.n


def _worse(completion: CompletionOutput) -> tuple[bool, float]:
    return completion.finish_reason in ("error", "abort"), -(completion.cumulative_logprob or 0.0)
