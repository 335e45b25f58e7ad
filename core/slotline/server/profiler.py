"""torch's profiler around an engine's steps."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen

from slotline.llm.async_llm import AsyncLLM
from slotline.ranks.replicas.front import engine_of
from slotline.server.errors import HttpError

_PIECE = 1 << 20
"""Bytes of a trace that are compressed at a time."""


@frozen(kw_only=True)
class RunningProfile:
    """A profile of the engine's thread.

    Attributes:
        folder: takes the trace.
        timed: whether the engine timed the parts of its steps before.
        start: of the monotonic clock.
    """

    profile: torch.profiler.profile
    folder: Path
    timed: bool
    start: float = field(factory=time.monotonic)


@define(eq=False)
class Profiler:
    """Profiler of an engine, for one profile at a time.

    It begins and ends on the engine's thread between two steps, since torch's profiler records the thread that began
    it. The parts of the steps are ranges of the trace.
    """

    llm: AsyncLLM
    _running: RunningProfile | None = field(default=None, init=False)
    _written: int = field(default=0, init=False)
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def start(self, folder: Path, **options: Any) -> None:
        """Begin a profile.

        Args:
            folder: takes the trace. It is made if it is not there.
            options: of `torch.profiler.profile`.

        Raises:
            HttpError: if one runs, or the folder cannot be made.
        """
        async with self._lock:
            engine_of(self.llm.front)  # refuses replicas, whose steps run elsewhere
            if self._running is not None:
                raise HttpError(400, "a profile runs; end it with POST /profile/stop", code="profile_running")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unwritable(folder, error) from error
            self._running = await self.llm.on_engine(lambda: self._begin(folder, options))

    async def stop(self) -> tuple[Path, float]:
        """End the profile and write its trace. Return the file, and the seconds that were profiled.

        Raises:
            HttpError: if none runs, or the trace cannot be written. The profile has ended then as well.
        """
        async with self._lock:
            running, self._running = self._running, None
            if running is None:
                raise HttpError(400, "no profile runs; begin one with POST /profile/start", code="no_profile")
            seconds = time.monotonic() - running.start
            await self.llm.on_engine(lambda: self._end(running))
            self._written += 1
            path = running.folder / f"slotline-{time.strftime('%Y%m%d-%H%M%S')}-{self._written}.json.gz"
            try:
                await asyncio.to_thread(_write, running.profile, path)
            except OSError as error:
                raise _unwritable(running.folder, error) from error
            return path, seconds

    def _begin(self, folder: Path, options: Mapping[str, Any]) -> RunningProfile:
        profile = torch.profiler.profile(**options)
        profile.start()
        steps = self.llm.engine.profiler
        running = RunningProfile(profile=profile, folder=folder, timed=steps.enabled)
        steps.enable()
        return running

    def _end(self, running: RunningProfile) -> None:
        if not running.timed:
            self.llm.engine.profiler.disable()
        running.profile.stop()


def _write(profile: torch.profiler.profile, path: Path) -> None:
    """Write a trace and compress it in large pieces. torch's own compression, line by line, holds up other threads."""
    plain = path.with_suffix("")
    try:
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, _PIECE)
    finally:
        profile.profiler = None  # which holds what was recorded, in a cycle of references
        plain.unlink(missing_ok=True)


def _unwritable(folder: Path, error: OSError) -> HttpError:
    return HttpError(
        500, f"server.profile_folder: {folder}: {error.strerror}", "server_error", code="profile_not_written"
    )
