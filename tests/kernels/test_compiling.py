"""Kernels compiled ahead: launches that lack one are left out and noted, and what is noted is compiled in threads.

Triton's compiler needs no GPU, only a target; a driver that names one stands in for the card.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
from engine_driver import GREEDY

from slotline.backends.cuda.compiler import TritonCompiler
from slotline.core import LLM
from slotline.kernels import triton_precompile as compiling
from slotline.kernels.triton_precompile import Kernel

pytest.importorskip("triton")

CARD = """
from contextlib import nullcontext
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from slotline.kernels import triton_precompile as compiling

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

"""
SCRIPT = """
@triton.jit
def wrong(x, size: tl.constexpr):
    tl.store(x + tl.arange(0, size), nothing_of_this_name)

x, missing, told = torch.zeros(128), {}, []
triton.knobs.compilation.listener = lambda **heard: told.append(heard["cache_hit"])
compiled = compiling.listen()
with compiling.leaving_out(missing):
    for size in (16, 32, 32, 64):
        assert add_one[(1,)](x, 100, size=size, dtype=tl.float32, num_warps=2) is None
    assert wrong[(1,)](x, size=16) is None
assert (len(missing), compiled.count) == (4, 0), (len(missing), compiled.count)
compiling.compile_all(missing)
assert compiled.count == 3, compiled.count
assert {(kernel.name, kernel.on_disk) for kernel in compiled.kernels} == {("add_one", False)}
assert all(0 < kernel.seconds < 60 for kernel in compiled.kernels), compiled.kernels
again = {}
with compiling.leaving_out(again):
    assert add_one.warmup(x, 100, size=64, dtype=tl.float32, num_warps=2, grid=(1,)) is not None
    assert add_one.warmup(x, 100, size=64, dtype=tl.float16, num_warps=2, grid=(1,)) is None
assert len(again) == 1
add_one.device_caches.clear()
second = compiling.listen()
compiling.compile_all(missing)
assert second.count == 0, "they are in the cache on disk"
assert [kernel.on_disk for kernel in second.kernels] == 3 * [True]
assert compiled.count == 3
assert told == 3 * [False] + 3 * [True], "whoever listened before is told too, once"
assert triton.knobs.runtime.jit_cache_hook is None
print("all of it")
"""


EARLY = """
x, first, second = torch.zeros(128), {}, {}
compiled = compiling.listen()

def launch(size):
    return add_one[(1,)](x, 100, size=size, dtype=tl.float32, num_warps=2)

def on_disk():
    from pathlib import Path
    return len(list(Path(triton.knobs.cache.dir).rglob("add_one.cubin")))

with compiling.leaving_out(first):
    launch(16)
assert not compiling._EARLY._begun, "nothing had to be compiled so far"
compiling.compile_all(first)
assert on_disk() == 1
with compiling.leaving_out(second):
    launch(32)
    launch(64)
    launch(32)
    for begun in list(compiling._EARLY._begun.values()):
        begun.result()
    assert on_disk() == 3, "they are compiled while launches are noted"
    launch(32)
assert len(second) == 2 and len(add_one.device_caches[0][0]) == 1, "this process has none of them yet"
compiling.compile_all(second)
assert len(add_one.device_caches[0][0]) == 3
assert not compiling._EARLY._begun and compiling._EARLY._pool is None
assert compiled.count == 3, compiled.kernels
add_one.device_caches.clear()
compiling.compile_all(second)
assert compiled.count == 3 and not compiling._EARLY.wanted, "now they are on disk"
print("all of it")
"""


TWO_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread, get_ident

x, knobs = torch.zeros(128), triton.knobs

def kernel_of(size):
    return add_one.warmup(x, 100, size=size, dtype=tl.float32, num_warps=2, grid=(1,))

def elsewhere(call, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *arguments).result()

mine, theirs = {}, {}
with compiling.leaving_out(mine):
    assert elsewhere(kernel_of, 16) is not None, "another thread's launch was left out"
    assert kernel_of(32) is None
assert len(mine) == 1 and knobs.runtime.jit_cache_hook is None

# scopes that overlap, and the first one ends first
begun, ended = Barrier(2), Barrier(2)

def other():
    begun.wait()
    with compiling.leaving_out(theirs):
        begun.wait()
        ended.wait()
        assert kernel_of(64) is None
        ended.wait()

thread = Thread(target=other)
thread.start()
with compiling.leaving_out(mine):
    begun.wait()
    begun.wait()
ended.wait()
ended.wait()
thread.join()
assert (len(mine), len(theirs)) == (1, 1) and knobs.runtime.jit_cache_hook is None

# a hook of the host: asked first, and its answer holds where nothing is noted
asked, answer = [], [None]

def host(*, fn, **rest):
    asked.append(get_ident())
    return answer[0]

knobs.runtime.jit_cache_hook = host
with compiling.leaving_out(mine):
    assert kernel_of(64) is None
    assert elsewhere(kernel_of, 64) is not None
    answer[0] = True
    assert elsewhere(kernel_of, 128) is None
    answer[0] = None
assert len(mine) == 2 and len(asked) == 3 and knobs.runtime.jit_cache_hook is host

# a hook of the host that calls ours, and stays longer
with compiling.leaving_out(mine):
    below = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = above = lambda **launch: below(**launch)
assert knobs.runtime.jit_cache_hook is above
assert add_one.warmup(x, 100, size=16, dtype=tl.float16, num_warps=2, grid=(1,)) is not None
with compiling.leaving_out(again := {}):
    assert add_one.warmup(x, 100, size=32, dtype=tl.float16, num_warps=2, grid=(1,)) is None
assert len(again) == 1 and knobs.runtime.jit_cache_hook is above
knobs.runtime.jit_cache_hook = None

# two engines in two threads, each with a log, and one inside the other
compiling.listen()
with compiling.KernelLog() as outer:
    def engine(dtype):
        with compiling.KernelLog() as log:
            compiling.listen()
            add_one.warmup(x, 100, size=64, dtype=dtype, num_warps=2, grid=(1,))
            return log.kernels
    assert len(elsewhere(engine, tl.bfloat16)) == 1
    assert len(engine(tl.float16)) == 1
    listener = knobs.compilation.listener
    knobs.compilation.listener = lambda **heard: listener(**heard)
    compiling.listen()
    assert outer.kernels == []
    add_one.warmup(x, 100, size=128, dtype=tl.float16, num_warps=2, grid=(1,))
    assert len(outer.kernels) == 1, "heard twice"
    missing = {}
    with compiling.leaving_out(missing):
        add_one.warmup(x, 100, size=256, dtype=tl.float16, num_warps=2, grid=(1,))
    compiling.compile_all(missing)
    assert len(outer.kernels) == 2, "what is compiled in threads belongs to the engine that asked"
print("all of it")
"""


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "script", [SCRIPT, EARLY, TWO_THREADS], ids=["compiled in threads", "compiled early", "two threads"]
)
def test_launches_that_lack_a_kernel_are_left_out_for_the_thread_that_asks_alone(script: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"  # Triton reads a kernel's source from its file
    file.write_text(CARD + script)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all of it" in done.stdout


def test_triton_hashes_itself_while_the_compiler_waits_for_kernels() -> None:
    from triton.runtime.cache import triton_key

    compiling.hash_ahead.cache_clear()
    TritonCompiler("cuda")
    thread = compiling.hash_ahead()
    assert thread is not None
    thread.join(60)
    before = triton_key.cache_info()
    triton_key()
    assert (triton_key.cache_info().hits, triton_key.cache_info().misses) == (before.hits + 1, before.misses)
    assert before.misses > 0


def test_without_triton_nothing_is_noted() -> None:
    script = """
import sys
from slotline.kernels import triton_precompile as compiling
assert "triton" not in sys.modules
compiled, missing = compiling.listen(), {}
with compiling.leaving_out(missing):
    pass
compiling.compile_all(missing)
assert compiled.count == 0 and not missing
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_step_that_waits_for_the_compiler_says_so(
    tiny: Callable[..., Path],
    engines: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = engines(tiny("llama"))
    launch, kernels = llm.engine.runner.launch, [Kernel("add_one", 0.75, False), Kernel("old", 0.01, True)]

    def compiles(inputs: Any) -> Any:
        if not llm.engine.late_kernels:
            compiling._logs[get_ident()].extend(kernels)  # as Triton's listener does
        return launch(inputs)

    llm.generate([[5, 6]], GREEDY)
    assert llm.engine.late_kernels == []
    monkeypatch.setattr(llm.engine.runner, "launch", compiles)
    monkeypatch.setattr(llm.engine, "compiler", TritonCompiler("cpu"))
    with caplog.at_level("INFO", "slotline"):
        llm.generate([[5, 6]], GREEDY)
    assert llm.engine.late_kernels == kernels
    said = [record for record in caplog.records if "waited" in record.message]
    assert [(record.levelname, record.message) for record in said] == [
        ("WARNING", "a step waited 0.76 s for Triton, which compiled 1: add_one")
    ]
