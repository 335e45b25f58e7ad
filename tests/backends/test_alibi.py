"""Layers that bias scores by distance (ALiBi): seen in checkpoints, served by backends that say so, not by others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from engine_driver import GREEDY, random_prompts, recorded, tokens_of
from negotiation_cases import FULL, GPU, backend, layer, request
from tiny_models import OWN_FAMILIES, family, logits_reference

from slotline.backends import cpu, flash_attn, flashinfer, flex, torch_sdpa, triton
from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.registry.capability import Flag, Limit
from slotline.registry.errors import ModelError, NegotiationError
from slotline.registry.negotiation import Asked, Candidate, Plan, group_layers, negotiate
from tests.kv_cache.test_cascade import PROMPTS as SHARING_PROMPTS
from tests.kv_cache.test_cascade import SHARED, prefixes_of
from tests.plugins.model_families.test_model_family import load, logits_of, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
SETTINGS: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 24}
BIASED = tuple(name for name in OWN_FAMILIES if family(name).slopes is not None)


@pytest.mark.parametrize("name", OWN_FAMILIES)
@pytest.mark.behaviour(10)
def test_the_slopes_of_a_checkpoint_are_seen_without_its_weights(name: str, tiny: Tiny) -> None:
    facts = TransformersDecoder().inspect(tiny(name))
    assert {layer.alibi_slopes for layer in facts.layers} == {family(name).slopes}
    assert len(facts.layers) == 4
    assert facts.max_model_len == 512


def test_falcons_keep_as_many_keys_as_they_have_heads_for(tiny: Tiny) -> None:
    heads = {
        name: TransformersDecoder().inspect(tiny(name)).layers[0].num_kv_heads
        for name in ("falcon", "falcon_rotary", "falcon_multi_query")
    }
    assert heads == {"falcon": 4, "falcon_rotary": 2, "falcon_multi_query": 1}


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("name", OWN_FAMILIES)
def test_logits_equal_those_of_transformers(name: str, optimize: bool, tiny: Tiny) -> None:
    """Under dense attention, which takes the slopes from the layers' facts."""
    path, token_ids = tiny(name), prompt()
    logits = logits_of(load(path, optimize=optimize), token_ids)
    torch.testing.assert_close(logits, logits_reference(path, token_ids.tolist()), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("served_by", ["cpu", "torch", "flex"])
@pytest.mark.behaviour(10, 33)
def test_backends_that_declare_it_give_transformers_tokens(
    served_by: str, name: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    """In mixed batches, with prompts in chunks and, the second time, behind cached prefixes."""
    path = tiny(name)
    llm = engines(path, backend=served_by, **SETTINGS)
    count = 8 if served_by == "flex" else 20  # one step of it takes as long as ten of the others
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    for _ in range(2):
        assert tokens_of(llm, PROMPTS, params) == [greedy(path, ids, 20)[:count] for ids in PROMPTS]
    assert "ALiBi" in llm.plan.explain()


@pytest.mark.parametrize(("name", "stages"), [("bloom", 2), ("falcon", 2), ("falcon_rotary", 3), ("mpt", 2)])
@pytest.mark.behaviour(98)
def test_over_pipeline_stages_the_tokens_are_the_same(
    name: str, stages: int, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(name)
    llm = engines(path, backend="cpu", **SETTINGS, **{"parallel.pipeline": ("cpu",) * stages})
    assert len(llm.plan.stages) == stages
    assert tokens_of(llm, PROMPTS) == [greedy(path, ids, GREEDY.max_tokens or 0) for ids in PROMPTS]


def test_drafts_are_verified_with_it(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path, repeated = tiny("bloom"), [ids * 3 for ids in random_prompts([5, 9, 4])]
    llm = engines(path, **SETTINGS, **{"drafter.name": "ngram", "drafter.tokens": 3, "drafter.ngram.min_tokens": 1})
    with recorded(llm) as schedules:
        found = tokens_of(llm, repeated, evolve(GREEDY, max_tokens=24))
    assert found == [greedy(path, ids, 24) for ids in repeated]
    longest = max(map(len, repeated))
    assert any(((s.num_scheduled > 1) & (s.num_computed >= longest)).any() for s in schedules)


def test_an_mpt_that_asks_for_what_transformers_leaves_out_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny("mpt"), tmp_path / "mpt"))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["attn_config"] |= {"alibi": False, "alibi_bias_max": 16}
    (path / "config.json").write_text(json.dumps({**config, "logit_scale": "inv_sqrt_d_model"}))
    with pytest.raises(ModelError, match=r"alibi = False, .*alibi_bias_max = 16, logit_scale = .*leaves out"):
        TransformersDecoder().inspect(path)


def planned(*candidates: Candidate, cascade: Asked[bool | str], **changes: Any) -> Plan:
    layers = [layer(number, alibi_slopes=(0.5, 0.25) * 4, **changes) for number in range(2)]
    asked = evolve(request(*layers, device=GPU), dtype=Asked("bfloat16", "checkpoint", False), cascade=cascade)
    return negotiate(asked, list(candidates), [FULL])


def shipped(*modules: Any) -> list[Candidate]:
    return [Candidate(descriptor=each.descriptor, distribution="slotline", version="0.1.0") for each in modules]


AUTO = Asked[bool | str]("auto", "default")


@pytest.mark.behaviour(10)
def test_backends_that_do_not_know_it_are_refused_with_the_reason() -> None:
    plan = planned(*shipped(triton, flashinfer, flash_attn, flex, torch_sdpa, cpu), cascade=AUTO)
    refused = {each.name: {reason.code for reason in each.reasons} for each in plan.groups[0].rejected}
    assert plan.groups[0].backend == "triton"
    assert {name for name, codes in refused.items() if "N181" in codes} == {"flashinfer"}
    with pytest.raises(NegotiationError, match="N181 ALiBi: needs it, not implemented"):
        planned(*shipped(flashinfer), cascade=AUTO)


@pytest.mark.behaviour(10)
def test_a_common_prefix_is_not_served_apart_for_such_layers_unless_the_backend_can_and_the_reason_is_kept() -> None:
    (group,) = planned(*shipped(triton), cascade=AUTO).groups
    assert group.cascade == "none"
    assert group.cascade_refusal.startswith("cascade: needs it, not implemented with alibi (")
    assert group.to_json()["cascade_refusal"] == group.cascade_refusal
    (plain,) = negotiate(
        evolve(request(layer(), device=GPU), dtype=Asked("bfloat16", "checkpoint", False), cascade=AUTO),
        shipped(triton),
        [FULL],
    ).groups
    assert (plain.cascade, plain.cascade_refusal) == ("captured", "")
    (other,) = planned(*shipped(torch_sdpa), cascade=AUTO).groups
    assert (other.cascade, other.cascade_refusal) == ("eager", "")
    off = planned(*shipped(triton), cascade=Asked(False, "run.toml", True)).groups[0]
    assert (off.cascade, off.cascade_refusal) == ("none", "")


@pytest.mark.behaviour(10)
def test_a_plan_says_why_its_steps_have_no_common_prefix() -> None:
    text = " ".join(planned(*shipped(triton), cascade=AUTO).explain().split())
    assert "cascade a prefix that all requests share is read for each of them: cascade: needs it, not" in text


@pytest.mark.behaviour(10, 11)
def test_cascade_by_name_refuses_the_backend_that_cannot_do_both() -> None:
    with pytest.raises(NegotiationError, match="N174 cascade: needs it, not implemented with alibi"):
        planned(*shipped(triton), cascade=Asked(True, "run.toml", True))


def test_a_limit_for_such_layers_counts_for_them_alone() -> None:
    one = backend("one", alibi=Flag(True), limits=(Limit(when="alibi", capability="soft_cap", offer=Flag(False)),))
    with pytest.raises(NegotiationError, match="N171"):
        negotiate(request(layer(alibi_slopes=(0.5,) * 8, soft_cap=9.0)), [one], [FULL])


def test_layers_with_other_slopes_are_another_group() -> None:
    slopes = ((0.5,) * 8, (0.25,) * 8, (0.5,) * 8, None)
    groups = group_layers([layer(number, alibi_slopes=each) for number, each in enumerate(slopes)])
    assert [[each.index for each in group.layers] for group in groups] == [[0, 2], [1], [3]]


@pytest.mark.parametrize("name", ["bloom", "mpt"])
@pytest.mark.behaviour(10, 71)
def test_a_prefix_served_apart_gives_the_same_text(name: str, tiny: Tiny, engines: Engines) -> None:
    path = tiny(name)
    expected, none = prefixes_of(
        engines(path, backend="torch", **SETTINGS, **{"attention.cascade": False}), SHARING_PROMPTS
    )
    assert set(none) == {0}
    llm = engines(path, backend="torch", **SETTINGS, **{"attention.cascade": True})
    tokens_of(llm, [SHARED])  # so that the prompts find their prefix
    found, seen = prefixes_of(llm, SHARING_PROMPTS)
    assert found == expected
    assert max(seen) == len(SHARED)
