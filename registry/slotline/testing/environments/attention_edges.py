"""Steps of attention with edges, beside the same steps whose edges the suite computes itself."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from slotline.registry.contracts.attention_edges import EXPANSION, GATE, NORM, ROTARY, ROUNDED, AttentionEdges, HeadNorm
from slotline.testing.check import Failed, Run
from slotline.testing.environments.attention import GUARD_ROWS, bits, raw, sliced, threads
from slotline.testing.environments.attention_case import Case
from slotline.testing.environments.attention_choice import world, writes_cache
from slotline.testing.oracles import attention_edges as oracle

TOLERANCE = {torch.float32: 3e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Of an output and the LSE, relative to the largest number, at least 1."""
EIGHT_BIT = 0.15
"""The same for caches of eight bits, where a key may be rounded to the next number."""
GUARD_CODE = 77


@frozen
class EdgeForm:
    """Which edges a call has, and in what form.

    Attributes:
        names: of the edges.
        partial: only a part of each head is rotated.
        whole: cosines and sines have both halves, which differ.
        groups: scales of a rounded output, for each head: 0 for one scale for all heads.
    """

    names: tuple[str, ...]
    partial: bool = False
    whole: bool = True
    groups: int = 1


class EdgedStep:
    """One step of a case, with edges and without.

    Args:
        run: of the check.
        case: decides about the batch and its surroundings.
        form: of the edges.
    """

    def __init__(self, run: Run, case: Case, form: EdgeForm) -> None:
        self.run, self.form = run, form
        self.plain, self.fused = world(run, case), world(run, case)  # with equal contents
        self._generator = torch.Generator().manual_seed(self.plain.case.seed + 17)
        query, key, value = self.plain.new_tokens()
        self.key, self.value = key, value
        self.rotary = case.head_size - self.plain.layer.head_size_v  # of a latent's key
        self.edges = self._edges(len(query))
        self.query = query if EXPANSION not in form.names else self._rows(len(query), case.num_heads, self.width)

    @property
    def width(self) -> int:
        """Size of a query that is not absorbed."""
        return self.plain_size + self.rotary

    @property
    def plain_size(self) -> int:
        """Size of an expanded key without its rotary part."""
        return self.plain.layer.head_size_v // 2 + 1

    @property
    def value_size(self) -> int:
        """Size of a value of the output."""
        size = self.plain.layer.head_size_v
        return size // 2 + 2 if EXPANSION in self.form.names else size

    @property
    def tolerance(self) -> float:
        """What an output may be off, relative to the largest."""
        case = self.plain.case
        return EIGHT_BIT if case.cache_dtype.itemsize == 1 else TOLERANCE[case.coarse_dtype]

    def _rows(self, *shape: int) -> torch.Tensor:
        """Return random numbers of the step's tokens, spoiled in padded rows."""
        case = self.plain.case
        rows = torch.randn(*shape, generator=self._generator).to(case.dtype)
        rows[self.plain.batch.num_tokens :] = torch.nan if "padding" in case.poisoned else 0
        return rows.to(self.plain.device)

    def _norm(self, offset: float, eps: float) -> HeadNorm:
        case = self.plain.case
        weight = torch.rand(case.head_size, generator=self._generator) * 2 + 0.2 - offset
        return HeadNorm(weight=weight.to(case.dtype).to(self.plain.device), eps=eps, offset=offset)

    def _edges(self, rows: int) -> AttentionEdges:
        case, names, given = self.plain.case, self.form.names, dict[str, Any]()
        if NORM in names:
            given |= {"query_norm": self._norm(1.0, 0.3), "key_norm": self._norm(0.0, 0.05)}
        if ROTARY in names:
            size = case.head_size // 2 * 2
            size = max(2, size // 4 * 2) if self.form.partial else size
            width = size if self.form.whole else size // 2
            given |= {"cos": self._rows(rows, width), "sin": self._rows(rows, width), "rotary_size": size}
        if EXPANSION in names:
            rank = self.plain.layer.head_size_v
            weight = torch.randn(case.num_heads, self.plain_size + self.value_size, rank, generator=self._generator)
            given["expansion"] = (weight / rank**0.5).to(case.dtype).to(self.plain.device)
        if GATE in names:
            given["gate"] = 2 * self._rows(rows, case.num_heads, self.value_size)
        if ROUNDED in names:
            groups = max(1, self.form.groups * case.num_heads)
            given["scales"] = torch.full((rows, groups), torch.nan, device=self.plain.device)
        return AttentionEdges(**given)

    def expected(self, backend: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the step without edges, and compute them in float64: out [n, H, value size] and the LSE or None."""
        made, edges = self.plain, self.edges
        query, key = self.query, self.key
        if edges.expansion is not None:
            query = oracle.absorbed(query, edges.expansion, self.plain_size)
        else:
            query = oracle.turned(query, edges.query_norm, edges)
            key = oracle.turned(key, edges.key_norm, edges)
        query, key = (states.to(made.case.dtype) for states in (query, key))
        out = query.new_empty(len(query), made.case.num_heads, made.layer.head_size_v)
        with threads(1):
            plan = backend.plan(made.batch)
            if not writes_cache(self.run):
                backend.write(made.layer, key, self.value, made.cache, plan)
            lse = backend.forward(made.layer, query, key, self.value, made.cache, plan, out, made.sinks)
        out = out[: made.batch.num_tokens]
        if edges.expansion is not None:
            out = oracle.expanded(out, edges.expansion, self.plain_size)
        gate = None if edges.gate is None else edges.gate[: len(out)]
        return oracle.gated(out, gate), None if lse is None else lse[:, : len(out)].double()

    def attend(self, backend: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the step with edges. Rows of a rounded output are multiplied by their scales.

        Raises:
            Failed: if an input or a foreign part of a buffer was changed, or a padded row is not finite.
        """
        made, edges, rounded = self.fused, self.edges, self.edges.scales is not None
        states = (self.query, self.key, self.value)
        if made.case.merged:
            states = sliced(*states)
        inputs = dict(zip(("query", "key", "value"), states, strict=True)) | _inputs_of(edges)
        before = {name: bits(tensor) for name, tensor in inputs.items()}
        shape = (len(self.query) + 2 * GUARD_ROWS, made.case.num_heads, self.value_size)
        guarded = torch.full(
            shape, GUARD_CODE, dtype=torch.int8 if rounded else made.case.dtype, device=self.query.device
        )
        out = guarded[GUARD_ROWS:-GUARD_ROWS]
        with threads(1):
            plan = backend.plan(made.batch)
            lse = backend.forward(made.layer, *states, made.cache, plan, out, made.sinks, edges=edges)
        for name, old in before.items():
            if not torch.equal(old, bits(inputs[name])):
                raise Failed(f"the input {name} was changed in a call with edges; inputs are read only")
        if not bool((torch.cat([guarded[:GUARD_ROWS], guarded[-GUARD_ROWS:]]) == GUARD_CODE).all()):
            raise Failed("forward wrote before the first or after the last row of out")
        if not bool(torch.isfinite(out).all()):
            raise Failed("a row of out is not finite")
        return out[: made.batch.num_tokens], None if lse is None else lse[:, : made.batch.num_tokens].double()

    def prove(self, backend: Any) -> None:
        """Run both steps and compare their outputs, LSE and caches.

        Raises:
            Failed: with what differs.
        """
        expected, expected_lse = self.expected(backend)
        out, lse = self.attend(backend)
        most = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        if self.edges.scales is not None:
            self._compare_codes(out, expected, self.edges.scales[: len(out)].double())
        else:
            self._close("output", out.double(), expected, self.tolerance * most)
        if expected_lse is not None and lse is not None and expected_lse.numel():
            self._close("LSE", lse, expected_lse, self.tolerance * max(1.0, float(expected_lse.abs().max())))
        self._compare_caches()

    def _compare_codes(self, codes: torch.Tensor, expected: torch.Tensor, scales: torch.Tensor) -> None:
        """Compare an output that was rounded to codes [n, H, Dv] with scales [n, groups]."""
        if not codes.numel():
            return
        wanted = oracle.scales_of(expected, scales.shape[1])
        self._close("scales", scales, wanted, self.tolerance * float(wanted.max()))
        groups = codes.double().reshape(len(codes), scales.shape[1], -1)
        off = (groups * scales[..., None]).view(expected.shape) - expected
        allowed = (0.51 * scales).amax() + self.tolerance * expected.abs().amax()
        self._close("codes times scales", off, torch.zeros_like(off), float(allowed))
        # Codes of a rounded output are off by half a scale at most, by a quarter in the mean.
        mean = float((off.reshape(groups.shape).abs() / scales.clamp_min(1e-30)[..., None]).mean())
        room = self.tolerance * float(expected.abs().mean() / scales.mean().clamp_min(1e-30))
        if mean > 0.27 + room:
            raise Failed(f"codes are off by {mean:.3g} scales in the mean, 0.25 if they are rounded to the nearest")

    def _close(self, what: str, got: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
        if not got.numel():
            return
        off = (got - expected).abs()
        error = float(off.max())
        if not error <= allowed:
            worst = int(torch.nan_to_num(off, torch.inf).argmax())
            where = [int(i) for i in torch.unravel_index(torch.tensor(worst), off.shape)]
            raise Failed(
                f"edges {', '.join(self.form.names)}: {what} at {where} is off by {error:.3g}, allowed {allowed:.3g}"
            )

    def _compare_caches(self) -> None:
        """Compare what both steps have stored: keys as numbers, and all else by its bytes."""
        plain, fused = self.plain, self.fused
        slots = plain.batch.slot_mapping[plain.batch.slot_mapping >= 0]
        place = (slots // plain.case.block_size, slots % plain.case.block_size)
        new, wanted = (raw(made.views[0])[place].view(plain.case.cache_dtype).double() for made in (fused, plain))
        self._close(
            "stored key", new, wanted, self.tolerance * max(1.0, float(wanted.abs().max() if len(slots) else 0))
        )
        if not plain.case.mla:
            new, wanted = (raw(made.views[1])[place].view(plain.case.cache_dtype).double() for made in (fused, plain))
            self._close("stored value", new, wanted, 0.0)
        for made in (fused, plain):
            for view in made.views:
                raw(view)[place] = 0
        fused.expect_cache(
            plain.cache_bits(), "in a call with edges the cache must get the new tokens and nothing else"
        )


def _inputs_of(edges: AttentionEdges) -> dict[str, torch.Tensor]:
    """Return the tensors of a call that a backend must not change, by name."""
    named = {name: getattr(edges, name) for name in ("cos", "sin", "expansion", "gate")}
    for name in ("query_norm", "key_norm"):
        norm = getattr(edges, name)
        named[name] = None if norm is None else norm.weight
    return {name: tensor for name, tensor in named.items() if tensor is not None}
