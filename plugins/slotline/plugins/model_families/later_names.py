"""Names of modules that are imported when they are used first, and the names that transformers can wait for.

What stands for a name gives way to the real thing at the first call, attribute, subclass or check of a type. An object
of a class is only possible once its module is imported, so until then a check of a type is false.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Union

TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
_DISTRIBUTED = "transformers.distributed"
LATER: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        module: frozenset(names.split())
        for module, names in {
            "accelerate": "PartialState dispatch_model",
            "accelerate.hooks": "AlignDevicesHook add_hook_to_module",
            "accelerate.utils": "extract_model_from_parallel get_balanced_memory get_max_memory "
            "infer_auto_device_map reduce",
            "accelerate.utils.modeling": "clean_device_map get_max_layer_size",
            "huggingface_hub": "CommitOperationAdd Discussion HfApi ModelCard ModelCardData get_repo_discussions "
            "snapshot_download",
            "scipy.optimize": "linear_sum_assignment",
            "torch.distributed._functional_collectives": "wait_tensor",
            "torch.distributed._composable.fsdp": "fully_shard",
            "torch.distributed.checkpoint.hf_storage": "HuggingFaceStorageReader HuggingFaceStorageWriter",
            "torch.distributed.fsdp": "CPUOffloadPolicy MixedPrecisionPolicy",
            "torch.distributed.tensor": "DTensor Shard",
            "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset",
            "torch.distributed.tensor.placement_types": "Shard _StridedShard",
            TRACING: "TransformGetItemToIndex",
            f"{_DISTRIBUTED}.expert_parallel": "apply_expert_parallelism",
            f"{_DISTRIBUTED}.tensor_parallel": "apply_tensor_parallelism gather_state_dict_for_save "
            "get_kv_heads_per_rank verify_tp_plan",
        }.items()
    }
)
"""Names that transformers imports from a module without using them then. It subclasses none of them."""
STYLES = f"{_DISTRIBUTED}.expert_parallel", f"{_DISTRIBUTED}.tensor_parallel"
"""Modules that put styles into `transformers.distributed.parallel_utils.ALL_PARALLEL_STYLES` when they are imported."""


class Later:
    """Function or class of a module that is imported when it is used first.

    Args:
        module: where it is.
        name: what it is called there.
        holder: variables that it was imported to.
    """

    def __init__(self, module: str, name: str, holder: dict[str, Any]) -> None:
        self._module, self._name, self._holder = module, name, holder

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call it."""
        return self.settle()(*args, **named)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of it."""
        if name.startswith("__") and name not in ("__name__", "__qualname__"):  # for which `typing` looks
            raise AttributeError(name)
        return getattr(self.settle(), name)

    def __instancecheck__(self, value: object) -> bool:
        """Return True if an object is of the class. Until its module is imported there is none."""
        return self._module in sys.modules and isinstance(value, self.settle())

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the class for one that is derived from it."""
        return (self.settle(),)

    def __or__(self, other: Any) -> Any:
        """Return the type of annotations of the class or another one."""
        return Union[self, other]  # noqa: UP007 - the other way comes here

    __ror__ = __or__

    def settle(self) -> Any:
        """Put the real thing in place of this object where that was imported to. Return the real thing."""
        real = getattr(importlib.import_module(self._module), self._name)
        for name, value in list(self._holder.items()):
            if value is self:
                self._holder[name] = real
        return real


def complete_later(styles: Any) -> None:
    """Let a mapping of parallel styles import the modules that fill it when it is looked into first."""
    plain = type(styles)

    def settled(self: Any) -> Any:
        self.__class__ = plain
        for module in STYLES:
            importlib.import_module(module)
        return self

    def looked(method: str) -> Any:
        return lambda self, *args: getattr(settled(self), method)(*args)

    methods = {name: looked(name) for name in ("__getitem__", "__iter__", "__len__", "__contains__")}
    if all(hasattr(plain, name) for name in methods) and not any(module in sys.modules for module in STYLES):
        styles.__class__ = type(plain.__name__, (plain,), methods)
