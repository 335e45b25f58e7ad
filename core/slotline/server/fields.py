"""Fields that requests of several endpoints share, and their conversion to `SamplingParams`.

A field that is left out and one that is null mean the same. Unknown fields are refused by the decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from slotline.registry.contracts import StructuredOutputsParams
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.server.errors import unsupported
from slotline.server.ranges import (
    Factor,
    Natural,
    Outputs,
    Penalty,
    Prompts,
    Scale,
    Seed,
    Share,
    Text,
    Token,
    TokenBias,
    Tokens,
    TopK,
    TopP,
)

if TYPE_CHECKING:
    from slotline.server.messages_fields import MessagesFields


class Fields(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request's body, or an object in it."""


class StreamOptions(Fields):
    """Options of a stream.

    Attributes:
        include_usage: send the counts of tokens in a last chunk.
        continuous_usage_stats: send them in every chunk.
        include_obfuscation: only False is served, since nothing is padded.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Fields):
    """A named JSON schema of `response_format`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """Form of the output: ``text``, ``json_object``, or ``json_schema`` with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(Fields):
    """Parameters of sampling: OpenAI's, and slotline's own under the names of `SamplingParams`.

    The remaining fields say who asks. They have no effect on the output.
    """

    temperature: Scale | None = None
    top_p: TopP | None = None
    n: Outputs | None = None
    seed: Seed | None = None
    stop: Text | list[Text] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: TokenBias | None = None
    best_of: Outputs | None = None

    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: Factor | None = None
    stop_token_ids: list[Token] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Natural | None = None
    prompt_logprobs: Natural | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: list[Text] | None = None
    structured_outputs: dict[str, Any] | None = None
    guidance_scale: Scale | None = None
    negative_prompt: Text | None = None
    skip_special_tokens: bool | None = None
    extra_args: dict[str, Any] | None = None

    priority: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    request_id: str | None = None

    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


_SAMPLING = (
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "best_of",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "guidance_scale",
    "negative_prompt",
    "skip_special_tokens",
    "extra_args",
)
"""Fields that `SamplingParams` has under the same name and with the same meaning."""


def sampling_params(fields: SamplingFields, **more: Any) -> SamplingParams:
    """Return the parameters of a request. Those that are left out get the model's defaults.

    Args:
        fields: the request.
        more: parameters whose fields differ between endpoints: `max_tokens`, `logprobs`. None is left out.

    Raises:
        RequestError: naming the parameter, its value and the allowed values.
    """
    if fields.stream_options is not None:
        if not fields.stream:
            raise RequestError("stream_options without stream", fix="leave it out, or set stream to true")
        if fields.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")
    values = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    values |= {name: value for name, value in more.items() if value is not None}
    if fields.logit_bias:
        values["logit_bias"] = {_token(name): bias for name, bias in fields.logit_bias.items()}
    if (constraint := _constraint(fields)) is not None:
        values["structured_outputs"] = constraint
    return SamplingParams(**values)


def as_long_as_possible(params: SamplingParams) -> SamplingParams:
    """Return the same parameters for an answer that may take what the model's length leaves."""
    return SamplingParams(**{**{name: getattr(params, name) for name in params.given}, "max_tokens": None})


def prompt_options(fields: SamplingFields | MessagesFields) -> dict[str, Any]:
    """Return what else a prompt for `AsyncLLM.generate` may hold."""
    options = {"priority": fields.priority or 0, "cache_salt": fields.cache_salt or ""}
    transfer = fields.kv_transfer_params if isinstance(fields, SamplingFields) else None
    return {**options, "kv_transfer_params": transfer} if transfer else options


def as_prompts(name: str, given: Prompts) -> list[dict[str, Any]]:
    """Return each prompt of a field as a mapping for `AsyncLLM`.

    Raises:
        RequestError: if there is none, or the list mixes texts and tokens.
    """
    if isinstance(given, str):
        return [{"prompt": given}]
    kinds = {type(one) for one in given}
    if len(kinds) != 1:
        raise RequestError(
            f"{name} {'mixes texts and token ids' if kinds else 'is an empty list'}",
            fix="give a text, token ids, a list of texts, or a list of lists of token ids",
        )
    (kind,) = kinds
    if kind is int:
        return [{"prompt_token_ids": given}]
    return [{"prompt" if kind is str else "prompt_token_ids": one} for one in given]


def _token(name: str) -> int:
    try:
        return int(name)
    except ValueError as error:
        raise RequestError(f"logit_bias names {name!r}", fix="name token ids, as in {'50256': -100}") from error


def _constraint(fields: SamplingFields) -> StructuredOutputsParams | None:
    """Return the constraint of the output, None if there is none."""
    form = fields.response_format
    if form is not None and form.type != "text":
        if fields.structured_outputs is not None:
            raise RequestError("response_format and structured_outputs together", fix="give one of them")
        if form.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if form.json_schema is None or form.json_schema.schema is None:
            raise RequestError(
                "response_format has no json_schema.schema",
                fix="give {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}",
            )
        return StructuredOutputsParams(json=form.json_schema.schema)
    return None if fields.structured_outputs is None else as_constraint(fields.structured_outputs)


def as_constraint(given: dict[str, Any]) -> StructuredOutputsParams:
    """Return `structured_outputs` of a request as parameters.

    Raises:
        RequestError: for a wrong name or value.
    """
    try:
        return StructuredOutputsParams(**given)
    except TypeError as error:
        raise RequestError(f"structured_outputs: {error}", fix="name one kind of constraint, as 'json'") from error
