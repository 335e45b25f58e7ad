"""Device strings: the engine's own resolution, with what the plugin counts and makes."""

from __future__ import annotations

import torch

from slotline.registry.descriptor import Kind
from slotline.registry.errors import ConfigError
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.device import devices_of

MOST = 4
"""Devices that are looked at, of the first ones."""


@check(Kind.DEVICE, "device.names.count", Level.CONTRACT, cost=0.01)
def names_count(run: Run) -> None:
    """The number of devices is an integer from 0, the same each time, and above 0 where the suite runs."""
    devices = devices_of(run.subject)
    counts = [devices.count(run.subject.name) for _ in range(3)]
    if len(set(counts)) > 1 or not counts[0]:
        raise Failed(f"count() is {', '.join(map(str, counts))} in turn, expected one number above 0")


@check(Kind.DEVICE, "device.names.resolve", Level.CONTRACT, cost=0.02)
def names_resolve(run: Run) -> None:
    """Each number names a device of that number, whose torch device torch knows, and the bare name one of them."""
    devices, name = devices_of(run.subject), run.subject.name
    count = devices.count(name)
    single = count == 1 and run.subject.capabilities.host_memory.support
    for index in range(min(count, MOST)):
        found = devices.named(f"{name}:{index}")
        if found.name != f"{name}:{index}" and not (single and found.name == name):
            raise Failed(f"'{name}:{index}' is called {found.name!r}")
        torch.device(found.torch_device)
    bare = devices.named(name).name
    number = bare.partition(":")[2]
    if bare != name and not (number.isdigit() and int(number) < count):
        raise Failed(f"{name!r} is called {bare!r}, and there are {count} devices")


@check(
    Kind.DEVICE,
    "device.names.refuse",
    Level.CONTRACT,
    cases=lambda _: ({"asked": asked} for asked in ("count", "far", "letters", "empty", "negative", "other")),
    cost=0.01,
)
def names_refuse(run: Run) -> None:
    """A number that no device has, and what is no number, is a ConfigError that shows what was asked, with a remedy."""
    devices, name = devices_of(run.subject), run.subject.name
    count = devices.count(name)
    texts = {
        "count": f"{name}:{count}",
        "far": f"{name}:{count + 10**6}",
        "letters": f"{name}:first",
        "empty": f"{name}:",
        "negative": f"{name}:-1",
        "other": f"not_{name}",
    }
    asked = texts[run["asked"]]
    try:
        found = devices.named(asked)
    except ConfigError as error:
        if repr(asked) not in str(error) or not error.fix:
            raise Failed(f"the refusal of {asked!r} does not name it with a remedy: {error}") from error
    else:
        raise Failed(f"{asked!r} was taken for {found.name!r}, and there are {count} devices")


@check(Kind.DEVICE, "device.names.apart", Level.NUMERICS, cost=0.02)
def names_apart(run: Run) -> None:
    """Two devices of a machine have memory of their own."""
    devices, name = devices_of(run.subject), run.subject.name
    if devices.count(name) < 2:
        raise NotApplicable("the machine has one device of this kind")
    one, other = (devices.named(f"{name}:{index}") for index in (0, 1))
    with one.scope():
        mine = one.zeros(64)
    with other.scope():
        other.zeros(64).fill_(9)
    other.synchronize()
    if int(mine.cpu().sum()):
        raise Failed(f"what was written on {other.name} is on {one.name}")
