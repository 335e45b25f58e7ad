"""Extension of a plan with prefix caching: a prefix that a running request computes is not computed twice.

Requests that share a prefix and arrive together would each compute it, and keep a copy of it. So the first of them goes
ahead, and the others join when they find its blocks. That is once its step is done; or once it is launched, where the
next step is prepared meanwhile and runs behind it.
"""

from __future__ import annotations

from attrs import define

from slotline.builder.parts import Parts
from slotline.core.batch.request import Request, Status
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.block_hashes import extend_hashes, hash_sizes
from slotline.registry.contracts import BlockHash, ExtensionContext


@define(eq=False)
class _Owner:
    """A running request that computes its prompt.

    Attributes:
        hashes: of the pieces that it computes.
        num_known: tokens that were known when it was admitted. Once there are more, all pieces are computed.
        num_findable: pieces from the start on whose blocks can be found.
    """

    request: Request
    hashes: tuple[BlockHash, ...]
    num_known: int
    num_findable: int


class PrefixWaits:
    """Keeps new requests waiting whose next tokens a running request computes.

    A request waits at most until the first token of the one that it waits for. A request with companions never waits,
    since they join together.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        assert parts.memory is not None
        self._rows, self._pool = parts.rows, parts.memory.pool
        self._piece, self._unit = hash_sizes(parts.groups, 1)
        kept = [group for group in parts.groups if not group.frees_early]  # others lose the blocks of a prefix early
        self._group = (kept or list(parts.groups))[0]
        self._groups = parts.groups
        # What is launched runs in order on one rank. A connector would copy blocks as soon as they can be found.
        self._at_launch = (
            parts.last_tokens is not None
            and parts.planned.place.layout.replica_size == 1
            and not parts.planned.loaded.config.kv_connector.name
            and len(kept) == len(parts.groups)
        )
        self._fewest = parts.planned.loaded.config.cache.prefix_wait
        self._owners: dict[int, _Owner] = {}  # by row
        self._coming: dict[BlockHash, int] = {}  # row of the request that computes a piece

    def acquire(self, request: Request, *, passing: bool) -> bool:
        """Return False while a running request computes enough of what this one needs next."""
        if not self._coming or request.leader is not None or request.whole_prompt:
            return True
        return not self._must_wait(request)

    def give_back(self, request: Request) -> None:
        """Do nothing: no request takes anything here."""

    def begin_request(self, request: Request, computed: int) -> None:
        """Note the pieces that an admitted request is going to compute, unless another one does so already."""
        self.unschedule(request)
        if request.whole_prompt:
            return
        known = int(self._rows.num_tokens[request.row])
        hashes = request.block_hashes[computed // self._piece : self._pieces(known)]
        own = tuple(one for one in hashes if self._owner(one) is None)
        if own:
            self._owners[request.row] = _Owner(request, own, known, computed // self._piece)
            self._coming.update(dict.fromkeys(own, request.row))

    def launched(self, scheduled: SchedulerOutput) -> None:
        """Let others find what the launched step computes of the owners' prompts: their steps run behind it."""
        for row in self._owners.keys() & scheduled.rows.tolist() if self._at_launch else ():
            owner = self._owners[row]
            hashes = owner.request.block_hashes
            count = min(int(self._rows.num_computed_tokens[row]) // self._piece, len(hashes))
            for group in self._groups:
                step = group.block_size // self._piece
                first, end = owner.num_findable // step, count // step
                self._pool.remember(group.index, group.blocks[row][first:end], hashes[step - 1 :: step][first:end])
            owner.num_findable = max(count, owner.num_findable)

    def unschedule(self, request: Request) -> None:
        """Forget what a request was going to compute."""
        if (owner := self._owners.get(request.row)) is not None and owner.request is request:
            self._forget(request.row)

    def restore(self, requests: list[Request]) -> None:
        """Forget all requests: none is running."""
        self._owners.clear()
        self._coming.clear()

    def _must_wait(self, request: Request) -> bool:
        """Return True if running requests compute enough of a request's prefix that cannot be found yet."""
        count = self._pieces(len(request.prompt_token_ids))
        if not request.block_hashes and request.hash_extra is None:
            of_others = [self._hashes_shared(one.request, request) for one in self._owners.values()]
            longest: list[BlockHash] = max(of_others, key=len, default=[])
            request.block_hashes += longest
        hashes = extend_hashes(request, request.token_array.astype("int32"), count, self._piece)[:count]
        step = self._group.block_size // self._piece
        own, shared = hashes[step - 1 :: step], 0
        for one, block in zip(own, self._pool.lookup_all(self._group.index, own), strict=True):
            if block is not None:
                continue
            if self._owner(one) is None:
                return False
            shared += self._group.block_size
            if shared >= self._fewest:  # a long prompt is not looked through to its end at each step
                return True
        return False

    def _hashes_shared(self, other: Request, request: Request) -> list[BlockHash]:
        """Return the hashes of the prefix that both requests have. To compare tokens is faster than to hash them."""
        own, others, keys = (
            request.token_array,
            other.token_array,
            {(r.cache_salt, r.cache_key) for r in (other, request)},
        )
        if other.hash_extra is not None or len(keys) > 1 or others[0] != own[0]:
            return []
        length = min(len(others), len(own))
        differ = others[:length] != own[:length]
        same = int(differ.argmax()) if differ.any() else length
        return other.block_hashes[: same // self._piece]

    def _owner(self, piece: BlockHash) -> _Owner | None:
        """Return the request that is computing a piece. Forget those that have computed all of theirs."""
        if (row := self._coming.get(piece)) is None:
            return None
        owner, rows = self._owners[row], self._rows
        known = int(rows.num_tokens[row] - rows.num_pending[row])
        if owner.request.status is Status.RUNNING and owner.request.row == row and known <= owner.num_known:
            return owner
        self._forget(row)
        return None

    def _forget(self, row: int) -> None:
        for piece in self._owners.pop(row).hashes:
            del self._coming[piece]

    def _pieces(self, num_tokens: int) -> int:
        """Return the pieces of a prefix that requests can share, of a request of `num_tokens`."""
        return (num_tokens - 1) // self._unit * self._unit // self._piece
