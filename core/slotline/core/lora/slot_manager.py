"""Adapters at run time: which are known, which hold a slot on the device, and which tokens use them.

An adapter is known from its first use on, until it is removed or `max_cpu_adapters` used since have pushed it out. It
takes a slot when a request that names it joins the batch, over the idle adapter that was used least recently if need
be. Rows hold their request's slot, so a step gathers the slots of its tokens as it gathers everything else.
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
        key: tells its keys and values from those of others, and of each other time that it was made known.
        files: tells the files that were read from others that come to lie in the folder.
        users: unfinished requests that name it; it stays known as long as there are any.
        holders: those of them that have joined the batch; it keeps its slot as long as there are any.
        reserved: whether one of the slots is its own; `loaded` whether the plugin has it there.
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
    """The adapters of an engine.

    Args:
        lora: the built plugin.
        model: what they join.
        rows: their slots stand there.
        modules: the linear layers that may carry one.
        apply_merged: the plugin's, where it has one; `merged` are the layers that it serves so.
        expand: the plugin's, where it has one; `extended` are the layers that it serves so. The model may have extended
            others for an engine before this one.
        plan_single: the plugin's, where both it and the model serve steps of one adapter in a way of their own.
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

    # --- which adapters there are

    @property
    def numbers(self) -> set[int]:
        """The known adapters' numbers."""
        return set(self._known)

    def named(self, name: str) -> LoRARequest:
        """The known adapter of a name.

        Raises:
            RequestError: if there is none.
        """
        for adapter in self._known.values():
            if adapter.request.lora_name == name:
                return adapter.request
        names = [adapter.request.lora_name for adapter in self._known.values()]
        known = f"name one of {', '.join(names)}" if names else "name one under [lora.adapters]"
        raise RequestError(f"there is no adapter {name!r}", fix=f"{known}, or give a LoRARequest")

    def add(self, request: LoRARequest) -> Adapter:
        """Know an adapter. A new one is read at once if a slot is free or idle, so that its faults show here.

        Raises:
            RequestError: if it cannot be held, or another one has its name or number; it is not known then.
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
        """Forget an adapter; False if there is none of that number.

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
        """Have an adapter keep its slot until it is removed; one slot at least stays for the others.

        Raises:
            RequestError: if it is not known, or no slot can be had for it.
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

    # --- requests come and go

    def enter(self, request: Request) -> None:
        """Check a new request's adapter, and tell what tells its keys and values from others'.

        Raises:
            RequestError: as `add`.
        """
        if request.lora_request is not None:
            adapter = self.add(request.lora_request)
            adapter.users += 1
            request.adapter_key = adapter.key

    def leave(self, request: Request) -> None:
        """The request has ended."""
        if request.lora_request is not None:
            self._adapter(request.lora_request).users -= 1
            self._forget_oldest()

    def acquire(self, request: Request) -> bool:
        """Give a request's adapter a slot that stays until `release`; False if all are in use."""
        if request.lora_request is None:
            return True
        adapter = self._adapter(request.lora_request)
        if not self._take_slot(adapter):
            return False
        adapter.holders += 1
        self._known.move_to_end(request.lora_request.lora_int_id)
        return True

    def activate(self, request: Request) -> None:
        """Bring an acquired adapter into its slot, and write the slot into the request's row.

        Raises:
            RequestError: if its files are gone or have changed.
        """
        if request.lora_request is not None:
            adapter = self._adapter(request.lora_request)
            self._load(adapter)
            self._rows.lora_slot[request.row] = adapter.slot

    def release(self, request: Request) -> None:
        """The request has left the batch."""
        if request.lora_request is not None:
            self._adapter(request.lora_request).holders -= 1

    def recount(self, unfinished: Sequence[Request]) -> None:
        """See `AdapterManager.recount`."""
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
        """See `AdapterManager.reloaded`: shares stand beside the weights."""

    # --- in a step

    def use_by(self, rows: Int) -> AdapterUse:
        """How many adapters the rows have; one counts as many where that makes no difference."""
        slots = self._rows.lora_slot[rows]
        most = int(slots.max(initial=NO_SLOT))
        if most == NO_SLOT:
            return AdapterUse.NONE
        one = self._plan_single is not None and bool(((slots == most) | (slots == NO_SLOT)).all())
        return AdapterUse.ONE if one else AdapterUse.MANY

    def plan(self, slots: torch.Tensor | None, single_slot: int | None = None) -> None:
        """Prepare a forward pass: the slot of each token [num_tokens] int64 on the device; None for no adapters.

        `single_slot` is that of all tokens that have any, where the step is run for one adapter.
        """
        if slots is not None:
            self._plan(slots, single_slot)
        further = {} if self._plan_single is None else {"single": single_slot is not None}
        self._model.adapt(None if slots is None else self._add, self._modules, **further)

    def plan_head(self, slots: torch.Tensor, indices: torch.Tensor, single_slot: int | None = None) -> None:
        """Prepare the output projection for some of the step's tokens: the slots of all, and which [n] int64."""
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
        """Add the shares of one product's linear layers, or of an embedding."""
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
        """The adapter of a request that has entered and not left."""
        return self._known[request.lora_int_id]

    def _slots_left(self, *, pinned: bool = False) -> int:
        """Slots that nobody has; with `pinned` those that no pinned adapter has."""
        taken = (a.pinned if pinned else a.reserved for a in self._known.values())
        return self._max_adapters - sum(taken)

    def _take_slot(self, adapter: Adapter) -> bool:
        """Reserve a slot, a free one or that of the adapter that has been idle longest."""
        if not adapter.reserved and self._slots_left() == 0:
            idle = (a for a in self._known.values() if a.reserved and not a.holders and not a.pinned)
            if (oldest := next(idle, None)) is None:
                return False
            self._give_up_slot(oldest)
        adapter.reserved = True
        return True

    def _load(self, adapter: Adapter) -> None:
        """Have the plugin bring an adapter into its reserved slot."""
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
        """Drop the known adapters without a slot that were used least recently, above the limit."""
        if len(self._known) <= self._max_known:
            return
        idle = [number for number, a in self._known.items() if not (a.reserved or a.users or a.holders or a is but)]
        for number in idle[: max(0, len(self._known) - self._max_known)]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Drop a known adapter, and have the plugin drop its copy."""
        adapter = self._known.pop(number)
        forget_copies(self._lora, adapter.request)


def load_key(request: LoRARequest) -> str:
    """Return what tells an adapter's keys and values from others': no two loads share it, also of one folder."""
    return repr((request.lora_name, request.lora_path, uuid4().hex))


def files_of(request: LoRARequest) -> str:
    """Return what tells a folder's files from those that replace them.

    Times of change of the inode are part of it, which no program sets back. A folder that cannot be read has no files,
    which the plugin will say.
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
    """Have a plugin drop what it keeps of an adapter in host memory, if it says that it keeps copies."""
    if (forget := getattr(lora, "forget", None)) is not None:
        forget(request.lora_path)
