"""State layers by their definition: one request, one token after another.

The formulas and the names of inputs, facts and tensors are those of `slotline.registry.contracts.state`. With `EXACT`
the result is exact. With `rounding` it is the same recurrence with as much rounding as the contract allows. Its
distance from the exact result is the yardstick for a plugin's error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import frozen
from torch import Tensor

from slotline.registry.contracts.state import StateLayer, kind_of

Tensors = Mapping[str, Tensor]


@frozen
class Arithmetic:
    """Precision of the arithmetic.

    Attributes:
        compute: dtype of all arithmetic.
        operand: dtype that operands of products are rounded to, None for no rounding.
        state: dtype that a recurrent state is rounded to after each token, None for no rounding.
    """

    compute: torch.dtype
    operand: torch.dtype | None = None
    state: torch.dtype | None = None

    def rounded(self, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return a value rounded to a dtype, if given."""
        return value if dtype is None else value.to(dtype).to(self.compute)

    def product_operand(self, value: Tensor) -> Tensor:
        """Return a value rounded like an operand of a product."""
        return self.rounded(value, self.operand)

    def stored(self, value: Tensor) -> Tensor:
        """Return a value rounded like a stored state."""
        return self.rounded(value, self.state)


EXACT = Arithmetic(torch.float64)


def rounding(activation: torch.dtype, state: torch.dtype) -> Arithmetic:
    """Return the arithmetic that the contract allows for a dtype pair: float32 with rounded operands and states."""
    return Arithmetic(torch.float32, activation, state)


def token_inputs(layer: StateLayer, inputs: Tensors) -> list[str]:
    """Return the inputs that have one row per token."""
    names = (*kind_of(layer).token_inputs, "z")
    return [name for name in names if name in inputs]


def zero_state(layer: StateLayer, arithmetic: Arithmetic = EXACT) -> dict[str, Tensor]:
    """Return the state of a request before its first token."""
    return {spec.name: torch.zeros(spec.shape, dtype=arithmetic.compute) for spec in layer.tensors}


def advance(
    layer: StateLayer, inputs: Tensors, state: Tensors, arithmetic: Arithmetic = EXACT
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the unrounded outputs [T, ...] of one request's T tokens, and the state after them.

    `state` is not modified.
    """
    step = _STEPS.get(layer.state_kind, _own_step)
    token_wise = token_inputs(layer, inputs)
    wide = {name: value.to("cpu", arithmetic.compute) for name, value in inputs.items()}
    wide |= {name: _for_each_head(layer, wide[name]) for name in _GROUPED.get(layer.state_kind, ())}
    current = dict(state)
    outputs = []
    for t in range(wide[token_wise[0]].shape[0]):
        token = {name: value[t] if name in token_wise else value for name, value in wide.items()}
        output, current = step(layer, token, current, arithmetic)
        outputs.append(output)
    return (torch.stack(outputs) if outputs else torch.zeros(0)), current


def log_decay(layer: StateLayer, inputs: Tensors) -> float:
    """Return the largest sum of |log decay| over the tokens in any head or channel.

    It measures the condition of a chunked form, which takes differences of cumulated log decays. Its relative error
    grows with their size.
    """
    wide = {name: value.to("cpu", torch.float64) for name, value in inputs.items()}
    if layer.state_kind == "gated_delta" or (layer.own_kind is not None and "g" in wide):
        return _peak(wide["g"])
    if layer.state_kind == "mamba1":
        return _peak(_time_step(layer, wide)[..., None] * wide["A"])
    if layer.state_kind == "mamba2":
        return _peak(_time_step(layer, wide) * wide["A"])
    return 0.0


def _own_step(
    layer: StateLayer, token: Tensors, state: Tensors, arithmetic: Arithmetic
) -> tuple[Tensor, dict[str, Tensor]]:
    """Advance a layer of a plugin's own kind by the plugin's definition."""
    step = kind_of(layer).step
    assert step is not None
    output, after = step(layer.facts, {n: arithmetic.product_operand(x) for n, x in token.items()}, state)
    return output, {name: arithmetic.stored(value) for name, value in after.items()}


def _peak(steps: Tensor) -> float:
    return float(steps.sum(0).abs().max()) if steps.numel() else 0.0


def _short_conv(
    layer: StateLayer, token: Tensors, state: Tensors, arithmetic: Arithmetic
) -> tuple[Tensor, dict[str, Tensor]]:
    window = torch.cat([state["conv"], token["x"][:, None]], dim=1)  # [C, W], oldest first
    output = (window * token["weight"]).sum(1)
    if "bias" in token:
        output = output + token["bias"]
    if layer.facts["activation"] == "silu":
        output = _silu(output)
    return output, {"conv": window[:, 1:]}


def _mamba1(
    layer: StateLayer, token: Tensors, state: Tensors, arithmetic: Arithmetic
) -> tuple[Tensor, dict[str, Tensor]]:
    d = _time_step(layer, token)  # [D]
    increment = arithmetic.product_operand(d * token["x"])[:, None] * token["B"]  # [D, N]
    ssm = arithmetic.stored(torch.exp(d[:, None] * token["A"]) * state["ssm"] + increment)
    output = (arithmetic.product_operand(ssm) * token["C"]).sum(-1)
    return _skip_and_gate(output, token, token.get("D")), {"ssm": ssm}


def _mamba2(
    layer: StateLayer, token: Tensors, state: Tensors, arithmetic: Arithmetic
) -> tuple[Tensor, dict[str, Tensor]]:
    d = _time_step(layer, token)  # [H]
    scaled = arithmetic.product_operand(d[:, None] * token["x"])  # [H, P]
    decay = torch.exp(d * token["A"])[:, None, None]
    ssm = arithmetic.stored(decay * state["ssm"] + scaled[:, :, None] * token["B"][:, None, :])
    output = (arithmetic.product_operand(ssm) * token["C"][:, None, :]).sum(-1)
    skip = token["D"][:, None] if "D" in token else None
    return _skip_and_gate(output, token, skip), {"ssm": ssm}


def _gated_delta(
    layer: StateLayer, token: Tensors, state: Tensors, arithmetic: Arithmetic
) -> tuple[Tensor, dict[str, Tensor]]:
    q, k = token["q"], token["k"]
    if layer.facts["qk_l2norm"]:
        q, k = _unit(q), _unit(k)
    q = arithmetic.product_operand(q * layer.facts["scale"])  # [Hv, K]
    k = arithmetic.product_operand(k)
    decayed = torch.exp(token["g"])[:, None, None] * state["delta"]  # [Hv, K, V]
    predicted = (arithmetic.product_operand(decayed) * k[:, :, None]).sum(1)  # [Hv, V]
    correction = arithmetic.product_operand(token["beta"][:, None] * (token["v"] - predicted))
    delta = arithmetic.stored(decayed + k[:, :, None] * correction[:, None, :])
    return (arithmetic.product_operand(delta) * q[:, :, None]).sum(1), {"delta": delta}


def _for_each_head(layer: StateLayer, grouped: Tensor) -> Tensor:
    """Expand [T, groups, N] to [T, heads, N]. Head i takes group i // (heads // groups)."""
    heads = layer.facts["num_heads" if layer.state_kind == "mamba2" else "num_v_heads"]
    return grouped[:, torch.arange(heads) // (heads // grouped.shape[1])]


def _time_step(layer: StateLayer, inputs: Tensors) -> Tensor:
    d = inputs["dt"]
    if "dt_bias" in inputs:
        d = d + inputs["dt_bias"]
    if layer.facts["dt_softplus"]:
        d = torch.logaddexp(d, torch.zeros_like(d))
    low, high = layer.facts.get("dt_limit", (float("-inf"), float("inf")))
    return d.clamp(low, high)


def _skip_and_gate(output: Tensor, token: Tensors, skip: Tensor | None) -> Tensor:
    if skip is not None:
        output = output + skip * token["x"]
    return output * _silu(token["z"]) if "z" in token else output


def _silu(value: Tensor) -> Tensor:
    return value * torch.sigmoid(value)


def _unit(value: Tensor) -> Tensor:
    return value / torch.sqrt((value * value).sum(-1, keepdim=True) + 1e-6)


_STEPS: Mapping[str, Callable[[StateLayer, Tensors, Tensors, Arithmetic], tuple[Tensor, dict[str, Tensor]]]] = {
    "short_conv": _short_conv,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gated_delta": _gated_delta,
}
_GROUPED: Mapping[str, tuple[str, ...]] = {"mamba2": ("B", "C"), "gated_delta": ("q", "k")}
