"""The documents match the code: generated parts are fresh, and the code on the pages runs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import hybrid_transcript
import pytest
import tiny_models
from repository import ROOT, TESTS

from slotline import cli
from slotline.core import LLM, SamplingParams

DOCS = ROOT / "docs"


def generator():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_of_the_docs_match_the_code() -> None:
    assert list(generator().stale_pages()) == []


def test_the_transcript_of_a_hybrid_with_windows_and_a_drafter_is_what_explain_says() -> None:
    shown, printed = map(without_version, (hybrid_transcript.shown(), hybrid_transcript.transcript()))
    assert shown == printed, "run `python tests/support/hybrid_transcript.py`"


def without_version(text: str) -> str:
    """Return a transcript without slotline's version, for installations whose metadata is older than the sources."""
    return re.sub(r"\bslotline \d+\.\d+\.\d+", "slotline", text)


def test_transcripts_and_the_changelog_name_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    pages = [page for page in PAGES if "support-matrix" not in page]  # its reports name the version that ran
    texts = [(ROOT / page).read_text() for page in pages]
    named = {found for text in texts for found in re.findall(r"\bslotline (\d+\.\d+\.\d+)", text)}
    assert named == {version}
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_every_contract_module_is_documented() -> None:
    modules = {p.stem for p in (ROOT / "registry/slotline/registry/contracts").glob("*.py")} - {"__init__"}
    generate = generator()
    pages = {page.stem for page in generate.whole_pages()} - {"negotiation-codes"}
    assert pages | set(generate.PARTS_OF) == modules
    for module in modules:
        text = (DOCS / "reference" / f"{generate.PARTS_OF.get(module, module)}.md").read_text()
        classes = vars(importlib.import_module(f"slotline.registry.contracts.{module}")).values()
        own = [c for c in classes if isinstance(c, type) and c.__module__.endswith(f".{module}")]
        assert [c.__name__ for c in own if f"\nclass {c.__name__}" not in text and not c.__name__.startswith("_")] == []


def test_the_architecture_page_is_short_and_links_every_package_of_the_core() -> None:
    text = (DOCS / "architecture.md").read_text()
    assert len(text.splitlines()) <= 150
    core = ROOT / "core/slotline/core"
    packages = {init.parent.name for init in core.glob("*/__init__.py") if any(init.parent.glob("[!_]*.py"))}
    linked = set(re.findall(r"\]\(\.\./core/slotline/core/(\w+)\)", text))
    assert packages - linked == set()
    assert len(re.findall(r"\]\(\.\./\S+\.py\)", text)) >= 20


PAGES = sorted(p.relative_to(ROOT).as_posix() for p in [*DOCS.rglob("*.md"), ROOT / "README.md"])


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for target in re.findall(r"\b(docs/[\w/-]+\.md)\b", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target


def test_the_backend_on_the_page_gives_the_torch_backends_text(tmp_path: Path) -> None:
    """docs/writing-a-backend.md: the blocks are taken from the page and run as an inline plugin."""
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", (DOCS / "writing-a-backend.md").read_text(), re.DOTALL)
    code, config = blocks[0], blocks[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    (tmp_path / "my_attn.py").write_text(code)
    (tmp_path / "run.toml").write_text(config)
    model = tiny_models.build("mistral", tmp_path / "model", 0)  # has a window
    prompts = [[5, 6, 7, 8] * 10, [9, 10, 11]]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    ours = LLM(tmp_path / "run.toml", model=str(model), max_num_batched_tokens=24)
    assert ours.plan.groups[0].backend == "my_attn"
    assert ours.plan.groups[0].inline
    torch_text = LLM(model=str(model), backend="torch").generate(prompts, params)
    assert [o.outputs[0].token_ids for o in ours.generate(prompts, params)] == [
        o.outputs[0].token_ids for o in torch_text
    ]


def test_the_drafter_on_the_page_conforms_and_changes_no_text(tmp_path: Path) -> None:
    """docs/drafters.md: the block is taken from the page and run as an inline plugin."""
    (block,) = re.findall(
        r"```python\n(# echo.py.*?)```", (DOCS / "drafters.md").read_text(encoding="utf-8"), re.DOTALL
    )
    file = tmp_path / "echo.py"
    file.write_text(block, encoding="utf-8")
    assert len(block[block.index("class") :].splitlines()) <= 30
    from slotline.testing import check_plugin

    target = f"{file}:Echo"
    assert [f"{record.key}: {record.reason}" for record in check_plugin(target) if record.bad] == []
    plain = LLM(dtype="float32", max_model_len=96)
    llm = LLM(
        dtype="float32",
        max_model_len=96,
        **{"plugins.inline": [target], "drafter.name": "echo", "drafter.adaptive": False},
    )
    prompts = ["import os\nimport sys\nimport ", "def main(argv):\n    "]
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert llm.engine.extension("drafts").drafting.counts.accepted > 0


def test_the_spec_of_states_on_the_page_conforms_and_gives_checkpoints(tmp_path: Path) -> None:
    """docs/contracts.md: the block is taken from the page and run as an inline plugin, in an engine as well."""
    (block,) = re.findall(
        r"```python\n(# prompt_states.py.*?)```", (DOCS / "contracts.md").read_text(encoding="utf-8"), re.DOTALL
    )
    file = tmp_path / "prompt_states.py"
    file.write_text(block, encoding="utf-8")
    assert len([line for line in block.splitlines() if line.strip()]) <= 40
    from slotline.testing import Outcome, check_plugin

    records = check_plugin(f"{file}:descriptor", device="cpu")
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    (text,) = [record for record in records if record.id == "kv_spec.state.engine.text"]
    assert text.outcome is Outcome.PASSED, text.reason
    assert min(text.details["cached_tokens"][2:]) > 0


def sampling_page() -> list[str]:
    """The blocks of docs/sampling.md that make a processor and name it."""
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", (DOCS / "sampling.md").read_text(), re.DOTALL)
    return [block for block in blocks if block.startswith(("# ban_below.py", "# run.toml"))]


def test_the_logits_processor_on_the_page_runs_and_conforms(tmp_path: Path) -> None:
    from slotline.testing import check_plugin

    code, config = sampling_page()
    body = code[code.index("class BanBelow") :]
    assert len([line for line in body.splitlines() if line.strip()]) == 18
    (tmp_path / "ban_below.py").write_text(code)
    (tmp_path / "run.toml").write_text(config)
    llm = LLM(tmp_path / "run.toml", model=str(tiny_models.build("llama", tmp_path / "model", 0)))
    params = SamplingParams(max_tokens=16, seed=1, ignore_eos=True, extra_args={"ban_below": 380})
    (output,) = llm.generate([[5, 6, 7]], params)
    assert min(output.outputs[0].token_ids) >= 380
    records = check_plugin(f"{tmp_path / 'ban_below.py'}:BanBelow")
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []


def test_the_function_on_the_page_does_what_its_name_says(tmp_path: Path) -> None:
    text = (DOCS / "sampling.md").read_text()
    (block,) = re.findall(r"```python\n(def only_even.*?)```", text, re.DOTALL)
    names: dict[str, object] = {"SamplingParams": SamplingParams}
    exec(block.replace("SamplingParams(", "params = SamplingParams(max_tokens=9, ignore_eos=True, "), names)
    llm = LLM(str(tiny_models.build("llama", tmp_path / "model", 0)))
    (output,) = llm.generate([[5, 6, 7]], names["params"])  # type: ignore[arg-type]
    assert all(token % 2 == 0 for token in output.outputs[0].token_ids)


def test_the_structured_output_on_the_page_is_what_its_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    import ast

    import jsonschema

    (block,) = re.findall(r"```python\n(# person\.py\n.*?)```", (DOCS / "structured-output.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    jsonschema.validate(ast.literal_eval(capsys.readouterr().out), names["person"])


def test_the_table_of_parameters_names_all_of_them_and_tests_that_exist() -> None:
    import attrs

    text = (DOCS / "sampling.md").read_text()
    table = text[text.index("## Parameters") : text.index("## When something")]
    missing = [f.name for f in attrs.fields(SamplingParams) if f"`{f.name}`" not in table]
    assert missing == []
    for row in table.splitlines():
        named = re.findall(r"`(test_\w+\.py)::(\w+)`", row)
        assert named or not row.startswith("| `"), row
        for file, test in named:
            assert f"\ndef {test}(" in next(TESTS.rglob(file)).read_text(), (file, test)


def shipped_processors() -> list[Any]:
    """The descriptors of the logits processors that ship."""
    from importlib.metadata import entry_points

    points = entry_points(group="slotline.logits_processor")
    return [point.load() for point in points if point.value.startswith("slotline.plugins.")]


def test_the_table_of_parameters_names_those_of_each_processor_that_ships_with_its_name() -> None:
    import attrs

    text = (DOCS / "sampling.md").read_text()
    table = text[text.index("## Parameters") : text.index("## When something")]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    own = {f.name for f in attrs.fields(SamplingParams)}
    for descriptor in shipped_processors():
        for name in set(descriptor.capabilities.parameters) - own:
            assert any(f"`{name}`" in cell and f"(`{descriptor.name}`)" in cell for cell in first_cells), name
    known = own | {name for d in shipped_processors() for name in (d.name, *d.capabilities.parameters)}
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named - known == {"BeamSearchParams"}


def test_the_order_of_processors_on_the_page_is_theirs() -> None:
    rows = re.findall(r"^   \| (\d+) \| `(\w+)`.* \| (yes|no) \|$", (DOCS / "sampling.md").read_text(), re.MULTILINE)
    want = {
        (str(d.capabilities.order), d.name, "yes" if d.capabilities.default else "no") for d in shipped_processors()
    }
    assert set(rows) == want
    numbers = [int(order) for order, _, _ in rows]
    assert numbers == sorted(numbers)


def test_importing_the_core_takes_less_than_300_ms_and_no_torch() -> None:
    best = min(_seconds_to_import("slotline.core") for _ in range(3))
    assert best < 0.3


def _seconds_to_import(module: str) -> float:
    code = f"""
import sys, time
start = time.process_time()
import {module}
print(time.process_time() - start, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, has_torch = done.stdout.split()
    assert has_torch == "False"
    return float(seconds)


def skip_where_the_processor_decides(printed: str, shown: str) -> None:
    """The pages show plans of a processor with bfloat16 arithmetic."""
    reason = "cpu computes in float32"
    if reason in printed and reason not in shown:
        pytest.skip("this processor has no bfloat16 arithmetic, so the plan differs")


def transcripts() -> list[tuple[str, str]]:
    """The commands and outputs that docs/explain.md shows."""
    return re.findall(r"```\n\$ (slotline explain.*?)\n(.*?)```", (DOCS / "explain.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), transcripts(), ids=lambda value: value[:40])
def test_explanations_on_the_page_of_plans_are_real(command: str, shown: str, monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from slotline.cli import main

    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))  # nothing was timed
    monkeypatch.chdir(ROOT)
    main(shlex.split(command)[1:])
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    skip_where_the_processor_decides(printed, shown)
    head = re.compile(r"^plan \w{6}  \w+ \(cpu\)", re.MULTILINE)  # the digest and the processor's name
    threads = re.compile(r"^threads: .*\n", re.MULTILINE)  # the machine's
    printed, shown = (threads.sub("", head.sub("plan", text)) for text in (printed, shown))
    printed, shown = (without_version(text).strip() for text in (printed, shown))
    assert printed == shown


def test_the_lines_of_explain_in_the_readme_are_of_the_whole_output() -> None:
    """The README shows some lines in their order. docs/explain.md has all, and the test above runs its command."""
    shown = re.findall(r"```\n\$ slotline explain\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (whole,) = [text for command, text in transcripts() if command == "slotline explain"]
    (lines,) = [[line for line in block.splitlines() if line != "..."] for block in shown]
    rest = iter(whole.splitlines())
    assert [line for line in lines if line not in rest] == []
    assert len(lines) >= 14


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_python_lines_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in readme_blocks() if "my_attn" not in block]
    assert len([line for line in block.splitlines() if line.strip()]) <= 8
    exec(block, {})
    printed = capsys.readouterr().out
    assert "length" in printed
    assert "group full" in printed


def test_the_backend_of_the_readme_gives_the_torch_backends_text(tmp_path: Path) -> None:
    (block,) = [block for block in readme_blocks() if block.startswith("# my_attn.py")]
    (tmp_path / "my_attn.py").write_text(block)
    settings: dict[str, Any] = {"model": str(tiny_models.build("llama", tmp_path / "model", 0)), "dtype": "float32"}
    ours = LLM(backend="my_attn", plugins=[f"{tmp_path / 'my_attn.py'}:MyAttention"], **settings)
    assert ours.plan.groups[0].backend == "my_attn"
    prompts = [[5, 6, 7, 8] * 10, [9, 10, 11]]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    expected = LLM(backend="torch", **settings).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in ours.generate(prompts, params)] == [
        o.outputs[0].token_ids for o in expected
    ]


def commands() -> list[str]:
    """Every call of the program on a page, in a block or within a line, whose arguments are all there."""
    found = dict[str, None]()
    for page in PAGES:
        text = (ROOT / page).read_text()
        for pattern in (r"^ *\$ (slotline [^\n]*)", r"^(slotline [\w-]+ [^\n·]*)$", r"`(slotline [a-z-]+ [^`\n…]*)`"):
            found |= dict.fromkeys(re.findall(pattern, text, re.MULTILINE))
    return [command for command in found if command.split()[1] in NAMES]


NAMES = [name.replace("_", "-") for name in cli._COMMANDS]


@pytest.mark.parametrize("command", commands())
def test_every_command_on_a_page_can_be_parsed(command: str) -> None:
    from slotline.cli import build_parser

    arguments = shlex.split(command.split(" > ")[0], comments=True)[1:]
    if arguments[0] in ("bench", "generate") and all(part.startswith("--") for part in arguments[1:]):
        arguments.append("decode1")  # what is run, where a page speaks of an option alone
    build_parser().parse_args(arguments)


def tables() -> list[tuple[str, str]]:
    """The configurations on the pages: all blocks of TOML but those for pytest and for a package's metadata."""
    found = [
        (page, block)
        for page in PAGES
        for block in re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    ]
    return [(page, block) for page, block in found if "slotline_" not in block and "entry-points" not in block]


@pytest.mark.parametrize(("page", "block"), tables(), ids=lambda value: value[:40].splitlines()[0])
def test_every_configuration_on_a_page_is_read_without_a_fault_or_with_the_shown_ones(
    page: str, block: str, tmp_path: Path
) -> None:
    from slotline.registry.config import load_config
    from slotline.registry.errors import ConfigError

    (tmp_path / "run.toml").write_text(block)
    (tmp_path / "base.toml").write_text("")
    shown = "".join(re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    try:
        warnings: tuple[str, ...] = load_config(tmp_path / "run.toml").warnings
    except ConfigError as error:
        faults = [str(fault).replace(f"{tmp_path}/", "") for fault in error.faults]
    else:
        faults = list(warnings)
    assert [fault for fault in faults if fault not in shown] == []


def outputs() -> list[tuple[str, str]]:
    """Commands in docs/cli.md with their outputs, of those that are quick and the same everywhere."""
    blocks = re.findall(
        r"^    \$ (slotline [^\n]*)\n((?:    [^\n]*\n|\n)*)", (DOCS / "cli.md").read_text(), re.MULTILINE
    )
    quick = ("explain", "new-plugin", "generate --lora")
    return [(command, shown) for command, shown in blocks if command.startswith(tuple(f"slotline {q}" for q in quick))]


@pytest.mark.parametrize(("command", "shown"), outputs(), ids=lambda value: value[:40])
def test_outputs_on_the_page_of_the_command_line_are_real(  # type: ignore[no-untyped-def]
    command: str, shown: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Every line is in the output, in that order; "..." stands for the rest."""
    from slotline.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('[attention]\nbackend = "torch"\n')
    main(shlex.split(command)[1:])
    printed = capsys.readouterr().out
    skip_where_the_processor_decides(printed, shown)
    machine = re.compile(r"plan \w{6}  \w+ |\(device \w+\)")
    lines = iter(without_version(machine.sub("", line)).strip() for line in printed.splitlines())
    for line in shown.splitlines():
        text = without_version(machine.sub("", line)).strip()
        assert text in ("", "...") or text in lines, text


def test_the_page_of_mutants_has_each_with_its_level_and_no_other() -> None:
    from slotline.testing.mutants import all_mutants

    rows = re.findall(
        r"^\| (\w+) \| ([\w-]+) \| (.*) \| (L\d) \| `([\w.]+)` \|$", (DOCS / "reference/mutants.md").read_text(), re.M
    )
    shown = {(kind, name, level) for kind, name, _, level, _ in rows}
    assert shown == {(mutant.kind.value, mutant.name, str(mutant.level)) for mutant in all_mutants()}
    assert len(rows) == len(shown)
    also = {"drafter": "extension"}  # a drafter's rows are checked as those of any extension
    assert all(killer.split(".")[0] in (kind, also.get(kind)) for kind, _, _, _, killer in rows)
