"""One call behind attention on a CPU: the numbers of separate calls, and where it steps aside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from slotline.kernels.team_program import Operation, Program, runs_programs, team_of
from slotline.plugins.model_families.chain import run_layers
from slotline.plugins.model_families.passes import dense_kernels, layer_tail
from slotline.plugins.model_families.passes.cpu_products import Way
from slotline.plugins.model_families.passes.layer_link import Projected
from slotline.plugins.model_families.passes.layer_tail import LayerTail
from slotline.plugins.model_families.passes.packed_linear import PackedLinear
from slotline.plugins.model_families.passes.pipeline import optimize

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

pytestmark = pytest.mark.skipif(not dense_kernels.runs(), reason="torch's threads cannot be started here")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def build(dtype: torch.dtype, **changes: Any) -> tuple[Any, tuple[str, ...]]:
    """A tiny Llama with plain products, which our kernels serve for few rows, and the passes' notes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | changes)
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval().requires_grad_(False)
    model = model.to(dtype)
    return model, optimize(model, device="cpu", dtype=dtype, products="plain")


def inputs(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    return torch.randn(1, rows, 64).to(dtype), torch.randn(1, rows, 64).to(dtype)


def tail_of(layer: Any) -> LayerTail:
    """The layer's tail, to be used for every number of rows, whatever the timing said."""
    tail = layer.forward.tail
    assert type(tail) is LayerTail
    tail.faster = (True,) * len(layer_tail.FEW)
    return tail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_gives_the_numbers_of_separate_calls(dtype: torch.dtype, threads: int) -> None:
    if dtype == torch.bfloat16 and not dense_kernels.adds_pairs():
        pytest.skip("the products take float32 inputs on this processor")
    model, notes = build(dtype)
    assert any(note.startswith("one call behind attention in 2 layers") for note in notes), notes
    first, second = model.model.layers
    tail, behind = tail_of(first), second.input_layernorm
    with torch.inference_mode():
        for rows in (1, 2, 5, 16):
            mixed, residual = inputs(rows, dtype)
            kept = residual.clone()
            for norm in (behind, None, first.post_attention_layernorm, behind):  # programs are kept and run again
                found = tail(mixed, residual, norm)
                out, _ = first.forward.behind_attention(mixed, residual, None)
                assert found is not None
                assert torch.equal(found[0], out)
                assert torch.equal(residual, kept)
                if norm is behind:  # the next layer's, so that its projection is computed too
                    assert type(found[1]) is Projected
                    assert torch.equal(found[1].qkv, second.self_attn.q_proj.shared_linear(norm(out)))
                else:
                    assert found[1] is None if norm is None else torch.equal(found[1], norm(out))  # type: ignore[arg-type]
        assert tail(*inputs(17, dtype), behind) is None


def test_a_model_with_tails_gives_the_logits_of_one_without() -> None:
    model, _ = build(torch.float32)
    ids, base = torch.arange(5)[None], model.model

    def chained() -> torch.Tensor:
        """Hidden states of the loop in which a layer gets what the one in front has projected for it."""
        states = base.embed_tokens(ids)
        return run_layers(base.layers, [base.rotary_emb(states, ids)] * 2, states, base.norm)

    with torch.inference_mode():
        for layer in base.layers:
            tail_of(layer)
        with_tails = model(input_ids=ids, use_cache=False).logits, chained()
        handle = base.layers[1].self_attn.q_proj.shared_linear.register_forward_hook(lambda *_: None)
        hooked = chained()  # its projection must be called
        handle.remove()
        for layer in base.layers:
            layer.forward.tail = None
        without = model(input_ids=ids, use_cache=False).logits, chained()
    assert all(map(torch.equal, with_tails, without))
    assert torch.equal(hooked, without[1])


def test_a_replaced_or_hooked_projection_and_a_new_weight_are_seen() -> None:
    model, _ = build(torch.float32)
    layer, mixed, residual = model.model.layers[0], *inputs(3, torch.float32)
    tail, mlp, norm = tail_of(layer), layer.mlp, layer.post_attention_layernorm
    with torch.inference_mode():
        before = tail(mixed, residual, None)
        mlp.down_proj.packed = mlp.down_proj.packed * 2  # another tensor, as an engine that reloads may give
        after = tail(mixed, residual, None)
        assert before is not None
        assert after is not None
        assert torch.equal(after[0], layer.forward.behind_attention(mixed, residual, None)[0])
        assert not torch.equal(after[0], before[0])
        handle = mlp.up_proj.register_forward_hook(lambda *_: None)
        assert tail(mixed, residual, None) is None
        handle.remove()
        assert tail.serves(layer, norm)
        mlp.up_proj = PackedLinear(mlp.up_proj.weight, None, mlp.up_proj.way)
        assert not tail.serves(layer, norm)


def test_layers_that_cannot_be_one_call_say_why() -> None:
    _, notes = build(torch.float32, hidden_act="gelu")
    assert "separate calls behind attention in 2 layers: the MLP has another activation than SiLU" in notes
    model, _ = build(torch.float32)
    layer = model.model.layers[0]
    layer.mlp.up_proj = PackedLinear(layer.mlp.up_proj.weight, None, Way("plain", ("numba", "torch", "torch", "torch")))
    parts = layer_tail._parts_of(layer, layer.forward)
    assert not isinstance(parts, str)
    reasons = tuple(layer_tail.why_not(parts, rows) for rows in layer_tail.FEW)
    assert reasons == ("", "its up projection of 4 rows is torch's", "its up projection of 16 rows is torch's")
    tail = LayerTail(parts)
    with torch.inference_mode():
        tail.faster, said = layer_tail._timed(layer.forward, tail, parts, reasons)
        assert tail.faster[1:] == (False, False)
        assert said.split(" times")[0].endswith(", no, no")
        assert said.endswith("; its up projection of 4 rows is torch's; its up projection of 16 rows is torch's")
        assert tail(*inputs(4, torch.float32), None) is None


def test_a_program_runs_each_threads_share_and_waits_between(threads: int) -> None:
    if not runs_programs():
        pytest.skip("torch's threads cannot be started here")
    torch.manual_seed(1)
    x, weights = torch.randn(2, 32), [torch.randn(32, 32) for _ in range(3)]
    kernel = dense_kernels.compile_product(narrow=False, paired=False).address
    team = team_of(threads)
    functions = (0, 0) if team is None else (team.thread_num, team.num_threads)
    chain = [x, *(torch.empty(2, 32) for _ in weights)]
    operations = [
        Operation(
            kernel, (a.data_ptr(), w.data_ptr(), 0, 0, b.data_ptr(), 2, 32, 32, dense_kernels.NOTHING, *functions)
        )
        for a, w, b in zip(chain, weights, chain[1:], strict=False)
    ]
    program = Program(operations, threads)
    for _ in range(20):  # each product reads what all threads wrote before
        chain[-1].zero_()
        program.run()
        expected = x
        for weight in weights:
            expected = dense_kernels.few_rows(expected, weight, None)
        assert torch.equal(chain[-1], expected)
