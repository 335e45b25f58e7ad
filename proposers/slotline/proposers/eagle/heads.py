"""The networks of EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025), and their published folders.

Both read, at position i, a hidden state of the target there and the token that follows it, and predict the token after
that. Attention is the caller's: a served head attends over its cache, a head in training over a window. The networks
run on flattened tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json
from slotline.registry.tensor_files import StoredTensor, stored_tensors, unfit

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [n, num_heads, head_size], key and value [n, num_kv_heads, head_size]) to [n, num_heads, head_size]."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("d2t", "t2d")
"""Tables of an EAGLE-3 head: what is added to a draft token, and which of the model's tokens are draft tokens."""


_USUAL: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "target_hidden_size": (None,),
    "norm_before_fc": (None, False),
    "use_aux_hidden_state": (None, True),
    "use_mtp_layernorm": (None, False),
    "parallel_draft_step": (None, 1),
}
"""Fields that change the network of a published head, with the values for which it is one of these two."""
_NORMS = ("use_input_layernorm_in_first_layer", "use_last_layernorm")
_PARTS = ("layers.", "midlayer.", "fc.", "fc_norm.")
_IGNORED = "rotary_emb.inv_freq"
"""Stored by older versions of transformers, and computed by all."""


@frozen(kw_only=True, eq=False)
class HeadConfig:
    """Settings in a folder's config.json.

    Attributes:
        path: the folder.
        llama: its decoder layers, a Llama's.
        draft_vocab_size: tokens that an EAGLE-3 head chooses from, by default all of the target's.
        layer_ids: the target's layers, from 0, whose inputs an EAGLE-3 head reads. Empty for the usual three.
        norm_before_residual: True if an EAGLE-3 head adds its attention to the normalised hidden state.
        norms: what it says of a norm before the first layer and behind the last one, by field. Empty for nothing.
    """

    path: Path
    llama: LlamaConfig
    draft_vocab_size: int
    layer_ids: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norms: Mapping[str, bool] = field(factory=dict)

    def refuse_norms(self, *, present: bool) -> None:
        """Refuse a config.json that leaves out norms which heads of its kind have, or has those that they lack.

        Raises:
            ModelError: naming the field.
        """
        for name, said in self.norms.items():
            if said != present:
                raise ModelError(
                    f"the head in {str(self.path)!r} has {name} = {said}, and this kind of head is read with {present}",
                    fix="check that drafter.path and the drafter's name belong together",
                )

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers to read of a target with `num_layers`: early, middle and late, as in EAGLE-3."""
        return self.layer_ids or (2, num_layers // 2, num_layers - 3)


def read_config(path: Path) -> HeadConfig:
    """Read config.json, the authors' or one of the library speculators.

    Raises:
        ModelError: if the folder has none that can be read, or if its layers are not a Llama's.
    """
    file = path / "config.json"
    try:
        settings = _flat(read_json(file))
        hidden_act = settings.get("hidden_act", "silu")
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        missing = [name for name in names if not isinstance(settings.get(name), int)]
        if missing or hidden_act != "silu":
            raise ValueError(f"{', '.join(missing)} missing" if missing else f"hidden_act is {hidden_act!r}")
        _refuse_unusual(settings)
        known = {key: value for key, value in settings.items() if key not in ("model_type", "architectures", "dtype")}
        llama = LlamaConfig(**known)
    except Exception as error:  # transformers' dataclass validators raise many kinds
        raise ModelError(
            f"{str(file)!r} does not describe an EAGLE head: {error}",
            fix="set drafter.path to a folder with the config.json and weights of an EAGLE or EAGLE-3 head",
        ) from error
    more = settings.get("eagle_config") or {}
    ids = more.get("eagle_aux_hidden_state_layer_ids") or settings.get("eagle_aux_hidden_state_layer_ids") or ()
    return HeadConfig(
        path=path,
        llama=llama,
        draft_vocab_size=int(settings.get("draft_vocab_size") or llama.vocab_size),
        layer_ids=tuple(map(int, ids)),
        norm_before_residual=bool(settings.get("norm_before_residual", False)),
        norms={name: bool(settings[name]) for name in _NORMS if settings.get(name) is not None},
    )


def _refuse_unusual(settings: Mapping[str, Any]) -> None:
    """Refuse fields that ask for another network.

    Raises:
        ValueError: naming the field.
    """
    more = settings.get("eagle_config") or {}
    for where in (settings, more):
        for name, usual in _USUAL.items():
            if name == "target_hidden_size":
                usual = (*usual, settings["hidden_size"])
            if where.get(name) not in usual:
                raise ValueError(f"{name} is {where[name]!r}, and heads with {_or(usual)} are read")
    refuse_turns(settings)
    if any(kind != "full_attention" for kind in settings.get("layer_types") or ()):
        raise ValueError(f"layer_types is {settings['layer_types']!r}, and heads with full attention are read")


def refuse_turns(settings: Mapping[str, Any]) -> None:
    """Refuse rotary positions that change with the length of a text, or that turn a part of a head.

    Raises:
        ValueError: naming the field.
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    name = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        raise ValueError(f"{name} is {rope!r}, which turns keys by the length of the text: a cache holds turned keys")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{name} is {rope!r}, and heads whose positions turn all of a head are read")


def _or(usual: tuple[Any, ...]) -> str:
    values = [repr(value) for value in usual if value is not None]
    return " or ".join(values) if values else "none"


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in the authors' form.

    speculators stores the layer's settings separately, and normalises first by default.
    """
    layer = settings.get("transformer_layer_config")
    if layer is None:
        return settings
    if (kind := settings.get("speculators_model_type")) != "eagle3":
        raise ValueError(f"speculators_model_type is {kind!r}, and of that library's heads those of 'eagle3' are read")
    if (layers := layer.get("num_hidden_layers", 1)) != 1:
        raise ValueError(f"num_hidden_layers is {layers}, and an EAGLE-3 head has one layer")
    own = {key: value for key, value in settings.items() if key != "transformer_layer_config" and value is not None}
    return {**layer, "norm_before_residual": True, **own}


def stored(path: Path) -> tuple[StoredTensor, ...]:
    """Read what a folder's file says of its tensors: plain weights, and the tables of a draft vocabulary.

    Raises:
        ModelError: if there is no file, if it cannot be read, or if a tensor is quantized.
    """
    file = _file(path)
    try:
        tensors = stored_tensors(file)
    except Exception as error:  # readers of two formats, each with errors of its own
        raise _unreadable(file, error) from error
    if strange := unfit(tensors, _INDICES):
        raise ModelError(
            f"{str(file)!r} holds {strange.name} in {strange.dtype}, which is no plain weight",
            fix="use a head in bfloat16, float16 or float32",
        )
    return tensors


def refuse_more_layers(config: HeadConfig, tensors: Collection[StoredTensor]) -> None:
    """Refuse a config.json of more layers than the file has tensors.

    Raises:
        ModelError: naming both numbers.
    """
    if (layers := config.llama.num_hidden_layers) > len(tensors):
        raise ModelError(
            f"the head in {str(config.path)!r} does not fit: its config.json asks for num_hidden_layers = {layers}, "
            f"its weights have {len(tensors)} tensors",
            fix="use the config.json that belongs to these weights",
        )


def _unreadable(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{str(file)!r} cannot be read: {type(error).__name__}: {error}", fix="download the head again")


def _file(path: Path) -> Path:
    """Return the folder's file of weights."""
    for name in WEIGHT_FILES:
        if (path / name).exists():
            return path / name
    raise ModelError(
        f"{str(path)!r} has no weights of a head ({' or '.join(WEIGHT_FILES)})", fix="set drafter.path to its folder"
    )


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".bin":
            loaded: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
            return loaded
        from safetensors.torch import load_file

        weights: dict[str, torch.Tensor] = load_file(file)
    except Exception as error:  # readers of two formats, each with errors of its own
        raise _unreadable(file, error) from error
    return weights


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the folder, in host memory.

    Raises:
        ModelError: if there are none, or they cannot be read.
    """
    stored(path)
    return _read(_file(path))


def fill(module: nn.Module, weights: Mapping[str, torch.Tensor], path: Path, *, assign: bool = False) -> None:
    """Copy weights into a module and ignore additional ones. `assign` uses the tensors without a copy.

    The shapes of a module on the meta device are compared before it allocates any memory.

    Raises:
        ModelError: naming a weight that is missing or has another shape.
    """
    own = module.state_dict()
    wrong = [name for name, tensor in own.items() if name not in weights or weights[name].shape != tensor.shape]
    if wrong:
        there = f"{list(weights[wrong[0]].shape)}" if wrong[0] in weights else "not there"
        raise ModelError(
            f"the head in {str(path)!r} does not fit: {wrong[0]} is {there}, its config.json asks for "
            f"{list(own[wrong[0]].shape)}" + (f" (and {len(wrong) - 1} others)" if len(wrong) > 1 else ""),
            fix="check that drafter.path, the drafter's name and the model belong together",
        )
    module.load_state_dict({name: weights[name] for name in own}, assign=assign)


def refuse_strange(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    path: Path,
    fix: str = "use an EAGLE or EAGLE-3 head of a Llama's layers, or the config.json that belongs to these weights",
) -> None:
    """Refuse weights of a head's layers that it has no place for. Copies of the model's own may be there.

    Raises:
        ModelError: naming the first of them.
    """
    own = module.state_dict()
    strange = [name for name in weights if name not in own and name.startswith(_PARTS) and not name.endswith(_IGNORED)]
    if strange:
        raise ModelError(
            f"the head in {str(path)!r} has {strange[0]} {list(weights[strange[0]].shape)}"
            + (f" and {len(strange) - 1} more weights" if len(strange) > 1 else "")
            + ", for which a head with its config.json has no place",
            fix=fix,
        )


def merge(*projections: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return one weight and bias of several projections of the same input, which keep views of their parts."""
    weight = torch.cat([projection.weight.data for projection in projections])
    bias = None if projections[0].bias is None else torch.cat([projection.bias.data for projection in projections])
    for projection, part in zip(projections, weight.split([p.out_features for p in projections]), strict=True):
        projection.weight.data = part
    return weight, bias


class Attention(nn.Module):
    """Projections and rotary positions around the caller's attention."""

    merged: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __init__(self, config: LlamaConfig, layer: int, input_size: int) -> None:
        super().__init__()
        self.layer, self.head_size = layer, int(config.head_dim)
        queries, keys = config.num_attention_heads * self.head_size, config.num_key_value_heads * self.head_size
        self.q_proj = nn.Linear(input_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """Map [n, input_size] to [n, hidden_size]. `rotary` are cosines and sines [n, head_size]."""
        if self.merged is None:
            states = torch.cat([projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj)], -1)
        else:
            states = functional.linear(x, *self.merged)
        states = states.unflatten(-1, (-1, self.head_size))  # of no rows too
        queries, keys = (p.out_features // self.head_size for p in (self.q_proj, self.k_proj))
        turning, value = states.split([queries + keys, keys], 1)
        cosines, sines = (part[:, None] for part in rotary)
        query, key = (turning * cosines + rotate_half(turning) * sines).split([queries, keys], 1)
        out: torch.Tensor = self.o_proj(attend(self.layer, query, key, value).flatten(1))
        return out


class MLP(LlamaMLP):  # type: ignore[misc]  # transformers has no types
    """A Llama's, whose gate and up may be one product."""

    merged: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, hidden_size] to the same."""
        if self.merged is None:
            return super().forward(x)  # type: ignore[no-any-return]
        gate, up = functional.linear(x, *self.merged).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)  # type: ignore[no-any-return]


class EagleLayer(nn.Module):
    """Llama decoder layer. The attention of the first layer has no norm before it."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, config.hidden_size)
        self.mlp = MLP(config)
        norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = norm if layer else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """Map [n, hidden_size] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Head(nn.Module):
    """Common parts of both kinds of heads: rotary positions, and `step`."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self._llama = config.llama

    def prepare(self) -> LlamaRotaryEmbedding:
        """Make the rotary embedding, once the weights have shown that the configuration's sizes are right."""
        # Not a child: its buffers are no weights, and they stay in float32.
        self.__dict__["rotary"] = LlamaRotaryEmbedding(self._llama)
        return self.__dict__["rotary"]

    def positions(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [n, head_size] of positions [n], on the device and in the dtype of `like`."""
        rotary: LlamaRotaryEmbedding = self.__dict__.get("rotary") or self.prepare()
        if rotary.inv_freq.device != positions.device:
            rotary.to(positions.device)
        cosines, sines = rotary(like, positions[None])
        return cosines[0], sines[0]

    def merge(self) -> None:
        """Merge products of the same input, once the head is on its device. Its weights may still be written."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.merged = merge(module.q_proj, module.k_proj, module.v_proj)
            elif isinstance(module, MLP):
                module.merged = merge(module.gate_proj, module.up_proj)


class EagleHead(Head):
    """EAGLE: embedding and last hidden state through `fc` and decoder layers give the next last hidden state."""

    def __init__(self, config: HeadConfig, *, bias: bool) -> None:
        super().__init__(config)
        size = config.llama.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=bias)
        self.layers = nn.ModuleList(EagleLayer(config.llama, i) for i in range(config.llama.num_hidden_layers))

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target's last hidden states [n, hidden_size] in the form that `forward` takes."""
        return hidden

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step.

        Args:
            embeddings: [n, hidden_size] of the tokens after the positions.
            hidden: [n, hidden_size] at the positions, the target's or this method's own.
            positions: [n] int64.

        Returns:
            What the output projection reads, and what the next step takes as `hidden`: here the same [n, hidden_size].
        """
        rotary = self.positions(positions, embeddings)
        x = self.fc(torch.cat([embeddings, hidden], -1))
        for layer in self.layers:
            x = layer(x, rotary, attend)
        return x, x


class Eagle3Layer(nn.Module):
    """A Llama decoder layer whose attention reads embeddings and hidden states side by side, each under a norm."""

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = Attention(config, 0, 2 * config.hidden_size)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Map [n, hidden_size] twice to [n, hidden_size]."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], -1)
        x = (normed if self.norm_before_residual else hidden) + self.self_attn(both, rotary, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Head(Head):
    """EAGLE-3: inputs of three target layers joined by `fc`, and an output projection over a draft vocabulary."""

    def __init__(self, config: HeadConfig, *, num_states: int = 3, target_size: int = 0, bias: bool = False) -> None:
        super().__init__(config)
        size = config.llama.hidden_size
        self.fc = nn.Linear(num_states * (target_size or size), size, bias=bias)
        self.midlayer = Eagle3Layer(config.llama, norm_before_residual=config.norm_before_residual)
        self.norm = nn.RMSNorm(size, eps=config.llama.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target layers' inputs, [n, layers * hidden_size], in the form that `forward` takes."""
        joined: torch.Tensor = self.fc(hidden)
        return joined

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute like `EagleHead.forward`.

        `lm_head` reads the first result, and the second is without the last norm.
        """
        x = self.midlayer(embeddings, hidden, self.positions(positions, embeddings), attend)
        return self.norm(x), x
