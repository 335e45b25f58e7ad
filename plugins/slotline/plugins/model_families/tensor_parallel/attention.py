"""Division of attention by heads. Ranks share KV heads if there are fewer of them than ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from slotline.plugins.model_families.tensor_parallel import norms
from slotline.plugins.model_families.tensor_parallel.packed import PACKED, Heads
from slotline.plugins.model_families.tensor_parallel.pieces import Cut, Section, is_linear, rescale, share, sizes_of
from slotline.plugins.model_families.tensor_parallel.work import (
    UnknownPartError,
    Work,
    has_numbers,
    heads,
    parameters_of,
)

OUTPUTS = ("o_proj", "out_proj", "dense", "wo", "Wo", "out_lin", "c_proj")
APART = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("Wq", "Wk", "Wv"))
LATENT_QUERIES = ("q_b_proj", "q_gate_proj", "q_proj")
GATES = ("gate_proj", "g_proj", "r_proj")
"""Projections with one number, or one of each number of a head, for every head."""
WHOLE = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "indexer", "rotary_emb")
"""Parts of latent attention before the heads, and what has no heads."""
BY_HEAD = ("sinks", "gate_bias")
"""Parameters with one number for every head."""


def is_attention(module: nn.Module) -> bool:
    """Return True if a module projects queries, keys and values."""
    return _packed_of(module) is not None or _apart_of(module) is not None or _is_latent(module)


def divide(work: Work, name: str, module: Any, parent: Any) -> None:
    """Give a rank its heads of an attention module. A module with unknown parts stays whole.

    Raises:
        NegotiationError: if the heads cannot be divided.
    """
    try:
        at, output = _output_of(name, module, parent)
        find = _latent if _is_latent(module) else _packed if _packed_of(module) else _apart
        found, cuts = find(module, sizes_of(output)[0])
        extras = _extras(module, found, cuts, output)
    except UnknownPartError as unknown:
        work.leave(name, module, f"since {unknown}")
        return
    for child, cut in cuts.items():
        work.outputs(f"{name}.{child}", module._modules[child], cut)
    for divided in extras:
        divided(work, name)
    work.inputs(at, output, heads(found.count, found.value_size))
    _count(work, name, module, found)
    work.finish(module)


# which parts there are


def _packed_of(module: nn.Module) -> str | None:
    return next((one for one in PACKED if is_linear(module._modules.get(one))), None)


def _apart_of(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the projections of queries, keys and values. Layers that share keys have only the first."""
    for names in APART:
        there = tuple(one for one in names if is_linear(module._modules.get(one)))
        if there == names or (there and names[0] in there and hasattr(module, "head_dim")):
            return there
    return None


def _is_latent(module: nn.Module) -> bool:
    return is_linear(module._modules.get("kv_b_proj"))


def _output_of(name: str, module: nn.Module, parent: nn.Module) -> tuple[str, Any]:
    """Return the name and the module of the output projection, which may lie in a neighbour (BERT)."""
    for one in OUTPUTS:
        if is_linear(module._modules.get(one)):
            return f"{name}.{one}", module._modules[one]
    neighbour = parent._modules.get("output")
    dense = None if neighbour is None else neighbour._modules.get("dense")
    if is_linear(dense):
        return f"{name.rpartition('.')[0]}.output.dense", dense
    raise UnknownPartError("it has no output projection of a known name")


def _head_size(module: Any, inputs: int) -> int:
    for one in ("qk_head_dim", "head_dim", "attention_head_size", "head_size"):
        if isinstance(size := getattr(module, one, None), int):
            return size
    for one in ("n_heads", "num_heads", "num_attention_heads"):
        if isinstance(count := getattr(module, one, None), int):
            return inputs // count
    raise UnknownPartError("the size of its heads is not known")


def _apart(module: Any, inputs: int) -> tuple[Heads, dict[str, Cut]]:
    query, *others = _apart_of(module) or ()
    size = _head_size(module, inputs)
    value_size = getattr(module, "v_head_dim", None) or size
    count = inputs // value_size
    widths = {one: sizes_of(module._modules[one])[1] for one in (query, *others)}
    kv = widths[others[0]] // size if others else count
    if count * value_size != inputs or widths[query] % (count * size) or (others and kv * size != widths[others[0]]):
        raise UnknownPartError("its projections have other sizes than its heads")
    cuts = {query: heads(count, widths[query] // count)}
    for one in others:
        if widths[one] % kv:
            raise UnknownPartError("its projections have other sizes than its heads")
        cuts[one] = Cut.of(Section(kv, widths[one] // kv, repeats=True))
    return Heads(count, kv, size, value_size), cuts


def _latent(module: Any, inputs: int) -> tuple[Heads, dict[str, Cut]]:
    """Multi-head latent attention: the latents are whole on each rank, and the heads made of them are divided."""
    query = next(one for one in LATENT_QUERIES if is_linear(module._modules.get(one)))
    count = inputs // module.v_head_dim
    cuts = {one: heads(count, sizes_of(module._modules[one])[1] // count) for one in (query, "kv_b_proj")}
    return Heads(count, count, module.qk_head_dim, module.v_head_dim), cuts


def _packed(module: Any, inputs: int) -> tuple[Heads, dict[str, Cut]]:
    one = _packed_of(module)
    assert one is not None
    layout = PACKED[one].get(type(module).__name__.removeprefix("Bound"))
    if layout is None:
        raise UnknownPartError(f"the order of its {one} is not known")
    size = _head_size(module, inputs)
    found, cut = layout(module, inputs // size, size, sizes_of(module._modules[one])[1])
    if cut.size != sizes_of(module._modules[one])[1]:
        raise UnknownPartError("its projections have other sizes than its heads")
    return found, {one: cut}


# further parts

Extra = Callable[[Work, str], None]


def _extras(module: Any, found: Heads, cuts: Mapping[str, Cut], output: nn.Module) -> list[Extra]:
    """Return what divides the further parts of a module.

    Raises:
        UnknownPartError: if one is not known.
    """
    extras: list[Extra] = []
    for child, part in module._modules.items():
        if part is None or child in cuts or part is output or child in WHOLE or not has_numbers(part):
            continue
        extras += _child(module, child, part, found, cuts)
    for one in parameters_of(module):
        if one not in BY_HEAD or module._parameters[one].numel() != found.count:
            raise UnknownPartError(f"its {one} is not known")
        extras.append(lambda work, name, one=one: work.tensor(name, module, one, heads(found.count)))  # type: ignore[misc]
    return extras


def _child(module: Any, child: str, part: Any, found: Heads, cuts: Mapping[str, Cut]) -> list[Extra]:
    if child in GATES and is_linear(part) and sizes_of(part)[1] % found.count == 0:
        cut = heads(found.count, sizes_of(part)[1] // found.count)
        return [lambda work, name: work.outputs(f"{name}.{child}", part, cut)]
    if "norm" in child:
        return _norm(module, child, part, found)
    for letter in "qkv":
        if child == f"linear_{letter}_adapter_list":
            cut = cuts[f"{letter}_proj"]
            return [partial(_adapter, child, str(i), one[1], cut) for i, one in enumerate(part) if has_numbers(one)]
    raise UnknownPartError(f"its {child} is not known")


def _adapter(child: str, index: str, linear: Any, cut: Cut, work: Work, name: str) -> None:
    work.outputs(f"{name}.{child}.{index}.1", linear, cut)


def _norm(module: Any, child: str, part: Any, found: Heads) -> list[Extra]:
    """Divide a norm: of one head, of each head with its own weights, or of all heads together."""
    count = found.kv if child.startswith("k") else found.count
    cut = Cut.of(Section(count, repeats=child.startswith("k")))
    listed = part._modules.get("norms")
    if isinstance(listed, nn.ModuleList) and len(listed) == count:

        def pick(work: Work, name: str) -> None:
            own = cut.index(work.shard, f"{name}.{child}").tolist()
            part.norms = nn.ModuleList([listed[i] for i in own])

        return [pick]
    weight = part._parameters.get("weight")
    if weight is None or part._modules:
        raise UnknownPartError(f"its {child} is not known")
    if weight.dim() == 2 and weight.shape[0] == count:
        return [lambda work, name: work.tensor(f"{name}.{child}", part, "weight", cut)]
    if weight.numel() == found.size:
        return []
    whole = Cut.of(Section(count, found.size, repeats=child.startswith("k")))
    norms.check(part, child, whole)
    return [lambda work, name: norms.join(work, name, module, child, whole)]


class _Counting:
    """Configuration in which numbers of heads are those of a rank. All else is read from the model's own."""

    def __init__(self, config: Any, num_heads: int, num_kv_heads: int) -> None:
        self._config = config
        self.num_attention_heads, self.num_key_value_heads = num_heads, num_kv_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


def _count(work: Work, name: str, module: Any, found: Heads) -> None:
    """Let a module's attributes count a rank's heads."""
    own = share(Section(found.count), work.shard, name)
    kv = share(Section(found.kv, repeats=True), work.shard, name)
    if isinstance(slopes := module.__dict__.get("slopes"), tuple):
        module.slopes = slopes[work.shard.rank * own : (work.shard.rank + 1) * own]
    if isinstance(blocks := module.__dict__.get("mp_num"), int):
        module.mp_num = blocks // work.shard.size
    if _packed_of(module) == "qkv_proj" and getattr(module.config, "num_attention_heads", None) == found.count:
        module.config = _Counting(module.config, own, kv)  # read by the forward
    groups = found.count // found.kv
    rescale(
        module,
        (
            (("num_key_value_groups",), groups, own // kv),
            (("num_heads", "num_attention_heads", "n_heads", "n_head"), found.count, own),
            (("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads"), found.kv, kv),
            (
                ("split_size", "embed_dim", "all_head_size", "hidden_size", "dim", "d_model"),
                found.count * found.size,
                own * found.size,
            ),
            (("kv_dim",), found.kv * found.size, kv * found.size),
        ),
    )
