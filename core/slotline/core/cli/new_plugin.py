"""`slotline new-plugin`: a package with a plugin that is right from the first minute, to be replaced piece by piece."""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from types import MappingProxyType

from attrs import frozen

from slotline.core.cli.command import Command
from slotline.registry.descriptor import HOST_CONTRACTS, Kind
from slotline.registry.errors import PluginError


@frozen
class _Template:
    """A kind's template: the name of the implementing module, and how to try the plugin, a line for the README."""

    module: str
    try_it: str


_TEMPLATES: Mapping[Kind, _Template] = MappingProxyType(
    {
        Kind.ATTENTION: _Template("backend", 'slotline generate --set attention.backend=$name "def main("'),
        Kind.LOGITS_PROCESSOR: _Template("processor", 'slotline generate --set logits_processors.$name={} "def main("'),
        Kind.KV_SPEC: _Template("spec", 'slotline generate --set cache.kv_spec.full=$name "def main("'),
        Kind.DRAFTER: _Template("drafter", 'slotline generate --set drafter.name=$name "def main("'),
    }
)


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", help=", ".join(kind.value for kind in _TEMPLATES))
    parser.add_argument("name", metavar="NAME", help="the plugin's name and its Python package, such as my_attn")
    parser.add_argument("--path", metavar="DIR", help="where to write the package (default: ./NAME, with hyphens)")


def _run(arguments: argparse.Namespace) -> int:
    kind, name = checked_kind(arguments.kind), checked_name(arguments.name)
    folder = Path(arguments.path or distribution_name(name))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PluginError(f"{str(folder)!r} exists and is not empty", fix="name another folder with --path")
    for file, text in render(kind, name):
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        print(target)
    print(f"\nnext: pip install -e {folder} && slotline plugins --load && pytest {folder}")
    return 0


def render(kind: Kind, name: str) -> Iterator[tuple[Path, str]]:
    """The files of a new plugin's package: path inside it, and text."""
    template, contract = _TEMPLATES[kind], HOST_CONTRACTS[kind]
    values = {
        "kind": kind.value,
        "name": name,
        "distribution": distribution_name(name),
        "class_name": "".join(part.capitalize() for part in name.split("_")),
        "module": template.module,
        "contract": str(contract),
        "lowest": str(contract.lowest),
        "highest": str(contract.highest),
        "slotline_version": ".".join(version("slotline").split(".")[:2]),
        "try_it": Template(template.try_it).substitute(name=name),
    }
    package = Path("src") / name
    for file, source in (
        (Path("pyproject.toml"), "common/pyproject.toml.tmpl"),
        (Path("README.md"), "common/README.md.tmpl"),
        (package / "py.typed", "common/py.typed.tmpl"),
        (package / "__init__.py", f"{kind.value}/descriptor.py.tmpl"),
        (package / f"{template.module}.py", f"{kind.value}/implementation.py.tmpl"),
        (Path("tests") / f"test_{name}.py", f"{kind.value}/test.py.tmpl"),
    ):
        text = files("slotline.core.cli").joinpath("templates", *source.split("/")).read_text(encoding="utf-8")
        yield file, Template(text).substitute(values)


def checked_kind(text: str) -> Kind:
    """The kind, if there is a template for it.

    Raises:
        PluginError: naming the kinds that have one.
    """
    kinds = {kind.value: kind for kind in _TEMPLATES}
    if text.replace("-", "_") in kinds:
        return kinds[text.replace("-", "_")]
    known = text.replace("-", "_") in {kind.value for kind in Kind}
    problem = "has no template yet" if known else "is no kind of plugin"
    raise PluginError(f"{text!r} {problem}", fix=f"there are templates for {', '.join(kinds)}")


def checked_name(text: str) -> str:
    """The name as a Python package.

    Raises:
        PluginError: if it cannot be one, or would hide one that is there.
    """
    name = text.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"{text!r} cannot name a Python package", fix="use small letters, digits and '_', such as my_attn"
        )
    if find_spec(name) is not None:
        raise PluginError(f"there is a Python package {name!r} already", fix="choose a name that nothing else has")
    return name


def distribution_name(name: str) -> str:
    """The distribution's name, normalized (PEP 503)."""
    return name.replace("_", "-")


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
