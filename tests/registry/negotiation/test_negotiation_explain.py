"""Explanations: fixed text for fixed data, and documentation that keeps up with the codes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from negotiation_cases import FULL, GPU, backend, explicit, layer, request, sliding
from repository import ROOT

from slotline.registry.capability import Align, Flag, GraphSupport, Level, Range, Set
from slotline.registry.errors import ConfigError, NegotiationError
from slotline.registry.negotiation import (
    CODES,
    Asked,
    Candidate,
    Part,
    PlanRequest,
    diff,
    explain_code,
    negotiate,
    why_not,
)

GOLDEN = Path(__file__).parent / "golden"
DOCS = ROOT / "docs" / "reference" / "negotiation-codes.md"
BACKEND = "run.toml:3 attention.backend"
BLOCK_SIZE = "run.toml:5 cache.block_size"


def golden(name: str, text: str) -> None:
    """Compare with the file; SLOTLINE_UPDATE_GOLDEN=1 writes it instead."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("SLOTLINE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def two_on_a_cpu() -> tuple[PlanRequest, list[Candidate]]:
    part = Part(kind="logits_processor", name="penalties", distribution="slotline", version="0.1.0", origin="default")
    asked = request(
        layer(0), sliding(1), layer(2), parts=(part,), facts={"architecture": "LlamaForCausalLM", "layers": 3}
    )
    offers = [
        backend("cpu", priority=100, priority_reason="reads the cache in place"),
        backend("torch", priority=10, priority_reason="runs everywhere"),
        backend("cuda_only", devices=Set(("cuda",)), sliding_window=Flag(False)),
        Candidate(name="broken", distribution="broken-attn", version="0.3", load_error="ImportError: libfoo.so.1"),
    ]
    return asked, offers


def large_pages(block_size: Asked[int] | Asked[str]) -> tuple[PlanRequest, list[Candidate]]:
    fa2 = backend("fa2", kernel_block_sizes=Align(multiple_of=256), graphs=Level(GraphSupport.UNIFORM))
    torch = backend("torch", graphs=Level(GraphSupport.NEVER))
    asked = request(
        device=GPU,
        backend=explicit("fa2", BACKEND),
        block_size=block_size,  # type: ignore[arg-type]
        query_len=explicit(5, "drafter ngram: 1+4 tokens"),
        max_query_len=Asked(2048, "default scheduler.max_batched_tokens"),
    )
    return asked, [fa2, torch]


def error_of(asked: PlanRequest, offers: list[Candidate]) -> NegotiationError:
    with pytest.raises(NegotiationError) as caught:
        negotiate(asked, offers, [FULL])
    return caught.value


def test_an_ordinary_plan_on_a_cpu() -> None:
    asked, offers = two_on_a_cpu()
    golden("plan_cpu", negotiate(asked, offers, [FULL]).explain())


def test_large_pages_against_an_explicit_block_size() -> None:
    golden("large_pages_explicit", str(error_of(*large_pages(explicit(16, BLOCK_SIZE)))))


def test_large_pages_with_an_automatic_block_size() -> None:
    asked, offers = large_pages(Asked("auto"))
    golden("large_pages_auto", negotiate(asked, offers, [FULL]).explain())


def test_an_impossible_request() -> None:
    asked = request(
        layer(0, head_size=80, head_size_v=80),
        sliding(1, sinks=True),
        backend=explicit({"full": "flashinfr"}, BACKEND),
        device=GPU,
    )
    offers = [
        backend("torch", head_sizes=Range(64, 128, 64)),
        Candidate(name="old", distribution="old-attn", version="0.3", contract=None),
        Candidate(name="broken", distribution="broken-attn", version="0.3", load_error="ImportError: libfoo.so.1"),
    ]
    golden("impossible", str(error_of(asked, offers)))


def test_no_line_is_wider_than_asked_where_words_allow() -> None:
    asked, offers = two_on_a_cpu()
    for width in (80, 100, 140):
        assert max(map(len, negotiate(asked, offers, [FULL]).explain(width).splitlines())) <= width


def test_why_not_answers_for_each_group_from_a_plan_or_an_error() -> None:
    asked, offers = two_on_a_cpu()
    plan = negotiate(asked, offers, [FULL])
    text = why_not(plan, "cuda_only")
    assert re.findall(r"^\w+|N\d+", text, re.M) == ["full", "N101", "sliding", "N101", "N170"]
    assert "cpu was chosen" in why_not(plan, "cpu")
    assert "cache full    full was chosen" in why_not(plan, "full")
    assert "N140" in why_not(error_of(*large_pages(explicit(16))), "fa2")
    with pytest.raises(ConfigError, match="took no part"):
        why_not(plan, "nobody")


def test_a_diff_lists_changed_decisions_key_by_key() -> None:
    asked, offers = two_on_a_cpu()
    before = negotiate(asked, offers, [FULL])
    after = negotiate(asked, offers[1:], [FULL])
    text = diff(before, after)
    assert "  groups.full.backend: cpu -> torch\n" in text
    assert "  settings.attention.backend: cpu -> torch\n" in text
    assert diff(before, before) == f"plan {before.short_digest}: no difference\n"


def test_the_summary_is_one_line_and_names_what_changed() -> None:
    asked, offers = two_on_a_cpu()
    plan = negotiate(asked, offers, [FULL])
    assert plan.summary() == (
        f"plan {plan.digest[:6]}: full=cpu, sliding=cpu; block 16, float32/float32, graphs none; changed: N330"
    )


def test_every_code_has_a_long_text_and_an_unknown_one_is_an_error() -> None:
    for name, code in CODES.items():
        assert explain_code(name.lower()).startswith(f"{name}  {code.title}")
    with pytest.raises(ConfigError, match="no code"):
        explain_code("N9999")


def test_the_documentation_has_every_code_with_its_title_and_severity_and_no_other() -> None:
    headings = re.findall(r"^### (N\d+): (.+) \((\w+)\)$", DOCS.read_text(), re.M)
    assert sorted(headings) == sorted((code.name, code.title, code.severity.value) for code in CODES.values())


def test_the_documentation_explains_each_code_in_the_words_of_the_code() -> None:
    text = " ".join(DOCS.read_text().split())
    for code in CODES.values():
        assert code.explanation in text
        assert code.fix in text
