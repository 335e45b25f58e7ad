"""Compile every Triton and Gluon kernel for a Hopper GPU, without one, with one Triton or several.

`pip install triton==3.8.0 --no-deps --target DIR` makes a folder for `--triton DIR`. The kernels in Gluon are launched
here as their backends launch them, and the compiler does the rest. The launches of all other kernels come from the
tests, which run them under Triton's interpreter: `--launches FILE` reads what they wrote
(`pytest -p record_launches --record-launches FILE tests/backends`). A kernel that waits for the one in front of it
(`early`) is compiled in both forms.

The table has a row for each kernel: how many forms of it compile, and the most registers and bytes of local memory
(what does not fit into registers) of a thread, as the assembler reports them. The exit code is 1 if a kernel fails.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

SHORT = "--only decode_hopper --most 1"
TARGET = 90
"""The compute capability times 10."""
GLUON = tuple(
    f"slotline.backends.triton.{name}"
    for name in ("latent_hopper.attend_latents", "prompt_hopper.attend_prompts", "decode_hopper.attend_decodes")
)
"""The kernels in Gluon."""
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")


class Compiled(NamedTuple):
    """A kernel in all its forms: how many compile, and the most registers and bytes of local memory of a thread.

    `errors` are the last lines of what failed, each once.
    """

    kernel: str
    forms: int
    registers: int
    local: int
    errors: list[str]


class Card:
    """Triton's driver of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", TARGET, 32)


class Compiler:
    """Compiles what would be launched."""

    def __init__(self, only: str, most: int) -> None:
        self.only, self.most = only, most
        self.found: dict[str, dict[str, tuple[int, int] | str]] = defaultdict(dict)

    def take(self, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        """Compile a kernel for these arguments, and in its other form if it can start early."""
        name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
        if self.only not in name:
            return
        for early in (False, True) if "early" in arguments else (None,):
            changed = arguments if early is None else {**arguments, "early": early}
            more = {**options, "launch_pdl": True} if early else {k: v for k, v in options.items() if k != "launch_pdl"}
            if len(self.found[name]) < self.most:
                key, result = self._compile(kernel, changed, more)
                self.found[name].setdefault(key, result)

    def _compile(self, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> tuple[str, Any]:
        try:
            made = kernel.run(*arguments.values(), grid=(1,), warmup=True, **options)
            return made.hash, usage(made.asm["cubin"])
        except Exception as error:  # whatever a compiler raises
            while error.__cause__ is not None:  # what a call inside the kernel raised
                error = error.__cause__
            shown = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
            return shown, shown

    def results(self) -> list[Compiled]:
        rows = []
        for name, forms in sorted(self.found.items()):
            fine = [form for form in forms.values() if not isinstance(form, str)]
            errors = sorted({form for form in forms.values() if isinstance(form, str)})
            most = [max(column) for column in zip(*fine, strict=True)] or [0, 0]
            rows.append(Compiled(name, len(fine), *most, errors))
        return rows


def usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory of a thread, as the assembler reports them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        found = USAGE.findall(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return max(int(r) for r, _, _ in found), max(int(stack) + int(local) for _, stack, local in found)


# Gluon: the launches of the backends.


def gluon_launches(compiler: Compiler) -> None:
    """Launch every kernel in Gluon in every form that a backend may, and compile instead of running."""
    from triton.runtime.jit import JITFunction

    from slotline.testing.environments.attention import World

    World.random = lambda world, *shape, times=1.0: torch_empty(shape, world.case.dtype)
    World._poison = World.store = lambda *_: None
    run = JITFunction.run

    def compile_instead(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if warmup:
            return run(kernel, *arguments, grid=grid, warmup=True, **options)
        given = {name: options.pop(name) for name in kernel.arg_names if name in options}
        compiler.take(kernel, inspect.signature(kernel.fn).bind(*arguments, **given).arguments, options)
        return None

    JITFunction.run = compile_instead
    try:
        for launch in (*latents(), *prompts(), *decodes()):
            assert launch()
    finally:
        JITFunction.run = run


def torch_empty(shape: tuple[int, ...], dtype: Any) -> Any:
    import torch

    return torch.empty(*shape, dtype=dtype)


def latents() -> Iterator[Callable[[], bool]]:
    """Single tokens and prompts, with split keys and without, in blocks of each size."""
    import torch

    from slotline.backends.triton.latent_hopper import HopperLatents
    from slotline.backends.triton.latents import TritonLatents
    from slotline.testing.environments.attention import Case, World

    sizes = {"mla": True, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512}
    requests = (((1, 3000),), ((1, 300),) * 400, ((200, 250), (9, 80)), ((900, 900),) * 3)
    for page, heads, of in product((16, 32, 64, 128), (16,), requests):
        world = World(Case(requests=of, dtype=torch.bfloat16, block_size=page, num_heads=heads, **sizes).friendly())
        query, _, _ = world.new_tokens()
        out, lse = torch.empty(len(query), heads, 512, dtype=query.dtype), torch.empty(heads, len(query))
        for launch in TritonLatents(world.case.context("cpu")).plan(world.batch).launches:
            parts = torch.empty(len(query), heads, launch.splits, 512)
            given = (world.layer, query, world.cache, world.batch, launch, out, lse, parts, parts)
            yield lambda page=page, given=given: HopperLatents(page).attend(*given)


def prompts() -> Iterator[Callable[[], bool]]:
    """Prompts for each number of query heads of a KV head."""
    import torch

    from slotline.backends.triton.backend import TritonBackend
    from slotline.backends.triton.prompt_hopper import SIZE, HopperPrompts
    from slotline.testing.environments.attention import Case, World

    for dtype, group in product((torch.bfloat16, torch.float16), (1, 2, 4, 8, 16, 32, 64)):
        sizes = {"num_kv_heads": 2, "num_heads": 2 * group, "head_size": SIZE, "block_size": 64}
        world = World(Case(requests=((400, 400), (300, 300)), dtype=dtype, **sizes).friendly())
        launch = TritonBackend(world.case.context("cpu"))._launch(world.batch, 0, 2, 0, 700, 400)
        query, key, value = world.new_tokens()
        given = (world.layer, query, key, value, world.batch, launch, torch.empty_like(query))
        lse = torch.empty(2 * group, len(query))
        yield lambda group=group, given=given, lse=lse: HopperPrompts(group, "cpu", 132).attend(*given, lse)


def decodes() -> Iterator[Callable[[], bool]]:
    """Single tokens, with heads and blocks of each size."""
    import torch

    from slotline.backends.triton.decode_hopper import MOST_GROUP, SIZES, HopperDecodes
    from slotline.testing.environments.attention import Case, World

    both = torch.bfloat16, torch.float16
    cases = [(torch.bfloat16, max(SIZES), 4, page) for page in (16, 8, 32, 64, 128)]
    cases += [(dtype, size, group, 16) for dtype, size, group in product(both, SIZES, (1, MOST_GROUP))]
    for dtype, size, group, page in cases:
        sizes = {"num_kv_heads": 2, "num_heads": 2 * group, "head_size": size, "block_size": page}
        world = World(Case(requests=((1, 3000), (1, 40)), dtype=dtype, **sizes).friendly())
        context = world.case.context("cpu")
        if not HopperDecodes.serves(context):
            continue
        query, _, _ = world.new_tokens()
        given = (world.layer, query, world.cache, world.batch, 2, torch.empty_like(query))
        lse = torch.empty(2 * group, len(query))
        yield lambda context=context, given=given, lse=lse: HopperDecodes(context, 132).attend(*given, lse)


# Triton: the launches that tests wrote down.


def written_launches(compiler: Compiler, file: Path) -> None:
    """Compile the kernels of a file of launches."""
    for line in file.read_text(encoding="utf-8").splitlines():
        launch = json.loads(line)
        if not launch["module"].startswith("slotline."):
            continue  # the tests' own
        kernel = getattr(import_module(launch["module"]), launch["kernel"])
        if list(launch["arguments"]) != kernel.arg_names:
            raise SystemExit(f"{launch['kernel']} has other parameters than in {file}: write the launches again")
        compiler.take(kernel, {name: made(*kind) for name, kind in launch["arguments"].items()}, launch["options"])


def made(kind: str, *what: Any) -> Any:
    """Return an argument of a kind that `record_launches.kind_of` wrote."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    if kind == "tensor":
        dtype, aligned = what
        return torch.empty(64, dtype=getattr(torch, dtype))[0 if aligned else 1 :]
    if kind == "boxes":
        dtype, box = what
        sizes = [max(n, 16) for n in box]
        return TensorDescriptor.from_tensor(torch.empty(sizes, dtype=getattr(torch, dtype)), box)
    (value,) = what
    return value


# The command.


def work(arguments: argparse.Namespace) -> None:
    """Compile with the Triton that is found first, and print the results as JSON."""
    import triton
    from triton.runtime.driver import driver

    from slotline.kernels.gluon_support import why_no_gluon
    from slotline.kernels.triton_support import FUSION

    os.environ.setdefault(FUSION, "1")
    driver.set_active(Card())
    compiler = Compiler(arguments.only, arguments.most)
    lacking = why_no_gluon()
    if lacking is None and any(arguments.only in name for name in GLUON):
        gluon_launches(compiler)
    if arguments.launches is not None:
        written_launches(compiler, arguments.launches)
    rows = [row._asdict() for row in compiler.results()]
    print(json.dumps({"triton": triton.__version__, "lacking": lacking, "kernels": rows}))


def compiled_with(folder: Path | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a process that finds the Triton of this folder first."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, "--work", "--only", arguments.only, "--most", str(arguments.most)]
    if arguments.launches is not None:
        command += ["--launches", str(arguments.launches)]
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        if folder is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(":")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: compiling with {folder or 'the installed Triton'} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table: a row for each kernel, a column for each Triton, and what failed below it."""
    by_kernel: dict[str, list[str]] = {}
    failed = []
    for place, result in enumerate(results):
        for row in (Compiled(**given) for given in result["kernels"]):
            cells = by_kernel.setdefault(row.kernel, ["-"] * len(results))
            local = f", {row.local} B local" if row.local else ""
            cells[place] = f"{row.forms}: {row.registers} reg{local}"
            if row.errors:
                cells[place] = f"{len(row.errors)} fail, {row.forms} compile"
            failed += [f"triton {result['triton']}, {row.kernel}: {error}" for error in row.errors]
        if result["lacking"]:
            failed.append(f"triton {result['triton']} has no kernels in Gluon: {result['lacking']}")
    head = ["kernel", *(result["triton"] for result in results)]
    rows = [head, ["---"] * len(head), *([name.removeprefix("slotline."), *cells] for name, cells in by_kernel.items())]
    return ["| " + " | ".join(row) + " |" for row in rows] + failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--triton", type=Path, action="append", metavar="DIR", help="a Triton's folder; may be repeated"
    )
    parser.add_argument("--launches", type=Path, metavar="FILE", help="launches that the tests wrote down")
    parser.add_argument("--only", default="", metavar="PART", help="kernels with this in their module or name")
    parser.add_argument("--most", type=int, default=64, metavar="N", help="forms of a kernel at most (default: 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, too")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    for folder in arguments.triton or ():
        if not (folder / "triton" / "__init__.py").is_file():
            parser.error(f"there is no Triton in {folder}: `pip install triton==3.8.0 --no-deps --target {folder}`")
    if arguments.launches is not None and not arguments.launches.is_file():
        parser.error(f"there is no file {arguments.launches}: `pytest -p record_launches --record-launches FILE`")
    results = []
    for folder in arguments.triton or (None,):
        results.append(compiled_with(folder, arguments))
        if arguments.json is not None:  # after each: it takes minutes
            arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(results)))
    if not any(result["kernels"] for result in results):
        parser.error(f"no kernel has {arguments.only!r} in its name")
    raise SystemExit(any(row["errors"] for result in results for row in result["kernels"]))


if __name__ == "__main__":
    main()
