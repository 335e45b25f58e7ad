"""Negotiation: requests, candidates, the resulting plan, and its reasons."""

from slotline.registry.negotiation.codes import CODES, Code, Severity
from slotline.registry.negotiation.explain import diff, explain_code, explain_failure, explain_plan, why_not
from slotline.registry.negotiation.failure import Conflict, Failure
from slotline.registry.negotiation.graphs import capture_sizes
from slotline.registry.negotiation.groups import CacheGroupPlan, GraphPlan, GroupPlan, StateCachePlan, StateGroupPlan
from slotline.registry.negotiation.measured import Measured, MeasuredRun, with_measurements
from slotline.registry.negotiation.pages import GroupPage, PoolPlan
from slotline.registry.negotiation.parts import part_reasons
from slotline.registry.negotiation.plan import Plan
from slotline.registry.negotiation.pool import with_pool
from slotline.registry.negotiation.prepare import (
    attention_candidates,
    candidates,
    kv_spec_candidates,
    prepare_request,
    state_candidates,
)
from slotline.registry.negotiation.reasons import Note, Reason, Rejection
from slotline.registry.negotiation.request import (
    Asked,
    Candidate,
    GroupRequest,
    Need,
    Part,
    PlanRequest,
    Setting,
    StateGroupRequest,
    group_layers,
)
from slotline.registry.negotiation.review import review
from slotline.registry.negotiation.solve import negotiate
from slotline.registry.negotiation.states import group_states

__all__ = [
    "CODES",
    "Asked",
    "CacheGroupPlan",
    "Candidate",
    "Code",
    "Conflict",
    "Failure",
    "GraphPlan",
    "GroupPage",
    "GroupPlan",
    "GroupRequest",
    "Measured",
    "MeasuredRun",
    "Need",
    "Note",
    "Part",
    "Plan",
    "PlanRequest",
    "PoolPlan",
    "Reason",
    "Rejection",
    "Setting",
    "Severity",
    "StateCachePlan",
    "StateGroupPlan",
    "StateGroupRequest",
    "attention_candidates",
    "candidates",
    "capture_sizes",
    "diff",
    "explain_code",
    "explain_failure",
    "explain_plan",
    "group_layers",
    "group_states",
    "kv_spec_candidates",
    "negotiate",
    "part_reasons",
    "prepare_request",
    "review",
    "state_candidates",
    "why_not",
    "with_measurements",
    "with_pool",
]
