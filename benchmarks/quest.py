"""Quality of the attention backend `quest` on the shipped model, by the number of blocks that a token reads.

    python benchmarks/quest.py [--tokens 1600] [--top-blocks 4 8 16 32 64]

The text is source code of Python's own library. The engine reads it in steps of 16 tokens, so that every token chooses
its blocks as in a decode, and gives the logarithmic probability of each token. *Weight* is the share of the attention
weights of exact attention that lie in the chosen blocks. *Recall* is the share of the blocks with the largest weights
that are chosen. Both are means over layers, KV heads and tokens that have more blocks than they read.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import statistics
import textwrap
from typing import Any

import torch
from command_line import positive

from slotline.backends.quest.backend import Rows, choose_blocks
from slotline.core import LLM, SamplingParams
from slotline.registry.contracts.cache_tensors import KEY_BOUNDS

SHORT = "--tokens 200 --top-blocks 4"
"""Arguments of a short run."""
STEP = 16


def main() -> None:
    """Print a line for each number of blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=1600)
    parser.add_argument("--top-blocks", type=positive, nargs="+", default=(4, 8, 16, 32, 64))
    given = parser.parse_args()
    text = inspect.getsource(argparse) + inspect.getsource(textwrap) + inspect.getsource(logging)
    exact, _ = read(text, given.tokens, None)
    print(f"{given.tokens} tokens, blocks of 16; exact: mean logarithmic probability {statistics.mean(exact):.4f}")
    for count in given.top_blocks:
        found, shares = read(text, given.tokens, count)
        begin = count * STEP  # before it all blocks are read
        change = [b - a for a, b in zip(exact, found, strict=True)][begin:]
        off = statistics.mean(map(abs, change))
        print(
            f"{count:4} blocks: weight {shares[0]:.3f}, recall {shares[1]:.3f}, change of a token's logarithmic "
            f"probability {statistics.mean(change):+.4f}, its size {off:.4f}, over {len(change)} tokens"
        )


def read(text: str, num_tokens: int, top_blocks: int | None) -> tuple[list[float], tuple[float, float]]:
    """Return the tokens' logarithmic probabilities, and the shares of weights and blocks. None reads all blocks."""
    settings: dict[str, Any] = {"attention.backend": "torch"}
    if top_blocks is not None:
        settings = {"attention.backend": "quest", "backend.quest.top_blocks": top_blocks}
    llm = LLM(device="cpu", max_model_len=2048, memory="64MiB", **{"scheduler.max_batched_tokens": STEP, **settings})
    tokens = llm.tokenizer.encode(text[: 8 * num_tokens])[:num_tokens]
    shares: list[torch.Tensor] = []
    if top_blocks is not None:
        watch(llm.engine.runner.router.groups[0].backend, shares)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params)
    assert output.prompt_logprobs is not None
    found = [next(iter(each.values())).logprob for each in output.prompt_logprobs if each]
    weight, recall = torch.stack(shares).mean(0).tolist() if shares else (1.0, 1.0)
    return found, (weight, recall)


def watch(backend: Any, shares: list[torch.Tensor]) -> None:
    """Have a backend note the shares of each call: [2] for weights and blocks."""
    attend, size, top = backend._attend, backend._block_size, backend._top

    def noting(layer: Any, query: torch.Tensor, cache: Any, rows: Rows, sinks: Any) -> torch.Tensor:
        long = rows.lengths > top * size
        if bool(long.any()):
            own = Rows(*(part[long] for part in rows))
            heads = query[long].unflatten(1, (layer.num_kv_heads, -1)) * layer.scale  # [R, Hkv, G, D]
            weights = block_weights(heads, cache.key[own.blocks].float(), own.lengths)  # [R, Hkv, n]
            newest = (own.lengths - 1) // size
            chosen = choose_blocks(heads, cache[KEY_BOUNDS][own.blocks].float(), newest, top)
            best = weights.topk(top, 2).indices
            hit = (chosen.unsqueeze(3) == best.unsqueeze(2)).any(3).float().mean()
            shares.append(torch.stack([weights.gather(2, chosen).sum(2).mean(), hit]))
        result: torch.Tensor = attend(layer, query, cache, rows, sinks)
        return result

    backend._attend = noting


def block_weights(query: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the weights of exact attention by block, the mean over the query heads of a KV head: [R, Hkv, n].

    Args:
        query: [R, Hkv, G, D], times the scale.
        keys: [R, n, block_size, Hkv, D].
        lengths: [R].
    """
    count, size = keys.shape[1:3]
    scores = query @ keys.flatten(1, 2).permute(0, 2, 3, 1)  # [R, Hkv, G, n * block_size]
    hidden = torch.arange(count * size) >= lengths[:, None]
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(3).mean(2)
    by_block: torch.Tensor = weights.unflatten(2, (count, size)).sum(3)
    return by_block


if __name__ == "__main__":
    main()
