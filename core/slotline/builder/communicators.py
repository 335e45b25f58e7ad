"""Building of the communicator, and what ranks compare while they build."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import frozen

from slotline.planner.plan import Planned
from slotline.registry.contracts import Communicator, CommunicatorContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import RankError
from slotline.registry.loading import bind_contract
from slotline.registry.ranks import DIMENSIONS, Place

PIPELINE_HOST = "pipeline_host"
"""Name of the group in which ranks of a pipeline send objects on the host."""
_READ = 1 << 16  # bytes at each end of a file with weights


class Ranks(Protocol):
    """All ranks of an engine.

    Attributes:
        place: this process.
        communicators: those of the engine.
    """

    place: Place
    communicators: list[Communicator]

    @property
    def replica(self) -> Ranks | None:
        """The ranks that serve the same requests. None if all do."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order."""
        ...

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in order. All ranks give as many, and at least one."""
        ...


@frozen(eq=False)
class HostLink:
    """Objects from one rank of a pipeline to the others, on the host.

    Attributes:
        communicator: of the pipeline's ranks, for tensors in host memory.
        source: the rank that sends, -1 for the last.
    """

    communicator: Communicator
    source: int = -1

    @property
    def sends(self) -> bool:
        """Whether this rank is the one that sends."""
        return self.communicator.rank == self.source % self.communicator.size

    def send(self, value: Any) -> None:
        """Send an object to all other ranks."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for rank in range(self.communicator.size):
            if rank != self.communicator.rank:
                self.communicator.send(torch.tensor([len(data)]), rank)
                self.communicator.send(data, rank)

    def receive(self) -> Any:
        """Return the next object."""
        source = self.source % self.communicator.size
        size = self.communicator.receive(torch.empty(1, dtype=torch.int64), source)
        data = self.communicator.receive(torch.empty(int(size), dtype=torch.uint8), source)
        return pickle.loads(data.numpy().tobytes())


def build_communicator(
    planned: Planned, ranks: Ranks | None, name: str, members: tuple[int, ...]
) -> Communicator | None:
    """Join a group of this rank. Return None for one rank.

    Args:
        members: of the group, by their number in the engine.
    """
    descriptor = planned.communicator.descriptor
    if descriptor is None or ranks is None or not members:
        return None
    return _build(planned, ranks, descriptor, name, members, planned.device)


def build_communicators(planned: Planned, ranks: Ranks | None) -> dict[str, Communicator]:
    """Join the groups of this rank, by dimension. Groups of one rank are left out.

    Ranks of a pipeline have a second group, `PIPELINE_HOST`, for what they tell each other on the host.
    """
    descriptor, place = planned.communicator.descriptor, planned.place
    if descriptor is None or ranks is None:
        return {}
    found = {
        dimension: _build(planned, ranks, descriptor, dimension, place.group(dimension), planned.device)
        for dimension in DIMENSIONS
        if getattr(place.layout, dimension) > 1
    }
    if "pipeline" in found:
        if not planned.on_host:
            descriptor = planned.registry.load(Kind.COMMUNICATOR, "gloo", required=True)
        found[PIPELINE_HOST] = _build(planned, ranks, descriptor, PIPELINE_HOST, place.group("pipeline"), "cpu")
    return found


def _build(
    planned: Planned,
    ranks: Ranks,
    descriptor: Descriptor[Any],
    name: str,
    members: tuple[int, ...],
    device: str,
) -> Communicator:
    config = planned.loaded.config
    context = CommunicatorContext(
        contract=bind_contract(descriptor),
        name=name,
        ranks=members,
        rank=members.index(planned.place.rank),
        device=device,
        timeout=max(config.parallel.start_timeout, 2 * config.parallel.timeout),  # the watch over ranks is sooner
        batch_invariant=config.batch_invariant,
        options=planned.options(descriptor),
    )
    join = getattr(ranks, "join", None)  # of ranks that the plugin does not reach
    communicator: Communicator = join(context) if join else planned.registry.build(descriptor, context)
    ranks.communicators.append(communicator)
    return communicator


def compare(ranks: Ranks, planned: Planned) -> None:
    """Compare versions, plans and files of the ranks.

    Raises:
        RankError: naming the first rank that differs from rank 0, and what differs.
    """
    path = planned.facts.path
    own = {
        "slotline": version("slotline"),
        "torch": torch.__version__,
        "the plan": planned.plan.digest,
        **{f"file {file.name!r}": _fingerprint(file) for file in _files(path)},
    }
    first, *others = ranks.gather(own)
    for rank, other in enumerate(others, 1):
        for what in sorted(first.keys() | other.keys()):
            if first.get(what) != other.get(what):
                raise RankError(
                    f"rank {rank} differs from rank 0: {what} is {other.get(what, 'missing')} on rank {rank} and "
                    f"{first.get(what, 'missing')} on rank 0",
                    fix="give all ranks the same files, packages and configuration",
                )


def fewest(ranks: Ranks | None) -> Callable[[int], int]:
    """Return a function that gives the least of the ranks' numbers."""
    if ranks is None:
        return lambda number: number
    return lambda number: min(ranks.gather(number))


def gathered(ranks: Ranks | None) -> Callable[[bytes], list[bytes]]:
    """Return a function that gives the bytes of all ranks that serve the same requests, in order."""
    if ranks is None:
        return lambda value: [value]
    return ranks.gather_bytes if ranks.replica is None else ranks.replica.gather_bytes


def over_stages(ranks: Ranks | None) -> Callable[[Any], list[Any]]:
    """Return a function that gives the values of the stages of this rank's pipeline, in order."""
    if ranks is None:
        return lambda value: [value]
    members = ranks.place.group("pipeline")

    def gather(value: Any) -> list[Any]:
        found = ranks.gather(value)
        return [found[rank] for rank in members]

    return gather


def _files(path: Path) -> Iterator[Path]:
    """Yield the files that decide what a model computes."""
    for file in sorted(path.iterdir()):
        if file.suffix in (".safetensors", ".bin", ".gguf", ".json") and file.is_file():
            yield file


def _fingerprint(file: Path) -> str:
    """Return the size and a hash over both ends of a file."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        digest.update(opened.read(_READ))
        opened.seek(max(size - _READ, 0))
        digest.update(opened.read(_READ))
    return f"{size} bytes, {digest.hexdigest()[:12]}"
