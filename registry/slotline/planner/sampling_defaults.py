"""Defaults of sampling parameters from a checkpoint's generation_config.json, read as vLLM reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from slotline.registry.config import LoadedConfig
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import ModelError, RequestError
from slotline.registry.json_file import read_object
from slotline.registry.negotiation import Setting
from slotline.registry.safe_repr import safe_repr

KEY = "sampling.generation_config"
FILE = "generation_config.json"
_PARAMETERS = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)
"""Keys read from the file, with slotline's names for them."""
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
"""Further keys that are read for an encoder-decoder model, beside `bad_words_ids`."""
_UNREAD = (
    "bad_words_ids",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "length_penalty",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "typical_p",
)
"""Keys that change transformers' output and are not read, as in vLLM."""


@frozen(kw_only=True)
class SamplingDefaults:
    """Values for parameters that a request leaves out.

    Attributes:
        values: by the names of `SamplingParams`.
        setting: the record for the plan. None if there is nothing to report.
    """

    values: Mapping[str, Any] = field(factory=dict)
    setting: Setting | None = None


def sampling_defaults(loaded: LoadedConfig, model: Path, task: str) -> SamplingDefaults:
    """Return the defaults for a model's requests.

    Raises:
        ModelError: if the file cannot be read, or names a value that is not allowed.
    """
    asked, origin = loaded.config.sampling.generation_config, loaded.origins[KEY]
    explicit = origin.kind != "default"
    file = model / FILE
    if task != "generate" or not (explicit or file.is_file()):
        return SamplingDefaults()
    content = read_object(file) if asked == "auto" and file.is_file() else {}
    values = _values(file, content)
    if values_of_pair := _of_encoder_decoder(model, content):
        values |= values_of_pair
        content = {name: value for name, value in content.items() if name != "bad_words_ids"}
    said = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()]
    said += [f"not read: {name}" for name in _UNREAD if content.get(name) not in (None, [], {}, 1, 0, 1.0)]
    if not said and not explicit:
        return SamplingDefaults()
    where = f"{origin.where}" if explicit else f"auto: {FILE} of the model"
    setting = Setting(key=KEY, asked=asked, resolved=", ".join(said) or "none", origin=where, explicit=explicit)
    return SamplingDefaults(values=values, setting=setting)


def _values(file: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that the file sets. A null counts as absent."""
    values = {}
    for theirs, ours in _PARAMETERS.items():
        value = content.get(theirs)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except RequestError as error:
            raise ModelError(
                f"{file}: {theirs} = {safe_repr(value)} is not allowed",
                fix=f'{error.fix}; correct the file, or set {KEY} = "none"',
            ) from error
        values[ours] = value
    if content.get("do_sample") is False:  # transformers then takes the most likely token, ignoring other parameters
        values = {name: value for name, value in values.items() if name not in ("top_k", "top_p", "min_p")}
        values["temperature"] = 0
    return values


def _of_encoder_decoder(model: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return further parameters that the file sets for a model with an encoder in front of its decoder.

    A list of forced tokens is left out, since transformers' own models have none.
    """
    if not read_object(model / "config.json").get("is_encoder_decoder"):
        return {}
    values = dict[str, Any]()
    forced = {name: content[name] for name in _FORCED if isinstance(content.get(name), int)}
    if forced:
        values["extra_args"] = forced
    if content.get("bad_words_ids"):
        values["bad_words_token_ids"] = tuple(map(tuple, content["bad_words_ids"]))
    return values
