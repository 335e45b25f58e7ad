"""The state checks: what they kill, what they let pass, and that their contract is what real models compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from attrs import evolve
from mutant_trials import until_killed
from remembered_oracle import remembered
from small_sizes import in_small
from torch import Tensor, nn

from slotline.registry.capability import Flag, GraphSupport, Max, Set
from slotline.registry.capability import Level as GraphLevel
from slotline.registry.contracts.state import STATE_KINDS, StateBatch, StateLayer, StateTensorSpec
from slotline.registry.descriptor import Descriptor
from slotline.testing import Level, Outcome, check_plugin
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.state import CORRECT, MUTANTS
from slotline.testing.oracles.state import advance, zero_state
from slotline.testing.reference.state import ReferenceState, descriptor_of

Tensors = Mapping[str, Tensor]
CPU_LEVELS = Level.STATEFUL


@pytest.fixture(scope="module", autouse=True)
def _remembered() -> Iterator[None]:
    with remembered():
        yield


@pytest.mark.spread(38, slow=12)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed_at_its_level(mutant: Mutant) -> None:
    killer = until_killed(mutant)[-1]
    assert killer.bad, "survived"
    assert killer.level == mutant.level, f"killed by {killer.id} at {killer.level}: {killer.reason}"
    assert killer.reason


def test_names_of_mutants_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.spread(0, slow=1)
@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_right_implementation_passes_with_room_to_spare(correct: Correct) -> None:
    records = check_plugin(correct.descriptor, level=CPU_LEVELS, only=in_small)
    assert [f"{record.id}: {record.reason}" for record in records if record.bad] == []
    ran = {record.case["kind"] for record in records if record.outcome is Outcome.PASSED and "kind" in record.case}
    assert ran == set(STATE_KINDS)
    assert max(record.ratio or 0.0 for record in records) < 0.75


@pytest.mark.exhaustive
@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_right_implementation_passes_at_all_sizes(correct: Correct) -> None:
    records = check_plugin(correct.descriptor, level=CPU_LEVELS, only=lambda item: item.profile == "sizes")
    assert {record.outcome for record in records} == {Outcome.PASSED}


def _passes(descriptor: Descriptor[object], level: Level = CPU_LEVELS) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for record in check_plugin(descriptor, level=level, only=in_small):
        assert not record.bad, f"{record.id}: {record.reason}"
        found.setdefault(record.id, []).append(record.outcome)
    return found


class OneToken(ReferenceState):
    """Refuses what it does not declare."""

    def advance(self, layer, inputs, before, row):  # type: ignore[no-untyped-def]
        assert row.num_tokens == 1, "more than one token of a request in a batch, though one is declared"
        return super().advance(layer, inputs, before, row)


@pytest.mark.slow
def test_backend_for_one_token_at_a_time_is_given_no_more() -> None:
    outcomes = _passes(descriptor_of("one_token", OneToken, ("mamba2",), query_len=Max(1)))
    assert set(outcomes["state.values.decode"]) == {Outcome.PASSED}
    assert set(outcomes["state.padding.rows"]) == {Outcome.PASSED}
    assert set(outcomes["state.rollback.each_position"]) == {Outcome.SKIPPED}
    assert set(outcomes["state.chunked.equals_one_shot"]) == {Outcome.SKIPPED}


class BySlot(ReferenceState):
    """One token of each request, all requests at once and without a look at the host: a forward that can be captured.

    Each slot asks which token is its own, so that padding writes nothing.
    """

    def plan(self, batch: StateBatch) -> StateBatch:  # type: ignore[override]
        return batch  # its tensors stay where they are from one replay to the next

    def forward(self, layer: StateLayer, inputs: Tensors, state: Tensors, plan: StateBatch) -> Tensor:  # type: ignore[override]
        tokens = torch.arange(len(inputs["x"]), device=plan.slots.device)
        row = torch.searchsorted(plan.query_start_loc[1:].long(), tokens, right=True)
        inside = row < len(plan.slots)
        row = row.clamp(max=len(plan.slots) - 1)
        slots = torch.where(inside, plan.slots[row], -1).long()  # of each token
        starts = {name: value[slots.clamp(min=0)].float() for name, value in state.items()}
        keep = plan.has_initial_state[row] & (slots >= 0)
        starts = {name: torch.where(_over(keep, value), value, 0.0) for name, value in starts.items()}
        wide = {name: value.float() for name, value in inputs.items()}
        output, new = (self._conv if layer.state_kind == "short_conv" else self._mamba2)(layer, wide, starts)
        for name, value in state.items():
            own = slots[None] == torch.arange(value.shape[0], device=slots.device)[:, None]  # [num_slots, tokens]
            chosen = new[name][own.int().argmax(1)].to(value.dtype)
            value.copy_(torch.where(_over(own.any(1), value), chosen, value))
        return torch.where(_over(slots >= 0, output), output, 0.0).to(inputs["x"].dtype)

    def _conv(self, layer: StateLayer, inputs: Tensors, start: Tensors) -> tuple[Tensor, Tensors]:
        joined = torch.cat([start["conv"], inputs["x"][:, :, None]], dim=2)
        output = (joined * inputs["weight"]).sum(2) + inputs.get("bias", torch.zeros((), device=joined.device))
        return self.activate(layer.facts, output), {"conv": joined[:, :, 1:]}

    def _mamba2(self, layer: StateLayer, inputs: Tensors, start: Tensors) -> tuple[Tensor, Tensors]:
        d = self.time_step(layer.facts, inputs)
        b, c = (self.per_head(inputs[name], layer.facts["num_heads"]) for name in ("B", "C"))
        increment = (d[..., None] * inputs["x"])[..., None] * b[:, :, None, :]
        ssm = self.decay(d * inputs["A"])[..., None, None] * start["ssm"] + increment
        return self.finish((ssm * c[:, :, None, :]).sum(-1), inputs, self.skip_of_heads(inputs)), {"ssm": ssm}


def _over(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (value.dim() - 1))


BY_SLOT = descriptor_of(
    "by_slot",
    BySlot,
    ("short_conv", "mamba2"),
    query_len=Max(1),
    rollback=Flag(False),
    graphs=GraphLevel(GraphSupport.SINGLE_TOKEN),
)


@pytest.mark.slow
def test_backend_that_can_be_captured_passes() -> None:
    outcomes = _passes(BY_SLOT)
    assert set(outcomes["state.history.random"]) == {Outcome.PASSED}
    assert set(outcomes["state.padding.rows"]) == {Outcome.PASSED}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on CUDA")
def test_captured_forward_passes() -> None:
    records = check_plugin(BY_SLOT, only=lambda item: item.level is Level.GRAPHS)
    assert [record.outcome for record in records] == [Outcome.PASSED, Outcome.PASSED], [r.reason for r in records]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a plan that is made too early shows in replays alone")
def test_replay_of_an_old_plan_is_seen() -> None:
    records = check_plugin(
        descriptor_of("frozen_plan", FrozenPlan, ("mamba2",), query_len=Max(1), rollback=Flag(False),
                      graphs=GraphLevel(GraphSupport.SINGLE_TOKEN)),
        only=lambda item: item.level is Level.GRAPHS,
    )  # fmt: skip
    assert [record.outcome for record in records] == [Outcome.FAILED]


class FrozenPlan(BySlot):
    """Keeps copies of the batch's tensors in its plan, which a captured forward then goes on reading."""

    def plan(self, batch: StateBatch) -> StateBatch:  # type: ignore[override]
        return evolve(batch, slots=batch.slots.clone(), has_initial_state=batch.has_initial_state.clone())


class NeitherCopiesNorCommits(ReferenceState):
    """Has no rollback and no checkpoints."""

    commit = None  # type: ignore[assignment]
    copy = None  # type: ignore[assignment]


def test_undeclared_rollback_and_checkpoints_are_not_called() -> None:
    plain = descriptor_of("plain", NeitherCopiesNorCommits, ("mamba1",), rollback=Flag(False), checkpoints=Flag(False))
    outcomes = _passes(plain)
    assert {name for name, found in outcomes.items() if Outcome.PASSED not in found} >= {
        "state.rollback.each_position",
        "state.checkpoint.copy_on_donate",
    }
    assert outcomes["state.history.random"] == [Outcome.PASSED]


def test_undeclared_rollback_and_checkpoints_that_work_are_told() -> None:
    modest = descriptor_of("modest", ReferenceState, ("short_conv",), rollback=Flag(False), checkpoints=Flag(False))
    outcomes = _passes(modest, Level.HOSTILE)
    assert outcomes["state.underdeclared.rollback"] == [Outcome.PASSED]
    assert outcomes["state.underdeclared.checkpoints"] == [Outcome.PASSED]


def test_half_precision_alone_is_enough_to_be_tested() -> None:
    half = descriptor_of("half", ReferenceState, ("gated_delta",), dtypes=Set({("bfloat16", "float32")}))
    assert _passes(half, Level.NUMERICS)["state.values.long_memory"] == [Outcome.PASSED]


@pytest.mark.parametrize("name", ["state-in-bfloat16", "delta-state-in-bfloat16"])
def test_state_in_bfloat16_is_seen_beside_bfloat16_activations(name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    capabilities = evolve(mutant.descriptor.capabilities, dtypes=Set({("bfloat16", "float32")}))
    killer = check_plugin(evolve(mutant.descriptor, capabilities=capabilities), stop_at_first=True)[-1]
    assert killer.bad
    assert killer.level is Level.NUMERICS


def test_failure_names_tensor_place_and_values() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "time-bias-missing")
    reason = check_plugin(mutant.descriptor, stop_at_first=True)[-1].reason
    for part in ("output of mamba1", "slot 0", "tokens 0..36", "should be", "allowed"):
        assert part in reason


# --- The contract against the modules of transformers, in float32 on their slow paths -------------------------------

TOKENS, PROMPT = 23, 17
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def _layer(kind: str, **facts: object) -> StateLayer:
    sizes = {**facts, "width - 1": int(str(facts.get("width", 1))) - 1}
    tensors = tuple(
        StateTensorSpec(name=name, shape=tuple(int(str(sizes[dim])) for dim in dims), dtype="float32")
        for name, dims in STATE_KINDS[kind].tensors.items()
    )
    return StateLayer(name=kind, index=0, state_kind=kind, tensors=tensors, facts=facts)


def _run(kind: str, inputs: Mapping[str, Tensor], **facts: object) -> tuple[Tensor, dict[str, Tensor]]:
    layer = _layer(kind, **facts)
    output, state = advance(layer, inputs, zero_state(layer))
    return output.float(), state


def _randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 0.5 if name.endswith(("A_log", "dt_bias", "D")) else 0.3
            parameter.normal_(0.0, spread)
    return module.eval()


def _module_outputs(
    module: nn.Module, config: object, hidden: Tensor, cache_name: str
) -> tuple[Tensor, Tensor, object]:
    """In one piece without a cache, and a prompt followed by single tokens with one."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    with torch.no_grad():
        whole = module(hidden[None])[0]
        pieces = [module(hidden[None, :PROMPT], **{cache_name: cache})]
        pieces += [module(hidden[None, t : t + 1], **{cache_name: cache}) for t in range(PROMPT, TOKENS)]
    return whole, torch.cat(pieces, dim=1)[0], cache


def _conv(module: nn.Conv1d, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    inputs = {"x": x, "weight": module.weight[:, 0]} | ({} if module.bias is None else {"bias": module.bias})
    width = module.weight.shape[2]
    output, state = _run("short_conv", inputs, channels=x.shape[1], width=width, activation=activation)
    return output, state["conv"]


@torch.no_grad()
def test_short_conv_is_lfm2s() -> None:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    config = Lfm2Config(hidden_size=12, num_hidden_layers=1, conv_L_cache=3, conv_bias=True, layer_types=["conv"])
    module = _randomised(Lfm2ShortConv(config, 0))
    hidden = torch.randn(TOKENS, 12)
    whole, pieces, cache = _module_outputs(module, config, hidden, "past_key_values")
    b, c, x = module.in_proj(hidden).chunk(3, dim=-1)
    convolved, conv = _conv(module.conv, b * x, "none")
    ours = module.out_proj(c * convolved)
    torch.testing.assert_close(ours, whole, **CLOSE)
    torch.testing.assert_close(ours, pieces, **CLOSE)
    torch.testing.assert_close(conv.float(), cache.get_conv_state(0, state_idx=0)[0, :, -2:], **CLOSE)


@torch.no_grad()
def test_mamba1_is_mambas() -> None:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=10, state_size=5, conv_kernel=4, num_hidden_layers=1, time_step_rank=3)
    module = _randomised(MambaMixer(config, 0))
    hidden = torch.randn(TOKENS, 10)
    whole, pieces, cache = _module_outputs(module, config, hidden, "cache_params")
    x, z = module.in_proj(hidden).chunk(2, dim=-1)
    x, conv = _conv(module.conv1d, x, "silu")
    dt, b, c = module.x_proj(x).split([3, 5, 5], dim=-1)
    inputs = {"x": x, "dt": dt @ module.dt_proj.weight.T, "A": -torch.exp(module.A_log), "B": b, "C": c}
    inputs |= {"D": module.D, "dt_bias": module.dt_proj.bias, "z": z}
    output, state = _run("mamba1", inputs, channels=x.shape[1], state_size=5, dt_softplus=True)
    torch.testing.assert_close(module.out_proj(output), whole, **CLOSE)
    torch.testing.assert_close(module.out_proj(output), pieces, **CLOSE)
    torch.testing.assert_close(conv.float(), cache.get_conv_state(0, state_idx=0)[0, :, -3:], **CLOSE)
    torch.testing.assert_close(state["ssm"].float(), cache.get_recurrent_state(0, state_idx=0)[0], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.4, 0.9)], ids=["no-limit", "limit"])
def test_mamba2_is_mamba2s(limit: tuple[float, float]) -> None:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    heads, size, groups, n = 6, 4, 2, 5
    config = Mamba2Config(
        hidden_size=12, expand=2, num_heads=heads, head_dim=size, n_groups=groups, state_size=n, conv_kernel=4,
        num_hidden_layers=1, chunk_size=8, time_step_limit=limit,
    )  # fmt: skip
    module = _randomised(Mamba2Mixer(config, 0))
    hidden = torch.randn(TOKENS, 12)
    whole, pieces, cache = _module_outputs(module, config, hidden, "cache_params")
    gate, mixed, dt = module.in_proj(hidden).split([heads * size, heads * size + 2 * groups * n, heads], dim=-1)
    mixed, conv = _conv(module.conv1d, mixed, "silu")
    x, b, c = mixed.split([heads * size, groups * n, groups * n], dim=-1)
    inputs = {
        "x": x.unflatten(1, (heads, size)), "dt": dt, "A": -torch.exp(module.A_log), "B": b.unflatten(1, (groups, n)),
        "C": c.unflatten(1, (groups, n)), "D": module.D, "dt_bias": module.dt_bias,
    }  # fmt: skip
    facts = {"num_heads": heads, "head_size": size, "num_groups": groups, "state_size": n}
    output, state = _run("mamba2", inputs, **facts, dt_softplus=True, dt_limit=limit)
    ours = module.out_proj(module.norm(output.flatten(1), gate))
    torch.testing.assert_close(ours, whole, **CLOSE)
    if limit[1] == float("inf"):  # the module's single-token path ignores the limit
        torch.testing.assert_close(ours, pieces, **CLOSE)
        torch.testing.assert_close(state["ssm"].float(), cache.get_recurrent_state(0, state_idx=0)[0], **CLOSE)
    torch.testing.assert_close(conv.float(), cache.get_conv_state(0, state_idx=0)[0, :, -3:], **CLOSE)


@torch.no_grad()
def test_gated_delta_is_qwen3_nexts() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    key_heads, value_heads, k, v = 2, 6, 8, 5
    config = Qwen3NextConfig(
        hidden_size=16, num_hidden_layers=1, linear_num_key_heads=key_heads, linear_num_value_heads=value_heads,
        linear_key_head_dim=k, linear_value_head_dim=v, linear_conv_kernel_dim=4, layer_types=["linear_attention"],
    )  # fmt: skip
    module = _randomised(Qwen3NextGatedDeltaNet(config, 0))
    hidden = torch.randn(TOKENS, 16)
    whole, pieces, cache = _module_outputs(module, config, hidden, "cache_params")
    parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden[None]), module.in_proj_ba(hidden[None]))
    query, key, value, z, b, a = (part[0] for part in parts)
    mixed = torch.cat([part.flatten(1) for part in (query, key, value)], dim=1)
    mixed, conv = _conv(module.conv1d, mixed, "silu")
    query, key, value = mixed.split([key_heads * k, key_heads * k, value_heads * v], dim=-1)
    inputs = {
        "q": query.unflatten(1, (key_heads, k)), "k": key.unflatten(1, (key_heads, k)),
        "v": value.unflatten(1, (value_heads, v)), "beta": torch.sigmoid(b),
        "g": -torch.exp(module.A_log) * nn.functional.softplus(a + module.dt_bias),
    }  # fmt: skip
    facts = {"num_k_heads": key_heads, "num_v_heads": value_heads, "head_size_k": k, "head_size_v": v}
    output, state = _run("gated_delta", inputs, **facts, qk_l2norm=True, scale=k**-0.5)
    ours = module.out_proj(module.norm(output.flatten(0, 1), z.flatten(0, 1)).unflatten(0, (TOKENS, -1)).flatten(1))
    torch.testing.assert_close(ours, whole, **CLOSE)
    torch.testing.assert_close(ours, pieces, **CLOSE)
    torch.testing.assert_close(conv.float(), cache.get_conv_state(0, state_idx=0)[0, :, -3:], **CLOSE)
    torch.testing.assert_close(state["delta"].float(), cache.get_recurrent_state(0, state_idx=0)[0], **CLOSE)
