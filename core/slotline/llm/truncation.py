"""Cuts of prompts that are too long, for requests with `truncate_prompt_tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotline.core.api.prompts import Prompt, as_token_ids
from slotline.llm.pooled_texts import text_of
from slotline.llm.submitter import Submitter
from slotline.registry.contracts import PoolingParams
from slotline.registry.errors import RequestError

_TYPES = "token_type_ids"


def limit_of(submitter: Submitter, params: PoolingParams) -> int | None:
    """Return the most tokens of a prompt, None if it is not cut.

    Raises:
        RequestError: if it is above the engine's longest prompt.
    """
    asked, longest = params.truncate_prompt_tokens, submitter.front.limits.max_model_len
    if asked is not None and asked > longest:
        raise RequestError(
            f"truncate_prompt_tokens={asked} is above max_model_len={longest}",
            fix=f"give at most {longest}, or -1 for as many",
        )
    return longest if asked == -1 else asked


def truncated(submitter: Submitter, prompt: Prompt, params: PoolingParams) -> Prompt:
    """Return a prompt with at most as many tokens as its parameters say.

    A text is cut as its tokenizer cuts, which keeps the special tokens. Of token ids the last ones stay, as in vLLM.

    Raises:
        RequestError: if the limit cannot be kept, or the prompt has items besides text.
    """
    limit = limit_of(submitter, params) if isinstance(params, PoolingParams) else None
    if limit is None:
        return prompt
    given: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {}
    for name in ("multi_modal_data", "prompt_embeds"):
        if given.get(name) is not None:
            raise RequestError(f"truncate_prompt_tokens={limit} for a prompt with {name}", fix="leave it out")
    if (text := text_of(prompt)) is not None:
        if not text:
            return prompt  # refused when it is read
        return {**given, "prompt": text, "prompt_token_ids": submitter.tokenizer.encode(text, limit)}
    tokens: Any = given.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if tokens is None or isinstance(tokens, str):
        return prompt
    cut = {**given, "prompt_token_ids": as_token_ids(tokens)[-limit:]}
    return cut if given.get(_TYPES) is None else {**cut, _TYPES: as_token_ids(given[_TYPES])[-limit:]}
