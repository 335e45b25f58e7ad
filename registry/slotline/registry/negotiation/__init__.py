"""Negotiation: requests, candidates, the plan that comes of them, and why."""

from slotline.registry.negotiation.codes import CODES, Code, Severity
from slotline.registry.negotiation.explain import diff, explain_code, why_not
from slotline.registry.negotiation.graphs import capture_sizes
from slotline.registry.negotiation.plan import CacheGroupPlan, GraphPlan, GroupPlan, Note, Plan, Reason, Rejection
from slotline.registry.negotiation.prepare import attention_candidates, kv_spec_candidates, prepare_request
from slotline.registry.negotiation.request import (
    Asked,
    Candidate,
    GroupRequest,
    Need,
    Part,
    PlanRequest,
    group_layers,
)
from slotline.registry.negotiation.solve import negotiate

__all__ = [
    "CODES",
    "Asked",
    "CacheGroupPlan",
    "Candidate",
    "Code",
    "GraphPlan",
    "GroupPlan",
    "GroupRequest",
    "Need",
    "Note",
    "Part",
    "Plan",
    "PlanRequest",
    "Reason",
    "Rejection",
    "Severity",
    "attention_candidates",
    "capture_sizes",
    "diff",
    "explain_code",
    "group_layers",
    "kv_spec_candidates",
    "negotiate",
    "prepare_request",
    "why_not",
]
