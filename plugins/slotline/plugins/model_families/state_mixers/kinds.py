"""Adapters of the families of mixers to states.

Projections and norms are transformers' own modules, and the parts with a state call `advance`. One adapter is used for
all mixers that have the same parts under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from slotline.plugins.model_families.state_mixers.slot import StateSlot, conv_of, layer_of, own_layer_of, rate
from slotline.registry import kimi_delta
from slotline.registry.contracts.state import StateLayer

Given = Mapping[str, Any]


class Mixer(Protocol):
    """An adapter of mixer modules.

    Attributes:
        in_pair: True if the module returns its output and, like attention, a second value.
        parts: attributes by which a module of an unlisted class is known. Empty for an adapter of listed classes alone.
    """

    in_pair: bool = False
    parts: frozenset[str] = frozenset()

    def layers(self, name: str, module: Any) -> tuple[StateLayer, ...]:
        """Return the state layers of a module of that name, in call order."""
        ...

    def forward(self, module: Any, slot: StateSlot, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        """Return the module's output [T, hidden_size] for flattened tokens [T, hidden_size].

        `given` are further arguments from transformers.
        """
        ...


class Mamba2Mixer(Mixer):
    """Mamba-2: one projection to gate, convolved x, B, C, and dt, and a gated norm after the scan.

    A limited time step (Zamba2) holds for every token. transformers 5.23 ignores the limit for single tokens, so its
    text depends on the cache. Without a cache it agrees with ours.
    """

    def layers(self, name: str, module: Any) -> tuple[StateLayer, ...]:
        low, high = module.time_step_limit or (0.0, math.inf)
        limited = low > 0 or not math.isinf(high)  # a softplus is never below 0
        ssm = layer_of(
            name,
            "mamba2",
            num_heads=module.num_heads,
            head_size=module.head_dim,
            num_groups=module.n_groups,
            state_size=module.ssm_state_size,
            dt_softplus=True,
            **({"dt_limit": (float(low), float(high))} if limited else {}),
        )
        return (conv_of(name, module.conv1d, module.activation), ssm)

    def forward(self, module: Any, slot: StateSlot, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        gate, mixed, dt = self.project(module, hidden).split(
            [module.intermediate_size, module.conv_dim, module.num_heads], dim=-1
        )
        x, b, c = self.split_convolved(module, slot.convolve(module.conv1d, mixed))
        inputs = {"x": x, "dt": dt, "A": rate(module.A_log), "B": b, "C": c}
        inputs |= {"D": module.D.float(), "dt_bias": module.dt_bias.float()}
        return module.out_proj(self.gated(module, slot, inputs, gate))  # type: ignore[no-any-return]

    def project(self, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return the projection [T, intermediate_size + conv_dim + num_heads]."""
        return module.in_proj(hidden)  # type: ignore[no-any-return]

    def split_convolved(self, module: Any, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x [T, H, P], B and C [T, G, N] as views of [T, conv_dim]."""
        both = module.n_groups * module.ssm_state_size
        x, b, c = mixed.split([module.intermediate_size, both, both], dim=-1)
        per_head, per_group = (module.num_heads, module.head_dim), (module.n_groups, module.ssm_state_size)
        return x.unflatten(-1, per_head), b.unflatten(-1, per_group), c.unflatten(-1, per_group)

    def gated(self, module: Any, slot: StateSlot, inputs: dict[str, torch.Tensor], gate: torch.Tensor) -> torch.Tensor:
        """Return the scan's output [T, intermediate_size], gated and normed."""
        return module.norm(slot.recur(inputs).flatten(1)[None], gate[None])[0]  # type: ignore[no-any-return]


class FalconH1Mixer(Mamba2Mixer):
    """Falcon-H1: multipliers around the projection. Without its norm the gate is part of the scan."""

    def project(self, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = module.in_proj((hidden * module.ssm_in_multiplier)[None]) * module.mup_vector
        return projected[0]

    def gated(self, module: Any, slot: StateSlot, inputs: dict[str, torch.Tensor], gate: torch.Tensor) -> torch.Tensor:
        if module.mamba_rms_norm:
            return super().gated(module, slot, inputs, gate)
        return slot.recur({**inputs, "z": gate.unflatten(-1, (module.num_heads, module.head_dim))}).flatten(1)


class Mamba1Mixer(Mixer):
    """Mamba: x and gate from one projection, dt, B and C from the convolved x. Some models norm these three."""

    def layers(self, name: str, module: Any) -> tuple[StateLayer, ...]:
        sizes = {"channels": module.intermediate_size, "state_size": module.ssm_state_size}
        ssm = layer_of(name, "mamba1", **sizes, dt_softplus=True)
        return (conv_of(name, module.conv1d, module.activation), ssm)

    def forward(self, module: Any, slot: StateSlot, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        x, gate = module.in_proj(hidden).chunk(2, dim=-1)
        x = slot.convolve(module.conv1d, x)
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        dt, b, c = module.x_proj(x).split(sizes, dim=-1)
        if hasattr(module, "dt_layernorm"):
            dt, b, c = module.dt_layernorm(dt), module.b_layernorm(b), module.c_layernorm(c)
        inputs = {"x": x, "dt": module.dt_proj(dt), "A": rate(module.A_log), "B": b, "C": c}
        scanned = slot.recur({**inputs, "D": module.D.float(), "z": gate})
        return module.out_proj(scanned)  # type: ignore[no-any-return]


class ShortConvMixer(Mixer):
    """LFM2: a convolution between two gates."""

    parts = frozenset({"in_proj", "conv", "out_proj", "conv_kernel_size"})

    def layers(self, name: str, module: Any) -> tuple[StateLayer, ...]:
        return (conv_of(name, module.conv, "none"),)

    def forward(self, module: Any, slot: StateSlot, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        before, after, x = module.in_proj(hidden).chunk(3, dim=-1)
        return module.out_proj(after * slot.convolve(module.conv, before * x))  # type: ignore[no-any-return]


class GatedDeltaMixer(Mixer):
    """Qwen3-Next: query, key and value convolved together, decay and strength from a projection of their own."""

    parts = frozenset({"in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj", "A_log", "dt_bias"})

    def layers(self, name: str, module: Any) -> tuple[StateLayer, ...]:
        delta = layer_of(
            name,
            "gated_delta",
            num_k_heads=module.num_k_heads,
            num_v_heads=module.num_v_heads,
            head_size_k=module.head_k_dim,
            head_size_v=module.head_v_dim,
            qk_l2norm=True,
            scale=module.head_k_dim**-0.5,
        )
        return (conv_of(name, module.conv1d, module.activation), delta)

    def forward(self, module: Any, slot: StateSlot, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        mixed, z, b, a = self.project(module, hidden)
        mixed = slot.convolve(module.conv1d, mixed)
        q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        inputs = {
            "q": q.unflatten(-1, (module.num_k_heads, module.head_k_dim)),
            "k": k.unflatten(-1, (module.num_k_heads, module.head_k_dim)),
            "v": v.unflatten(-1, (module.num_v_heads, module.head_v_dim)),
            "g": rate(module.A_log) * F.softplus(a.float() + module.dt_bias),
            "beta": self.strength(module, b),
        }
        return self.close(module, slot.recur(inputs).flatten(0, 1), z.reshape(-1, module.head_v_dim), len(hidden))

    def project(self, module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v side by side [T, all sizes], the gate z, and the projections b and a [T, num_v_heads]."""
        projected = module.in_proj_qkvz(hidden[None]), module.in_proj_ba(hidden[None])
        q, k, v, z, b, a = (part[0] for part in module.fix_query_key_value_ordering(*projected))
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1), z, b, a

    def strength(self, module: Any, b: torch.Tensor) -> torch.Tensor:
        """Return beta [T, num_v_heads]."""
        return b.sigmoid()

    def close(self, module: Any, out: torch.Tensor, z: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the module's output of the rule's and the gate [T * num_v_heads, head_size_v]."""
        return module.out_proj(module.norm(out, z).view(num_tokens, -1))  # type: ignore[no-any-return]


class DividedDeltaMixer(GatedDeltaMixer):
    """Qwen3.5 and LARA Mini: the gate, the decay and the strength each have a projection."""

    parts = frozenset({"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "norm", "out_proj", "A_log"})

    def project(self, module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            module.in_proj_qkv(hidden),
            module.in_proj_z(hidden),
            module.in_proj_b(hidden),
            module.in_proj_a(hidden),
        )


class ApartDeltaMixer(GatedDeltaMixer):
    """OLMo Hybrid: a projection for each part. The strength may reach 2, so that states can change their sign."""

    parts = frozenset({"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "conv1d", "o_norm", "A_log"})

    def project(self, module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed = torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], dim=-1)
        return mixed, module.g_proj(hidden), module.b_proj(hidden), module.a_proj(hidden)

    def strength(self, module: Any, b: torch.Tensor) -> torch.Tensor:
        return b.sigmoid() * 2.0 if module.allow_neg_eigval else b.sigmoid()

    def close(self, module: Any, out: torch.Tensor, z: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return module.o_proj(module.o_norm(out, z).view(num_tokens, -1))  # type: ignore[no-any-return]


class KimiDeltaMixer(Mixer):
    """Kimi Linear and Bailing hybrid: the delta rule with a decay for each channel, from a gate of two projections."""

    parts = frozenset({"q_proj", "k_proj", "v_proj", "b_proj", "conv1d", "forget_gate", "o_norm", "o_proj"})

    def layers(self, name: str, module: Any) -> tuple[StateLayer, ...]:
        size = module.head_dim
        sizes = {"num_heads": module.num_heads, "head_size_k": size, "head_size_v": size, "scale": size**-0.5}
        return (
            conv_of(name, module.conv1d, module.activation),
            own_layer_of(name, kimi_delta.NAME, kimi_delta.KDA, **sizes),
        )

    def forward(self, module: Any, slot: StateSlot, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        mixed = torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], dim=-1)
        mixed = slot.convolve(module.conv1d, mixed).unflatten(-1, (3, module.num_heads, module.head_dim))
        q, k, v = mixed.unbind(1)
        beta = module.b_proj(hidden).sigmoid()
        out = slot.recur({"q": q, "k": k, "v": v, "g": module.forget_gate(hidden[None])[0], "beta": beta})
        gate = module.g_b_proj(module.g_a_proj(hidden)) if hasattr(module, "g_a_proj") else module.g_proj(hidden)
        normed = module.o_norm(out, gate.view_as(out))
        return module.o_proj(normed.flatten(1))  # type: ignore[no-any-return]


class LightningMixer(Mixer):
    """MiniMax-01: linear attention with a fixed decay of each head (arXiv 2501.08313, section 2.2).

    Its S = exp(-slope) * S + k (outer) v is a Mamba-2 scan with a group of each head, time steps of 1, A = -slope, x =
    v, B = k and C = q.
    """

    parts = frozenset({"qkv_proj", "output_gate", "slope_rate", "norm", "out_proj", "act_fn"})
    in_pair = True

    def layers(self, name: str, module: Any) -> tuple[StateLayer, ...]:
        heads, size = module.num_attention_heads, module.head_dim
        sizes = {"num_heads": heads, "head_size": size, "num_groups": heads, "state_size": size}
        return (layer_of(name, "mamba2", **sizes, dt_softplus=False),)

    def forward(self, module: Any, slot: StateSlot, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        qkv = module.act_fn(module.qkv_proj(hidden)).unflatten(-1, (module.num_attention_heads, -1))
        q, k, v = qkv.split(module.head_dim, dim=-1)  # [T, H, head_dim]
        ones = v.new_ones(v.shape[:2])
        out = slot.recur({"x": v, "dt": ones, "A": -module.slope_rate.flatten().float(), "B": k, "C": q})
        gated = F.sigmoid(module.output_gate(hidden)) * module.norm(out.flatten(1))
        return module.out_proj(gated)  # type: ignore[no-any-return]


class HeadedMamba1Mixer(Mixer):
    """Zamba: Mamba with several heads, which have time steps, B and C of their own. Each is a state layer."""

    parts = frozenset({"x_proj_weight", "dt_proj_weight", "dt_proj_bias", "n_mamba_heads", "conv1d", "A_log"})

    def layers(self, name: str, module: Any) -> tuple[StateLayer, ...]:
        sizes = {"channels": module.mamba_head_dim, "state_size": module.ssm_state_size}
        heads = (layer_of(f"{name}.head{i}", "mamba1", **sizes, dt_softplus=True) for i in range(module.n_mamba_heads))
        return (conv_of(name, module.conv1d, module.activation), *heads)

    def forward(self, module: Any, slot: StateSlot, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        heads, size = module.n_mamba_heads, module.mamba_head_dim
        projected = module.in_proj(hidden).view(len(hidden), -1, 2)
        x, gate = projected[..., 0], projected[..., 1].unflatten(-1, (heads, size))
        x = slot.convolve(module.conv1d, x.contiguous()).unflatten(-1, (heads, size))  # [T, heads, size]
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        outputs = []
        for head in range(heads):
            own = x[:, head].contiguous()
            dt, b, c = (own @ module.x_proj_weight[head].T).split(sizes, dim=-1)
            inputs = {"x": own, "dt": dt @ module.dt_proj_weight[head].T, "A": rate(module.A_log[head]), "B": b, "C": c}
            inputs |= {"D": module.D[head].float(), "dt_bias": module.dt_proj_bias[head].float()}
            outputs.append(slot.recur({**inputs, "z": gate[:, head].contiguous()}, 1 + head))
        return module.out_proj(torch.cat(outputs, dim=-1))  # type: ignore[no-any-return]


class RgLruMixer(Mixer):
    """RecurrentGemma: a convolution, then a real-gated linear recurrent unit (Griffin, arXiv 2402.19427, section 2.4).

    Its h = a * h + sqrt(1 - a^2) * i * x, with a = exp(-d) and d = 8 * r * softplus(L), is a Mamba scan with states of
    one number each, time steps d, A = -1, B = C = 1 and the inputs divided by d. A text's first token is taken whole.
    """

    in_pair = True
    SHARPNESS = 8.0
    SHORTEST = 1e-6
    """A time step that keeps all of a state, for gates that are closed to the last bit."""

    def layers(self, name: str, module: Any) -> tuple[StateLayer, ...]:
        scan = layer_of(name, "mamba1", channels=module.lru_width, state_size=1, dt_softplus=False)
        return (conv_of(name, module.conv_1d, "none"), scan)

    def forward(self, module: Any, slot: StateSlot, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        unit, beginning = module.rg_lru, (given["position_ids"][0] == 0)[:, None]
        x = slot.convolve(module.conv_1d, module.linear_x(hidden))  # [T, lru_width]
        opened = self._gate(x, unit.input_gate_weight, unit.input_gate_bias)
        recurrent = self._gate(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        step = self.SHARPNESS * recurrent * F.softplus(unit.recurrent_param.float())  # [T, lru_width] float32
        step = torch.where(beginning, 1.0, step.clamp_min(self.SHORTEST)).to(x.dtype)
        share = torch.where(beginning, 1.0, (1 - torch.exp(-2 * step.float())).sqrt())
        ones = x.new_ones((len(x), 1))
        inputs = {"x": (x * opened * share / step.float()).to(x.dtype), "dt": step, "B": ones, "C": ones}
        scanned = slot.recur({**inputs, "A": -torch.ones_like(unit.recurrent_param, dtype=torch.float32)[:, None]})
        return module.linear_out(scanned * module.act_fn(module.linear_y(hidden)))  # type: ignore[no-any-return]

    def _gate(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return a gate [T, lru_width] float32 of x [T, lru_width], weight [blocks, width, width] and a bias."""
        blocks = torch.baddbmm(bias[:, None], x.unflatten(-1, bias.shape).transpose(0, 1), weight)
        return blocks.transpose(0, 1).flatten(1).float().sigmoid()
