"""Adapters over pipeline stages: a plugin for each stage, with the modules of that stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import frozen

from slotline.kernels.device_scope import device_scope
from slotline.registry.errors import ContractError


@frozen(eq=False)
class StagePlugin:
    """The plugin of one stage.

    Attributes:
        lora: the built plugin.
        device: torch device string.
    """

    lora: Any
    device: str

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context that makes the device the current one, on which kernels are launched."""
        return device_scope(self.device)


class PipelineLora:
    """Implementation of `slotline.registry.contracts.lora.Lora` and its optional methods over several plugins.

    Args:
        parts: the plugins by stage.
        stage_of: path of each module -> its stage.
    """

    def __init__(self, parts: Sequence[StagePlugin], stage_of: Mapping[str, int]) -> None:
        self._parts = tuple(parts)
        self._of = {path: self._parts[stage].lora for path, stage in stage_of.items()}

    def load(self, name: str, path: str) -> int:
        """Read an adapter into the same slot of every stage, or into none.

        Raises:
            ContractError: if plugins with equal histories chose different slots.
        """
        slots: list[int] = []
        try:
            for part in self._parts:
                with part.scope():
                    slots.append(part.lora.load(name, path))
            if len(set(slots)) > 1:
                raise ContractError(
                    f"adapter {name!r} went to the slots {slots} of {len(slots)} stages",
                    fix="the LoRA plugin declares `staged`, so equal calls must give equal slots: tell its author",
                )
        except BaseException:
            self._unload(name, self._parts[: len(slots)])
            raise
        return slots[0]

    def unload(self, name: str) -> None:
        """Unload an adapter from every stage. See `Lora.unload`."""
        self._unload(name, self._parts)

    def forget(self, path: str) -> None:
        """Forget an adapter in every stage. See `ForgetfulLora.forget`."""
        for part in self._parts:
            if (forget := getattr(part.lora, "forget", None)) is not None:
                forget(path)

    def plan(self, slots: torch.Tensor) -> None:
        """Prepare every stage. See `Lora.plan`. The slots are copied to every stage's device."""
        for part in self._parts:
            with part.scope():
                part.lora.plan(slots.to(part.device, non_blocking=True))

    def plan_single(self, slots: torch.Tensor, slot: int) -> None:
        """Prepare every stage for one adapter. See `SingleLora.plan_single`."""
        for part in self._parts:
            with part.scope():
                part.lora.plan_single(slots.to(part.device, non_blocking=True), slot)

    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Apply the adapter in the module's stage. See `Lora.apply`."""
        self._of[module].apply(module, inputs, out)

    def apply_merged(self, modules: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Apply the adapter in the modules' stage. See `MergedLora.apply_merged`."""
        self._of[modules[0]].apply_merged(modules, inputs, out)

    def expand(self, modules: tuple[str, ...], inner: torch.Tensor, out: torch.Tensor) -> None:
        """Apply the adapter in the modules' stage. See `ExtendedLora.expand`."""
        self._of[modules[0]].expand(modules, inner, out)

    def _unload(self, name: str, parts: Sequence[StagePlugin]) -> None:
        for part in parts:
            with part.scope():
                part.lora.unload(name)
