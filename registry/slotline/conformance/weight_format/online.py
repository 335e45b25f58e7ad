"""Weight formats that quantize plain weights at load: nearest codes, own groups, refusals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import evolve

from slotline.registry.descriptor import Kind
from slotline.registry.errors import ModelError
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.weight_format import MemoryReader, context_of, online_scheme
from slotline.testing.oracles import linear as oracle
from slotline.testing.subject import Subject

NAME = "model.layers.0.mlp.up_proj"
WORST = 1.05
"""Steps between neighbouring codes that a number may be off: half of one to the nearest, one at an end of the range."""


def _methods(subject: Subject) -> Iterable[Case]:
    return [{"method": method} for method in sorted(subject.capabilities.methods.values or ())]


def _built(run: Run) -> Any:
    context = context_of(run.subject, None, MemoryReader({}))
    return run.subject.build(evolve(context, method=run["method"]))


def _step(scheme: Any, numbers: torch.Tensor) -> torch.Tensor:
    """Return the distance of neighbouring codes at numbers before scaling."""
    if scheme.element.codebook:
        book = torch.tensor(sorted(scheme.element.codebook), dtype=torch.float64)
        return (book[1:] - book[:-1]).max().expand_as(numbers)
    if scheme.name == "fp8":
        return torch.exp2(numbers.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return torch.ones_like(numbers)


@check(Kind.WEIGHT_FORMAT, "weight_format.online.values", Level.NUMERICS, needs={"online": True}, cases=_methods)
def online_values(run: Run) -> None:
    """Each number becomes a near code of its group in the scheme that was announced, for every real dtype."""
    built = _built(run)
    scheme = online_scheme(built, NAME)
    generator = torch.Generator().manual_seed(run.seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.randn(33, 256, generator=generator) * torch.exp2(torch.arange(256) // 32 - 4)
        weight = weight.to(dtype)
        before = weight.clone()
        found = built.quantize(NAME, "linear", weight)
        if not torch.equal(before, weight):
            raise Failed("quantize changed the weight that it was given")
        if found.scheme != scheme:
            raise Failed(f"quantize gave {found.scheme}, scheme_of said {scheme}")
        found.check(NAME)
        ones = evolve(found, codes=torch.ones_like(found.codes), offsets=None, scheme=evolve(scheme, symmetric=True))
        unit = oracle.weight_of(ones).abs() if not scheme.element.codebook else oracle.magnitude_of(found)
        numbers = (oracle.weight_of(found) / unit.clamp(min=1e-30)).abs()
        error = (oracle.weight_of(found) - weight.double()).abs()
        allowed = WORST * _step(scheme, numbers) * unit + 1e-12
        worst = int((error / allowed).argmax())
        row, column = divmod(worst, weight.shape[1])
        run.measure(
            error=float(error[row, column]), allowed=float(allowed[row, column]), what=f"output {row}, input {column}"
        )


@check(Kind.WEIGHT_FORMAT, "weight_format.online.zeros", Level.HOSTILE, needs={"online": True}, cases=_methods)
def online_zeros(run: Run) -> None:
    """A weight of zeros, or a group of zeros, stays zero."""
    built = _built(run)
    online_scheme(built, NAME)
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(run.seed))
    weight[1], weight[2, :32] = 0.0, 0.0
    found = built.quantize(NAME, "linear", weight)
    found.check(NAME)
    if oracle.weight_of(found)[weight == 0].abs().max() > 0:
        raise Failed("zeros did not stay zero")


@check(Kind.WEIGHT_FORMAT, "weight_format.online.experts", Level.HOSTILE, needs={"online": True}, cases=_methods)
def online_experts(run: Run) -> None:
    """Experts that are stored together are quantized as each alone."""
    built = _built(run)
    online_scheme(built, NAME)
    weight = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(run.seed))
    together = built.quantize(f"{NAME}_experts", "experts", weight).dequantize()
    for index, one in enumerate(weight):
        if not torch.equal(together[index], built.quantize(f"{NAME}_experts", "experts", one).dequantize()):
            raise Failed(f"expert {index} came out differently than by itself")


@check(Kind.WEIGHT_FORMAT, "weight_format.online.refusals", Level.HOSTILE, needs={"online": True}, cases=_methods)
def online_refusals(run: Run) -> None:
    """Numbers that are not finite, and inputs that the groups do not divide, are refused by the module's name."""
    built = _built(run)
    scheme = online_scheme(built, NAME)
    strange = torch.ones(4, 64)
    strange[2, 7] = float("nan")
    cases = {"a weight with NaN": strange, "a weight with infinity": strange.nan_to_num(nan=float("inf"))}
    if scheme.group[1]:
        cases["inputs that no group divides"] = torch.ones(4, scheme.group[1] + 1)
    for what, weight in cases.items():
        try:
            built.quantize(NAME, "linear", weight).check(NAME)
        except ModelError as error:
            if NAME not in error.message or not error.fix:
                raise Failed(f"{what}: the refusal names neither {NAME} nor a remedy: {error}") from error
            continue
        except Exception as error:  # a plugin may raise anything
            raise Failed(f"{what}: {type(error).__name__} instead of a ModelError: {error}") from error
        if not scheme.group[1] or weight.shape[1] % scheme.group[1] == 0:
            raise Failed(f"{what} was quantized all the same")
