"""Processors of transformers without their parts for videos and sound, which need packages that images do not."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

from slotline.registry.json_file import read_object

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files that may name the class of a processor, in transformers' order."""
_ALIKE = MappingProxyType({"SmolVLMProcessor": "Idefics3Processor"})
"""Classes that cannot be made without a package for videos, and others that treat images in the same way."""


def for_images(path: Path) -> Any:
    """Return a folder's processor of images and text. Its other parts are None.

    A processor without other parts is read by transformers itself.
    """
    name = _class_name(path)
    found = processor_class_from_name(_ALIKE.get(name, name))
    if name not in _ALIKE and (found is None or set(found.get_attributes()) <= {"image_processor", "tokenizer"}):
        return AutoProcessor.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    members = {"_get_arguments_from_pretrained": classmethod(_parts), "check_argument_for_proper_class": _accept}
    partial: Any = type(found.__name__, (found,), members)
    return partial.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def settings(path: Path) -> dict[str, Any]:
    """Return the settings of a folder's processor, empty if it has none."""
    file = path / _FILES[0]
    return read_object(file) if file.is_file() else {}


def _class_name(path: Path) -> str:
    for name in _FILES:
        if (path / name).is_file() and (said := read_object(path / name).get("processor_class")):
            return str(said)
    return str(PROCESSOR_MAPPING_NAMES.get(read_object(path / "config.json").get("model_type", "")))


def _parts(own: Any, /, path: str, processor_dict: object = None, **_: Any) -> list[Any]:
    """Read the arguments of the class `own` in their order, None for those that images do not need."""
    found = {
        "image_processor": AutoImageProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False),
        "tokenizer": AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False),
    }
    return [found.get(name) for name in own.get_attributes()]


def _accept(*_: Any) -> None:
    """Take any argument in place of a check of its class, which refuses None."""
