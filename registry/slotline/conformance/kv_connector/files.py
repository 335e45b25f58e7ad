"""Checks of stores that lie, are slow or full, and of files that outlive the process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from slotline.registry.contracts import AsyncKVConnector, CacheBlock, DamageStore
from slotline.registry.descriptor import Kind
from slotline.registry.loading import import_dotted
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.kv_connector import NUM_BLOCKS, PATIENCE, STATE, Pool

NAMES = [f"{i}" for i in range(6)]
STEP_SECONDS = 0.15
"""Time in which the calls of a step must return, at least once in three tries."""


@check(Kind.KV_CONNECTOR, "kv_connector.files.restart", Level.NUMERICS, cost=0.05)
def files_restart(run: Run) -> None:
    """Blocks in files are found by a connector that is built later, and only by one of the same model."""
    pool = _pool(run)
    later = _saved(run, pool)
    if failed := later.step((), _loads(later)):
        raise Failed(f"blocks {sorted(failed)} failed, and were held")
    other = Pool(run, beside=pool, model="another model")
    if any(found := other.held(0, NAMES)):
        raise Failed(f"another model in the same folder holds {found}")


@check(
    Kind.KV_CONNECTOR,
    "kv_connector.files.damaged",
    Level.HOSTILE,
    cases=lambda _: ({"how": how} for how in DAMAGE),
    cost=0.05,
)
def files_damaged(run: Run) -> None:
    """Loads from files that hold wrong bytes fail or are right, for a connector of before and for a later one."""
    pool = _pool(run)
    before = _saved(run, pool)
    DAMAGE[str(run["how"])](pool.files)
    after = Pool(run, beside=pool)
    after.known = pool.known
    for one in (before, after):
        one.step((), _loads(one))


@check(
    Kind.KV_CONNECTOR,
    "kv_connector.blocks.damaged",
    Level.HOSTILE,
    cases=lambda _: ({"how": how} for how in ("changed", "swapped", "gone")),
    cost=0.05,
)
def blocks_damaged(run: Run) -> None:
    """Loads of blocks that were spoiled where the connector keeps them fail or are right, also for a later one."""
    if not (path := run.subject.capabilities.damage):
        raise NotApplicable("nobody can spoil what it keeps: damage is not declared")
    pool, how = Pool(run), str(run["how"])
    saves = [pool.block(group, name, 3 + 10 * group + i) for group in (0, 1) for i, name in enumerate(NAMES)]
    if len(pool.groups) > STATE:
        saves += [pool.block(STATE, name, NUM_BLOCKS + i) for i, name in enumerate(NAMES[:3])]
    pool.step(saves, ())
    if not any(pool.held(0, NAMES)):
        raise Failed("nothing is held of what was saved")
    damage: DamageStore = import_dotted(path, "KVConnectorCapabilities.damage")
    if not damage(pool.connector, how):
        raise NotApplicable(f"what it keeps cannot be {how}")
    after = Pool(run, beside=pool)
    after.known = pool.known
    for number, one in enumerate((pool, after)):
        loads = [
            one.wanted(group, name, 40 + 10 * group + i)
            for group in (0, 1)
            for i, name in enumerate(NAMES)
            if one.held(group, [name])[0]
        ]
        if len(one.groups) > STATE:
            there = [i for i in range(3) if one.held(STATE, [NAMES[i]])[0]]
            loads += [one.wanted(STATE, NAMES[i], NUM_BLOCKS + 3 + i) for i in there]
        failed = one.step((), loads)
        if number == 0 and len(loads) == len(saves) and not failed:
            raise Failed(f"all blocks came back as they were saved, and were to be {how}: damage does nothing")


@check(Kind.KV_CONNECTOR, "kv_connector.files.full", Level.HOSTILE, cost=0.3)
def files_full(run: Run) -> None:
    """What cannot be written since the disk is full is not held, or its load fails, and later saves come back."""
    pool = _pool(run)
    saves = [pool.block(0, name, 3 + i) for i, name in enumerate(NAMES)]
    with _full_disk():
        try:
            pool.step(saves, ())
        except Failed:
            raise
        except Exception:  # which costs the saves
            pass
        time.sleep(0.2)  # in which threads try to write
    pool.step((), _loads(pool))
    later = Pool(run, beside=pool)
    later.known = pool.known
    later.step((), _loads(later))


@check(Kind.KV_CONNECTOR, "kv_connector.steps.wait", Level.HOSTILE, cost=0.05)
def steps_wait(run: Run) -> None:
    """The calls of a step return soon, however long the loads of an asynchronous connector take."""
    pool = Pool(run)
    if not pool.asynchronous:
        raise NotApplicable("loads end in the step that they are started for: asynchronous is not declared")
    connector, fastest = cast("AsyncKVConnector", pool.connector), float("inf")
    pool.step([pool.block(0, name, 3 + i) for i, name in enumerate(NAMES)], ())
    for number in range(3):
        saves = [pool.block(0, f"{number}: {name}", 20 + i) for i, name in enumerate(NAMES)]
        loads = _loads(pool)
        started = time.perf_counter()
        connector.start(saves, loads)
        connector.wait()
        arrived, failed = set(connector.arrived()), set(connector.failed())
        fastest = min(fastest, time.perf_counter() - started)
        pool.ended([one for one in loads if one.block not in arrived | failed])
        pool.saves_ended(saves)
    if fastest > STEP_SECONDS:
        raise Failed(f"the calls of a step took {fastest:.2f} s at the least, and {STEP_SECONDS} s is much")


def _pool(run: Run) -> Pool:
    if not run.subject.capabilities.folder:
        raise NotApplicable("blocks are no files that outlive the process: folder is not declared")
    return Pool(run)


def _saved(run: Run, pool: Pool) -> Pool:
    """Save blocks, and return a pool whose connector is built later and holds them."""
    pool.step([pool.block(0, name, 3 + i) for i, name in enumerate(NAMES)], ())
    if not any(pool.held(0, NAMES)):
        raise Failed("nothing is held of what was saved")
    latest = time.monotonic() + PATIENCE
    while True:
        later = Pool(run, beside=pool)
        later.known = pool.known
        if all(later.held(0, NAMES)):
            return later
        if time.monotonic() > latest:
            found = later.held(0, NAMES)
            raise Failed(f"after {PATIENCE:g} s another connector with the same folder holds {found} of what was saved")
        time.sleep(0.02)


def _loads(pool: Pool) -> list[CacheBlock]:
    """Return loads of the blocks that are held."""
    return [pool.wanted(0, name, 40 + i) for i, name in enumerate(NAMES) if pool.held(0, [name])[0]]


def _changed(files: list[Path]) -> None:
    for file in files:
        data = bytearray(file.read_bytes())
        for at in range(len(data) // 2, len(data), 61):
            data[at] ^= 0x11
        file.write_bytes(data)


def _cut(files: list[Path]) -> None:
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def _swapped(files: list[Path]) -> None:
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, [*contents[1:], contents[0]], strict=True):
        file.write_bytes(content)


def _foreign(files: list[Path]) -> None:
    for number, file in enumerate(files):
        file.write_bytes(b"GIF89a" * 300 if number % 2 else b"")


def _gone(files: list[Path]) -> None:
    for file in files:
        file.unlink()


DAMAGE: dict[str, Callable[[list[Path]], None]] = {
    "changed": _changed,
    "cut": _cut,
    "swapped": _swapped,
    "foreign": _foreign,
    "gone": _gone,
}


@contextmanager
def _full_disk() -> Iterator[None]:
    """Have the system refuse files of more than some bytes, as a full disk does.

    Raises:
        NotApplicable: where the system has no such limit.
    """
    try:
        import resource
    except ImportError:
        raise NotApplicable("the system cannot limit the size of files") from None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
