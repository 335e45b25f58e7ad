"""Names under which families publish the multi-token-prediction layer in a checkpoint.

transformers skips these tensors when it loads a model, so they are read from the checkpoint's safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open

from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json
from slotline.registry.tensor_files import stored_tensors, unfit


@frozen(kw_only=True)
class Layout:
    """One way of naming the parts.

    Attributes:
        families: who publishes it, for messages.
        projection, embedding_norm, hidden_norm, norm: names of the modules around the decoder layer: the projection of
            embedding and hidden state, the norms before it, and the norm after the layer.
        layer: what the names of the decoder layer's own tensors begin with.
        hidden_first: whether the projection reads the hidden state before the embedding.
        shared: what the names of further tensors begin with that are copies of the model's own.
    """

    families: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    layer: str
    hidden_first: bool = False
    shared: tuple[str, ...] = ()


@frozen(kw_only=True, eq=False)
class Found:
    """The layer of one checkpoint.

    Attributes:
        path: the folder.
        layout: how its parts are named.
        files: the file of each tensor that belongs to it and is not shared with the model.
    """

    path: Path
    layout: Layout
    files: Mapping[str, Path]

    def read(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, in host memory.

        Raises:
            ModelError: if a file is broken, or a tensor is quantized.
        """
        self._refuse_quantized()
        by_file: dict[Path, list[str]] = {}
        for name, file in self.files.items():
            by_file.setdefault(file, []).append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, names in by_file.items():
            try:
                with safe_open(file, framework="pt") as opened:
                    tensors |= {name: opened.get_tensor(name) for name in names}
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} cannot be read: {error}", fix="download the file again") from error
        return tensors

    def _refuse_quantized(self) -> None:
        stored = [tensor for file in sorted(set(self.files.values())) for tensor in stored_tensors(file)]
        if strange := unfit(tensor for tensor in stored if self.files.get(tensor.name) == tensor.file):
            raise ModelError(
                f"{strange.file} holds {strange.name} in {strange.dtype}, which is no plain weight",
                fix="use a checkpoint whose multi-token-prediction layer is in bfloat16, float16 or float32, or name "
                "another drafter",
            )


def layouts(num_hidden_layers: int) -> tuple[Layout, ...]:
    """Return all known layouts, for a model of this number of decoder layers."""
    behind = f"model.layers.{num_hidden_layers}."
    return (
        Layout(
            families="DeepSeek-V3, GLM-4.5 and GLM-4.7",
            projection=f"{behind}eh_proj",
            embedding_norm=f"{behind}enorm",
            hidden_norm=f"{behind}hnorm",
            norm=f"{behind}shared_head.norm",
            layer=behind,
            shared=(f"{behind}embed_tokens.", f"{behind}shared_head.head."),
        ),
        Layout(
            families="Qwen3-Next and Qwen3.5",
            projection="mtp.fc",
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            norm="mtp.norm",
            layer="mtp.layers.0.",
        ),
        Layout(
            families="MiMo",
            projection="model.mtp_layers.0.input_proj",
            embedding_norm="model.mtp_layers.0.token_layernorm",
            hidden_norm="model.mtp_layers.0.hidden_layernorm",
            norm="model.mtp_layers.0.final_layernorm",
            layer="model.mtp_layers.0.",
            hidden_first=True,
        ),
    )


_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names under which a model's config.json says how many such layers it has."""


def refuse_unread(path: Path, num_tokens: int) -> None:
    """Refuse a config.json that asks for layers that are not read, or for an embedding of their own.

    With several layers each drafts in its turn, so the first alone serves one draft token.

    Raises:
        ModelError: naming the field.
    """
    settings = read_json(path / "config.json")
    for name in _COUNTS:
        count = settings.get(name)
        if not isinstance(count, int) or count == 1 or (count > 1 and num_tokens == 1):
            continue
        raise ModelError(
            f"{str(path)!r} has {name} = {count}, and one multi-token-prediction layer is read, which would draft all "
            f"{num_tokens} tokens",
            fix="set drafter.tokens to 1, or name another drafter" if count else "name another drafter",
        )
    if settings.get("mtp_use_dedicated_embeddings"):
        raise ModelError(
            f"{str(path)!r} has mtp_use_dedicated_embeddings = True, and a layer that shares the model's is read",
            fix="name another drafter",
        )


def find(path: Path) -> Found:
    """Find the multi-token-prediction layer in a checkpoint's folder by its tensors' names, without reading tensors.

    Raises:
        ModelError: if there is none.
    """
    known, names = layouts(_num_hidden_layers(path)), _files(path)
    for layout in known:
        if f"{layout.projection}.weight" in names:
            around = (layout.projection, layout.embedding_norm, layout.hidden_norm, layout.norm)
            begins = (layout.layer, *(f"{module}." for module in around))
            own = (name for name in names if name.startswith(begins) and not name.startswith(layout.shared))
            return Found(path=path, layout=layout, files={name: names[name] for name in own})
    looked = "; ".join(f"{layout.projection}.weight ({layout.families})" for layout in known)
    raise ModelError(
        f"{str(path)!r} has no multi-token-prediction layer: its safetensors hold none of {looked}",
        fix="download the checkpoint with these weights (some conversions leave them out), or name another drafter",
    )


def _num_hidden_layers(path: Path) -> int:
    file = path / "config.json"
    try:
        return int(read_json(file)["num_hidden_layers"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{str(file)!r} does not say how many layers the model has: {type(error).__name__}: {error}",
            fix="use a checkpoint whose config.json has num_hidden_layers, or name another drafter",
        ) from error


def _files(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, from the headers of all safetensors. An index may leave these tensors out."""
    found: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}", fix="download the file again") from error
    return found
