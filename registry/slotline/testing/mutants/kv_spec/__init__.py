"""Broken cache specs, one bug each, and right ones that differ."""

from __future__ import annotations

from typing import Any

import attrs

from slotline.registry.capability import Align, Flag, Set
from slotline.registry.contracts import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.kv_spec import blocks, memory, right, states, tensors
from slotline.testing.reference import kv_spec as reference


def _mutant(name: str, summary: str, level: Level, factory: Any) -> Mutant:
    changed = attrs.evolve(
        reference.descriptor, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory
    )
    return Mutant(name, summary, level, changed)


LATENTS = KVSpecCapabilities(kv_kinds=Set(("mla",)), exact_kinds=Set(("mla",)))


def _of_latents(name: str, summary: str, level: Level, factory: Any) -> Mutant:
    made = _mutant(name, summary, level, factory)
    return attrs.evolve(made, descriptor=attrs.evolve(made.descriptor, capabilities=LATENTS))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("forgets-values", "its pages have room for keys alone", Level.NUMERICS, memory.ForgetsValues),
    _mutant("kernel-page", "its pages have room for one kernel block", Level.NUMERICS, memory.PageOfKernelBlock),
    _mutant("two-bytes", "takes each element for two bytes", Level.NUMERICS, memory.TwoBytesAlways),
    _mutant("value-head", "gives value heads the size of key heads", Level.NUMERICS, memory.ValueHeadLikeKeyHead),
    _mutant(
        "last-dtype",
        "keeps the dtype in the class: the last spec's goes for all",
        Level.HOSTILE,
        memory.LastDtypeForAll,
    ),
    _mutant("ignores-layout", "binds NHD whatever was negotiated", Level.NUMERICS, memory.IgnoresLayout),
    _mutant(
        "whole-blocks", "shows one kernel block of each block that is split", Level.NUMERICS, memory.WholeBlocksOnly
    ),
    _mutant("values-over-keys", "binds the values where the keys are", Level.HOSTILE, memory.ValuesOverKeys),
    _of_latents(
        "latents-beside-values", "gives values of latents their own memory", Level.HOSTILE, memory.LatentsBesideValues
    ),
    _of_latents(
        "latents-behind", "takes a latent's last numbers for its value", Level.HOSTILE, memory.LatentsBehindPositions
    ),
    _mutant("copy", "binds a copy of the memory", Level.HOSTILE, memory.BindsACopy),
    _mutant(
        "storage-start",
        "binds from the storage's start, not from the tensor's",
        Level.HOSTILE,
        memory.BindsFromTheStoragesStart,
    ),
    _mutant("packs-pages", "copies pages that lie apart into one piece", Level.HOSTILE, memory.PacksPages),
    _mutant("one-block", "all blocks' keys are those of the first", Level.HOSTILE, memory.OneBlockForAll),
    _mutant("edge-needs-more", "a full block needs one more", Level.NUMERICS, blocks.OneMoreAtTheEdge),
    _mutant("begun-block", "does not count the block that is begun", Level.NUMERICS, blocks.ForgetsTheBegunBlock),
    _mutant("block-for-nothing", "needs a block for no token", Level.NUMERICS, blocks.BlockForNothing),
    _mutant(
        "held-too-few", "forgets that a window may begin in the middle of a block", Level.NUMERICS, blocks.HoldsTooFew
    ),
    _mutant("never-frees", "says that it is exact and frees nothing", Level.NUMERICS, blocks.HoldsForever),
    _mutant("third-answer", "the third answer to a question is another one", Level.HOSTILE, blocks.ThirdAnswer),
    _mutant("frees-early", "gives back one block too many", Level.NUMERICS, blocks.FreesOneEarly),
    _mutant("window-less-one", "takes a window of W for W - 1 tokens", Level.NUMERICS, blocks.WindowWithoutTheQuery),
    _mutant("rounds-up", "gives back a block that the window has half left", Level.NUMERICS, blocks.RoundsUp),
    _mutant(
        "takes-back", "what was given back is needed again behind an edge", Level.NUMERICS, blocks.TakesBackAtEdges
    ),
    _mutant("high-water", "frees for one request what another has left behind", Level.HOSTILE, blocks.HighWaterMark),
    _mutant("skips-holes", "leaves a missing block out and goes on", Level.HOSTILE, blocks.SkipsHoles),
    _mutant(
        "null-for-holes", "puts the null block where a readable block is missing", Level.HOSTILE, blocks.NullForHoles
    ),
    _mutant("null-too-many", "puts the null block where the window still reads", Level.NUMERICS, blocks.OneNullTooMany),
    _mutant(
        "window-in-prefix",
        "resumes on the last block, however wide the window",
        Level.NUMERICS,
        blocks.WindowForgotInPrefix,
    ),
    _mutant("from-the-start", "misses prefixes whose unread beginning is gone", Level.HOSTILE, blocks.FromTheStartOnly),
    _mutant("drops-the-last", "never finds the last block", Level.NUMERICS, blocks.DropsTheLastBlock),
    _mutant("remembers-lookups", "answers with blocks that were cached once", Level.HOSTILE, blocks.RemembersLookups),
    _mutant(
        "trusts-the-last",
        "takes an old answer while the last block is in its place",
        Level.STATEFUL,
        blocks.TrustsTheLastBlock,
    ),
    *states.MUTANTS,
    *tensors.MUTANTS,
)

CORRECT: tuple[Correct, ...] = (
    Correct("keys then values in each kernel block; frees to the block", reference.descriptor),
    Correct(
        "keys beside values, padded; frees one block later",
        attrs.evolve(reference.descriptor, name="interleaved_padded", factory=right.InterleavedPadded),
    ),
    Correct(
        "keys before values, blocks of 48, 96, ..., neither split nor shared; holds sliding layers with waste",
        Descriptor(
            kind=Kind.KV_SPEC,
            name="planes",
            capabilities=KVSpecCapabilities(
                kv_kinds=Set(("full", "sliding")),
                exact_kinds=Set(("full",)),
                block_sizes=Align(multiple_of=48),
                splittable=Flag(False),
                prefix_caching=Flag(False),
            ),
            factory=right.Planes,
        ),
    ),
    Correct(
        "latents that hold their values",
        attrs.evolve(reference.descriptor, name="latents", factory=right.Latents, capabilities=LATENTS),
    ),
    Correct(
        "a kind of its own, one block for each request",
        Descriptor(
            kind=Kind.KV_SPEC,
            name="one_block",
            capabilities=KVSpecCapabilities(
                kv_kinds=Set(("summary",)), exact_kinds=Set(("summary",)), prefix_caching=Flag(False)
            ),
            factory=right.OneBlock,
        ),
    ),
    *states.CORRECT,
    *tensors.CORRECT,
)
