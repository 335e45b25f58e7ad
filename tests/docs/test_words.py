"""Docstrings are plain English: no indirect questions as noun phrases, one thought a sentence."""

import ast
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
QUESTIONS = frozenset(("what", "whether", "where", "which", "how", "who", "whose"))
QUESTIONS_ALLOWED, SEMICOLONS_ALLOWED = 0.03, 0.05

FOLDERS = (
    "registry/slotline/registry",
    "registry/slotline/testing",
    "registry/slotline/conformance",
    "proposers",
    "plugins",
    "backends",
    "core",
    "registry/slotline/planner",
)


def docstrings(folder: Path) -> list[str]:
    found = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(ast.get_docstring(node) or "")
    return [text for text in found if text]


def first_word(text: str) -> str:
    return text.split()[0].lower().strip(",.:'`")


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_do_not_begin_with_questions_and_keep_to_one_thought_a_sentence(folder: str) -> None:
    texts = docstrings(ROOT / folder)
    assert len(texts) > 50, folder
    asking = [text.splitlines()[0] for text in texts if first_word(text) in QUESTIONS]
    assert len(asking) <= QUESTIONS_ALLOWED * len(texts), asking[:20]
    joined = [text.splitlines()[0] for text in texts if ";" in text]
    assert sum(text.count(";") for text in texts) <= SEMICOLONS_ALLOWED * len(texts), joined[:20]


def test_the_counts_see_question_words_and_semicolons(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text('"""What it is; and why."""\n\ndef f():\n    """Return it."""\n')
    texts = docstrings(tmp_path)
    assert texts == ["What it is; and why.", "Return it."]
    assert [first_word(text) in QUESTIONS for text in texts] == [True, False]
