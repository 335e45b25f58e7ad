"""Triton's interpreter in a fraction of the time, and its products with sums in one order.

A program of a kernel is a few hundred operations on small arrays, and around each the interpreter does what a compiler
does once: it makes types, compares them, and looks every builtin up. That took more than half of the time.
Here equal types and shapes are made once, and what is replaced for a launch is replaced once a launch.
"""

# mypy: ignore-errors
from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch


def quicken() -> None:
    """Patch the interpreter, if it is loaded and has not been patched."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "replaced"):
        return
    import triton.language.core as core

    _replace_once_a_launch(interpreter)
    _make_types_once(interpreter, core)
    _look_up_quickly(interpreter, core)
    _round_to_eight_bits(interpreter, core)
    # Whether integers overflow is computed for each sum and product, and looked at in debugging alone.
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _replace_once_a_launch(interpreter: Any) -> None:
    """It replaces the functions of `triton.language` by its own before a kernel runs, which is needed, and again before
    each call of a device function, by looking at every member of six modules and classes."""
    interpreter.replaced = set()  # the globals of functions for which it was done in the launch that runs
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def replace_once(fn: Any) -> Any:
        if id(fn.__globals__) in interpreter.replaced:
            return None
        interpreter.replaced.add(id(fn.__globals__))
        return replace(fn)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter.replaced.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            interpreter.replaced.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch


def _make_types_once(interpreter: Any, core: Any) -> None:
    """Types of one name have the same shape object, and tensors of one type the same sizes."""
    of_types, of_tensors, of_splats = {}, {}, {}
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (size.value if type(size) is core.constexpr else size for size in shape)
        key = (*sizes, element_ty.name)
        if (known := of_types.get(key)) is None:
            make_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if (known := of_tensors.get(type.name)) is None:
            make_tensor(self, handle, type)
            of_tensors[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor

    semantic = interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value

    def splat(scalar: Any, like: Any) -> Any:
        key = scalar.type.name, like.type.name
        if (kind := of_splats.get(key)) is None:
            kind = of_splats[key] = like.type.with_element_ty(scalar.type.scalar)
        return core.tensor(semantic.builder.create_splat(kind, scalar.handle), kind)

    def broadcast_impl_value(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type.is_block(), rhs.type.is_block()
        if left and right:
            return (lhs, rhs) if lhs.type.shape is rhs.type.shape else broadcast(lhs, rhs)
        return splat(lhs, rhs) if right else lhs, splat(rhs, lhs) if left else rhs

    semantic.broadcast_impl_value = broadcast_impl_value


def _round_to_eight_bits(interpreter: Any, core: Any) -> None:
    """It loses the carry where rounding to eight bits reaches a power of two, which cards do not. Torch does not."""
    eight = {core.float8e4nv: torch.float8_e4m3fn, core.float8e5: torch.float8_e5m2}
    wide = {core.float32: torch.float32, core.float16: torch.float16}
    convert = interpreter._convert_float

    def converted(given: Any, own: Any, wanted: Any, rounding: Any) -> Any:
        if own in wide and wanted in eight:
            return torch.from_numpy(np.ascontiguousarray(given)).to(eight[wanted]).view(torch.uint8).numpy()
        if own in eight and wanted in wide:
            codes = torch.from_numpy(np.ascontiguousarray(given).view(np.uint8)).view(eight[own])
            return codes.to(wide[wanted]).numpy()
        return convert(given, own, wanted, rounding)

    interpreter._convert_float = converted


def _look_up_quickly(interpreter: Any, core: Any) -> None:
    """What depends on types alone is remembered by their names, and an object is itself without a look inside."""
    of_names, of_results = {}, {}
    numpy_type = interpreter._get_np_dtype
    semantic = interpreter.interpreter_semantic
    result_type, unwrap = semantic.computation_type_impl, core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}

    def get_np_dtype(tt_dtype: Any) -> Any:
        if (known := of_names.get(tt_dtype.name)) is None:
            known = of_names[tt_dtype.name] = numpy_type(tt_dtype)
        return known

    def computation_type_impl(a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if (known := of_results.get(key)) is None:
            known = of_results[key] = result_type(a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known

    def unwrap_if_constexpr(o: Any) -> Any:
        kind = type(o)
        return o.value if kind is core.constexpr else o if kind in plain else unwrap(o)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, call)

    def same(equal: Any) -> Any:
        return lambda self, other: self is other or equal(self, other)

    for kind in (core.dtype, core.pointer_type, core.block_type):
        kind.__eq__ = same(kind.__eq__)
    interpreter._get_np_dtype, interpreter._patch_attr = get_np_dtype, patch_attr
    semantic.computation_type_impl, core._unwrap_if_constexpr = computation_type_impl, unwrap_if_constexpr


def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `tl.dot` sum each element in the same order, wherever its row lies.

    The interpreter asks NumPy, whose BLAS takes rows in groups by the processor's registers: on some processors a row's
    bits depend on its place. Those of a GPU's matrix instructions do not, and tests of batch invariance rely on it.
    """
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (part.data.astype(d.data.dtype) for part in (a, b))
        shares = left[..., :, :, None] * right[..., None, :, :]  # [..., m, k, n]
        return interpreter.TensorHandle(np.add.reduce(shares, axis=-2) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
