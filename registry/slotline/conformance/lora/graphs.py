"""Replay of a captured step with other tokens, other slots and other adapters than it was captured with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from slotline.conformance.lora.numerics import by_dtype, ranks
from slotline.registry.capability import GraphSupport
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.environments.lora import LoraWorld
from slotline.testing.subject import Subject

TOKENS = 8


def _capturable(subject: Subject) -> Iterable[Case]:
    if subject.device.type != "cuda":
        raise NotApplicable("graphs are captured on CUDA devices only")
    return by_dtype(subject)


@check(
    Kind.LORA,
    "lora.graphs.replay",
    Level.GRAPHS,
    needs={"graphs": GraphSupport.SINGLE_TOKEN},
    cases=_capturable,
    cost=1.0,
    profile="graphs",
)
def graphs_replay(run: Run) -> None:
    """A captured apply follows each later plan, new inputs, padding, and adapters that were swapped after capture."""
    with LoraWorld(run, run["dtype"], embeds=bool(run.subject.capabilities.embeddings.support)) as world:
        choice = ranks(run.subject)
        for index in range(world.max_adapters):
            world.load(f"a{index}", world.adapter(choice[index % len(choice)]))
        world.plan(_names(world, run))
        static = {module: world.tensors(module) for module in world.modules}
        results = {module: torch.empty_like(out) for module, (_, out) in static.items()}

        def step() -> None:
            for module, (inputs, out) in static.items():
                results[module].copy_(out)
                world.lora.apply(module, inputs, results[module])

        graph = _captured(step)
        for replay in range(6):
            if replay == 3:  # a hot swap between two replays
                world.unload("a0")
                world.load("b0", world.adapter(choice[0], modules=list(world.modules)[::2]))
            world.plan(_names(world, run, replay))
            for module, (inputs, out) in static.items():
                for buffer, fresh in zip((inputs, out), world.tensors(module), strict=True):
                    buffer.copy_(fresh)
            graph.replay()
            for module, (inputs, out) in static.items():
                world.compare(module, inputs, out, results[module], f"replay {replay} after capture")


@check(
    Kind.LORA,
    "lora.graphs.single",
    Level.GRAPHS,
    needs={"graphs": GraphSupport.SINGLE_TOKEN, "single": True},
    cases=_capturable,
    cost=1.0,
    profile="graphs",
)
def graphs_single(run: Run) -> None:
    """A step of one adapter, captured for one slot, is replayed for others, after a swap and between mixed steps."""
    extends = bool(run.subject.capabilities.extended.support)
    with LoraWorld(run, run["dtype"], extends=extends) as world:
        choice = ranks(run.subject)
        for index in range(world.max_adapters):
            world.load(f"a{index}", world.adapter(choice[index % len(choice)]))
        world.plan_single(["a0"] * TOKENS)
        static = {module: world.tensors(module) for module in world.modules}
        results = {module: torch.empty_like(out) for module, (_, out) in static.items()}

        def step() -> None:
            for module, (inputs, out) in static.items():
                results[module].copy_(world.applied(module, inputs, out))

        graph = _captured(step)
        for replay in range(2 * world.max_adapters):
            if replay == world.max_adapters:
                world.unload("a0")
                world.load("b0", world.adapter(choice[0], modules=list(world.modules)[::2]))
            world.check(world.names(TOKENS), f"a mixed batch before replay {replay}")
            name = list(world.loaded)[-1 - replay % len(world.loaded)]
            world.plan_single([name] * (TOKENS - 3) + [None] * 3 if replay % 2 else [name] * TOKENS)
            for module, (inputs, out) in static.items():
                for buffer, fresh in zip((inputs, out), world.tensors(module), strict=True):
                    buffer.copy_(fresh)
            graph.replay()
            for module, (inputs, out) in static.items():
                world.compare(module, inputs, out, results[module], f"replay {replay} after capture")


def _captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return the graph of a step, after two runs on a side stream that let kernels compile and buffers settle."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _names(world: LoraWorld, run: Run, replay: int = 0) -> list[str | None]:
    """Return adapters token by token, at least one, with padding at the end of every second batch."""
    names = world.names(TOKENS)
    names[0] = list(world.loaded)[replay % len(world.loaded)]
    return names[: TOKENS - 3] + [None] * 3 if replay % 2 else names
