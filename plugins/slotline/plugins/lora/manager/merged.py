"""Adapter merged into the base model's weights: steps cost nothing more, but no other adapter can be used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from slotline.core.batch.request import Request
from slotline.plugins.lora.manager.known_adapter import adapter_of, files_of, forget_copies, load_key, numbered
from slotline.registry.contracts import AdaptableModel, Lora
from slotline.registry.errors import ModelError, RequestError
from slotline.registry.lora_request import LoRARequest


class MergedAdapter:
    """Extension with at most one adapter at a time.

    The adapter's addition to a weight is the plugin's output for the identity matrix, so any plugin works.

    Args:
        lora: the built plugin.
        model: the model whose weights change.
        modules: the linear layers and embeddings that may carry an adapter.
        embeddings: the embeddings among the modules.
        max_tokens: rows of the identity matrix at a time.
        device_of: path of each of the modules -> its device.
        dtype: of the model.
        named: folder of each adapter that is merged when the engine is ready, by name.
        shared: cached prefixes may go to other engines that have merged the same adapter.
        notes: shown with the plan.
    """

    def __init__(
        self,
        lora: Lora,
        model: AdaptableModel,
        modules: Mapping[str, tuple[int, int]],
        *,
        embeddings: Collection[str] = (),
        max_tokens: int,
        device_of: Mapping[str, str],
        dtype: torch.dtype,
        named: Mapping[str, Path],
        shared: bool = False,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._shared = shared
        self.notes = notes
        self._named = named
        self._lora = lora
        self._model = model
        self._modules, self._embeddings = modules, embeddings
        self._max_tokens = max_tokens
        self._device_of, self._dtype = device_of, dtype
        self._users = 0  # unfinished requests
        self._merged: LoRARequest | None = None
        self._key = ""

    def engine_ready(self) -> None:
        """Merge the adapter that the configuration names."""
        for request in numbered(self._named):
            self.add(request)

    @property
    def numbers(self) -> set[int]:
        """Return the merged adapter's number, if there is one."""
        return set() if self._merged is None else {self._merged.lora_int_id}

    def named(self, name: str) -> LoRARequest:
        """Return the merged adapter if it has this name. See `AdapterSlots.named`."""
        if self._merged is None or self._merged.lora_name != name:
            raise RequestError(f"there is no adapter {name!r}", fix="give a LoRARequest")
        return self._merged

    def add(self, request: LoRARequest) -> object:
        """Merge an adapter, unless it is already merged.

        Raises:
            RequestError: if another adapter is merged, requests are unfinished, or it cannot be merged.
        """
        if self._merged == request:
            return request
        if self._merged is not None:
            raise RequestError(
                f"adapter {request.lora_name!r}: the weights hold {self._merged.lora_name!r}, and lora.merge = true "
                "holds one",
                fix="remove the first adapter, or set lora.merge = false",
            )
        self._refuse_users(f"adapter {request.lora_name!r} cannot be merged")
        self._merge(request)
        return request

    def remove(self, number: int) -> bool:
        """Read the base model's weights again, without the adapter.

        Raises:
            RequestError: if requests are unfinished.
        """
        if number not in self.numbers:
            return False
        self._refuse_users(f"adapter {number} is in use")
        self._model.reload_weights()
        if self._merged is not None:
            forget_copies(self._lora, self._merged)
        self._merged = None
        return True

    def pin(self, number: int) -> None:
        """Check that the adapter is merged. It stays in any case.

        Raises:
            RequestError: if it is not the merged adapter.
        """
        if number not in self.numbers:
            raise RequestError(f"there is no adapter {number}", fix=f"loaded are {sorted(self.numbers)}")

    def enter(self, request: Request) -> None:
        """Refuse a request that does not match the weights.

        Raises:
            RequestError: as `add`, or for a request without an adapter once an adapter is merged.
        """
        if (mine := adapter_of(request)) is not None:
            self.add(mine)
            request.cache_key = self._key
        elif self._merged is not None:
            raise RequestError(
                f"a request without an adapter: the weights hold {self._merged.lora_name!r}, since lora.merge = true",
                fix=f"pass lora_request={self._merged.lora_name!r}, or set lora.merge = false",
            )
        self._users += 1

    def leave(self, request: Request) -> None:
        """Count a request that has ended. See `AdapterSlots.leave`."""
        self._users -= 1

    def restore(self, requests: Sequence[Request]) -> None:
        """Recount the users."""
        self._users = len(requests)

    def reset(self) -> None:
        """Merge the adapter into the new weights.

        Raises:
            RequestError: if it cannot be merged. No adapter is merged then.
        """
        merged, self._merged = self._merged, None
        if merged is not None:
            self._merge(merged)

    def _refuse_users(self, what: str) -> None:
        if self._users:
            raise RequestError(f"{what}: {self._users} requests are unfinished", fix="finish or abort them first")

    @torch.inference_mode()
    def _merge(self, request: LoRARequest) -> None:
        """Add an adapter to the base model's weights, or leave the weights as they were."""
        files, key = files_of(request), load_key(request, shared=self._shared)
        slot = self._lora.load(request.lora_name, request.lora_path)
        if files_of(request) != files:
            key = load_key(request, shared=False)  # of which files it was read is not known
        try:
            for name, (inner, outer) in self._modules.items():
                delta = self._delta(slot, name, inner, outer)
                if bool(delta.any()):
                    self._model.add_to_weight(name, delta)
        except BaseException as error:  # a plugin's code may raise anything, with only some layers done
            self._model.reload_weights()
            if isinstance(error, ModelError):
                raise RequestError(f"adapter {request.lora_name!r}: {error.message}", fix=error.fix) from error
            raise
        finally:
            self._lora.unload(request.lora_name)
        self._merged, self._key = request, key

    def _delta(self, slot: int, name: str, inner: int, outer: int) -> torch.Tensor:
        """Return the adapter's addition to a weight [out_features, in_features], transposed for an embedding."""
        parts, embeds, device = [], name in self._embeddings, self._device_of[name]
        for start in range(0, inner, self._max_tokens):
            count = min(self._max_tokens, inner - start)
            if embeds:
                inputs = torch.arange(start, start + count, device=device)
            else:
                inputs = torch.zeros(count, inner, device=device, dtype=self._dtype)
                inputs[:, start : start + count].fill_diagonal_(1)
            out = torch.zeros(count, outer, device=device, dtype=self._dtype)
            self._lora.plan(torch.full((count,), slot, dtype=torch.int64, device=device))
            self._lora.apply(name, inputs, out)
            parts.append(out)
        delta = torch.cat(parts)
        return delta if embeds else delta.T
