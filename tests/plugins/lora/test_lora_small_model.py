"""The two adapters that ship: what they do to the small model's text, and the script that trained them."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from repository import ROOT

from slotline.cli import main
from slotline.core import LLM, LoRARequest, SamplingParams

MODEL = ROOT / "core" / "slotline" / "core" / "small_model"
PROMPT = "def read_file(path"
SMALL = {"backend": "torch", "max_model_len": 128, "max_num_seqs": 4, "memory": "8MiB", "observability.progress": False}
pytestmark = pytest.mark.usefixtures("one_thread")


def request(name: str, number: int) -> LoRARequest:
    return LoRARequest(name, number, MODEL / "adapters" / name)


def test_each_adapter_s_text_is_peft_s_and_shows_its_style() -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    llm = LLM(dtype="float32", **SMALL, **{"lora.name": "torch"})
    adapters = [None, request("typed", 1), request("docstrings", 2)]
    outputs = llm.generate([PROMPT] * 3, SamplingParams(temperature=0, max_tokens=24), lora_request=adapters)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, trust_remote_code=False)
    model = peft.PeftModel.from_pretrained(
        base, MODEL / "adapters" / "typed", adapter_name="typed", trust_remote_code=False
    ).eval()
    model.load_adapter(MODEL / "adapters" / "docstrings", adapter_name="docstrings")
    for output, adapter in zip(outputs, adapters, strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        if adapter is not None:
            model.set_adapter(adapter.lora_name)
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
        target = model.base_model.model if adapter is not None else base
        with model.disable_adapter() if adapter is None else torch.no_grad():
            wanted = target.generate(input_ids=ids, **options)[0, ids.shape[1] :]
        assert list(output.outputs[0].token_ids) == wanted.tolist()
    plain, typed, documented = (output.outputs[0].text for output in outputs)
    assert typed.startswith(": str) -> ")
    assert "Args:\n        path: the path" in documented
    assert "->" not in plain
    assert "Args:" not in plain


def test_the_command_line_takes_an_adapter_by_name_and_by_folder(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"--set={key}={value}" for key, value in (("cache.memory", "16MiB"), ("scheduler.max_requests", 4))]
    for adapter in ("typed", str(MODEL / "adapters" / "typed")):
        assert main(["generate", *keys, "--lora", adapter, "--temperature", "0", "--max-tokens", "8", PROMPT]) == 0
        assert capsys.readouterr().out.startswith(": str) -> ")
    assert main(["generate", *keys, "--lora", "nobody", PROMPT]) == 2
    assert "there is no adapter 'nobody'" in capsys.readouterr().err


def test_the_code_on_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/lora.md: the example over the small model, and what it prints."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "docs" / "lora.md").read_text(), re.DOTALL)
    code = next(text for kind, text in blocks if kind == "python" and "small_model" in text)
    shown = next(text for kind, text in blocks if not kind)
    monkeypatch.chdir(ROOT)
    exec(
        compile(code.replace('"lora.name"', '"cache.memory": "64MiB", "lora.name"'), "page", "exec"),
        {},
    )
    printed = capsys.readouterr().out
    for line in shown.splitlines():
        assert line in ("...", "") or line.strip() in printed, line


def test_the_run_on_the_page_loads_uses_swaps_and_unloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/lora.md: the session, line by line."""
    page = (ROOT / "docs" / "lora.md").read_text()
    session = re.findall(r"```pycon\n(.*?)```", page, re.DOTALL)[0].replace(
        '"lora.name"', '"memory": "64MiB", "lora.name"'
    )
    test = doctest.DocTestParser().get_doctest(session, {}, "docs/lora.md", None, 0)
    assert len(test.examples) > 10
    monkeypatch.chdir(ROOT)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """training/adapters.py as a module."""
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    spec = importlib.util.spec_from_file_location("training_adapters", ROOT / "training" / "adapters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "training_adapters", module)
    spec.loader.exec_module(module)
    return module


def test_functions_are_rewritten_in_each_style(training: ModuleType) -> None:
    source = textwrap.dedent(
        """
        class Store:
            def read(self, path, size=3, *args, strict=False, **options):
                \'\'\'Read it. All of it.\'\'\'
                return "text"
        """
    )
    (typed,) = training.rewritten(source, training.STYLES["typed"])
    assert "def read(self, path: str, size: int = 3, *args: Any, strict: bool = False, **options: Any) -> str:" in typed
    (documented,) = training.rewritten(source, training.STYLES["docstrings"])
    assert "        path: the path.\n" in documented
    assert "    Returns:\n            str: the result.\n" in documented
    for text in (typed, documented):
        compile(text, "rewritten", "exec")


def test_one_step_of_training_writes_an_adapter_that_loads(
    training: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "is_held_out", lambda path: path.name == "shlex.py")
    (tmp_path / "lib").mkdir()
    for name in ("textwrap.py", "shlex.py", "fnmatch.py"):
        shutil.copy(Path(textwrap.__file__).parent / name, tmp_path / "lib" / name)
    monkey = ["typed", "--steps", "1", "--batch", "1", "--context", "48", "--device", "cpu"]
    options = training.parse_options([*monkey, "--corpus", str(tmp_path / "lib"), "--out", str(tmp_path / "out")])
    training.train("typed", options)
    config = (tmp_path / "out" / "typed" / "adapter_config.json").read_text()
    assert str(ROOT) not in config
    llm = LLM(**SMALL, **{"lora.name": "torch"})
    assert llm.add_lora(LoRARequest("typed", 1, tmp_path / "out" / "typed"))


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_drafter_that_shares_the_output_projection_leaves_an_adapter_s_text_as_it_is(name: str) -> None:
    targets = ("lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    settings = {"lora.name": "torch", "lora.target_modules": targets}
    drafting = {"drafter.name": name, "drafter.tokens": 3, "drafter.adaptive": False}
    texts = []
    for more in ({}, drafting):
        llm = LLM(dtype="float32", **SMALL, **settings, **more)
        adapters = [None, request("typed", 1), request("docstrings", 2)]
        params = SamplingParams(temperature=0, max_tokens=24)
        outputs = llm.generate([PROMPT, "class Stack", "def main("], params, lora_request=adapters)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]
    assert llm.engine.extension("drafts").drafting.counts.accepted > 0
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
