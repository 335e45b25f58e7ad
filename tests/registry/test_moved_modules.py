"""Module paths that plugins of contract 1 import: they still work, and say where the names are now."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from slotline.registry.moved_modules import MOVED, RENAMED

OLD = (
    ("slotline.core.uploads", "sent", "slotline.kernels.async_copy", "to_device"),
    ("slotline.core.replays", "is_replayed", "slotline.kernels.graph_capture_state", "is_replayed"),
    ("slotline.core.sampling.likeliest", "likeliest", "slotline.backends.cuda.ops", "argmax"),
    ("slotline.core.planning.device", "device_scope", "slotline.kernels.device_scope", "device_scope"),
    ("slotline.core.device.scope", "on_device", "slotline.kernels.device_scope", "on_device"),
    ("slotline.core.device.async_copy", "to_device", "slotline.kernels.async_copy", "to_device"),
    ("slotline.core.device.packed_parameters", "STRIDE", "slotline.kernels.packed_parameters", "STRIDE"),
    ("slotline.core.numba_cache", "cached_njit", "slotline.kernels.numba_cache", "cached_njit"),
    ("slotline.core.engine", "Engine", "slotline.core.engine.engine", "Engine"),
    ("slotline.core.sampling.sampler", "uniforms", "slotline.core.batch.sampling_metadata", "uniforms"),
)


@pytest.mark.parametrize(("old", "name", "new", "now"), OLD)
@pytest.mark.filterwarnings("ignore:.*has moved:DeprecationWarning")
def test_an_old_path_gives_the_same_object(old: str, name: str, new: str, now: str) -> None:
    assert getattr(import_module(old), name) is getattr(import_module(new), now)


def test_an_old_path_warns_and_names_the_new_one() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", "from slotline.core.uploads import sent"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "slotline.core.uploads has moved to slotline.kernels.async_copy" in done.stderr


@pytest.mark.filterwarnings("ignore:.*has moved:DeprecationWarning")
def test_a_name_that_never_was_is_named_with_both_paths() -> None:
    with pytest.raises(ImportError, match="nothing_here"):
        from slotline.core.replays import nothing_here  # type: ignore[attr-defined]  # noqa: F401


def test_every_new_path_exists_and_no_old_one_does() -> None:
    from importlib.util import find_spec

    assert all(find_spec(new) is not None for new in MOVED.values())
    assert {full.rpartition(".")[0] for full in RENAMED} <= set(MOVED)
