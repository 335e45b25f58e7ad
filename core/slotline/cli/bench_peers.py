"""Runs of a workload on another engine, in a process of that engine's own Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import frozen

from slotline.cli.bench_run import Run, Served, Wave
from slotline.registry.cache_folder import cache_folder
from slotline.registry.errors import SlotlineError

_PROGRAM = Path(__file__).with_name("peer_program.py")
_SAME = ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
"""What two configurations of one model have in common, whatever the form of its weights."""
_FIND = "import sys; from importlib.util import find_spec; sys.exit(find_spec(sys.argv[1]) is None)"
_AGREE = 0.5
"""Share of the requests whose first greedy token must be the same. Sums in another order change a few."""


class PeerError(SlotlineError):
    """Another engine that is missing, failed, or did not do the same work."""


@frozen(kw_only=True)
class Peer:
    """An engine to compare with.

    Attributes:
        name: as on the command line.
        module: what its Python must be able to import.
        requirements: what `--peer-install` installs.
        devices: where it runs.
    """

    name: str
    module: str
    requirements: tuple[str, ...]
    devices: tuple[str, ...]

    def environment(self) -> Path:
        """Return the folder of its environment in the cache."""
        return cache_folder() / "peers" / self.name

    def python(self, named: str | None, *, install: bool = False) -> str:
        """Return the Python that runs it: the named one, ours if that has it, or that of its environment in the cache.

        Args:
            named: the path of a Python.
            install: make the environment if there is none.

        Raises:
            PeerError: if there is none of them.
        """
        own = self.environment() / "bin" / "python"
        if named is not None:
            if not Path(named).is_file():
                raise PeerError(f"there is no Python {named}", fix=f"name one that has {self.module}")
            if subprocess.run([named, "-c", _FIND, self.module], check=False).returncode:
                raise self.missing(named)
            return named
        if find_spec(self.module) is not None:
            return sys.executable
        if install and not own.is_file():
            self._install()
        if own.is_file():
            return str(own)
        raise self.missing(sys.executable)

    def missing(self, python: str, package: str = "") -> PeerError:
        """Return the error for a Python that lacks the engine, or a package of it."""
        return PeerError(
            f"{self.name} cannot run: {python} has no package {package or self.module}",
            fix=f"name a Python that has it, --peer-python PATH, or let --peer-install make an environment in "
            f"{self.environment()} (pip install {' '.join(self.requirements)})",
        )

    def _install(self) -> None:
        folder = self.environment()
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *self.requirements],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PeerError(
                    f"no environment for {self.name}: {' '.join(command)} ended with\n{_end(done.stderr)}",
                    fix=f"remove {folder} and mend what it names, or name a Python by --peer-python",
                )


PEERS: Mapping[str, Peer] = {
    "transformers": Peer(
        name="transformers",
        module="transformers",
        requirements=("transformers", "torch", "safetensors"),
        devices=("cpu", "cuda"),
    ),
    "vllm": Peer(name="vllm", module="vllm", requirements=("vllm",), devices=("cpu", "cuda")),
    "openvino": Peer(
        name="openvino",
        module="openvino_genai",
        requirements=("openvino-genai", "optimum-intel[openvino]"),
        devices=("cpu",),
    ),
}
"""By name."""


@frozen(kw_only=True)
class PeerJob:
    """A workload for another engine.

    Attributes:
        peer: its name.
        model: folder of the checkpoint.
        dtype, device: as of the plan, without an index.
        threads: of the processor.
        waves, max_tokens, temperature, max_model_len: as of the workload.
        runs: timed ones, after one to warm up.
        options: arguments of the engine's own.
    """

    peer: str
    model: str
    dtype: str
    device: str
    threads: int
    waves: tuple[Sequence[Sequence[int]], ...]
    max_tokens: tuple[Sequence[int], ...]
    temperature: float
    max_model_len: int
    runs: int
    options: Mapping[str, Any]


@frozen(kw_only=True)
class PeerRuns:
    """What another engine did: its version, the seconds of its start, and its runs."""

    version: str
    startup_s: float
    runs: list[Run]


def run_peer(job: PeerJob, python: str, parameters: int | None) -> PeerRuns:
    """Run a workload on another engine.

    Args:
        job: the workload.
        python: the engine's Python.
        parameters: of our model, to compare. None if unknown.

    Raises:
        PeerError: if it is missing, fails, has another model or makes another number of tokens.
    """
    from attrs import asdict

    peer = PEERS[job.peer]
    if job.device not in peer.devices:
        raise PeerError(f"{peer.name} is not run on {job.device} here", fix=f"choose {' or '.join(peer.devices)}")
    with TemporaryDirectory(prefix="slotline-peer-") as folder:
        files = [Path(folder) / name for name in ("job.json", "result.json")]
        files[0].write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [python, str(_PROGRAM), *map(str, files)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode or not files[1].is_file():
            raise PeerError(
                f"{peer.name} failed with exit code {done.returncode}:\n{_end(done.stdout)}",
                fix="its error says why; arguments of its own are given by --peer-set NAME=VALUE",
            )
        result = json.loads(files[1].read_text(encoding="utf-8"))
    if "missing" in result:
        raise peer.missing(result["python"], result["missing"])
    theirs = result["facts"].get("parameters")
    if parameters is not None and theirs is not None and abs(theirs - parameters) > 0.01 * parameters:
        raise PeerError(
            f"{peer.name} loaded another model: {theirs:,} parameters, and ours has {parameters:,}",
            fix="give --peer-model the same checkpoint in its form",
        )
    runs = [Run(waves=tuple(_wave(job, *each) for each in enumerate(waves))) for waves in result["runs"]]
    return PeerRuns(version=result["version"], startup_s=result["startup_s"], runs=runs)


def check_same_model(ours: Path, theirs: Path) -> None:
    """Compare two checkpoints' configurations.

    Raises:
        PeerError: if they differ in what one model has in any form.
    """
    if ours == theirs:
        return
    first, second = (_configuration(folder) for folder in (ours, theirs))
    for name in _SAME:
        if first.get(name) != second.get(name):
            raise PeerError(
                f"{theirs} is another model than {ours}: {name} is {second.get(name)!r}, not {first.get(name)!r}",
                fix="give --peer-model the same checkpoint in the peer's form",
            )


def check_same_text(ours: Run, theirs: Run, name: str, temperature: float) -> float | None:
    """Return the share of the requests whose first tokens are the same. None if tokens are drawn.

    Raises:
        PeerError: if it is less than half: the engines do not compute the same.
    """
    if temperature:
        return None
    pairs = zip(ours.waves[-1].served, theirs.waves[-1].served, strict=True)
    same = [mine.tokens[:1] == other.tokens[:1] for mine, other in pairs]
    share = sum(same) / len(same)
    if share < _AGREE:
        raise PeerError(
            f"{name} makes another text: the first token of {len(same) - sum(same)} of {len(same)} requests differs",
            fix="compare the checkpoints and dtypes; --any-text compares the times all the same",
        )
    return share


def _wave(job: PeerJob, place: int, wave: Mapping[str, Any]) -> Wave:
    """Return a wave in our form. Cached tokens are those of ours, since both engines are asked for the same."""
    wanted = job.max_tokens[place]
    made = [len(tokens) for tokens in wave["tokens"]]
    if made != list(wanted):
        raise PeerError(
            f"{job.peer} made {sum(made)} tokens, and {sum(wanted)} were asked for",
            fix="end-of-sequence must be ignored, and the model be long enough",
        )
    served = tuple(
        Served(prompt=len(prompt), cached=0, output=len(tokens), first=first, tokens=tuple(tokens))
        for prompt, tokens, first in zip(job.waves[place], wave["tokens"], wave["first"], strict=True)
    )
    steps = tuple((end, took, count) for end, took, count in wave["steps"])
    return Wave(seconds=wave["seconds"], served=served, steps=steps, prompt_steps=wave["prompt_steps"])


def _configuration(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PeerError(f"{folder} has no readable config.json: {error}", fix="name a checkpoint's folder") from error
    return found


def _end(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-12:])
