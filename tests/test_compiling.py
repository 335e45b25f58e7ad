"""Kernels compiled ahead: launches that lack one are left out and noted, and what is noted is compiled in threads.

Triton's compiler needs no GPU, only a target; a driver that names one stands in for the card.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
from contextlib import nullcontext
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from slotline.core.execution import compiling

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Card())
torch.cuda.device = lambda device: nullcontext()

@triton.jit
def add_one(x, n, size: tl.constexpr, dtype: tl.constexpr):
    place = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(x + place, (tl.load(x + place, mask=place < n) + 1).to(dtype), mask=place < n)

@triton.jit
def wrong(x, size: tl.constexpr):
    tl.store(x + tl.arange(0, size), nothing_of_this_name)

x, missing = torch.zeros(128), {}
with compiling.counting() as compiled:
    with compiling.leaving_out(missing):
        for size in (16, 32, 32, 64):
            assert add_one[(1,)](x, 100, size=size, dtype=tl.float32, num_warps=2) is None
        assert wrong[(1,)](x, size=16) is None
    assert (len(missing), compiled.count) == (4, 0), (len(missing), compiled.count)
    compiling.compile_all(missing)
    assert compiled.count == 3, compiled.count
    again = {}
    with compiling.leaving_out(again):
        assert add_one.warmup(x, 100, size=64, dtype=tl.float32, num_warps=2, grid=(1,)) is not None
        assert add_one.warmup(x, 100, size=64, dtype=tl.float16, num_warps=2, grid=(1,)) is None
    assert len(again) == 1
add_one.device_caches.clear()
with compiling.counting() as compiled:
    compiling.compile_all(missing)
assert compiled.count == 0, "they are in the cache on disk"
assert triton.knobs.runtime.jit_cache_hook is None
assert triton.knobs.compilation.listener is None
print("all of it")
"""


def test_launches_that_lack_a_kernel_are_left_out_and_their_kernels_compiled_in_threads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # Triton reads a kernel's source from its file
    script.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all of it" in done.stdout


def test_without_triton_nothing_is_noted() -> None:
    script = """
import sys
from slotline.core.execution import compiling
assert "triton" not in sys.modules
missing = {}
with compiling.counting() as compiled, compiling.leaving_out(missing):
    pass
compiling.compile_all(missing)
assert compiled.count == 0 and not missing
"""
    subprocess.run([sys.executable, "-c", script], check=True)
