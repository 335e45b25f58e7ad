"""Scores of pairs of texts: prompts that an engine of any score type computes, and the scores from their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import field, frozen

from slotline.core.api.outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from slotline.core.api.prompts import Prompt, of_task
from slotline.llm.submitter import Submitter
from slotline.registry.contracts import PoolingForm, PoolingParams
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

Output = PoolingRequestOutput[PoolingOutput]
_TASKS = {"cross-encoder": "score", "bi-encoder": "embed", "late-interaction": "token_embed"}


@frozen(kw_only=True)
class Scoring:
    """What computes the scores of pairs.

    Attributes:
        prompts: the prompts to encode.
        task: their task.
        pairs: for each pair the places of its prompts. One place for a model that reads both texts.
    """

    prompts: Sequence[Prompt]
    task: str
    pairs: Sequence[tuple[int, ...]] = field(repr=False)

    def params(self, given: PoolingParams | None) -> PoolingParams:
        """Return the parameters of the prompts.

        Raises:
            RequestError: if those given are for another task.
        """
        if given is not None and given.task == "score":
            raise_unless_cross_encoder(self.task)
        return of_task(given or PoolingParams(), self.task)

    def outputs(self, found: Sequence[Output]) -> list[ScoringRequestOutput]:
        """Return the output of each pair. `found` are those of the prompts."""
        if self.task == "score":
            return [found[place] for (place,) in self.pairs]  # type: ignore[misc]
        score = _cosine if self.task == "embed" else max_sim
        return [_joined(found[first], found[second], score) for first, second in self.pairs]


def raise_unless_cross_encoder(task: str) -> None:
    """Refuse the task ``score`` for prompts of one text.

    Raises:
        RequestError: naming the task that they have.
    """
    if task != "score":
        raise RequestError(
            f"PoolingParams.task='score', and this model scores by {task!r} of each text", fix="leave the task out"
        )


def scoring(submitter: Submitter, form: PoolingForm, first: Any, second: Any, score_type: str | None = None) -> Scoring:
    """Return the prompts of pairs of texts.

    Args:
        submitter: has the tokenizer.
        form: of the engine.
        first, second: a text or several. One `first` goes with each `second`.
        score_type: a `ScoreType` in place of the model's.

    Raises:
        RequestError: if the engine scores no pairs in this way, or if the texts are no pairs.
    """
    kind = form.score_type if score_type is None else score_type
    task = _TASKS.get(str(kind), "score")
    if task not in form.tasks or kind not in _TASKS:
        reason = form.refusals.get(task, f"this engine serves {', '.join(form.tasks)}")
        shown = "" if score_type is None else f" as {safe_repr(score_type)}"
        raise RequestError(
            f"pairs of texts cannot be scored{shown}: {reason}",
            fix="take a cross-encoder with one label, or a model of embeddings",
        )
    left, right = _several(first, "first"), _several(second, "second")
    left = left * len(right) if len(left) == 1 else left
    if len(left) != len(right) or not left:
        raise RequestError(
            f"{len(left)} texts against {len(right)}", fix="give one text, or as many as on the other side"
        )
    if task == "score":
        prompts = [pair_prompt(submitter, form, *pair) for pair in zip(left, right, strict=True)]
        return Scoring(prompts=prompts, task=task, pairs=[(place,) for place in range(len(prompts))])
    places: dict[Any, int] = {}
    pairs = [tuple(places.setdefault(text, len(places)) for text in pair) for pair in zip(left, right, strict=True)]
    return Scoring(prompts=list(places), task=task, pairs=pairs)


def pair_prompt(submitter: Submitter, form: PoolingForm, first: str, second: str) -> dict[str, Any]:
    """Return the prompt of a pair of texts for a model that reads both.

    Raises:
        RequestError: if they cannot be tokenized.
    """
    token_ids, types = submitter.tokenizer.encode_pair(first, second)
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    return prompt | {"token_type_ids": types} if form.token_types and any(types) else prompt


def max_sim(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of `first` [n, size] of the best product with a token of `second` [m, size]."""
    return (first @ second.T).amax(dim=1).sum()


def _cosine(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(first, second, dim=0)


def _joined(first: Output, second: Output, score: Any) -> ScoringRequestOutput:
    """Return the output of a pair from those of its texts."""
    whole = first.outputs is not None and second.outputs is not None
    told = first if first.outputs is None or whole else second
    return PoolingRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        prompt=None,
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        outputs=ScoringOutput(data=score(first.outputs.data, second.outputs.data).reshape(1))  # type: ignore[union-attr]
        if whole
        else None,
        finished=first.finished and second.finished,
        finish_reason=told.finish_reason,
        stop_reason=told.stop_reason,
        metrics=told.metrics,
    )


def _several(given: Any, what: str) -> list[str]:
    """Return a text or several as a list.

    Raises:
        RequestError: if they are no texts.
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
        raise RequestError(
            f"the {what} texts cannot be read: {safe_repr(given)}", fix="give a string, or a list of them"
        )
    return list(texts)
