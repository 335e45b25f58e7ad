"""Adapter slots: the known adapters, and the slots that they hold on the device.

An adapter is known from its first use until it is removed, or until `max_cpu_adapters` adapters used later displace it.
It takes a slot when a request that names it joins the batch, replacing the least recently used idle adapter if
necessary. `StepAdapters` keeps the slot of each row, so a step gathers its tokens' slots like its other inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.plugins.lora.manager.known_adapter import (
    Adapter,
    adapter_of,
    files_of,
    forget_copies,
    load_key,
    numbered,
)
from slotline.plugins.lora.manager.step_adapters import NO_SLOT, StepAdapters
from slotline.registry.contracts import Lora
from slotline.registry.errors import IntegrityError, RequestError
from slotline.registry.lora_request import LoRARequest


class AdapterSlots:
    """Extension that keeps the adapters of an engine in slots on the device.

    Args:
        lora: the built plugin.
        rows: the request table.
        steps: the methods that a step calls.
        max_adapters, max_cpu_adapters: as in the configuration.
        named: folder of each adapter that is loaded when the engine is ready, by name.
        shared: cached prefixes of an adapter may go to other engines that have it too.
        notes: shown with the plan.
    """

    def __init__(
        self,
        lora: Lora,
        rows: RequestTable,
        steps: StepAdapters,
        *,
        max_adapters: int,
        max_cpu_adapters: int,
        named: Mapping[str, Path],
        shared: bool = False,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._shared = shared
        self.steps = steps
        self.graph_variant, self.step_variants = steps.graph_variant, steps.step_variants
        self.captured_variants = steps.captured_variants
        self.gather, self.staging_bytes = steps.gather, steps.staging_bytes
        self.plan, self.plan_logits, self.outside_steps = steps.plan, steps.plan_logits, steps.outside_steps
        self.notes = notes
        self._named = named
        self._lora = lora
        self._rows = rows
        self._max_adapters, self._max_known = max_adapters, max(max_adapters, max_cpu_adapters)
        self._known: OrderedDict[int, Adapter] = OrderedDict()  # by number, least recently used first

    def engine_ready(self) -> None:
        """Load the adapters that the configuration names."""
        for request in numbered(self._named):
            self.add(request)

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
        """Check a new request's adapter, and set the key that separates its keys and values from others.

        Raises:
            RequestError: as `add`.
        """
        if (mine := adapter_of(request)) is not None:
            adapter = self.add(mine)
            adapter.users += 1
            request.cache_key = adapter.key

    def leave(self, request: Request) -> None:
        """Handle the end of a request, which may be in the batch."""
        if (mine := adapter_of(request)) is not None:
            if request.row >= 0:
                self.give_back(request)
            self._adapter(mine).users -= 1
            self._forget_oldest()

    def acquire(self, request: Request, *, passing: bool) -> bool:
        """Give a request's adapter a slot that stays until the request leaves. Return False if all are in use.

        Once a request has to wait, no other adapter's requests pass it, or it might wait for ever.
        """
        if (mine := adapter_of(request)) is None:
            return True
        adapter = self._adapter(mine)
        if passing or not self._take_slot(adapter):
            return False
        adapter.holders += 1
        self._known.move_to_end(mine.lora_int_id)
        return True

    def give_back(self, request: Request) -> None:
        """Note that a request holds its adapter's slot no more."""
        if (mine := adapter_of(request)) is not None:
            self._adapter(mine).holders -= 1

    def admit(self, request: Request) -> None:
        """Load an acquired adapter into its slot, and note the slot of the request's row.

        Raises:
            RequestError: if its files are gone or have changed.
        """
        if (mine := adapter_of(request)) is not None:
            adapter = self._adapter(mine)
            self._load(adapter)
            self.steps.slots[request.row] = adapter.slot

    def release(self, row: int) -> None:
        """Forget the slot of a row whose request has ended."""
        self.steps.slots[row] = NO_SLOT

    def restore(self, requests: Sequence[Request]) -> None:
        """Recount users and holders from the unfinished requests, whose rows and slots are correct."""
        for adapter in self._known.values():
            mine = [one for one in requests if adapter_of(one) == adapter.request]
            adapter.users, adapter.holders = len(mine), sum(one.row >= 0 for one in mine)

    def check(self) -> None:
        """Raise IntegrityError unless slots, holders and rows agree."""
        using = [adapter_of(request) for request in self._rows.requests if request is not None]
        for number, adapter in self._known.items():
            if adapter.holders != sum(one is not None and one.lora_int_id == number for one in using):
                raise IntegrityError(f"adapter {adapter.request.lora_name!r} counts {adapter.holders} holders wrongly")
        if sum(adapter.reserved for adapter in self._known.values()) > self._max_adapters:
            raise IntegrityError(f"more than {self._max_adapters} adapters hold a slot")

    # --- slots

    def _new(self, request: LoRARequest) -> Adapter:
        for other in self._known.values():
            if other.request.lora_name == request.lora_name:
                raise RequestError(
                    f"adapter {request.lora_name!r} is known as number {other.request.lora_int_id}",
                    fix="use that number, or another name",
                )
        files = files_of(request)  # before their contents: they are compared again when the adapter is loaded
        return Adapter(request, load_key(request, shared=self._shared), files)

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
