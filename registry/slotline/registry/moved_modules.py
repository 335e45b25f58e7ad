"""Old module paths of plugins: they import the module that holds the same names now, with a warning.

A path stays for one minor release. Its parent packages exist without a file.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

MOVED = MappingProxyType(
    {
        "slotline.core.cache_folder": "slotline.registry.cache_folder",
        "slotline.core.cuda_kernels": "slotline.kernels.nvrtc",
        "slotline.core.gluon_names": "slotline.kernels.gluon_compat",
        "slotline.core.hopper": "slotline.kernels.gluon_support",
        "slotline.core.kernel_files": "slotline.kernels.kernel_files",
        "slotline.core.launching": "slotline.kernels.triton_launcher",
        "slotline.core.numba_cache": "slotline.kernels.numba_cache",
        "slotline.core.replays": "slotline.kernels.graph_capture_state",
        "slotline.core.triton_support": "slotline.kernels.triton_support",
        "slotline.core.uploads": "slotline.kernels.async_copy",
        "slotline.core.device.async_copy": "slotline.kernels.async_copy",
        "slotline.core.device.packed_parameters": "slotline.kernels.packed_parameters",
        "slotline.core.device.scope": "slotline.kernels.device_scope",
        "slotline.core.device.torch_sampling": "slotline.kernels.torch_sampling",
        "slotline.core.cli": "slotline.cli",
        "slotline.core.execution.compiling": "slotline.kernels.triton_precompile",
        "slotline.core.execution.runner": "slotline.core.model_runner.model_runner",
        "slotline.core.execution.staging": "slotline.core.device.transfer_buffer",
        "slotline.core.frontend.beam_search": "slotline.llm.beam_search",
        "slotline.core.frontend.llm": "slotline.llm.llm",
        "slotline.core.frontend.lora_request": "slotline.registry.lora_request",
        "slotline.core.frontend.outputs": "slotline.core.api.outputs",
        "slotline.core.frontend.sampling_params": "slotline.registry.contracts.sampling_params",
        "slotline.core.frontend.tokenizer": "slotline.text.tokenizer",
        "slotline.core.planning.device": "slotline.planner.device",
        "slotline.core.planning.plan": "slotline.planner.plan",
        "slotline.core.sampling.argmax": "slotline.backends.cuda.ops",
        "slotline.core.sampling.likeliest": "slotline.backends.cuda.ops",
    }
)
"""Old paths and the modules that hold their names now."""

RENAMED = MappingProxyType(
    {
        "slotline.core.uploads.sent": "to_device",
        "slotline.core.sampling.likeliest.likeliest": "argmax",
        "slotline.core.launching.plain": "as_pointer",
        "slotline.core.execution.runner.Runner": "ModelRunner",
    }
)
"""Old names that have another name now."""

_ELSEWHERE = MappingProxyType(
    {
        "slotline.core.planning.device.device_scope": "slotline.kernels.device_scope",
        "slotline.core.planning.device.on_device": "slotline.kernels.device_scope",
    }
)
_PACKAGES = frozenset({"slotline.core.execution", "slotline.core.frontend", "slotline.core.planning"})


class MovedModuleFinder:
    """Meta path finder of the old paths; also the loader of their modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old path, None for any other."""
        if name not in MOVED and name not in _PACKAGES:
            return None
        return ModuleSpec(name, self, is_package=name in _PACKAGES)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the import system make the module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Warn, and have the module look its names up where they are now."""
        old = module.__name__
        if old in _PACKAGES:
            return
        warnings.warn(
            f"{old} has moved to {MOVED[old]}; the old path goes with the next minor release",
            DeprecationWarning,
            stacklevel=2,
        )

        def find(name: str) -> object:
            full = f"{old}.{name}"
            where = import_module(_ELSEWHERE.get(full, MOVED[old]))
            try:
                return getattr(where, RENAMED.get(full, name))
            except AttributeError:
                raise AttributeError(f"module {old!r}, now {MOVED[old]!r}, has no attribute {name!r}") from None

        vars(module)["__getattr__"] = find


def install() -> None:
    """Make the old paths importable. Another call changes nothing."""
    if not any(isinstance(finder, MovedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedModuleFinder())
