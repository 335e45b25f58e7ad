"""Texts and pieces of images that a GPU attends to in one call: the same as one by one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from slotline.plugins.model_families import packed_attention
from slotline.testing import Outcome, check_plugin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_pieces_see_nothing_of_each_other() -> None:
    bounds = torch.tensor([0, 1, 65, 65, 200], dtype=torch.int32)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 200, 80, device="cuda", dtype=torch.bfloat16)
    found, _ = packed_attention.attend(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        scaling=0.1,
        cu_seq_lens_q=bounds.cuda(),
        max_length_q=135,
    )
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        parts = (part[:, :, start:end].float() for part in (query, key, value))
        alone = scaled_dot_product_attention(*parts, scale=0.1).transpose(1, 2)
        torch.testing.assert_close(found[:, start:end].float(), alone, atol=1e-2, rtol=1e-2)


@pytest.mark.behaviour(66)
def test_the_torch_backend_passes_the_checks_of_encoders_on_a_gpu() -> None:
    records = check_plugin("attention:torch", device="cuda", only=lambda check: "encoder_only" in check.id)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert "attention.encoder_only" in {record.id for record in records if record.outcome is Outcome.PASSED}
