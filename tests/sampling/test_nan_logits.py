"""NaN in logits is noticed by every way of drawing tokens, and ends the request with the plugins' names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import broken_plugins
import numpy as np
import pytest
import tiny_models
import torch
from repository import SUPPORT
from sampling_cases import batch, params
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams
from slotline.core.device.cpu_ops import CpuOps
from slotline.core.sampling.nan_logits import NAN_LOGITS, marked_nan
from slotline.core.sampling.sampler import sample_checked
from slotline.registry.errors import ContractError

pytestmark = pytest.mark.usefixtures("one_thread")
Tiny = Callable[..., Path]
BACKENDS = SUPPORT / "nan_backends.py"
UNCHECKED = {"observability.check_integrity": False}
LIMITS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"top_k": [9, 0, 4, 0, 0, 2], "top_p": [0.9, 1.0, 1.0, 0.3, 1.0, 1.0], "temperature": [1, 0, 0.5, 0.7, 1.0, 2.0]},
]


def nan_rows(vocab_size: int) -> tuple[torch.Tensor, list[bool]]:
    """Six rows: NaN at the first place, in the middle, nearly everywhere and everywhere; none; infinities."""
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(3))
    logits[0, 0] = torch.nan
    logits[1, vocab_size // 2 + 1] = torch.nan
    logits[2, 3:] = torch.nan
    logits[3] = torch.nan
    logits[5, : vocab_size // 2] = -torch.inf
    return logits, [True, True, True, True, False, False]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_every_way_of_drawing_notices_the_rows_that_hold_nan(limits: dict[str, Any], vocab_size: int) -> None:
    logits, wanted = nan_rows(vocab_size)
    rows = batch(6, **limits)
    drawn = sample_checked(logits, rows, None if rows.all_greedy else params(rows), CpuOps())
    assert drawn.holds_nan is not None
    assert drawn.holds_nan.tolist() == wanted
    assert ((drawn.tokens >= 0) & (drawn.tokens < vocab_size)).all()
    marked = marked_nan(torch.tensor([-1, 7, 7, 7, 7, -3]), drawn.holds_nan, marks=True)
    assert marked.tolist() == [-1, NAN_LOGITS, NAN_LOGITS, NAN_LOGITS, 7, -3]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_rows_without_nan_are_not_taken_for_such_whatever_infinities_they_hold(limits: dict[str, Any]) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(4))
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    logits[3, 1:] = -torch.inf
    rows = batch(6, **limits)
    drawn = sample_checked(logits, rows, None if rows.all_greedy else params(rows), CpuOps())
    assert drawn.holds_nan is None or not drawn.holds_nan.any()


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_the_kernels_notice_the_same_rows_and_tell_the_host(limits: dict[str, Any], vocab_size: int) -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    from devices import transfer_buffer_for

    from slotline.backends.cuda import triton_sampling
    from slotline.backends.cuda.triton_fast_sampler import FastSampler
    from slotline.core.batch.placeholder_tokens import PlaceholderTokens

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, wanted = nan_rows(vocab_size)
    logits, rows = logits.to(device), batch(6, **limits)
    packed = None if rows.all_greedy else params(rows, device)
    if packed is not None:
        assert triton_sampling.sample_into(logits, packed).holds_nan.tolist() == wanted
    table = PlaceholderTokens(vocab_size, 6, device)
    stand_ins = torch.from_numpy(table.stand_ins(np.arange(6))).to(device)
    draws = FastSampler(table, transfer_buffer_for(device), 6, vocab_size, device)
    tokens, arriving = draws(logits, packed, stand_ins, captured=False)
    want = [NAN_LOGITS if nan else token for nan, token in zip(wanted, tokens.tolist(), strict=True)]
    assert arriving.wait().tolist() == want
    assert table.tokens[vocab_size:].tolist() == tokens.tolist()  # what the next step reads is a token
    assert ((tokens >= 0) & (tokens < vocab_size)).all()


# ---- engines


@pytest.fixture
def armed() -> Iterator[list[bool]]:
    broken_plugins.armed.clear()
    yield broken_plugins.armed
    broken_plugins.armed.clear()


def engine(tiny: Tiny, how: str, **settings: Any) -> tuple[LLM, str]:
    inline = f"{BACKENDS}:backend_{how}"
    llm = LLM(tiny("llama"), **{**DEFAULTS, "backend": "wrong", "plugins.inline": (inline,), **settings})
    return llm, f"attention:wrong of the inline plugin {inline}"


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "asynchronous": {"scheduler.async": True},
    "drafted": {"drafter.name": "ngram", "drafter.tokens": 2, "drafter.adaptive": False},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_whose_logits_become_nan_ends_with_an_error_that_names_the_backend_and_the_others_go_on(
    mode: str, temperature: float, *, checks: bool, armed: list[bool], tiny: Tiny
) -> None:
    llm, source = engine(tiny, "long", **MODES[mode], **({} if checks else UNCHECKED))
    common = {"temperature": temperature, "seed": 1, "ignore_eos": True, "max_tokens": 12}
    prompts = [[5, 6, 7] * 2, [5, 6, 7] * 5, [9, 8, 7]]
    wanted = llm.generate(prompts, SamplingParams(**common))
    armed.append(True)
    found = llm.generate(prompts, SamplingParams(**common))
    for i in (0, 2):
        assert found[i].outputs[0].token_ids == wanted[i].outputs[0].token_ids
        assert found[i].outputs[0].finish_reason == "length"
    bad = found[1].outputs[0]
    assert bad.finish_reason == "error"
    assert bad.token_ids == wanted[1].outputs[0].token_ids[:6]  # up to 20 tokens it counts
    text = str(bad.stop_reason)
    assert text.startswith("PluginError: the model gave NaN: ")
    assert source in text
    assert ("`out` of attention layer" in text) == checks
    assert not llm.engine.has_work


def test_what_a_request_with_nan_stored_is_not_shared_with_later_ones(armed: list[bool], tiny: Tiny) -> None:
    llm, _ = engine(tiny, "long")
    prompt, params = [list(range(5, 45))], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (wanted,) = llm.generate([[*range(45, 49)]], params)
    armed.append(True)
    assert llm.generate(prompt, params)[0].outputs[0].finish_reason == "error"
    armed.clear()
    (found,) = llm.generate(prompt, params)
    assert found.metrics.num_cached_tokens == 0
    assert (found.outputs[0].finish_reason, wanted.outputs[0].finish_reason) == ("length", "length")
    (again,) = llm.generate(prompt, params)
    assert again.metrics.num_cached_tokens == 32
    assert again.outputs[0].token_ids == found.outputs[0].token_ids


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("always", "wrote nothing, or NaN only, to `out` of attention layer"),
        ("returns", "wrote nothing, or NaN only, to `out` of attention layer"),
    ],
)
def test_a_backend_that_leaves_no_output_is_refused_before_the_first_request(how: str, found: str, tiny: Tiny) -> None:
    with pytest.raises(ContractError) as raised:
        engine(tiny, how, **UNCHECKED)
    assert found in raised.value.message
    assert "attention:wrong of the inline plugin" in raised.value.message
    assert ("returned its output instead" in raised.value.message) == (how == "returns")


@pytest.mark.parametrize("how", ["none", "short", "nan"])
def test_a_state_backend_whose_output_is_wrong_is_refused_before_the_first_request(how: str, tiny: Tiny) -> None:
    inline = f"{BACKENDS}:state_{how}"
    with pytest.raises(ContractError, match=r"state:wrong of the inline plugin .* gave, for state layer"):
        LLM(tiny("mamba2"), **{**DEFAULTS, **UNCHECKED, "state.backend": "wrong", "plugins.inline": (inline,)})


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("table", "wrote into `block_table` of its batch in plan()"),
        ("lengths", "wrote into `seq_lens` of its batch in plan()"),
        ("forward_table", "wrote into `block_table` of its batch in forward()"),
    ],
)
def test_a_backend_that_writes_into_its_batch_is_named_where_checks_are_on(
    how: str, found: str, armed: list[bool], tiny: Tiny
) -> None:
    llm, source = engine(tiny, how)
    armed.append(True)
    with pytest.raises(ContractError) as raised:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0))
    assert raised.value.message == f"{source} {found}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_of_the_models_weights_ends_the_request_in_every_mode(temperature: float, tiny: Tiny) -> None:
    llm = LLM(tiny("llama"), **{**DEFAULTS, **UNCHECKED, "cache.prefix_caching": False})
    weight = llm.engine.runner.model.hf_model.get_input_embeddings().weight  # type: ignore[attr-defined]
    weight.data[300] = torch.nan
    params = SamplingParams(max_tokens=3, temperature=temperature, ignore_eos=True, logprobs=1, seed=0)
    good, bad = (output.outputs[0] for output in llm.generate([[5, 6], [5, 300, 6]], params))
    assert (good.finish_reason, bad.finish_reason, bad.token_ids) == ("length", "error", [])
    assert "or the weights did" in str(bad.stop_reason)
    assert tiny_models.VOCAB_SIZE > 300
