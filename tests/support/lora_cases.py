"""Adapters that PEFT makes for a tiny checkpoint, and the tokens that PEFT itself generates with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from slotline.core import LLM, LoRARequest

ATTENTION_AND_MLP = r".*\.(q_proj|k_proj|v_proj|qkv_proj|o_proj|gate_proj|up_proj|gate_up_proj|down_proj|c_fc|c_proj)"


def expansions(llm: LLM) -> list[tuple[str, ...]]:
    """Which products' shares are expanded from what stood behind their weights, from now on."""
    adapters: Any = llm.engine.extension("adapters").steps
    seen: list[tuple[str, ...]] = []
    original = adapters._expand

    def expand(names: tuple[str, ...], inner: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(names)
        original(names, inner, out)

    adapters._expand = expand
    return seen


class PeftOracle:
    """A checkpoint with adapters, loaded once; each adapter lies in a folder of its name.

    Args:
        path: the checkpoint.
        folder: where the adapters go.
        adapters: name -> what differs from a plain adapter of rank 4 on attention and MLP.
    """

    def __init__(self, path: Path, folder: Path, adapters: Mapping[str, Mapping[str, Any]]) -> None:
        peft = pytest.importorskip("peft")
        self.folder, self.names = folder, tuple(adapters)
        self.model: Any = None
        self._known: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        torch.manual_seed(len(str(adapters)))
        base = tiny_models.oracle(path)
        for name, settings in adapters.items():
            given = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION_AND_MLP, "init_lora_weights": False}
            config = peft.LoraConfig(**{**given, **settings})
            if self.model is None:
                self.model = peft.get_peft_model(base, config, adapter_name=name).eval()
            else:
                self.model.add_adapter(name, config)
        self.model.save_pretrained(folder)

    def request(self, name: str | None) -> LoRARequest | None:
        """What names the adapter in a call."""
        return None if name is None else LoRARequest(name, self.names.index(name) + 1, str(self.folder / name))

    def logits(self, name: str | None, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), vocab_size] float32."""
        with torch.no_grad():
            if name is None:
                with self.model.disable_adapter():
                    return self.model(input_ids=torch.tensor([tokens])).logits[0]
            self.model.set_adapter(name)
            return self.model(input_ids=torch.tensor([tokens])).logits[0]

    def greedy(self, name: str | None, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The greedy continuation; each token is computed once."""
        known = self._known.setdefault((name, tuple(prompt)), [])
        while len(known) < num_tokens:
            known.append(int(self.logits(name, [*prompt, *known])[-1].argmax()))
        return known[:num_tokens]
