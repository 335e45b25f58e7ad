"""Division of MLPs by their intermediate numbers, found by the usual names of their projections."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import nn

from slotline.plugins.model_families.tensor_parallel import norms
from slotline.plugins.model_families.tensor_parallel.pieces import halves, is_linear, plain, rescale, sizes_of
from slotline.plugins.model_families.tensor_parallel.work import UnknownPartError, Work, has_numbers, parameters_of


@frozen
class Names:
    """Projections of an MLP.

    Attributes:
        inner: those to intermediate numbers.
        output: the one back.
        packed: whether gate and up lie behind each other in one projection.
    """

    inner: tuple[str, ...]
    output: str
    packed: bool = False


KNOWN = (
    Names(("gate_proj", "up_proj"), "down_proj"),
    Names(("gate_up_proj",), "down_proj", packed=True),
    Names(("w1", "w3"), "w2"),
    Names(("w1", "v1"), "w2"),
    Names(("up_proj",), "down_proj"),
    Names(("c_fc",), "c_proj"),
    Names(("fc1",), "fc2"),
    Names(("fc_in",), "fc_out"),
    Names(("lin1",), "lin2"),
    Names(("dense_h_to_4h",), "dense_4h_to_h"),
    Names(("input_linear",), "output_linear", packed=True),
    Names(("Wi",), "Wo", packed=True),
    Names(("0",), "2"),
)
SUB_NORMS = ("ffn_sub_norm",)
ADAPTERS = "gate_up_proj_adapter_list"
SIZES = ("intermediate_size", "ffn_dim", "inner_dim")
SMALL = ("GateMLP", "RouterMLP", "Laurel")
"""In the names of classes whose numbers are too few to divide."""


def divide(work: Work, name: str, module: Any, *, joined: bool = True) -> bool:
    """Give a rank its intermediate numbers of a module, if it is an MLP, and return whether it is one.

    Raises:
        NegotiationError: if they cannot be divided.
    """
    if any(word in type(module).__name__ for word in SMALL):
        return False
    for names in KNOWN:
        inner, output = [module._modules.get(one) for one in names.inner], module._modules.get(names.output)
        if names.output == "2" and (type(module) is not nn.Sequential or has_numbers(module._modules.get("1", module))):
            continue
        if not all(is_linear(one) and one not in work.done for one in (*inner, output)):
            continue
        if _fits(names, inner, output):
            try:
                _divide(work, name, module, names, joined=joined)
            except UnknownPartError as unknown:
                work.leave(name, module, f"since {unknown}")
                return False
            return True
    return _divide_apart(work, name, module)


def _fits(names: Names, inner: list[Any], output: Any) -> bool:
    width = sizes_of(output)[0] * (2 if names.packed else 1)
    return all(sizes_of(one)[1] == width for one in inner)


def _divide(work: Work, name: str, module: Any, names: Names, *, joined: bool) -> None:
    output = module._modules[names.output]
    width = sizes_of(output)[0]
    if getattr(module, "activation_sparsity", 0):
        raise UnknownPartError("its activation looks at all intermediate numbers")
    if unknown := [one for one in parameters_of(module) if module._parameters[one].numel() > 1]:
        raise UnknownPartError(f"its {unknown[0]} is not known")
    cut = halves(2 * width) if names.packed else plain(width)
    adapted = [one for one in module._modules.get(ADAPTERS, ()) if isinstance(one, nn.Sequential)]
    for child in SUB_NORMS:
        if child in module._modules:
            norms.check(module._modules[child], child, plain(width))
            norms.join(work, name, module, child, plain(width))
    for one in names.inner:
        work.outputs(f"{name}.{one}", module._modules[one], cut)
    for adapter in adapted:
        work.outputs(f"{name}.{ADAPTERS}", adapter[1], cut)
    work.inputs(f"{name}.{names.output}", output, plain(width), joined=joined)
    rescale(module, ((SIZES, width, sizes_of(output)[0]),))
    work.finish()


def _divide_apart(work: Work, name: str, module: Any) -> bool:
    """Divide an MLP whose projections lie in two neighbours (BERT)."""
    for first, last in (("intermediate", "output"), ("intermediate", "mlp_output")):
        inner, output = (getattr(module._modules.get(one), "dense", None) for one in (first, last))
        if not (is_linear(inner) and is_linear(output)) or {inner, output} & work.done:
            continue
        width = sizes_of(output)[0]
        if sizes_of(inner)[1] == width:
            work.outputs(f"{name}.{first}.dense", inner, plain(width))
            work.inputs(f"{name}.{last}.dense", output, plain(width))
            work.finish()
            return True
    return False


def others(module: nn.Module, known: set[nn.Module]) -> list[str]:
    """Return the names of children with numbers, apart from known ones."""
    return [
        one for one, child in module._modules.items() if child is not None and child not in known and has_numbers(child)
    ]
