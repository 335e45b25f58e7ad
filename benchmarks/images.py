"""Requests with images: throughput, and the time to first token of a second request with the same image.

    python benchmarks/images.py [--requests 64] [--side 224] [--tokens 16] [--rounds 5] [--json FILE]
    python benchmarks/images.py --model benchmarks/models/qwen2.5-vl-3b --device cuda --side 896    # 1,024 image tokens

The model has a folder's configuration and random weights, the tiny one a vocabulary that is too large for it. Figures:

* throughput: requests with an image of their own each, all at once, greedy, and the same number of text requests;
* time to first token of one request on an idle engine, median over the rounds: with text alone, with an image that
  was never seen, with the image of a request before behind another text (its embeddings are kept), and with this image
  behind the same text (cached blocks). Each is of the same number of tokens. A text is compared with the image
  behind another text, and a text that was asked before with the image behind the same text.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import numpy as np
import torch
from command_line import positive
from PIL import Image
from result_file import write_result
from transformers import AutoConfig, AutoModelForImageTextToText

from slotline.core import LLM, SamplingParams

SHORT = "--requests 2 --side 56 --tokens 2 --rounds 1 --text 8"
MODEL = Path(__file__).parent / "models" / "qwen2.5-vl-tiny"
COLUMNS = ("what", "value")


def checkpoint(model_folder: Path, folder: Path) -> Path:
    """Write a random checkpoint of a model's configuration, in bfloat16."""
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(model_folder, trust_remote_code=False)
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.03, 0.03, generator=generator)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


class Prompts:
    """Prompts of random words, with and without an image.

    Args:
        config: of the model.
        side: pixels of an image's sides.
        text: words before the image, and as many behind it.
    """

    def __init__(self, config: Any, side: int, text: int) -> None:
        self._config, self._side, self._text, self._rng = config, side, text, Random(0)
        vision = config.vision_config
        self.image_tokens = (side // vision.patch_size // vision.spatial_merge_size) ** 2
        self.length = 2 * text + 2 + self.image_tokens

    def image(self) -> Any:
        """Return an image of noise, different from all others."""
        rng = np.random.default_rng(self._rng.getrandbits(64))
        return Image.fromarray(rng.integers(0, 256, (self._side, self._side, 3), dtype=np.uint8))

    def words(self, count: int) -> list[int]:
        return [self._rng.randint(100, 100_000) for _ in range(count)]

    def with_image(self, image: Any, before: Sequence[int]) -> dict[str, Any]:
        """Return a prompt of an image between a text before it and new words behind it."""
        config = self._config
        placed = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
        token_ids = [*before, *placed, *self.words(self._text)]
        return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": image}}

    def text(self, before: Sequence[int]) -> dict[str, Any]:
        """Return a prompt of words alone, with as many tokens, that begins with some."""
        return {"prompt_token_ids": [*before, *self.words(self.length - len(before))]}

    def beginning(self) -> list[int]:
        return self.words(self._text)


def seconds_of(llm: LLM, prompts: Sequence[dict[str, Any]], tokens: int) -> float:
    """Return the time that requests take together, from the prompts to the last token."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    begun = perf_counter()
    llm.generate(list(prompts), params, progress=False)
    return perf_counter() - begun


def first_tokens(llm: LLM, prompts: Prompts, rounds: int) -> dict[str, float]:
    """Return the median time to first token of each kind of request, seconds."""
    found: dict[str, list[float]] = {}

    def one(kind: str, prompt: dict[str, Any]) -> None:
        found.setdefault(kind, []).append(seconds_of(llm, [prompt], 1))

    for _ in range(rounds + 1):
        image, before = prompts.image(), prompts.beginning()
        one("text", prompts.text(prompts.beginning()))
        one("image, new", prompts.with_image(image, before))
        one("image, behind another text", prompts.with_image(image, prompts.beginning()))
        one("image, behind the same text", prompts.with_image(image, before))
        begun = prompts.text(prompts.beginning())["prompt_token_ids"][: -len(before)]
        seconds_of(llm, [prompts.text(begun)], 1)
        one("text, asked before", prompts.text(begun))
    return {kind: statistics.median(times[1:]) for kind, times in found.items()}  # the first round warms up


def measure(llm: LLM, prompts: Prompts, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the rows of the result."""
    rows = [("tokens of a prompt, of which an image's", f"{prompts.length}, {prompts.image_tokens}")]
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "image": lambda: prompts.with_image(prompts.image(), prompts.beginning()),
        "text": lambda: prompts.text(prompts.beginning()),
    }
    seconds_of(llm, [kinds["image"]()], 2)
    for kind, make in kinds.items():
        asked = [make() for _ in range(options.requests)]
        rate = options.requests / seconds_of(llm, asked, options.tokens)
        rows.append((f"{options.requests} requests with {kind}, requests/s", f"{rate:.2f}"))
    times = first_tokens(llm, prompts, options.rounds)
    rows += [(f"time to first token, {kind}, ms", f"{1000 * value:.2f}") for kind, value in times.items()]
    for image, text in (("image, behind another text", "text"), ("image, behind the same text", "text, asked before")):
        rows.append((f"{image} / {text}", f"{times[image] / times[text]:.2f}"))
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a configuration")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--side", type=positive, default=224, help="pixels of an image's sides")
    parser.add_argument("--text", type=positive, default=32, help="words before an image, and behind it")
    parser.add_argument("--tokens", type=positive, default=16, help="tokens of each answer")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--memory", default=None, help="of the cache, as '8GiB'")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    prompts = Prompts(AutoConfig.from_pretrained(options.model, trust_remote_code=False), options.side, options.text)
    own = {"memory": options.memory or "256MiB"} if options.device == "cpu" or options.memory else {}
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=str(checkpoint(options.model, Path(folder))),
            device=options.device,
            dtype="float32" if options.device == "cpu" else "bfloat16",
            max_model_len=prompts.length + options.tokens + 1,
            **own,
            **{"multimodal.cache_tokens": max(16_384, 4 * prompts.image_tokens)},
        )
        rows = measure(llm, prompts, options)
    for what, value in rows:
        print(f"{what:<58}{value:>12}")
    if options.json:
        write_result(options.json, "images", COLUMNS, rows)


if __name__ == "__main__":
    main()
