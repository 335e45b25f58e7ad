"""L0 of state backends: descriptor, capabilities, factory, methods."""

from __future__ import annotations

from slotline.conformance.state.problems import declared_kinds, most_tokens, problem_of
from slotline.registry.contracts.state import StateCapabilities, StateContext
from slotline.registry.descriptor import Kind
from slotline.testing.check import NotApplicable, Run
from slotline.testing.contract_checks import KindContract, register_contract_checks


def _context(run: Run) -> StateContext:
    kinds = declared_kinds(run.subject)
    if not kinds:
        raise NotApplicable("no kind of state layer that the suite knows is declared")
    problem = problem_of(run, kinds[0])
    return StateContext(
        contract=1,
        layers=(problem.layer,),
        device=run.subject.device.type,
        dtype=str(problem.dtype).removeprefix("torch."),
        max_query_len=most_tokens(run.subject),
        max_requests=8,
        max_tokens=512,
    )


register_contract_checks(
    KindContract(
        kind=Kind.STATE,
        capabilities=StateCapabilities,
        context=_context,
    )
)
