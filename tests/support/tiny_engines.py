"""Settings of the engines that tests build, and the state in which a test leaves an engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from slotline.core import LLM
from slotline.core.scheduler.integrity import check_integrity

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "backend": "torch",
    "block_size": 16,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "memory": "4MiB",
    "optimize": False,
    "observability.check_integrity": True,
    "observability.progress": False,
}
"""Settings of an engine in tests, unless a test says otherwise; the integrity checker runs after every step."""


def everything_returned(llm: LLM) -> None:
    """No request, row, block or processor state is left over."""
    engine = llm.engine
    check_integrity(engine.scheduler)
    assert not engine.has_work
    assert not engine.scheduler.running
    assert engine.scheduler.num_waiting == 0
    assert engine.rows.num_free == engine.rows.max_requests
    pool = engine.scheduler.cache.pool
    assert pool.num_free == pool.num_blocks - 1
    if hasattr(multimodal := engine.extension("multimodal"), "cache"):  # one that keeps embeddings
        multimodal.check()
        multimodal.reset()
        assert multimodal.cache.num_used == 0
    assert not np.any([slot.active for slot in engine.pipeline.slots])
    if (grammars := engine.extension("structured_output")) is not None:
        assert not grammars.active.any()
        assert grammars.compiler.num_waiting == 0
