"""L0 of devices: descriptor, capabilities, the device and its parts, and its facts."""

from __future__ import annotations

from slotline.registry.built import DEVICE_OPS, BuiltContract, misfits_of
from slotline.registry.contracts.device import (
    CopyStream,
    DeviceCapabilities,
    DeviceContext,
    GraphCapture,
    TransferBuffer,
)
from slotline.registry.descriptor import DeviceInfo, Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.device import DeviceUnderTest, context_of
from slotline.testing.refusal_checks import UNKNOWN, register_part_refusals


def _context(run: Run) -> DeviceContext:
    return context_of(run.subject)


register_contract_checks(KindContract(kind=Kind.DEVICE, capabilities=DeviceCapabilities, context=_context))
register_part_refusals(
    Kind.DEVICE,
    {
        "dtypes": lambda _: ("float32", "bfloat16", "float16", "float64", UNKNOWN),
        "graphs": lambda _: (True,),
        "streams": lambda _: (True,),
        "peer_copies": lambda _: (True,),
        "pinned_memory": lambda _: (True,),
        "host_memory": lambda _: (True,),
    },
)


@check(Kind.DEVICE, "device.contract.declared", Level.CONTRACT, cost=0.001)
def declared(run: Run) -> None:
    """Host memory excludes graphs, and a device is not compatible with itself or with what is no name."""
    offer, name = run.subject.capabilities, run.subject.name
    if offer.graphs.support and offer.host_memory.support:
        raise Failed("graphs and host_memory are declared, and inputs in host memory have no address that stays")
    for other in offer.compatible_with:
        if not isinstance(other, str) or not other or other == name or ":" in other:
            raise Failed(f"compatible_with names {other!r}, expected the names of other devices")


@check(Kind.DEVICE, "device.contract.parts", Level.CONTRACT, cost=0.02)
def parts(run: Run) -> None:
    """The table of operations, buffers, queues of copies and sessions of captures have the methods of the contract."""
    device = DeviceUnderTest(run).device
    made = {
        "the table of operations": (DEVICE_OPS, device.ops),
        "transfer_buffer()": (BuiltContract(protocol=TransferBuffer), device.transfer_buffer()),
        "copy_stream()": (BuiltContract(protocol=CopyStream), device.copy_stream()),
    }
    if run.subject.capabilities.graphs.support:
        made["graph_capture()"] = BuiltContract(protocol=GraphCapture), device.graph_capture()
    for what, (contract, built) in made.items():
        for text in misfits_of(contract, None, built, strict=True):
            raise Failed(f"{what}: {text}")


@check(Kind.DEVICE, "device.contract.info", Level.CONTRACT, cost=0.02)
def info(run: Run) -> None:
    """The facts are of this kind of device: its type, a name, its memory in bytes and its number of cores."""
    under_test = DeviceUnderTest(run)
    found = under_test.device.info()
    if not isinstance(found, DeviceInfo):
        raise Failed(f"info() is {found!r:.80}, expected a DeviceInfo")
    if found.type != run.subject.name:
        raise Failed(f"info().type is {found.type!r}, expected {run.subject.name!r}")
    if not isinstance(found.name, str) or not isinstance(found.cores, int) or found.cores < 1:
        raise Failed(f"info() has name {found.name!r} and {found.cores!r} cores, expected a text and at least one")
    total = under_test.device.memory().total
    if not 0.5 * total <= found.total_memory <= 2 * total:
        raise Failed(f"info().total_memory is {found.total_memory} bytes, and memory().total is {total}")
