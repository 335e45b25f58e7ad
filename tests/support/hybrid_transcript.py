"""Writes the transcript of docs/hybrids.md: `explain` for a model with states and windows, beside a drafter.

RecurrentGemma 2B, transformers' default configuration with one KV head; no weights are read. What hangs on the machine
is left out: the headline, and who was rejected.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import transformers
from repository import ROOT

from slotline.planner.plan import make_plan
from slotline.registry.config import load_config

PAGE = ROOT / "docs" / "hybrids.md"
START, END = "<!-- transcript -->\n```\n", "```\n<!-- end -->"
SETTINGS = ("drafter.name=ngram", "drafter.tokens=3", "scheduler.max_requests=64", "attention.backend=torch")
KEPT = ("group", "state group", "  backend", "  blocks", "  queries", "cache", "pool", "states")


def transcript() -> str:
    """The lines that begin with one of `KEPT`, and what hangs on them."""
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.RecurrentGemmaConfig(
            architectures=["RecurrentGemmaForCausalLM"], dtype="bfloat16", num_key_value_heads=1
        )
        config.save_pretrained(folder)
        (Path(folder) / "model.safetensors").touch()
        loaded = load_config(overrides=(f"model={folder}", *SETTINGS, "device=cpu", "dtype=bfloat16"))
        lines = make_plan(loaded, use_measurements=False).plan.explain().splitlines()
    kept: list[str] = []
    inside = False
    for line in lines:
        if not line.startswith("              "):  # else it goes on with the line before
            inside = line.startswith(KEPT)
        kept += [line] if inside or (not line and kept and kept[-1]) else []
    text = "\n".join(kept)
    return re.sub(r"\n{2,}", "\n\n", text).strip() + "\n"


def shown() -> str:
    """The page's."""
    return PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    PAGE.write_text(before + START + transcript() + END + rest.split(END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
