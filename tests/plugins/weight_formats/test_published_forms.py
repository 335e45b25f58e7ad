"""Every published form runs like the same model dequantized in float32: the same tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import quantized_checkpoints as forms
from quantized_engines import answer, engine, expected, same


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forms.two_layers(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def written(plain: Path, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Write one form and return its folder and that of the dequantized model."""

    def write(name: str) -> tuple[Path, Path]:
        folders = tmp_path / "quantized", tmp_path / "meant"
        forms.write(forms.FORMS[name], plain, *folders)
        return folders

    return write


@pytest.mark.parametrize("form", forms.FORMS)
def test_a_published_form_answers_like_its_dequantized_model(
    form: str, written: Callable[..., tuple[Path, Path]]
) -> None:
    quantized, meant = written(form)
    same(answer(engine(quantized, **{"weights.linear": "dequantized"})), expected(meant))
