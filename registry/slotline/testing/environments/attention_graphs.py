"""Captured step of attention and its replays, as an engine drives them.

The rules are in `slotline.registry.contracts.attention`, under `graphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionBatch
from slotline.registry.contracts.prefix_groups import MAX_SEGMENTS, PrefixGroups
from slotline.testing.check import Failed
from slotline.testing.environments.attention import threads
from slotline.testing.environments.attention_history import Pool, Step
from slotline.testing.environments.attention_variants import (
    Segment,
    announce_prefix,
    announce_segments,
    prefix_groups,
    segment_arrays,
)

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function once and returns what repeats its work on the device."""

WARM_UPS = 2
Int = npt.NDArray[np.int32]


def cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Capture the kernels of a step. The result launches them again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def call_again(step: Callable[[], None]) -> Callable[[], None]:
    """Return a function that repeats the same calls with the same objects, for devices without capture."""
    step()
    return step


class GraphPool(Pool):
    """Pool whose steps can be prepared without running them."""

    def prepare(self, new_tokens: Mapping[int, int]) -> Step:
        """Extend the requests by their new tokens, and return the step for a backend."""
        for number, count in new_tokens.items():
            self._grow(number, count)
        return Step(self, new_tokens)


def announce_common_prefix(step: Step) -> int:
    """Put the common prefix of a step's requests into its batch, in whole blocks, and return its length."""
    size = step.case.block_size
    most = min(length - query_len for query_len, length in step.case.requests) // size
    same = (step.host_table[:, :most] == step.host_table[0, :most]).all(0).tolist()
    length = (same.index(False) if False in same else most) * size
    announce_prefix(step, length)
    return length


def announce_groups(step: Step, levels: int) -> list[Segment]:
    """Put the prefixes that groups of a step's requests share into its batch, in whole blocks, and return them."""
    size, requests = step.case.block_size, step.case.requests
    blocks = [step.host_table[i, : (end - count) // size].tolist() for i, (count, end) in enumerate(requests)]
    found: list[Segment] = []

    def search(among: list[int], first: int, level: int) -> None:
        leads = {blocks[i][first]: 0 for i in among if len(blocks[i]) > first}
        for lead in leads if level < levels else ():
            group = [i for i in among if len(blocks[i]) > first and blocks[i][first] == lead]
            if len(group) > 1:
                alike = (len(set(column)) for column in zip(*(blocks[i][first:] for i in group), strict=False))
                end = first + sum(1 for _ in takewhile(lambda count: count == 1, alike))
                found.append(Segment(group, first * size, end * size, level))
                search(group, end, level + 1)

    search(list(range(len(requests))), 0, 0)
    found.sort(key=lambda one: one.level)
    announce_segments(step, found)
    return found


class CapturedStep:
    """Write and forward for one batch shape, captured with dummy requests.

    Args:
        pool: the pool whose requests and cache are used. Its backend is captured.
        rows: requests of the shape.
        query_len: query tokens of each request, in a mixed shape on average.
        mixed: True if requests may have different query lengths.
        record: `cuda_graph` or `call_again`.
        cascade: True if the batches have a common prefix.
        levels: of prefixes of groups that the batches have, 0 for none.
        plan_once: True if the plan of the capture is valid for every replay. Every second replay is not planned then.
    """

    def __init__(
        self,
        pool: GraphPool,
        rows: int,
        query_len: int,
        *,
        mixed: bool,
        record: Recorder,
        cascade: bool = False,
        levels: int = 0,
        plan_once: bool = False,
    ) -> None:
        self._plan_once, self._launches = plan_once, 0
        self.pool, self.rows, self.query_len, self.mixed = pool, rows, query_len, mixed
        case, layer, device = pool.case, pool.home.layer, pool.home.device
        self.tokens = rows * query_len
        self.width = -(-pool.longest // case.block_size) + 2
        ints = {"query_start_loc": rows + 1, "seq_lens": rows, "common_prefix": 1}
        longs = {"slot_mapping": self.tokens, "positions": self.tokens}
        self.tensors = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in ints.items()}
        self.tensors |= {name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in longs.items()}
        self.tensors["block_table"] = torch.zeros(rows, self.width, dtype=torch.int32, device=device)
        shapes = [(case.num_heads, case.head_size), (case.num_kv_heads, case.head_size)]
        shapes.append((case.num_kv_heads, layer.head_size_v))
        self.inputs = [torch.zeros(self.tokens, *shape, dtype=case.dtype, device=device) for shape in shapes]
        self.out = torch.zeros(self.tokens, case.num_heads, layer.head_size_v, dtype=case.dtype, device=device)
        starts = np.arange(rows + 1, dtype=np.int32) * query_len
        self.tensors["query_start_loc"].copy_(torch.from_numpy(starts))
        self.tensors["slot_mapping"].fill_(-1)
        self.tensors["seq_lens"].fill_(pool.longest)
        lengths = np.full(rows, pool.longest, np.int32)
        before = pool.longest - query_len
        prefix = before // case.block_size * case.block_size if cascade else 0
        self.tensors["common_prefix"].fill_(prefix)
        self._levels, self._groups = levels, None
        if levels:
            whole = Segment(range(rows), 0, before // case.block_size * case.block_size)
            self._groups = prefix_groups(segment_arrays([whole], starts, (MAX_SEGMENTS, levels)), levels, device)
        self._replay = self._captured(self._batch(starts, lengths, self.width, prefix), record)

    def _captured(self, batch: AttentionBatch, record: Recorder) -> Callable[[], None]:
        pool = self.pool
        with threads(1):
            plan = pool.backend.plan(batch)

            def step() -> None:
                if not pool.writes_cache:
                    pool.backend.write(pool.home.layer, *self.inputs[1:], pool.home.cache, plan)
                pool.backend.forward(pool.home.layer, *self.inputs, pool.home.cache, plan, self.out, pool.home.sinks)

            return record(step)

    def _batch(self, starts: Int, lengths: Int, width: int, prefix: int) -> AttentionBatch:
        counts = np.diff(starts)
        longest = int(counts.max(initial=0))
        singles = next((row for row, count in enumerate(counts) if count != 1), self.rows)
        return AttentionBatch(
            num_requests=self.rows,
            num_tokens=int(starts[-1]),
            max_query_len=longest,
            max_seq_len=int(lengths.max(initial=0)),
            query_start_loc=self.tensors["query_start_loc"],
            seq_lens=self.tensors["seq_lens"],
            block_table=self.tensors["block_table"][:, :width],
            slot_mapping=self.tensors["slot_mapping"],
            positions=self.tensors["positions"],
            query_start_loc_cpu=starts,
            seq_lens_cpu=lengths,
            num_decodes=singles,
            common_prefix_len=prefix,
            common_prefix=self.tensors["common_prefix"] if prefix else None,
            prefix_groups=self._groups,
        )

    def launch(self, step: Step) -> torch.Tensor:
        """Fill, plan and replay. Return a copy of the output without waiting for it, [tokens of the shape, H, Dv]."""
        batch = self._fill(step)
        self._launches += 1
        if not self._plan_once or self._launches % 2 == 0:
            with threads(1):
                self.pool.backend.plan(batch)
        self._replay()
        return self.out.clone()

    def check(self, step: Step, out: torch.Tensor, what: str) -> None:
        """Compare with the oracle.

        Raises:
            Failed: if an output is wrong or a padded row is not finite. `what` begins the message.
        """
        real = step.batch.num_tokens
        if not bool(torch.isfinite(out[real:]).all()):
            raise Failed(f"{what}: padded rows of out, from {real} on, are not finite")
        try:
            step.check(out[:real])
        except Failed as error:
            raise Failed(f"{what}: {error}") from error

    def _fill(self, step: Step) -> AttentionBatch:
        """Copy a step into the captured tensors, on the device, in stream order."""
        made, real = step.batch, step.batch.num_tokens
        missing = self.rows - made.num_requests
        more = np.arange(1, missing + 1, dtype=np.int32) * (0 if self.mixed else self.query_len)
        starts = np.concatenate([made.query_start_loc_cpu, real + more]).astype(np.int32)
        lengths = np.pad(made.seq_lens_cpu, (0, missing))
        width = max(1, -(-int(lengths.max(initial=0)) // self.pool.case.block_size))
        present = slice(0, made.num_requests)
        self.tensors["query_start_loc"][: made.num_requests + 1].copy_(made.query_start_loc)
        for row, start in enumerate(starts[made.num_requests + 1 :].tolist(), made.num_requests + 1):
            self.tensors["query_start_loc"][row].fill_(start)
        self.tensors["seq_lens"].zero_()
        self.tensors["seq_lens"][present].copy_(made.seq_lens)
        self.tensors["block_table"].zero_()
        self.tensors["block_table"][present, :width].copy_(made.block_table[:, :width])
        self.tensors["slot_mapping"].fill_(-1)
        self.tensors["positions"].zero_()
        for name in ("slot_mapping", "positions"):
            self.tensors[name][:real].copy_(getattr(made, name)[:real])
        for static, new in zip(self.inputs, step.new_tokens(), strict=True):
            static.zero_()
            static[:real].copy_(new[:real])
        self.tensors["common_prefix"].fill_(made.common_prefix_len)
        if self._groups is not None:
            self._groups = self._filled(self._groups, step, starts)
        return self._batch(starts, lengths, width, made.common_prefix_len)

    def _filled(self, groups: PrefixGroups, step: Step, starts: Int) -> PrefixGroups:
        """Copy a step's prefixes of groups into the captured tensors. Host copies are new."""
        arrays = segment_arrays(announce_groups(step, self._levels), starts, (MAX_SEGMENTS, self._levels))
        for name, array in arrays.items():
            getattr(groups, name).copy_(torch.from_numpy(array))
        hosts: dict[str, Any] = {f"{name}_cpu": array for name, array in arrays.items()}
        return evolve(groups, **hosts)
