"""Files of a repository on the Hub that a model needs: those of data, without duplicates and without code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

_SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "chat_template*")
_BELOW = ("[0-9]*_*/*.json", "[0-9]*_*/*.safetensors", "additional_chat_templates/*.jinja")
"""Files in folders: the modules of sentence-transformers, and further chat templates."""

_FORMS = (
    ("model.safetensors", "*.safetensors", ("consolidated*", "adapter_*", "training_*")),
    ("pytorch_model.bin", "pytorch_model*.bin", ()),
)
"""Forms of weights, the first one there is taken: the name of a single file, the names of several, and names of others
like them. `consolidated*` holds the same weights in another form."""


def is_small(name: str) -> bool:
    """Return True for configurations, tokenizers and templates."""
    if "/" in name:
        return any(fnmatchcase(name, pattern) for pattern in _BELOW)
    return any(fnmatchcase(name, pattern) for pattern in _SMALL)


def weight_files(names: Iterable[str], read_index: Callable[[str], Mapping[str, Any]]) -> list[str]:
    """Return the names of the weight files to load: safetensors or, without them, torch files.

    Files that an index names are returned whether they are among the names or not.

    Args:
        names: all files of the repository.
        read_index: returns the content of an index of several files.
    """
    names = sorted(names)
    for single, several, others in _FORMS:
        index = f"{single}.index.json"
        if single in names:
            return [single]
        table = read_index(index).get("weight_map") if index in names else None
        if isinstance(table, Mapping) and table:
            return sorted({str(file) for file in table.values() if _is_plain(file)})
        found = [name for name in names if "/" not in name and fnmatchcase(name, several)]
        if found := [name for name in found if not any(fnmatchcase(name, other) for other in others)]:
            return found
    return []


def _is_plain(name: object) -> bool:
    """Return True for a name that stays in the repository's folder."""
    return isinstance(name, str) and "/" not in name and name not in ("", ".", "..")
