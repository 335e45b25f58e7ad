"""What draft heads learn from: the model's own continuations of source files, written by slotline's engine."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing

from slotline.core import LLM, SamplingParams

TEMPERATURE = 0.8
"""Of texts that are not greedy; most are, as drafts are mostly verified."""

KEPT = 2**18
"""Windows that stay on the device; newer ones take the place of the oldest."""


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
        options: model, context, prompts (texts at a time), memory (of the engine's cache).
        device: where it writes; a GPU with a number becomes the current one.
    """

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        at_once = options.prompts
        if ":" in device:
            torch.cuda.set_device(device)
        self.context = options.context
        self._llm = LLM(
            str(options.model),
            device=device,
            dtype="float32" if device == "cpu" else "bfloat16",
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


class Prompts:
    """Beginnings of source files, for writers.

    Args:
        sources: tokens [n] int32 of documents side by side, one tensor for each kind of text.
        shares: how many in a hundred prompts, or in another sum, are of each.
        renamed: the share of prompts whose names are exchanged.
    """

    def __init__(self, sources: Sequence[Tensor], shares: Sequence[float], tokenizer: Any, renamed: float) -> None:
        self._sources, self._shares, self._renamed = sources, torch.tensor(shares), renamed
        self._renaming = Renaming(tokenizer)

    def __call__(self, length: int, count: int, generator: torch.Generator) -> Tensor:
        """Prompts [count, length] int64 in random order."""
        which = torch.multinomial(self._shares, count, replacement=True, generator=generator)
        prompts = torch.cat(
            [prompts_of(tokens, length, int((which == i).sum()), generator) for i, tokens in enumerate(self._sources)]
        )[torch.randperm(count, generator=generator)]
        first = round(self._renamed * count)
        prompts[:first] = self._renaming(prompts[:first], generator)
        return prompts[torch.randperm(count, generator=generator)]


def texts_of(writer: Writer, options: argparse.Namespace, prompts: Prompts, seed: int) -> Iterator[Tensor]:
    """Texts [prompts, context] int32 behind prompts of random lengths and places, for ever."""
    generator, count = torch.Generator().manual_seed(seed), options.prompts
    shortest, longest = max(1, options.context // 10), options.context * 5 // 8
    while True:
        lengths = torch.randint(shortest, longest, (count,), generator=generator).tolist()
        begun = [
            prompt[:length] for prompt, length in zip(prompts(longest, count, generator).tolist(), lengths, strict=True)
        ]
        sampled = torch.rand(count, generator=generator) < options.sampled
        yield writer(begun, (TEMPERATURE * sampled).tolist()).int()


def write_texts(options: argparse.Namespace, device: str, prompts: Prompts, seed: int, folder: Path) -> None:
    """What a writing process does until it is ended: files SEED-NUMBER.npy, each there when it is whole."""
    torch.set_num_threads(1)
    for number, texts in enumerate(texts_of(Writer(options, device), options, prompts, seed)):
        unfinished = folder / f"{seed}-{number}.unfinished"
        with unfinished.open("wb") as file:
            np.save(file, texts.numpy())
        unfinished.rename(folder / f"{seed}-{number}.npy")


class Text:
    """What the model has written so far, the last `KEPT` windows of it.

    `options.writers` processes write, each with an engine, until `close`; they take turns at `options.devices`. Without
    them, and without a folder `options.texts` that those of another training write to, this process writes for
    `text_seconds` or `tokens`, and then no more.

    Attributes:
        written: windows so far.
        read: of those, how many have been in a sample.
    """

    def __init__(self, prompts: Prompts, options: argparse.Namespace) -> None:
        self._options, self._prompts = options, prompts
        self._windows = torch.zeros(KEPT, options.context, dtype=torch.int32, device=options.device)
        self.written = self.read = 0
        self._folder = options.texts or Path(tempfile.mkdtemp(prefix="texts-"))
        self._folder.mkdir(exist_ok=True)
        self._known, self._looked = set[str](), 0.0
        context, devices = multiprocessing.get_context("spawn"), options.devices or [options.device]
        self._processes = [
            context.Process(
                target=write_texts,
                args=(options, devices[i % len(devices)], prompts, options.seed + i, self._folder),
                daemon=True,
            )
            for i in range(options.writers)
        ]
        for process in self._processes:
            process.start()

    def begin(self) -> None:
        """Have this process write, or wait until each of the others has written once."""
        started, options = time.monotonic(), self._options
        if self._processes or options.texts:
            while self.written < max(1, len(self._processes)) * options.prompts:
                time.sleep(0.1)
                self._receive()
            return
        for texts in texts_of(Writer(options, options.device), options, self._prompts, options.seed):
            self._add(texts)
            enough = self.written * options.context >= options.tokens
            if enough or time.monotonic() - started >= options.text_seconds:
                break

    @property
    def windows(self) -> Tensor:
        """[n, context] int32 on the device, those that are kept."""
        return self._windows[: self.written]

    def _add(self, texts: Tensor) -> None:
        at = (self.written + torch.arange(len(texts))) % KEPT
        self._windows[at.to(self._windows.device)] = texts.to(self._windows.device)
        self.written += len(texts)

    def _receive(self) -> None:
        """Read the files that are there, twice a second at most."""
        if time.monotonic() - self._looked < 0.5:
            return
        for file in self._folder.glob("*.npy"):
            if file.name not in self._known:
                self._add(torch.from_numpy(np.load(file)))
                self._known.add(file.name)
                if not self._options.texts:
                    file.unlink()
        for process in self._processes:
            if process.exitcode is not None:
                raise RuntimeError(f"a writer has ended with exit code {process.exitcode}: its output says why")
        self._looked = time.monotonic()

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Windows [count, context] int64: the next that no sample had, or random ones where there are too few.

        A share `options.plain` of them is source that the model did not write.
        """
        plain = round(self._options.plain * count)
        if plain:
            source = self._prompts(self._options.context, plain, generator).to(self._windows.device)
            return torch.cat([source, self.sample_written(count - plain, generator)])
        return self.sample_written(count, generator)

    def sample_written(self, count: int, generator: torch.Generator) -> Tensor:
        """Windows [count, context] int64 that the model has written, as `sample` says."""
        self._receive()
        self.read = max(self.read, self.written - KEPT)
        if self.written - self.read >= count:
            chosen = (self.read + torch.arange(count)) % KEPT
            self.read += count
        else:
            chosen = torch.randint(min(self.written, KEPT), (count,), generator=generator)
        return self._windows[chosen.to(self._windows.device)].long()

    def close(self) -> None:
        """End the writers."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
        if not self._options.texts:
            shutil.rmtree(self._folder)
