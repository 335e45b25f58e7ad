"""Rewards: of a whole text by an outcome model, of each of its steps by a process model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen

from slotline.core.api.outputs import PoolingOutput, PoolingRequestOutput
from slotline.core.api.prompts import of_task
from slotline.llm.submitter import Submitter
from slotline.registry.contracts import PoolingParams
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

Output = PoolingRequestOutput[PoolingOutput]


@frozen(kw_only=True)
class Rewarding:
    """What computes the rewards of prompts.

    Attributes:
        params: parameters of the prompts.
        step: token that ends a step. None for the reward of the whole text.
    """

    params: PoolingParams
    step: int | None

    def outputs(self, found: Sequence[Output]) -> list[Output]:
        """Return the rewards [num_steps], or [1] of the whole text, of the prompts' outputs."""
        return [one if self.step is None or one.outputs is None else self._steps(one, self.step) for one in found]

    @staticmethod
    def _steps(output: Output, step: int) -> Output:
        """Return an output with the reward of each step: the score of the last class, which stands for a right step."""
        assert output.outputs is not None
        ends = torch.tensor(output.prompt_token_ids) == step  # [num_tokens] bool
        return evolve(output, outputs=PoolingOutput(data=output.outputs.data[ends][:, -1]))


def rewarding(submitter: Submitter, params: PoolingParams | None, step_token: str | int | None) -> Rewarding:
    """Return how an engine gives rewards.

    Args:
        submitter: knows the engine.
        params: parameters of the prompts. None for the default: probabilities of steps, and plain rewards of texts.
        step_token: the token that ends a step.

    Raises:
        RequestError: if the model gives no rewards, or if `step_token` is no token.
    """
    tasks = submitter.pooling_form.tasks
    if step_token is not None and "token_classify" in tasks:
        step = step_token if isinstance(step_token, int) else _token(submitter, step_token)
        return Rewarding(params=of_task(params or PoolingParams(), "token_classify"), step=step)
    if step_token is not None or "score" not in tasks:
        what = "steps" if step_token is not None else "texts"
        raise RequestError(
            f"no rewards of {what}: this engine serves {', '.join(tasks)}",
            fix="give the step_token of a model with a head for each token, or take a model with one label",
        )
    given = params or PoolingParams(use_activation=False)
    return Rewarding(params=of_task(given, "classify"), step=None)


def _token(submitter: Submitter, text: str) -> int:
    """Return the id of a token.

    Raises:
        RequestError: if the text is not one token.
    """
    hf = submitter.tokenizer.transformers
    found = hf.convert_tokens_to_ids(text)
    if not isinstance(found, int) or (found == hf.unk_token_id and text != hf.unk_token):
        raise RequestError(f"step_token={safe_repr(text)} is no token of this model", fix="give a token, or its id")
    return found
