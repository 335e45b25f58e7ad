"""What draft heads learn from: the model's own continuations of source files, written by slotline's engine."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from small_model import encode_documents
from torch import Tensor

from slotline.core import LLM, SamplingParams

TEMPERATURE = 0.8
"""Of every fourth text; the others are greedy, as drafts are mostly verified."""


def prompts_of(tokens: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Random stretches [count, length] of documents side by side, the same for the same generator."""
    starts = torch.randint(len(tokens) - length, (count,), generator=generator)
    return tokens[starts[:, None] + torch.arange(length)].long()


class Writer:
    """The model in an engine of slotline.

    Args:
        options: model, device, context, prompts (texts at a time), memory (of the engine's cache).
    """

    def __init__(self, options: argparse.Namespace) -> None:
        at_once = options.prompts
        self.context = options.context
        self._llm = LLM(
            str(options.model),
            device=options.device,
            dtype="bfloat16" if options.device == "cuda" else "float32",
            memory=options.memory,
            max_model_len=options.context,
            max_num_seqs=at_once,
            max_num_batched_tokens=max(8192, 8 * at_once),
            enable_prefix_caching=False,
            **{
                "graphs.sizes": sorted({1, *(max(1, at_once * part // 4) for part in (1, 2, 3, 4))}),
                "observability.progress": False,
            },
        )

    def __call__(self, prompts: Sequence[list[int]], temperatures: Sequence[float]) -> Tensor:
        """Texts [n, context] int64: what the model makes of prompts, the prompts included."""
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=self.context - len(prompt), ignore_eos=True, detokenize=False
            )
            for prompt, temperature in zip(prompts, temperatures, strict=True)
        ]
        outputs = self._llm.generate(prompts, params)
        return torch.tensor(
            [[*prompt, *out.outputs[0].token_ids] for prompt, out in zip(prompts, outputs, strict=True)]
        )


def write(options: argparse.Namespace, tokens: Tensor, seed: int, most: int) -> Tensor:
    """Texts [n, context] int32 behind prompts of random lengths and places, for `text_seconds` or `most` tokens."""
    writer, generator, windows = Writer(options), torch.Generator().manual_seed(seed), list[Tensor]()
    shortest, longest, started = options.context // 16, options.context * 5 // 8, time.monotonic()
    while not windows or time.monotonic() - started < options.text_seconds:
        lengths = torch.randint(max(1, shortest), longest, (options.prompts,), generator=generator).tolist()
        prompts = prompts_of(tokens, longest, options.prompts, generator).tolist()
        temperatures = [TEMPERATURE if i % 4 == 3 else 0.0 for i in range(options.prompts)]
        texts = [prompt[:length] for prompt, length in zip(prompts, lengths, strict=True)]
        windows.append(writer(texts, temperatures).int())
        if len(windows) * windows[0].numel() >= most:
            break
    return torch.cat(windows)


def write_text(texts: list[str], tokenizer: Any, options: argparse.Namespace) -> Tensor:
    """Training windows [n, context] int64 on the device, written by `options.writers` processes at once."""
    tokens, most = encode_documents(texts, tokenizer), options.tokens // options.writers
    if options.writers == 1:
        return write(options, tokens, options.seed, most).long().to(options.device)
    with ProcessPoolExecutor(options.writers, mp_context=multiprocessing.get_context("spawn")) as pool:
        seeds = range(options.seed, options.seed + options.writers)
        found = [pool.submit(write, options, tokens, seed, most) for seed in seeds]
        return torch.cat([future.result() for future in found]).long().to(options.device)
