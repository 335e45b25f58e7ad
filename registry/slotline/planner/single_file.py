"""Checkpoints that are one file, such as GGUF: unpacked once into the cache folder."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from slotline.registry.cache_folder import cache_folder
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ModelError
from slotline.registry.named_path import is_single_file


def unpacked(registry: PluginRegistry, path: Path) -> Path:
    """Return the folder of a checkpoint: the path itself, or what its single file was unpacked to.

    The file may also be alone with its ending in a folder without config.json.

    Raises:
        ModelError: if a folder holds several of them, or one cannot be unpacked.
    """
    endings = {
        suffix: descriptor
        for descriptor in registry.candidates(Kind.WEIGHT_FORMAT)
        for suffix in descriptor.capabilities.suffixes
    }
    try:
        file = _file_in(path, tuple(endings))
        if file is None:
            return path
        state = file.stat()
    except OSError:  # said by those who read the checkpoint
        return path
    descriptor = endings[file.suffix]
    record = registry.record(Kind.WEIGHT_FORMAT, descriptor.name)
    facts = (str(file.resolve()), state.st_size, state.st_mtime_ns, record.distribution, record.version)
    folder = cache_folder() / "unpacked" / hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    if not (folder / "config.json").is_file():
        _unpack(registry, descriptor, file, folder)
    return folder


def _file_in(path: Path, endings: tuple[str, ...]) -> Path | None:
    if path.is_file():
        return path if path.suffix in endings and is_single_file(str(path)) else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix in endings)
    if len(files) > 1:
        raise ModelError(
            f"{path} holds {len(files)} checkpoints: {', '.join(file.name for file in files[:4])}",
            fix=f"set model to one of them, such as {str(files[0])!r}",
        )
    return files[0] if files else None


def _unpack(registry: PluginRegistry, descriptor: Descriptor[object], file: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        factory: Any = registry.factory(descriptor)
        factory.unpack(file, scratch)
        if folder.exists():  # left half-way by an earlier version
            shutil.rmtree(folder)
        scratch.rename(folder)
    except OSError as error:
        raise ModelError(
            f"{file} cannot be unpacked into {folder.parent}: {error}",
            fix="free some space, or set SLOTLINE_CACHE to another folder",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
