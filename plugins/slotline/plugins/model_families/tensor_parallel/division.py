"""Division of a transformers model among the ranks of a tensor group, in place, before the passes.

Attention is divided by heads, and what transformers' own plan (`base_model_tp_plan`) names by its styles. Layers that
neither covers are found by their names. A layer that nothing covers stays whole on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from slotline.plugins.model_families.tensor_parallel.collectives import Joined
from slotline.plugins.model_families.tensor_parallel.pieces import Cut, cut_inputs, cut_outputs, cut_parameter
from slotline.registry.contracts.model_family import Shard
from slotline.registry.errors import NegotiationError

ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense", "wo")
MLPS = (("gate_proj", "up_proj", "down_proj"), ("c_fc", "c_proj"), ("fc1", "fc2"), ("up_proj", "down_proj"))
"""Children of an MLP by their usual names, the one that gives its output last."""


def divide(hf_model: Any, shard: Shard) -> Joined:
    """Leave each module only what a rank has of it, and return where the ranks join their outputs.

    The model may be on the meta device.

    Raises:
        NegotiationError: if a size cannot be divided, or the model has attention that this does not know.
    """
    joined = Joined()
    _Divider(hf_model, shard, joined).run()
    return joined


class _Divider:
    """One division. Modules that were seen are left alone by later rules."""

    def __init__(self, hf_model: Any, shard: Shard, joined: Joined) -> None:
        self._model, self._shard, self._joined = hf_model, shard, joined
        self._config = hf_model.config.get_text_config()
        self._done: set[nn.Module] = set()

    def run(self) -> None:
        named = dict(self._model.named_modules())
        for name, module in named.items():
            if _is_attention(module):
                self._attention(name, module)
        self._planned()
        for name, module in named.items():
            self._mlp(name, module)
        self._vocabulary()

    # attention

    def _attention(self, name: str, module: Any) -> None:
        children, size = module._modules, int(module.head_dim)
        output = next((one for one in ATTENTION_OUTPUTS if type(children.get(one)) is nn.Linear), None)
        if output is None or not all(type(children.get(one)) is nn.Linear for one in ("q_proj", "k_proj", "v_proj")):
            raise self._unknown(name, module)
        for norm in ("q_norm", "k_norm"):
            weight = getattr(children.get(norm), "weight", None)
            if weight is not None and weight.numel() != size:
                raise self._unknown(name, module, f"its {norm} is one of all heads")
        for part in ("q_proj", "k_proj", "v_proj"):
            linear, title = children[part], f"{name}.{part}"
            cut = Cut(0, (linear.out_features,), size, repeats=part != "q_proj")
            cut_outputs(linear, cut, self._shard, title)
            self._done.add(linear)
        for sinks in ("sinks",):
            if sinks in module._parameters:
                whole = module._parameters[sinks]
                cut_parameter(module, sinks, Cut(0, (whole.numel(),)), self._shard, f"{name}.{sinks}")
        linear = children[output]
        cut_inputs(linear, Cut(1, (linear.in_features,), size), self._shard, f"{name}.{output}")
        self._done.add(linear)
        self._joined.summed.append(f"{name}.{output}")

    def _unknown(self, name: str, module: nn.Module, why: str = "it has other projections") -> NegotiationError:
        return NegotiationError(
            f"parallel.tensor = {self._shard.size}: attention {name!r} ({type(module).__name__}) cannot be divided: "
            f"{why}",
            fix="set parallel.tensor = 1",
        )

    # transformers' plan

    def _planned(self) -> None:
        plan: Mapping[str, str] = getattr(self._config, "base_model_tp_plan", None) or {}
        prefix = next(n for n, m in self._model.named_modules() if m is self._model.base_model)
        styles = [(re.compile(_pattern(f"{prefix}.{key}" if prefix else key)), style) for key, style in plan.items()]
        for name, module in list(self._model.named_modules()):
            own = [(name, module, None)] + [(f"{name}.{p}", module, p) for p in module._parameters]
            for title, holder, parameter in own:
                for pattern, style in styles:
                    if pattern.fullmatch(title) and (parameter is not None or holder not in self._done):
                        self._style(style, title, holder, parameter)

    def _style(self, style: str, title: str, module: Any, parameter: str | None) -> None:
        if parameter is not None and style in _PARAMETER_STYLES:
            whole = module._parameters[parameter]
            dim, packed = _PARAMETER_STYLES[style]
            size = whole.shape[dim]
            sections = (size // 2, size // 2) if packed else (size,)
            cut_parameter(module, parameter, Cut(dim, sections), self._shard, title)
        elif parameter is None and style == "moe_tp_experts":
            self._joined.summed.append(title)
            self._done.add(module)
        elif parameter is None and type(module) is nn.Linear and style in ("colwise", "rowwise"):
            self._linear(title, module, inputs=style == "rowwise")

    def _linear(self, title: str, linear: nn.Linear, *, inputs: bool) -> None:
        if inputs:
            cut_inputs(linear, Cut(1, (linear.in_features,)), self._shard, title)
            self._joined.summed.append(title)
        else:
            cut_outputs(linear, Cut(0, (linear.out_features,)), self._shard, title)
        self._done.add(linear)

    # names

    def _mlp(self, name: str, module: nn.Module) -> None:
        for names in MLPS:
            children = [module._modules.get(one) for one in names]
            if all(type(child) is nn.Linear and child not in self._done for child in children):
                for one, child in zip(names, children, strict=True):
                    self._linear(f"{name}.{one}", child, inputs=one == names[-1])  # type: ignore[arg-type]
                return

    # vocabulary

    def _vocabulary(self) -> None:
        """Divide the embedding and the output projection by tokens, the same ones if they are tied."""
        embedding, head = self._model.get_input_embeddings(), getattr(self._model, "lm_head", None)
        tied = head is not None and getattr(head, "weight", None) is embedding.weight
        size, shard = embedding.weight.shape[0], self._shard
        part = -(-size // shard.size)
        place = partial(_padded, start=shard.rank * part, part=part)
        title = next(name for name, module in self._model.named_modules() if module is embedding)
        if type(embedding).forward is nn.Embedding.forward or isinstance(embedding, nn.Embedding):
            embedding.weight = nn.Parameter(place(embedding.weight), requires_grad=False)
            embedding.num_embeddings, embedding.padding_idx = part, None
            self._joined.embeddings[title] = (shard.rank * part, (shard.rank + 1) * part)
        if head is None or type(head) is not nn.Linear:
            return
        size = head.weight.shape[0]
        head.weight = embedding.weight if tied else nn.Parameter(place(head.weight), requires_grad=False)
        if head.bias is not None:
            head.bias = nn.Parameter(place(head.bias), requires_grad=False)
        head.out_features = part
        self._joined.gathered["lm_head"] = size


_PARAMETER_STYLES: dict[str, tuple[int, bool]] = {
    "colwise": (-2, False),
    "rowwise": (-1, False),
    "packed_colwise": (-2, True),
    "packed_rowwise": (-1, True),
}
"""Dimension of a parameter that a style divides, and whether two things lie in it behind each other."""


def _is_attention(module: Any) -> bool:
    return (
        hasattr(module, "head_dim")
        and hasattr(module, "config")
        and any(name in module._modules for name in ATTENTION_OUTPUTS)
    )


def _padded(weight: Any, *, start: int, part: int) -> Any:
    """Return rows `start` .. `start + part - 1` of a weight, zeros behind its end."""
    piece = weight.detach()[start : start + part]
    if piece.shape[0] < part:
        piece = nn.functional.pad(piece, (0, 0) * (piece.dim() - 1) + (0, part - piece.shape[0]))
    return piece.clone()


def _pattern(key: str) -> str:
    return re.escape(key).replace(r"\*", r"\d+")


Divide = Callable[[Any, Shard], Joined]
