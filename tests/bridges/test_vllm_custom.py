"""A slotline attention backend as vLLM's backend CUSTOM, in vLLM's engine on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from slotline.bridges.vllm import register
from slotline.registry.errors import PluginError

SCRIPT = """
import json, sys
from slotline.bridges.vllm.registration import VARIABLE
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256,
          max_num_seqs=4, max_num_batched_tokens=32, enable_chunked_prefill=True, block_size=32,
          attention_backend="CUSTOM")
from vllm.v1.attention.backends.registry import AttentionBackendEnum
prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8], list(range(10, 80)), list(range(10, 60)))]
params = SamplingParams(max_tokens=12, temperature=0, detokenize=False, ignore_eos=True)
texts = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
print("RESULT", json.dumps({"texts": texts, "class": AttentionBackendEnum.CPU_ATTN.get_path()}))
"""


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_registering_is_refused() -> None:
    with pytest.raises(PluginError, match="vLLM is not installed here"):
        register("torch")


@pytest.fixture(scope="module")
def folder(vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama of two layers with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def run(folder: Path, backend: str) -> dict[str, object]:
    """Generate with vLLM in a process of its own, with a slotline backend if one is named."""
    environment = {
        **os.environ,
        "SLOTLINE_VLLM_ATTENTION": backend,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[0].removeprefix("RESULT"))


@pytest.mark.exhaustive
def test_an_engine_of_vllm_gives_the_same_tokens_with_our_backends(folder: Path) -> None:
    own = run(folder, "")
    assert str(own["class"]).startswith("vllm.")
    for name in ("torch", "cpu"):
        ours = run(folder, name)
        assert ours["class"] == f"slotline.bridges.vllm.custom.Slotline_{name}"
        assert ours["texts"] == own["texts"]


@pytest.mark.usefixtures("vllm")
def test_the_class_says_what_the_plugin_declares() -> None:
    import torch

    from slotline.bridges.vllm.custom import backend_class
    from slotline.registry.errors import PluginNotFoundError

    found = backend_class("torch")
    assert found.get_name() == "CUSTOM"
    assert torch.float32 in found.supported_dtypes
    assert found.supports_head_size(72)
    assert found.supports_sink()
    with pytest.raises(PluginNotFoundError, match="nowhere"):
        backend_class("nowhere")
