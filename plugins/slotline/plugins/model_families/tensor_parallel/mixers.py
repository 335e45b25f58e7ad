"""Division of mixers that keep a state, by their heads or channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from slotline.plugins.model_families.state_mixers import kinds, mixer_of
from slotline.plugins.model_families.tensor_parallel import norms
from slotline.plugins.model_families.tensor_parallel.pieces import Cut, Groups, Section, plain, rescale, share
from slotline.plugins.model_families.tensor_parallel.work import UnknownPartError, Work, heads

Recipe = Callable[[Work, str, Any], None]


def divide(work: Work, name: str, module: nn.Module) -> bool:
    """Give a rank its part of a module, if it keeps a state, and return whether it does.

    Raises:
        NegotiationError: if its heads or channels cannot be divided.
    """
    mixer = mixer_of(module)
    if mixer is None:
        return False
    recipe = RECIPES.get(type(mixer))
    try:
        if recipe is None:
            raise UnknownPartError("no rule divides its state")
        recipe(work, name, module)
    except UnknownPartError as unknown:
        work.leave(name, module, f"since {unknown}")
        return True
    work.finish(module)
    return True


def _mamba2(work: Work, name: str, module: Any) -> None:
    """Mamba-2: heads with their gate, x and dt. Ranks share groups of B and C if there are fewer."""
    inner = heads(module.num_heads, module.head_dim).sections
    groups = Section(module.n_groups, module.ssm_state_size, repeats=True)
    mixed, count = (*inner, groups, groups), Section(module.num_heads)
    size, num_groups = module.intermediate_size, module.n_groups
    own, own_groups = share(count, work.shard, name), share(groups, work.shard, name)
    if module.intermediate_size != inner[0].size:
        raise UnknownPartError("its sizes do not fit its heads")
    whole_norm = hasattr(module, "norm") and getattr(module, "mamba_rms_norm", True)
    if whole_norm:
        group = getattr(module.norm, "group_size", size // getattr(module.norm, "n_groups", 1))
        norms.check(module.norm, "norm", Cut(inner))
    projected = Cut((*inner, *mixed, count))
    work.outputs(f"{name}.in_proj", module.in_proj, projected)
    work.convolution(f"{name}.conv1d", module.conv1d, Cut(mixed))
    for one in ("A_log", "D", "dt_bias"):
        work.tensor(name, module, one, Cut((count,)))
    if getattr(module, "mup_vector", None) is not None:
        work.tensor(name, module, "mup_vector", projected, -1)
    if whole_norm:
        norms.join(work, name, module, "norm", Cut(inner), group)
    work.inputs(f"{name}.out_proj", module.out_proj, Cut(inner))
    module.num_heads, module.n_groups, module.intermediate_size = own, own_groups, own * module.head_dim
    module.conv_dim = module.conv1d.in_channels
    rescale(
        module,
        ((("groups_time_state_size",), num_groups * module.ssm_state_size, own_groups * module.ssm_state_size),),
    )


def _mamba1(work: Work, name: str, module: Any) -> None:
    """Mamba: channels. What dt, B and C are made of is summed over the ranks."""
    cut = plain(module.intermediate_size)
    work.outputs(f"{name}.in_proj", module.in_proj, Cut(cut.sections * 2))
    work.convolution(f"{name}.conv1d", module.conv1d, cut)
    work.inputs(f"{name}.x_proj", module.x_proj, cut, joined=False)
    work.joined.within.append(f"{name}.x_proj")
    work.outputs(f"{name}.dt_proj", module.dt_proj, cut)
    for one in ("A_log", "D"):
        work.tensor(name, module, one, cut)
    work.inputs(f"{name}.out_proj", module.out_proj, cut)
    module.intermediate_size = module.out_proj.in_features


def _headed_mamba1(work: Work, name: str, module: Any) -> None:
    """Zamba: heads, in whose channels x and gate alternate."""
    count, size = module.n_mamba_heads, module.mamba_head_dim
    work.outputs(f"{name}.in_proj", module.in_proj, heads(count, 2 * size))
    work.convolution(f"{name}.conv1d", module.conv1d, heads(count, size))
    for one in ("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"):
        work.tensor(name, module, one, heads(count))
    work.inputs(f"{name}.out_proj", module.out_proj, heads(count, size))
    module.n_mamba_heads, module.intermediate_size = count // work.shard.size, module.out_proj.in_features


def _short_convolution(work: Work, name: str, module: Any) -> None:
    cut = plain(module.conv.in_channels)
    work.outputs(f"{name}.in_proj", module.in_proj, Cut(cut.sections * 3))
    work.convolution(f"{name}.conv", module.conv, cut)
    work.inputs(f"{name}.out_proj", module.out_proj, cut)


def _delta(work: Work, name: str, module: Any) -> tuple[Section, Section, Cut]:
    """Divide what gated delta nets share, and return the key heads, the value heads and the cut of one number each."""
    keys = Section(module.num_k_heads, module.head_k_dim, repeats=True)
    values = Section(module.num_v_heads, module.head_v_dim)
    each = heads(module.num_v_heads)
    own_k, own_v = share(keys, work.shard, name), share(values, work.shard, name)
    work.convolution(f"{name}.conv1d", module.conv1d, Cut.of(keys, keys, values))
    for one in ("A_log", "dt_bias"):
        work.tensor(name, module, one, each)
    module.num_k_heads, module.num_v_heads = own_k, own_v
    module.key_dim, module.value_dim = own_k * module.head_k_dim, own_v * module.head_v_dim
    rescale(module, ((("conv_dim",), 2 * keys.size + values.size, module.conv1d.in_channels),))
    return keys, values, each


def _gated_delta(work: Work, name: str, module: Any) -> None:
    """Qwen3-Next: key heads, each with its values, gates, strengths and decays."""
    keys, values, _ = _delta(work, name, module)
    ratio = values.count // keys.count
    shared, own = Section(1, keys.unit, repeats=True), Section(ratio, values.unit)
    packed = Groups((shared, shared, own, own), keys.count)
    work.outputs(f"{name}.in_proj_qkvz", module.in_proj_qkvz, packed)
    work.outputs(f"{name}.in_proj_ba", module.in_proj_ba, Groups((Section(ratio), Section(ratio)), keys.count))
    work.inputs(f"{name}.out_proj", module.out_proj, Cut.of(values))


def _divided_delta(work: Work, name: str, module: Any) -> None:
    """Qwen3.5: projections for queries, keys and values, for gates, and for each number of a head."""
    keys, values, each = _delta(work, name, module)
    work.outputs(f"{name}.in_proj_qkv", module.in_proj_qkv, Cut.of(keys, keys, values))
    work.outputs(f"{name}.in_proj_z", module.in_proj_z, Cut.of(values))
    for one in ("in_proj_b", "in_proj_a"):
        work.outputs(f"{name}.{one}", getattr(module, one), each)
    work.inputs(f"{name}.out_proj", module.out_proj, Cut.of(values))


def _apart_delta(work: Work, name: str, module: Any) -> None:
    """OLMo Hybrid: a projection for each part."""
    keys, values, each = _delta(work, name, module)
    for one, cut in (
        ("q_proj", Cut.of(keys)),
        ("k_proj", Cut.of(keys)),
        ("v_proj", Cut.of(values)),
        ("g_proj", Cut.of(values)),
        ("a_proj", each),
        ("b_proj", each),
    ):
        work.outputs(f"{name}.{one}", getattr(module, one), cut)
    work.inputs(f"{name}.o_proj", module.o_proj, Cut.of(values))


def _kimi_delta(work: Work, name: str, module: Any) -> None:
    """Kimi Linear and Bailing hybrid: heads, with a gate that forgets by channels."""
    count, size = module.num_heads, module.head_dim
    wide, gate = heads(count, size), module.forget_gate
    for one in ("q_proj", "k_proj", "v_proj"):
        work.outputs(f"{name}.{one}", getattr(module, one), wide)
    work.convolution(f"{name}.conv1d", module.conv1d, Cut(wide.sections * 3))
    work.outputs(f"{name}.b_proj", module.b_proj, heads(count))
    closing = "g_b_proj" if hasattr(module, "g_b_proj") else "g_proj"
    work.outputs(f"{name}.{closing}", getattr(module, closing), wide)
    opening = "f_b_proj" if hasattr(gate, "f_b_proj") else "f_proj"
    work.outputs(f"{name}.forget_gate.{opening}", getattr(gate, opening), wide)
    work.tensor(f"{name}.forget_gate", gate, "dt_bias", wide)
    work.tensor(f"{name}.forget_gate", gate, "A_log", heads(count), 2 if gate.A_log.dim() == 4 else 0)
    work.inputs(f"{name}.o_proj", module.o_proj, wide)
    own = count // work.shard.size
    for one in (module, gate):
        one.num_heads = own
        rescale(one, ((("qkv_dim", "projection_size", "key_dim", "value_dim"), count * size, own * size),))


def _lightning(work: Work, name: str, module: Any) -> None:
    """MiniMax-01: heads with decays of their own, and a norm over all of them."""
    count, size = module.num_attention_heads, module.head_dim
    wide = heads(count, size)
    norms.check(module.norm, "norm", wide)
    work.outputs(f"{name}.qkv_proj", module.qkv_proj, heads(count, 3 * size))
    work.outputs(f"{name}.output_gate", module.output_gate, wide)
    for one in ("slope_rate", "query_decay", "key_decay"):
        work.tensor(name, module, one, heads(count))
    work.tensor(name, module, "diagonal_decay", heads(count), -3)
    norms.join(work, name, module, "norm", wide)
    work.inputs(f"{name}.out_proj", module.out_proj, wide)
    module.num_attention_heads = count // work.shard.size


def _rg_lru(work: Work, name: str, module: Any) -> None:
    """RecurrentGemma: blocks of channels whose gates look at one block."""
    unit = module.rg_lru
    count, size = unit.num_attention_heads, unit.block_width
    wide = heads(count, size)
    for one in ("linear_x", "linear_y"):
        work.outputs(f"{name}.{one}", getattr(module, one), wide)
    work.convolution(f"{name}.conv_1d", module.conv_1d, wide)
    for gate in ("input_gate", "recurrent_gate"):
        for kind in ("weight", "bias"):
            work.tensor(f"{name}.rg_lru", unit, f"{gate}_{kind}", heads(count))
    work.tensor(f"{name}.rg_lru", unit, "recurrent_param", wide)
    work.inputs(f"{name}.linear_out", module.linear_out, wide)
    unit.num_attention_heads = count // work.shard.size
    module.lru_width = module.linear_out.in_features


RECIPES: Mapping[type, Recipe] = {
    kinds.ApartDeltaMixer: _apart_delta,
    kinds.DividedDeltaMixer: _divided_delta,
    kinds.FalconH1Mixer: _mamba2,
    kinds.GatedDeltaMixer: _gated_delta,
    kinds.HeadedMamba1Mixer: _headed_mamba1,
    kinds.KimiDeltaMixer: _kimi_delta,
    kinds.LightningMixer: _lightning,
    kinds.Mamba1Mixer: _mamba1,
    kinds.Mamba2Mixer: _mamba2,
    kinds.RgLruMixer: _rg_lru,
    kinds.ShortConvMixer: _short_convolution,
}
"""Adapter of a mixer -> what divides it."""
