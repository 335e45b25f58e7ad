"""Run a workload on another engine and time its steps: a program of that engine's own Python.

`python peer_program.py JOB.json RESULT.json`. It imports nothing of slotline, whose environment may be another one, and
nothing that the engine does not bring along. The job is what `bench_peers.PeerJob` writes. The result has the engine's
version, the facts of the model that it loaded, the runs, and the tokens of the last one; or the name of the package
that is missing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any


class Clock:
    """Times of a wave: ends of steps, the tokens that each gave, and each request's first one."""

    def __init__(self, requests: int) -> None:
        self.start = self.before = perf_counter()
        self.steps: list[tuple[float, float, int]] = []
        self.first: list[float | None] = [None] * requests
        self.prompt_steps = 0

    def step(self, counts: list[int]) -> None:
        """Note the end of a step that gave each request so many tokens."""
        now = perf_counter()
        self.steps.append((now - self.start, now - self.before, sum(counts)))
        self.before = now
        if None in self.first:
            self.prompt_steps = len(self.steps)
            self.first = [
                now - self.start if first is None and count else first
                for first, count in zip(self.first, counts, strict=True)
            ]

    def wave(self, tokens: list[list[int]]) -> dict[str, Any]:
        """Return the wave as JSON types, `tokens` being each request's."""
        timed = {"seconds": perf_counter() - self.start, "first": self.first, "steps": self.steps}
        return {**timed, "prompt_steps": self.prompt_steps, "tokens": tokens}


class Transformers:
    """`generate` of transformers: all requests of a wave in one batch, padded on the left, until the longest ends."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job["threads"])
        self.torch, self.device = torch, job["device"]
        options = {"attn_implementation": "sdpa", **job["options"]}
        model = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=getattr(torch, job["dtype"]), trust_remote_code=False, **options
        )
        self.model = model.to(self.device).eval()
        self.model.generation_config.eos_token_id = None
        self.facts = {"parameters": self.model.num_parameters()}

    def run(self, prompts: list[list[int]], outs: list[int], temperature: float) -> dict[str, Any]:
        """Run a wave."""
        torch, clock = self.torch, Clock(len(prompts))
        width, most = max(map(len, prompts)), max(outs)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)

        def ended(input_ids: Any, scores: Any, **_: Any) -> Any:
            count = input_ids.shape[1] - width
            clock.step([int(count <= out) for out in outs])
            return done

        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with torch.inference_mode():
            made = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=most, pad_token_id=0, stopping_criteria=[ended], **sampled
            )
        rows = made[:, width:].tolist()
        return clock.wave([row[:out] for row, out in zip(rows, outs, strict=True)])

    def forget(self) -> None:
        """Nothing is kept between calls."""


class Vllm:
    """vLLM's engine, in this process."""

    def __init__(self, job: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if job["device"] == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ["OMP_NUM_THREADS"] = str(job["threads"])
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        limits = {"max_model_len": job["max_model_len"], "dtype": job["dtype"], "seed": 0, "skip_tokenizer_init": True}
        self.llm = LLM(job["model"], **{"enable_prefix_caching": True, **limits, **job["options"]})
        self.engine = self.llm.llm_engine
        self.facts: dict[str, Any] = {}

    def run(self, prompts: list[list[int]], outs: list[int], temperature: float) -> dict[str, Any]:
        """Run a wave."""
        clock = Clock(len(prompts))
        tokens: list[list[int]] = [[] for _ in prompts]
        for index, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
            params = self.params(temperature=temperature, ignore_eos=True, max_tokens=out, detokenize=False)
            self.engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            counts = [0] * len(prompts)
            for output in self.engine.step():
                index = int(output.request_id.partition("-")[0])
                made = list(output.outputs[0].token_ids)
                counts[index] = len(made) - len(tokens[index])
                tokens[index] = made
            clock.step(counts)
        return clock.wave(tokens)

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.llm.reset_prefix_cache()


class Openvino:
    """OpenVINO GenAI's continuous batching, on a model that optimum converts."""

    def __init__(self, job: dict[str, Any]) -> None:
        import openvino_genai

        self.genai = openvino_genai
        self._folder = TemporaryDirectory(prefix="slotline-openvino-")
        folder = Path(self._folder.name)
        _convert(job, folder)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = True
        hints = {"INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[job["dtype"]]}
        properties = {**hints, "INFERENCE_NUM_THREADS": job["threads"], **job["options"]}
        self._job, self._scheduler, self._properties = job, scheduler, properties
        self.forget()
        self.facts: dict[str, Any] = {}

    def forget(self) -> None:
        """Begin with an empty cache: a pipeline cannot forget the prefixes of earlier runs."""
        folder = Path(self._folder.name)
        self.pipe = self.genai.ContinuousBatchingPipeline(folder, self._scheduler, "CPU", self._properties)

    def run(self, prompts: list[list[int]], outs: list[int], temperature: float) -> dict[str, Any]:
        """Run a wave."""
        import numpy as np
        import openvino

        clock, handles = Clock(len(prompts)), []
        tokens: list[list[int]] = [[] for _ in prompts]
        for index, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
            config = self.genai.GenerationConfig(max_new_tokens=out, ignore_eos=True)
            if temperature:
                config.do_sample, config.temperature = True, temperature
            handles.append(self.pipe.add_request(index, openvino.Tensor(np.array([prompt], np.int64)), config))
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            counts = []
            for handle, found in zip(handles, tokens, strict=True):
                before = len(found)
                while handle.can_read():
                    found += [token for output in handle.read().values() for token in output.generated_ids]
                counts.append(len(found) - before)
            clock.step(counts)
        return clock.wave(tokens)


def _convert(job: dict[str, Any], folder: Path) -> None:
    """Convert a checkpoint into OpenVINO's form, weights in the dtype of the runs."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    dtype = "fp32" if job["dtype"] == "float32" else "fp16"
    main_export(
        job["model"],
        folder,
        task="text-generation-with-past",
        ov_config=OVConfig(dtype=dtype),
        library_name="transformers",
    )


ENGINES: dict[str, tuple[Any, str]] = {
    "transformers": (Transformers, "transformers"),
    "vllm": (Vllm, "vllm"),
    "openvino": (Openvino, "openvino_genai"),
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job: a run to warm up, then as many as are timed."""
    make, module = ENGINES[job["peer"]]
    start = perf_counter()
    engine = make(job)
    startup, runs = perf_counter() - start, []
    for _ in range(job["runs"] + 1):
        engine.forget()
        waves = zip(job["waves"], job["max_tokens"], strict=True)
        runs.append([engine.run(prompts, outs, job["temperature"]) for prompts, outs in waves])
    found = sys.modules[module].__version__  # a build for one kind of machine may be of another distribution
    return {"version": found, "facts": engine.facts, "startup_s": startup, "runs": runs[1:]}


def main() -> None:
    """Do the job of one file and write the result into another."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        result = run(job)
    except ModuleNotFoundError as error:
        result = {"missing": error.name, "python": sys.executable}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
