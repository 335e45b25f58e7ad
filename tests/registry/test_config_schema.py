"""The JSON Schema and the reference page say what the loader does."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jsonschema  # type: ignore[import-untyped]
import pytest
from attrs import field, frozen, validators
from repository import ROOT

from slotline.registry import Config, ConfigError, Kind, json_schema, load_config
from slotline.registry.config import reference
from slotline.registry.config.fields import key_paths, table_fields

PAGE = ROOT / "docs" / "configuration.md"


@frozen(kw_only=True)
class Nested:
    depth: int = 1


@frozen(kw_only=True)
class Options:
    """A plugin's options."""

    splits: int = field(default=1, validator=[validators.ge(1), validators.lt(9)], metadata={"doc": "parts"})
    mode: Literal["fast", "exact"] = "fast"
    nested: Nested = field(factory=Nested)
    names: tuple[str, ...] = ()
    extra: Mapping[str, int] = field(factory=dict)
    required: str


SCHEMA = json_schema({(Kind.ATTENTION, "mine"): Options, (Kind.DRAFTER, "ngram"): Nested})


def accepts(text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(tomllib.loads(text)))


def loads(text: str, path: Path) -> bool:
    path.write_text(text)
    try:
        load_config(path, environ={}).options(Kind.DRAFTER, "ngram", Nested)
    except ConfigError:
        return False
    return True


def test_the_schema_is_a_valid_schema_and_json() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


GOOD = [
    "",
    'config_version = 1\nmodel = "m"\ndtype = "bfloat16"\nstrict = true\n',
    "[cache]\nblock_size = 16\nmemory = 0.5\n",
    '[cache]\nblock_size = "auto"\nmemory = "2GiB"\n',
    '[attention]\nbackend = ["a", "b"]\n',
    '[attention.backend]\nfull = "a"\n',
    "[scheduler]\nasync = true\n",
    "[parallel]\npipeline = 2\n",
    '[parallel]\npipeline = ["cuda:0", "cuda:1"]\nlayers = [3, 1]\n',
    'plugins = ["./a.py:A"]\n',
    '[plugins]\nallow = ["a"]\nrequire = ["x>=1"]\n',
    "[drafter.ngram]\ndepth = 2\n",
    "[drafter.other]\nanything = 2\n",
    "[logits_processors.mine]\n",
]
BAD = [
    "blok_size = 16\n",
    "config_version = 2\n",
    'dtype = "bf16"\n',
    'strict = "no"\n',
    "[cache]\nblock_size = 0\n",
    "[cache]\nblock_size = 16.5\n",
    "[cache]\nmemory = 1.5\n",
    "[cache]\nmemory = 0\n",
    '[cache]\nmemory = "much"\n',
    "[cache]\nblok_size = 1\n",
    "[scheduler]\nmax_requests = 0\n",
    "[scheduler]\nasync_ = true\n",
    "[graphs]\nsizes = [1, 2.5]\n",
    "[parallel]\npipeline = 0\n",
    "[parallel]\npipeline = []\n",
    "[parallel]\nlayers = [1.5]\n",
    "[drafter]\ntokns = 3\n",
    '[drafter.ngram]\ndepth = "2"\n',
    "[drafter.ngram]\ndeph = 2\n",
    "plugins = [1]\n",
]


@pytest.mark.parametrize("text", GOOD)
def test_schema_and_loader_accept_the_same_documents(text: str, tmp_path: Path) -> None:
    assert accepts(text)
    assert loads(text, tmp_path / "run.toml")


@pytest.mark.parametrize("text", BAD)
def test_schema_and_loader_refuse_the_same_documents(text: str, tmp_path: Path) -> None:
    assert not accepts(text)
    assert not loads(text, tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("table", "valid"),
    [
        ('required = "x"\nsplits = 8\nmode = "exact"\nnames = ["a"]\nnested = {depth = 2}\nextra = {a = 1}', True),
        ("splits = 8", False),
        ('required = "x"\nsplits = 9', False),
        ('required = "x"\nsplits = 0', False),
        ('required = "x"\nmode = "slow"', False),
        ('required = "x"\nnested = {deep = 1}', False),
        ('required = "x"\nextra = {a = "b"}', False),
        ('required = "x"\nunknown = 1', False),
    ],
)
def test_a_plugins_table_is_in_the_schema(table: str, valid: bool) -> None:
    assert accepts(f"[backend.mine]\n{table}\n") is valid


def test_every_key_has_a_description() -> None:
    for path in key_paths(Config):
        cls: Any = Config
        node: dict[str, Any] = SCHEMA
        for key in path:
            item, node = table_fields(cls)[key], (node.get("properties") or node["anyOf"][0]["properties"])[key]
            cls = item.type
        assert node.get("description") or node["anyOf"][0].get("description"), path


def test_the_page_holds_exactly_the_generated_reference() -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- reference: begin -->\n", "<!-- reference: end -->"
    block = text.partition(begin)[2].partition(end)[0]
    assert block == reference(), (
        "regenerate: python -c 'from slotline.registry.config import reference; print(reference())'"
    )


def test_the_reference_names_every_key() -> None:
    text = reference()
    for path in key_paths(Config):
        assert f"`{path[-1]}`" in text or f"`[{'.'.join(path)}]`" in text, path
