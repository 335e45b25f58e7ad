"""Trust rule for inline plugins, which are code: extended files may name them only in a trusted folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slotline.registry.config.faults import Fault
from slotline.registry.config.tree import KeyPath, Leaf, Table, find

INLINE: KeyPath = ("plugins", "inline")
KEY: KeyPath = ("plugins", "allow_inline_from")
"""Only the first file, the environment, `--set` and arguments may set it: the person who starts the run decides."""


def refused_inline(tree: Table, first: Path, folder: Path) -> Iterator[Fault]:
    """Return a fault if an extended file outside the trusted folders names inline plugins.

    Inline plugins from the environment, `--set` or an argument are trusted, because they come from the user who starts
    the run. Folders are compared without symbolic links and `..`.

    Args:
        tree: the merged values.
        first: the first file, without symbolic links.
        folder: the folder that its relative paths refer to.
    """
    node = find(tree, INLINE)
    file = None if node is None else node.origin.file
    if node is None or file is None or file == first or (isinstance(node, Leaf) and not node.value):
        return
    own = Path(os.path.realpath(folder))
    if any(file.is_relative_to(trusted) for trusted in (own, *_trusted(tree))):
        return
    value = os.path.relpath(file.parent, own)
    yield Fault(
        node.origin,
        ".".join(INLINE),
        f"names code to run, and the file {file} lies outside the first file's folder {own}",
        fix=f'if you trust that folder, write [plugins] {KEY[-1]} = ["{value}"] into the first file, or name the '
        "plugins there",
    )


def _trusted(tree: Table) -> Iterator[Path]:
    node = find(tree, KEY)
    names = node.value if isinstance(node, Leaf) and isinstance(node.value, (list, tuple)) else ()
    for name in names:
        if isinstance(name, str) and name and "\0" not in name and node is not None:
            yield Path(os.path.realpath((node.origin.folder or Path()) / os.path.expanduser(name)))
