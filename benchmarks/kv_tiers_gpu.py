"""Loads from a KV tier on a card: their rate beside that of PCIe, their time beside computing, and others' steps.

    python benchmarks/kv_tiers_gpu.py benchmarks/models/llama-3.1-8b [--length 8192] [--prompts 3] [--running 8]
        [--connectors tiers host_memory] [--tiers host_memory] [--rounds 8] [--set KEY=VALUE] [--json FILE]
    python benchmarks/kv_tiers_gpu.py benchmarks/models/llama-tiny --device cpu --length 64 --context 16

Weights are random. The pool has room for the requests that run and for a prompt, and prompts go to the tier as others
come. Printed for each connector:

* the rate of a copy from pinned memory to the card, of a gibibyte or of as much as a prompt's blocks have;
* the time in which the blocks of a prompt are loaded while nothing else runs, and the rate of it beside that of the
  copy. Where loads take place in the step of their request, it is the time to its first token without the time that it
  takes when the pool has the blocks;
* the time to the first token of a prompt that is computed, of one from the tier, and of one from the pool;
* the median and the longest of the steps of `--running` requests that decode, alone and while blocks are loaded, in
  turns. A step that computes the end of a loaded prompt is in neither.

`tiers` loads beside the steps of others, and `host_memory` alone in the step of its request.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from command_line import positive, require_gpus
from result_file import print_rows, write_result

from slotline.core import LLM, SamplingParams

SHORT = (
    "benchmarks/models/llama-tiny --device cpu --length 48 --context 16 --prompts 2 --running 2 --rounds 2 --steps 200"
)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
QUIET_STEPS = 12
"""Steps without loads between two loads whose steps are timed."""
COLUMNS = (
    "connector", "copy GB/s", "load ms", "load GB/s", "of the copy", "computed ms", "from the tier ms",
    "of computed", "from the pool ms", "step alone ms", "beside loads ms", "more", "longest alone ms", "beside ms",
)  # fmt: skip


def build(arguments: argparse.Namespace, settings: list[str]) -> LLM:
    """An engine with random weights of the folder's shape."""
    longest = max(arguments.length, arguments.context + arguments.steps) + 32
    return LLM(
        model=arguments.folder,
        device=arguments.device,
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=arguments.running + 2,
        max_num_batched_tokens=max(arguments.length, 2048),
        overrides=[
            f"graphs.sizes=[{arguments.running}]", "load.format=dummy", "observability.progress=false",
            *settings, *arguments.settings,
        ],
    )  # fmt: skip


def bytes_of_token(folder: Path) -> int:
    """Bytes of the keys and values of a token, from a folder's configuration."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head)


def copy_rate(device: str, num_bytes: int) -> float:
    """Bytes a second of a copy from host memory to the device, pinned if it is a card: the best of several."""
    cuda = device.startswith("cuda")
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=cuda)
    there, best = torch.empty(num_bytes, dtype=torch.uint8, device=device), float("inf")
    for _ in range(8):
        wait(device)
        start = perf_counter()
        there.copy_(host, non_blocking=True)
        wait(device)
        best = min(best, perf_counter() - start)
    return num_bytes / best


def wait(device: str) -> None:
    """Wait for a card."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Tier:
    """An engine whose connector holds prompts.

    Attributes:
        llm: the engine.
        transfers: of its connector.
        prompts: that the connector holds.
    """

    def __init__(self, llm: LLM, prompts: list[list[int]], device: str) -> None:
        self.llm, self.engine, self.prompts, self.device = llm, llm.engine, prompts, device
        self.transfers = llm.engine.extension("kv_transfer").transfers
        self.later = hasattr(self.transfers, "coming")
        self._number = 0

    def add(self, prompt: list[int], params: SamplingParams = ONE) -> Any:
        """Add a request."""
        self._number += 1
        return self.engine.add(f"request {self._number}", prompt, params)

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds to the first token of a request that runs alone, and how many tokens were loaded."""
        wait(self.device)
        start = perf_counter()
        request = self.add(prompt)
        while not request.finished:
            self.engine.step()
        return perf_counter() - start, request.metrics.num_loaded_tokens

    def forget_pool(self) -> None:
        """Have the pool forget all blocks that no request holds."""
        while self.engine.has_work and not self.engine.scheduler.running:
            self.engine.step()
        self.engine.scheduler.cache.pool.reset()

    def fill(self) -> None:
        """Have the connector hold all prompts: others follow them until the pool has given them up.

        Raises:
            SystemExit: if it does not hold them afterwards.
        """
        rng, length = np.random.default_rng(1), len(self.prompts[0])
        for prompt in self.prompts:
            self.first_token(prompt)
        for _ in range(self.llm.engine.scheduler.cache.pool.num_blocks * self.llm.plan.block_size // length + 1):
            self.first_token(rng.integers(5, 200, length).tolist())
        if hasattr(self.transfers.connector, "flush"):
            self.transfers.connector.flush(120.0)
        self.forget_pool()
        for prompt in self.prompts:
            _, loaded = self.first_token(prompt)
            self.forget_pool()
            if loaded < len(prompt) - 2 * self.llm.plan.block_size:
                raise SystemExit(f"error: {loaded} of {len(prompt)} tokens came from the tier: give it more memory")

    def load(self, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds in which a prompt's blocks were loaded while nothing else ran, and how many tokens."""
        request = self.add(prompt)
        start = perf_counter()
        self.engine.step()
        while self.transfers.coming:
            self.engine.step()
        seconds = perf_counter() - start
        while not request.finished:
            self.engine.step()
        return seconds, request.metrics.num_loaded_tokens

    def timed_step(self) -> float:
        """Return the seconds of a step."""
        start = perf_counter()
        self.engine.step()
        return perf_counter() - start

    def steps(self, running: int, context: int, rounds: int, steps: int) -> tuple[list[float], list[float]]:
        """Return the seconds of steps of requests that decode: alone, and while blocks are loaded."""
        rng = np.random.default_rng(7)
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        own = [self.add(rng.integers(5, 200, context).tolist(), params) for _ in range(running)]
        alone, beside = list[float](), list[float]()
        while any(request.metrics.time_to_first_token is None for request in own):
            self.engine.step()
        for _ in range(20):
            self.engine.step()
        for number in range(rounds):
            alone += [self.timed_step() for _ in range(QUIET_STEPS)]
            self.engine.scheduler.cache.pool.reset()
            request = self.add(self.prompts[number % len(self.prompts)])
            if self.later:
                while True:
                    seconds = self.timed_step()
                    if not self.transfers.coming:
                        break
                    beside.append(seconds)
            else:  # the step that loads is launched by one of the next two, and computes the end of the prompt too
                beside += [self.timed_step() for _ in range(3)]
            while not request.finished:
                self.engine.step()
            for _ in range(3):
                self.engine.step()
            if any(request.finished for request in own):
                raise SystemExit("error: requests ended too early: give fewer --rounds or more --steps")
        for request in own:
            self.engine.abort(request.request_id)
        while self.engine.has_work:
            self.engine.step()
        return alone, beside


def measure(arguments: argparse.Namespace, connector: str, folder: str) -> list[str]:
    """Print the figures of a connector. Return its row of the table."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, 200, (arguments.prompts + 4, arguments.length)).tolist()
    token = bytes_of_token(arguments.folder)
    running = arguments.running * (arguments.context + arguments.steps)
    pool = (arguments.length + running) * 5 // 4 * token
    tier = 2 * (arguments.prompts * arguments.length * token + pool)
    settings = [f"cache.memory={pool // 1024 + 1}KiB", f"kv_connector.name={connector}"]
    settings += ["kv_connector.leave_out_slow=false", f"kv_connector.host_memory.memory={tier // 1024 + 1}KiB"]
    settings += [f"kv_connector.disk.folder={folder}", f"kv_connector.shared.memory={tier // 1024 + 1}KiB"]
    settings += [f"kv_connector.tiers.tiers={json.dumps(arguments.tiers)}"]
    llm = build(arguments, settings)
    print(f"{connector}: {llm.plan.summary()}")
    one = Tier(llm, prompts[: arguments.prompts], arguments.device)
    one.first_token(prompts[-1])  # compiles
    computed = list[float]()
    for prompt in prompts[arguments.prompts : -1]:
        one.forget_pool()
        computed.append(one.first_token(prompt)[0])
    one.fill()
    rate = copy_rate(arguments.device, min(2**30, arguments.length * token))
    from_tier, from_pool, loads, tokens = list[float](), list[float](), list[float](), 0
    for number in range(arguments.rounds):
        prompt = one.prompts[number % len(one.prompts)]
        one.forget_pool()
        from_tier.append(one.first_token(prompt)[0])
        from_pool.append(one.first_token(prompt)[0])
        if one.later:
            one.forget_pool()
            seconds, tokens = one.load(prompt)
            loads.append(seconds)
        else:
            one.forget_pool()
            tokens = one.first_token(prompt)[1]
    seconds = median(loads) if loads else max(median(from_tier) - median(from_pool), 1e-9)
    speed = tokens * token / seconds
    one.forget_pool()
    alone, beside = one.steps(arguments.running, arguments.context, arguments.rounds, arguments.steps)
    quiet, busy = median(alone), median(beside) if beside else float("nan")
    tier_ms, pool_ms, computed_ms = (1e3 * median(times) for times in (from_tier, from_pool, computed))
    print(f"  {len(beside)} steps beside loads, {len(alone)} alone; {dict(one.transfers.events())}")
    row = [
        connector if connector != "tiers" else f"tiers of {', '.join(arguments.tiers)}",
        f"{rate / 1e9:.1f}", f"{1e3 * seconds:.2f}", f"{speed / 1e9:.1f}", f"{100 * speed / rate:.0f} %",
        f"{computed_ms:.1f}", f"{tier_ms:.1f}", f"{tier_ms / computed_ms:.2f}", f"{pool_ms:.1f}",
        f"{1e3 * quiet:.2f}", f"{1e3 * busy:.2f}", f"{100 * (busy / quiet - 1):+.1f} %",
        f"{1e3 * max(alone):.2f}", f"{1e3 * max(beside, default=float('nan')):.2f}",
    ]  # fmt: skip
    for name, value in zip(COLUMNS[1:], row[1:], strict=True):
        print(f"  {name:>18}: {value}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=positive, default=8192, help="tokens of a prompt")
    parser.add_argument("--prompts", type=positive, default=3, help="prompts in the tier")
    parser.add_argument("--running", type=positive, default=8, help="requests that decode beside the loads")
    parser.add_argument("--context", type=positive, default=512, help="tokens of their prompts")
    parser.add_argument("--steps", type=positive, default=1500, help="tokens that they may give")
    parser.add_argument("--rounds", type=positive, default=12, help="loads of each kind")
    parser.add_argument("--connectors", nargs="+", default=["tiers", "host_memory"])
    parser.add_argument("--tiers", nargs="+", default=["host_memory"], help="what `tiers` is made of")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write a result file")
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        require_gpus()
    rows = list[list[str]]()
    for connector in arguments.connectors:
        with TemporaryDirectory() as folder:
            rows.append(measure(arguments, connector, folder))
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
    print_rows(COLUMNS, rows)
    if arguments.json is not None:
        note = f"{arguments.running} requests decode; prompts of {arguments.length} tokens; random weights"
        write_result(arguments.json, "kv_tiers_gpu", COLUMNS, rows, note=note)


if __name__ == "__main__":
    main()
