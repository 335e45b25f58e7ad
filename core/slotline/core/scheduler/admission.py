"""Checks of a request before it takes any resource."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from slotline.core.batch.request import Request
from slotline.core.kv_cache.kv_cache_manager import KVCacheManager
from slotline.registry.errors import CapacityError, RequestError
from slotline.registry.safe_repr import safe_repr


@define(kw_only=True)
class EngineLimits:
    """Bounds that requests are checked against at admission.

    Attributes:
        tasks: all tasks of the model.
        absent: by name of a further argument of `Engine.add` or a sampling parameter whose feature this engine lacks, a
            function that returns the reason and the remedy for a value.
    """

    max_model_len: int
    max_batched_tokens: int
    max_logprobs: int
    vocab_size: int
    chunked_prefill: bool
    priorities: bool
    tasks: tuple[str, ...] = ("generate",)
    absent: Mapping[str, Callable[[Any], tuple[str, str]]] = field(factory=dict)


MAX_SALT_BYTES = 4096
"""Most bytes of a request's cache salt, enough for a token of an identity provider."""


def check_salt(cache_salt: str) -> None:
    """Refuse a salt that prefixes cannot be hashed with.

    Raises:
        RequestError: with the value or its length.
    """
    try:
        size = len(cache_salt.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"cache_salt={cache_salt!r:.60} has half a surrogate pair at place {error.start}, which is no character",
            fix="give text that can be encoded as UTF-8, for instance a hexadecimal digest",
        ) from error
    if size > MAX_SALT_BYTES:
        raise RequestError(
            f"cache_salt has {size} bytes; at most {MAX_SALT_BYTES} are allowed", fix="give a digest of it instead"
        )


def check_request(request: Request, limits: EngineLimits, *, has_tokenizer: bool) -> None:
    """Refuse a request that cannot run.

    Raises:
        RequestError: with the value and the fix.
    """
    if request.samples and request.task_params is not None:
        raise other_task(request.task_params, "generate", limits.tasks)
    for name, kind in (("request_id", str), ("priority", int), ("cache_salt", str)):
        if not isinstance(value := getattr(request, name), kind):
            raise RequestError(
                f"{name}={safe_repr(value)} is not allowed", fix=f"{name} must be of type {kind.__name__}"
            )
    check_salt(request.cache_salt)
    _check_tokens(request, limits)
    params = request.params
    if (highest := max(params.stop_token_ids, default=0)) >= limits.vocab_size:
        raise RequestError(f"stop_token_ids names token {highest}", fix=f"token ids are 0 to {limits.vocab_size - 1}")
    if request.priority and not limits.priorities:
        raise RequestError(
            f"priority={request.priority} under a policy without priorities", fix='set scheduler.policy = "priority"'
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > limits.max_logprobs:
            raise RequestError(
                f"{name}={getattr(params, name)} is above sampling.max_logprobs={limits.max_logprobs}",
                fix=f"ask for at most {limits.max_logprobs} or raise sampling.max_logprobs",
            )
    if params.stop and not has_tokenizer:
        raise RequestError(
            f"stop={list(params.stop)} needs a tokenizer and the model has none", fix="use stop_token_ids"
        )
    for name, told in limits.absent.items():
        if (value := getattr(params, name, None)) is not None:
            reason, fix = told(value)
            raise RequestError(f"{name} cannot be had: {reason}", fix=fix)


def _check_tokens(request: Request, limits: EngineLimits) -> None:
    """Refuse a prompt whose tokens or length do not fit the engine."""
    length = len(request.prompt_token_ids)
    if length == 0:
        raise RequestError("the prompt is empty", fix="give at least one token")
    outputs, beside = (1, " beside one output token") if request.samples else (0, "")
    longest = limits.max_model_len - outputs
    if length > longest:
        raise RequestError(
            f"the prompt has {length} tokens; at most {longest} fit{beside} into max_model_len={limits.max_model_len}",
            fix="shorten the prompt or raise scheduler.max_model_len",
        )
    tokens = request.token_array
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        wrong = next(token for token in request.prompt_token_ids if not 0 <= token < limits.vocab_size)
        raise RequestError(
            f"token id {wrong} is outside the vocabulary of {limits.vocab_size}",
            fix="use this model's tokenizer",
        )
    if (asked := request.params.min_tokens) > (room := limits.max_model_len - length):
        raise RequestError(
            f"min_tokens={asked} does not fit: the prompt has {length} tokens and leaves {room} of "
            f"max_model_len={limits.max_model_len}",
            fix="lower min_tokens, shorten the prompt or raise scheduler.max_model_len",
        )
    if not limits.chunked_prefill and length > limits.max_batched_tokens:
        raise RequestError(
            f"the prompt has {length} tokens and a step takes {limits.max_batched_tokens}",
            fix="set scheduler.chunked_prefill = true or raise scheduler.max_batched_tokens",
        )


def other_task(params: Any, runs: str, tasks: Sequence[str]) -> RequestError:
    """Return the refusal of a request for another task than the engine's, or for none.

    Args:
        params: the request's, None for sampling parameters.
        runs: the engine's task. `tasks` are the model's.
    """
    asked = "generate" if params is None else params.task
    serves = f"the model serves {', '.join(tasks)}, and this engine runs {runs!r}"
    if asked is None:
        name = type(params).__name__
        return RequestError(f"{name}.task is missing; {serves}", fix=f"give {name}(task={runs!r})")
    elsewhere = f'build an engine with task = "{asked}"' if asked in tasks else "take a model that serves it"
    return RequestError(
        f"a request for the task {asked!r} cannot run: {serves}", fix=f"{elsewhere}, or ask for {runs!r}"
    )


def check_inputs(request: Request, taken: frozenset[str], limits: EngineLimits) -> None:
    """Refuse further arguments of a request that no extension of this engine takes.

    Args:
        request: with its arguments in `inputs`. None and empty ones are nobody's concern.
        taken: names that extensions take.
        limits: knows the reasons for features that this engine lacks.

    Raises:
        RequestError: naming the argument, the reason and the remedy.
    """
    for name, value in request.inputs.items():
        if name in taken or value is None or value == ():
            continue
        if name not in limits.absent:
            names = ", ".join(sorted(taken)) or "none"
            raise RequestError(
                f"{name}={safe_repr(value)}: no extension of this engine takes it", fix=f"arguments it takes: {names}"
            )
        reason, fix = limits.absent[name](value)
        raise RequestError(reason, fix=fix)


def check_capacity(request: Request, cache: KVCacheManager, max_model_len: int) -> None:
    """Refuse a request that would not fit into the pool even as the only request.

    Raises:
        RequestError: with the number of blocks that it needs and that there are.
    """
    length = len(request.prompt_token_ids)
    tokens = min(length + (request.params.max_tokens or max_model_len), max_model_len)
    needed, usable = cache.blocks_for_one(tokens, request.fixed_len), cache.pool.num_blocks - 1
    if needed > usable:
        raise RequestError(
            f"{length} prompt tokens and max_tokens={request.params.max_tokens} need {needed} cache blocks; "
            f"the pool has {usable}",
            fix="lower max_tokens, shorten the prompt, or raise cache.memory",
        ) from CapacityError(f"{needed} blocks needed, {usable} in all")


def check_common_capacity(requests: Sequence[Request], cache: KVCacheManager) -> None:
    """Refuse requests that are computed together if they would not fit into the pool even without others.

    Raises:
        RequestError: with the number of blocks that they need and that there are.
    """
    lengths = [len(one.prompt_token_ids) + (one.params.max_tokens or 0) for one in requests]
    needed, usable = sum(cache.blocks_for_one(length, 0) for length in lengths), cache.pool.num_blocks - 1
    if needed > usable:
        raise RequestError(
            f"the {' and '.join(one.role for one in requests)} need {needed} cache blocks with max_tokens="
            f"{requests[0].params.max_tokens}; the pool has {usable}",
            fix="lower max_tokens, shorten a prompt, or raise cache.memory",
        ) from CapacityError(f"{needed} blocks needed, {usable} in all")
