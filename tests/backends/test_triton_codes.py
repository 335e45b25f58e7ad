"""Caches of codes with scales in the Triton kernels, under the interpreter: negotiated, and right as the suite says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import random_prompts
from repository import SUPPORT

pytest.importorskip("triton")

from interpreted_attention import descriptor

from slotline.backends.triton import probe
from slotline.core import LLM, SamplingParams
from slotline.registry.descriptor import DeviceInfo
from slotline.testing import Level, Outcome, check_plugin

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of log2(0), which is minus infinity here
]
CHECKS = (
    "formats",
    "formats.features",
    "formats.rounding",
    *(pytest.param(f"formats.{name}", marks=pytest.mark.slow) for name in ("long", "hostile", "reuse")),
)


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_store_and_read_codes_as_the_contract_says(name: str) -> None:
    records = check_plugin(descriptor, device="cpu", level=Level.STATEFUL, only=f"attention.{name}")
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert Outcome.PASSED in {record.outcome for record in records}


def test_cards_that_cannot_convert_e4m3_are_not_offered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotline.backends.triton.why_no_triton", lambda: None)
    old, new = (probe(DeviceInfo(type="cuda", compute_capability=own)).dtypes for own in ((8, 0), (8, 9)))
    assert old.refusal(("bfloat16", "float8_e4m3fn"))
    assert old.refusal(("bfloat16", "int8")) is None
    assert new.refusal(("bfloat16", "float8_e4m3fn")) is None


@pytest.mark.parametrize("name", ["int8_token_head", "fp8_token_head", "int4_rotated"])
def test_an_engine_reads_the_same_codes_as_torch(name: str, tiny: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "memory": "256KiB"}
    settings |= {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    settings |= {"cache.dtype": name, "plugins": [f"{SUPPORT / 'interpreted_attention.py'}:descriptor"]}
    engines = [
        LLM(model=str(tiny("llama")), backend=backend, **settings) for backend in ("torch", "interpreted_triton")
    ]
    assert engines[1].plan.groups[0].cache_format == name
    first, second = (llm.generate(random_prompts([33, 9]), params) for llm in engines)
    assert [a.outputs[0].token_ids for a in first] == [b.outputs[0].token_ids for b in second]
