"""Tokens per second of weights quantized at load, against the same model in bfloat16, on a CPU.

    OMP_NUM_THREADS=2 python benchmarks/quantized_linear.py [--configs DIR ...] [--methods int8 int4] [--tokens 64]
        [--rounds 5] [--json FILE]

Random weights of a configuration. One request generates, and one step reads a prompt. The engines take turns, so that
a busy machine hits all alike; shown are medians. GB/s counts the bytes of all weights once for each token.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import define, field
from command_line import positive
from result_file import write_result

from slotline.core import LLM, SamplingParams

SHORT = "--configs benchmarks/models/llama-tiny --tokens 4 --rounds 1"
MODELS = Path(__file__).parent / "models"
CONFIGS = (MODELS / "llama-100m", MODELS / "qwen3-0.6b")
PROMPT = 256
COLUMNS = ("model", "weights", "MiB", "tokens/s, batch 1", "ratio", "GB/s", f"prompt of {PROMPT}, tokens/s", "ratio")


@define
class Case:
    """An engine and its rates, one for each round.

    Attributes:
        mib: MiB of all weights.
    """

    name: str
    llm: LLM
    mib: float
    decode: list[float] = field(factory=list)
    prompt: list[float] = field(factory=list)

    def run(self, tokens: int, seed: int) -> None:
        """Measure one round: a request that generates, and a prompt."""
        ids = [(37 * place + seed) % 200 + 3 for place in range(PROMPT)]
        self.decode.append(tokens / self._seconds(ids[:4], tokens + 1, self._seconds(ids[:4], 1)))
        self.prompt.append(PROMPT / self._seconds(ids, 1))

    def _seconds(self, ids: list[int], tokens: int, less: float = 0.0) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": ids}], params)
        return time.perf_counter() - started - less


def checkpoint(config: Path, folder: Path) -> Path:
    """Write a checkpoint with random weights in bfloat16."""
    settings = transformers.AutoConfig.from_pretrained(config, trust_remote_code=False)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16, trust_remote_code=False)
    model.save_pretrained(folder)
    return folder


def case(path: Path, method: str) -> Case:
    """Build the engine for a method, "" for none."""
    settings: dict[str, Any] = {"weights.quantize": method, "observability.progress": False, "cache.memory": "64MiB"}
    settings |= {
        "cache.prefix_caching": False,
        "scheduler.max_model_len": 2 * PROMPT,
        "structured_output.backend": "none",
    }
    llm = LLM(str(path), dtype="bfloat16", device="cpu", **settings)
    model: Any = llm.engine.runner.model
    return Case(method or "bfloat16", llm, model.weight_bytes / 2**20)


def measure(config: Path, methods: Sequence[str], tokens: int, rounds: int) -> list[tuple[str, ...]]:
    """Return the rows of one configuration."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(config, Path(folder))
        cases = [case(path, method) for method in ("", *methods)]
        for number in range(rounds + 1):
            for one in cases:
                one.run(tokens, number)
    plain = cases[0]
    rows: list[tuple[str, ...]] = []
    for one in cases:
        decode, prompt = statistics.median(one.decode[1:]), statistics.median(one.prompt[1:])
        ratio = decode / statistics.median(plain.decode[1:]), prompt / statistics.median(plain.prompt[1:])
        rate = one.mib * decode * 2**20 / 1e9
        cells = (config.name, one.name, f"{one.mib:.0f}", f"{decode:.1f}", f"{ratio[0]:.2f}x", f"{rate:.1f}")
        rows.append((*cells, f"{prompt:.0f}", f"{ratio[1]:.2f}x"))
        print("  ".join(cell.ljust(12) for cell in rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, nargs="+", default=CONFIGS)
    parser.add_argument("--methods", nargs="+", default=("int8", "int4"))
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print("  ".join(column.ljust(12) for column in COLUMNS))
    rows = [row for config in given.configs for row in measure(config, given.methods, given.tokens, given.rounds)]
    if given.json:
        write_result(given.json, "quantized_linear", COLUMNS, rows, note="Random weights, one request, two threads.")


if __name__ == "__main__":
    main()
