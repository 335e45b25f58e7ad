"""The core names no chip and no library of kernels. The files that still do are listed, and the list only shrinks."""

from __future__ import annotations

import re

from repository import TESTS

CORE = TESTS.parent / "core" / "slotline" / "core"
NAMES = re.compile(r"cuda|triton|hopper|gluon|nvrtc", re.IGNORECASE)
STILL = {
    "builder/engine_builder.py",
    "builder/warmup.py",
    "device/out_of_memory.py",
    "engine/engine.py",
    "model_runner/decode_fast_path.py",
    "model_runner/graph_capture.py",
    "model_runner/graph_runner.py",
    "model_runner/kernel_precompile_plan.py",
    "model_runner/triton_repeats.py",
    "sampling/argmax.py",
    "sampling/bitmask.py",
    "sampling/logits_processors.py",
    "sampling/sampler.py",
    "sampling/triton_argmax.py",
    "sampling/triton_kernels.py",
    "sampling/triton_logits_ops.py",
    "sampling/triton_sampling.py",
    "speculation/draft_timing.py",
}


def test_no_other_file_of_the_core_names_a_chip_or_its_kernels() -> None:
    found = {str(file.relative_to(CORE)) for file in CORE.rglob("*.py") if NAMES.search(file.read_text("utf-8"))}
    assert found <= STILL, "ask the device instead: slotline.registry.contracts.device"
    assert found >= STILL, "take these from the list"
