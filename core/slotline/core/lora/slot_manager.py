"""Adapter slots: the known adapters, the slots that they hold on the device, and the tokens that use them.

An adapter is known from its first use until it is removed, or until `max_cpu_adapters` adapters used later displace it.
It takes a slot when a request that names it joins the batch, replacing the least recently used idle adapter if
necessary. Rows hold their request's slot, so a step gathers its tokens' slots like its other inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from slotline.core.api.lora_request import LoRARequest
from slotline.core.batch.adapter_usage import AdapterUse
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.registry.contracts import AdaptableModel, Lora
from slotline.registry.errors import IntegrityError, RequestError

Int = npt.NDArray[np.int64]
NO_SLOT = -1


@define(eq=False)
class Adapter:
    """A known adapter.

    Attributes:
        request: its name, number and folder.
        key: distinguishes its keys and values from those of other adapters, and of other loads of the same adapter.
        files: distinguishes the files that were read from later files in the same folder.
        users: unfinished requests that name it. It stays known as long as there are any.
        holders: number of these requests in the batch. It keeps its slot as long as there are any.
        reserved: True if it owns one of the slots.
        loaded: True if the plugin has loaded it into the slot.
    """

    request: LoRARequest
    key: str
    files: str
    users: int = 0
    holders: int = 0
    reserved: bool = False
    loaded: bool = False
    slot: int = NO_SLOT
    pinned: bool = False


class AdapterSlots:
    """Adapters of an engine, in slots on the device.

    Args:
        lora: the built plugin.
        model: the model that the adapters join.
        rows: the request table, which holds the rows' slots.
        modules: the linear layers that may carry an adapter.
        apply_merged: the plugin's method, if it has one.
        merged: the groups of layers that `apply_merged` serves.
        expand: the plugin's method, if it has one.
        extended: the groups of layers that `expand` serves. The model may have extended others for an earlier engine.
        plan_single: the plugin's method, if both plugin and model have a special path for steps of one adapter.
        max_adapters, max_cpu_adapters: as in the configuration.
    """

    def __init__(
        self,
        lora: Lora,
        model: AdaptableModel,
        rows: RequestTable,
        modules: Mapping[str, tuple[int, int]],
        *,
        apply_merged: Callable[[tuple[str, ...], torch.Tensor, torch.Tensor], None] | None = None,
        merged: tuple[tuple[str, ...], ...] = (),
        expand: Callable[[tuple[str, ...], torch.Tensor, torch.Tensor], None] | None = None,
        extended: Collection[tuple[str, ...]] = (),
        plan_single: Callable[[torch.Tensor, int], None] | None = None,
        max_adapters: int,
        max_cpu_adapters: int,
    ) -> None:
        self._lora = lora
        self._model = model
        self._rows = rows
        self._modules = modules
        self._ends = {names: np.cumsum([model.linears[name][1] for name in names]) for names in model.merged_linears}
        self._apply_merged, self._merged, self._expand = apply_merged, frozenset(merged), expand
        self._extended = frozenset(extended)
        self._plan_single = plan_single
        self._max_adapters, self._max_known = max_adapters, max(max_adapters, max_cpu_adapters)
        self._known: OrderedDict[int, Adapter] = OrderedDict()  # by number, least recently used first
        self._head = "lm_head" in modules

    # --- known adapters

    @property
    def numbers(self) -> set[int]:
        """Return the known adapters' numbers."""
        return set(self._known)

    def named(self, name: str) -> LoRARequest:
        """Return the known adapter of a name.

        Raises:
            RequestError: if no known adapter has it.
        """
        for adapter in self._known.values():
            if adapter.request.lora_name == name:
                return adapter.request
        names = [adapter.request.lora_name for adapter in self._known.values()]
        known = f"name one of {', '.join(names)}" if names else "name one under [lora.adapters]"
        raise RequestError(f"there is no adapter {name!r}", fix=f"{known}, or give a LoRARequest")

    def add(self, request: LoRARequest) -> Adapter:
        """Register an adapter. A new adapter is read at once if a slot is free or idle, so that errors show early.

        Raises:
            RequestError: if it cannot be held, or another adapter has its name or number. It is not known then.
        """
        adapter = self._known.get(request.lora_int_id)
        if adapter is None:
            adapter = self._new(request)
            if self._take_slot(adapter):
                self._load(adapter)
            self._known[request.lora_int_id] = adapter
        elif adapter.request != request:
            raise RequestError(
                f"lora_int_id={request.lora_int_id} is {adapter.request.lora_name!r} of {adapter.request.lora_path!r}, "
                f"not {request.lora_name!r} of {request.lora_path!r}",
                fix="use another number, or remove the first adapter",
            )
        elif not adapter.loaded and self._slots_left(pinned=True) == 0:
            raise RequestError(
                f"adapter {request.lora_name!r}: all {self._max_adapters} slots hold pinned adapters",
                fix="remove one of them, or raise lora.max_adapters",
            )
        self._known.move_to_end(request.lora_int_id)
        self._forget_oldest(but=adapter)
        return adapter

    def remove(self, number: int) -> bool:
        """Forget an adapter. Return False if none has this number.

        Raises:
            RequestError: if a request uses it.
        """
        adapter = self._known.get(number)
        if adapter is None:
            return False
        if adapter.users:
            raise RequestError(
                f"adapter {adapter.request.lora_name!r} is in use by {adapter.users} requests",
                fix="finish or abort them first",
            )
        self._give_up_slot(adapter)
        self._forget(number)
        return True

    def pin(self, number: int) -> None:
        """Keep an adapter in its slot until it is removed. At least one slot stays available for the others.

        Raises:
            RequestError: if it is not known, or if there is no slot for it.
        """
        adapter = self._known.get(number)
        if adapter is None:
            raise RequestError(f"there is no adapter {number}", fix=f"loaded are {sorted(self._known)}")
        pinned = sum(other.pinned for other in self._known.values() if other is not adapter)
        if pinned + 1 >= self._max_adapters:
            raise RequestError(
                f"adapter {adapter.request.lora_name!r} would be pinned in the last of {self._max_adapters} slots",
                fix="raise lora.max_adapters, or remove a pinned adapter",
            )
        if not self._take_slot(adapter):
            raise RequestError(
                f"adapter {adapter.request.lora_name!r}: requests use all {self._max_adapters} slots",
                fix="pin it later",
            )
        self._load(adapter)
        adapter.pinned = True

    # --- arriving and leaving requests

    def enter(self, request: Request) -> None:
        """Check a new request's adapter, and set the key that distinguishes its keys and values from others.

        Raises:
            RequestError: as `add`.
        """
        if request.lora_request is not None:
            adapter = self.add(request.lora_request)
            adapter.users += 1
            request.adapter_key = adapter.key

    def leave(self, request: Request) -> None:
        """Handle the end of a request."""
        if request.lora_request is not None:
            self._adapter(request.lora_request).users -= 1
            self._forget_oldest()

    def acquire(self, request: Request) -> bool:
        """Give a request's adapter a slot that stays until `release`. Return False if all are in use."""
        if request.lora_request is None:
            return True
        adapter = self._adapter(request.lora_request)
        if not self._take_slot(adapter):
            return False
        adapter.holders += 1
        self._known.move_to_end(request.lora_request.lora_int_id)
        return True

    def activate(self, request: Request) -> None:
        """Load an acquired adapter into its slot, and write the slot into the request's row.

        Raises:
            RequestError: if its files are gone or have changed.
        """
        if request.lora_request is not None:
            adapter = self._adapter(request.lora_request)
            self._load(adapter)
            self._rows.lora_slot[request.row] = adapter.slot

    def release(self, request: Request) -> None:
        """Handle a request that has left the batch."""
        if request.lora_request is not None:
            self._adapter(request.lora_request).holders -= 1

    def recount(self, unfinished: Sequence[Request]) -> None:
        """Recount users and holders. See `AdapterManager.recount`."""
        for adapter in self._known.values():
            mine = [
                r for r in unfinished if r.lora_request and r.lora_request.lora_int_id == adapter.request.lora_int_id
            ]
            adapter.users, adapter.holders = len(mine), sum(r.row >= 0 for r in mine)

    def check(self) -> None:
        """Raise IntegrityError unless slots, holders and rows agree."""
        using = [request.lora_request for request in self._rows.requests if request is not None]
        for number, adapter in self._known.items():
            if adapter.holders != sum(one is not None and one.lora_int_id == number for one in using):
                raise IntegrityError(f"adapter {adapter.request.lora_name!r} counts {adapter.holders} holders wrongly")
        if sum(adapter.reserved for adapter in self._known.values()) > self._max_adapters:
            raise IntegrityError(f"more than {self._max_adapters} adapters hold a slot")

    def reloaded(self) -> None:
        """Do nothing, since adapters are kept separately from the weights."""

    # --- in a step

    def use_by(self, rows: Int) -> AdapterUse:
        """Return how many adapters the rows use. ONE is returned only if the plugin has a special path for it."""
        slots = self._rows.lora_slot[rows]
        most = int(slots.max(initial=NO_SLOT))
        if most == NO_SLOT:
            return AdapterUse.NONE
        one = self._plan_single is not None and bool(((slots == most) | (slots == NO_SLOT)).all())
        return AdapterUse.ONE if one else AdapterUse.MANY

    def plan(self, slots: torch.Tensor | None, single_slot: int | None = None) -> None:
        """Prepare a forward pass with the slot of each token, [num_tokens] int64 on the device. None: no adapters.

        `single_slot` is the slot of all tokens with an adapter, if the step runs for one adapter.
        """
        if slots is not None:
            self._plan(slots, single_slot)
        further = {} if self._plan_single is None else {"single": single_slot is not None}
        self._model.adapt(None if slots is None else self._add, self._modules, **further)

    def plan_head(self, slots: torch.Tensor, indices: torch.Tensor, single_slot: int | None = None) -> None:
        """Prepare the output projection for the tokens `indices` [n] int64, from the slots of all tokens."""
        if self._head:
            self._plan(slots.to(indices.device)[indices], single_slot)

    def _plan(self, slots: torch.Tensor, single_slot: int | None) -> None:
        if single_slot is None or self._plan_single is None:
            self._lora.plan(slots)
        else:
            self._plan_single(slots, single_slot)

    def _add(
        self, names: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor, inner: torch.Tensor | None = None
    ) -> None:
        """Add the adapters' contributions to one product's linear layers, or to an embedding."""
        if inner is not None and self._expand is not None and names in self._extended:
            self._expand(names, inner, out)
        elif len(names) == 1:
            self._lora.apply(names[0], inputs, out)
        elif self._apply_merged is not None and names in self._merged:
            self._apply_merged(names, inputs, out)
        else:
            for name, end in zip(names, self._ends[names].tolist(), strict=True):
                if name in self._modules:
                    self._lora.apply(name, inputs, out[:, end - self._modules[name][1] : end])

    # --- slots

    def _new(self, request: LoRARequest) -> Adapter:
        for other in self._known.values():
            if other.request.lora_name == request.lora_name:
                raise RequestError(
                    f"adapter {request.lora_name!r} is known as number {other.request.lora_int_id}",
                    fix="use that number, or another name",
                )
        return Adapter(request, load_key(request), files_of(request))

    def _adapter(self, request: LoRARequest) -> Adapter:
        """Return the adapter of a request that has entered and not left."""
        return self._known[request.lora_int_id]

    def _slots_left(self, *, pinned: bool = False) -> int:
        """Return the number of slots that no adapter has reserved, or with `pinned` that no pinned adapter has."""
        taken = (a.pinned if pinned else a.reserved for a in self._known.values())
        return self._max_adapters - sum(taken)

    def _take_slot(self, adapter: Adapter) -> bool:
        """Reserve a slot: a free slot, or that of the adapter that has been idle longest."""
        if not adapter.reserved and self._slots_left() == 0:
            idle = (a for a in self._known.values() if a.reserved and not a.holders and not a.pinned)
            if (oldest := next(idle, None)) is None:
                return False
            self._give_up_slot(oldest)
        adapter.reserved = True
        return True

    def _load(self, adapter: Adapter) -> None:
        """Let the plugin load an adapter into its reserved slot."""
        if adapter.loaded:
            return
        request = adapter.request
        try:
            if files_of(request) != adapter.files:
                raise RequestError(
                    f"the files of adapter {request.lora_name!r} in {request.lora_path!r} are no longer those of its "
                    "first use",
                    fix="remove the adapter and load it again",
                )
            adapter.slot = self._lora.load(request.lora_name, request.lora_path)
        except BaseException:
            adapter.reserved = False
            raise
        adapter.loaded = adapter.reserved = True

    def _give_up_slot(self, adapter: Adapter) -> None:
        if adapter.loaded:
            self._lora.unload(adapter.request.lora_name)
        adapter.loaded = adapter.reserved = adapter.pinned = False

    def _forget_oldest(self, but: Adapter | None = None) -> None:
        """Drop the least recently used adapters without a slot, above the limit."""
        if len(self._known) <= self._max_known:
            return
        idle = [number for number, a in self._known.items() if not (a.reserved or a.users or a.holders or a is but)]
        for number in idle[: max(0, len(self._known) - self._max_known)]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Drop a known adapter and the plugin's copy of it."""
        adapter = self._known.pop(number)
        forget_copies(self._lora, adapter.request)


def load_key(request: LoRARequest) -> str:
    """Return a string that distinguishes an adapter's keys and values from any other load, also of its folder."""
    return repr((request.lora_name, request.lora_path, uuid4().hex))


def files_of(request: LoRARequest) -> str:
    """Return a string that distinguishes a folder's files from files that replace them.

    It includes the inodes' change times, which no program sets back. A folder that cannot be read counts as empty. The
    plugin reports the error then.
    """
    files = []
    try:
        for file in Path(request.lora_path).iterdir():
            stat = file.stat()
            files.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    except (OSError, ValueError):  # a path with a NUL
        files = []
    return repr(sorted(files))


def forget_copies(lora: Any, request: LoRARequest) -> None:
    """Let a plugin drop its copies of an adapter in host memory, if it keeps any."""
    if (forget := getattr(lora, "forget", None)) is not None:
        forget(request.lora_path)
