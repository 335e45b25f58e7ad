"""`slotline batch`: a file of requests, wrong lines among them, and a run that goes on where another was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotline.cli import main
from slotline.core import LLM, SamplingParams
from slotline.server.batch import _line


def request(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def good(index: int) -> str:
    return request(f"r{index}", {"prompt": f"def f{index}(", "max_tokens": 5, "temperature": 0})


def run(tmp_path: Path, lines: list[str]) -> tuple[int, dict[str, Any]]:
    """The exit code, and the answers by id."""
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    code = main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--set", "dtype=float32"])
    out = (tmp_path / "out.jsonl").read_text().splitlines() if (tmp_path / "out.jsonl").exists() else []
    answers = {one["custom_id"]: one for one in map(json.loads, out)}
    assert len(answers) == len(out)
    return code, answers


def test_each_request_gets_its_answer_and_a_wrong_one_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 3}
    lines = [*map(good, range(20)), request("chat", chat, "/v1/chat/completions"), "{", '{"url": 1}']
    lines += [request("url", {}, "/v2"), request("field", {"prompt": "x", "promt": 1})]
    lines += [request("stream", {"prompt": "x", "stream": True})]
    code, answers = run(tmp_path, lines)
    assert code == 1
    prompts = [f"def f{index}(" for index in range(20)]
    expected = LLM(dtype="float32").generate(prompts, SamplingParams(temperature=0, max_tokens=5))
    for index, output in enumerate(expected):
        response = answers[f"r{index}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == output.outputs[0].text
    assert answers["chat"]["response"]["body"]["object"] == "chat.completion"
    assert answers["field"]["response"]["status_code"] == 400
    for name, said in (("line-22", "no JSON"), ("line-23", "no custom_id"), ("url", "'/v2'"), ("stream", "stream")):
        assert said in answers[name]["error"]["message"]
    assert "26 requests answered, 5 of them with an error" in capsys.readouterr().err


def test_a_line_that_is_nested_too_deeply_is_wrong() -> None:
    assert "line 1 is no JSON" in (_line(1, "[" * 100_000).fault or "")


def test_a_batch_that_was_killed_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(map(good, range(6)))
    assert run(tmp_path, lines[:4])[0] == 0
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:2]) + whole[2][:40])  # killed in the middle of a line
    kept = b"".join(whole[:2])
    code, answers = run(tmp_path, lines)
    assert code == 0
    assert set(answers) == {f"r{index}" for index in range(6)}
    assert out.read_bytes().startswith(kept)
    assert "4 requests answered, 0 of them with an error, 2 were answered before" in capsys.readouterr().err
    assert run(tmp_path, lines) == (0, answers)


def test_wrong_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [good(1), good(1)])[0] == 2
    (tmp_path / "out.jsonl").write_text("something else\n")
    (tmp_path / "in.jsonl").write_text(good(1))
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == 2
    assert main(["batch", str(tmp_path / "none.jsonl"), str(tmp_path / "out.jsonl")]) == 2
    said = capsys.readouterr().err
    for text in ("lines 1 and 2 have custom_id 'r1'", "is no file of answers", "cannot be read"):
        assert text in said
    assert (tmp_path / "out.jsonl").read_text() == "something else\n"
