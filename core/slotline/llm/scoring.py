"""Scores of pairs of texts: prompts that an engine of any score type computes, and the scores from their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import field, frozen

from slotline.core.api.outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from slotline.core.api.prompts import of_task
from slotline.llm.pooled_texts import prefix, side_prefix
from slotline.llm.submitter import Submitter
from slotline.llm.truncation import limit_of
from slotline.registry.contracts import PoolingForm, PoolingParams
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr
from slotline.text.template import ChatOptions

Output = PoolingRequestOutput[PoolingOutput]
Score = Callable[[Output, Output], torch.Tensor]
_TASKS = {"cross-encoder": "score", "bi-encoder": "embed", "late-interaction": "token_embed"}
_SIMILARITIES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": partial(torch.nn.functional.cosine_similarity, dim=0),
    "dot": torch.dot,
    "euclidean": lambda first, second: -(first - second).norm(),
    "manhattan": lambda first, second: -(first - second).abs().sum(),
}


@frozen(kw_only=True)
class Scoring:
    """What computes the scores of pairs.

    Attributes:
        prompts: the prompts to encode.
        task: their task.
        pairs: for each pair the places of its prompts. One place for a model that reads both texts.
        score: the score of two outputs.
    """

    prompts: Sequence[dict[str, Any]]
    task: str
    pairs: Sequence[tuple[int, ...]] = field(repr=False)
    score: Score | None = None

    def params(self, given: PoolingParams | None) -> PoolingParams:
        """Return the parameters of the prompts.

        Raises:
            RequestError: if those given are for another task.
        """
        if given is not None and given.task == "score" != self.task:
            raise RequestError(
                f"PoolingParams.task='score', and this model scores by {self.task!r} of each text",
                fix="leave the task out",
            )
        return of_task(given or PoolingParams(), self.task)

    def outputs(self, found: Sequence[Output]) -> list[ScoringRequestOutput]:
        """Return the output of each pair. `found` are those of the prompts."""
        if self.score is None:
            return [found[place] for (place,) in self.pairs]  # type: ignore[misc]
        return [_joined(found[first], found[second], self.score) for first, second in self.pairs]


def scoring(
    submitter: Submitter,
    first: Any,
    second: Any,
    *,
    score_type: str | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
    pooling_params: PoolingParams | None = None,
) -> Scoring:
    """Return the prompts of pairs of texts.

    Args:
        submitter: knows the engine.
        first, second: a text or several. One `first` goes with each `second`.
        score_type: a `ScoreType` in place of the model's.
        prompt_name: the prompt before the first text in place of the default.
        instruction: its text, for a model that reads both texts.
        pooling_params: those of the prompts, which may cut them.

    Raises:
        RequestError: if the engine scores no pairs in this way, or if the texts are no pairs.
    """
    form, limit = submitter.pooling_form, limit_of(submitter, pooling_params or PoolingParams())
    kind, task = _kind(form, score_type)
    left, right = _several(first, "first"), _several(second, "second")
    left = left * len(right) if len(left) == 1 else left
    if len(left) != len(right) or not left:
        raise RequestError(
            f"{len(left)} texts against {len(right)}", fix="give one text, or as many as on the other side"
        )
    if task == "score":
        text = prefix(form, prompt_name) if instruction is None else instruction
        prompts = [pair_prompt(submitter, form, *pair, text, limit) for pair in zip(left, right, strict=True)]
        return Scoring(prompts=prompts, task=task, pairs=[(place,) for place in range(len(prompts))])
    if instruction is not None:
        raise RequestError(f"instruction={safe_repr(instruction)}: only a cross-encoder reads one", fix="leave it out")
    before = side_prefix(form, "query") if prompt_name is None else prefix(form, prompt_name)
    left = [before + one for one in left]
    right = [side_prefix(form, "document") + one for one in right]
    places: dict[str, int] = {}
    pairs = [tuple(places.setdefault(text, len(places)) for text in pair) for pair in zip(left, right, strict=True)]
    prompts = [{"prompt_token_ids": submitter.encode(text, limit), "prompt": text} for text in places]
    score: Score = partial(_similarity, _SIMILARITIES[form.texts.similarity])
    if kind == "late-interaction":
        score = partial(_late_interaction, _skipped(submitter, form))
    return Scoring(prompts=prompts, task=task, pairs=pairs, score=score)


def _kind(form: PoolingForm, score_type: str | None) -> tuple[str, str]:
    """Return how an engine scores pairs, and the task of the prompts.

    Raises:
        RequestError: if it does not score in this way.
    """
    kind = str(form.score_type if score_type is None else score_type)
    task = _TASKS.get(kind, "score")
    if task in form.tasks and kind in _TASKS:
        return kind, task
    reason = form.refusals.get(task, f"this engine serves {', '.join(form.tasks)}")
    shown = "" if score_type is None else f" as {safe_repr(score_type)}"
    raise RequestError(
        f"pairs of texts cannot be scored{shown}: {reason}",
        fix="take a cross-encoder with one label, or a model of embeddings",
    )


def pair_prompt(
    submitter: Submitter, form: PoolingForm, first: str, second: str, before: str, limit: int | None = None
) -> dict[str, Any]:
    """Return the prompt of a pair of texts for a model that reads both.

    A chat template that has the roles ``query`` and ``document`` makes it, else the tokenizer joins the texts.

    Args:
        before: the instruction, empty for none. It is the system's message, or stands before the first text.
        limit: the most tokens. None for all.

    Raises:
        RequestError: if they cannot be tokenized.
    """
    if submitter.tokenizer.template_has_roles("query", "document"):
        roles = [("system", before)] if before else []
        roles += [("query", first), ("document", second)]
        messages = [{"role": role, "content": text} for role, text in roles]
        options = ChatOptions(add_generation_prompt=False)
        return {"prompt_token_ids": submitter.tokenizer.chat_prompt(messages, options)}
    token_ids, types = submitter.tokenizer.encode_pair(before + first, second, limit)
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    return prompt | {"token_type_ids": types} if form.token_types and any(types) else prompt


def max_sim(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of `first` [n, size] of the best product with a token of `second` [m, size]."""
    return (first @ second.T).amax(dim=1).sum()


def _late_interaction(skipped: frozenset[int], first: Output, second: Output) -> torch.Tensor:
    """Return MaxSim, without the `skipped` tokens of the second text unless it has no others."""
    assert first.outputs is not None
    assert second.outputs is not None
    kept = [index for index, token in enumerate(second.prompt_token_ids) if token not in skipped]
    return max_sim(first.outputs.data, second.outputs.data[kept] if kept else second.outputs.data)


def _similarity(
    compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], first: Output, second: Output
) -> torch.Tensor:
    assert first.outputs is not None
    assert second.outputs is not None
    return compare(first.outputs.data, second.outputs.data)


def _skipped(submitter: Submitter, form: PoolingForm) -> frozenset[int]:
    """Return the token ids of the words that count for nothing in a second text."""
    if not form.texts.skipped_words:
        return frozenset()
    hf = submitter.tokenizer.transformers
    ids = {word: hf.convert_tokens_to_ids(word) for word in form.texts.skipped_words}
    return frozenset(token for word, token in ids.items() if token is not None and token != hf.unk_token_id)


def _joined(first: Output, second: Output, score: Score) -> ScoringRequestOutput:
    """Return the output of a pair from those of its texts."""
    whole = first.outputs is not None and second.outputs is not None
    told = first if first.outputs is None or whole else second
    return PoolingRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        prompt=None,
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        outputs=ScoringOutput(data=score(first, second).reshape(1)) if whole else None,
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
