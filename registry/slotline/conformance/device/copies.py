"""Order of copies and computations, and the scope of a device."""

from __future__ import annotations

import numpy as np
import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.device import DeviceUnderTest, devices_of, random_array, same

COUNT = 200_000


@check(Kind.DEVICE, "device.copies.order", Level.HOSTILE, cost=0.03)
def copies_order(run: Run) -> None:
    """Copies wait for computations and computations for copies, where they are told to."""
    under_test = DeviceUnderTest(run)
    copies = under_test.device.copy_stream()
    host = under_test.device.host_empty(COUNT, torch.int32)
    with under_test.at_work():
        tensor = under_test.put(np.zeros(COUNT, np.int32))
        for step in range(1, 5):
            tensor.fill_(step)
            copies.wait_for_compute()
            with copies.scope():
                host.copy_(tensor, non_blocking=True)
            copies.compute_waits()
            tensor.fill_(-1)
            under_test.device.synchronize()
            same(np.full(COUNT, step, np.int32), host.numpy().copy(), f"a copy behind step {step}")


@check(Kind.DEVICE, "device.copies.events", Level.HOSTILE, cost=0.03)
def copies_events(run: Run) -> None:
    """Events order both ways: a copy waits for a computation's event, a computation for a copy's."""
    under_test = DeviceUnderTest(run)
    copies = under_test.device.copy_stream()
    with under_test.at_work():
        source, target = under_test.put(np.zeros(COUNT, np.int32)), under_test.put(np.zeros(COUNT, np.int32))
        for step in range(1, 5):
            source.fill_(step)
            copies.wait(copies.record(copies=False), copies=True)
            with copies.scope():
                target.copy_(source, non_blocking=True)
            copies.wait(copies.record(copies=True), copies=False)
            result = target * 2
            same(np.full(COUNT, 2 * step, np.int32), under_test.host(result), f"a result of the copy of step {step}")


@check(Kind.DEVICE, "device.copies.peers", Level.NUMERICS, needs={"peer_copies": True}, cost=0.03)
def copies_peers(run: Run) -> None:
    """A tensor of one device can be copied to another of its kind."""
    devices, name = devices_of(run.subject), run.subject.name
    if devices.count(name) < 2:
        raise NotApplicable("the machine has one device of this kind")
    under_test = DeviceUnderTest(run, 0)
    other = DeviceUnderTest(run, 1)
    array = random_array(under_test.rng, np.int32, (1000,))
    with under_test.at_work():
        tensor = under_test.put(array).to(other.torch_device)
    under_test.device.synchronize()
    same(array, other.host(tensor), f"a copy from {under_test.device.name} to {other.device.name}")


@check(Kind.DEVICE, "device.scope.nested", Level.HOSTILE, cost=0.01)
def scope_nested(run: Run) -> None:
    """The scope of a device can be entered again and again, inside itself too, and is left by an error."""
    under_test = DeviceUnderTest(run)
    array = random_array(under_test.rng, np.int32, (10,))
    for _ in range(3):
        with under_test.device.scope(), under_test.device.scope():
            same(array + 1, under_test.host(under_test.put(array) + 1), "a sum in a nested scope")
    try:
        with under_test.device.scope():
            raise LookupError("the suite's own")
    except LookupError:
        pass
    else:
        raise Failed("the scope of the device swallows errors")
    with under_test.device.scope():
        same(array, under_test.host(under_test.put(array)), "a tensor made after an error")


@check(Kind.DEVICE, "device.scope.capturing", Level.NUMERICS, cost=0.01)
def scope_capturing(run: Run) -> None:
    """Outside of captures nothing is being captured."""
    under_test = DeviceUnderTest(run)
    with under_test.device.scope():
        if found := under_test.device.is_capturing():
            raise Failed(f"is_capturing() is {found!r}, and nothing is being captured")
