"""A known adapter, and what separates its keys and values and its files from those of others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from attrs import define

from slotline.core.batch.request import Request
from slotline.plugins.lora.manager.step_adapters import NO_SLOT
from slotline.registry.lora_request import LoRARequest


@define(eq=False)
class Adapter:
    """A known adapter.

    Attributes:
        request: its name, number and folder.
        key: distinguishes its keys and values from those of other adapters, and of other loads of the same adapter.
        files: distinguishes the files that were read from later files in the same folder.
        users: unfinished requests that name it. It stays known as long as there are any.
        holders: number of these requests in the batch. It keeps its slot as long as there are any.
        reserved: True if it owns one of the slots.
        loaded: True if the plugin has loaded it into the slot.
    """

    request: LoRARequest
    key: str
    files: str
    users: int = 0
    holders: int = 0
    reserved: bool = False
    loaded: bool = False
    slot: int = NO_SLOT
    pinned: bool = False


def adapter_of(request: Request) -> LoRARequest | None:
    """Return the adapter of a request, None for none."""
    found: LoRARequest | None = request.inputs.get("lora_request")
    return found


def numbered(named: Mapping[str, Path]) -> list[LoRARequest]:
    """Return the adapters that the configuration names, numbered from 1 in its order."""
    return [LoRARequest(name, number, str(path)) for number, (name, path) in enumerate(named.items(), start=1)]


def load_key(request: LoRARequest, *, shared: bool) -> str:
    """Return a cache key that separates an adapter's prefixes from those of other adapters.

    Args:
        shared: engines that load the same files get the same key. Otherwise each load gets another one, also of the
            same folder.
    """
    if not shared:
        return "adapter:" + repr((request.lora_name, request.lora_path, uuid4().hex))
    contents = sha256()
    with suppress(OSError, ValueError):  # the plugin reports a folder that cannot be read
        for file in sorted(Path(request.lora_path).iterdir()):
            if file.is_file():
                contents.update(repr((file.name, file.stat().st_size)).encode())
                with file.open("rb") as opened:
                    contents.update(file_digest(opened, "sha256").digest())
    return "adapter:" + contents.hexdigest()


def files_of(request: LoRARequest) -> str:
    """Return a string that distinguishes a folder's files from files that replace them.

    It includes the inodes' change times, which no program sets back. A folder that cannot be read counts as empty. The
    plugin reports the error then.
    """
    files = []
    try:
        for file in Path(request.lora_path).iterdir():
            stat = file.stat()
            files.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    except (OSError, ValueError):  # a path with a NUL
        files = []
    return repr(sorted(files))


def forget_copies(lora: Any, request: LoRARequest) -> None:
    """Let a plugin drop its copies of an adapter in host memory, if it keeps any."""
    if (forget := getattr(lora, "forget", None)) is not None:
        forget(request.lora_path)
