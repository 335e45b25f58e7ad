"""The connector `lmcache`: blocks with a header in a store that LMCache has a client for.

Nobody says what the store holds, so it is asked before a request's blocks are loaded. A step waits for the answer for a
moment at most. What comes later serves later requests.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar
from uuid import uuid4

from attrs import frozen

from slotline.plugins.kv_connectors.disk.block_file import fault_of, header_of
from slotline.plugins.kv_connectors.disk.file_reader import HEADER_BYTES
from slotline.plugins.kv_connectors.lmcache.remote import Remote
from slotline.plugins.kv_connectors.stores.background import Background
from slotline.plugins.kv_connectors.stores.block_store import Bytes, Counts, Fault, Key
from slotline.plugins.kv_connectors.stores.codecs import Codec, codec_of, identity_of
from slotline.plugins.kv_connectors.stores.staged import StagedConnector
from slotline.registry.contracts import BlockHash, KVConnectorContext
from slotline.registry.errors import ConfigError

ABSENT_SECONDS = 1.0
"""Time in which nobody asks again for a block that the store lacks."""
MISSES = 4
"""Blocks in a row that the store lacks, after which it is not asked for the rest of a prompt."""
MOST = 1_000_000
"""Blocks of which it is remembered that the store has them."""
START_SECONDS = 60.0
"""Time that the first connection may take beside an answer, since LMCache imports much then."""
PAUSES = (1.0, 60.0)
"""Seconds without a question after a failure, the first time and at most. Each failure in a row doubles them."""
T = TypeVar("T")


def build_lmcache(context: KVConnectorContext) -> StagedConnector:
    """Build the connector.

    Raises:
        ConfigError: if LMCache does not work here, the store cannot be reached, or the codec does not know the caches.
    """
    options, counts = context.options, Counts("kv_connector:lmcache")
    codec = codec_of(options.codec, context, "kv_connector.lmcache.codec")
    store = RemoteStore(options.url, identity_of(options.codec, context), codec.sizes, options.timeout, counts)
    return LMCacheConnector(context, store, codec, counts, options.lookup)


class LMCacheConnector(StagedConnector):
    """Connector over a store that is asked what it holds.

    Args:
        context: of the connector.
        store: of the blocks.
        codec: their form.
        counts: what happened.
        lookup: seconds that a step waits for what the store holds.
    """

    def __init__(
        self, context: KVConnectorContext, store: RemoteStore, codec: Codec, counts: Counts, lookup: float
    ) -> None:
        options = context.options
        super().__init__(
            context, store, codec, counts, options.staging, options.threads, "kv_connector.lmcache.staging"
        )
        self._remote, self._lookup = store, lookup

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        self._remote.look_up([Key(group, one) for one in hashes], self._lookup)
        return super().held(group, hashes)


@frozen
class Ticket:
    """Block to be written."""

    key: Key
    identity: str


class RemoteStore:
    """Implements `BlockStore`.

    Args:
        url: of the store.
        identity: of the blocks of this model and rank.
        sizes: bytes of a block, by group.
        timeout: seconds that an answer may take.
        counts: what happened.

    Raises:
        ConfigError: if LMCache does not work here or the store cannot be reached.
    """

    def __init__(self, url: str, identity: str, sizes: Sequence[int], timeout: float, counts: Counts) -> None:
        self._url, self._identity, self._timeout, self._counts = url, identity, timeout, counts
        self._size = HEADER_BYTES + max(sizes)
        self._known: OrderedDict[Key, None] = OrderedDict()  # the least recently used first
        self._writing: set[Ticket] = set()
        self._bad: set[Key] = set()  # blocks that came with wrong bytes
        self._asked: dict[Key, float] = {}  # when, of blocks that are not known
        self._own = threading.local()
        self._pauses, self._out_until, self._lock = 0, 0.0, threading.Lock()
        self._failures = self._failures_seen = 0
        self._lookups = Background({"look": 1})
        self._patience = START_SECONDS + timeout
        self._lookups.submit("look", lambda: self._try(lambda remote: remote.has(0)), self._start)
        while self._lookups.under_way:
            self._lookups.poll(wait=0.1)
        self._patience = timeout

    def _start(self, result: bool | Exception) -> None:
        """Take note of the first answer."""
        if isinstance(result, OSError):
            raise ConfigError(
                f"kv_connector.lmcache.url = {self._url!r} cannot be reached: {result}",
                fix="start the store, as in `lmcache_server HOST PORT` for lm://HOST:PORT",
            ) from result
        if isinstance(result, Exception):
            raise result

    def look_up(self, keys: Sequence[Key], seconds: float) -> None:
        """Ask the store for blocks that are not known, and wait for the answer for so long at most."""
        self.refresh()
        now = time.monotonic()
        if now < self._out_until:
            return
        asked = self._asked
        unknown = [
            key
            for key in keys
            if key not in self._known and key not in self._bad and now - asked.get(key, 0.0) > ABSENT_SECONDS
        ]
        if not unknown:
            return
        if len(self._asked) > MOST:
            self._asked.clear()
        self._asked |= dict.fromkeys(unknown, now)
        identity = self._identity
        self._lookups.submit("look", lambda: self._found(unknown, identity), lambda found: self._note(found, identity))
        while self._lookups.under_way and (left := now + seconds - time.monotonic()) > 0:
            self._lookups.poll(left)

    def held(self, keys: Sequence[Key]) -> list[bool]:
        return [key in self._known for key in keys]

    def used(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key in self._known:
                self._known.move_to_end(key)

    def reserve(self, keys: Sequence[Key], busy: Collection[Key]) -> list[Ticket | None]:
        if time.monotonic() < self._out_until:
            self._counts.add("skipped_gone", len(keys))
            return [None] * len(keys)
        tickets = [Ticket(key, self._identity) for key in keys]
        taken = [None if one in self._writing else one for one in tickets]
        self._writing |= {one for one in taken if one is not None}
        return taken

    def write(self, ticket: Ticket, data: Bytes) -> bool:
        """Write a block that the store lacks, and ask whether it has it then: clients may not say that it refused."""
        name, header = _name(ticket.key, ticket.identity), header_of(ticket.key, ticket.identity, data)

        def put(remote: Remote) -> bool:
            if ticket.key not in self._bad and remote.has(name):
                return True
            remote.put(name, [header, data])
            return remote.has(name)

        if not self._try(put):
            self._counts.fault("refused", "the store %s does not keep a block that was sent", self._url)
            return False
        self._bad.discard(ticket.key)
        return True

    def settle(self, ticket: Ticket, *, written: bool) -> None:
        self._writing.discard(ticket)
        if written and ticket.identity == self._identity:
            self._keep(ticket.key)

    def read(self, key: Key, data: Bytes) -> Fault | None:
        identity = self._identity
        value = self._try(lambda remote: remote.get(_name(key, identity)))
        if value is None:
            self._counts.fault(Fault.MISSING.value, "the store %s has lost a block", self._url)
            return Fault.MISSING
        size = HEADER_BYTES + len(data)
        header, body = value[:HEADER_BYTES], value[HEADER_BYTES:size]
        fault: Fault | None = Fault.TRUNCATED
        if len(value) >= size:
            fault = fault_of(header.tobytes(), size, size, key, identity, body)
        if fault is None:
            data[:] = body
        else:
            self._bad.add(key)
            self._counts.fault(fault.value, "a block of the store %s is no good (%s)", self._url, fault.value)
        return fault

    def lost(self, key: Key) -> None:
        self._known.pop(key, None)

    def refresh(self) -> None:
        self._lookups.poll()
        if self._failures != self._failures_seen:  # no request waits for a store that has gone
            self._failures_seen = self._failures
            self._known.clear()
            self._asked.clear()

    def reset(self) -> None:
        """Keep later blocks under other names, because other processes may still have the old weights."""
        self._identity = f"{self._identity[:64]}-{uuid4().hex}"
        self._known.clear()
        self._asked.clear()

    @property
    def known(self) -> list[Key]:
        """The blocks that the store is known to have."""
        return list(self._known)

    def values(self, keys: Sequence[Key]) -> list[Bytes]:
        """Return the values of blocks that the store has.

        Raises:
            OSError: if it has not.
        """
        found = [self._try(lambda remote, key=key: remote.get(_name(key, self._identity))) for key in keys]  # type: ignore[misc]
        if any(value is None for value in found):
            raise OSError("the store has lost a block")
        return [value for value in found if value is not None]

    def put_values(self, keys: Sequence[Key], values: Sequence[Bytes]) -> None:
        """Write values under the names of blocks, whatever they are.

        Raises:
            OSError: if they cannot be written.
        """
        for key, value in zip(keys, values, strict=True):
            self._try(lambda remote, key=key, value=value: remote.put(_name(key, self._identity), [value]))  # type: ignore[misc]

    def _keep(self, key: Key) -> None:
        self._known[key] = None
        self._known.move_to_end(key)
        self._asked.pop(key, None)
        while len(self._known) > MOST:
            self._known.popitem(last=False)

    def _found(self, keys: Sequence[Key], identity: str) -> list[Key]:
        """Return those of some blocks that the store has. The rest is not asked for after some misses in a row."""
        found, misses = list[Key](), 0
        for key in keys:
            if self._try(lambda remote, key=key: remote.has(_name(key, identity))):  # type: ignore[misc]
                found.append(key)
                misses = 0
            elif (misses := misses + 1) == MISSES:
                break
        return found

    def _note(self, found: list[Key] | Exception, identity: str) -> None:
        """Take note of what the store has."""
        if isinstance(found, Exception):
            self._counts.fault("lookup_errors", "the store %s cannot be asked: %s", self._url, found)
        elif identity == self._identity:
            for key in found:
                self._keep(key)

    def _try(self, work: Callable[[Remote], T]) -> T:
        """Do something with this thread's client. After a failure all threads leave the store alone for a while.

        Raises:
            OSError: if it fails, or has failed a short time ago.
        """
        if time.monotonic() < self._out_until:
            raise OSError("the store has failed a short time ago")
        own, remote = self._own, getattr(self._own, "remote", None)
        if remote is not None and own.failures != self._failures:  # of before the store had gone
            remote.close()
            remote = None
        try:
            if remote is None:
                own.failures = self._failures
                own.remote = remote = Remote(self._url, self._size, self._timeout, self._patience)
            result = work(remote)
        except OSError:
            own.remote = None
            if remote is not None:
                remote.close()
            with self._lock:
                self._failures += 1
                if time.monotonic() >= self._out_until:
                    pause = min(PAUSES[0] * 2**self._pauses, PAUSES[1])
                    self._out_until, self._pauses = time.monotonic() + pause, self._pauses + 1
            raise
        self._pauses = 0
        return result


def _name(key: Key, identity: str) -> int:
    """Return the name of a block in the store, of 256 bits. Equal names mean equal blocks."""
    return int.from_bytes(hashlib.sha256(f"{identity} {key.group} ".encode() + key.block_hash).digest(), "big")
