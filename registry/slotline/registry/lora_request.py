"""Choice of a request's adapter, under vLLM's names. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from attrs import field, frozen

from slotline.registry.errors import RequestError
from slotline.registry.named_path import as_path
from slotline.registry.plain_values import plain_number
from slotline.registry.safe_repr import safe_repr


def _as_text(path: str | PathLike[str]) -> str:
    return path if (text := as_path(path)) is None else text  # type: ignore[return-value]  # refused below


@frozen
class LoRARequest:
    """An adapter by name, number and folder.

    Attributes:
        lora_name: unique among the loaded adapters.
        lora_int_id: unique among the loaded adapters, at least 1.
        lora_path: a folder that PEFT saved.

    Raises:
        RequestError: if a value is invalid.
    """

    lora_name: str
    lora_int_id: int = field(converter=plain_number)
    lora_path: str = field(converter=_as_text)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(
                f"lora_name={safe_repr(self.lora_name)} is no name", fix="give a string that is not empty"
            )
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RequestError(
                f"lora_int_id={safe_repr(number)} is not allowed", fix="lora_int_id must be an integer from 1 up"
            )
        if not isinstance(self.lora_path, str) or not self.lora_path or "\0" in self.lora_path:
            raise RequestError(f"lora_path={safe_repr(self.lora_path)} is no path", fix="name the adapter's folder")


AdapterChoice = LoRARequest | str | None
"""An adapter, the name of a loaded adapter, or None."""


def as_lora_requests(given: AdapterChoice | Sequence[AdapterChoice], count: int) -> Sequence[AdapterChoice]:
    """Return the adapter of each of `count` prompts."""
    if given is None or isinstance(given, LoRARequest | str):
        return [given] * count
    listed = list(given) if isinstance(given, Sequence) else [given]
    for one in listed:
        if one is not None and not isinstance(one, LoRARequest | str):
            raise RequestError(
                f"lora_request={safe_repr(one)} is no adapter", fix="give LoRARequest(name, number, path)"
            )
    if len(listed) != count:
        raise RequestError(
            f"{len(listed)} adapters for {count} prompts", fix="give one, or one or None for each prompt"
        )
    return listed
