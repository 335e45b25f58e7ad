"""Prompts that a model of embeddings was trained with, put before the texts of a call."""

from __future__ import annotations

from collections.abc import Mapping

from slotline.core.api.prompts import Prompt
from slotline.llm.submitter import Submitter
from slotline.registry.contracts import PoolingForm
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

_DOCUMENTS = ("document", "passage", "corpus")
_EMBEDDING = ("embed", "token_embed")


def prefix(form: PoolingForm, name: str | None) -> str:
    """Return the text of a prompt by name, of the default one for None. Empty for none.

    Raises:
        RequestError: if there is no prompt of this name.
    """
    prompts = form.texts.prompts
    name = form.texts.default_prompt if name is None else name
    if name is not None and name not in prompts:
        raise RequestError(
            f"prompt_name={safe_repr(name)} is not known", fix=f"use one of {', '.join(prompts) or '(none)'}"
        )
    return "" if name is None else prompts[name]


def side_prefix(form: PoolingForm, side: str) -> str:
    """Return the text that goes before a ``query`` or a ``document``. Empty for none."""
    prompts = form.texts.prompts
    names = (side,) if side == "query" else _DOCUMENTS
    return next((prompts[name] for name in names if name in prompts), "")


def with_prompt(submitter: Submitter, prompt: Prompt, task: str | None, name: str | None) -> Prompt:
    """Return a prompt for a task, with the named or the default prompt of the checkpoint before its text.

    A prompt of token ids stays as it is.

    Raises:
        RequestError: if the name is not known, or is given for token ids or for another task.
    """
    if task not in _EMBEDDING or submitter.front.extension("pooling") is None:
        if name is not None:
            raise RequestError(f"prompt_name={safe_repr(name)} is for {' and '.join(_EMBEDDING)}", fix="leave it out")
        return prompt
    before, text = prefix(submitter.pooling_form, name), text_of(prompt)
    if name is not None and text is None:
        raise RequestError(f"prompt_name={safe_repr(name)} with token ids", fix="give text, or leave it out")
    if not before or text is None:
        return prompt
    return {**prompt, "prompt": before + text} if isinstance(prompt, Mapping) else before + text


def text_of(prompt: Prompt) -> str | None:
    """Return the text of a prompt that has yet to be tokenized."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt else prompt
    return text if isinstance(text, str) else None
