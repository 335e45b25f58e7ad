"""Writes the generated parts of docs/: contract signatures, the step's source, the list of checks. `--check` fails if
one is stale.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
KINDS = (
    "attention",
    "kv_spec",
    "kv_connector",
    "state",
    "drafter",
    "logits_processor",
    "lora",
    "model_family",
    "structured_output",
    "device",
)
_PART = re.compile(r"(<!-- generated: (?P<name>[\w.:]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def without_docstrings(tree: ast.AST) -> ast.AST:
    """The same code without docstrings; a body that is empty then becomes `...`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Expr(ast.Constant(...))]
    return tree


def signatures(kind: str) -> str:
    """The public classes of a contract module, as code without docstrings."""
    module = importlib.import_module(f"slotline.registry.contracts.{kind}")
    classes = [n for n in ast.parse(inspect.getsource(module)).body if isinstance(n, ast.ClassDef)]
    return "\n\n".join(ast.unparse(without_docstrings(node)) for node in classes)


def source(target: str) -> str:
    """The source of `module:Class.method`, as it stands."""
    module, _, path = target.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return textwrap.dedent(inspect.getsource(found)).rstrip()  # type: ignore[arg-type]


def checks(kind: str) -> str:
    """A table of a kind's conformance checks."""
    from slotline.registry.descriptor import Kind
    from slotline.testing.check import Family, all_checks

    notes = {Family.DECLARED: "", Family.REFUSED: "refusal", Family.UNDERDECLARED: "information"}
    rows = ["| check | level | profile | what it shows |", "|---|---|---|---|"]
    for item in all_checks(Kind(kind)):
        what = notes[item.family] or ("" if item.mandatory else "provisional")
        cells = (f"`{item.id}`", f"{item.level}", item.profile or "-", f"{item.summary}{f' ({what})' if what else ''}")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def part(name: str) -> str:
    """The text of a generated part."""
    if name.startswith("checks."):
        return checks(name.removeprefix("checks."))
    code = signatures(name.removeprefix("contract.")) if name.startswith("contract.") else source(name)
    return f"```python\n{code}\n```\n"


def render(text: str) -> str:
    """The page with every generated part made anew."""
    return _PART.sub(lambda m: m[1] + part(m["name"]) + m[3], text)


def stale_pages() -> list[Path]:
    """Pages whose generated parts differ from the code."""
    return [page for page in sorted(DOCS.rglob("*.md")) if render(page.read_text()) != page.read_text()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page is stale")
    stale = stale_pages()
    if not parser.parse_args().check:
        for page in stale:
            page.write_text(render(page.read_text()))
        return 0
    for page in stale:
        sys.stderr.write(f"{page.relative_to(DOCS.parent)} is stale: run python docs/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
