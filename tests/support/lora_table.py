"""The table of docs/lora.md, by running every tiny family with adapters.

`python tests/support/lora_table.py` writes the page.

Adapters lie on every linear layer that may carry one and that PEFT can adapt. Two of different ranks and scales share
mixed and chunked batches with requests without one; greedy tokens are compared with PEFT's, with and without passes.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import tiny_models
from attrs import frozen
from engine_driver import random_prompts
from family_table import FAMILIES
from lora_cases import PeftOracle
from repository import ROOT

from slotline.core import LLM, SamplingParams

PAGE = ROOT / "docs" / "lora.md"
START, END = "<!-- families -->\n", "<!-- end -->"
COLUMNS = ("family", "layers with adapters", "which", "tokens equal")
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "backend": "torch",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "memory": "8MiB",
    "scheduler.max_batched_tokens": 24,
    "lora.name": "torch",
    "lora.max_adapters": 2,
    "lora.max_rank": 4,
    "observability.check_integrity": True,
    "observability.progress": False,
}
PROMPTS, LENGTH = random_prompts([5, 33, 1, 17]), 4
NAMES = ("first", None, "second", "first")
LEAST = 0.1
"""By so much at least an adapter moves a logit, so that it cannot be missed."""
NO_OUT_PROJ = frozenset({"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"})
FUSED_EXPERTS = frozenset(
    {
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v2_lite",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "qwen3_next",
    }
)


@frozen
class Row:
    """What is known of a family.

    Attributes:
        modules: the last parts of the adapted layers' names, of each layer once.
        equal: whether all runs gave PEFT's tokens.
    """

    name: str
    modules: tuple[str, ...]
    equal: bool

    def text(self) -> str:
        """The row of the page."""
        which = ", ".join(f"`{name}`" for name in dict.fromkeys(self.modules))
        return f"| {self.name} | {len(self.modules)} | {which} | {'yes' if self.equal else 'NO'} |"


def measure(name: str, path: Path, folder: Path) -> Row:
    """Run a family's checkpoint; its adapters go into the folder."""
    engines = [LLM(path, **SETTINGS, optimize=optimize) for optimize in (False, True)]
    adapters: Any = engines[0].engine.extension("adapters").steps
    modules = trainable(name, list(adapters._modules))
    targets = {"target_modules": modules}
    oracle = PeftOracle(path, folder, {"first": targets, "second": {**targets, "r": 3, "use_rslora": True}})
    apart = oracle.logits("first", PROMPTS[0]) - oracle.logits(None, PROMPTS[0])
    assert float(apart.abs().max()) > LEAST, f"{name}: the adapter adds too little to be seen"
    wanted = [oracle.greedy(adapter, prompt, LENGTH) for adapter, prompt in zip(NAMES, PROMPTS, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    requests = [oracle.request(adapter) for adapter in NAMES]
    found = [
        [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, lora_request=requests)]
        for llm in engines
    ]
    return Row(name, tuple(module.rpartition(".")[2] for module in modules), all(run == wanted for run in found))


def trainable(family: str, modules: list[str]) -> list[str]:
    """Those of the modules that PEFT adapts: no `out_proj` of some state layers, and in some mixtures no MLP, shared
    experts included, since it takes the name for that of the experts."""
    left_out: tuple[str, ...] = (".out_proj",) if family in NO_OUT_PROJ else ()
    left_out += (".gate_proj", ".up_proj", ".down_proj") if family in FUSED_EXPERTS else ()
    return [module for module in modules if not module.endswith(left_out)]


def shown() -> dict[str, str]:
    """The rows of the page, by family."""
    table = PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    return {match[1]: match[0] for match in re.finditer(r"^\| (\w+) \| \d.*$", table, re.MULTILINE)}


def main() -> None:
    rows = []
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_models.build(name, Path(folder) / name)
            rows.append(measure(name, path, Path(folder) / "adapters").text())
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    head = (f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}")
    PAGE.write_text(before + START + "\n".join([*head, *rows, ""]) + END + rest.split(END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
