"""Decoding with drafts that stand as often as asked, against decoding without: what verification costs and gives.

    python benchmarks/speculation_gpu.py benchmarks/models/llama-3.1-8b benchmarks/models/llama-draft-0.3b
        [more draft models] [--batches 1 4 16 32 64] [--drafts 4] [--right 3 0] [--tokens 257] [--profile 1 32]
        [--adaptive] [--variants drafter.graphs=auto drafter.graphs=false] [--set KEY=VALUE]

All models have the shapes of their folders and count (benchmarks/counting_models.py): the target's greedy text is
known, and the draft model, drafter `draft_model`, is wrong about every (`right` + 1)th token of it; so is an EAGLE-3
head, which a folder may be of, too. Texts keep to the smallest draft vocabulary. So the acceptance is what was asked
for, and a text that is not the known one ends the run. A step is wall time by the runs' number of steps, before any
text is near its end; the speedup is in tokens a second. With `--profile`, where a step's time goes: on the host by
part, and on the device by kind of kernel, each from the end of the one in front of it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import counting_models
import step_gpu
import timeline_gpu
import torch
from command_line import at_least, positive, require_gpus
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families import loading
from slotline.proposers.eagle import drafter as eagle
from slotline.proposers.eagle import heads
from slotline.proposers.eagle.drafter import Eagle3Drafter
from slotline.proposers.speculation.draft_length_controller import DraftLengthController

SHORT = "benchmarks/models/llama-tiny benchmarks/models/llama-tiny --batches 1 --tokens 17 --right 1"
PROMPT = 128
ROOM = 32
"""Tokens that a request may have beyond those that are timed: near its limit fewer drafts fit than graphs hold."""
PROFILED = 8
"""Steps that are profiled."""


def counting_engine(folder: Path, draft: Path | None, longest: int, requests: int, settings: list[str]) -> LLM:
    """An engine of the folder's shape that counts, and a draft model of `draft`'s that does."""

    def made(context: Any, *_: Any) -> Any:
        return counting_models.make_counting(step_gpu.random_model(context))

    loading.load_transformers_model = made  # type: ignore[assignment]
    eagle.read_weights = empty_head  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name:
        for kind, source in (("target", folder), ("draft", draft)):
            if source is not None:
                (Path(name) / kind).mkdir()
                shutil.copy(source / "config.json", Path(name) / kind)
                (Path(name) / kind / "model.safetensors").touch()  # its header is never read
        if draft is not None:
            kind = "draft_model" if eagle3_vocabulary(draft) is None else "eagle3"
            settings = [*settings, f"drafter.name={kind}", f"drafter.path={name}/draft"]
        return LLM(
            model=f"{name}/target",
            device="cuda",
            dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=requests,
            max_num_batched_tokens=PROMPT * requests,
            overrides=["cache.prefix_caching=false", *settings],
        )


def eagle3_vocabulary(draft: Path) -> int | None:
    """The draft vocabulary of an EAGLE-3 head's folder; None for a draft model's."""
    size: int | None = json.loads((draft / "config.json").read_text()).get("draft_vocab_size")
    return size


def empty_head(path: Path) -> dict[str, torch.Tensor]:
    """Stands in for reading a head's weights, which are made once the engine is built."""
    with torch.device("meta"):
        head = heads.Eagle3Head(heads.read_config(path))
    return {name: torch.zeros_like(tensor, device="cpu") for name, tensor in head.state_dict().items()}


def misleader(llm: LLM) -> Callable[[int], None]:
    """Makes an engine's drafter count, and wrong about every (n + 1)th token."""
    drafter: Any = llm.engine.extension("drafts").drafting.drafter
    if not isinstance(drafter, Eagle3Drafter):
        embedding = drafter._model.hf_model.get_input_embeddings().weight
        original = embedding.clone()
        return lambda right: counting_models.mislead(embedding.copy_(original), right)
    head, target = drafter._head, llm.engine.runner.model.hf_model.get_input_embeddings().weight  # type: ignore[attr-defined]
    counting_models.make_head_count(head, target)
    known = head.midlayer.self_attn.k_proj.out_features
    return lambda right: counting_models.count_to(head.lm_head.weight, target, known, right)


def begin(llm: LLM, prompts: list[list[int]], tokens: int) -> list[Any]:
    """Requests that have their first token."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    requests = [llm.engine.add(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while any(r.metrics.time_to_first_token is None for r in requests):
        llm.engine.step()
    torch.cuda.synchronize()
    return requests


class Run(NamedTuple):
    """Seconds and steps of decoding, and the tokens that they gave."""

    seconds: float
    steps: int
    tokens: int

    @property
    def milliseconds(self) -> float:
        """Of a step."""
        return 1e3 * self.seconds / self.steps

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def timed(llm: LLM, prompts: list[list[int]], tokens: int) -> Run:
    """Decoding behind the prompts until each text has `tokens` tokens; none of them is near its limit then."""
    requests = begin(llm, prompts, tokens + ROOM)
    start, steps, before = time.perf_counter(), 0, sum(len(request.output_token_ids) for request in requests)
    while any(len(request.output_token_ids) < tokens for request in requests):
        llm.engine.step()
        steps += 1
    torch.cuda.synchronize()
    seconds, given = time.perf_counter() - start, [request.output_token_ids for request in requests]
    for request in requests:
        llm.engine.abort(request.request_id)
    step_gpu.finish(llm)
    for text, prompt in zip(given, prompts, strict=True):
        if text != list(range(prompt[-1] + 1, prompt[-1] + 1 + len(text))):
            raise SystemExit(f"a text is not the known one: {prompt[-1]} -> {text}")
    return Run(seconds, steps, sum(map(len, given)) - before)


def show_profile(llm: LLM, prompts: list[list[int]], tokens: int) -> None:
    """Where the time of some steps goes, on the host and on the device, by step."""
    begin(llm, prompts, tokens)
    profiler = llm.engine.profiler

    def work() -> None:
        for _ in range(PROFILED):
            llm.engine.step()

    work()
    profiler.enable()
    profiler.reset()
    start = time.perf_counter()
    work()
    wall = (time.perf_counter() - start) / PROFILED
    profiler.disable()
    parts = sorted(profiler.seconds.items(), key=lambda item: -item[1])
    print(f"   host: {wall * 1e3:.2f} ms: " + ", ".join(f"{n} {s / PROFILED * 1e3:.2f}" for n, s in parts if s > 1e-5))
    found, by_kind, by_name = spans(work), defaultdict[str, float](float), defaultdict[str, list[float]](list)
    now = found[0].start
    for span in found:  # one that starts early counts from the end of the one in front
        took = max(0.0, span.end - max(now, span.start)) / PROFILED
        by_kind["pauses"] += max(0.0, span.start - now) / PROFILED
        by_kind["copies" if span.name.startswith("Mem") else step_gpu.kind_of(span.name)] += took
        by_name[span.name].append(took)
        now = max(now, span.end)
    kinds = sorted(by_kind.items(), key=lambda item: -item[1])
    print(
        f"   device: {sum(by_kind.values()):.0f} us, {len(found) // PROFILED} launches: "
        + ", ".join(f"{kind} {time:.0f}" for kind, time in kinds)
    )
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:24]:
        print(f"   {sum(times):8.1f} us {len(times) / PROFILED:6.1f} x  {name[:100]}")
    step_gpu.finish(llm)


def spans(work: Callable[[], Any]) -> list[timeline_gpu.Span]:
    """What runs on the device during `work`, copies too, in order."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    found = [
        timeline_gpu.Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith("Activity")
    ]
    return sorted(found, key=lambda span: span.start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path, nargs="+")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--drafts", type=positive, default=4)
    parser.add_argument("--right", type=at_least(0), nargs="+", default=[3, 0])
    parser.add_argument("--tokens", type=positive, default=257)
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["drafter.graphs=auto"],
        metavar="KEY=VALUE",
        help="settings of engines that draft, one engine for each",
    )
    parser.add_argument("--adaptive", action="store_true", help="each run again with draft lengths chosen as they pay")
    parser.add_argument("--profile", type=positive, nargs="*", default=[], metavar="BATCH")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    arguments = parser.parse_args()
    require_gpus()
    most, drafts, tokens = max(arguments.batches), arguments.drafts, arguments.tokens
    folder, longest = arguments.model, PROMPT + tokens + ROOM + drafts + 1
    sizes = sorted({length * number for length in (1, 1 + drafts) for number in arguments.batches})
    settings = ["cache.memory=16GiB", f"graphs.sizes={sizes}", *arguments.settings]
    plain = counting_engine(folder, None, longest, most, settings)
    vocabularies = [plain.engine.limits.vocab_size, *filter(None, map(eagle3_vocabulary, arguments.draft))]
    prompts = {n: counting_models.prompts(n, PROMPT, min(vocabularies), tokens + ROOM + 1) for n in arguments.batches}
    print(f"plain: {plain.plan.summary()}, asynchronous: {plain.engine.asynchronous}", flush=True)
    results: dict[int, Run] = {}
    for number, own in prompts.items():
        timed(plain, own, 9)
        results[number] = timed(plain, own, tokens)
        print(f"batch {number:3}, no drafts: a step {results[number].milliseconds:6.2f} ms", flush=True)
        if number in arguments.profile:
            show_profile(plain, own, tokens)
    del plain
    gc.collect()
    torch.cuda.empty_cache()
    for draft, variant in itertools.product(arguments.draft, arguments.variants):
        asked = [*settings, f"drafter.tokens={drafts}", "drafter.adaptive=false", variant]
        print(f"\n{draft.name}, {variant}:")
        show(counting_engine(folder, draft, longest, most, asked), prompts, results, arguments)
        gc.collect()
        torch.cuda.empty_cache()


def show(llm: LLM, prompts: dict[int, list[list[int]]], results: dict[int, Run], arguments: argparse.Namespace) -> None:
    """Time an engine that drafts against `results` of one that does not, by batch."""
    drafting, drafts, tokens = llm.engine.extension("drafts").drafting, arguments.drafts, arguments.tokens
    assert drafting is not None
    print(f"drafted: {llm.plan.summary()}, asynchronous: {llm.engine.asynchronous}")
    print(next(str(setting) for setting in llm.plan.settings if setting.key == "drafter.graphs"))
    if drafting.graphs is not None:
        print(drafting.graphs.report)
    mislead = misleader(llm)
    for right in arguments.right:
        mislead(right)
        for number, own in prompts.items():
            timed(llm, own, 17)
            line = compare(llm, own, results[number], tokens)
            print(f"batch {number:3}, {right} of {drafts} right: {line}", flush=True)
            if number in arguments.profile and right:
                show_profile(llm, own, tokens)
            if arguments.adaptive:  # nothing is known at the beginning, so the run pays for finding out
                drafting.control = DraftLengthController(llm.engine.rows.max_requests, drafts, uniform=drafting.uniform)
                print(f"   adaptive: {compare(llm, own, results[number], tokens)}", flush=True)
                drafting.control = None


def compare(llm: LLM, prompts: list[list[int]], plain: Run, tokens: int) -> str:
    """A run beside that without drafts."""
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    before = (drafting.counts.steps, drafting.counts.accepted)
    run = timed(llm, prompts, tokens)
    done, stood = drafting.counts.steps - before[0], drafting.counts.accepted - before[1]
    line = (
        f"a step {run.milliseconds:6.2f} ms against {plain.milliseconds:6.2f} "
        f"({run.milliseconds / plain.milliseconds:.2f}), {1 + stood / max(done, 1):.2f} tokens a verifying step, "
        f"speedup {run.rate / plain.rate:.2f}x, {drafting.counts.failures} failures {drafting.counts.last_failure}"
    )
    if drafting.control is None:
        return line
    decided = drafting.control.to_json()
    step, token, draft = (decided[name] * 1e3 for name in ("step_seconds", "step_seconds_per_token", "draft_seconds"))
    return (
        f"{line}; {done / len(prompts):.0f} of {run.steps} steps verified drafts, acceptance "
        f"{decided['acceptance']:.2f}, a step {step:.2f} ms + {token:.4f} ms a token, drafts {draft:.2f} ms"
    )


if __name__ == "__main__":
    main()
