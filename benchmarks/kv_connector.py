"""What the KV connector `host_memory` gains and costs: long prompts that come again after the pool has lost them.

    python benchmarks/kv_connector.py [--device cpu] [--prompts 12] [--length 1500] [--pool 6]
    python benchmarks/kv_connector.py benchmarks/models/qwen3-0.6b --device cuda --prompts 16 --length 4096 --pool 8

Random prompts, one token each, are served one after the other, then all of them again, twice. The pool holds `--pool`
of them at a time, and host memory all. First an engine without a connector does it, then one with it; without a folder
the model that ships, with one random weights of its configuration on a GPU. Prints the seconds of each round: the first
one with the connector saves what the pool gives up, the later ones save and load.

    python benchmarks/kv_connector.py --disk FOLDER [--readers threads] [--prompts 12] [--length 1500]

With `--disk` the connector is `disk`, with files in a folder there. Prints the rate at which threads read these files,
the rate at which the connector loads all blocks, and that of prompts one by one, each after the system has dropped what
it had cached. Then the median step of a request that runs alone, and beside loads, each of which is compared with the
steps just before and behind it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from command_line import positive, require_gpus
from step_gpu import random_llm

from slotline.core import LLM, SamplingParams
from slotline.registry.contracts import CacheBlock

SHORT = "--prompts 2 --length 40 --pool 1"
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Step(NamedTuple):
    """Seconds of a step.

    Attributes:
        wall: from its begin to its end.
        work: of its thread on a processor.
    """

    wall: float
    work: float


def build(arguments: argparse.Namespace, settings: list[str]) -> LLM:
    """An engine without graphs, which prompts do not use."""
    common = {"max_model_len": arguments.length + 1, "overrides": ["graphs.mode=none", *settings]}
    if arguments.folder is not None:
        return random_llm(arguments.folder, **common)
    return LLM(device=arguments.device, **common)


def with_pool(arguments: argparse.Namespace, *, connector: bool) -> LLM:
    """One whose pool holds `pool` prompts."""
    sized = build(arguments, ["cache.memory=1GiB"])
    assert sized.plan.pool is not None
    each = sized.engine.scheduler.cache.blocks_for_one(arguments.length + 1) * sized.plan.pool.block_bytes
    del sized
    settings = [f"cache.memory={arguments.pool * each // 2**10}KiB"]
    if connector:
        memory = f"{arguments.prompts * each // 2**10 + 2**16}KiB"
        settings += ["kv_connector.name=host_memory", f"kv_connector.host_memory.memory={memory}"]
    return build(arguments, settings)


def serve(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[int], int]:
    """Seconds for all prompts one by one, their tokens, and how many prompt tokens were loaded."""
    start, tokens, loaded = perf_counter(), list[int](), 0
    for prompt in prompts:
        output = llm.generate([prompt], ONE)[0]  # waits for the token
        tokens += output.outputs[0].token_ids
        loaded += output.metrics.num_loaded_tokens
    return perf_counter() - start, tokens, loaded


def drop_cached(files: list[Path]) -> int:
    """Have the system forget the files' contents, as far as it does. Return their bytes."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return sum(file.stat().st_size for file in files)


def read_all(files: list[Path], threads: int) -> float:
    """Seconds in which threads read all files into one buffer each."""

    def read(own: list[Path]) -> None:
        buffer = bytearray(max(file.stat().st_size for file in own))
        for file in own:
            handle = os.open(file, os.O_RDONLY)
            os.preadv(handle, [buffer], 0)
            os.close(handle)

    with ThreadPoolExecutor(threads) as pool:
        start = perf_counter()
        list(pool.map(read, [files[i::threads] for i in range(threads)]))
        return perf_counter() - start


def load_all(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[CacheBlock]]:
    """Seconds in which the loads of all prompts ended, one prompt after the other, and the blocks.

    Steps compute nothing meanwhile, since the only request waits for its blocks.
    """
    engine, transfers = llm.engine, llm.engine.extension("kv_transfer").transfers
    seconds, blocks, start_loads = 0.0, list[CacheBlock](), transfers.connector.start

    def noted(saves: list[CacheBlock], loads: list[CacheBlock]) -> None:
        blocks.extend(loads)
        start_loads(saves, loads)

    transfers.connector.start = noted
    engine.scheduler.cache.pool.reset()
    for number, prompt in enumerate(prompts):
        engine.add(f"load {number}", prompt, ONE)
        start = perf_counter()
        engine.step()
        ended = perf_counter()
        while transfers.coming:
            ended = perf_counter()
            engine.step()
        seconds += ended - start
        while engine.has_work:
            engine.step()
    del transfers.connector.start
    return seconds, blocks


def load_together(llm: LLM, blocks: list[CacheBlock]) -> float:
    """Seconds in which the connector alone brings blocks into the pool, whose blocks nobody has."""
    connector = llm.engine.extension("kv_transfer").transfers.connector
    llm.engine.scheduler.cache.pool.reset()
    left = set(range(1, len(blocks) + 1))
    start = perf_counter()
    connector.start([], [one._replace(block=number) for number, one in enumerate(blocks, 1)])
    while left:
        arrived = set(connector.arrived())
        if lost := connector.failed():
            raise SystemExit(f"error: {len(lost)} blocks could not be loaded")
        left -= arrived
        if left and not arrived:
            sleep(0.0005)
    return perf_counter() - start


class Loads(NamedTuple):
    """Steps of a request that decodes, beside loads.

    Attributes:
        alone, beside: median seconds of its steps, without loads and beside them.
        ratio: median over all loads, of the median step beside it divided by that of the steps around it.
        work: the same, with the time of the thread of the steps instead of all time.
        steps: beside loads.
        wait: median seconds that a load lasted.
    """

    alone: float
    beside: float
    ratio: float
    work: float
    steps: int
    wait: float


def beside_loads(llm: LLM, prompts: list[list[int]], files: list[Path], around: int = 12) -> Loads:
    """Measure the steps of a request while the prompts' blocks are loaded, one after another."""
    engine, transfers = llm.engine, llm.engine.extension("kv_transfer").transfers
    alone, beside, ratios, waits = list[Step](), list[Step](), list[Step](), list[float]()
    for number in range(2 * len(prompts)):
        if number % 4 == 0:
            engine.abort("runs")
            engine.add("runs", prompts[0][:16], SamplingParams(temperature=0, max_tokens=1400, ignore_eos=True))
            for _ in range(8):
                engine.step()
        drop_cached(files)
        engine.scheduler.cache.pool.reset()
        before = [timed(engine.step) for _ in range(around)]
        engine.add(f"beside {number}", prompts[number % len(prompts)], ONE)
        engine.step()  # the prompt joins, which is no load
        start, own = perf_counter(), list[Step]()
        while transfers.coming:
            own.append(timed(engine.step))
        waits.append(perf_counter() - start)
        while len(engine.scheduler.running) > 1:
            engine.step()
        engine.step()
        before += [timed(engine.step) for _ in range(around)]
        if own := own[:-1]:  # the last of them computes the prompt's end
            ratios.append(Step(*(np.median(own, 0) / np.median(before, 0))))
        alone += before
        beside += own
    engine.abort("runs")
    wall, work = np.median(ratios, 0)
    without, with_loads = (float(np.median(own, 0)[0]) for own in (alone, beside))
    return Loads(without, with_loads, float(wall), float(work), len(beside), float(np.median(waits)))


def timed(step: Callable[[], Any]) -> Step:
    """Run a step."""
    start, work = perf_counter(), thread_time()
    step()
    return Step(perf_counter() - start, thread_time() - work)


def measure_disk(arguments: argparse.Namespace, prompts: list[list[int]]) -> None:
    """Print the rates of the connector `disk` and of the disk, and what loads do to others' steps."""
    with TemporaryDirectory(dir=arguments.disk) as folder:
        settings = ["kv_connector.name=disk", f"kv_connector.disk.folder={folder}", "kv_connector.leave_out_slow=false"]
        settings.append(f"kv_connector.disk.readers={arguments.readers}")
        llm = build(arguments, ["cache.memory=2GiB", "scheduler.max_requests=64", *settings])
        print(f"{llm.plan.summary()}; prompts of {arguments.length} tokens")
        serve(llm, prompts)
        transfers = llm.engine.extension("kv_transfer").transfers
        transfers.connector.flush(120.0)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        for number in range(3):
            size = drop_cached(files)
            raw = size / read_all(files, 4)
            drop_cached(files)
            seconds, blocks = load_all(llm, prompts)
            loaded = size * len(blocks) / len(files)
            drop_cached(files)
            together = loaded / load_together(llm, blocks)
            drop_cached(files)
            again = size / read_all(files, 4)  # before and behind, since others use the disk too
            print(
                f"  round {number}: threads read {raw / 2**20:.0f} and {again / 2**20:.0f} MiB/s, all blocks load at "
                f"{together / 2**20:.0f} MiB/s ({100 * together / ((raw + again) / 2):.0f} %), prompts one by one at "
                f"{loaded / seconds / 2**20:.0f} MiB/s; {len(blocks)} blocks of {size // len(files)} bytes"
            )
        found = beside_loads(llm, prompts, files)
        print(
            f"  median step of a request: {1e3 * found.alone:.2f} ms alone, {1e3 * found.beside:.2f} ms in the "
            f"{found.steps} steps beside loads of {1e3 * found.wait:.0f} ms;"
        )
        print(f"  {100 * found.ratio:.1f} % of those around a load, their thread's work {100 * found.work:.1f} %")
        print(f"  {dict(transfers.events())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=positive, default=12)
    parser.add_argument("--length", type=positive, default=1500)
    parser.add_argument("--pool", type=positive, default=6)
    parser.add_argument("--disk", type=Path, metavar="FOLDER")
    parser.add_argument("--readers", choices=("processes", "threads"), default="processes")
    arguments = parser.parse_args()
    if arguments.folder is not None or arguments.device != "cpu":
        require_gpus()
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 4000, (arguments.prompts, arguments.length)).tolist()
    if arguments.disk is not None:
        measure_disk(arguments, prompts)
        return
    warm = rng.integers(100, 4000, (2, arguments.length)).tolist()
    seen = []
    for connector in (False, True):
        llm = with_pool(arguments, connector=connector)
        size = llm.plan.pool.block_bytes if llm.plan.pool else 0
        print(f"connector {connector}: {llm.plan.summary()}; a block of {llm.plan.block_size} tokens is {size} bytes")
        serve(llm, warm)
        for number in range(3):
            seconds, tokens, loaded = serve(llm, prompts)
            seen.append(tokens)
            each = f"{1e3 * seconds / arguments.prompts:.1f} ms a prompt"
            print(f"  round {number}: {seconds:.3f} s, {each}, {loaded} tokens loaded")
        del llm
        torch.cuda.empty_cache()
    print("the same tokens" if all(tokens == seen[0] for tokens in seen) else "other tokens, as rounding may give")


if __name__ == "__main__":
    main()
