"""Unpacking of a GGUF file into a folder with config.json, tokenizer and weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from slotline.plugins.weight_formats.gguf.blocks import TYPES
from slotline.plugins.weight_formats.gguf.metadata import refuse_ignored
from slotline.registry.errors import ModelError

logger = logging.getLogger("slotline")

_ORIGINAL, _LOW, _HIGH = 8192, 1.0, 4.0
"""Context and frequency factors of Llama 3.1 and later. GGUF stores only the frequencies that they give."""


def unpack(path: Path, folder: Path) -> None:
    """Write a file's model as a checkpoint into an empty folder.

    Blocks of the types of `blocks.TYPES` are copied as they are. Other tensors are stored in float32.

    Raises:
        ModelError: if the gguf library is missing, the file is broken, or its model has parts that are not read.
    """
    with _typed(path):
        from gguf import GGUFReader
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
            read_field,
        )

        reader = _whole(GGUFReader)(str(path))
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        refuse_ignored(path, reader.fields, lambda key: _value(read_field(reader, key)), config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        architecture = read_field(reader, "general.architecture")[0]
        parsed = load_gguf_checkpoint(str(path))["config"]
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=parsed)
        names = get_gguf_hf_weights_map(model, processor)
        tensors, types = _tensors(path, reader, processor, names)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    said = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    said |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "gguf", "types": types}}
    if (factors := next((t for t in reader.tensors if t.name == "rope_freqs.weight"), None)) is not None:
        said["rope_parameters"] = _llama3(path, said, torch.tensor(np.array(factors.data)).float())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(said))


def _value(parts: list[Any]) -> Any:
    """Return the value of a key, a list only of an array."""
    return parts[0] if len(parts) == 1 else parts


def _whole(reader: Any) -> Any:
    """Return the library's reader with a check that the file holds every tensor that it lists."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    class Whole(reader):  # type: ignore[misc]
        def _build_tensors(self, start: int, fields: list[Any]) -> None:
            for field in fields:
                _, name, _, dims, kind, offset = field.parts
                count, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
                end = start + int(offset[0]) + int(np.prod(dims)) * size // count
                if end > len(self.data):
                    raise ValueError(
                        f"tensor {bytes(name).decode()} ends at byte {end}, and the file has {len(self.data)}"
                    )
            super()._build_tensors(start, fields)

    return Whole


def _tensors(
    path: Path, reader: Any, processor: Any, names: dict[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors to store by name, and the type of each quantized module."""
    from gguf import dequantize

    found, types = dict[str, torch.Tensor](), dict[str, str]()
    for tensor in reader.tensors:
        name, kind = names.get(tensor.name), tensor.tensor_type.name
        if name is None:
            if tensor.name != "rope_freqs.weight":
                raise ModelError(
                    f"{path}: tensor {tensor.name} {kind} has no place in the model",
                    fix="use the checkpoint as its makers published it",
                )
            continue
        rows = _permuted_rows(processor, tensor) if kind in TYPES and "embed" not in name else None
        if rows is not None:
            stem = name.removesuffix(".weight")
            types[stem] = kind
            found[f"{stem}.gguf"] = torch.from_numpy(np.array(tensor.data))[rows]
            continue
        plain = processor.process(weights=dequantize(tensor.data, tensor.tensor_type), name=tensor.name).weights
        found[name] = torch.from_numpy(np.array(plain, dtype=np.float32))
    return found, types


def _permuted_rows(processor: Any, tensor: Any) -> torch.Tensor | None:
    """Return the rows of a stored weight in the model's order, or None if it is no reordering of rows."""
    if tensor.data.ndim != 2:
        return None
    count = tensor.data.shape[0]
    moved = processor.process(weights=np.arange(count, dtype=np.float32)[:, None], name=tensor.name).weights
    if moved.shape != (count, 1) or not np.array_equal(np.sort(moved[:, 0]), np.arange(count)):
        return None
    return torch.from_numpy(moved[:, 0].astype(np.int64))


def _llama3(path: Path, config: dict[str, Any], factors: torch.Tensor) -> dict[str, Any]:
    """Return the rope parameters whose frequencies are divided by these factors.

    Raises:
        ModelError: if they are not of the kind of Llama 3.1.
    """
    theta = float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0)
    size = 2 * len(factors)
    lengths = 2 * torch.pi * theta ** (torch.arange(0, size, 2).float() / size)
    factor = float(factors.max())
    smooth = ((_ORIGINAL / lengths - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(factors, expected, rtol=1e-3):
        raise ModelError(
            f"{path}: rope_freqs.weight holds frequencies that are not of the kind of Llama 3.1",
            fix="use the checkpoint as its makers published it",
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


@contextmanager
def _typed(path: Path) -> Iterator[None]:
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except ImportError as error:
        raise ModelError(
            f"{path} needs the library gguf, which cannot be imported: {error}", fix="pip install 'slotline[gguf]'"
        ) from error
    except Exception as error:  # the library and transformers raise whatever a broken file leads to
        raise ModelError(
            f"{path} cannot be read as GGUF: {type(error).__name__}: {error}",
            fix="download the file again, it may have been cut, or use the checkpoint as its makers published it",
        ) from error
