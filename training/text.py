"""What draft heads learn from: the model's own continuations of source files, written by slotline's engine."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from keyword import iskeyword
from multiprocessing.process import BaseProcess
from queue import Empty
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


class Renaming:
    """Other names for a third of those in a prompt, the same at each place, so that no text is known by heart."""

    share = 0.35

    def __init__(self, tokenizer: Any) -> None:
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self._size = len(pieces)
        marks = ("Ġ", "")  # behind a space, or not; a token keeps that
        self._names = [torch.tensor([i for i, piece in enumerate(pieces) if is_name(piece, mark)]) for mark in marks]

    def __call__(self, prompts: Tensor, generator: torch.Generator) -> Tensor:
        """Prompts [n, m], each with names of its own exchanged."""
        table = torch.arange(self._size).repeat(len(prompts), 1)
        for names in self._names:
            others = names[torch.rand(len(prompts), len(names), generator=generator).argsort(-1)]
            kept = torch.rand(others.shape, generator=generator) >= self.share
            table[:, names] = torch.where(kept, names, others)
        return table.gather(1, prompts)


def is_name(piece: str, mark: str) -> bool:
    """Whether a token is the mark and a word that Python has no meaning for."""
    word = piece.removeprefix(mark)
    return piece.startswith(mark) and len(word) > 1 and word.isascii() and word.isalpha() and not iskeyword(word)


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


def texts_of(
    writer: Writer, options: argparse.Namespace, tokens: Tensor, renaming: Renaming, seed: int
) -> Iterator[Tensor]:
    """Texts [prompts, context] int32 behind prompts of random lengths and places, for ever."""
    generator, longest = torch.Generator().manual_seed(seed), options.context * 5 // 8
    while True:
        lengths = torch.randint(
            max(1, options.context // 16), longest, (options.prompts,), generator=generator
        ).tolist()
        prompts = prompts_of(tokens, longest, options.prompts, generator)
        first = round(options.renamed * options.prompts)
        prompts[:first] = renaming(prompts[:first], generator)
        begun = [prompt[:length] for prompt, length in zip(prompts.tolist(), lengths, strict=True)]
        yield writer(begun, [TEMPERATURE if i % 4 == 3 else 0.0 for i in range(options.prompts)]).int()


def send_texts(options: argparse.Namespace, tokens: Tensor, renaming: Renaming, seed: int, queue: Any) -> None:
    """What a writing process does until it is ended; an error is sent too."""
    try:
        for texts in texts_of(Writer(options), options, tokens, renaming, seed):
            queue.put(texts.numpy())
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


class Text:
    """What the model has written so far.

    With `options.writers` = 0 this process writes for `text_seconds` or `tokens`, and then no more. Otherwise so many
    processes write, each with an engine, until `close`.

    Attributes:
        windows: [n, context] int32 on the device.
    """

    def __init__(self, texts: list[str], tokenizer: Any, options: argparse.Namespace) -> None:
        tokens, renaming, self._device = encode_documents(texts, tokenizer), Renaming(tokenizer), options.device
        self._processes: list[BaseProcess] = []
        if options.writers:
            context = multiprocessing.get_context("spawn")
            self._queue: Any = context.Queue()
            for seed in range(options.seed, options.seed + options.writers):
                given = (options, tokens, renaming, seed, self._queue)
                self._processes.append(context.Process(target=send_texts, args=given, daemon=True))
            for process in self._processes:
                process.start()
            self.windows = self._received(self._queue.get())
        else:
            self.windows = self._write(options, tokens, renaming)

    def _write(self, options: argparse.Namespace, tokens: Tensor, renaming: Renaming) -> Tensor:
        written, started = list[Tensor](), time.monotonic()
        for texts in texts_of(Writer(options), options, tokens, renaming, options.seed):
            written.append(texts)
            enough = len(written) * texts.numel() >= options.tokens
            if enough or time.monotonic() - started >= options.text_seconds:
                break
        return torch.cat(written).to(self._device)

    def _received(self, texts: Any) -> Tensor:
        if isinstance(texts, str):
            raise RuntimeError(f"a writer failed: {texts}")
        return torch.from_numpy(texts).to(self._device)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Random windows [count, context] int64 of all that there are by now."""
        while self._processes:
            try:
                self.windows = torch.cat([self.windows, self._received(self._queue.get_nowait())])
            except Empty:
                break
        chosen = torch.randint(len(self.windows), (count,), generator=generator)
        return self.windows[chosen.to(self._device)].long()

    def close(self) -> None:
        """End the writers."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
