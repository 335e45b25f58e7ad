"""The page about images: its example gives what it shows, with the weights that training/shapes.py made."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from repository import ROOT, TESTS

from slotline.core import LLM, SamplingParams

Image: Any = pytest.importorskip("PIL.Image", reason="images need Pillow")
WEIGHTS = TESTS / "data" / "shapes"
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_image_of_the_page_gets_the_answers_that_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "multimodal.md").read_text("utf-8")
    code, shown = re.findall(r"```python\n(llm = .*?)```\n\n```text\n(.*?)```", page, re.DOTALL)[0]
    monkeypatch.chdir(ROOT)
    exec(code.replace('"shapes"', f'"{WEIGHTS}"'), {"LLM": LLM, "SamplingParams": SamplingParams})
    assert capsys.readouterr().out == shown
    assert "a blue triangle" in shown


def test_new_images_get_transformers_answers_and_most_are_right(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "training")
    import shapes
    import transformers

    rng, llm = np.random.default_rng(3), engines(WEIGHTS)
    asked = [shapes.example(rng) for _ in range(24)]
    given = [
        {"prompt": f"<image> {question}", "multi_modal_data": {"image": Image.fromarray(image)}}
        for image, question, _ in asked
    ]
    outputs = llm.generate(given, SamplingParams(temperature=0, max_tokens=5))
    found = [output.outputs[0].text.strip() for output in outputs]
    model = transformers.AutoModelForImageTextToText.from_pretrained(WEIGHTS, dtype="float32", trust_remote_code=False)
    processor = transformers.AutoProcessor.from_pretrained(WEIGHTS, trust_remote_code=False)
    for prompt, text in zip(given[:8], found, strict=False):
        inputs = processor(text=prompt["prompt"], images=[prompt["multi_modal_data"]["image"]], return_tensors="pt")
        answer = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert text == processor.tokenizer.decode(answer, skip_special_tokens=True)
    assert sum(text == answer for text, (_, _, answer) in zip(found, asked, strict=True)) > 16


def test_the_script_trains_and_writes_what_the_engine_reads(
    engines: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "training")
    import shapes

    arguments = ["shapes.py", str(tmp_path), "--steps", "2", "--batch", "2", "--questions", "1"]
    monkeypatch.setattr("sys.argv", arguments)
    shapes.main()
    assert " of 1 new questions answered right" in capsys.readouterr().out
    prompt = {"prompt": "<image> What shape ?", "multi_modal_data": {"image": str(tmp_path / "shape.png")}}
    (output,) = engines(tmp_path).generate(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
