"""L0 of attention: descriptor, capabilities, factory, methods, and the result of `forward`."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts.attention import AttentionCapabilities, AttentionContext
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.contract_checks import UNKNOWN, KindContract, register_contract_checks
from slotline.testing.environments.attention import Case, World, threads
from slotline.testing.environments.attention_choice import build, choose, device_of, world, writes_cache

REQUESTS = ((1, 18), (1, 5))


def case_of(run: Run) -> Case:
    """Return a small batch of decodes, which every backend supports."""
    return choose(run.subject, REQUESTS).friendly()


def _context(run: Run) -> AttentionContext:
    return case_of(run).context(device_of(run.subject))


register_contract_checks(
    KindContract(
        kind=Kind.ATTENTION,
        capabilities=AttentionCapabilities,
        context=_context,
        conditions=("speculation", "kv_dtype", "graphs"),
    )
)


def _called(run: Run, made: World) -> tuple[torch.Tensor, Any]:
    """Return the output and the result of `forward`, from calls like the core's."""
    query, key, value = made.new_tokens()
    shape = (len(query), made.case.num_heads, made.layer.head_size_v)
    out = torch.zeros(shape, dtype=made.case.dtype, device=made.device)
    backend = build(run, made.case)
    with threads(1):
        plan = backend.plan(made.batch)
        if not writes_cache(run):
            backend.write(made.layer, key, value, made.cache, plan)
        return out, backend.forward(made.layer, query, key, value, made.cache, plan, out, made.sinks)


@check(Kind.ATTENTION, "attention.contract.returns", Level.CONTRACT)
def returns(run: Run) -> None:
    """forward returns the LSE, [num_heads, num_tokens] float32, if the descriptor declares one, else None."""
    made = world(run, case_of(run))
    _, found = _called(run, made)
    if run.subject.refusal({"lse": True}):
        if found is not None:
            raise Failed(f"forward returned {_described(found)}; no LSE is declared, so it must be None")
        return
    expected = (made.case.num_heads, made.batch.num_tokens)
    if not isinstance(found, torch.Tensor) or found.shape != expected or found.dtype != torch.float32:
        raise Failed(f"forward returned {_described(found)}; an LSE is declared: {list(expected)} float32")


def _described(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor {list(found.shape)} {str(found.dtype).removeprefix('torch.')}"
    return "None" if found is None else f"a {type(found).__name__}"


@check(Kind.ATTENTION, "attention.contract.unknown_extras", Level.CONTRACT)
def unknown_extras(run: Run) -> None:
    """Entries of a batch's extras that a backend does not know are passed over."""
    plain, greased = (_called(run, made)[0] for made in (world(run, case_of(run)), _with_extras(run)))
    torch.testing.assert_close(greased, plain, equal_nan=True)


def _with_extras(run: Run) -> World:
    """Return the same world, with an unknown entry."""
    made = world(run, case_of(run))
    made.batch.extras[UNKNOWN] = {"of": "a later version"}
    return made
