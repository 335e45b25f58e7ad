"""Quality and memory of compressed caches: how well a model predicts true texts after prompts of which it keeps a part.

    python benchmarks/kv_compression.py [--model PATH] [--methods keydiff snapkv] [--keep 1.0 0.5 0.25] [--prompt 1024]

Each text is a prompt and the tokens that follow it in a file of this repository. The model is made to write these
tokens, and the probability that it gave each of them is read: the mean of their negative logarithms is the loss. Then
it writes what it likes best, and tokens are counted up to the first one that differs from the one of a whole cache.
Memory is that of the blocks that one request holds behind its prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from command_line import positive

from slotline.core import LLM, SamplingParams

SHORT = "--keep 1.0 0.5 --prompt 96 --texts 2 --tokens 8"
"""Arguments of a short run."""
ROOT = Path(__file__).parent.parent


def main() -> None:
    """Print a line for each method and share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="the model that ships if left out")
    parser.add_argument("--methods", nargs="+", default=("keydiff",))
    parser.add_argument("--keep", type=float, nargs="+", default=(1.0, 0.5, 0.25))
    parser.add_argument("--prompt", type=positive, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=128, help="tokens behind it")
    parser.add_argument("--texts", type=positive, default=24)
    parser.add_argument("--last", type=int, default=32, help="newest tokens that stay in any case")
    given = parser.parse_args()
    plain = built(given, None)
    texts = texts_of(plain, given.texts, given.prompt, given.tokens)
    whole = free_texts(plain, texts, given)
    print(f"{len(texts)} texts, prompts of {given.prompt} tokens, {given.tokens} tokens behind each")
    show("no compression", plain, texts, whole, given)
    for method in given.methods:
        for keep in given.keep:
            options = {"method": method, "keep": keep, "last": given.last}
            show(f"{method} {keep:g}", built(given, options), texts, whole, given)


def built(given: argparse.Namespace, options: dict[str, Any] | None) -> LLM:
    """Build an engine, with the extension if it has options."""
    compression: dict[str, Any] = {} if options is None else {"extensions.kv_compression": options}
    settings: dict[str, Any] = {
        "scheduler.max_model_len": given.prompt + given.tokens + 1,
        "observability.progress": False,
    }
    return LLM(given.model, **settings, **compression)


def texts_of(llm: LLM, count: int, prompt: int, tokens: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and what follows them, from files that are long enough, each once."""
    assert llm.tokenizer is not None
    found: list[tuple[list[int], list[int]]] = []
    for path in sorted((ROOT / "core").rglob("*.py"), key=lambda path: (path.name, path)):
        ids = llm.tokenizer.encode(path.read_text())
        if len(ids) >= prompt + tokens:
            found.append((list(ids[:prompt]), list(ids[prompt : prompt + tokens])))
    return found[:: max(1, len(found) // count)][:count]


def forced(tokens: list[int]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """Return a function on logits that leaves only the next of some tokens."""

    def only(written: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill_(-1, torch.tensor(tokens[len(written)]), 0)

    return only


def losses(llm: LLM, texts: list[tuple[list[int], list[int]]]) -> list[float]:
    """Return the mean negative logarithm of the probability of each text's tokens."""
    params = [
        SamplingParams(
            temperature=0, max_tokens=len(tokens), ignore_eos=True, logprobs=0, logits_processors=(forced(tokens),)
        )
        for _, tokens in texts
    ]
    found = []
    for output, (_, tokens) in zip(llm.generate([prompt for prompt, _ in texts], params), texts, strict=True):
        (answer,) = output.outputs
        assert list(answer.token_ids) == tokens
        assert answer.logprobs is not None
        found.append(mean(-entry[token].logprob for entry, token in zip(answer.logprobs, tokens, strict=True)))
    return found


def free_texts(llm: LLM, texts: list[tuple[list[int], list[int]]], given: argparse.Namespace) -> list[list[int]]:
    """Return what the model writes behind each prompt."""
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate([prompt for prompt, _ in texts], params)]


def held_bytes(llm: LLM, prompt: list[int]) -> int:
    """Return the bytes of the blocks that a request holds in the step behind its prompt."""
    engine, most = llm.engine, 0
    request = engine.add("held", prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()
        if request.row >= 0 and engine.rows.num_computed_tokens[request.row] > len(prompt):
            most = sum(
                len(group.blocks[request.row]) * group.spec.page_bytes(layer)
                for group, plan in zip(engine.scheduler.cache.groups, engine.plan.cache_groups, strict=True)
                for layer in plan.layers
            )
    return most


def show(
    name: str, llm: LLM, texts: list[tuple[list[int], list[int]]], whole: list[list[int]], given: argparse.Namespace
) -> None:
    """Print the figures of one engine."""
    loss = mean(losses(llm, texts))
    same = [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), given.tokens)
        for one, other in zip(free_texts(llm, texts, given), whole, strict=True)
    ]
    size = held_bytes(llm, texts[0][0]) / 2**10
    print(f"{name:18} loss {loss:.4f}  tokens as with all keys {mean(same):6.1f}  held {size:8.1f} KiB", flush=True)


if __name__ == "__main__":
    main()
