"""Everything that is claimed about a GPU, in one call: conformance, speed, explanations, and what each downgrade costs.

    python benchmarks/show_gpu.py [--only conformance speed explain downgrades] [--seconds 560]

Prints the conformance level of every attention and state backend that ships, the end-to-end workloads beside the
card's limits, `explain` for a model with sliding-window and full layers under the backends that serve it differently,
and the factor by which Qwen3-0.6B's shape slows down when a part is taken away. Each result is printed as soon as it is
there, and nothing runs longer than asked: what did not get to its end says how far it came. Weights are random.

What is timed runs alone, one after the other, on the first GPU and at most half of the processor's cores. All else,
most of it compiling, runs at the same time on the last GPU and the other cores; with a single GPU it comes afterwards.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

import torch
from attrs import field, frozen
from command_line import require_gpus

SHORT = "--only explain --seconds 60"
HERE = Path(__file__).parent
SMALL, LARGE = "qwen3-0.6b", "llama-3.1-8b"
LONGEST = "attention:flashinfer"
"""The backend that compiles most; the others yield to it."""
BACKENDS = (
    LONGEST,
    "attention:flex",
    "attention:triton",
    "attention:flash_attn",
    "attention:torch",
    "state:triton",
    "state:torch",
)
MIXED = ("flash_attn", "flashinfer")
PARTS = ("speed", "downgrades", "explain", "conformance")
MOST_TIMED_CORES = 8


@frozen
class Job:
    """A command and how it is shown.

    Attributes:
        title: printed above.
        command: what runs.
        environment: variables of its own.
        shown: how many of the last lines are printed, of which the last is a verdict; None for all.
    """

    title: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(factory=dict)
    shown: int | None = None


@frozen
class Session:
    """The call's time, and its output, a job at a time.

    Attributes:
        ends: when all must be done, by `time.monotonic`.
        started: when it began.
        verdicts: the last line of each job on conformance, by title.
    """

    ends: float
    started: float = field(factory=time.monotonic)
    verdicts: dict[str, str] = field(factory=dict)
    _printing: Lock = field(factory=Lock)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.ends - time.monotonic()

    def run(self, job: Job, gpu: str) -> None:
        """Run a job on a GPU to its end or the session's, and print what it printed."""
        began = time.monotonic()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, **job.environment}
        with tempfile.TemporaryFile("w+", errors="replace") as printed:
            # A session of its own: what the command started ends with it.
            with subprocess.Popen(
                job.command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
            ) as process:
                status = _wait(process, self.left)
            printed.seek(0)
            lines = [line.rstrip() for line in printed if line.strip() and "Warning" not in line]
        most = job.shown if status in ("0", "1") else 60  # it ended by itself, or what it said last may say why not
        if job.shown:
            self.verdicts[job.title] = lines[-1] if lines and status in ("0", "1") else status
        ended = "" if status == "0" else f", {status}"
        lines = lines[-most:] if most else lines
        head = f"== {job.title} ({time.monotonic() - began:.0f} s{ended}; at {time.monotonic() - self.started:.0f} s)"
        with self._printing:
            print(f"\n{head}", *lines, sep="\n", flush=True)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Its exit status, or that it was stopped; nothing of it is left then."""
    with suppress(subprocess.TimeoutExpired):
        return str(process.wait(timeout=max(0.0, seconds)))
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return "stopped: the time is over"


def slotline(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from slotline.cli import main; raise SystemExit(main())", *arguments]


def script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-u", str(HERE / name), *arguments]


def mixed_model(folder: Path) -> str:
    """A tiny Gemma 3 of random weights: three layers with a window of 512 tokens and one without."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=1024,
        sliding_window=512,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)
    return str(folder)


def timed_jobs(only: Sequence[str]) -> Iterator[Job]:
    """What is timed, so nothing else may run beside it."""
    if "speed" in only:
        for name in (SMALL, LARGE):
            command = script("engine_gpu.py", str(HERE / "models" / name))
            yield Job(f"speed: {name}, random bfloat16 weights, best of the runs in brackets", command)
    if "downgrades" in only:
        title = f"downgrades: {SMALL}, a quarter of the workloads, times as slow as what slotline chose"
        yield Job(title, script("downgrades_gpu.py", str(HERE / "models" / SMALL)))


def explained_jobs(only: Sequence[str], model: str) -> Iterator[Job]:
    """`explain` reads no weights and runs nothing."""
    for backend in MIXED if "explain" in only else ():
        settings = (f"model={model}", "device=cuda", "dtype=bfloat16", f"attention.backend={backend}")
        command = slotline("explain", *(f"--set={setting}" for setting in settings))
        yield Job(f"explain: layers with a window and without, {backend}", command)


def conformance_jobs(backends: Sequence[str], level: str, cores: int, left: Callable[[], float]) -> Iterator[Job]:
    """The suite on each backend; nearly all of it is compiling."""
    jobs, ends = max(2, min(8, cores // 3)), time.time() + left() - 12
    for backend in backends:
        command = slotline("conform", backend, "--device", "cuda", "--level", level, "--jobs", str(jobs))
        rank = 0 if backend == LONGEST else 10
        run = f"exec nice -n {rank} {shlex.join(command)} --session-timeout=$(({ends:.0f} - $(date +%s)))"
        environment: dict[str, str] = {}
        if backend == LONGEST:
            environment = {
                "FLASHINFER_NVCC_LAUNCHER": str(HERE / "paged_kernels_only.sh"),
                "FLASHINFER_EXTRA_LDFLAGS": "-Wl,-z,lazy",
                "FLASHINFER_WORKSPACE_BASE": str(Path(tempfile.gettempdir()) / "slotline-flashinfer"),
                "MAX_JOBS": str(cores),
            }
            run = f"{shlex.join(script('flashinfer_modules.py', '--level', level))} && {run}"
        yield Job(f"conformance: {backend}", ["sh", "-c", run], environment, shown=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--seconds", type=float, default=560, help="that the call may take")
    parser.add_argument("--level", default="L4", help="of conformance")
    parser.add_argument("--backends", nargs="*", default=BACKENDS, help="of conformance")
    arguments = parser.parse_args()
    require_gpus()
    backends = arguments.backends if "conformance" in arguments.only else ()
    session = Session(time.monotonic() + arguments.seconds)
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    cores = sorted(os.sched_getaffinity(0))
    both = len(gpus) > 1 and len(cores) > 1
    cut = min(MOST_TIMED_CORES, len(cores) // 2)
    mine, others = (cores[:cut], cores[cut:]) if both else (cores, cores)
    print(f"{torch.cuda.get_device_name()} x {len(gpus)}, {len(cores)} cores, torch {torch.__version__}", flush=True)

    def timed() -> None:
        os.sched_setaffinity(0, mine)  # this thread's, and so that of the processes that it starts
        for job in timed_jobs(arguments.only):
            session.run(job, gpus[0])

    def compiling() -> None:
        os.sched_setaffinity(0, others)
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(MIXED) + max(1, len(backends))) as pool:
            model = mixed_model(Path(folder)) if "explain" in arguments.only else ""
            jobs = [
                *explained_jobs(arguments.only, model),
                *conformance_jobs(backends, arguments.level, len(others), lambda: session.left),
            ]
            for done in [pool.submit(session.run, job, gpus[-1]) for job in jobs]:
                done.result()

    beside = Thread(target=compiling)
    if both:
        beside.start()
    timed()
    if not both:
        beside.start()
    beside.join()
    print("", *(f"{title}: {verdict}" for title, verdict in session.verdicts.items()), sep="\n")
    print(f"\ndone in {time.monotonic() - session.started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
