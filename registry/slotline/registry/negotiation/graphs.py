"""Graph modes: their demands on each phase, the state that a group reaches, and the resulting mode over all groups.

A group that cannot be captured breaks the graph at its own layers and does not affect the other groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from slotline.registry.capability import GraphSupport
from slotline.registry.descriptor import DeviceInfo
from slotline.registry.negotiation.groups import CAPTURED, EAGER, NONE
from slotline.registry.negotiation.request import AUTO, PlanRequest

FULL = "full"
PIECEWISE = "piecewise"

_MODES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "none": (NONE, NONE),
        "piecewise": (PIECEWISE, PIECEWISE),
        "full": (FULL, FULL),
        "full_decode_only": (FULL, NONE),
        "full_and_piecewise": (FULL, PIECEWISE),
    }
)
"""What a mode asks of the uniform decode phases and of mixed batches."""

_REQUIRED: Mapping[str, GraphSupport] = MappingProxyType(
    {"decode": GraphSupport.SINGLE_TOKEN, "verify": GraphSupport.UNIFORM, "mixed": GraphSupport.ALWAYS}
)


def effective_mode(request: PlanRequest) -> str:
    """Return the mode to aim at.

    `auto` is the best mode, but some devices have no graphs and some models allow none.
    """
    if request.uncaptured or not request.device.graphs.support:
        return "none"
    return request.auto_graphs if request.graphs.value == AUTO else request.graphs.value


def without_graphs(device: DeviceInfo) -> str:
    """Return the reason why a device has no graphs, as its plugin declares it."""
    note = device.graphs.note
    return f"{device.type} has no graphs" + (f" ({note})" if note else "")


def phases_of(query_len: int) -> tuple[str, ...]:
    """Return the phases that occur. `verify` occurs only under speculation (query_len = 1 + draft tokens > 1)."""
    return ("decode", "verify", "mixed") if query_len > 1 else ("decode", "mixed")


def wanted(mode: str, phase: str) -> str:
    """Return the demand of a mode on a phase: full, piecewise or none."""
    decode, mixed = _MODES[mode]
    return mixed if phase == "mixed" else decode


def required_level(phase: str) -> GraphSupport:
    """Return the graph support needed to capture a phase."""
    return _REQUIRED[phase]


def group_state(want: str, capturable: bool) -> str:
    """Return the state of one group in one phase."""
    if want == NONE:
        return NONE
    return CAPTURED if want == FULL and capturable else EAGER


def phase_state(states: Sequence[str]) -> str:
    """Return a phase's state over all groups: full if all are captured, piecewise if one breaks the graph, or none."""
    if not states or NONE in states:
        return NONE
    return FULL if all(state == CAPTURED for state in states) else PIECEWISE


def resolved_mode(phases: Mapping[str, str]) -> str:
    """Return the mode by its configuration name, from the state of each phase.

    Under speculation `verify` represents uniform decode, since nearly all decode batches have that shape.
    """
    pair = (phases.get("verify", phases["decode"]), phases["mixed"])
    for mode, states in _MODES.items():
        if states == pair:
            return mode
    return PIECEWISE  # pieces for decode, nothing for mixed batches


def capture_sizes(sizes: Sequence[int], uniform_query_len: int, max_requests: int) -> tuple[int, ...]:
    """Return the token counts to capture uniform decode batches at: multiples of the query length, ascending.

    A uniform batch contains whole requests, so a size that is not a multiple of 1 + draft tokens would never occur.
    Sizes are rounded up, and limited to the largest possible batch.

    Args:
        sizes: the requested token counts.
        uniform_query_len: query tokens of each request, 1 + draft tokens.
        max_requests: most requests in a batch.
    """
    top = uniform_query_len * max_requests
    rounded = (-(-size // uniform_query_len) * uniform_query_len for size in sizes if size > 0)
    return tuple(sorted({min(size, top) for size in rounded}))
