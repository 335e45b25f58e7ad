"""Pairs of requests: a leader, and the companion that a logits processor asks for, which computes another prompt.

The companion is a request like any other, with a row, blocks and prefixes of its own. The scheduler lets neither sample
without the other, and the companion gets the leader's token. They are preempted and ended together.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from slotline.core.api.tokenizer import Tokenizer
from slotline.core.batch.request import Request
from slotline.core.kv_cache.kv_cache_manager import KVCacheManager
from slotline.registry.contracts import Companion
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import CapacityError, RequestError


def refuse_companion(request: Request, asked: str, max_requests: int, *, drafts: bool, chunked_prefill: bool) -> None:
    """Refuse a companion that cannot be computed. `asked` is the request's parameter that wants it.

    Raises:
        RequestError: with the reason.
    """
    if drafts:
        raise RequestError(
            f"{asked} beside a drafter, which proposes for each prompt alone", fix='set drafter.name = "none"'
        )
    if request.features:
        raise RequestError(f"{asked} with multi_modal_data", fix="give a prompt of text alone")
    if not chunked_prefill:
        raise RequestError(
            f"{asked} needs prompts that may be divided over steps", fix="set scheduler.chunked_prefill = true"
        )
    if max_requests < 2:
        raise RequestError(f"{asked} takes two rows of scheduler.max_requests = {max_requests}", fix="raise it to 2")


def pair(request: Request, companion: Companion, tokenizer: Tokenizer | None, max_model_len: int) -> Request:
    """Return the companion of a request, and limit the request to the length that both can have.

    Raises:
        RequestError: if the other prompt is text and the model has no tokenizer, or leaves no room for `min_tokens`.
    """
    params, name = request.params, companion.name
    if not isinstance(companion.prompt, str):
        prompt = list(companion.prompt)
    elif tokenizer is not None:
        prompt = tokenizer.encode(companion.prompt)
    else:
        raise RequestError(f"{name} as text, and this model has no tokenizer", fix="give its token ids")
    room = max(1, max_model_len - max(len(prompt), len(request.prompt_token_ids)))
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens={params.min_tokens} does not fit: {name} has {len(prompt)} tokens and leaves "
            f"{room} of max_model_len={max_model_len}",
            fix=f"lower min_tokens, shorten {name} or raise scheduler.max_model_len",
        )
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    request.params = evolve(params, max_tokens=most)
    request.companion = Request(
        request_id=f"{request.request_id} ({name})",
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False),
        priority=request.priority,
        cache_salt=request.cache_salt,
        lora_request=request.lora_request,
        arrival=request.arrival + 1,
        leader=request,
    )
    return request.companion


def check_pair_capacity(request: Request, companion: Request, name: str, cache: KVCacheManager) -> None:
    """Refuse a pair that would not fit into the pool even without other requests.

    `name` is the name of the other prompt.

    Raises:
        RequestError: with the number of blocks that it needs and that there are.
    """
    lengths = [len(one.prompt_token_ids) + (one.params.max_tokens or 0) for one in (request, companion)]
    needed, usable = sum(cache.blocks_for_one(length, 0) for length in lengths), cache.pool.num_blocks - 1
    if needed > usable:
        raise RequestError(
            f"the prompt and {name} need {needed} cache blocks with max_tokens="
            f"{request.params.max_tokens}; the pool has {usable}",
            fix="lower max_tokens, shorten a prompt, or raise cache.memory",
        ) from CapacityError(f"{needed} blocks needed, {usable} in all")


def leaders(requests: Sequence[Request]) -> list[Request]:
    """Return the requests that users know of, each once."""
    return list(dict.fromkeys(request.leader or request for request in requests))


def with_partners(
    requests: Sequence[Request], reasons: Sequence[str], causes: Sequence[str | int | None]
) -> list[tuple[Request, str, str | int | None]]:
    """Return requests that end, each with reason and cause, and the partners that must end with them."""
    ending = list(zip(requests, reasons, causes, strict=True))
    known = set(map(id, requests))
    for request, reason, cause in tuple(ending):
        if request.partner is not None and id(request.partner) not in known:
            ending.append((request.partner, reason, cause))
    ending.sort(key=lambda one: one[0].leader is not None)  # a companion without its leader can be told
    return ending
