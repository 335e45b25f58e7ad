"""Configuration: layers, strictness, errors and origins."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen, validators
from repository import ROOT

from slotline.registry import Config, ConfigError, Kind, LoadedConfig, load_config, show
from slotline.registry.config import Fault
from slotline.registry.config.fields import key_paths
from slotline.registry.config.positions import key_lines
from slotline.registry.config.structure import dotted

Load = Callable[..., LoadedConfig]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Writes run.toml (and other files) into an empty current folder and loads it without the environment."""
    monkeypatch.chdir(tmp_path)

    def run(text: str = "", *, files: dict[str, str] | None = None, **arguments: Any) -> LoadedConfig:
        for name, content in {"run.toml": text, **(files or {})}.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(content)
        return load_config("run.toml", **{"environ": {}, **arguments})

    return run


def faults_of(load: Load, *arguments: Any, **keywords: Any) -> list[Fault]:
    with pytest.raises(ConfigError) as raised:
        load(*arguments, **keywords)
    assert all(str(fault) in str(raised.value) for fault in raised.value.faults)
    return list(raised.value.faults)


def test_no_file_at_all_gives_the_defaults() -> None:
    loaded = load_config(environ={})
    assert loaded.config == Config()
    assert {origin.kind for origin in loaded.origins.values()} == {"default"}


def test_each_layer_overrides_the_one_below(load: Load) -> None:
    text = 'extends = "base.toml"\n[scheduler]\nmax_requests = 2\nmax_batched_tokens = 20\n'
    files = {
        "base.toml": "[scheduler]\nmax_requests = 1\nmax_batched_tokens = 9\nmax_model_len = 100\n[sampling]\nseed = 1"
    }
    seed = "sampling.seed"
    assert load(text, files=files).config.scheduler.max_requests == 2
    assert load(text, files=files).config.scheduler.max_model_len == 100
    layers: dict[str, Any] = {"files": files, "environ": {"SLOTLINE_SAMPLING__SEED": "2"}}
    assert load(text, **layers).config.sampling.seed == 2
    layers["overrides"] = [f"{seed}=3"]
    assert load(text, **layers).config.sampling.seed == 3
    layers["values"] = {seed: 4}
    loaded = load(text, **layers)
    assert loaded.config.sampling.seed == 4
    assert loaded.files == ("base.toml", "run.toml")


def test_every_leaf_has_an_origin(load: Load) -> None:
    loaded = load(
        'extends = "base.toml"\ndtype = "float32"\n[drafter.ngram]\nn = 3\n[logits_processors.mine]\n',
        files={"base.toml": "\n[cache]\nblock_size = 16\n"},
        environ={"SLOTLINE_ATTENTION__BACKEND": "cpu"},
        overrides=["graphs.sizes=[1, 2]"],
        values={"scheduler": {"async": False}},
    )
    leaves = {dotted(path) for path in key_paths(Config)} - {dotted(path[:-1]) for path in key_paths(Config)}
    assert leaves <= set(loaded.origins)
    found = {key: (origin.kind, origin.where) for key, origin in loaded.origins.items() if origin.kind != "default"}
    assert found == {
        "dtype": ("file", "run.toml:2"),
        "drafter.ngram.n": ("file", "run.toml:4"),
        "logits_processors": ("file", "run.toml:5"),
        "logits_processors.mine": ("file", "run.toml:5"),
        "cache.block_size": ("file", "base.toml:3"),
        "attention.backend": ("env", "SLOTLINE_ATTENTION__BACKEND"),
        "graphs.sizes": ("set", "--set graphs.sizes=[1, 2]"),
        "scheduler.async": ("argument", "argument scheduler"),
    }
    assert loaded.origins["dtype"].text == 'dtype = "float32"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[cache]\nprefix_caching = "no"', '"no" is not true or false'),
        ("[cache]\nprefix_caching = 1", "1 is not true or false"),
        ("[scheduler]\nmax_requests = 1.9", "1.9 is not a whole number"),
        ("[scheduler]\nmax_requests = true", "true is not a whole number"),
        ('[scheduler]\nmax_requests = "12"', "write 12 without quotes"),
        ('[scheduler]\nasync = "true"', "write true without quotes"),
        ("[cache]\ndtype = 8", "8 is not a text"),
        ('[graphs]\nsizes = "12"', '"12" is not a list of whole numbers'),
        ("[graphs]\nsizes = [1, 2.0]", "[1, 2.0] is not a list of whole numbers"),
        ("[cache]\nblock_size = 16.0", '16.0 is not a whole number or "auto"'),
        ('[cache]\nblock_size = "atuo"', "did you mean 'auto'?"),
        ('dtype = "bf16"', 'is not one of "auto", "float32", "bfloat16", "float16"'),
        ("[attention]\nbackend = [1]", "[1] is not a text or a list of texts or a table of texts"),
        ("[attention]\nbackend = {full = 3}", "{full = 3} is not a text or a list of texts or a table of texts"),
        ("[cache]\nmemory = 1.5", "a number in (0, 1] or a text such as '2GiB'"),
        ("[cache]\nmemory = 0", "a number in (0, 1] or a text such as '2GiB'"),
        ("[cache]\nmemory = 2000000", "a number in (0, 1] or a text such as '2GiB'"),
        ('[cache]\nmemory = "2 gibs"', "is not a size"),
        ('[cache]\nmemory = "0GiB"', "is not a size"),
        ("[scheduler]\nmax_requests = 0", "0 is too small: use a number >= 1"),
        ("[cache]\nblock_size = 0", "0 is too small: use a number >= 1 or 'auto'"),
        ("[sampling]\nseed = -1", "-1 is too small: use a number >= 0"),
        ("config_version = 2", "2 is not a version that this slotline reads: use 1"),
        ('attention = "cpu"', '"cpu" is not a table: write [attention] and keys below it'),
        ("model = 2026-01-01", "2026-01-01 is not a text"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_and_named(load: Load, text: str, message: str) -> None:
    (fault,) = faults_of(load, text)
    assert message in fault.message
    assert fault.origin.where == f"run.toml:{len(text.splitlines())}"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("offload_gib = 2", lambda config: (config.offload_gib, type(config.offload_gib)) == (2.0, float)),
        ('[cache]\nmemory = "512MB"', lambda config: config.cache.memory == "512MB"),
        ("[cache]\nmemory = 1", lambda config: config.cache.memory == 1.0),
        ('[attention]\nbackend = ["a", "b"]', lambda config: config.attention.backend == ("a", "b")),
        ('[attention.backend]\nfull = "a"', lambda config: config.attention.backend == {"full": "a"}),
        ("[scheduler]\nasync = true", lambda config: config.scheduler.async_ is True),
        ('[scheduler]\nasync = "auto"', lambda config: config.scheduler.async_ == "auto"),
        ("graphs.sizes = [1, 8]", lambda config: config.graphs.sizes == (1, 8)),
    ],
)
def test_values_that_fit_are_taken_as_written(load: Load, text: str, read: Callable[[Config], bool]) -> None:
    assert read(load(text).config)


def test_all_errors_come_in_one_report_each_with_its_line(load: Load) -> None:
    text = """\
# a comment with [brackets] and "quotes"
block_size = 16
model = \"\"\"
[cache]
prefix_caching = 3
\"\"\"

[cache]                     # comment
prefix_caching = "no"
memory = 7.5

[scheduler]
max_requests = 0
async = [
    true,
]
"long key" = { a = 1, b = [1, 2] }
[atention]
backend = "cpu"
"""
    found = [(fault.origin.line, fault.key) for fault in faults_of(load, text)]
    assert found == [
        (2, "block_size"),
        (9, "cache.prefix_caching"),
        (10, "cache.memory"),
        (13, "scheduler.max_requests"),
        (14, "scheduler.async"),
        (17, 'scheduler."long key"'),
        (18, "atention"),
    ]


def test_faults_of_different_layers_name_their_layer(load: Load) -> None:
    found = faults_of(
        load,
        'extends = "base.toml"\n[cache]\nblock_size = 0\n',
        files={"base.toml": "config_version = 3\n[graphs]\nmode = 1\n"},
        environ={"SLOTLINE_CACHE__DTYPE": "3", "SLOTLINE_SCHEDULER__MAX_REQUESTS": "many"},
        overrides=["sampling.seed=-1", "nonsense"],
        values={"device": 7},
    )
    assert [fault.origin.where for fault in found] == [
        "base.toml:1",
        "base.toml:3",
        "run.toml:3",
        "SLOTLINE_SCHEDULER__MAX_REQUESTS",
        "--set nonsense",
        "--set sampling.seed=-1",
        "argument device",
    ]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("block_size = 16", "'cache.block_size'"),
        ("[cache]\nblok_size = 16", "'cache.block_size'"),
        ("[sampling]\nmax_requests = 1", "'scheduler.max_requests'"),
        ("max_model_length = 1", "'drafter.max_model_len' or 'scheduler.max_model_len'"),
        ("[schedular]\nasync = true", "'scheduler'"),
        ("[scheduler]\nasync_ = true", "'scheduler.async'"),
        ("[drafter]\ntoken = 1", "'drafter.tokens'"),
        ("mode = 'full'", "'compile.mode' or 'graphs.mode' or 'model'"),
        ("[cache]\nblock = 16", "'cache.block_size' or 'plugins.block'"),
    ],
)
def test_an_unknown_key_suggests_the_one_that_was_meant(load: Load, text: str, meant: str) -> None:
    (fault,) = faults_of(load, text)
    assert f"did you mean {meant}?" in fault.message


def test_an_unknown_key_like_no_other_lists_the_keys_of_its_table(load: Load) -> None:
    (fault,) = faults_of(load, "[lora]\nxyzzy = 1\n")
    assert fault.message == (
        "there is no key 'xyzzy' in [lora]; it has name, max_adapters, max_rank, max_cpu_adapters, target_modules, "
        "merge, specialize_graphs, adapters"
    )


def test_a_missing_file_and_broken_toml_say_where(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        load_config("absent.toml", environ={})
    (fault,) = faults_of(load, "a = 1\nb = [1, 2\n\nc = = 3\n")
    assert fault.origin.where == "run.toml:4"
    assert "not valid TOML" in fault.message


def test_a_file_that_is_not_utf8_is_an_error_and_a_byte_order_mark_is_none(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'model = "\xff"')
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path, environ={})
    path.write_bytes(b"\xef\xbb\xbfstrict = true\r\n")
    assert load_config(path, environ={}).config.strict


def test_extends_merges_tables_and_replaces_arrays(load: Load) -> None:
    loaded = load(
        'extends = ["conf/a.toml", "conf/b.toml"]\n[attention.backend]\nfull = "run"\n[graphs]\nsizes = [3]\n',
        files={
            "conf/a.toml": '[attention.backend]\nfull = "a"\nsliding = "a"\n[graphs]\nsizes = [1, 2]\nmode = "none"\n',
            "conf/b.toml": 'extends = "../root.toml"\n[attention.backend]\nsliding = "b"\n',
            "root.toml": '[attention.backend]\nsliding = "root"\ncross = "root"\n',
        },
    )
    assert loaded.config.attention.backend == {"full": "run", "sliding": "b", "cross": "root"}
    assert loaded.config.graphs.sizes == (3,)
    assert loaded.config.graphs.mode == "none"
    assert loaded.files == ("conf/a.toml", "root.toml", "conf/b.toml", "run.toml")
    assert loaded.origins["attention.backend.cross"].where == "root.toml:3"


def test_a_name_replaces_a_table_and_a_table_replaces_a_name(load: Load) -> None:
    table, name = '[attention.backend]\nfull = "a"\n', '[attention]\nbackend = "b"\n'
    assert load('extends = "base.toml"\n' + name, files={"base.toml": table}).config.attention.backend == "b"
    both = load('extends = "base.toml"\n' + table, files={"base.toml": name})
    assert both.config.attention.backend == {"full": "a"}


def test_one_base_may_be_reached_twice_but_a_circle_is_an_error(load: Load) -> None:
    base = {"c.toml": "strict = true\n", "a.toml": 'extends = "c.toml"\n', "b.toml": 'extends = "c.toml"\n'}
    assert load('extends = ["a.toml", "b.toml"]\n', files=base).config.strict
    (fault,) = faults_of(load, 'extends = "a.toml"\n', files={"a.toml": 'strict = true\nextends = "run.toml"\n'})
    assert "run.toml -> a.toml -> run.toml" in fault.message
    assert fault.origin.where == "a.toml:2"


@pytest.mark.parametrize(
    ("value", "message"),
    [('"absent.toml"', "there is no file absent.toml"), ("3", "must be a path or a list of paths")],
)
def test_extends_of_something_else_is_an_error(load: Load, value: str, message: str) -> None:
    (fault,) = faults_of(load, f"extends = {value}\n")
    assert message in fault.message
    assert fault.origin.where == "run.toml:1"


@pytest.mark.parametrize(
    ("name", "value", "key", "expected"),
    [
        ("SLOTLINE_MODEL", "some/folder", "model", "some/folder"),
        ("SLOTLINE_MODEL", "123", "model", "123"),
        ("SLOTLINE_MODEL", '"quoted"', "model", "quoted"),
        ("SLOTLINE_STRICT", "true", "strict", True),
        ("SLOTLINE_CACHE__BLOCK_SIZE", "32", "cache.block_size", 32),
        ("SLOTLINE_CACHE__MEMORY", "2GiB", "cache.memory", "2GiB"),
        ("SLOTLINE_GRAPHS__SIZES", "[1, 2]", "graphs.sizes", (1, 2)),
        ("SLOTLINE_SCHEDULER__ASYNC", "false", "scheduler.async_", False),
        ("SLOTLINE_ATTENTION__BACKEND__FULL", "cpu", "attention.backend", {"full": "cpu"}),
        ("SLOTLINE_BACKEND__CPU__THREADS", "2", "backend", {"cpu": {"threads": 2}}),
        ("SLOTLINE_DRAFTER__NGRAM__N", "2", "drafter.options", {"ngram": {"n": 2}}),
        ("SLOTLINE_PLUGINS", "my_attn, other", "plugins.allow", ("my_attn", "other")),
        ("SLOTLINE_PLUGINS__BLOCK", '["x"]', "plugins.block", ("x",)),
    ],
)
def test_environment_variables_set_keys(name: str, value: str, key: str, expected: object) -> None:
    found: Any = load_config(environ={name: value, "PATH": "x", "OTHER_SLOTLINE_X": "y"}).config
    for part in key.split("."):
        found = getattr(found, part)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SLOTLINE_BLOCK_SIZE", "cache.block_size"),
        ("SLOTLINE_CACHE__BLOCKSIZE", "cache.block_size"),
        ("SLOTLINE_CACH__BLOCK_SIZE", "cache.block_size"),
        ("SLOTLINE_MODELL", "model"),
        ("SLOTLINE_DTYPE__X", ""),
        ("SLOTLINE_CACHE__", ""),
    ],
)
def test_an_environment_variable_that_is_no_key_is_an_error(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(environ={name: "1"})
    assert name in str(raised.value)
    assert meant in str(raised.value)


def test_the_process_environment_counts_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_SAMPLING__SEED", "7")
    assert load_config().config.sampling.seed == 7
    assert load_config(environ={}).config.sampling.seed == 0


def test_set_takes_toml_or_a_text_without_quotes() -> None:
    overrides = [
        "cache.memory=2GiB",
        "graphs . sizes = [4]",
        "model=",
        'backend."my-attn".mode = fast',
        "attention.backend=cpu",
        'device="cpu"',
    ]
    config = load_config(environ={}, overrides=overrides).config
    assert (config.cache.memory, config.graphs.sizes, config.model, config.device) == ("2GiB", (4,), "", "cpu")
    assert config.attention.backend == "cpu"
    assert config.backend == {"my-attn": {"mode": "fast"}}


@pytest.mark.parametrize(
    "override", ["cache.block_size", "=3", "a b=3", "cache.=3", "cache.bloc_size=3", "extends='x.toml'"]
)
def test_a_set_that_names_no_key_is_an_error(override: str) -> None:
    with pytest.raises(ConfigError, match=r"--set"):
        load_config(environ={}, overrides=[override])


def test_a_set_cannot_smuggle_in_other_keys() -> None:
    config = load_config(environ={}, overrides=["model=1\nstrict = true"]).config
    assert config.model == "1\nstrict = true"
    assert not config.strict
    with pytest.raises(ConfigError, match="is not a whole number"):
        load_config(environ={}, overrides=["sampling.seed=1\nstrict = true"])


def test_arguments_may_be_nested_or_dotted_and_hold_paths(tmp_path: Path) -> None:
    values = {"model": tmp_path, "cache": {"block_size": 8}, "graphs.sizes": (1, 2), "attention.backend": ["a"]}
    config = load_config(environ={}, values=values).config
    assert config.model == str(tmp_path)
    assert (config.cache.block_size, config.graphs.sizes, config.attention.backend) == (8, (1, 2), ("a",))


def test_relative_paths_count_from_the_file_that_names_them(load: Load) -> None:
    files = {"conf/base.toml": 'model = "../weights"\nplugins = ["./mine.py:Mine", "/abs/x.py:X"]\n'}
    loaded = load('extends = "conf/base.toml"\n', files=files)
    assert loaded.config.model == "../weights", "what was asked for stays as it is"
    assert loaded.path("model") == Path("weights")
    assert loaded.path("tokenizer") is None
    assert loaded.inline_plugins == ("conf/mine.py:Mine", "/abs/x.py:X")
    again = load('extends = "conf/base.toml"\n', files=files, overrides=["model=here"])
    assert again.path("model") == Path("here")


def test_plugins_is_a_list_or_a_table_and_both_merge(load: Load) -> None:
    loaded = load(
        'extends = "base.toml"\nplugins = ["./a.py:A"]\n', files={"base.toml": '[plugins]\nblock = ["x"]\nallow = []\n'}
    )
    assert loaded.plugin_rules.block == ("x",)
    assert loaded.plugin_rules.allow == ()
    assert loaded.plugin_rules.inline == ("./a.py:A",)
    assert loaded.origins["plugins.inline"].where == "run.toml:2"


@frozen(kw_only=True)
class AttnOptions:
    """Options of a plugin that is not ours."""

    splits: int = field(default=4, validator=validators.and_(validators.ge(1), validators.le(64)))
    mode: str = field(validator=validators.in_(("fast", "exact")))
    threshold: float | None = None


def test_a_plugins_own_table_is_typed_by_the_plugin(load: Load) -> None:
    loaded = load('[backend.my-attn]\nsplits = 8\nmode = "fast"\n')
    assert loaded.options(Kind.ATTENTION, "my-attn", AttnOptions) == AttnOptions(splits=8, mode="fast")
    assert loaded.options(Kind.STATE, "my-attn", AttnOptions).splits == 8


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (Kind.ATTENTION, "backend"),
        (Kind.STATE, "backend"),
        (Kind.KV_SPEC, "kv_spec"),
        (Kind.DRAFTER, "drafter"),
        (Kind.LOGITS_PROCESSOR, "logits_processors"),
        (Kind.LORA, "lora"),
        (Kind.KV_CONNECTOR, "kv_connector"),
        (Kind.MODEL_FAMILY, "model_family"),
        (Kind.DEVICE, "devices"),
        (Kind.EXTENSION, "extensions"),
    ],
)
def test_each_kind_has_a_table_for_its_plugins(load: Load, kind: Kind, table: str) -> None:
    loaded = load(f'[{table}.mine]\nmode = "exact"\n')
    assert loaded.options(kind, "mine", AttnOptions).mode == "exact"
    assert loaded.origins[f"{table}.mine.mode"].where == "run.toml:2"


def test_a_plugins_table_reports_all_its_faults_with_lines(load: Load) -> None:
    loaded = load('[backend.my-attn]\nsplit = 8\nsplits = 99\nmode = "slow"\nthreshold = "0.5"\n')
    with pytest.raises(ConfigError) as raised:
        loaded.options(Kind.ATTENTION, "my-attn", AttnOptions)
    lines = [(fault.origin.line, fault.key) for fault in raised.value.faults]
    assert lines == [(n, f"backend.my-attn.{key}") for n, key in enumerate(("split", "splits", "mode", "threshold"), 2)]
    assert "did you mean 'backend.my-attn.splits'?" in raised.value.faults[0].message


def test_a_required_option_without_a_table_is_an_error_that_names_it(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"backend\.other\.mode: is missing and has no default"):
        load("").options(Kind.ATTENTION, "other", AttnOptions)


@frozen(kw_only=True)
class Ordered:
    low: int = field(default=1, validator=validators.ge(0))
    high: int = field(default=2)

    @high.validator
    def _above(self, _attribute: object, value: int) -> None:
        if value < self.low:
            raise ValueError(f"high = {value} is below low = {self.low}")


def test_a_validator_that_compares_keys_runs_once_all_of_them_are_right(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml:1: backend\.x: high = 1 is below low = 5"):
        load("[backend.x]\nlow = 5\nhigh = 1\n").options(Kind.ATTENTION, "x", Ordered)
    with pytest.raises(ConfigError) as raised:
        load('[backend.x]\nlow = -5\nhigh = "1"\n').options(Kind.ATTENTION, "x", Ordered)
    assert [fault.key for fault in raised.value.faults] == ["backend.x.low", "backend.x.high"]


def test_a_loaded_configuration_travels_to_other_processes(load: Load) -> None:
    loaded = load("[cache]\nblock_size = 16\n[backend.x]\na = 1\n")
    copy = pickle.loads(pickle.dumps(loaded))
    assert copy.config == loaded.config
    assert copy.origins == loaded.origins


def test_the_page_shows_the_errors_that_really_come(load: Load) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    text = page.partition("this file,\n\n```toml\n")[2].partition("```")[0]
    shown = page.partition("```text\n")[2].partition("```")[0]
    with pytest.raises(ConfigError) as raised:
        load(text, environ={"SLOTLINE_CACHE__BLOCKSIZE": "32"}, overrides=["graphs.mode=ful"])
    assert shown == f"ConfigError: {raised.value}\n"


def test_options_for_a_plugin_that_takes_none_are_an_error(load: Load) -> None:
    loaded = load("[backend.plain]\n[backend.cpu]\nthreads = 2\n")
    assert loaded.options(Kind.ATTENTION, "plain", None) is None
    assert loaded.options(Kind.ATTENTION, "absent", None) is None
    with pytest.raises(
        ConfigError, match=r"run.toml:3: backend.cpu.threads: the attention plugin 'cpu' takes no options"
    ):
        loaded.options(Kind.ATTENTION, "cpu", None)


def test_a_table_of_an_absent_plugin_warns_and_in_strict_mode_fails(load: Load) -> None:
    installed = {Kind.ATTENTION: ("cpu",), Kind.DRAFTER: ("ngram",), Kind.STATE: ("mamba",)}
    loaded = load("[backend.cpuu]\nx = 1\n[backend.mamba]\n[drafter.ngram]\n").check_plugin_tables(installed)
    assert loaded.warnings == (
        "run.toml:1: backend.cpuu: no attention or state plugin 'cpuu' is installed; did you mean 'cpu'?",
    )
    with pytest.raises(ConfigError, match="no attention or state plugin 'cpuu'"):
        load("strict = true\n[backend.cpuu]\n").check_plugin_tables(installed)


def test_a_table_that_asks_for_an_absent_processor_is_always_an_error(load: Load) -> None:
    loaded = load("[logits_processors.absent]\n")
    with pytest.raises(ConfigError, match=r"run.toml:1: logits_processors.absent: no logits_processor plugin 'absent'"):
        loaded.check_plugin_tables({})


def test_the_shown_configuration_loads_to_the_same_one(load: Load) -> None:
    text = """\
model = "a \\"quoted\\" name\\t\\u007f é"
plugins = ["./a.py:A"]
[attention.backend]
full = "a"
"odd key" = "b"
[scheduler]
async = true
[backend.x]
deep = { a = [1, 2.5, "x"], b = { c = true } }
[logits_processors.mine]
[drafter]
name = "ngram"
[drafter.ngram]
n = 3
"""
    first = load(text)
    second = load(show(first, origins=True))
    assert second.config == first.config
    assert load(show(first)).config == first.config


def test_origins_are_shown_beside_each_value(load: Load) -> None:
    text = show(load("[cache]\nblock_size = 16\n"), origins=True)
    assert any(line.split() == ["block_size", "=", "16", "#", "run.toml:2"] for line in text.splitlines())
    assert any(line.split() == ["seed", "=", "0", "#", "default"] for line in text.splitlines())
    assert "#" not in show(load(""))


def test_a_table_that_is_opened_after_its_sub_table_has_the_line_of_its_own_header() -> None:
    assert key_lines("[a.b]\nx = 1\n[a]\ny = 2\n")[("a",)] == 3


def test_the_scanner_finds_every_key_of_an_awkward_file() -> None:
    text = (
        'a.b.c = 1\n"x.y" = \'#\'\n[t]\ns = """\nz = 1\n""" # [no]\nq = \'\'\'\n\'\'\'\narr = [ # x\n  "]", {k = 1},\n]'
        "\n"
        'i = {p = 1, "q r".s = {u = 2}}\n[[many]]\nv = 1\n[t.sub]\nw = 2026-01-01T00:00:00Z\n'
    )
    lines = {dotted(path): line for path, line in key_lines(text).items()}
    expected = {"a.b.c": 1, '"x.y"': 2, "t": 3, "t.s": 4, "t.q": 7, "t.arr": 9, "t.i": 12, 't.i."q r".s.u': 12}
    expected |= {"many": 13, "many.v": 14, "t.sub": 15, "t.sub.w": 16}
    assert expected.items() <= lines.items()
