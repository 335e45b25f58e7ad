"""A plugin's own states beside states with kept masks, through random texts."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import numpy as np
from structured_texts import EOS, Texts, tokenizer

from slotline.core import StructuredOutputsParams
from slotline.plugins.structured_output.mask_cache import CachedGrammar, Form, MaskCache
from slotline.testing.subject import subject_of

WORDS = -(-len(tokenizer()) // 32)


@cache
def texts_of(plugin: str) -> Texts:
    return Texts(plugin)


@cache
def first_characters() -> list[str]:
    return [tokenizer().decode([token])[:1] for token in range(len(tokenizer()))]


class Pair:
    """A plugin's own states beside states with kept masks, under one constraint."""

    def __init__(self, plugin: str, form: Form | None = None, **wanted: Any) -> None:
        self.backend = texts_of(plugin).backend
        compiled = texts_of(plugin).compiled(**wanted)
        every = subject_of(f"structured_output:{plugin}").capabilities.every_tokenization
        self.cache = MaskCache(self.backend.token_text, EOS, forces=not every)
        self.grammar = CachedGrammar(compiled, StructuredOutputsParams(**wanted).constraint, self.cache)
        self.grammar._form = form or self.grammar._form
        self.found = self.asked = 0

    def filled(self, state: Any, drafts: list[int]) -> np.ndarray:
        words = np.full((1 + len(drafts), WORDS), -1, np.int32)
        self.backend.fill([state], [drafts], [0], words)
        return words

    def walk(self, rng: Random, steps: int, *, drafts: int = 0) -> None:
        """Write a random text, and compare all masks on the way."""
        own, kept = self.backend.start(self.grammar.compiled), self.grammar.start(self.backend)
        for _ in range(steps):
            assumed = self.drafts(own, rng, drafts)
            want = self.filled(own, assumed)
            masks = kept.kept_masks(assumed)
            self.asked, self.found = self.asked + (masks is None), self.found + (masks is not None)
            if masks is None:
                got = self.filled(kept.current(), assumed)
                kept.keep(assumed, got)
            else:
                got = np.full_like(want, -1)
                got[: len(masks)] = [mask.words for mask in masks]
            assert np.array_equal(got, want)
            if (token := self.choice(want[0], rng)) is None:
                break
            assert rng.random() < 0.8 or kept.count_legal([token]) == 1
            assert own.accept([token]) == kept.accept([token]) == 1
            assert bool(own.finished) == kept.finished
            if own.finished:
                break

    def text(self, rng: Random, steps: int) -> list[int]:
        """Return the tokens of a random text that can go on."""
        own, found = self.backend.start(self.grammar.compiled), list[int]()
        while len(found) < steps and (token := self.choice(self.filled(own, [])[0], rng)) is not None:
            own.accept([token])
            found.append(token)
        return found

    def walk_often(self, seeds: int, steps: int, *, drafts: int = 0) -> None:
        """Write a random text for each seed."""
        for seed in range(seeds):
            self.walk(Random(seed), steps, drafts=drafts)

    def choice(self, words: np.ndarray, rng: Random) -> int | None:
        """Choose an allowed token, rather one that ends something."""
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        allowed = [token for token in allowed if token not in EOS]
        wanted = '"}],:0123456789.eE\\<>+-)' if rng.random() < 0.5 else '"}]' if rng.random() < 0.5 else ""
        ends = [token for token in allowed if first_characters()[token] in wanted] if wanted else []
        return rng.choice(ends or allowed) if allowed else None

    def drafts(self, own: Any, rng: Random, most: int) -> list[int]:
        """Choose drafts, the last of which may be illegal or an end."""
        found: list[int] = []
        while most and len(found) < most and (token := self.choice(self.filled(own, found)[-1], rng)) is not None:
            found.append(token)
            if own.count_legal(found) < len(found):
                break
        return [*found[: most - 1], rng.choice((EOS[0], 100, 900))] if found and rng.random() < 0.3 else found
