"""Requests that share prefixes, end to end on a model of random weights, beside what the card could do at best.

    python benchmarks/shared_prefixes_gpu.py benchmarks/models/llama-3.1-8b [--form one groups levels apart]
        [--requests 128] [--shared 2048] [--own 64] [--out 128] [--groups 4] [--runs 2] [--profile 0]
        [--set attention.cascade=false] [--json FILE]

All requests arrive together. `one` is a prefix of all requests, `groups` as many prefixes of equal length, each of an
equal part of the requests, `levels` a prefix of all with half of the tokens and then one for each group with the other
half, `apart` as many tokens of which none is shared. Each form runs once to warm up, then so many times; the best
counts. The limit is the time to read the weights and each key once in a step, those of a prefix once for all that share
it, or to do the operations, whichever is longer, at the rates of a large copy and a large product on this card, which
are measured first. Printed too: blocks that hold prompts and the fewest possible, steps by how they ran, and with
`--profile N` the kernels of N steps from the middle of each form.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from card_rates import Rates, measured_rates
from command_line import at_least, positive, require_gpus
from engine_gpu import build, profiled
from result_file import write_result

from slotline.cli.bench_run import Run, timed_runs
from slotline.cli.workloads import HIGHEST_TOKEN, Workload
from slotline.core import LLM

SHORT = "benchmarks/models/llama-tiny --requests 8 --shared 64 --own 8 --out 4 --groups 2 --runs 1"
FORMS = ("one", "groups", "levels")


def prompts_of(form: str, requests: int, shared: int, own: int, groups: int) -> list[list[int]]:
    """The prompts of a form. Those of a group are neighbours of no other of it, as they would arrive."""
    rng = Random(9)

    def tokens(count: int) -> list[int]:
        return [rng.randint(0, HIGHEST_TOKEN) for _ in range(count)]

    common = tokens({"one": shared, "levels": shared // 2}.get(form, 0))
    if form == "apart":
        return [tokens(shared + own) for _ in range(requests)]
    behind = [tokens(shared - len(common)) for _ in range(1 if form == "one" else groups)]
    return [common + behind[index % len(behind)] + tokens(own) for index in range(requests)]


def distinct_prefixes(prompts: Sequence[Sequence[int]], block: int) -> list[int]:
    """Of each prompt, the tokens at its end that no prompt before it has in the same blocks."""
    known, found = set[tuple[int, ...]](), []
    for prompt in prompts:
        whole = [tuple(prompt[:end]) for end in range(block, len(prompt), block)]
        new = [prefix for prefix in whole if prefix not in known]
        known.update(new)
        found.append(len(prompt) - block * (len(whole) - len(new)))
    return found


def least_seconds(llm: LLM, work: Workload, rates: Rates) -> float:
    """At best: a prompt's token is computed once, and a step reads the weights and each key that it needs once."""
    model: Any = llm.engine.runner.model
    config, layers = model.hf_model.config, model.facts.layers
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for name, p in model.hf_model.named_parameters() if p.dim() == 2 and "embed" not in name)
    body -= 0 if config.tie_word_embeddings else head
    per_token = sum(4 * layer.num_kv_heads * layer.head_size for layer in layers)  # bytes of bfloat16 keys and values
    pairs = sum(4 * layer.num_heads * layer.head_size for layer in layers)  # operations of a query and a key
    prompts, outputs = work.waves[-1], work.max_tokens[-1]
    fresh = distinct_prefixes(prompts, llm.plan.block_size)
    seen = sum(new * (len(prompt) - new / 2) for prompt, new in zip(prompts, fresh, strict=True))
    operations = 2 * body * sum(fresh) + 2 * head * len(prompts) + pairs * seen
    total = max(operations / rates.operations, 2 * (body + head) / rates.bandwidth)
    for step in range(1, max(outputs)):
        running = [i for i, out in enumerate(outputs) if out > step]
        keys = sum(fresh[i] + step for i in running)
        scores = sum(len(prompts[i]) + step for i in running)
        reading = (2 * (body + head) + per_token * keys) / rates.bandwidth
        total += max(reading, (2 * (body + head) * len(running) + pairs * scores) / rates.operations)
    return float(total)


@contextmanager
def watched(llm: LLM) -> Iterator[tuple[Counter[str], dict[str, int]]]:
    """Count the steps by how they run, and the whole blocks of prompts in the last step with most requests."""
    engine, kinds, blocks = llm.engine, Counter[str](), {"requests": 0, "prompts": 0}
    launch = engine.runner.launch
    group = engine.scheduler.cache.groups[0]

    def counted(inputs: Any) -> Any:
        batch = inputs.batches[0]
        groups = batch.prefix_groups is not None
        kind = "groups" if groups else "one prefix" if batch.common_prefix_len else "no prefix"
        kinds[f"{kind}, {'eager' if inputs.shape is None else 'graph'}"] += 1
        rows = [request.row for request in engine.scheduler.running]
        held = {
            block
            for row in rows
            for block in group.blocks[row][: int(engine.rows.num_prompt_tokens[row]) // group.block_size]
        }
        if len(rows) >= blocks["requests"]:
            blocks.update(requests=len(rows), prompts=len(held))
        return launch(inputs)

    engine.runner.launch = counted  # type: ignore[method-assign]
    try:
        yield kinds, blocks
    finally:
        engine.runner.launch = launch  # type: ignore[method-assign]


def describe(llm: LLM, work: Workload, runs: list[Run], rates: Rates) -> list[str]:
    """Print what a form took. Return the cells of its row."""
    best = min(runs, key=lambda run: run.seconds)
    least, wave = least_seconds(llm, work, rates), best.waves[-1]
    later = sorted(step[1] for step in wave.later_steps)
    cached = sum(one.cached for one in wave.served) / sum(one.prompt for one in wave.served)
    outputs = sum(work.max_tokens[-1])
    each = ", ".join(f"{run.seconds:.3f}" for run in runs)
    ratio = best.seconds / least
    median = 1e3 * later[len(later) // 2] if later else 0.0
    print(
        f"{work.name}: {best.seconds:.3f} s ({each}), {outputs / best.seconds:,.0f} tok/s; limit {least:.3f} s, "
        f"{ratio:.2f} x the limit; {wave.prompt_steps} steps with prompts {wave.prompt_seconds:.3f} s, then "
        f"{len(later)} steps, median {median:.2f} ms; {cached:.0%} of the prompts' tokens found"
    )
    with watched(llm) as (kinds, blocks):
        timed_runs(llm, work, 0)
    block = llm.plan.block_size
    fewest = len({tuple(p[:end]) for p in work.waves[-1] for end in range(block, len(p) + 1, block)})
    steps = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"   blocks of prompts: {blocks['prompts']}, at best {fewest}; steps: {steps}")
    return [work.name, f"{best.seconds:.3f}", f"{least:.3f}", f"{ratio:.2f}", f"{median:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", nargs="*", default=list(FORMS), choices=[*FORMS, "apart"])
    parser.add_argument("--requests", type=positive, default=128)
    parser.add_argument("--shared", type=positive, default=2048)
    parser.add_argument("--own", type=positive, default=64)
    parser.add_argument("--out", type=positive, default=128)
    parser.add_argument("--groups", type=positive, default=4)
    parser.add_argument("--runs", type=positive, default=2)
    parser.add_argument("--profile", type=at_least(0), default=0, metavar="STEPS")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    arguments = parser.parse_args()
    require_gpus()
    rates = measured_rates()
    start = perf_counter()
    llm, _ = build(arguments.folder, arguments.settings)
    print(llm.plan.summary(), f"built in {perf_counter() - start:.1f} s", sep="\n")
    print(rates)
    found = []
    for form in arguments.form:
        prompts = prompts_of(form, arguments.requests, arguments.shared, arguments.own, arguments.groups)
        outputs = [arguments.out] * len(prompts)
        work = Workload(name=form, waves=(prompts,), max_tokens=(outputs,), temperature=0.0, max_model_len=8192)
        found.append(describe(llm, work, timed_runs(llm, work, arguments.runs), rates))
        if arguments.profile:
            profiled(llm, work, arguments.profile)
    if arguments.json:
        columns = ["model, prefixes", "seconds", "limit, s", "of the limit", "median step, ms"]
        rows = [[f"{arguments.folder.name}, {name}", *cells] for name, *cells in found]
        note = f"Random bfloat16 weights. Limit at {rates.bandwidth / 1e12:.2f} TB/s and {rates.operations / 1e12:.0f}"
        write_result(arguments.json, "shared_prefixes_gpu", columns, rows, note=f"{note} TFLOP/s, measured.")


if __name__ == "__main__":
    main()
