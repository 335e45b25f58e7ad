"""What replicas have not been told yet: requests wait for each other, so that many are sent in one message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from attrs import define, field

from slotline.ranks.replicas.replica_links import ReplicaLink, ReplicaLinks
from slotline.ranks.replicas.reports import Abort, Add
from slotline.registry.errors import RequestError
from slotline.registry.loading import one_line

TOGETHER = 32
"""Requests that are sent in one message at most, so that replicas begin while others are still read."""


@define(eq=False)
class Outboxes:
    """One list for each replica."""

    links: ReplicaLinks
    _asked: defaultdict[int, list[Add | Abort]] = field(factory=lambda: defaultdict(list), init=False)

    def put(self, replica: int, asked: Add | Abort) -> None:
        """Have something sent to a replica, an abort at once."""
        self._asked[replica].append(asked)
        if isinstance(asked, Abort) or len(self._asked[replica]) >= TOGETHER:
            self._send(replica)

    def send(self) -> None:
        """Send everything. A replica that waits after an error goes on."""
        for number, link in enumerate(self.links.replicas):
            if self._asked[number] or link.paused:
                self._send(number)

    def _send(self, replica: int) -> None:
        asked, self._asked[replica] = self._asked[replica], []
        link = self.links.replicas[replica]
        try:
            self.links.send(link, asked)
        except Exception:  # pickling may raise anything
            self._send_each(link, asked)

    def _send_each(self, link: ReplicaLink, asked: Sequence[Add | Abort]) -> None:
        """Send one message for each request, and refuse those that cannot be sent."""
        for one in asked:
            try:
                self.links.send(link, [one])
            except Exception as error:
                refusal = RequestError(
                    f"this request cannot be sent to another process: {one_line(error)}",
                    fix="give logits processors by name, and functions that are defined in a module",
                )
                self.links.refused.append((one.key, refusal))
                self.links.wake()
