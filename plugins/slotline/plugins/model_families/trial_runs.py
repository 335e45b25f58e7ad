"""Two short texts through transformers' own model and through ours, with the numbers after each layer."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from attrs import define, evolve, field

from slotline.plugins.model_families import (
    binding,
    inspection,
    loops,
    rope,
    state_mixers,
    structure,
    temperature,
)
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.logits import head_of
from slotline.plugins.model_families.tensor_parallel.collectives import install
from slotline.plugins.model_families.tensor_parallel.division import divide
from slotline.plugins.model_families.tensor_parallel.token_division import WHOLE, TokenDivision
from slotline.plugins.model_families.trial_cache import TrialCache
from slotline.registry.contracts.communicator import Communicator
from slotline.registry.contracts.model_family import Shard

PROMPTS = (37, 11)
"""Tokens of the two prompts. The first is longer than four windows or chunks, and comes in two chunks."""
FIRST_CHUNK = 21
NEW = 5


@define
class Trace:
    """Numbers of one request: after each decoder layer, and the logits of its last prompt token and the next ones."""

    layers: dict[int, list[torch.Tensor]] = field(factory=dict)
    logits: list[torch.Tensor] = field(factory=list)

    def after(self, layer: int) -> torch.Tensor:
        """Return [num_tokens, hidden_size]."""
        return torch.cat(self.layers[layer])


def generated(model: Any, length: int) -> tuple[list[int], Trace]:
    """Return a text, whose end transformers has generated with its cache, and its trace."""
    vocab = structure.vocab_size(model)
    tokens = torch.randint(min(5, vocab - 1), vocab, (1, length), generator=torch.Generator().manual_seed(length))
    trace = Trace()
    body = structure.find_body(model).base_model
    handles = [
        layer.register_forward_hook(_keeping(trace, number, only_new=True))
        for number, layer in enumerate(getattr(body, "layers", ()))
    ]
    result = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for handle in handles:
        handle.remove()
    trace.logits = [step[0].float() for step in result.logits]
    if not all(bool(one.isfinite().any()) for one in trace.logits):
        raise ValueError("its logits are not finite")
    return result.sequences[0].tolist(), trace


def _keeping(trace: Trace, number: int, *, only_new: bool, tokens: TokenDivision = WHOLE) -> Any:
    def keep(_module: Any, _args: Any, output: Any) -> None:
        states = output if isinstance(output, torch.Tensor) else output[0]
        if isinstance(states, torch.Tensor) and states.ndim == 3:
            before = trace.layers.setdefault(number, [])
            rows = tokens.whole(states)[0].detach().float().clone()
            known = sum(map(len, before))
            before.append(rows[known:] if only_new and 1 < known < len(rows) else rows)

    return keep


def ours(
    found: Checkpoint,
    reference: Any,
    texts: list[Any],
    shard: Shard | None = None,
    communicator: Communicator | None = None,
) -> list[Trace]:
    """Return the traces of the same texts, in one batch, through our forward and the trial cache.

    With a shard, the model is a rank's part, and all ranks call this together.
    """
    config = deepcopy(reference.config)
    small = evolve(found, config=config)
    seen = inspection.look_at(small) if shard is None else inspection.look_at(small, shard)
    binding.register(binding.ATTENTION_NAME, binding.slot_attention)
    config._attn_implementation = small.attention(binding.ATTENTION_NAME)
    model = found.model_class(config).float().eval()
    model.load_state_dict(reference.state_dict(), strict=False)
    model = inspection.adopted(structure.find_body(model.requires_grad_(False)), binding.slot_attention)
    joined = None if shard is None else divide(model, shard)
    holder = binding.bind(model, seen.layers)
    state_mixers.bind(model, seen.state_layers, holder)
    rope.freeze(model, PROMPTS[0] + NEW)
    temperature.settle(model, PROMPTS[0] + NEW)
    own = WHOLE
    if shard is not None and joined is not None:
        assert communicator is not None
        names = [*(layer.name for layer in seen.layers), *(layer.name for layer in seen.state_layers)]
        own = install(model, joined, communicator, mixing=names if shard.sequence else None)
    loop, head, cache = loops.plain_loop(model, own), head_of(model, vetted=found.is_vetted), TrialCache()
    counts = [0] * len(texts)
    traces = [Trace() for _ in texts]
    whole = Trace()
    for number, layer in enumerate(getattr(model.base_model, "layers", ())):
        layer.register_forward_hook(_keeping(whole, number, only_new=False, tokens=own))
    for step in _steps():
        tokens = torch.tensor([t for r, n in step for t in texts[r][0][counts[r] : counts[r] + n]])
        places = torch.tensor([p for r, n in step for p in range(counts[r], counts[r] + n)])
        cache.counts = step
        with holder.serving(cache.attend, cache.advance):
            hidden = loop(tokens, places, None, None, None)[0]
        _divide(whole, traces, step)
        logits, start = head(hidden), 0
        for request, count in step:
            start += count
            counts[request] += count
            if counts[request] >= PROMPTS[request]:
                traces[request].logits.append(logits[start - 1])
    return traces


def _steps() -> list[list[tuple[int, int]]]:
    """Return the (request, number of new tokens) of each forward."""
    chunks = [[(0, FIRST_CHUNK)], [(0, PROMPTS[0] - FIRST_CHUNK), (1, PROMPTS[1])]]
    return chunks + [[(0, 1), (1, 1)]] * (NEW - 1)


def _divide(whole: Trace, traces: list[Trace], step: list[tuple[int, int]]) -> None:
    """Give each request its rows of what a forward left."""
    for number, calls in whole.layers.items():
        rows, start = torch.cat(calls), 0
        for request, count in step:
            traces[request].layers.setdefault(number, []).append(rows[start : start + count])
            start += count
    whole.layers.clear()
