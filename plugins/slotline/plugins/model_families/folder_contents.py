"""What transformers' folder of models holds, kept from one start to the next.

transformers reads each of its 2,300 files when it is imported, to know where each name is: a quarter of a second. What
it found is kept in the cache folder by the digest of the files' paths, sizes and times of change.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from slotline.kernels.kernel_files import read_kernel, write_kernel

_READ = "create_import_structure_from_path"


def keep_contents(import_utils: Any, folder: Path) -> None:
    """Let transformers look into its folder of models once for all starts, and into the others once in this one.

    Args:
        import_utils: the module `transformers.utils.import_utils`.
        folder: that of the models.
    """
    look: Any = getattr(import_utils, _READ, None)
    if not hasattr(look, "cache_info") or look.cache_info().maxsize is None:
        return
    plain, source = look.__wrapped__, Path(import_utils.__file__)

    def read(path: str | Path) -> Any:
        own = Path(path).parent if Path(path).is_file() else Path(path)
        return _kept(plain, folder, source) if own == folder else plain(path)

    setattr(import_utils, _READ, lru_cache(maxsize=None)(read))


def _kept(plain: Callable[[Path], Any], folder: Path, source: Path) -> Any:
    """Return the contents of the folder of models, from the cache folder if nothing has changed."""
    key = repr((sys.version, [*_facts(source.parent), *_facts(folder)]))
    name = f"transformers-{hashlib.sha256(key.encode()).hexdigest()[:32]}.names"
    kept = read_kernel(name)
    if kept is not None:
        return marshal.loads(kept)
    contents = plain(folder)
    write_kernel(name, marshal.dumps(contents))
    return contents


def _facts(folder: Path) -> list[tuple[str, int, int]]:
    """Return path, size and time of change of each file below a folder, without compiled ones."""
    facts, folders = [], [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    if entry.name != "__pycache__":
                        folders.append(entry.path)
                else:
                    now = entry.stat()
                    facts.append((entry.path, now.st_size, now.st_mtime_ns))
    return sorted(facts)
