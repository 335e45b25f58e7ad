"""Inputs beside query, key and value: handed to backends that know them, refused where a backend does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from attrs import evolve
from negotiation_cases import FULL, backend, layer, request

from slotline.builder.graph_capture import breaking
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher, AttentionGroup
from slotline.registry.capability import Set
from slotline.registry.contracts import AttentionLayer, LayerInput
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import negotiate
from slotline.testing.environments.attention import World
from slotline.testing.environments.attention_case import Case
from slotline.testing.reference.attention.backend import EagerAttention

GATE = LayerInput("gate", (1,), "float32")
GATED = {"inputs": (GATE,)}


class GatedAttention(EagerAttention):
    """The reference, whose output is multiplied by a gate [num_tokens, 1] and whose writes count the gates."""

    written = 0

    def write(self, *given: Any, inputs: Mapping[str, torch.Tensor]) -> None:  # type: ignore[override]
        self.written += len(inputs["gate"])
        super().write(*given)

    def forward(self, *given: Any, inputs: Mapping[str, torch.Tensor]) -> None:  # type: ignore[override]
        super().forward(*given)
        given[6].mul_(inputs["gate"][:, :, None])


@pytest.fixture
def world() -> World:
    return World(Case(requests=((3, 9), (1, 30)), padding=0))


def served(world: World, kind: type[EagerAttention], own: AttentionLayer) -> tuple[AttentionDispatcher, Any]:
    """A dispatcher with one layer, planned for the world's batch, and its backend."""
    built = kind(evolve(world.case.context(), layers=(own,)))
    group = AttentionGroup(name="full", backend=built, writes_cache=False, batch=0, layers=(own,))
    router = AttentionDispatcher([group], {0: world.cache})
    router.plan([world.batch])
    return router, built


def states(world: World) -> tuple[torch.Tensor, ...]:
    """Query, key and value of a step's tokens."""
    generator = torch.Generator().manual_seed(0)
    case, tokens = world.case, world.batch.num_tokens
    shapes = [(case.num_heads, case.head_size), *[(case.num_kv_heads, case.head_size)] * 2]
    return tuple(torch.randn(tokens, *shape, generator=generator) for shape in shapes)


def test_write_and_forward_get_the_inputs_of_a_layer(world: World) -> None:
    plain, _ = served(world, EagerAttention, world.layer)
    wanted = plain.bind_plans(plain.step)(world.layer, *states(world))
    own = evolve(world.layer, **GATED)
    router, built = served(world, GatedAttention, own)
    gate = torch.tensor([[0.0], [0.5], [2.0], [-1.0]])
    got = router.bind_plans(router.step)(own, *states(world), inputs={"gate": gate})
    torch.testing.assert_close(got, wanted * gate[:, :, None])
    assert built.written == 4


def test_inputs_reach_a_layer_at_which_a_graph_is_broken_with_the_values_of_each_replay(world: World) -> None:
    own = evolve(world.layer, **GATED)
    router, _ = served(world, GatedAttention, own)
    gate, given = torch.ones(4, 1), states(world)  # which the graph's memory would keep
    expected = router.bind_plans(router.step)(own, *given, inputs={"gate": gate})
    later: list[Callable[[], None]] = []
    out = breaking(router, ["full"], later.append)(own, *given, inputs={"gate": gate})
    gate.fill_(3.0)  # as a replay changes what lies at the captured address
    later[0]()
    torch.testing.assert_close(out, 3 * expected)


def test_a_layer_without_inputs_calls_its_backend_as_ever(world: World) -> None:
    router, _ = served(world, EagerAttention, world.layer)  # its methods take no `inputs`
    assert router.bind_plans(router.step)(world.layer, *states(world)).isfinite().all()


def test_a_backend_that_does_not_read_an_input_is_refused_with_its_name() -> None:
    knows = backend("knows", layer_inputs=Set(("gate",)))
    plan = negotiate(request(layer(0, **GATED)), [backend("plain", priority=5), knows], [FULL])
    (group,) = plan.groups
    assert group.backend == "knows"
    (lost,) = group.rejected
    assert [str(reason.code) for reason in lost.reasons] == ["N183"]
    assert "layer inputs: needs gate, offers" in lost.reasons[0].text
    assert "inputs gate" in plan.explain()


def test_a_model_with_an_input_that_no_backend_reads_has_no_plan() -> None:
    with pytest.raises(NegotiationError, match="N183 layer inputs: needs gate"):
        negotiate(request(layer(0, **GATED)), [backend("plain")], [FULL])


def test_layers_with_other_inputs_form_groups_of_their_own() -> None:
    knows = backend("knows", layer_inputs=Set(("gate",)))
    plan = negotiate(request(layer(0, **GATED), layer(1), layer(2, **GATED)), [knows, backend("plain")], [FULL])
    assert [[each.index for each in group.layers] for group in plan.groups] == [[0, 2], [1]]


def test_every_query_of_a_last_layer_with_inputs_is_computed() -> None:
    from slotline.registry.negotiation import group_layers

    knows = backend("knows", layer_inputs=Set(("gate",)), several_plans=True)
    for extra, skips in (({}, True), (GATED, False)):
        asked = evolve(request(layer(0, **extra)), groups=group_layers((layer(0, **extra),), (), 0))
        assert negotiate(asked, [knows], [FULL]).groups[0].last_queries is skips
