"""Write the generated parts of docs/. `--check` fails if one is stale.

The contract pages and the page of codes in docs/reference/ are generated as a whole, from docstrings. On other pages a
generated part is between `<!-- generated: NAME -->` and `<!-- end -->`: the source of a function
(`module:Class.method`), or a table of a benchmark's result file (`results.NAME` for benchmarks/results/NAME.json).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
RESULTS = DOCS.parent / "benchmarks" / "results"
NOTICE = "<!-- generated from docstrings: run python docs/generate.py after a change -->"
GUIDES = {  # the page that explains a slot at length
    "attention": ("How to write an attention backend", "../writing-a-backend.md"),
    "state": ("Hybrids", "../hybrids.md"),
    "drafter": ("Drafters", "../drafters.md"),
    "logits_processor": ("Sampling", "../sampling.md"),
    "lora": ("LoRA", "../lora.md"),
    "model_family": ("Model families", "../model-families.md"),
    "structured_output": ("Structured output", "../structured-output.md"),
    "response_parser": ("Tool calls", "../tool_calls.md"),
    "scheduler_policy": ("Scheduling", "../scheduling.md"),
    "extension": ("Step extensions", "../extensions.md"),
    "linear": ("Quantization", "../quantization.md"),
    "experts": ("Quantization", "../quantization.md"),
    "weight_format": ("Quantization", "../quantization.md"),
}
PARTS_OF = {
    "attention_edges": "attention",
    "block_events": "extension",
    "cache_tensors": "kv_spec",
    "family_example": "model_family",
    "kv_compression": "extension",
    "pooling": "model_family",
    "prefix_groups": "attention",
    "sampling_params": "logits_processor",
    "weights": "weight_format",
}  # contract modules without a slot of their own
CODE_GROUPS = {  # the first code of each group, in the order of the page
    "N001": "The plugin cannot be used",
    "N101": "The machine",
    "N110": "The model",
    "N140": "Blocks and layout",
    "N160": "Features",
    "N112": "Drafters, processors, state, LoRA",
    "N113": "Quantized weights",
    "N190": "Choice",
    "N301": "Changes",
    "N401": "Warnings",
    "N500": "No plan",
}
_PART = re.compile(r"(<!-- generated: (?P<name>[\w.:-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def contract_modules() -> list[str]:
    """Return the names of the contract modules, each of which has a page or is a part of another's."""
    from slotline.registry import contracts

    return sorted(p.stem for p in Path(contracts.__file__).parent.glob("*.py") if p.stem != "__init__")


def contract(name: str) -> str:
    """Return a contract module as Markdown: its docstring, then each public class with its docstrings."""
    module = importlib.import_module(f"slotline.registry.contracts.{name}")
    lines = inspect.getsource(module).splitlines()
    blocks = [prose(module.__doc__ or "")]
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            code = "\n".join(lines[first - 1 : node.end_lineno])
            blocks.append(f"### {node.name}\n\n```python\n{code}\n```")
    return "\n\n".join(blocks)


def prose(docstring: str) -> str:
    """Return a docstring as Markdown."""
    return inspect.cleandoc(docstring).replace("``", "`")


def contract_page(kind: str) -> str:
    """Return a slot's page: its hook, its contract with docstrings, its conformance checks."""
    from slotline.registry import hookspecs
    from slotline.registry.descriptor import HOST_CONTRACTS, Kind

    slot = Kind(kind)
    versions = HOST_CONTRACTS[slot]
    guide, page = GUIDES.get(kind, ("Contracts", "../contracts.md"))
    blocks = [
        NOTICE,
        f"# Contract of the slot `{kind}`",
        prose(getattr(hookspecs, slot.hook).__doc__),
        "\n".join(
            (
                f"* Guide: [{guide}]({page}). All slots: [contracts](../contracts.md).",
                f"* Contract versions of this slotline: {versions.lowest} to {versions.highest}.",
                f"* Hook `{slot.hook}`, or an entry point of group `{slot.entry_point_group}`.",
                f"* Source: [{kind}.py](../../registry/slotline/registry/contracts/{kind}.py).",
            )
        ),
        "## The contract",
        contract(kind),
    ]
    for name in sorted(name for name, of in PARTS_OF.items() if of == kind):
        blocks += [f"## {name.capitalize().replace('_', ' ')}", contract(name)]
    table = checks(kind)
    if table:
        blocks += ["## Conformance checks", "[Conformance](../conformance.md) explains levels and profiles.", table]
    return "\n\n".join(blocks).rstrip() + "\n"


def codes_page() -> str:
    """Return the page of negotiation codes."""
    from slotline.registry.negotiation.codes import CODES

    blocks = [
        NOTICE,
        "# Codes of negotiation",
        "Each reason in a plan has a code, with one meaning in all versions. `slotline explain N301` prints one.\n"
        "[Negotiation](../negotiation.md) describes the rules, and [Reading a plan](../explain.md) an output.",
    ]
    for code in CODES.values():
        if code.name in CODE_GROUPS:
            blocks.append(f"## {CODE_GROUPS[code.name]}")
        blocks.append(f"### {code.name}: {code.title} ({code.severity.value})")
        blocks += [
            textwrap.fill(text, 120, break_on_hyphens=False) for text in (code.explanation, f"What to do: {code.fix}")
        ]
    return "\n\n".join(blocks) + "\n"


def whole_pages() -> dict[Path, str]:
    """Return the text of each page that is generated as a whole."""
    kinds = [name for name in contract_modules() if name not in PARTS_OF]
    pages = {REFERENCE / f"{kind}.md": contract_page(kind) for kind in kinds}
    return pages | {REFERENCE / "negotiation-codes.md": codes_page()}


def source(target: str) -> str:
    """The source of `module:Class.method`, as it stands."""
    module, _, path = target.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return textwrap.dedent(inspect.getsource(found)).rstrip()  # type: ignore[arg-type]


def checks(kind: str) -> str:
    """Return a table of a kind's conformance checks; empty if it has none."""
    from slotline.registry.descriptor import Kind
    from slotline.testing.check import Family, all_checks

    found = all_checks(Kind(kind))
    if not found:
        return ""
    notes = {Family.DECLARED: "", Family.REFUSED: "refusal", Family.UNDERDECLARED: "information"}
    rows = ["| check | level | profile | what it shows |", "|---|---|---|---|"]
    for item in found:
        what = notes[item.family] or ("" if item.mandatory else "provisional")
        cells = (f"`{item.id}`", f"{item.level}", item.profile or "-", f"{item.summary}{f' ({what})' if what else ''}")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def result_table(name: str) -> str:
    """Return the table of a benchmark's result file, with machine, date, commit and commands under it."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (found["columns"], *found["rows"])]
    lines.insert(1, "|" + "---|" * len(found["columns"]))
    commit = f"commit {found['commit']}" if found["commit"] else "commit not recorded"
    machine = found["machine"][:1].upper() + found["machine"][1:]
    link = f"[{name}.json](../benchmarks/results/{name}.json)"
    text = " ".join(part for part in (f"{machine}; {found['date']}; {commit}; {link}.", found["note"]) if part)
    facts = textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
    commands = [f"    {command}" for command in found["commands"]]
    return "\n".join([*lines, "", *facts, "", *commands]) + "\n"


def part(name: str) -> str:
    """Return the text of a generated part."""
    if name.startswith("results."):
        return result_table(name.removeprefix("results."))
    return f"```python\n{source(name)}\n```\n"


def render(text: str) -> str:
    """Return the page with all generated parts made anew."""
    return _PART.sub(lambda m: m[1] + part(m["name"]) + m[3], text)


def stale_pages() -> dict[Path, str]:
    """Return the pages that differ from the code, with the text that they should have."""
    whole = whole_pages()
    found = {page: text for page, text in whole.items() if not page.exists() or page.read_text() != text}
    for page in sorted(set(DOCS.rglob("*.md")) - set(whole)):
        text = render(page.read_text())
        if text != page.read_text():
            found[page] = text
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page is stale")
    stale = stale_pages()
    if not parser.parse_args().check:
        for page, text in stale.items():
            page.write_text(text)
        return 0
    for page in stale:
        sys.stderr.write(f"{page.relative_to(DOCS.parent)} is stale: run python docs/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
