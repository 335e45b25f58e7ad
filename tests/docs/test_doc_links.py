"""Form of the documentation: file names are links, links lead somewhere, lines are short, indexes are complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted(DOCS.rglob("*.md"))
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)]*)\)")
FILE = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)+(?:…/)?[\w./-]*[\w-]+\.\w{1,5}|[\w-]+\.md)(?![\w/])")


def text_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines outside code: not in a fence, nor indented by four spaces after a blank line."""
    fenced = indented = listed = False
    blank = True
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            indented = line.startswith("    ") and not listed and (blank or indented)
            if not indented:
                yield number, line
            if line and not line.startswith(" "):
                listed = re.match(r"([*-]|\d+\.)\s", line) is not None
        blank = not line.strip()


def existing(name: str, page: Path) -> bool:
    """Return whether the name is that of a file, from the root or from the page's folder."""
    whole = re.sub(r"^(\w+)/…/", r"\1/slotline/\1/", name)
    return any((base / whole).is_file() for base in (ROOT, page.parent) if base / whole != page)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_names_of_files_are_links(page: Path) -> None:
    text = "\n".join(line for _, line in text_lines(page))
    text = re.sub(r"<!--.*?-->", "", LINK.sub("", text))
    text = re.sub(r"`[^`]*`", lambda code: "" if re.search(r"\s", code[0]) else code[0], text)  # commands
    assert [name for name in FILE.findall(text) if existing(name, page)] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    text = "\n".join(line for _, line in text_lines(page))
    targets = [found["target"].partition("#")[0] for found in LINK.finditer(text)]
    missing = [t for t in targets if t and not t.startswith("http") and not (page.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_lines_have_at_most_120_characters(page: Path) -> None:
    """Tables and their footnotes are exempt, and lines of one link, address or command, which cannot be wrapped."""
    long = [(n, line) for n, line in text_lines(page) if len(line) > 120 and not line.startswith("|")]
    whole = re.compile(r"\s*([*-] )?(\S+|!?\[[^\]]*\]\([^)]*\)|`[^`]*`)\s*")
    if page.name == "support-matrix.md":
        long = [(n, line) for n, line in long if not re.match(r"\d+\. ", line)]
    assert [(n, line) for n, line in long if not whole.fullmatch(line)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_the_index_reaches_every_page() -> None:
    """From docs/index.md over links, decisions and reference pages included."""
    seen: set[Path] = set()
    found = [DOCS / "index.md"]
    while found:
        page = found.pop()
        if page in seen or page.suffix != ".md" or DOCS not in page.parents:
            continue
        seen.add(page)
        targets = (link["target"].partition("#")[0] for link in LINK.finditer(page.read_text(encoding="utf-8")))
        found += [(page.parent / t).resolve() for t in targets if t and not t.startswith("http")]
    assert {page for page in PAGES if DOCS in page.parents} - seen == set()


def test_the_index_of_decisions_has_each_with_date_and_status() -> None:
    text = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.+\]\(([\w-]+)\.md\) \| .+ \| \d{4}-\d\d-\d\d \| \d{4}-\d\d-\d\d \| \w+ \|$", text, re.M)
    notes = {page.stem for page in (DOCS / "decisions").glob("*.md")} - {"README", "template"}
    assert set(rows) == notes
    assert len(rows) == len(notes)
