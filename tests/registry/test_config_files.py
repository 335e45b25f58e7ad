"""Configuration files that are broken, hostile or not trusted: each is a fault with its place, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slotline.cli import main
from slotline.core import LLM
from slotline.registry import ConfigError, LoadedConfig, load_config
from slotline.registry.config import Fault
from slotline.registry.config.file_text import MAX_BYTES
from slotline.registry.config.files import MAX_CHAIN
from slotline.registry.config.nesting import MAX_NESTING

DEEP = "[" * 5000 + "]" * 5000
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files into an empty current folder."""
    monkeypatch.chdir(tmp_path)

    def make(**files: str | bytes) -> None:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            Path(f"{name}.toml").write_bytes(data)

    return make


def load(path: str | None = "run.toml", **arguments: Any) -> LoadedConfig:
    return load_config(path, **{"environ": {}, **arguments})


def faults(path: str | None = "run.toml", **arguments: Any) -> list[tuple[str, str]]:
    """The place and the message of each fault."""
    with pytest.raises(ConfigError) as raised:
        load(path, **arguments)
    found: list[Fault] = list(raised.value.faults)
    return [(fault.origin.where, fault.message) for fault in found]


def chain(write: Write, length: int, line: Callable[[str], str]) -> None:
    """`run.toml` and as many files as make the length, each extending the next."""
    names = ["run", *(f"n{number}" for number in range(1, length))]
    for name, following in pairwise(names):
        write(**{name: f"{line(following)}\n"})
    write(**{names[-1]: "[sampling]\nseed = 7\n"})


def test_files_that_name_the_next_twice_are_read_once_each(write: Write) -> None:
    chain(write, MAX_CHAIN, lambda name: f'extends = ["{name}.toml", "./{name}.toml"]')
    loaded = load()
    assert loaded.config.sampling.seed == 7
    assert len(loaded.files) == MAX_CHAIN


def test_files_that_reach_each_other_by_folders_that_are_links_are_read_once_each(write: Write) -> None:
    os.symlink(".", "a")
    os.symlink(".", "b")
    chain(write, 25, lambda name: f'extends = ["a/{name}.toml", "b/{name}.toml"]')
    assert load().config.sampling.seed == 7


def test_a_base_that_is_reached_twice_counts_where_it_did_before(write: Write) -> None:
    write(
        run='extends = ["a.toml", "b.toml"]',
        a='extends = "c.toml"\n[sampling]\nseed = 2',
        b='extends = "c.toml"',
        c="[sampling]\nseed = 1",
    )
    assert load().config.sampling.seed == 1
    write(run='extends = ["c.toml", "a.toml", "c.toml"]')
    assert load().config.sampling.seed == 1


@pytest.mark.parametrize("length", [MAX_CHAIN + 1, 1200])
def test_a_chain_of_files_has_a_limit(write: Write, length: int) -> None:
    chain(write, length, lambda name: f'extends = "{name}.toml"')
    ((where, message),) = faults()
    assert where == f"n{MAX_CHAIN - 1}.toml:1"
    assert f"more than {MAX_CHAIN} files extend each other" in message


def test_the_limit_of_a_chain_counts_files_that_were_read_by_a_shorter_way(write: Write) -> None:
    chain(write, MAX_CHAIN, lambda name: f'extends = "{name}.toml"')
    Path("run.toml").rename("long.toml")
    write(run='extends = ["n9.toml", "long.toml"]')
    ((where, message),) = faults()
    assert where in {"n8.toml:1", "run.toml:1"}
    assert "more than" in message


def test_links_that_point_at_each_other_and_files_that_extend_themselves_are_faults_with_the_others(
    write: Write,
) -> None:
    os.symlink("loop.toml", "loop.toml")
    os.symlink("run.toml", "again.toml")
    os.symlink("nowhere.toml", "dangling.toml")
    write(
        run='strict = 3\nextends = ["loop.toml", "again.toml", "dangling.toml", "a.toml", "./run.toml"]',
        a='graphs = 5\nextends = "./a.toml"',
    )
    places = [where for where, _ in faults()]
    assert sorted(places) == ["a.toml:1", "a.toml:2", "run.toml:1", "run.toml:2", "run.toml:2", "run.toml:2"]
    ((_, message),) = faults("loop.toml")
    assert "symbolic links" in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"strict = true\na = {DEEP}", 2),
        ("\n\nx.a = " + "{b = " * 5000 + "1" + "}" * 5000, 3),
        (".".join("a" * 5000) + " = 1", 1),
        ("[" + ".".join("a" * 5000) + "]\nb = 1", 1),
        ("strict = true\nb = " + "[{a = " * 20 + "1" + "}]" * 20, 2),
        ("[" + ".".join("a" * 20) + "]\n" + ".".join("b" * 20) + " = 1", 2),
        ("a = " + "[" * 5000, 1),
        ("x = " + "1" * 5000, 1),
    ],
    ids=["lists", "tables", "key", "header", "mixed", "header-and-key", "open", "digits"],
)
def test_what_nests_too_deep_or_is_too_long_is_a_fault_with_its_line(write: Write, text: str, line: int) -> None:
    write(run=text)
    ((where, message),) = faults()
    assert where == f"run.toml:{line}"
    assert f"deeper than {MAX_NESTING} levels" in message or "too long" in message


def test_brackets_in_texts_and_comments_are_no_nesting(write: Write) -> None:
    write(run=f'model = """\n{DEEP}\n"""  # {DEEP}\ntokenizer = \'{".".join("a" * 5000)}\'\n')
    assert load().config.model == f"{DEEP}\n"


def test_deep_values_of_the_environment_of_set_and_of_arguments_are_faults() -> None:
    endless: list[Any] = []
    endless.append(endless)
    found = faults(
        None,
        environ={"SLOTLINE_GRAPHS__SIZES": DEEP, "SLOTLINE_" + "__".join("A" * 5000): "1"},
        overrides=[f"graphs.sizes={DEEP}", "x = " + "{a = " * 5000 + "1" + "}" * 5000, ".".join("a" * 5000) + "=1"],
        values={"graphs.sizes": endless, "backend": eval("[" * 60 + "]" * 60)},
    )
    assert len(found) == 7
    assert all("deeper than" in message for _, message in found)
    assert all(len(where) < 200 for where, _ in found)


def test_a_value_where_only_a_text_is_possible_may_hold_any_brackets() -> None:
    assert load(None, overrides=[f"model={DEEP}"]).config.model == DEEP


def test_a_text_of_brackets_for_a_number_is_a_short_fault(write: Write) -> None:
    write(run=f'[sampling]\nseed = "{DEEP}"\nmax_logprobs = 0x{"f" * 5000}')
    assert all(len(message) < 700 for _, message in faults())


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        (b"x = 1\ny = '\xe9'", "bad.toml:2", "is not UTF-8"),
        ("x = 1\n".encode("utf-16"), "bad.toml:1", "UTF-16"),
        (b"strict = true\n\0", "bad.toml:2", "is not valid TOML"),
        (b"strict = [\n\n\n", "bad.toml:1", "is not valid TOML"),
        (b"#" * (MAX_BYTES + 1), "run.toml:2", "is larger than"),
    ],
    ids=["latin-1", "utf-16", "nul", "unclosed", "huge"],
)
def test_an_extended_file_that_is_no_text_is_a_fault_beside_the_others(
    write: Write, content: bytes, place: str, message: str
) -> None:
    write(run='strict = 3\nextends = "bad.toml"', bad=content)
    found = dict(faults())
    assert found["run.toml:1"] == "3 is not true or false"
    assert message in found[place]
    assert message in faults("bad.toml")[0][1]


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "folder", "", "a\\u0000b", "x" * 300, "absent.toml"])
def test_what_is_no_file_is_refused_without_waiting_for_it(write: Write, name: str) -> None:
    os.mkfifo("pipe")
    Path("folder").mkdir()
    write(run=f'graphs = 1\nextends = "{name}"')
    program = "from slotline.registry import load_config\ntry: load_config('run.toml')\nexcept Exception as e: print(e)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("2 errors in the configuration:\n  run.toml:1: graphs: ")
    assert "run.toml:2: extends: " in done.stdout


def test_the_first_file_may_be_a_pipe_of_the_shell_but_no_named_one(tmp_path: Path) -> None:
    script = "cd $1; $0 -m slotline config show <(echo 'dtype = \"float16\"') && $0 -m slotline config show pipe"
    os.mkfifo(tmp_path / "pipe")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, tmp_path], env=environment, capture_output=True, timeout=60, check=False
    )
    assert b'dtype = "float16"' in done.stdout
    assert done.returncode == 2
    assert b"pipe is a named pipe, not a file" in done.stderr


def test_a_file_of_very_many_unknown_keys_is_refused_in_a_moment(write: Write) -> None:
    write(run="".join(f"key_{number} = 1\n" for number in range(30_000)))
    with pytest.raises(ConfigError, match="and 29,900 more") as raised:
        load()
    assert len(raised.value.faults) == 30_000


def test_extends_takes_a_home_folder_and_an_absolute_path(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", os.getcwd())
    write(run='extends = "~/base.toml"', base="strict = true", absolute=f'extends = "{os.getcwd()}/base.toml"')
    assert load().config.strict
    assert load("~/run.toml").config.strict
    assert load("absolute.toml").config.strict


PLUGIN = """
import pathlib
from slotline.registry import Descriptor, Kind
from slotline.registry.contracts import LogitsProcessorCapabilities
pathlib.Path(__file__).with_suffix(".ran").touch()
descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR, name="inline", factory=dict, capabilities=LogitsProcessorCapabilities()
)
"""


COMMANDS = ("config check", "explain", "plugins --config", "generate x --config", "tune", "bench decode1 --config")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration that names an inline plugin; the current folder is another one."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "base.toml").write_text('strict = true\nplugins = ["./plugin.py:descriptor"]\n')
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    return folder


def ran(shared: Path) -> bool:
    return (shared / "plugin.ran").exists()


@pytest.mark.parametrize("way", ["relative", "absolute", "dots", "link", "linked folder", "through another"])
def test_inline_plugins_of_an_extended_file_elsewhere_are_refused_before_they_run(
    shared: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.symlink(shared / "base.toml", "link.toml")
    os.symlink(shared, "folder")
    Path("between.toml").write_text('extends = "../shared/base.toml"\n')
    name = {
        "relative": "../shared/base.toml",
        "absolute": f"{shared}/base.toml",
        "dots": "./nothing/../../shared/./base.toml",
        "link": "link.toml",
        "linked folder": "folder/base.toml",
        "through another": "between.toml",
    }[way]
    Path("run.toml").write_text(f'extends = "{name}"\n')
    for command in COMMANDS:
        assert main([*command.split(), "run.toml"]) == 2, command
        assert 'allow_inline_from = ["../shared"]' in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"\.toml:2: plugins\.inline"):
        LLM("run.toml")
    assert not ran(shared)


@pytest.mark.parametrize("entry", ["../shared", "../shared/base.toml", "{shared}", "..", "../own/../shared/"])
def test_the_first_file_may_trust_a_folder(shared: Path, entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry = entry.format(shared=shared)
    Path("run.toml").write_text(f'extends = "../shared/base.toml"\n[plugins]\nallow_inline_from = ["{entry}"]\n')
    assert main(["config", "check", "run.toml"]) == 0
    assert "inline code: ../shared/plugin.py runs for descriptor, named in" in capsys.readouterr().out
    assert ran(shared)
    assert load().origins["plugins.allow_inline_from"].where == "run.toml:3"


@pytest.mark.parametrize("entry", ["", ".", "../share", "../shared/plugin.py", "../own"])
def test_trust_in_another_folder_does_not_count(shared: Path, entry: str) -> None:
    Path("run.toml").write_text(f'extends = "../shared/base.toml"\n[plugins]\nallow_inline_from = ["{entry}"]\n')
    assert faults() != []


def test_who_starts_the_run_may_trust_a_folder_by_every_layer(shared: Path) -> None:
    Path("run.toml").write_text('extends = "../shared/base.toml"\n')
    key = "plugins.allow_inline_from"
    assert load(overrides=[f"{key}=['../shared']"]).inline_plugins
    assert load(values={key: [shared]}).inline_plugins
    assert load(environ={"SLOTLINE_PLUGINS__ALLOW_INLINE_FROM": "['../shared']"}).inline_plugins


def test_an_extended_file_cannot_trust_itself(shared: Path) -> None:
    (shared / "base.toml").write_text('[plugins]\ninline = ["./plugin.py:descriptor"]\nallow_inline_from = ["/"]\n')
    Path("run.toml").write_text('extends = "../shared/base.toml"\n')
    assert "names code to run" in faults()[0][1]
    Path("run.toml").write_text('extends = "../shared/base.toml"\n[plugins]\ninline = []\n')
    assert any("allow_inline_from: has no effect" in text for text in load().warnings)


def test_a_file_in_a_folder_below_the_first_ones_may_name_plugins(shared: Path) -> None:
    Path("run.toml").write_text('extends = "conf/base.toml"\n')
    (shared.parent / "own/conf").mkdir()
    Path("conf/base.toml").write_text('plugins = ["../../shared/plugin.py:descriptor"]\n')
    assert load().inline_plugins == ("../shared/plugin.py:descriptor",)


def test_a_first_file_that_is_a_link_names_plugins_and_its_neighbours_do(shared: Path) -> None:
    os.symlink(shared / "base.toml", "run.toml")
    assert load().inline_plugins == ("plugin.py:descriptor",)
    os.symlink("../own", shared / "back")
    Path("near.toml").write_text('plugins = ["../shared/plugin.py:descriptor"]\n')
    Path("next.toml").write_text('extends = "near.toml"\n')
    assert load(f"{shared}/back/next.toml").config.plugins.inline


def test_what_the_first_file_or_set_name_replaces_what_an_extended_file_names(shared: Path) -> None:
    Path("run.toml").write_text('extends = "../shared/base.toml"\nplugins = ["../shared/plugin.py:descriptor"]\n')
    assert load().inline_plugins == ("../shared/plugin.py:descriptor",)
    Path("run.toml").write_text('extends = "../shared/base.toml"\n')
    assert load(overrides=["plugins=['../shared/plugin.py:descriptor']"]).config.plugins.inline
    assert load(environ={"SLOTLINE_PLUGINS__INLINE": "[]"}).config.plugins.inline == ()


def test_explain_names_the_file_of_each_inline_plugin(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('plugins = ["../shared/plugin.py:descriptor"]\n')
    line = "../shared/plugin.py runs for descriptor, named in run.toml:1"
    assert main(["explain", "run.toml", "--width", "400"]) == 0
    assert f"inline code   {line}\n" in capsys.readouterr().out
    assert main(["explain", "run.toml", "--set=device=cpu", "--set=attention.backend=triton"]) == 1
    assert f"inline code: {line}\n" in capsys.readouterr().out
    assert main(["explain", "run.toml", "--json"]) == 0
    assert f'"{line}"' in capsys.readouterr().out
    os.symlink("../shared/plugin.py", "link.py")
    assert load(None, overrides=["plugins=['link.py:descriptor']"]).inline_files == (
        f"link.py ({shared}/plugin.py) runs for descriptor, named in --set plugins=['link.py:descriptor']",
    )
    assert main(["explain"]) == 0
    assert "inline code" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["SLOTLINE_ROOT", "SLOTLINE_HOME", "SLOTLINE_LOG_LEVEL", "SLOTLINE_", "SLOTLINE_APP__NAME", "SLOTLINE_X__"]
)
def test_a_variable_of_another_program_is_a_warning_and_in_strict_mode_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = load(None, environ={name: "/opt"}).warnings
    assert text.startswith(f"{name}: there is no key")
    assert text.endswith("unset it, or rename it if it belongs to another program")
    assert faults(None, environ={name: "/opt", "SLOTLINE_STRICT": "true"})[0][0] == name
    assert faults(None, environ={name: "/opt"}, overrides=["strict=true"])[0][0] == name
    monkeypatch.setenv(name, "/opt")
    for command in (["config", "show"], ["plugins"], ["schema"]):
        assert main(command) == 0
        assert f"warning: {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["SLOTLINE_MODELL", "SLOTLINE_DEVICES", "SLOTLINE_SEED", "SLOTLINE_CACHE__X", "SLOTLINE_SAMPLER__SEED"]
)
def test_a_variable_that_is_nearly_a_key_is_an_error(name: str) -> None:
    assert faults(None, environ={name: "1"})[0][0] == name


def test_a_variable_that_resembles_a_key_from_afar_is_a_warning_with_the_suggestion() -> None:
    (text,) = load(None, environ={"SLOTLINE_VERSION": "3"}).warnings
    assert "did you mean 'revision'?" in text


def test_config_show_runs_nothing(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('plugins = ["../shared/plugin.py:descriptor"]\n')
    assert main(["config", "show", "run.toml"]) == 0
    assert "plugin.py" in capsys.readouterr().out
    assert not ran(shared)
