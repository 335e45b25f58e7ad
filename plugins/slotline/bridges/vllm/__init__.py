"""A bridge to vLLM: its attention backends under our checks, and our attention backends in its engine.

`slotline conform vllm:package.module:Backend` runs the attention checks on a class that is written for vLLM's v1
interface. `register` puts a slotline attention backend into vLLM's registry, as its backend ``CUSTOM``.

The interface is that of vLLM 0.32 (`vllm.v1.attention.backend`). Classes with the `get_kv_cache_shape` of earlier
versions are taken too.
"""

from slotline.bridges.vllm.conform import bridge
from slotline.bridges.vllm.registration import register

__all__ = ["bridge", "register"]
