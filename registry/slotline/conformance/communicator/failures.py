"""L2 of communicators: ranks that do not come, groups that are ended, closed and made anew."""

from __future__ import annotations

import threading
import time

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.communicator import GroupUnderTest, random_tensors
from slotline.testing.environments.communicator_rank import Joined

TIMEOUT = 1.0
GRACE = 10.0
"""Seconds in which an error must come after it is due."""
ABORT_AFTER = 0.3
LONG = 60.0
_COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "receive")


def _host_only(run: Run) -> None:
    if run.subject.device.type != "cpu":
        raise NotApplicable("a device's queue waits, and not the host: an error may end the process")


def _waits(joined: Joined, waits: bool, name: str) -> tuple[str, float] | None:
    """Make a call that the other rank does not join. Return the error and the seconds until it came."""
    if not waits:
        joined.hear("ended")  # it is there all the time
        return None
    started, text = time.monotonic(), ""
    try:
        _call(joined, name)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    joined.say("ended")
    return text, time.monotonic() - started


def _call(joined: Joined, name: str) -> None:
    x = torch.ones(4, device=joined.device)
    if name in ("broadcast", "receive"):
        getattr(joined.communicator, name)(x, 1)
    else:
        getattr(joined.communicator, name)(x)
    joined.wait()


def _cases(_subject: object) -> list[dict[str, str]]:
    return [{"call": name} for name in _COLLECTIVES]


@check(Kind.COMMUNICATOR, "communicator.timeout", Level.HOSTILE, cases=_cases, cost=1.3)
def timeout(run: Run) -> None:
    """A collective that another rank does not join raises an error that names the group, and does not hang."""
    _host_only(run)
    group = GroupUnderTest(run, 2, timeout=TIMEOUT, patience=TIMEOUT + GRACE)
    found = group.perform(_waits, [True, False], [run["call"]] * 2)[0]
    text, seconds = found
    if not text:
        raise Failed(f"{run['call']} returned although the other rank did not join it")
    if "group 0" not in text:
        raise Failed(f"the error does not name the group 'group 0': {text}")
    if seconds < TIMEOUT / 2:
        raise Failed(f"the error came after {seconds:.2f} s, and the timeout is {TIMEOUT:g} s")


def _aborted(joined: Joined, waits: bool, name: str) -> tuple[str, float] | None:
    if not waits:
        return _waits(joined, False, name)
    timer = threading.Timer(ABORT_AFTER, joined.communicator.abort)
    timer.start()
    found = _waits(joined, True, name)
    timer.join()
    return found


@check(Kind.COMMUNICATOR, "communicator.abort", Level.HOSTILE, cases=_cases, cost=0.8)
def abort(run: Run) -> None:
    """`abort()` of another thread ends a collective that waits with an error, long before the timeout."""
    _host_only(run)
    group = GroupUnderTest(run, 2, timeout=LONG, patience=ABORT_AFTER + GRACE)
    text, seconds = group.perform(_aborted, [True, False], [run["call"]] * 2)[0]
    if not text:
        raise Failed(f"{run['call']} returned although the other rank did not join it")
    if seconds < ABORT_AFTER / 2:
        raise Failed(f"the collective failed after {seconds:.2f} s, before it was aborted")


def _closes(joined: Joined, x: torch.Tensor) -> list[torch.Tensor]:
    """Use a group, close it, and do the same with one of the same name."""
    found = []
    communicator = joined.communicator
    for _ in range(3):
        found.append(communicator.all_gather(x.to(joined.device)))
        joined.wait()
        communicator.close()
        communicator = joined.again(0)
    return found


@check(Kind.COMMUNICATOR, "communicator.close", Level.HOSTILE, cost=0.3)
def close(run: Run) -> None:
    """A group of the same name and ranks works after one was closed, and has nothing of it."""
    xs = random_tensors(run, 2, (5,), "float32")
    for rank, found in enumerate(GroupUnderTest(run, 2).perform(_closes, xs)):
        for number, one in enumerate(found):
            if not torch.equal(one, torch.cat(xs)):
                raise Failed(f"rank {rank}: group {number} of the name gathers other values than were given")
