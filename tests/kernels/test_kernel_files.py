"""Compiled kernels on disk: where they lie, that the next start finds them, and that nothing needs them."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from repository import ROOT

from slotline.backends.linear import numba_kernels
from slotline.core import LLM, SamplingParams
from slotline.kernels import kernel_files
from slotline.kernels.kernel_files import read_kernel, write_kernel
from slotline.kernels.numba_cache import KernelCache, cached_njit
from slotline.planner.measurements import save_measurements
from slotline.planner.plan import make_plan
from slotline.registry.cache_folder import cache_folder
from slotline.registry.config import load_config
from slotline.registry.errors import ConfigError
from slotline.registry.negotiation import Measured

SOURCES = ("core", "registry", "backends", "plugins", "proposers")
PROMPT = "def main("
READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 99
shift
exec "$@"
"""


@pytest.fixture(autouse=True)
def _each_warning_again() -> Iterator[None]:
    kernel_files._warn_not_kept.cache_clear()
    yield
    kernel_files._warn_not_kept.cache_clear()


def start(script: str, *, cache: Path, home: Path | None = None) -> subprocess.Popen[str]:
    """Start Python on a script with a cache folder and a home; the source tree is read-only where root may do so."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "SLOTLINE_CACHE")}
    environment["SLOTLINE_CACHE"] = str(cache)
    if home is not None:
        environment["HOME"] = str(home)
    command = [*read_only(), sys.executable, "-c", script]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def read_only() -> list[str]:
    """Return how a command begins that sees this repository read-only; nothing where that is not allowed."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return []
    prefix = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(ROOT)]
    return prefix if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0 else []


@pytest.fixture
def in_the_way(tmp_path: Path) -> Path:
    """A regular file: not even root can make a folder below it."""
    file = tmp_path / "file"
    file.write_text("in the way")
    return file


@pytest.mark.exhaustive
def test_the_default_backend_runs_where_nothing_can_be_written_and_says_so_once(in_the_way: Path) -> None:
    script = f"""
from slotline.cli import main
raise SystemExit(main(["generate", "--temperature", "0", "--max-tokens", "8", {PROMPT!r}]))
"""
    out, err = ended(start(script, cache=in_the_way / "cache", home=in_the_way / "home"))
    params = SamplingParams(temperature=0, max_tokens=8)
    assert out == LLM().generate(PROMPT, params, progress=False)[0].outputs[0].text + "\n"
    assert "full=cpu" in err
    assert err.count("compiled kernels are not kept for the next start") == 1, err
    assert f"in {in_the_way}/cache/kernels: Not a directory; set SLOTLINE_CACHE" in err


COMPILES = """
import numpy as np
import torch
from slotline.backends.cpu.kernels import TAGS, compile_store
from slotline.proposers.ngram.drafter import look_up

drafts = np.full((1, 1), -1, np.int64)
look_up(np.zeros(1, np.int64), np.array([[5, 6, 7, 5, 6]], np.int32), np.full(1, 5, np.int32), 1, 4, drafts)
assert drafts.tolist() == [[7]], drafts
for size in (8, 24):
    key, cached = torch.arange(size, dtype=torch.float32), torch.zeros(2, size)
    shape = np.array([2, 0, 1, size, size, size, size, size, size], np.int64)
    addresses = np.array([key.data_ptr(), key.data_ptr(), cached[0].data_ptr(), cached[1].data_ptr()], np.int64)
    store = compile_store(size, size)
    store(np.zeros((1, 3), np.int64), 1, shape, addresses, np.array([size, size], np.int64), TAGS[torch.float32])
    assert torch.equal(cached[0], key), (size, cached)
print("as it should be")
"""


@pytest.mark.slow
def test_processes_that_compile_at_once_keep_what_the_next_start_finds(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = [start(COMPILES.replace("(8, 24)", order), cache=cache) for order in ("(8, 24)", "(24, 8)")]
    for process in first:
        assert ended(process) == ("as it should be\n", "")
    made = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in (cache / "kernels").iterdir()}
    names = sorted(name.rpartition("-")[0] for name in made)
    assert names == ["_look_up", "_place", "store", "store"], "one for each size"
    assert ended(start(COMPILES, cache=cache)) == ("as it should be\n", "")
    found = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in (cache / "kernels").iterdir()}
    assert found == made, "nothing was compiled again"


def test_a_kernel_that_cannot_be_loaded_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def compiled() -> int:
        return int(cached_njit(nogil=True)(_double)(21))

    assert compiled() == 42
    (file,) = tmp_path.iterdir()
    kept = file.read_bytes()
    for damaged in (kept[:-1], b""):
        file.write_bytes(damaged)
        assert compiled() == 42
        assert len(file.read_bytes()) == len(kept)
    assert not caplog.records
    write_kernel(file.name, b"no pickle", tmp_path)
    with caplog.at_level(logging.WARNING, "slotline"):
        assert compiled() == 42
    assert f"the kept kernel {file.name} cannot be loaded and is compiled again" in caplog.text
    assert len(file.read_bytes()) == len(kept)


@pytest.mark.spread(1, slow=1)
@pytest.mark.parametrize(("work", "compiler"), [("[0] + a[1]", False), (".dot(a)", True)])
def test_a_kept_kernel_is_loaded_without_the_compiler_unless_it_calls_what_that_loads(
    tmp_path: Path, work: str, compiler: bool
) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(f"""if True:
        import sys
        import numpy as np
        from slotline.kernels.numba_cache import cached_njit
        total = cached_njit()(lambda a: a{work})
        print(total(np.array([1.0, 2.0])), "numba.np.linalg" in sys.modules)
    """)
    run = f"import runpy; runpy.run_path({str(file)!r})"
    first, second = (ended(start(run, cache=tmp_path / "cache"))[0].split() for _ in range(2))
    assert first == [second[0], "True"]
    assert second[1] == str(compiler)
    assert len(list((tmp_path / "cache" / "kernels").glob("*.nbc"))) == 1


@pytest.mark.spread(1, slow=1)
@pytest.mark.parametrize("kind", ["njit", "cfunc"])
def test_forms_of_one_kernel_that_other_processes_compiled_do_not_meet(kind: str, tmp_path: Path) -> None:
    """numba counts what a process compiles, so a function that both forms call had one symbol for two codes."""
    file = tmp_path / "kernel.py"
    steps = "; ".join(["x = (x * x + term) % 1009"] * 40)  # too many for LLVM to copy them into the caller
    file.write_text(f"""if True:
        import sys
        from numba import int64, njit
        from slotline.kernels.numba_cache import cached_cfunc, cached_njit
        def made(term):
            @njit
            def mixed(x):
                {steps}
                return x
            def total(x):
                return mixed(x) + mixed(x + 1)
            return cached_njit()(total) if {kind!r} == "njit" else cached_cfunc(int64(int64), total).ctypes
        print(*[made(int(term))(6) for term in sys.argv[1:]])
    """)

    def totals(*terms: str) -> list[str]:
        run = f"import runpy, sys; sys.argv[1:] = {terms}; runpy.run_path({str(file)!r})"
        return ended(start(run, cache=tmp_path / "cache"))[0].split()

    (two,), (three,) = totals("2"), totals("3")
    assert two != three
    assert totals("2", "3") == [two, three]
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 2


def test_a_function_is_kept_once_for_each_set_of_options_and_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    for options in ({"nogil": True}, {"nogil": True, "fastmath": {"contract", "nsz"}}):
        for _ in range(2):
            compiled = cached_njit(**options)(_double)
            assert (compiled(21), compiled(1.5)) == (42, 3.0)
            assert compiled.stats.cache_path == str(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert cached_njit()(_double).py_func is _double


def test_a_function_that_is_made_with_intrinsics_has_the_same_file_in_every_process() -> None:
    def name(kind: int) -> str | None:
        made = numba_kernels._one_token(kind, numba_kernels._dot(kind))  # numba numbers each intrinsic at random
        return KernelCache(made, {})._name(None, SimpleNamespace(magic_tuple=tuple))

    int8, int4 = name(numba_kernels.INT8), name(numba_kernels.INT4)
    assert int8 == name(numba_kernels.INT8) is not None
    assert int4 != int8


def _double(x: float) -> float:
    return 2 * x


def test_a_damaged_file_is_no_kernel(tmp_path: Path) -> None:
    write_kernel("some.nbc", b"machine code", tmp_path)
    assert read_kernel("some.nbc", tmp_path) == b"machine code"
    whole = (tmp_path / "some.nbc").read_bytes()
    for damaged in (whole[:-1], b"", b"x", whole[:31], whole[:40] + b"X" + whole[41:], whole + b"\0"):
        (tmp_path / "some.nbc").write_bytes(damaged)
        assert read_kernel("some.nbc", tmp_path) is None
    (tmp_path / "folder.nbc").mkdir()
    assert read_kernel("folder.nbc", tmp_path) is None


def test_a_full_disk_costs_the_next_start_alone_and_leaves_no_scratch_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING, "slotline"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the kernel refuses the rest of a longer file
        try:
            write_kernel("long.nbc", bytes(5000), tmp_path / "kernels")
            write_kernel("longer.nbc", bytes(6000), tmp_path / "kernels")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "kernels").iterdir()) == []
    (record,) = caplog.records
    assert "File too large; set SLOTLINE_CACHE to a folder that can be written" in record.getMessage()


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user that the system does not know."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "SLOTLINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("named", ["", "~/cache", "~no-such-user/cache"])
def test_without_a_home_folder_nothing_is_kept(
    named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", named)
    with pytest.raises(OSError, match="home directory") as caught:
        cache_folder()
    assert caught.value.errno == errno.ENOENT
    with caplog.at_level(logging.WARNING, "slotline"):
        write_kernel("some.nbc", b"machine code")
    assert read_kernel("some.nbc") is None
    assert "not kept for the next start: Could not determine home directory" in caplog.text


@pytest.mark.usefixtures("no_home")
def test_without_a_home_folder_nothing_was_measured_and_nothing_can_be() -> None:
    planned = make_plan(load_config(environ={"SLOTLINE_DEVICE": "cpu"}))
    assert "not measured here" in planned.plan.explain()
    figures = Measured(date="2026-11-21", dtype="float32", kv_dtype="float32", aim="none", runs=())
    with pytest.raises(ConfigError, match=r"cannot be kept in the cache folder: .* home directory") as caught:
        save_measurements(figures, planned.facts, planned.plan.device)
    assert "set SLOTLINE_CACHE" in str(caught.value.fix)


def test_no_function_uses_the_cache_of_numba_itself() -> None:
    """It lies beside the source file, and processes that compile at once may mix it up."""
    asked = re.compile(r"(?:jit|cfunc|vectorize|stencil)\([^)]*\bcache=True", re.DOTALL)
    files = [file for root in SOURCES for file in (ROOT / root).rglob("*.py")]
    assert len(files) > 500
    assert [str(file) for file in files if asked.search(file.read_text(encoding="utf-8"))] == []


TRITON = """
import logging
from contextlib import nullcontext
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from slotline.kernels.triton_support import why_no_triton

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Card())
torch.cuda.device = lambda device: nullcontext()
logging.basicConfig()

@triton.jit
def add_one(x, size: tl.constexpr):
    place = tl.arange(0, size)
    tl.store(x + place, tl.load(x + place) + 1)

print(why_no_triton(), why_no_triton())
add_one.warmup(torch.zeros(128), size=64, grid=(1,))
print(triton.knobs.cache.dir)
"""


@pytest.mark.spread(1)
@pytest.mark.parametrize("somewhere", [True, False])
def test_triton_gets_a_folder_that_can_be_written(
    somewhere: bool, in_the_way: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CC", sys.executable)  # a compiler of C is only looked for
    script = tmp_path / "script.py"  # Triton reads a kernel's source from its file
    script.write_text(TRITON)
    cache = tmp_path / "cache" if somewhere else in_the_way / "cache"
    code = f"import runpy; runpy.run_path({str(script)!r})"
    out, err = ended(start(code, cache=cache, home=in_the_way / "home"))
    reasons, folder = out.splitlines()
    assert reasons == "None None"
    assert (Path(folder) == cache / "kernels" / "triton") is somewhere
    assert Path(folder).exists() is somewhere, "another one goes with the process"
    assert f"triton's kernels are kept in {folder}, since {in_the_way}/home/.triton/cache cannot be written" in err


def test_a_kernel_made_with_an_intrinsic_over_llvm_types_has_one_name_before_and_after_it_is_compiled() -> None:
    vector = ir.VectorType(ir.FloatType(), 4)
    twos = ir.Constant(vector, [2.0] * 4)

    @intrinsic
    def doubled(context, x):  # type: ignore[no-untyped-def]
        def write(context, builder, signature, args):  # type: ignore[no-untyped-def]
            four = builder.insert_element(ir.Constant(vector, None), args[0], ir.IntType(32)(0))
            return builder.extract_element(builder.fmul(four, twos), ir.IntType(32)(0))

        return types.float32(types.float32), write

    def double(x):  # type: ignore[no-untyped-def]
        return doubled(x)

    compiled = cached_njit(nogil=True)(double)
    codegen = cpu_target.target_context.codegen()
    signature = (types.float32,)
    before = compiled._cache._name(signature, codegen)
    assert compiled(np.float32(3)) == 6
    assert compiled._cache._name(signature, codegen) == before
