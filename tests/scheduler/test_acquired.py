"""What extensions take for a request before it runs: together or not at all, and given back if it waits."""

from __future__ import annotations

from core_cases import Bench

from slotline.core.batch.extensions import Extensions
from slotline.core.batch.request import Request


class Seats:
    """An extension with so many seats, each held from the admission of a request."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked: list[tuple[str, bool]] = []

    def acquire(self, request: Request, *, passing: bool) -> bool:
        self.asked.append((request.request_id, passing))
        if self.free == 0:
            return False
        self.free -= 1
        return True

    def give_back(self, request: Request) -> None:
        self.free += 1


class Door:
    """An extension that holds nothing, and lets in the requests that it names."""

    def __init__(self) -> None:
        self.lets_in = {"b"}

    def acquire(self, request: Request, *, passing: bool) -> bool:
        return request.request_id in self.lets_in


def test_a_request_that_one_extension_refuses_gives_back_what_another_gave() -> None:
    bench, seats, door = Bench(), Seats(1), Door()
    bench.scheduler.extensions = Extensions.of([("seats", "seats", seats), ("door", "door", door)])
    for name in "ab":
        bench.add(name, 3, max_tokens=9)
    assert bench.names(bench.step()) == ["b"]  # it takes the seat that the other one gave back
    assert seats.asked == [("a", False), ("b", True)]
    door.lets_in.add("a")
    assert bench.names(bench.step()) == ["b"]
    assert seats.asked[2:] == [("a", False)]
    seats.free = 1
    assert bench.names(bench.step())[-1:] == ["a"]


def test_a_request_that_finds_no_blocks_gives_back_what_it_took() -> None:
    bench, seats = Bench(num_blocks=3), Seats(2)
    bench.scheduler.extensions = Extensions.of([("seats", "seats", seats)])
    for name in "ab":
        bench.add(name, 8, max_tokens=9)
    assert bench.names(bench.step()) == ["a"]
    assert (seats.asked, seats.free) == ([("a", False), ("b", False)], 1)
