"""Which kernels Triton would compile for batches of many sizes; run as a program, with the kinds as its arguments.

A rehearsal is written ``rehearsal,64,8,100`` with the most tokens and requests of a step and the most of a request.

No GPU is needed: launches go as far as Triton's question which kernel they need, and are left out.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from logging import getLogger
from logging.handlers import QueueHandler
from queue import SimpleQueue
from random import Random
from typing import Any

import torch
import triton
from attrs import evolve
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

COUNTS = (1, 2, 3, 15, 16, 17, 32, 33, 48, 100)
STATES: dict[str, dict[str, Any]] = {
    "short_conv": {"channels": 128, "width": 4, "activation": "silu"},
    "mamba1": {"channels": 128, "state_size": 16, "dt_softplus": True},
    "mamba2": {"num_heads": 4, "head_size": 32, "num_groups": 2, "state_size": 32, "dt_softplus": True},
    "gated_delta": {
        "num_k_heads": 2, "num_v_heads": 2, "head_size_k": 32, "head_size_v": 32, "qk_l2norm": True, "scale": 0.3,
    },
}  # fmt: skip

SMALL: dict[str, Any] = {"num_kv_heads": 2, "num_heads": 8, "head_size": 16}

Forms = dict[tuple[Any, ...], set[tuple[tuple[str, str], ...]]]
"""By kernel and its compile-time constants: what it is compiled for, as a form of each other argument."""


class Card:
    """A driver without a card."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def listen() -> Forms:
    """Note what launches need from now on, and leave them out."""
    forms: Forms = defaultdict(set)

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        params = fn.jit_function.params
        constants = {params[place].name: value for (place,), value in compile["constants"].items()}
        declared = tuple((p.name, str(constants[p.name])) for p in params if p.is_constexpr and p.name in constants)
        aligned = {params[place].name for (place,), what in compile["configs"][0].items() if what}
        rest = [p.name for p in params if not p.is_constexpr]
        form = tuple((n, "1" if n in constants else compile["signature"][n] + "/16" * (n in aligned)) for n in rest)
        forms[fn.module, fn.name, declared, compile["num_warps"], compile["num_stages"]].add(form)
        return True

    triton.knobs.runtime.jit_cache_hook = note
    return forms


def draw_no_numbers() -> None:
    """Nothing runs that would read them: queries, keys and caches are memory as it comes."""
    from slotline.testing.environments.attention import World

    World.random = lambda world, *shape, times=1.0: torch.empty(*shape, dtype=world.case.dtype)
    World._poison = World.store = lambda *_: None


def attention(**more: Any) -> None:
    """Decoding, prompts, both, and several tokens of each request."""
    for n in COUNTS:
        for requests in (
            tuple((1, 40 + i) for i in range(n)),
            ((n, n),),
            ((1, 33), (n, n + 7), (1, 70)),
            tuple((5, 41 + i) for i in range(n)),
            ((1, 1000),) * n,
        ):
            attended(requests, **more)


def attended(requests: tuple[tuple[int, int], ...], *, strided: bool = False, **more: Any) -> None:
    """The attention of a step, of requests with so many query tokens and so many keys.

    `strided`: the heads of query and key are expanded, the table is a slice, and heads of `out` lie apart.
    """
    from slotline.backends.triton.backend import TritonBackend
    from slotline.backends.triton.latents import TritonLatents
    from slotline.testing.environments.attention import Case, World

    build: Callable[..., Any] = TritonLatents if "mla" in more else TritonBackend
    world = World(Case(requests=requests, dtype=torch.bfloat16, block_size=32, **more).friendly())
    fixed = torch.zeros(len(requests), 64, dtype=torch.int32)[:, : world.block_table.shape[1]]
    fixed.copy_(world.block_table)  # as wide in memory whatever the batch, as the engine's are on a GPU
    if strided:
        fixed = torch.zeros(len(requests) + 1, 128, dtype=torch.int32)[1:, 64:]
    world.batch.block_table = fixed
    backend = build(world.case.context("cpu"))
    plan = backend.plan(world.batch)
    query, key, value = world.new_tokens()
    out = torch.zeros(*query.shape[:2], world.layer.head_size_v, dtype=query.dtype)
    if strided:
        query, key = (part[:, :1].expand(part.shape) for part in (query, key))
        out = torch.zeros(out.shape[1], len(out) + 2, out.shape[2] + 16, dtype=out.dtype)[:, 1:-1, :-16].transpose(0, 1)
    if getattr(plan, "takes_edges", False):
        backend.forward(world.layer, query, key, value, world.cache, plan, out, edges=edges_of(query))
        return
    backend.write(world.layer, key, value, world.cache, plan)
    backend.forward(world.layer, query, key, value, world.cache, plan, out)


def edges_of(query: torch.Tensor) -> Any:
    """Return norms and a rotation, as the engine hands them over in steps that take them."""
    from slotline.registry.contracts.attention_edges import AttentionEdges, HeadNorm

    norm = HeadNorm(weight=query.new_zeros(query.shape[2]), eps=1e-6)
    angles = query.new_zeros(len(query), query.shape[2])
    return AttentionEdges(query_norm=norm, key_norm=norm, cos=angles, sin=angles, rotary_size=query.shape[2])


def rehearsed(forms: Forms, most_tokens: int, most_requests: int, longest: int) -> Forms:
    """What steps of an engine with such limits launch that the steps of a rehearsal do not."""
    from slotline.backends.cuda.compiler import steps

    for lens, past in steps(most_tokens, most_requests, longest):
        attended(tuple((n, n if past is None else past) for n in lens), **SMALL)
    known = set(forms)
    for seed in range(150):
        rng, left, requests = Random(seed), most_tokens, list[tuple[int, int]]()
        decodes = rng.choice((0, 0, 1, 5, most_requests // 2, most_requests))
        while left and len(requests) < most_requests:
            count = 1 if len(requests) < decodes else min(left, longest, rng.choice((1, 2, 3, 6, 12, 20, 40, 90, 300)))
            requests.append((count, count if rng.random() < 0.4 else rng.randint(count, longest)))
            left -= count
            if rng.random() < 0.2 and len(requests) > decodes:
                break
        attended(tuple(sorted(requests, key=lambda one: (one[0] > 1, one[0] == one[1]))), **SMALL)
    return {key: found for key, found in forms.items() if key not in known}


def hopper() -> None:
    """The kernels for Hopper, and whether they compile under this Triton."""
    launches = [*map(hopper_latents, COUNTS), *map(hopper_prompts, COUNTS)]
    launches += map(hopper_decodes, COUNTS)
    assert compiled(launches[:: len(COUNTS)]) == 3


def compiled(launches: Iterable[Callable[[], Any]]) -> int:
    """Compile the kernels of some launches, and return their number."""
    from slotline.kernels import triton_precompile as compiling

    asked = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = None
    with compiling.leaving_out(missing := {}):
        for launch in launches:
            launch()
    for kernel, specialization in missing.values():
        kernel.preload(specialization)
    triton.knobs.runtime.jit_cache_hook = asked
    return len(missing)


def indexed() -> None:
    """Latents among which an index picks, and whether the kernels for this compile."""
    launches = [indexed_latents(n) for n in COUNTS]
    assert compiled(launches[:1]) == 5


def indexed_latents(n: int) -> Callable[[], Any]:
    """Decodes, prompts and both among picks; the last of the launches, to be made again."""
    from slotline.backends.triton.indexed import TritonIndexed
    from slotline.testing.environments.attention import Case
    from slotline.testing.environments.attention_index import IndexedWorld

    sizes: dict[str, Any] = {"mla": True, "num_kv_heads": 1, "num_heads": 4, "head_size": 48, "head_size_v": 32}
    sizes |= {"index_topk": 30, "index_heads": 16, "index_size": 32, "cache_format": "latent_index"}

    def launch() -> None:
        backend = TritonIndexed(world.case.context("cpu"))
        backend._cores = 132
        plan = backend.plan(world.batch)
        query, key, value = world.new_tokens()
        out = torch.zeros(*query.shape[:2], 32, dtype=query.dtype)
        backend.write(world.layer, key, value, world.cache, plan, **world.inputs())
        backend.forward(world.layer, query, key, value, world.cache, plan, out, **world.inputs())

    for requests in (((1, 300),) * n, ((n, n + 50), (9, 80)), ((1, 40), (n, 3 * n + 7))):
        world = IndexedWorld(Case(requests=requests, dtype=torch.bfloat16, block_size=64, **sizes).friendly())
        world.batch.block_table = torch.zeros(len(requests), 64, dtype=torch.int32)
        launch()
    return launch


def uncompiled() -> None:
    """Whether a kernel for Hopper that Triton fails to compile was launched, asked twice, and what is said of it."""
    from slotline.backends.triton import decode_hopper

    launch, said = hopper_decodes(1), QueueHandler(SimpleQueue())
    getLogger("slotline").addHandler(said)
    asked, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, None
    kept, decode_hopper.load_rows = decode_hopper.load_rows, object()
    sys.stdout.write(f"launched: {launch()}, {launch()}\n")
    decode_hopper.load_rows, triton.knobs.runtime.jit_cache_hook = kept, asked
    sys.stdout.writelines(f"{said.queue.get().getMessage()}\n" for _ in range(said.queue.qsize()))


def hopper_latents(n: int) -> Callable[[], bool]:
    """Latents of requests and prompts; the last of the launches, to be made again."""
    from slotline.backends.triton.latent_hopper import HopperLatents
    from slotline.backends.triton.latents import TritonLatents
    from slotline.testing.environments.attention import Case, World

    sizes: dict[str, Any] = {"mla": True, "num_kv_heads": 1, "num_heads": 16, "head_size": 576, "head_size_v": 512}
    for requests in (((1, 3000),) * n, ((n, n + 50), (9, 80))):
        world = World(Case(requests=requests, dtype=torch.bfloat16, block_size=64, **sizes).friendly())
        world.batch.block_table = torch.zeros(len(requests), 64, dtype=torch.int32)
        query, _, _ = world.new_tokens()
        out, lse = torch.zeros(len(query), 16, 512, dtype=query.dtype), torch.empty(16, len(query))
        for launch in TritonLatents(world.case.context("cpu")).plan(world.batch).launches:
            rows = (len(query), 16, launch.splits)
            parts, norms = torch.empty(*rows, 512), torch.empty(*rows, 2)
            given = (world.layer, query, world.cache, world.batch, launch, out, lse, parts, norms)
            assert HopperLatents(64).attend(*given)
    return partial(HopperLatents(64).attend, *given)


def hopper_prompts(n: int) -> Callable[[], bool]:
    """Prompts of many lengths, as `hopper_latents`."""
    from slotline.backends.triton.backend import TritonBackend
    from slotline.backends.triton.prompt_hopper import HopperPrompts
    from slotline.testing.environments.attention import Case, World

    sizes: dict[str, Any] = {"num_kv_heads": 2, "num_heads": 8, "head_size": 128}
    for requests in (((200, 200),) * n, ((40 * n, 40 * n), (n, n), (400, 400))):
        world = World(Case(requests=requests, dtype=torch.bfloat16, block_size=64, **sizes).friendly())
        launch = TritonBackend(world.case.context("cpu")).plan(world.batch).prompts
        query, key, value = world.new_tokens()
        out, lse = torch.zeros_like(query), torch.empty(8, len(query))
        given = (world.layer, query, key, value, world.batch, launch, out, lse)
        assert HopperPrompts(4, "cpu", 132).attend(*given)
    return partial(HopperPrompts(4, "cpu", 132).attend, *given)


def hopper_decodes(n: int) -> Callable[[], bool]:
    """Single tokens of so many requests, and of some of them; the last of the launches, to be made again."""
    from slotline.backends.triton.decode_hopper import HopperDecodes
    from slotline.testing.environments.attention import Case, World

    sizes: dict[str, Any] = {"num_kv_heads": 2, "num_heads": 8, "head_size": 128}
    for requests in (((1, 3000),) * n, tuple((1, 40 + i) for i in range(n))):
        world = World(Case(requests=requests, dtype=torch.bfloat16, block_size=16, **sizes).friendly())
        world.batch.block_table = torch.zeros(len(requests), 256, dtype=torch.int32)
        query, _, _ = world.new_tokens()
        out, lse = torch.zeros_like(query), torch.empty(8, len(query))
        given = (world.layer, query, world.cache, world.batch, n, out, lse)
        assert HopperDecodes(world.case.context("cpu"), 32).attend(*given)
    return partial(HopperDecodes(world.case.context("cpu"), 32).attend, *given)


def strides() -> None:
    """Batches whose inputs and results are expanded or sliced, which need no other kernels than dense ones."""
    for n in COUNTS:
        for strided in (False, True):
            attended(((1, 40),) * n, strided=strided, head_size=128)
            attended(((n, n), (3, 50)), strided=strided, head_size=128)


def trees() -> None:
    """Latents of requests that verify a tree, with an index and without, and whether the kernels for this compile."""
    from slotline.backends.triton.build import build
    from slotline.testing.environments.attention import Case, World
    from slotline.testing.environments.attention_index import IndexedWorld

    sizes: dict[str, Any] = {"mla": True, "num_kv_heads": 1, "num_heads": 16, "head_size": 96, "head_size_v": 64}
    index: dict[str, Any] = {"index_topk": 30, "index_heads": 16, "index_size": 32, "cache_format": "latent_index"}

    def launch(n: int, known: int, kind: type[World], **more: Any) -> None:
        both = {
            "requests": ((9, known),) * n,
            "num_nodes": (8,) * n,
            "request_parents": ((-1, 0, 0, 1, 1, 2, 2, 3),) * n,
        }
        world = kind(Case(**both, dtype=torch.bfloat16, block_size=64, **sizes, **more).friendly())
        world.batch.block_table = torch.zeros(n, 64, dtype=torch.int32)
        backend = build(world.case.context("cpu"))
        plan = backend.plan(world.batch)
        query, key, value = world.new_tokens()
        out = torch.zeros(*query.shape[:2], 64, dtype=query.dtype)
        backend.forward(world.layer, query, key, value, world.cache, plan, out, **world.inputs())

    for n in COUNTS[:6]:
        launch(n, 40, World)
        launch(n, 40, IndexedWorld, **index)
    assert compiled([partial(launch, 2, 40, World), partial(launch, 2, 40, IndexedWorld, **index)]) == 4


def states() -> None:
    """Every kind of state layer: single tokens, prompts, both, verifying steps."""
    from negotiation_cases import CPU

    from slotline.backends.triton_state import descriptor
    from slotline.backends.triton_state.backend import TritonState
    from slotline.registry.capability import Set
    from slotline.testing.environments.state import Part, make_problem, surround
    from slotline.testing.subject import Subject

    capabilities = evolve(descriptor.capabilities, devices=Set(("cpu",)))
    made = evolve(descriptor, factory=TritonState, probe=None, capabilities=capabilities)
    subject = Subject(descriptor=made, device=CPU, capabilities=capabilities, contract=1)
    for kind, facts in STATES.items():
        problem = make_problem(kind, ("bfloat16", "bfloat16" if kind == "short_conv" else "float32"), facts)
        for n in COUNTS:
            for lens in ([1] * n, [n], [1] * n + [n], [n] * 3, [4] * n, [1] * 3 + [70] * n):
                around = surround(subject, [problem], num_slots=len(lens) + 1, hostile=False)
                parts = [Part(slot=i, tokens=(problem.tokens(count, i),)) for i, count in enumerate(lens)]
                plan, inputs = around.backend.plan(around.batch(parts)), around.inputs(0, parts)[0]
                around.backend.forward(problem.layer, inputs, around.state(0), plan)


def logits() -> None:
    """What grammars, marks and penalties launch for rows and tokens of all numbers, and a rehearsal before."""
    import numpy as np

    from slotline.backends.cuda import triton_logits_ops as triton_rows
    from slotline.backends.cuda.triton_ops import TritonOps
    from slotline.builder.dry_runs import rare_operations
    from slotline.plugins.logits_processors.penalties import device_counts
    from slotline.registry.contracts import LogitsBatch

    vocab_size, rng = 1000, np.random.default_rng(0)
    rare_operations(vocab_size, "cpu", TritonOps("cpu"))
    device_counts.warm_up(vocab_size, "cpu")
    counts = device_counts.DeviceCounts(2 * max(COUNTS), vocab_size, "cpu")
    for n in COUNTS:
        x, flat = torch.zeros(n, vocab_size), torch.zeros(n + 1, dtype=torch.int64)
        words = torch.zeros(n, triton.cdiv(vocab_size, 32), dtype=torch.int32)
        triton_rows.ban_by_bitmask(x, words, torch.zeros(n + 1, dtype=torch.int32)[1:])
        for touched, greedy in ((None, True), (torch.ones(n + 1, dtype=torch.bool)[1:], False)):
            triton_rows.mark_unusable(x, x, touched, flat[1:], not_finite=-2, none_left=-3, all_greedy=greedy)
        for num_drafts, lens in ((None, [n] * n), (1, [n * 70] * n), (3, [n + 1, *[9] * (n - 1)])):
            rows = rng.permutation(2 * max(COUNTS))[:n]
            batch = LogitsBatch(
                rows=rows,
                draft_positions=np.zeros(n, np.int64),
                token_table=np.zeros((2 * max(COUNTS), 70 * max(COUNTS)), np.int32),
                num_tokens=np.array(lens),
                num_prompt_tokens=np.array(lens),
                draft_token_ids=None if num_drafts is None else np.zeros((n, num_drafts), np.int64),
            )
            counts.apply(x, batch, np.ones((3, 2 * max(COUNTS)), np.float32))


def report(kind: str, *limits: str) -> None:
    """Print each kernel with several forms, and the arguments that make the difference; then how many there are."""
    forms = listen()
    if kind == "rehearsal":
        for module, name, *rest in (lacking := rehearsed(forms, *map(int, limits))):
            sys.stdout.write(f"{module}.{name} was not rehearsed: {rest}\n")
        sys.stdout.write(f"{len(forms) - len(lacking)} kernels\n")
        return
    if kind == "states":
        states()
    elif kind == "logits":
        logits()
    elif kind == "hopper":
        hopper()
    elif kind == "uncompiled":
        uncompiled()
        return
    elif kind in ("indexed", "strides", "trees"):
        {"indexed": indexed, "strides": strides, "trees": trees}[kind]()
    elif kind == "latents":
        attention(mla=True, num_kv_heads=1, num_heads=16, head_size=576, head_size_v=512)
    else:
        attention(head_size=128)
        attention(head_size=128, window=17)
    for (module, name, *_), found in forms.items():
        if len(found) > 1:
            varied = {which for which, *rest in zip(*found, strict=True) if any(one != which for one in rest)}
            arguments = ", ".join(sorted(argument for argument, _ in varied))
            sys.stdout.write(f"{module}.{name} in {len(found)} forms: {arguments}\n")
    sys.stdout.write(f"{len(forms)} kernels\n")


def main(*kinds: str) -> None:
    """A report of each kind, below its name."""
    driver.set_active(Card())
    draw_no_numbers()
    for kind in kinds:
        sys.stdout.write(f"== {kind}\n")
        report(*kind.split(","))


if __name__ == "__main__":
    main(*sys.argv[1:])
