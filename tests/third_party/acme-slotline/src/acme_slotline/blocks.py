"""Block diffusion: all draft tokens of a request at once, as masks that turn into tokens in two passes.

A block is the newest token and a mask for each draft token. Its tokens see all known tokens, whose keys and values are
projections of the model's own hidden states (KV injection, as in DFlash; Chen et al. 2026, arXiv 2602.06036), and each
other. After the first pass the half of the masks with the clearest answers become tokens, and the second pass fills the
rest (Nie et al. 2025, arXiv 2502.09992, section 2.4).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slotline.registry.contracts import (
    AttentionLayer,
    ComputedTokens,
    Draft,
    DraftBatch,
    DrafterContext,
    DrafterInspection,
)
from slotline.registry.errors import ModelError

FILE = "blocks.safetensors"
HEADS, SIZE = 2, 8
WIDTH = HEADS * SIZE


class BlockDrafter:
    """One attention layer over blocks. Its class is the factory."""

    layer_ids = (0, 2)

    def __init__(self, context: DrafterContext) -> None:
        self._count, self._mask, self._layer = context.num_tokens, context.vocab_size, context.layers[0]
        file = _file(context.path)
        weights = {name: tensor.to(context.device) for name, tensor in load_file(file).items()}
        for name, shape in _shapes(context).items():
            found = list(weights[name].shape) if name in weights else "not there"
            if found != list(shape):
                raise ModelError(f"{str(file)!r}: {name} is {found}, expected {list(shape)}", fix="train it again")
        self._weights = weights

    @classmethod
    def attention_layers(cls, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        """Return the layer, which needs no weights to be known."""
        _file(inspection.path)
        return (
            AttentionLayer(
                name="blocks",
                index=0,
                num_heads=HEADS,
                num_kv_heads=HEADS,
                head_size=SIZE,
                head_size_v=SIZE,
                scale=SIZE**-0.5,
            ),
        )

    @staticmethod
    def write_example(folder: Path, context: DrafterContext) -> None:
        """Write random weights of the model's sizes."""
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
            for name, shape in _shapes(context).items()
        }
        save_file(weights, folder / FILE)

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def observe(self, computed: ComputedTokens) -> None:
        """Store keys and values of tokens that the model has computed, those of drafts that fell among them."""
        assert computed.layer_hidden_states is not None
        assert computed.store is not None
        states = computed.layer_hidden_states.float() @ self._weights["inject"].T
        key, value = states.unflatten(-1, (2, HEADS, SIZE)).unbind(1)
        dtype = computed.layer_hidden_states.dtype
        computed.store(self._layer, _turned(key, computed.positions).to(dtype), value.to(dtype))

    def propose(self, batch: DraftBatch) -> Draft:
        """Denoise a block of each request in two passes."""
        rows = len(batch.rows)
        masks = torch.full((rows, self._count), self._mask, device=batch.last_token_ids.device)
        likely, tokens = self._pass(batch, masks).softmax(-1).max(-1)
        clear = likely.topk(-(-self._count // 2), dim=-1).indices
        kept = torch.zeros_like(masks, dtype=torch.bool).scatter(1, clear, True)
        again = self._pass(batch, torch.where(kept, tokens, masks)).argmax(-1)
        return Draft(token_ids=torch.where(kept, tokens, again))

    def _pass(self, batch: DraftBatch, drafted: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, count, vocab_size] of the draft tokens, some of which are masks."""
        assert batch.attend_block is not None
        block = torch.cat([batch.last_token_ids[:, None], drafted], 1)
        places = (batch.positions[:, None] + torch.arange(block.shape[1], device=block.device)).flatten()
        states = self._weights["tokens"][block.flatten()]
        query, key, value = (states @ self._weights["qkv"].T).unflatten(-1, (3, HEADS, SIZE)).unbind(1)
        attended = batch.attend_block(block.shape[1])(
            self._layer, _turned(query, places), _turned(key, places), value.contiguous(), None
        )
        out = (states + attended.float().flatten(1)).unflatten(0, block.shape)[:, 1:]
        return out @ self._weights["out"].T


def _shapes(context: DrafterContext) -> dict[str, tuple[int, int]]:
    """Return the weights by name. The last of `tokens` is the mask."""
    return {
        "inject": (2 * WIDTH, len(BlockDrafter.layer_ids) * context.hidden_size),
        "tokens": (context.vocab_size + 1, WIDTH),
        "qkv": (3 * WIDTH, WIDTH),
        "out": (context.vocab_size, WIDTH),
    }


def _file(path: str | None) -> Path:
    if path is None or not (file := Path(path) / FILE).is_file():
        raise ModelError(f"{path!r} has no {FILE}", fix="set drafter.path to a folder with a block drafter")
    return file


def _turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return queries or keys [n, heads, size] turned by their positions (rotary embeddings)."""
    angles = positions[:, None] * 10000.0 ** -(torch.arange(SIZE // 2, device=x.device) / (SIZE // 2))
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
