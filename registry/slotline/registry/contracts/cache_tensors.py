"""Caches other than plain keys and values: named tensors, and the formats that say what they hold.

A *format* is a name for the tensors of a layer's cache and for the meaning of their numbers. A cache spec declares the
formats that it lays out (`KVSpecCapabilities.formats`), an attention backend those that it reads and writes
(`AttentionCapabilities.cache_formats`). The plan gives both the same one. ``plain`` is a `KVCache`: keys and values in
the cache's dtype. Any other name may be chosen by a plugin. These are defined here:

* ``int8_token_head``: tensors ``key`` and ``value`` int8, ``key_scale`` and ``value_scale`` float32, one scale for each
  token and KV head. A vector x of a head is stored as ``scale = max(abs(x)) / 127``, computed in float32, and
  ``round(x / scale)``, to nearest even. It is read as ``code * scale``. Codes lie from -127 to 127. The codes of a
  vector of zeros are 0 and its scale is a finite number. A step's new keys and values are read as they are stored. This
  is the scheme of vLLM's ``int8_per_token_head``.
* ``fp8_token_head``: the same with ``key`` and ``value`` float8_e4m3fn and ``scale = max(abs(x)) / 448``. A code is
  ``x / scale`` rounded to nearest even. Small elements of a vector keep more precision than in int8, large ones less.
* ``int4_rotated``: ``key`` and ``value`` uint8 of ceil(D / 2) bytes a vector, with the same scales. A vector is rotated
  first, so that no single element is large (Ashkboos et al. 2024, QuaRot): ``y = H x / b`` in pieces of b elements,
  where b is the largest power of two that divides D and H the Hadamard matrix of b by Sylvester, unnormalised. Then
  ``scale = max(abs(y)) / 7`` and codes ``round(y / scale)`` from -7 to 7. Byte i holds the code of element 2 i in its
  lower half and that of 2 i + 1 in its upper half, each plus 8. A half without an element is not read. The vector is
  read as ``H (code * scale)``. A backend may rotate queries instead of keys and outputs instead of values, since H is
  symmetric.
* ``key_bounds``: tensors ``key`` and ``value`` as in ``plain``, and ``key_bounds`` [2, Hkv, D] of the keys' dtype, one
  for each kernel block: the smallest number of its keys in each element, then the largest. A `write` that stores keys
  in a block sets its bounds to those of the block's slots up to the last one that it writes. Keys that an earlier step
  stored behind that slot (rejected drafts, or an earlier owner's) do not count. These are the summaries of Quest
  (arXiv 2406.10774, section 3.2).
* ``latent_index``: for layers of latents with an index (`AttentionLayer.index_topk`). Tensor ``key`` holds the latents,
  [1, head_size] of a token, and ``index_key`` the keys of the index, [index head size], both in the cache's dtype. A
  layer that uses another layer's picks (`AttentionLayer.index_from`) has no ``index_key``. The values are the first
  `head_size_v` numbers of ``key``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from attrs import frozen

if TYPE_CHECKING:
    import torch

PLAIN = "plain"
"""The format of a `KVCache`."""

INT8_TOKEN_HEAD = "int8_token_head"
FP8_TOKEN_HEAD = "fp8_token_head"
INT4_ROTATED = "int4_rotated"
LATENT_INDEX = "latent_index"

KEY_BOUNDS = "key_bounds"

FORMAT_DTYPES: Mapping[str, str] = MappingProxyType(
    {INT8_TOKEN_HEAD: "int8", FP8_TOKEN_HEAD: "float8_e4m3fn", INT4_ROTATED: "uint8"}
)
"""Formats whose elements have a dtype of their own, with its name. It is the cache's dtype in a plan."""


def stored_size(cache_format: str, size: int) -> int:
    """Return the elements that a format of `FORMAT_DTYPES` stores for a vector of `size` elements."""
    return -(-size // 2) if cache_format == INT4_ROTATED else size


@frozen
class CacheTensor:
    """Tensor that a layer keeps in each block of its cache.

    Attributes:
        name: unique in its layer.
        dtype: name of a torch dtype. ``uint8`` serves for opaque bytes.
        shape: of one token, or of one kernel block.
        per: what has one entry of that shape: each ``token``, or each kernel ``block``.
        alignment: bytes. The tensor's part of a kernel block begins at a multiple of it.
        by_head: True if the first dimension of the shape counts KV heads. Layout HND puts it before the tokens.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    per: Literal["token", "block"] = "token"
    alignment: int = 16
    by_head: bool = False


class CacheTensors(Mapping[str, "torch.Tensor"]):
    """Cache of one layer in a format other than ``plain``: tensors by name.

    A tensor per token is [num_kernel_blocks, kernel_block_size, *shape], one per block is [num_kernel_blocks, *shape].
    Strides follow the layout. Kernel block 0 is the null block.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def key(self) -> torch.Tensor:
        """The tensor named ``key``. Raises KeyError if the format has none."""
        return self._tensors["key"]

    @property
    def value(self) -> torch.Tensor:
        """The tensor named ``value``. Raises KeyError if the format has none."""
        return self._tensors["value"]
