"""Settings of a sentence-transformers folder: modules.json, the modules' own config.json, and the prompts."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from attrs import evolve, field, frozen

from slotline.registry.contracts import PooledTexts, PoolingMethod, Similarity
from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json
from slotline.registry.safe_repr import safe_repr

MODULES_FILE = "modules.json"
TEXTS_FILE = "config_sentence_transformers.json"
_MODES: dict[str, PoolingMethod] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
"""Both spellings of sentence-transformers: a flag for each mode, and one key `pooling_mode`."""
_TOKEN_STATES = "token_embeddings"


@frozen(kw_only=True)
class Recipe:
    """Method for computing embeddings from a checkpoint's hidden states.

    Attributes:
        method: hidden states to use.
        normalize: True to divide the embedding by its length.
        origin: origin of the settings, in words.
        dense: folders of the linear layers after the pooling, in order.
        each_token: True if the embedding of a text is a vector for each of its tokens.
        texts: prompts and similarity, from config_sentence_transformers.json.
        dimensions: length of an embedding if none is asked for. None for the whole.
    """

    method: PoolingMethod
    normalize: bool
    origin: str
    dense: tuple[Path, ...] = ()
    each_token: bool = False
    texts: PooledTexts = field(factory=PooledTexts)
    dimensions: int | None = None


def present(path: Path) -> bool:
    """Return True if the folder is a sentence-transformers folder, so that the model was trained for embeddings."""
    return (path / MODULES_FILE).is_file()


def scores_tokens(path: Path) -> bool:
    """Return True if the folder is of a decoder whose logits of chosen tokens are the score of a pair.

    A broken folder is told of by `read`.
    """
    try:
        return present(path) and "LogitScore" in _names(_modules(path))
    except ModelError:
        return False


def score_tokens(path: Path) -> tuple[int, ...]:
    """Return the token whose logit is the score of a pair, and the one whose logit is subtracted, if there is one.

    Raises:
        ModelError: if the module's configuration names none.
    """
    modules = _modules(path)
    names = _names(modules)
    file = path / _folder(modules[names.index("LogitScore")], names) / "config.json"
    found = _settings(file)
    tokens = tuple(found[key] for key in ("true_token_id", "false_token_id") if found.get(key) is not None)
    if found.get("true_token_id") is None or not all(isinstance(token, int) for token in tokens):
        raise ModelError(f"{file} names no true_token_id", fix="download the file again")
    return tokens


def texts_of(path: Path) -> PooledTexts:
    """Return the prompts of a folder of a model that reads pairs of texts.

    Raises:
        ModelError: if they cannot be read.
    """
    return _prompts(path / TEXTS_FILE, _settings(path / TEXTS_FILE))


def activation_of(path: Path, config: Any) -> str | None:
    """Return the full name of the activation that a cross-encoder's folder asks for, None if it does not."""
    own = getattr(config, "sentence_transformers", None) or {}
    older = getattr(config, "sbert_ce_default_activation_function", None)
    named = own.get("activation_fn") or older or _settings(path / TEXTS_FILE).get("activation_fn")
    return None if named is None else str(named)


def read(path: Path, hidden_size: int, method: PoolingMethod | None = None) -> Recipe:
    """Return the recipe of a folder. A given `method` replaces the folder's.

    Raises:
        ModelError: if a file is broken, or requires an unsupported feature.
    """
    modules = _modules(path)
    names = _names(modules)
    late = _reads_tokens(path, modules)
    allowed = names[:1] == ["Transformer"] and names[1 : 2 - late] == ["Pooling"][late:]
    after = [name for name in names[2 - late :] if not late or name != "MultiVectorMask"]
    if not allowed or not {*after} <= {"Dense", "Normalize"} or after != sorted(after):
        raise ModelError(
            f"{path / MODULES_FILE} lists the modules {', '.join(names) or '(none)'}; served is one Pooling, and "
            "beside it Transformer, Dense and Normalize alone, in this order",
            fix='use a checkpoint without the others, or set task = "generate"',
        )
    dense = tuple(path / _folder(m, names) for m, name in zip(modules, names, strict=True) if name == "Dense")
    texts, dimensions = _texts(path, modules, late=late)
    recipe = Recipe(
        method=method or "last",
        normalize="Normalize" in names or (late and _of_pylate(modules)),
        origin=MODULES_FILE if late else "the option `pooling`",
        dense=dense,
        each_token=late,
        texts=texts,
        dimensions=dimensions,
    )
    if late or method is not None:
        return recipe
    folder = str(modules[1].get("path", "1_Pooling"))
    found = _method(path / folder / "config.json", hidden_size)
    return evolve(recipe, method=found, origin=f"{MODULES_FILE} and {folder}/config.json")


def _modules(path: Path) -> list[dict[str, Any]]:
    modules = _read(path / MODULES_FILE)
    if not isinstance(modules, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules
    ):
        raise ModelError(f"{path / MODULES_FILE} is no list of modules", fix="download the file again")
    return modules


def _names(modules: Sequence[Mapping[str, Any]]) -> list[str]:
    return [module["type"].rpartition(".")[2] for module in modules]


def _folder(module: Mapping[str, Any], names: Sequence[str]) -> str:
    return str(module.get("path") or f"{module.get('idx', len(names))}_{_names([module])[0]}")


def _of_pylate(modules: Sequence[Mapping[str, Any]]) -> bool:
    return any(module["type"].startswith("pylate.") for module in modules)


def _reads_tokens(path: Path, modules: Sequence[Mapping[str, Any]]) -> bool:
    """Return True for a late-interaction model: no pooling, and a module over the tokens' states."""
    names = _names(modules)
    if "Pooling" in names:
        return False
    if "MultiVectorMask" in names or _of_pylate(modules):
        return True
    own = [_settings(path / _folder(module, names) / "config.json") for module in modules[1:]]
    return any(one.get("module_input_name") == _TOKEN_STATES for one in own)


def _settings(file: Path) -> Mapping[str, Any]:
    """Return a module's configuration, empty if it has none."""
    found = _read(file) if file.is_file() else {}
    if not isinstance(found, dict):
        raise ModelError(f"{file} is no JSON object", fix="download the file again")
    return found


def _skipped_words(path: Path, modules: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words that late interaction leaves out of documents. `found` are the settings of the texts.

    Raises:
        ModelError: if the folder asks for masks or longer queries, which are not served.
    """
    names = _names(modules)
    if _of_pylate(modules):
        file, own = path / TEXTS_FILE, {**found, "query_expansion": found.get("do_query_expansion", True)}
        own.setdefault("skiplist_words", list(string.punctuation))
    else:
        file = path / _folder(modules[names.index("MultiVectorMask")], names) / "config.json"
        own = {**_settings(path / "sentence_bert_config.json"), **_settings(file)}
    if own.get("keep_only_token_ids") or own.get("skiplist_tasks", ["document"]) != ["document"]:
        raise ModelError(
            f"{file} sets keep_only_token_ids or skiplist_tasks; served is a skiplist of documents alone",
            fix="use a checkpoint without it",
        )
    if own.get("query_expansion"):
        raise ModelError(
            f"{path} expands queries by masked tokens (query_expansion or do_query_expansion), which is not served",
            fix="set it to null or false, if scores without it will do",
        )
    return tuple(own.get("skiplist_words") or ())


def _prompts(file: Path, found: Mapping[str, Any]) -> PooledTexts:
    """Return the prompts of `file`, whose object is `found`.

    Raises:
        ModelError: if they are no texts, or if the default one is not among them.
    """
    given = found.get("prompts") or {}
    prompts = {name: text or "" for name, text in given.items()} if isinstance(given, dict) else {"": given}
    for side in ("query", "document"):  # as PyLate saves them
        if prefix := found.get(f"{side}_prefix"):
            prompts[side] = prefix + prompts.get(side, "").removeprefix(prefix)
    default = found.get("default_prompt_name")
    if not all(isinstance(text, str) for text in prompts.values()) or (default is not None and default not in prompts):
        raise ModelError(
            f"{file}: default_prompt_name = {safe_repr(default)} is no name of a prompt, or a prompt is no text",
            fix="correct it, or download the file again",
        )
    return PooledTexts(prompts=prompts, default_prompt=default)


def _texts(path: Path, modules: Sequence[Mapping[str, Any]], *, late: bool) -> tuple[PooledTexts, int | None]:
    """Return the prompts and the similarity of a folder, and the default length of an embedding.

    Raises:
        ModelError: if they cannot be read.
    """
    file = path / TEXTS_FILE
    found = _settings(file)
    texts = _prompts(file, found)
    similarity: Any = found.get("similarity_fn_name") or "cosine"
    if not late and similarity not in get_args(Similarity):
        raise ModelError(
            f"{file}: similarity_fn_name = {safe_repr(similarity)}", fix=f"use one of {', '.join(get_args(Similarity))}"
        )
    texts = PooledTexts(
        prompts=texts.prompts,
        default_prompt=texts.default_prompt,
        similarity="cosine" if late else similarity,
        skipped_words=_skipped_words(path, modules, found) if late else (),
    )
    return texts, found.get("truncate_dim")


def _method(file: Path, hidden_size: int) -> PoolingMethod:
    """Return the single pooling mode of the module's configuration, in the older or the newer of its two forms."""
    config = _read(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file} is no JSON object", fix="download the file again")
    size = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if size != hidden_size:
        raise ModelError(
            f"{file} pools states of size {size!r} and the model's have {hidden_size}",
            fix="download the checkpoint again",
        )
    if config.get("include_prompt", True) is not True:
        raise ModelError(
            f"{file} sets include_prompt = false: instruction tokens left out of the pooling are not served",
            fix="use a checkpoint without it",
        )
    named = config.get("pooling_mode")
    modes = [named] if named is not None else [k for k, v in config.items() if k.startswith("pooling_mode_") and v]
    method = _MODES.get(str(modes[0])) if len(modes) == 1 else None
    if method is None:
        raise ModelError(
            f"{file} sets the pooling {', '.join(map(str, modes)) or '(none)'}; served is one of "
            f"{', '.join(get_args(PoolingMethod))}",
            fix='name another one under [model_family.transformers_decoder], such as pooling = "mean", if it will do',
        )
    return method


def _read(file: Path) -> Any:
    try:
        return read_json(file)
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}", fix="download the file again") from error
