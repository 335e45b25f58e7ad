"""The part of a decoder layer behind attention as one call, for the few rows of a decode step on a CPU.

Output projection plus residual, norm, gate with its activation, up with the product, down projection plus residual, and
the next layer's norm with its projection to queries, keys and values: seven calls from Python, each of which starts the
threads anew, become one program of a team of threads. It runs the machine code that those calls run, so the numbers are
the same. A layer has it only where it gave the same numbers bit by bit, and for numbers of rows where it took less
time.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import frozen
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import nn

from slotline.kernels.numba_cache import cached_cfunc
from slotline.kernels.team_program import SIGNATURE, Operation, Program, runs_programs, team_of
from slotline.plugins.model_families.linear_records import CLASSES
from slotline.plugins.model_families.passes.dense_kernels import OTHER, OUT, X, ask
from slotline.plugins.model_families.passes.few_rows import ADD, MOST_ROWS, MULTIPLY, NOTHING, SWISH
from slotline.plugins.model_families.passes.gated_mlp import FusedGatedMLP
from slotline.plugins.model_families.passes.layer_link import Projected
from slotline.plugins.model_families.passes.lean_layer import LeanLayer
from slotline.plugins.model_families.passes.merged_projections import QUERY_KEY_VALUE, merged_of
from slotline.plugins.model_families.passes.packed_linear import PackedLinear, has_hooks, is_untouched
from slotline.plugins.model_families.passes.rms_norm import KernelRMSNorm
from slotline.plugins.model_families.passes.row_kernels import row_kernels
from slotline.plugins.model_families.passes.target import Target

FEW = tuple(rows for rows in CLASSES if rows <= MOST_ROWS)
"""Largest numbers of rows of the classes that are tried and timed."""
FEWEST_TURNS, TRIAL_SECONDS = 3, 0.03
"""Calls of each way in turn of which the fastest counts, and the seconds after which no more begin."""
_NORM, _SOURCE, _WEIGHT, _TO, _ROWS, _WIDTH, _SIZE, _EPS, _OFFSET, _WHO, _MANY, _PLACES = range(12)
"""What a norm is told: addresses of its function, input, weight and output, rows, numbers of a row, bytes of a number,
bits of epsilon and offset as float32, and functions of OpenMP."""


@intrinsic
def _call_norm(typingctx, address, x, weight, out, rows, n, eps, offset):  # type: ignore[no-untyped-def]
    """Call `RowKernels.rms_norm` at an address. `eps` and `offset` are the bits of float32."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        word, number = ir.IntType(64), ir.FloatType()
        function = ir.FunctionType(ir.VoidType(), [word] * 5 + [number] * 2).as_pointer()
        bits = [b.bitcast(b.trunc(arg, ir.IntType(32)), number) for arg in args[6:]]
        b.call(b.inttoptr(args[0], function), [*args[1:6], *bits])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@cache
def _norm_share() -> int:
    """Return the address of the function that norms a thread's share of rows."""

    def norm(told_at):  # type: ignore[no-untyped-def]
        told = carray(told_at, (_PLACES,))
        thread, threads = 0, 1
        if told[_WHO] != 0:
            thread, threads = ask(told[_WHO]), ask(told[_MANY])
        first, end = thread * told[_ROWS] // threads, (thread + 1) * told[_ROWS] // threads
        if end > first:
            begin = first * told[_WIDTH] * told[_SIZE]
            x, out = told[_SOURCE] + begin, told[_TO] + begin
            _call_norm(told[_NORM], x, told[_WEIGHT], out, end - first, told[_WIDTH], told[_EPS], told[_OFFSET])

    address: int = cached_cfunc(SIGNATURE, norm).address
    return address


@frozen
class _Parts:
    """Modules of a layer that a tail stands for."""

    output: PackedLinear
    norm: KernelRMSNorm
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.output, self.gate, self.up, self.down


class _Made:
    """A program for a number of rows, and the tensors that its addresses are of.

    Attributes:
        asked: the next layer's projection, which is left out if its product is a library's.
        linears: what the program computes.
        held: their weights and biases.
    """

    def __init__(
        self, parts: _Parts, rows: int, *, threads: int, behind: bool, projection: PackedLinear | None
    ) -> None:
        self.asked = projection
        if projection is not None and not _projects(parts, projection, rows):
            projection = None
        self.linears = parts.linears if projection is None else (*parts.linears, projection)
        self.held = _held(self.linears)
        dtype, width, inner = parts.output.packed.dtype, parts.output.out_features, parts.gate.out_features
        self._total, self._normed = (torch.empty(rows, width, dtype=dtype) for _ in range(2))
        self._gated = torch.empty(rows, inner, dtype=dtype)
        total, normed, gated = (tensor.data_ptr() for tensor in (self._total, self._normed, self._gated))
        team = team_of(threads)
        self._functions = (0, 0) if team is None else (team.thread_num, team.num_threads)
        same = parts.gate.way == parts.up.way  # a thread reads of the gate what it has written itself
        operations = [
            self._product(parts.output, rows, 0, 0, total, ADD),
            self._norm(parts.norm, rows, total, normed),
            self._product(parts.gate, rows, normed, 0, gated, SWISH, waits=not same),
            self._product(parts.up, rows, normed, gated, gated, MULTIPLY),
            self._product(parts.down, rows, gated, total, 0, ADD),
        ]
        self._projection = projection
        if behind:
            operations.append(self._norm(parts.norm, rows, 0, normed))
        if projection is not None:
            operations.append(self._product(projection, rows, normed, 0, 0, NOTHING))
        self.program = Program(operations, threads)

    def _product(
        self, linear: PackedLinear, rows: int, x: int, other: int, out: int, mode: int, *, waits: bool = True
    ) -> Operation:
        found, bias = linear.addresses(rows), linear._parameters["bias"]
        assert found is not None  # it was asked before
        sizes = rows, linear.in_features, linear.out_features
        at = x, found[1], 0 if bias is None else bias.data_ptr(), other, out
        return Operation(found[0], (*at, *sizes, mode, *self._functions), waits)

    def _norm(self, norm: KernelRMSNorm, rows: int, x: int, out: int) -> Operation:
        weight = norm.weight
        told = row_kernels(weight.dtype).norm_address, x, weight.data_ptr(), out, rows, len(weight), weight.itemsize
        return Operation(_norm_share(), (*told, *_bits(norm), *self._functions))

    def run(self, parts: _Parts, mixed: torch.Tensor, residual: torch.Tensor, behind: KernelRMSNorm | None) -> Any:
        """Return the layer's output and its norm, see `LayerTail`."""
        words, told = self.program.words, self.program.told
        out = torch.empty_like(residual)
        words[told[0] + X], words[told[0] + OTHER] = mixed.data_ptr(), residual.data_ptr()
        words[told[1] + _WEIGHT] = parts.norm._parameters["weight"].data_ptr()  # type: ignore[union-attr]
        words[told[4] + OUT] = out.data_ptr()
        following: torch.Tensor | Projected | None = None
        if behind is not None:
            at = told[5]
            words[at + _SOURCE] = out.data_ptr()
            words[at + _WEIGHT] = behind._parameters["weight"].data_ptr()  # type: ignore[union-attr]
            words[at + _EPS : at + _WHO] = _bits(behind)
            if self._projection is None:
                following = torch.empty_like(out)
                words[at + _TO] = following.data_ptr()
            else:
                following = Projected(out.new_empty((*out.shape[:-1], self._projection.out_features)))
                words[told[6] + OUT] = following.qkv.data_ptr()
        self.program.run()
        return out, following


def _projects(parts: _Parts, projection: PackedLinear, rows: int) -> bool:
    """Return True if the next layer's projection is a kernel of ours too."""
    return projection.packed.dtype == parts.output.packed.dtype and projection.addresses(rows) is not None


def _held(linears: Sequence[PackedLinear]) -> list[torch.Tensor | None]:
    """Return the weights and biases of linear layers, whose addresses a program has."""
    return [tensor for linear in linears for tensor in (linear._buffers["packed"], linear._parameters["bias"])]


@cache
def _bits_of(eps: float, offset: float) -> tuple[int, int]:
    first, second = np.array([eps, offset], np.float32).view(np.int32).tolist()
    return first, second


def _bits(norm: KernelRMSNorm) -> tuple[int, int]:
    """Return the bits of a norm's epsilon and offset as float32."""
    return _bits_of(norm.eps, norm.offset)


class LayerTail:
    """Straight calls behind a layer's attention as one.

    Args:
        behind: the next layer, whose first projection is computed too.

    Attributes:
        faster: for each class of `FEW`, whether one call takes less time than separate ones.
    """

    def __init__(self, parts: _Parts, behind: nn.Module | None = None) -> None:
        self._parts = parts
        self._linears = parts.linears
        self._behind: Any = behind
        self._made: dict[tuple[int, int, bool, bool], _Made] = {}
        self.faster = (True,) * len(FEW)

    def __call__(
        self, mixed: torch.Tensor, residual: torch.Tensor, behind: KernelRMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor | Projected | None] | None:
        """Return the layer's output, and its norm by `behind` or what the next layer projects that to.

        None where separate calls are to be made.

        Args:
            mixed: [batch, num_tokens, output projection's in_features], what attention gave.
            residual: [batch, num_tokens, hidden_size]. It is not changed.
        """
        parts = self._parts
        rows = residual.numel() // parts.output.out_features
        if not 0 < rows <= MOST_ROWS or not self._takes(rows) or mixed.dtype != residual.dtype:
            return None
        if any(has_hooks(linear) for linear in self._linears) or parts.output._buffers["packed"].dtype != mixed.dtype:  # type: ignore[union-attr]
            return None
        if not (mixed.is_contiguous() and residual.is_contiguous()):
            return None
        projection = self.projection(behind)
        key = rows, torch.get_num_threads(), behind is not None, projection is not None
        made = self._made.get(key)
        if made is None or made.asked is not projection or any(map(operator.is_not, made.held, _held(made.linears))):
            if why_not(parts, rows):
                return None
            made = self._made[key] = _Made(parts, rows, threads=key[1], behind=key[2], projection=projection)
        found: tuple[torch.Tensor, torch.Tensor | Projected | None] = made.run(parts, mixed, residual, behind)
        return found

    @property
    def entrance(self) -> KernelRMSNorm | None:
        """The norm that the next layer begins with, if that layer is known and still the passes'."""
        lean = None if self._behind is None else self._behind.__dict__.get("forward")
        return lean.entrance if type(lean) is LeanLayer else None

    def projection(self, behind: KernelRMSNorm | None) -> PackedLinear | None:
        """Return what the next layer projects its norm by, if `behind` is that norm and no hook wants a call."""
        if behind is None or behind is not self.entrance:
            return None
        merged: Any = merged_of(self._behind._modules["self_attn"], "qkv_proj", QUERY_KEY_VALUE)
        return merged if is_untouched(merged) else None

    def serves(self, layer: Any, norm: Any) -> bool:
        """Return True if the layer, with this norm before its MLP, still has the modules that this stands for."""
        children, parts = layer._modules, self._parts
        mlp = children["mlp"]._modules
        return (
            norm is parts.norm
            and children["self_attn"]._modules["o_proj"] is parts.output
            and mlp["gate_proj"] is parts.gate
            and mlp["up_proj"] is parts.up
            and mlp["down_proj"] is parts.down
        )

    def _takes(self, rows: int) -> bool:
        return next(faster for faster, most in zip(self.faster, FEW, strict=True) if rows <= most)


def why_not(parts: _Parts, rows: int) -> str:
    """Return why a layer of these parts has no tail for a number of rows, "" if it has one."""
    if not runs_programs():
        return "the threads of torch's library cannot be started"
    for name, linear in (("output", parts.output), ("gate", parts.gate), ("up", parts.up), ("down", parts.down)):
        if linear.addresses(rows) is None:
            return f"its {name} projection of {rows} rows is {linear.way.kernel(rows)}'s"
    return ""


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Give a tail to every lean layer for which it is equal and faster, on a CPU whose products may be ours."""
    tails, kept = Counter[str](), Counter[str]()
    times: dict[tuple[Any, ...], tuple[tuple[bool, ...], str]] = {}
    behind = {id(layer): after for layer, after in pairwise(getattr(model.base_model, "layers", ()))}
    for layer in model.modules():
        lean = layer.__dict__.get("forward")
        if type(lean) is not LeanLayer:
            continue
        parts = _parts_of(layer, lean)
        if isinstance(parts, str):
            kept[parts] += 1
            continue
        tail = LayerTail(parts, behind.get(id(layer)))
        said = "not tried: weights were saved after the passes"
        if not parts.output.packed.is_meta:
            reasons = tuple(why_not(parts, rows) for rows in FEW)
            served = [rows for rows, reason in zip(FEW, reasons, strict=True) if not reason]
            if not served or not _is_equal(lean, tail, parts, served[-1]):
                kept[reasons[0] if not served else "one call gives other numbers"] += 1
                continue
            shape = tuple((linear.in_features, linear.out_features, linear.way) for linear in parts.linears)
            if shape not in times:
                times[shape] = _timed(lean, tail, parts, reasons)
            tail.faster, said = times[shape]
        lean.tail = tail
        tails[said] += 1
    numbers = ", ".join(map(str, FEW))
    return tuple(
        f"one call behind attention in {count} layers for {numbers} rows: {said}" for said, count in tails.items()
    ) + tuple(f"separate calls behind attention in {count} layers: {why}" for why, count in kept.items())


def _parts_of(layer: Any, lean: LeanLayer) -> _Parts | str:
    """Return the modules behind a layer's attention, or why they cannot be one call."""
    children, norms = layer._modules, lean.norms
    mlp = children["mlp"]
    if type(mlp) is not FusedGatedMLP or mlp.operation != "swish":
        return "the MLP has another activation than SiLU"
    if norms.after is not None or norms.after_mlp is not None or norms.before_mlp is None:
        return "the layer norms its branches"
    linears = (
        children["self_attn"]._modules["o_proj"],
        *(mlp._modules[f"{name}_proj"] for name in ("gate", "up", "down")),
    )
    if not all(is_untouched(linear) for linear in linears):
        return "a projection has hooks"
    output, gate, up, down = linears
    return _Parts(output, children[norms.before_mlp], gate, up, down)


def _probe(parts: _Parts, rows: int) -> tuple[torch.Tensor, torch.Tensor, KernelRMSNorm]:
    """Return random outputs of attention and residuals [1, rows, features], and a norm for what comes behind."""
    generator = torch.Generator().manual_seed(rows)
    widths = parts.output.in_features, parts.output.out_features
    mixed, residual = (torch.randn(1, rows, n, generator=generator).to(parts.output.packed.dtype) for n in widths)
    return mixed, residual, parts.norm


def _is_equal(lean: LeanLayer, tail: LayerTail, parts: _Parts, rows: int) -> bool:
    """Return True if one call gives the numbers of separate ones, bit by bit."""
    probe = _probe(parts, rows)
    expected, found = _separate(lean, probe), tail(*probe)
    if found is None or not all(map(torch.equal, found, expected)):  # type: ignore[arg-type]
        return False
    projection = tail.projection(tail.entrance)
    if projection is None or not _projects(parts, projection, rows):
        return True
    normed = tail.entrance.forward(expected[0])  # type: ignore[union-attr]
    _, projected = tail(*probe[:2], tail.entrance)  # type: ignore[misc]
    return type(projected) is Projected and torch.equal(projected.qkv, projection.forward(normed))


def _separate(lean: LeanLayer, probe: tuple[torch.Tensor, torch.Tensor, KernelRMSNorm]) -> tuple[torch.Tensor, ...]:
    """Return the layer's output and its norm by separate calls."""
    out, normed = lean.behind_attention(*probe)
    return out, probe[2].forward(out) if normed is None else normed


def _timed(lean: LeanLayer, tail: LayerTail, parts: _Parts, reasons: Sequence[str]) -> tuple[tuple[bool, ...], str]:
    """Return for each class of `FEW` whether one call takes less time than separate ones, and how much as text.

    Args:
        reasons: for each class, why it has no call of its own, "" if it has one.
    """
    ratios = []
    for rows, reason in zip(FEW, reasons, strict=True):
        if reason:
            ratios.append(0.0)
            continue
        probe = _probe(parts, rows)
        ways: tuple[Callable[[], Any], ...] = lambda p=probe: _separate(lean, p), lambda p=probe: tail(*p)  # type: ignore[misc]
        best, end, turns = [1e9, 1e9], perf_counter() + TRIAL_SECONDS, 0
        while turns < FEWEST_TURNS or perf_counter() < end:
            for index, way in enumerate(ways):
                start = perf_counter()
                way()
                best[index] = min(best[index], perf_counter() - start)
            turns += 1
        ratios.append(best[0] / best[1])
    said = ", ".join(f"{ratio:.2f}" if ratio else "no" for ratio in ratios)
    why = "".join(f"; {reason}" for reason in reasons if reason)
    return tuple(ratio > 1 for ratio in ratios), f"{said} times the speed of separate ones{why}"
