"""Sampling parameters of a request, under the usual names. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from attrs import evolve, field, fields, frozen

from slotline.registry.contracts import StructuredOutputsParams
from slotline.registry.errors import RequestError
from slotline.registry.plain_values import plain_list, plain_number
from slotline.registry.safe_repr import safe_repr

_Check = Callable[[Any, Any, Any], None]
_MOST = 16384
"""Outputs of a prompt; each is a request of its own."""
_LARGEST = 1e9
"""Of factors: what comes of it and any logit stays finite in float32."""


def _check(accepts: Callable[[Any], bool], allowed: str) -> _Check:
    """Return a validator that refuses with the parameter's name, its value and the allowed values."""

    def validate(_instance: Any, attribute: Any, value: Any) -> None:
        try:
            accepted = accepts(value)
        except Exception:  # a foreign object may raise anything
            accepted = False
        wide = isinstance(value, int) and not -(2**63) <= value < 2**63  # does not fit into the rows' arrays
        if wide or not accepted:
            raise RequestError(
                f"{attribute.name}={safe_repr(value, 80)} is not allowed",
                fix=f"{attribute.name} must be {allowed}" + (", of 64 bits at most" if wide else ""),
            )

    return validate


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _tuple(value: Any) -> Any:
    """Return a list as a tuple, a string as a tuple of one, and None as an empty tuple.

    Any other value is left to the validator.
    """
    value = plain_list(value)
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    try:
        return tuple(map(plain_number, value)) if isinstance(value, Iterable) else value
    except Exception:  # an object may only claim to be iterable
        return value


def _tuples(value: Any) -> Any:
    listed = _tuple(value)
    return tuple(map(_tuple, listed)) if isinstance(listed, tuple) else listed


def _plain_mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {plain_number(key): plain_number(item) for key, item in value.items()}


def _optional_tuple(value: Any) -> Any:
    return None if value is None else _tuple(value)


def _is_token(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_mapping(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


_is_flag = _check(lambda v: isinstance(v, bool), "True or False")
_is_penalty = _check(lambda v: _is_number(v) and -2 <= v <= 2, "a number in [-2, 2]")


@frozen(kw_only=True, slots=False)
class SamplingParams:
    """Parameters for sampling one request's output.

    Attributes:
        n: outputs per prompt, sampled independently. At most 16,384.
        best_of: number of outputs to sample, of which the `n` with the highest `cumulative_logprob` are returned, best
            first. None for n.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens. 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p.
        min_p: drop tokens less likely than min_p times the most likely one.
        presence_penalty, frequency_penalty: subtracted from the logits of output tokens, once or per occurrence.
        repetition_penalty: divides positive and multiplies negative logits of prompt and output tokens.
        seed: makes the request's text independent of everything else in the batch.
        stop: strings that end the output. They are not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output.
        ignore_eos: continue after the model's end-of-sequence tokens.
        max_tokens: most output tokens. None for the most that the model's length allows.
        min_tokens: least number of output tokens before a stop token. The prompt must leave room for them.
        logprobs: return the log-probabilities of the sampled token and of this number of top tokens.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: token id to a number added to its logit.
        allowed_token_ids: all other tokens are banned. None allows all.
        bad_words: texts that never occur in the output, in any tokenization and with or without a space before them. A
            match may begin in the prompt.
        bad_words_token_ids: the same as token ids. The engine adds those of `bad_words` at admission.
        logits_processors: functions of only this request, called with its output tokens so far (list of int) and its
            logits [vocab_size] float32, or with its prompt's tokens first if they take three arguments. Each returns
            the logits. Slow: they run one by one on the host's thread in every step.
        structured_outputs: constraint on the output: a JSON schema, a regular expression, a grammar.
        guidance_scale: scale of classifier-free guidance from the negative prompt's logits to the prompt's. 1 for none.
            It costs a second row.
        negative_prompt: text, or `negative_prompt_token_ids`. None for the prompt's last token.
        detokenize: True to return text.
        skip_special_tokens: leave special tokens out of the text.
        extra_args: parameters of third-party logits processors.

    NumPy numbers are accepted as numbers. Parameters that are left out get their defaults from the checkpoint's
    generation_config.json, see `sampling.generation_config`.

    Raises:
        RequestError: naming the parameter, its value and the allowed values.
    """

    n: int = field(
        default=1, validator=_check(lambda v: _is_int(v) and 1 <= v <= _MOST, f"an integer from 1 to {_MOST}")
    )
    best_of: int | None = field(
        default=None,
        validator=_check(
            lambda v: v is None or (_is_int(v) and 1 <= v <= _MOST), f"an integer from 1 to {_MOST}, or None"
        ),
    )
    temperature: float = field(
        default=1.0, validator=_check(lambda v: _is_number(v) and 0 <= v <= _LARGEST, f"a number in [0, {_LARGEST:g}]")
    )
    top_k: int = field(
        default=0, validator=_check(lambda v: _is_int(v) and v >= -1, "an integer >= 1, or 0 or -1 for all tokens")
    )
    top_p: float = field(default=1.0, validator=_check(lambda v: _is_number(v) and 0 < v <= 1, "a number in (0, 1]"))
    min_p: float = field(default=0.0, validator=_check(lambda v: _is_number(v) and 0 <= v <= 1, "a number in [0, 1]"))
    presence_penalty: float = field(default=0.0, validator=_is_penalty)
    frequency_penalty: float = field(default=0.0, validator=_is_penalty)
    repetition_penalty: float = field(
        default=1.0,
        validator=_check(
            lambda v: _is_number(v) and 1 / _LARGEST <= v <= _LARGEST, f"a number in [{1 / _LARGEST:g}, {_LARGEST:g}]"
        ),
    )
    seed: int | None = field(
        default=None,
        validator=_check(lambda v: v is None or _is_int(v), "an integer or None"),
    )
    stop: tuple[str, ...] = field(
        default=(),
        converter=_tuple,
        validator=_check(lambda v: all(isinstance(s, str) and s for s in v), "non-empty strings"),
    )
    stop_token_ids: tuple[int, ...] = field(
        default=(), converter=_tuple, validator=_check(lambda v: all(map(_is_token, v)), "token ids >= 0")
    )
    include_stop_str_in_output: bool = field(default=False, validator=_is_flag)
    ignore_eos: bool = field(default=False, validator=_is_flag)
    max_tokens: int | None = field(
        default=16,
        validator=_check(lambda v: v is None or (_is_int(v) and v >= 1), "an integer >= 1, or None for no limit"),
    )
    min_tokens: int = field(default=0, validator=_check(lambda v: _is_int(v) and v >= 0, "an integer >= 0"))
    logprobs: int | None = field(
        default=None, validator=_check(lambda v: v is None or (_is_int(v) and v >= 0), "an integer >= 0 or None")
    )
    prompt_logprobs: int | None = field(
        default=None, validator=_check(lambda v: v is None or (_is_int(v) and v >= 0), "an integer >= 0 or None")
    )
    logit_bias: Mapping[int, float] | None = field(
        default=None,
        converter=_plain_mapping,
        validator=_check(_is_mapping, "a mapping from token ids to numbers, or None"),
    )
    allowed_token_ids: tuple[int, ...] | None = field(
        default=None,
        converter=_optional_tuple,
        validator=_check(lambda v: v is None or (v and all(map(_is_token, v))), "one or more token ids >= 0, or None"),
    )
    bad_words: tuple[str, ...] = field(
        default=(),
        converter=_tuple,
        validator=_check(lambda v: all(isinstance(s, str) and s.strip() for s in v), "strings that are not blank"),
    )
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(
        default=(),
        converter=_tuples,
        validator=_check(
            lambda v: all(word and all(map(_is_token, word)) for word in v), "lists of one or more token ids >= 0"
        ),
    )
    logits_processors: tuple[Callable[..., Any], ...] = field(
        default=(), converter=_tuple, validator=_check(lambda v: all(map(callable, v)), "a list of callables")
    )
    structured_outputs: StructuredOutputsParams | None = field(
        default=None,
        validator=_check(
            lambda v: v is None or isinstance(v, StructuredOutputsParams), "a StructuredOutputsParams or None"
        ),
    )
    guidance_scale: float = field(
        default=1.0, validator=_check(lambda v: _is_number(v) and 0 <= v <= _LARGEST, f"a number in [0, {_LARGEST:g}]")
    )
    negative_prompt: str | None = field(
        default=None,
        validator=_check(lambda v: v is None or (isinstance(v, str) and bool(v)), "a non-empty string, or None"),
    )
    negative_prompt_token_ids: tuple[int, ...] | None = field(
        default=None,
        converter=_optional_tuple,
        validator=_check(lambda v: v is None or (v and all(map(_is_token, v))), "one or more token ids >= 0, or None"),
    )
    detokenize: bool = field(default=True, validator=_is_flag)
    skip_special_tokens: bool = field(default=True, validator=_is_flag)
    extra_args: Mapping[str, Any] | None = field(
        default=None,
        converter=_plain_mapping,
        validator=_check(_is_mapping, "a mapping from parameter names to values, or None"),
    )

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}",
                fix="lower min_tokens or raise max_tokens",
            )
        if self.best_of is not None:
            if self.best_of < self.n:
                raise RequestError(f"best_of={self.best_of} is below n={self.n}", fix="raise best_of or lower n")
            if self.best_of > self.n and self.greedy:
                raise RequestError(
                    f"best_of={self.best_of} with temperature=0, whose outputs are all equal",
                    fix="set temperature above 0, or leave best_of out",
                )
        for name in ("negative_prompt", "negative_prompt_token_ids"):
            if getattr(self, name) is not None and self.guidance_scale == 1:
                raise RequestError(f"{name} without guidance", fix="set guidance_scale to another number than 1")
        if self.negative_prompt is not None and self.negative_prompt_token_ids is not None:
            raise RequestError("negative_prompt and negative_prompt_token_ids together", fix="give one of them")
        for name in self.extra_args or ():
            if name in {parameter.name for parameter in fields(SamplingParams)}:
                raise RequestError(f"extra_args names {name!r}", fix=f"give it as SamplingParams({name}=...)")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0

    def as_mapping(self) -> dict[str, Any]:
        """Return all parameters by name, `extra_args` merged in, as logits processors read them."""
        values = {name: getattr(self, name) for name in _NAMES}
        return {**values, **(self.extra_args or {})}

    @property
    def given(self) -> frozenset[str]:
        """Parameters that the caller set, even to their default value."""
        return getattr(self, _GIVEN, frozenset())

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return these parameters with other defaults for the parameters that the caller left out.

        Defaults that restrict sampling are not applied to greedy requests.

        Raises:
            RequestError: if a default contradicts the caller's parameters.
        """
        missing = {name: value for name, value in defaults.items() if name not in self.given}
        if missing.get("temperature", self.temperature) == 0:
            missing = {name: value for name, value in missing.items() if name not in _NARROWING}
        if "extra_args" in defaults:
            missing["extra_args"] = {**defaults["extra_args"], **(self.extra_args or {})}
        return evolve(self, **missing) if missing else self


_GIVEN = "_given"
_NAMES = tuple(one.name for one in fields(SamplingParams) if one.name != "extra_args")
_NARROWING = frozenset({"top_k", "top_p", "min_p"})


def _remember_given(made: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor of `SamplingParams` read NumPy's numbers, and record the given parameters.

    `attrs.evolve` passes all parameters, of which only those different from the default count.
    """
    defaults = {one.name: one.default for one in fields(SamplingParams)}

    @functools.wraps(made)
    def init(self: SamplingParams, **values: Any) -> None:
        if unknown := values.keys() - defaults.keys():
            raise _unknown(min(unknown), defaults)
        values = {name: plain_number(value) for name, value in values.items()}
        made(self, **values)
        given = [name for name in values if len(values) < len(defaults) or getattr(self, name) != defaults[name]]
        object.__setattr__(self, _GIVEN, frozenset(given))

    return init


def _unknown(name: str, names: Iterable[str]) -> RequestError:
    from slotline.registry.config.faults import similar

    return RequestError(
        f"SamplingParams has no parameter {name!r}{similar(name, names)}",
        fix="leave it out; parameters of logits processors of others go into extra_args",
    )


SamplingParams.__init__ = _remember_given(SamplingParams.__init__)  # type: ignore[method-assign]
