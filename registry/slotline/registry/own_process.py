"""Process ownership of an object: a forked child has a copy of it, but none of the threads that it relies on."""

from __future__ import annotations

import os

from attrs import field, frozen

from slotline.registry.errors import RequestError


@frozen
class OwnProcess:
    """The process that made an object.

    Attributes:
        what: the object, as an error names it.
    """

    what: str
    process: int = field(factory=os.getpid, init=False)

    def refuse_others(self) -> None:
        """Refuse to continue in a forked child, where thread pools (of OpenMP or the compilers) would wait forever.

        Raises:
            RequestError: naming both processes.
        """
        if (current := os.getpid()) != self.process:
            raise RequestError(
                f"{self.what} was made in process {self.process} and is used in its forked child {current}, "
                "where none of its threads run",
                fix="fork before the LLM is made, or start the child with multiprocessing's method 'spawn'",
            )
