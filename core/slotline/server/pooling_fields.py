"""Bodies and answers of `/v1/embeddings`, `/v1/classify`, `/v1/score` and `/v1/rerank`."""

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


class EmbeddingFields(PoolingFields):
    """The body of `/v1/embeddings`."""

    input: Prompts
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None


class ClassifyFields(PoolingFields):
    """The body of `/v1/classify`."""

    input: Prompts
    use_activation: bool | None = None


class ScoreFields(PoolingFields):
    """The body of `/v1/score`: one text against one or many, or pairs."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankFields(PoolingFields):
    """The body of `/v1/rerank`."""

    query: str
    documents: list[str]
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
    """The similarity of a pair of texts, from -1 to 1."""

    index: int
    object: str = "score"
    score: float


class Scores(Struct, kw_only=True):
    """The similarity of each pair."""

    id: str
    object: str = "list"
    model: str
    data: list[Score]
    usage: PoolingUsage


class Document(Struct):
    """A document of a request."""

    text: str


class Ranked(Struct, kw_only=True):
    """A document's number and its similarity to the query, from -1 to 1."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(Struct, kw_only=True):
    """The documents, the most similar one first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage
