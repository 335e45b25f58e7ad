"""The engine on a CPU beside transformers' `generate`, same checkpoint, same dtype, in one run.

    python benchmarks/cpu_engine.py [--dtype bfloat16 bfloat16] [--rounds 3] [--model FOLDER] [--json FILE]
        [--products timed]

The checkpoint is a 100M-parameter Llama with random weights, or has another folder's configuration.
Figures, medians over the rounds, engines in turn:

* decode at batch 1 and 16: tokens/s of 64 greedy tokens after prompts of 32 tokens, the prompt's own step left out;
* prefill: tokens/s of one prompt of 512 tokens;
* prefix: median time to first token of 16 requests that share 512 tokens, first wave against second.

Beside each figure stands the share of what the machine allows: weights over measured memory bandwidth for decoding,
operations over the measured matrix rate for the prompt.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch
from command_line import positive
from result_file import write_result
from transformers import AutoConfig, AutoModelForCausalLM

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families.linear_records import slotline_report_header
from slotline.registry.config import load_config

SHORT = "--model benchmarks/models/llama-tiny --dtype bfloat16 --rounds 1 --probe 64"
TITLES = {"b1": "decode, batch 1, tokens/s", "b16": "decode, batch 16, tokens/s", "prefill": "prefill 512, tokens/s"}
MODEL = Path(__file__).parent / "models" / "llama-100m"
PROMPT, NEW, PREFIX = 32, 64, 512


def checkpoint(model_folder: Path, folder: Path) -> Path:
    """Write a random checkpoint of a model's configuration."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.save_pretrained(folder)
    return folder


def prompts(count: int, length: int, seed: int, vocab_size: int) -> list[list[int]]:
    rng, largest = Random(seed), min(31_000, vocab_size - 1)
    return [[rng.randint(3, largest) for _ in range(length)] for _ in range(count)]


class Transformers:
    """`generate` with SDPA, as a user would call it."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=False
        ).eval()

    @torch.inference_mode()
    def _generate(self, batch: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(batch)
        start = perf_counter()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=2,
        )
        return perf_counter() - start

    def decode(self, batch: list[list[int]]) -> float:
        """Tokens/s without the prompt's own step."""
        first = self._generate(batch, 1)
        return len(batch) * (NEW - 1) / (self._generate(batch, NEW) - first)

    def prefill(self, prompt: list[int]) -> float:
        return len(prompt) / self._generate([prompt], 1)


class Slotline:
    """The engine through `LLM`."""

    def __init__(self, path: Path, dtype: str, products: str) -> None:
        family = {"transformers_decoder": {"cpu_products": products}}
        self.llm = LLM(model=str(path), dtype=dtype, max_model_len=1024, memory="256MiB", model_family=family)
        if products == "timed":
            print("\n".join(slotline_report_header(load_config(values={"device": "cpu"}).config) or ()), flush=True)
        for cache in self.llm.engine.runner.router.caches():  # memory that was used before, as after a while of serving
            cache.key.zero_()
            cache.value.zero_()

    def _run(self, batch: list[list[int]], tokens: int, *, forget: bool = True) -> tuple[float, list[float]]:
        if forget:
            self.llm.engine.forget_prefixes()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = perf_counter()
        outputs = self.llm.generate(batch, params, progress=False)
        return perf_counter() - start, [o.metrics.time_to_first_token or 0.0 for o in outputs]

    def decode(self, batch: list[list[int]]) -> float:
        seconds, first = self._run(batch, NEW)
        return len(batch) * (NEW - 1) / (seconds - max(first))

    def prefill(self, prompt: list[int]) -> float:
        return len(prompt) / self._run([prompt], 1)[0]

    def prefix(self) -> tuple[float, float]:
        """Median time to first token of the first wave and of the second, seconds."""
        vocab_size = self.llm.engine.limits.vocab_size
        shared = prompts(1, PREFIX, 5, vocab_size)[0]
        tails = prompts(32, 16, 6, vocab_size)
        first = self._run([shared + tail for tail in tails[:16]], 1)[1]
        self.llm.engine.forget_prefixes()
        self._run([shared + tails[0]], 1)
        second = self._run([shared + tail for tail in tails[16:]], 1, forget=False)[1]
        return statistics.median(first), statistics.median(second)


def bandwidth(probe: int) -> float:
    """GB/s of reading: a sum over 64 matrices of float32 of that size (2048: 1 GiB), best of five."""
    data = torch.ones(64 * probe**2)
    return max(_rate(lambda: data.sum(), data.nbytes) for _ in range(5)) / 1e9


def matrix_rate(dtype: torch.dtype, probe: int) -> float:
    """GFLOP/s of a product of two matrices of that size, best of five."""
    a = torch.randn(probe, probe).to(dtype)
    return max(_rate(lambda: a @ a, 2 * probe**3) for _ in range(5)) / 1e9


def _rate(work: Callable[[], Any], amount: float) -> float:
    start = perf_counter()
    work()
    return amount / (perf_counter() - start)


def measure(path: Path, dtype: str, rounds: int, probe: int, products: str) -> dict[str, Any]:
    """Medians of both engines, taken in turn."""
    theirs, ours = Transformers(path, dtype), Slotline(path, dtype, products)
    engines: dict[str, Transformers | Slotline] = {"transformers": theirs, "slotline": ours}
    vocab_size = int(theirs.model.config.vocab_size)
    one, sixteen = prompts(1, PROMPT, 1, vocab_size), prompts(16, PROMPT, 2, vocab_size)
    long = prompts(1, 512, 3, vocab_size)[0]
    figures: dict[str, dict[str, list[float]]] = {name: {"b1": [], "b16": [], "prefill": []} for name in engines}
    for round_number in range(rounds + 1):
        for name, engine in engines.items():
            got = {"b1": engine.decode(one), "b16": engine.decode(sixteen), "prefill": engine.prefill(long)}
            if round_number:  # the first warms up
                for key, value in got.items():
                    figures[name][key].append(value)
    medians = {name: {key: statistics.median(v) for key, v in values.items()} for name, values in figures.items()}
    waves = [ours.prefix() for _ in range(rounds)]
    medians["prefix"] = {
        "first": statistics.median(w[0] for w in waves),
        "second": statistics.median(w[1] for w in waves),
    }
    weights = sum(p.nbytes for p in theirs.model.model.layers.parameters())
    head = theirs.model.lm_head.weight
    operations = 2 * (weights / head.element_size())
    medians["limit"] = {
        "b1": bandwidth(probe) * 1e9 / (weights + head.nbytes),
        "prefill": matrix_rate(getattr(torch, dtype), probe) * 1e9 / operations,
    }
    return medians


def show(dtype: str, got: dict[str, Any]) -> None:
    ours, theirs, limit = got["slotline"], got["transformers"], got["limit"]
    print(f"\n{dtype:<10}{'slotline':>12}{'transformers':>14}{'ratio':>8}{'limit':>10}{'share':>8}")
    for key in ("b1", "b16", "prefill"):
        bound = f"{limit[key]:>10,.0f}{ours[key] / limit[key]:>8.0%}" if key in limit else ""
        print(f"{key:<10}{ours[key]:>12,.1f}{theirs[key]:>14,.1f}{ours[key] / theirs[key]:>8.2f}{bound}")
    first, second = got["prefix"]["first"], got["prefix"]["second"]
    print(
        f"prefix    time to first token {first * 1e3:,.0f} ms,"
        f" second wave {second * 1e3:,.0f} ms: 1/{first / second:.1f}"
    )


def table(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a result file."""
    rows = []
    for dtype, got in results.items():
        ours, theirs = got["slotline"], got["transformers"]
        for key, title in TITLES.items():
            ratio = f"{ours[key] / theirs[key]:.2f}"
            rows.append([f"{dtype}, {title}", f"{ours[key]:,.1f}", f"{theirs[key]:,.1f}", ratio])
        first, second = got["prefix"]["first"], got["prefix"]["second"]
        waves = f"{second * 1e3:,.0f} ms of {first * 1e3:,.0f} ms"
        rows.append([f"{dtype}, second wave of a shared prefix", waves, "", f"1/{first / second:.1f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder with a config.json")
    parser.add_argument("--probe", type=positive, default=2048, help="size of the matrices that tell the limits")
    parser.add_argument("--products", default="timed", help="option cpu_products: timed, onednn or plain")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    arguments = parser.parse_args()
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; tokens/s,"
        f" medians of {arguments.rounds}"
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(arguments.model, Path(folder))
        for dtype in arguments.dtype:
            results[dtype] = measure(path, dtype, arguments.rounds, arguments.probe, arguments.products)
            show(dtype, results[dtype])
            gc.collect()
    if arguments.json:
        note = f"Random weights of {arguments.model.name}; medians of {arguments.rounds} rounds, engines in turn."
        columns = ["figure", "slotline", "transformers `generate`", "ratio"]
        write_result(arguments.json, "cpu_engine", columns, table(results), note=note)


if __name__ == "__main__":
    main()
