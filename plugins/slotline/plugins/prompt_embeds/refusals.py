"""What cannot be had beside a prompt of embeddings, since nobody knows its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import RequestError

_DEFAULTS = SamplingParams().as_mapping()


def prompt_readers(processors: Iterable[Descriptor[LogitsProcessorCapabilities]]) -> dict[str, str]:
    """Return the parameters by which logits processors read the prompt's tokens, with the processors' names."""
    return {
        parameter: one.name
        for one in processors
        if one.capabilities.needs_history
        for parameter in one.capabilities.parameters
        if parameter not in one.capabilities.output_parameters
    }


def refuse_prompt_readers(params: SamplingParams, readers: Mapping[str, str]) -> None:
    """Refuse parameters for which the tokens of the prompt must be known.

    Args:
        params: of a request whose prompt is embeddings.
        readers: from `prompt_readers`.

    Raises:
        RequestError: naming the parameter.
    """
    if params.prompt_logprobs is not None:
        raise _refusal("prompt_logprobs", params.prompt_logprobs, "log-probabilities are those of a prompt's tokens")
    values = params.as_mapping()
    for name in (name for name in values if name in readers and values[name] != _DEFAULTS.get(name)):
        raise _refusal(name, values[name], f"logits processor {readers[name]!r} reads the prompt's tokens")
    if params.guidance_scale != 1 and params.negative_prompt is None and params.negative_prompt_token_ids is None:
        raise RequestError(
            f"guidance_scale={params.guidance_scale} beside prompt_embeds: the negative prompt would be the prompt's "
            "last token, which is not known",
            fix="give negative_prompt or negative_prompt_token_ids",
        )


def _refusal(name: str, value: Any, reason: str) -> RequestError:
    return RequestError(
        f"{name}={value!r} beside prompt_embeds: {reason}, and those of embeddings are not known",
        fix=f"leave {name} out, or give the prompt as token ids",
    )
