"""Reads what a Hugging Face folder says about itself: its files, configuration, end tokens and longest sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from attrs import frozen
from transformers import CONFIG_MAPPING

from slotline.plugins.model_families import composite, reward_models, rope_fields, sentence_transformers, tried
from slotline.plugins.model_families.decoder import (
    CLASSIFIERS,
    EMBEDDERS,
    GENERATING,
    OWN_ATTENTION,
    REWARDERS,
    SERVED,
    TAGGERS,
    VETTED,
)
from slotline.plugins.model_families.seq2seq import ARCHITECTURES as SEQ2SEQ
from slotline.plugins.model_families.speech import ARCHITECTURES as SPEECH
from slotline.plugins.model_families.vision import INSIDE
from slotline.registry.architectures import family_hint
from slotline.registry.contracts.model_family import SAVED_WEIGHTS
from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_object

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
LENGTHS = (
    "max_position_embeddings",
    "max_seq_len",
    "seq_length",
    "n_positions",
    "max_sequence_length",
    "max_target_positions",
)
"""Where configurations state the longest sequence; MPT's and BLOOM's, which have ALiBi, what they were trained with."""

LENGTH_WITHOUT_POSITIONS = 2**20
"""Tokens; what is reported for models that have no positions and so no longest sequence."""


@frozen(kw_only=True)
class Checkpoint:
    """Folder with a supported architecture.

    Attributes:
        path: the folder.
        architecture: the class's name in transformers.
        model_class: the transformers class.
        config: its configuration. Do not change it, but call `read` for another.
        generation: generation_config.json, empty if there is none.
        by_inspection: True if the architecture is not listed, but tried.
        whole: class and configuration of the whole model, of which this is the text part. None for a decoder's own.
    """

    path: Path
    architecture: str
    model_class: Any
    config: Any
    generation: Mapping[str, Any]
    by_inspection: bool = False
    whole: tuple[Any, Any] | None = None

    @property
    def is_vetted(self) -> bool:
        """True if the tests compare this architecture with transformers, so that no check at load is needed."""
        return self.model_class.__name__ in VETTED

    @property
    def stored_class(self) -> Any:
        """The class whose weights the files hold."""
        return self.model_class if self.whole is None else self.whole[0]

    @property
    def stored_config(self) -> Any:
        """The configuration of `stored_class`."""
        return self.config if self.whole is None else self.whole[1]

    @property
    def notes(self) -> tuple[str, ...]:
        """How it is known that an unlisted architecture runs right, and what of it is left out."""
        name = self.model_class.__name__
        known = f"{name} is vetted: the tests compare it with transformers"
        checked = f"{name} was found by inspection: it is checked against transformers when it is loaded"
        parts = f"only the text part of {self.architecture} is served, as {name}: its encoders are left out"
        if not self.by_inspection:
            return ()
        encoders = self.whole is not None or self.architecture in INSIDE
        return (known if self.is_vetted else checked, *((parts,) if encoders else ()))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: generation_config.json's, else config.json's. Negative ids mean none."""
        found = self.generation.get("eos_token_id")
        if found is None:
            found = getattr(self.config, "eos_token_id", None)
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
            raise ModelError(
                f"{self.path / 'generation_config.json'}: eos_token_id = {found!r} is no token id, and no list of them",
                fix="correct it, or download the file again",
            )
        return tuple(token for token in ids if token >= 0)

    @property
    def dtype(self) -> str:
        """The dtype's name: the configuration's, else that of the first stored weight, else float32."""
        declared = getattr(self.config, "dtype", None)
        if declared is not None:
            return str(declared).removeprefix("torch.")
        return _stored_dtype(self.path)

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the positions allow, rope scaling included."""
        return _scaled_length(self.path, self.config)

    def attention(self, name: str) -> str:
        """Return the attention implementation to set in the configuration, so that layers call the function `name`."""
        return "eager" if self.architecture in OWN_ATTENTION else name

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that it supports, the one that it was trained for first."""
        if self.architecture in (*CLASSIFIERS, *REWARDERS):
            return ("classify",)
        if self.architecture in TAGGERS:
            return ("token_classify",)
        if self.architecture in EMBEDDERS:
            return ("embed",)
        if self.architecture not in GENERATING:
            return ("generate",)
        if not sentence_transformers.present(self.path):
            return ("generate", "embed")
        if sentence_transformers.scores_tokens(self.path):
            return ("classify", "generate")
        return ("embed", "generate")


def read(path: Path, served: Sequence[str] = SERVED, *, quantized: bool = False) -> Checkpoint:
    """Read a folder's configuration files.

    Args:
        served: architectures that the caller can load.
        quantized: True if a weight format serves the quantization configuration, which is left out then.

    Raises:
        ModelError: if the folder, its config.json or its weights are missing, or if its model is not served.
    """
    raw = _read_config_json(path)
    architecture = _served_architecture(path, raw, served)
    tried.refuse(path, architecture)
    model_class = getattr(transformers, architecture, None) or reward_models.CLASSES.get(architecture)
    if model_class is None:
        raise ModelError(
            f"transformers {transformers.__version__} has no class {architecture!r} for {path}",
            fix="install a newer transformers",
        )
    rope_fields.refuse_wrong_fields(path, raw)
    try:
        config = config_class_of(model_class, raw).from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and its dataclass validators raise many kinds
        raise ModelError(
            f"{path / 'config.json'} is no valid configuration of {architecture}: {error}",
            fix="download config.json again",
        ) from error
    whole = None
    if served is SERVED and composite.is_composite(config, model_class):
        whole = model_class, config
        model_class, config = composite.text_class(path, architecture, config)
    elif served is SERVED and architecture in INSIDE:
        model_class = composite.without_inner(model_class)
    if quantized and hasattr(config, "quantization_config"):
        del config.quantization_config
    _refuse_unserved_features(path, config)
    if served is SERVED and getattr(config, "is_causal", True) is False:
        raise ModelError(
            f"{path} sets is_causal = false, so it is no causal decoder", fix="use a checkpoint without it"
        )
    rope_fields.refuse_wrong(path, config)
    return Checkpoint(
        path=path,
        architecture=architecture,
        model_class=model_class,
        config=config,
        generation=read_object(path / "generation_config.json") if (path / "generation_config.json").is_file() else {},
        by_inspection=architecture not in served,
        whole=whole,
    )


def config_class_of(model_class: Any, raw: Mapping[str, Any]) -> Any:
    """Return the class of a configuration: the one of its `model_type` if the model takes it, else the model's own."""
    own = model_class.config_class
    named = CONFIG_MAPPING.get(raw.get("model_type"), own) if raw.get("model_type") in CONFIG_MAPPING else own
    return named if issubclass(named, own) else own


def require_weights(path: Path) -> None:
    """Check that the folder holds weights.

    Raises:
        ModelError: if it holds neither safetensors nor a torch file, or weights as they are after the passes.
    """
    if (path / SAVED_WEIGHTS).is_file():
        raise ModelError(
            f"{path} holds weights that `LLM.save_weights` wrote, which are read only as an engine's model",
            fix="name the checkpoint that they were made from",
        )
    if not any(True for pattern in WEIGHT_FILES for _ in path.glob(pattern)):
        raise ModelError(
            f"{path} holds no weights: none of {', '.join(WEIGHT_FILES)}",
            fix="download the checkpoint's weight files into this folder",
        )


def _read_config_json(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ModelError(f"there is no folder {str(path)!r}", fix="set `model` to a local Hugging Face folder")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{str(path)!r} has no config.json, so it is no Hugging Face checkpoint",
            fix="set `model` to the folder that holds config.json and the weights",
        )
    return read_object(file)


def _served_architecture(path: Path, raw: Mapping[str, Any], served: Sequence[str]) -> str:
    named = raw.get("architectures") or []
    whole = not any(tried.is_tried(name) for name in named)
    if raw.get("is_encoder_decoder") and whole and not set(named) & {*SPEECH, *SEQ2SEQ}:
        raise ModelError(
            f"{path} is an encoder-decoder model ({', '.join(named) or 'unnamed'}); which is not served",
            fix=f"use a decoder-only checkpoint, or one of {', '.join((*SPEECH, *SEQ2SEQ))}",
        )
    for architecture in named:
        if architecture in served or (served is SERVED and tried.is_tried(architecture)):
            return str(architecture)
    asked = named[0] if named else f"(none named; model_type {raw.get('model_type')!r})"
    near = family_hint(str(asked), served)
    raise ModelError(
        f"architecture {asked!r} of {path} is not served; served are {', '.join(served)}{near}",
        fix="use a checkpoint of a served architecture, or a plugin that serves this one",
    )


def _refuse_unserved_features(path: Path, config: Any) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and _quantizes_the_cache_alone(quantization):
        del config.quantization_config  # so that transformers loads the weights as they are
    elif quantization is not None:
        raise ModelError(
            f"{path} holds quantized weights (quantization_config), which this family cannot read",
            fix="use the checkpoint in bfloat16, float16 or float32",
        )
    ahead = getattr(config, "use_bidirectional_attention", False)
    if ahead and ahead != "vision":  # tokens of an image see each other then, and text is causal
        raise ModelError(
            f"{path} sets use_bidirectional_attention, so it is no causal decoder",
            fix="use a checkpoint without it",
        )


def _quantizes_the_cache_alone(quantization: Any) -> bool:
    """Return True if a compressed-tensors configuration quantizes only the cache and leaves all weights unchanged."""
    return (
        isinstance(quantization, Mapping)
        and quantization.get("kv_cache_scheme") is not None
        and not quantization.get("config_groups")
    )


def _stored_dtype(path: Path) -> str:
    """Return the dtype of a folder's first tensor.

    Raises:
        ModelError: if its file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                    return names.get(opened.get_slice(key).get_dtype(), "float32")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}", fix="download the checkpoint again") from error
    return "float32"


def _scaled_length(path: Path, config: Any) -> int:
    named = ((name, getattr(config, name, None)) for name in LENGTHS)
    key, stated = next(((n, v) for n, v in named if v is not None), ("", LENGTH_WITHOUT_POSITIONS))
    if not isinstance(stated, int):
        raise ModelError(
            f"{path / 'config.json'}: {key} = {stated!r} is no number of tokens",
            fix="correct it, or download config.json again",
        )
    length = int(stated)
    if length < 1:
        raise ModelError(
            f"{path / 'config.json'}: {key} = {stated} leaves no room for a token",
            fix="correct it, or download config.json again",
        )
    scaled = rope_fields.scaled_length(getattr(config, "rope_parameters", None), length)
    if scaled < 1:
        raise ModelError(
            f"{path / 'config.json'}: rope_parameters make {scaled} tokens of {key} = {stated}",
            fix="correct their factor, or download config.json again",
        )
    return scaled
