"""Find the model family that serves the architecture named in a checkpoint's config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slotline.registry.architectures import family_hint
from slotline.registry.contracts import ModelFacts, ModelFamily
from slotline.registry.contracts.model_family import InspectingFamily
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json
from slotline.registry.named_path import explain_name
from slotline.registry.negotiation.reasons import Note


def family_for(
    registry: PluginRegistry, path: Path, key: str = "model", *, text_only: bool = False
) -> tuple[Descriptor[Any], ModelFamily]:
    """Return the model family that serves the checkpoint's architecture.

    Families that list it come before those that try it by inspection.

    Args:
        key: the configuration key that names the folder.
        text_only: prefer a family by inspection, which leaves encoders out.

    Raises:
        ModelError: if there is no checkpoint at `path`, or no family serves it.
    """
    architectures = _architectures(path, key)
    candidates = registry.candidates(Kind.MODEL_FAMILY)
    listing = (
        descriptor
        for descriptor in candidates
        if any(descriptor.capabilities.architectures.refusal(name) is None for name in architectures)
    )
    chosen = next(listing, None)
    if chosen is not None and (not text_only or chosen.capabilities.by_inspection.support):
        return chosen, registry.build(chosen)
    for descriptor in candidates:
        if descriptor.capabilities.by_inspection.support:
            family: InspectingFamily = registry.build(descriptor)
            if any(family.takes_on(name) for name in architectures):
                return descriptor, family
    if chosen is not None:
        return chosen, registry.build(chosen)
    served = sorted({name for d in candidates for name in d.capabilities.architectures.values or ()})
    hint = family_hint(architectures[0], served)
    raise ModelError(
        f"no model family serves {' / '.join(architectures)} of {str(path)!r}{hint}",
        fix=f"served: {', '.join(served)}; others need a model_family plugin",
    )


def model_notes(facts: ModelFacts) -> tuple[Note, ...]:
    """Return what the family says about a model's architecture."""
    return tuple(Note(code="N306", key="model", text=text) for text in facts.notes)


def _architectures(path: Path, key: str) -> list[str]:
    """Read the names under `architectures` in config.json."""
    file = path / "config.json"
    try:
        there, has_config = path.is_dir(), file.is_file()
    except OSError as error:
        raise ModelError(
            f"{key} = {str(path)[:200]!r} cannot be looked at: {error.strerror}", fix="correct it"
        ) from error
    if not there and (said := explain_name(str(path))) is not None:
        raise ModelError(f"{key} = {str(path)[:200]!r} is no folder: {said[0]}", fix=said[1])
    if not there:
        without = "; leave it out for the small model" if key == "model" else ""
        raise ModelError(
            f"there is no folder {str(path)!r}", fix=f"{key} must name a local Hugging Face folder{without}"
        )
    if not has_config:
        raise ModelError(f"{str(path)!r} has no config.json", fix="name a Hugging Face checkpoint folder")
    try:
        content = read_json(file)
    except (ValueError, OSError) as error:
        raise ModelError(f"{str(file)!r} cannot be read as JSON: {error}", fix="download the file again") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{str(file)!r} holds a {type(content).__name__}, not an object", fix="download the file again"
        )
    names = content.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"{str(file)!r}: architectures = {names!r} is no list of names", fix='write "architectures": ["..."]'
        )
    if not names:
        raise ModelError(f"{str(file)!r} names no architecture", fix='add "architectures": ["..."] to it')
    return names
