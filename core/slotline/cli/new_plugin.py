"""`slotline new-plugin`: a package with a working plugin, to be replaced piece by piece.

The package is a copier template, `templates/`, one for all kinds. The parts that differ by kind are in
`templates/kinds/`.
"""

from __future__ import annotations

import argparse
import keyword
import re
from importlib.metadata import version
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path

from slotline.cli.command import Command
from slotline.registry.descriptor import HOST_CONTRACTS, Kind
from slotline.registry.errors import PluginError

KINDS = {kind.value: kind for kind in Kind}
"""The kinds, each of which has a template."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("name", metavar="NAME", help="the plugin's name and its Python package, such as my_attn")
    parser.add_argument("--path", metavar="DIR", help="where to write the package (default: ./NAME, with hyphens)")


def _run(arguments: argparse.Namespace) -> int:
    kind, name = checked_kind(arguments.kind), checked_name(arguments.name)
    folder = Path(arguments.path or name.replace("_", "-"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PluginError(f"{str(folder)!r} exists and is not empty", fix="name another folder with --path")
    for file in render(kind, name, folder):
        print(file)
    print(f"\nnext: pip install -e '{folder}[dev]' && slotline plugins --load && slotline conform {name} --level L3")
    return 0


def render(kind: Kind, name: str, folder: Path) -> list[Path]:
    """Write a new plugin's package into an empty folder and return its files.

    Raises:
        PluginError: if copier, which comes with the extra `conformance`, is not installed.
    """
    try:
        from copier import run_copy
    except ImportError as error:
        raise PluginError(
            f"new-plugin needs copier, which cannot be imported: {error}", fix="pip install 'slotline[conformance]'"
        ) from error
    contract = HOST_CONTRACTS[kind]
    data = {
        "kind": kind.value,
        "name": name,
        "contract_lowest": contract.lowest,
        "contract_highest": contract.highest,
        "slotline_version": ".".join(version("slotline").split(".")[:2]),
    }
    with as_file(files("slotline.cli") / "templates") as template:
        run_copy(str(template), folder, data=data, defaults=True, quiet=True)
    return sorted(file for file in folder.rglob("*") if file.is_file())


def checked_kind(text: str) -> Kind:
    """Return the kind.

    Raises:
        PluginError: naming the kinds that there are.
    """
    kind = text.replace("-", "_")
    if kind in KINDS:
        return KINDS[kind]
    raise PluginError(f"{text!r} is no kind of plugin", fix=f"there are templates for {', '.join(KINDS)}")


def checked_name(text: str) -> str:
    """Return the name as a Python package.

    Raises:
        PluginError: if the name is invalid, or would hide an installed package.
    """
    name = text.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"{text!r} cannot name a Python package", fix="use small letters, digits and '_', such as my_attn"
        )
    if find_spec(name) is not None:
        raise PluginError(f"there is a Python package {name!r} already", fix="choose a name that nothing else has")
    return name


COMMAND = Command(
    name="new-plugin",
    summary="write a package with a working plugin to start from",
    examples=(
        "slotline new-plugin attention my_attn",
        "slotline new-plugin logits_processor my_bans --path plugins/my-bans",
    ),
    configure=_configure,
    run=_run,
)
