"""Kernels in CUDA C++ that ship as source, for kernels of ours and of plugins.

NVRTC compiles them for the device in some tenths of a second each, and the cache folder keeps the results. The driver
launches them. Both are called through cuda-bindings, which torch's builds for CUDA depend on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p
from functools import cache
from typing import Any

import torch

from slotline.kernels.kernel_files import read_kernel, write_kernel
from slotline.registry.errors import PluginLoadError

logger = logging.getLogger("slotline")

MOST = 512
"""Descriptions that are remembered; then all are forgotten."""
TYPES = {int: c_int, float: c_float}
"""Of a kernel's numbers."""
INSTALL = "pip install cuda-bindings nvidia-cuda-nvrtc, of the release of CUDA that torch was built for"


@cache
def has_cuda_sources() -> bool:
    """Return True if these kernels can be compiled and launched. Otherwise a warning gives the reason."""
    reason = why_no_cuda_sources()
    if reason is not None:
        logger.warning("kernels that ship as CUDA C++ are left out on this GPU, and others take longer: %s", reason)
    return reason is None


def why_no_cuda_sources() -> str | None:
    """Return the reason why kernels in CUDA C++ cannot be compiled here, and a fix. None if they can."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401

        error, *_ = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as failure:
        return f"{failure}; {INSTALL}"
    return None if error == nvrtc.nvrtcResult.NVRTC_SUCCESS else f"NVRTC answers {error.name}; {INSTALL}"


class CudaKernel:
    """One kernel, loaded at once for the current device.

    Args:
        image: machine code, see `compiled`.
        name: of the kernel, `extern "C"`.
        threads: of a block.
        shared_bytes: of shared memory that a block asks for at its launch.
        early: whether it may start before the kernel in front has ended (programmatic dependent launch).
        cooperative: whether all blocks must run at once, since they wait for each other.

    Raises:
        PluginLoadError: if the driver refuses it, with what it answers.
    """

    def __init__(
        self, image: bytes, name: str, *, threads: int, shared_bytes: int, early: bool, cooperative: bool = False
    ) -> None:
        from cuda.bindings import driver

        self._driver, self._early, self._threads, self._shared_bytes = driver, early, threads, shared_bytes
        self._cooperative = cooperative
        self._module = _done(driver.cuModuleLoadData(image), name)
        self._function = _done(driver.cuModuleGetFunction(self._module, name.encode()), name)
        wanted = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _done(driver.cuFuncSetAttribute(self._function, wanted, shared_bytes), name)
        self._configs: dict[int, Any] = {}

    def __call__(self, blocks: int, *arguments: Any) -> None:
        """Launch it on torch's current stream: tensors as their addresses, numbers as they are, `CudaBoxes`' too."""
        config = self._configs.get(blocks)
        if config is None:
            config = self._configs[blocks] = self._config(blocks)
        config.hStream = torch.cuda.current_stream().cuda_stream
        values, types = [], []
        for argument in arguments:
            is_tensor = isinstance(argument, torch.Tensor)
            values.append(argument.data_ptr() if is_tensor else argument)
            types.append(c_void_p if is_tensor else TYPES.get(type(argument)))
        _done(self._driver.cuLaunchKernelEx(config, self._function, (tuple(values), tuple(types)), 0), "launch")

    def _config(self, blocks: int) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        attributes, names = [], driver.CUlaunchAttributeID
        if self._early:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if self._cooperative:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attributes[-1].value.cooperative = 1
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config


class CudaBoxes:
    """Descriptions of tensors of two-byte elements for the copy engine, under the swizzle of 128 bytes.

    Args:
        box: the shape of a box, the last 64 elements long.
    """

    def __init__(self, box: Sequence[int]) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._box = [driver.cuuint32_t(size) for size in reversed(box)]
        self._ones = [driver.cuuint32_t(1)] * len(box)
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(self, base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a view of the tensor's memory with a shape and strides, in elements. Elements outside read as zero.

        Its address must be a multiple of 16 bytes, like all strides except the last, which is 1.
        """
        key = (base.data_ptr(), base.dtype, shape, strides)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= MOST:
                self._made.clear()
            found = self._made[key] = self._make(base, shape, strides)
        return found

    def _make(self, base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        driver = self._driver
        types = driver.CUtensorMapDataType
        is_bfloat16 = base.dtype == torch.bfloat16
        return _done(
            driver.cuTensorMapEncodeTiled(
                types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if is_bfloat16 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                len(shape),
                base.data_ptr(),
                [driver.cuuint64_t(size) for size in reversed(shape)],
                [driver.cuuint64_t(2 * stride) for stride in reversed(strides[:-1])],
                self._box,
                self._ones,
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ),
            f"boxes of {shape}",
        )


def compiled(source: str, architecture: str) -> bytes:
    """Return the machine code of CUDA C++ for an architecture, e.g. ``sm_90a``, from the cache folder if it exists.

    Several threads may compile at once: NVRTC releases Python's lock.

    Args:
        source: the whole source, which includes nothing.

    Raises:
        PluginLoadError: with what NVRTC says of the source.
    """
    from cuda.bindings import nvrtc

    options = [f"-arch={architecture}".encode(), b"-std=c++17"]
    _, major, minor = nvrtc.nvrtcVersion()
    digest = hashlib.sha256(repr((major, minor, options, source)).encode()).hexdigest()[:32]
    name = f"{digest}.cubin"
    if (kept := read_kernel(name)) is not None:
        return kept
    made = _compile(source, options)
    write_kernel(name, made)
    return made


def _compile(source: str, options: list[bytes]) -> bytes:
    from cuda.bindings import nvrtc

    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, None, None), "NVRTC")
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            said = bytearray(_done(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC"))
            nvrtc.nvrtcGetProgramLog(program, said)
            raise PluginLoadError(
                f"NVRTC refuses a kernel for {options[0].decode()}: {said.decode().strip(chr(0)).strip()}",
                fix="mend the kernel's source",
            )
        made = bytearray(_done(nvrtc.nvrtcGetCUBINSize(program), "NVRTC"))
        _done(nvrtc.nvrtcGetCUBIN(program, made), "NVRTC")
        return bytes(made)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _done(answer: tuple[Any, ...], what: str) -> Any:
    """Check that a function of cuda-bindings succeeded, and return its result without the status."""
    error, *given = answer
    if error != 0:
        raise PluginLoadError(
            f"CUDA answers {error.name} ({what})", fix="see that the driver and torch's CUDA belong together"
        )
    return given[0] if given else None
