"""Transformers' configuration of a folder, without running code of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slotline.registry.errors import ModelError
from slotline.registry.loading import one_line
from slotline.registry.remote_code import remote_code


def auto_config(folder: Path) -> Any:
    """Read a folder's config.json as the configuration class that transformers has for it.

    Raises:
        ModelError: if it is broken, or transformers has no class for it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and its dataclass validators raise many kinds
        if code := remote_code(folder, "AutoConfig"):
            raise ModelError(
                f"the model in {str(folder)!r} needs code of its own, which is never run: {code}",
                fix="use a checkpoint of an architecture that transformers knows",
            ) from error
        raise ModelError(
            f"{folder / 'config.json'} cannot be read: {one_line(error)}", fix="download config.json again"
        ) from error
