"""Diagnosis of a name that was given as a checkpoint folder or a configuration file but is neither."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".pte", ".mlmodel")

SINGLE_FILES = (".gguf",)
"""Endings of checkpoints that are one file."""
_HEADER = 24
"""Bytes that such a file has at least."""


def as_path(value: object) -> str | None:
    """Return a path as text with `~` expanded, or None for values that are not paths."""
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except Exception:  # a stranger's `__fspath__` too
        return None
    return os.path.expanduser(text) if isinstance(text, str) else None


def is_single_file(path: str) -> bool:
    """Return True for a file that is a whole checkpoint by its ending and its size."""
    return path.lower().endswith(SINGLE_FILES) and os.path.isfile(path) and os.path.getsize(path) >= _HEADER


def explain_name(text: str) -> tuple[str, str] | None:
    """Return a description of the name and a fix, or None if nothing is known about it."""
    path = os.path.expanduser(text)
    name, suffix = os.path.basename(path), os.path.splitext(path)[1].lower()
    if "\0" in text:
        return "it has a NUL character, which no path has", "correct it"
    if address := re.match(r"https?:/+[^/]+/(.*)", text):  # a Path collapses two slashes into one
        model = "/".join(address[1].split("/")[:2])
        return "it is an address on the net, and nothing is downloaded here", _download(model)
    if suffix == ".gguf":
        state = "its header is not complete" if os.path.isfile(path) else "there is no such file"
        where = "only `model` names one" if is_single_file(path) else state
        return f"it is a GGUF file, which is not read: {where}", "name a Hugging Face folder, or a whole GGUF file"
    if suffix in _WEIGHTS:
        return "it is a file of weights", f"name its folder, which holds config.json: {_folder(path)}"
    if suffix == ".json":
        return f"it is the file {name} of a checkpoint", f"name its folder: {_folder(path)}"
    if os.path.lexists(path):
        return None
    if near := _near(path):
        return "there is no such file or folder", f"did you mean {near!r}?"
    if _HUB_ID.fullmatch(text) and not os.path.isdir(os.path.dirname(path)):
        if folder := _in_hub_cache(text):
            return "it is the name of a model on the Hugging Face Hub", f"it is in the Hub's cache: name {folder}"
        return "it is the name of a model on the Hugging Face Hub, and nothing is downloaded here", _download(text)
    return None


def hub_name(text: str) -> str | None:
    """Return the name of a model on the Hugging Face Hub, or None if a text is none or is nearly a local path."""
    path = os.path.expanduser(text)
    if not _HUB_ID.fullmatch(text) or ".." in text or os.path.lexists(path) or _near(path):
        return None
    suffix = os.path.splitext(path)[1].lower()
    return None if suffix in (*_WEIGHTS, ".gguf", ".json", ".toml") else text


def hub_cache() -> Path:
    """Return the folder of the Hub's local cache, as the environment names it now."""
    data = os.environ.get("XDG_CACHE_HOME", os.path.join("~", ".cache"))
    home = os.environ.get("HF_HOME", os.path.join(data, "huggingface"))
    cache = os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def _folder(path: str) -> str:
    return repr(os.path.dirname(path) or ".")


def _download(model: str) -> str:
    folder = model.rpartition("/")[2]
    return f"download it, for instance with `hf download {model} --local-dir {folder}`, and name that folder"


def _near(path: str) -> str | None:
    """Return a file or folder in the same place with a similar name."""
    parent, name = os.path.split(path.rstrip("/"))
    try:
        found = difflib.get_close_matches(name, os.listdir(parent or "."), n=1, cutoff=0.8)
    except (OSError, ValueError):
        return None
    return os.path.join(parent, found[0]) if found else None


def _in_hub_cache(model: str) -> str | None:
    snapshots = hub_cache() / f"models--{model.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"))
    return str(found[-1].parent) if found else None
