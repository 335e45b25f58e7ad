"""Batches that expose a wrong row, slot, rank or stride."""

from __future__ import annotations

import torch

from slotline.conformance.lora.numerics import by_dtype, once, ranks
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.lora import LoraWorld
from slotline.testing.oracles.lora import expected


def _loaded(run: Run, world: LoraWorld) -> None:
    """Return used slots, then adapters of all ranks, some of them rank-stabilised if that is declared."""
    world.fill()
    choice, stabilised = ranks(run.subject), run.subject.refusal({"rslora": True}) is None
    for index in range(world.max_adapters):
        rank = choice[index % len(choice)]
        world.load(f"a{index}", world.adapter(rank, alpha=12.0 + index, rslora=stabilised and index % 2 == 1))


@check(Kind.LORA, "lora.batch.mixed", Level.HOSTILE, cases=by_dtype, cost=0.025)
def batch_mixed(run: Run) -> None:
    """Several adapters of different ranks and none, token by token, in one batch: each token gets its own share."""
    with LoraWorld(run, run["dtype"], embeds=bool(run.subject.capabilities.embeddings.support)) as world:
        _loaded(run, world)
        for num_tokens in (2, 9, world.max_tokens):
            world.check(world.names(num_tokens), f"mixed batch of {num_tokens} tokens")


@check(Kind.LORA, "lora.batch.extended", Level.HOSTILE, needs={"extended": True}, cases=by_dtype, cost=0.025)
def batch_extended(run: Run) -> None:
    """In a mixed batch each token's share is made of its own adapter's columns of the product with the room."""
    with LoraWorld(run, run["dtype"], extends=True) as world:
        _loaded(run, world)
        for num_tokens in (2, 9, world.max_tokens):
            world.check(world.names(num_tokens), f"mixed batch of {num_tokens} tokens")
        world.in_parts = True
        world.check(world.names(9), "a product in parts")
        world.unload("a0")
        world.load("other", world.adapter(ranks(run.subject)[0]))
        world.check(world.names(9), "another adapter in the first one's slot")


@check(Kind.LORA, "lora.batch.single", Level.HOSTILE, needs={"single": True}, cases=by_dtype, cost=0.025)
def batch_single(run: Run) -> None:
    """Steps of one adapter, whichever it is and whatever was before: its share, made of the first rows of the room."""
    extends = bool(run.subject.capabilities.extended.support)
    with LoraWorld(run, run["dtype"], extends=extends) as world:
        _loaded(run, world)
        for name in [*world.loaded, *reversed(world.loaded)]:
            world.check_single([name] * 4, f"{name!r} alone")
            world.check_single(run.rng.sample([name] * 3 + [None] * 6, 9), f"{name!r} beside tokens without an adapter")
            world.check(world.names(9), f"a mixed batch behind {name!r} alone")
        world.unload(name)
        world.load("other", world.adapter(ranks(run.subject)[0]))
        world.check_single(["other"] * 3, "another adapter in the slot of the one that was alone")
        world.in_parts = True
        world.check_single(["other", None], "a product in parts")


@check(Kind.LORA, "lora.batch.staged", Level.HOSTILE, needs={"staged": True}, cases=once)
def batch_staged(run: Run) -> None:
    """Plugins for two pipeline stages: each serves its own modules of every adapter, in the same slots as the other."""
    with LoraWorld(run, staged=True) as one, LoraWorld(run, staged=True) as other:
        slots: list[list[int]] = []
        for world in (one, other):
            _loaded(run, world)
            world.unload("a0")
            slots.append([world.load("b0", world.adapter(ranks(run.subject)[0]))])
            world.unload(next(iter(world.loaded)))
            elsewhere = world.adapter(ranks(run.subject)[0], modules=list(world.elsewhere))
            slots[-1].append(world.load("nothing here", elsewhere))
            slots[-1] += [slot for slot, _ in world.loaded.values()]
            world.check(world.names(9), "adapters with modules elsewhere")
        if slots[0] != slots[1]:
            raise Failed(f"equal loads went to the slots {slots[0]} in one stage and {slots[1]} in the other")


@check(Kind.LORA, "lora.batch.divided", Level.HOSTILE, needs={"divided": True}, cases=once)
def batch_divided(run: Run) -> None:
    """Plugins of two ranks: each reads whole adapters and adds by its part of every module, with padding at the end."""
    embeds = bool(run.subject.capabilities.embeddings.support)
    for rank in (0, 1):
        with LoraWorld(run, rank=rank, embeds=embeds) as world:
            _loaded(run, world)
            world.check(world.names(9), f"adapters of which rank {rank} has a part")
            world.unload("a0")
            world.load("again", world.adapter(ranks(run.subject)[0]))
            world.check(world.names(9), f"another adapter on rank {rank}")


@check(Kind.LORA, "lora.batch.separate", Level.HOSTILE, cases=once)
def batch_separate(run: Run) -> None:
    """A mixed batch gives each adapter's tokens what they get in a batch of their own, up to rounding."""
    with LoraWorld(run) as world:
        _loaded(run, world)
        names = world.names(world.max_tokens)
        for module in world.modules:
            world.plan(names)
            inputs, out = world.tensors(module)
            mixed = world.applied(module, inputs, out)
            for name in world.loaded:
                rows = [token for token, other in enumerate(names) if other == name]
                if rows:
                    world.plan([name] * len(rows))
                    alone = world.applied(module, inputs[rows], out[rows])
                    what = f"{name!r} alone and in a mix"
                    _close(run, world, module, inputs[rows], out[rows], mixed[rows], alone, what)


@check(Kind.LORA, "lora.batch.invariant", Level.HOSTILE, needs={"batch_invariant": True}, cases=by_dtype, cost=0.05)
def batch_invariant(run: Run) -> None:
    """If declared, a token's output is bitwise the same by itself and at any place in a mixed batch."""
    with LoraWorld(run, run["dtype"], batch_invariant=True) as world:
        _loaded(run, world)
        names = world.names(world.max_tokens)
        for module in world.modules:
            world.plan(names)
            inputs, out = world.tensors(module)
            mixed = world.applied(module, inputs, out)
            for count in (1, 2, 7):
                for first in run.rng.sample(range(len(names) - count + 1), 4):
                    some = slice(first, first + count)
                    world.plan(names[some])
                    if not torch.equal(world.applied(module, inputs[some], out[some]), mixed[some]):
                        where = f"{first} to {first + count - 1} of {len(names)}, of {names[some]}"
                        raise Failed(f"{module}: tokens {where}, have other bits in a batch of their own")


@check(Kind.LORA, "lora.batch.order", Level.HOSTILE, cases=once)
def batch_order(run: Run) -> None:
    """The same tokens in another order give the same outputs in that order, up to rounding."""
    with LoraWorld(run) as world:
        _loaded(run, world)
        names = world.names(world.max_tokens)
        for module in world.modules:
            world.plan(names)
            inputs, out = world.tensors(module)
            straight = world.applied(module, inputs, out)
            order = run.rng.sample(range(len(names)), len(names))
            world.plan([names[token] for token in order])
            shuffled = world.applied(module, inputs[order], out[order])
            _close(run, world, module, inputs[order], out[order], straight[order], shuffled, f"in the order {order}")


def _close(
    run: Run,
    world: LoraWorld,
    module: str,
    inputs: torch.Tensor,
    out: torch.Tensor,
    one: torch.Tensor,
    other: torch.Tensor,
    what: str,
) -> None:
    adapters = [None if name is None else world.loaded[name][1] for name in world.planned]
    right = expected(module, adapters, inputs, out)
    error = float((one.double() - other.double()).abs().max())
    run.measure(error=error, allowed=2 * right.allowed, baseline=right.baseline, what=f"{module}: {what}")


@check(Kind.LORA, "lora.ranks.padding", Level.HOSTILE, cases=once, cost=0.05)
def ranks_padding(run: Run) -> None:
    """A lower rank in a slot that held the highest: nothing of the higher ranks is heard."""
    choice = ranks(run.subject)
    if len(choice) == 1:
        raise NotApplicable("only rank 1 is declared")
    with LoraWorld(run) as world:
        for rank in choice[:-1]:
            world.fill()
            for index in range(world.max_adapters):
                world.load(f"a{index}", world.adapter(rank))
            world.check(world.names(12) + list(world.loaded), f"rank {rank} after rank {choice[-1]}")
            for name in tuple(world.loaded):
                world.unload(name)


@check(Kind.LORA, "lora.modules.untargeted", Level.HOSTILE, cases=once)
def modules_untargeted(run: Run) -> None:
    """An adapter on some modules, in slots that held one on all, leaves the other modules bit for bit as they were."""
    with LoraWorld(run) as world:
        world.fill()
        modules = list(world.modules)
        for index in range(world.max_adapters):
            world.load(f"a{index}", world.adapter(ranks(run.subject)[0], modules=modules[index::2]))
        world.check(world.names(12) + list(world.loaded), "adapters on some modules")


@check(Kind.LORA, "lora.plan.latest", Level.HOSTILE, cases=once)
def plan_latest(run: Run) -> None:
    """Only the latest plan counts, immediately: other slots, fewer tokens, none, and more again."""
    with LoraWorld(run) as world:
        _loaded(run, world)
        first = next(iter(world.loaded))
        for num_tokens in (world.max_tokens, 3, 0, 1, world.max_tokens - 1):
            world.check(world.names(num_tokens), f"after other plans, {num_tokens} tokens")
            world.check([first] * num_tokens, f"{num_tokens} tokens of one adapter")
            world.check([None] * num_tokens, f"{num_tokens} tokens without one")


@check(Kind.LORA, "lora.apply.strided", Level.HOSTILE, cases=once)
def apply_strided(run: Run) -> None:
    """`out` may be columns of a wider tensor, as in a merged projection, and the other columns are unchanged."""
    with LoraWorld(run) as world:
        _loaded(run, world)
        world.plan(world.names(10) + list(world.loaded))
        for module in world.modules:
            inputs, out = world.tensors(module)
            wide = torch.full((len(out), out.shape[1] + 24), 7.0, dtype=out.dtype, device=out.device)
            view = wide[:, 8 : 8 + out.shape[1]]
            view.copy_(out)
            world.lora.apply(module, inputs, view)
            world.compare(module, inputs, out, view, "out as columns of a wider tensor")
            beside = torch.cat((wide[:, :8], wide[:, 8 + out.shape[1] :]), dim=1)
            if not bool((beside == 7.0).all()):
                raise Failed(f"{module}: columns beside `out` were written")


@check(Kind.LORA, "lora.inputs.unchanged", Level.HOSTILE, cases=once)
def inputs_unchanged(run: Run) -> None:
    """Neither the inputs nor the slots that were planned are written to."""
    with LoraWorld(run) as world:
        _loaded(run, world)
        chosen = [slot for slot, _ in world.loaded.values()] + [-1, -1]
        slots = torch.tensor(chosen, dtype=torch.int64, device=run.subject.device.type)
        world.lora.plan(slots)
        for module in world.modules:
            inputs, out = world.tensors(module, len(chosen))
            before = inputs.clone()
            world.lora.apply(module, inputs, out)
            if not torch.equal(inputs, before):
                raise Failed(f"{module}: the inputs were changed")
        if slots.tolist() != chosen:
            raise Failed(f"the planned slots were changed from {chosen} to {slots.tolist()}")
