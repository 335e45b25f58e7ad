"""Parameters and methods of pooling requests. Torch-free at import.

Part of the model-family contract: a model that serves a pooling task provides a `Pooler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import field, frozen

from slotline.registry.errors import RequestError
from slotline.registry.plain_values import plain_number
from slotline.registry.safe_repr import safe_repr

if TYPE_CHECKING:
    import torch

POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify", "score")
"""The tasks that give vectors or scores for a prompt instead of tokens."""

TOKEN_TASKS = ("token_embed", "token_classify")
"""The tasks that give a vector for each token of a prompt."""

ScoreType = Literal["cross-encoder", "bi-encoder", "late-interaction"]
"""How two texts are scored: by a model that reads both, by the cosine of their embeddings, or by the sum over the first
text's tokens of the best product with a token of the second one (MaxSim)."""

PoolingMethod = Literal["last", "cls", "mean"]
"""Which hidden states of a prompt count: its last token's, its first token's, or the mean over all its tokens."""

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""How two embeddings are compared: the latter two by the negative distance."""

_ONLY_FOR = {
    "dimensions": ("embed", "token_embed"),
    "normalize": ("embed", "token_embed"),
    "use_activation": ("classify", "token_classify", "score"),
}


def _task(_instance: Any, _attribute: Any, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or value == "generate"):
        raise RequestError(
            f"task={safe_repr(value)} is no pooling task",
            fix=f"use one of {', '.join(POOLING_TASKS)}; for generation, SamplingParams",
        )


def _flag(_instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise RequestError(
            f"{attribute.name}={safe_repr(value)} is not allowed",
            fix=f"{attribute.name} must be True or False, or None for the model's own choice",
        )


def _dimensions(_instance: Any, _attribute: Any, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise RequestError(
            f"dimensions={safe_repr(value)} is not allowed", fix="dimensions must be an integer >= 1, or None for all"
        )


def _truncation(_instance: Any, _attribute: Any, value: Any) -> None:
    wrong = not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1)
    if value is not None and wrong:
        raise RequestError(
            f"truncate_prompt_tokens={safe_repr(value)} is not allowed",
            fix="give an integer >= 1, -1 for as many tokens as the engine takes, or None to refuse a longer prompt",
        )


@frozen(kw_only=True)
class PoolingParams:
    """Parameters for pooling one request's hidden states. None leaves a parameter to the model.

    Attributes:
        task: one of `POOLING_TASKS`. `LLM.embed`, `LLM.classify` and `LLM.score` fill it in. Elsewhere it must be
            given.
        dimensions: length of the embedding, or of each token's. A reduced length requires a model that was trained for
            it (Matryoshka).
        normalize: True to divide the embedding by its length.
        use_activation: True to apply the model's softmax or sigmoid to class scores and to the score of a pair.
        truncate_prompt_tokens: the most tokens of a prompt: of a text as its tokenizer cuts, of token ids the last.
            -1 for as many as the engine takes. None to refuse a prompt that is too long.

    Raises:
        RequestError: naming the parameter, its value and the allowed values.
    """

    task: str | None = field(default=None, validator=_task)
    dimensions: int | None = field(default=None, converter=plain_number, validator=_dimensions)
    normalize: bool | None = field(default=None, converter=plain_number, validator=_flag)
    use_activation: bool | None = field(default=None, converter=plain_number, validator=_flag)
    truncate_prompt_tokens: int | None = field(default=None, converter=plain_number, validator=_truncation)

    def __attrs_post_init__(self) -> None:
        for name, tasks in _ONLY_FOR.items():
            if self.task is not None and self.task not in tasks and getattr(self, name) is not None:
                raise RequestError(
                    f"{name}={getattr(self, name)!r} has no meaning for task {self.task!r}",
                    fix=f"leave {name} out; it belongs to task {' or '.join(map(repr, tasks))}",
                )


@frozen(kw_only=True)
class PoolingForm:
    """What callers know of a pooling engine, beside its requests' answers. It can be pickled.

    Attributes:
        tasks: tasks that its requests may have.
        score_type: how it scores two texts. None if it cannot.
        refusals: by task that it does not serve, the reason.
        token_types: whether prompts may have `token_type_ids`.
        texts: how texts are prepared and compared.
    """

    tasks: tuple[str, ...]
    score_type: ScoreType | None = None
    refusals: Mapping[str, str] = field(factory=dict)
    token_types: bool = False
    texts: PooledTexts = field(factory=lambda: PooledTexts())


@frozen(kw_only=True)
class PooledTexts:
    """How texts are prepared for a model of embeddings, and how their embeddings are compared.

    Attributes:
        prompts: texts to put before another one, by name.
        default_prompt: name of the one to use if none is asked for. None for none.
        similarity: of two embeddings.
        skipped_words: words of a second text that count for nothing in late interaction, each one token.
    """

    prompts: Mapping[str, str] = field(factory=dict)
    default_prompt: str | None = None
    similarity: Similarity = "cosine"
    skipped_words: tuple[str, ...] = ()


class Pooler(Protocol):
    """Adjusts pooling parameters and computes answers from pooled hidden states.

    The core gathers the states, also over the chunks of a prompt. `method` selects the states to use.

    A pooler may have more attributes. `tasks` are the tasks of requests that it serves, the engine's alone if it is
    absent. `refusals` gives the reason by task for others. `texts` is a `PooledTexts`.
    """

    @property
    def method(self) -> PoolingMethod:
        """Hidden states to use: ``last``, ``cls`` or ``mean``."""
        ...

    def adjust(self, params: PoolingParams) -> PoolingParams:
        """Return the parameters with None replaced by the model's defaults. Called once, at admission.

        Raises:
            slotline.registry.errors.RequestError: if the model cannot do what they ask.
        """
        ...

    def pool(self, states: torch.Tensor, params: Sequence[PoolingParams]) -> torch.Tensor:
        """Return the answers of requests whose prompts are computed.

        Args:
            states: [n, hidden_size] float32, each prompt's hidden states pooled by `method`. For a task of
                `TOKEN_TASKS` each of the prompt's tokens has a row with its own state.
            params: n parameters as `adjust` returned them.

        Returns:
            [n, size] float32. Of an embedding only the first `dimensions` numbers are read.
        """
        ...
