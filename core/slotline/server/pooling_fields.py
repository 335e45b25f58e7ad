"""Bodies and answers of `/v1/embeddings`, `/v1/classify`, `/v1/score`, `/v1/rerank` and `/pooling`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from slotline.server.fields import Fields
from slotline.server.ranges import Positive, Prompts


class PoolingFields(Fields, kw_only=True):
    """What requests of these endpoints share."""

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingFields(PoolingFields):
    """The body of `/v1/embeddings`."""

    input: Prompts
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class ClassifyFields(PoolingFields):
    """The body of `/v1/classify`."""

    input: Prompts
    use_activation: bool | None = None


class PoolFields(PoolingFields):
    """The body of `/pooling`."""

    input: Prompts
    task: str | None = None
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    prompt_name: str | None = None


class PairFields(PoolingFields, kw_only=True):
    """What requests for the scores of pairs share."""

    use_activation: bool | None = None
    prompt_name: str | None = None
    instruction: str | None = None


class ScoreFields(PairFields):
    """The body of `/v1/score`: one text against one or many, or pairs."""

    text_1: str | list[str]
    text_2: str | list[str]


class Document(Struct):
    """A document of a request."""

    text: str


class RerankFields(PairFields):
    """The body of `/v1/rerank`."""

    query: str
    documents: list[str | Document]
    top_n: Positive | None = None
    return_documents: bool | None = None


class Embedding(Struct, kw_only=True):
    """The embedding of an input."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class PoolingUsage(Struct):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct, kw_only=True):
    """An embedding for each input."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class Pooled(Struct, kw_only=True):
    """What a task gives for an input: numbers, or a list of them for each token."""

    index: int
    object: str = "pooling"
    data: list[list[float] | float] | str


class PooledList(Struct, kw_only=True):
    """What a task gives for each input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class Classified(Struct, kw_only=True):
    """The probabilities of the classes for an input, and the name of the most likely one."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(Struct, kw_only=True):
    """The classes of each input."""

    id: str
    object: str = "list"
    model: str
    data: list[Classified]
    usage: PoolingUsage


class Score(Struct, kw_only=True):
    """The score of a pair of texts."""

    index: int
    object: str = "score"
    score: float


class Scores(Struct, kw_only=True):
    """The score of each pair."""

    id: str
    object: str = "list"
    model: str
    data: list[Score]
    usage: PoolingUsage


class Ranked(Struct, kw_only=True):
    """A document's number and its score with the query."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(Struct, kw_only=True):
    """The documents, the one with the highest score first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage
