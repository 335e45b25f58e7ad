"""Which of transformers' architectures can be divided among the ranks of a tensor group, and whether they stay equal.

    OMP_NUM_THREADS=1 python benchmarks/tensor_sweep.py [llama qwen3_5 ...] [--tensor 2 4] [--experts 2] [--page]

Without names it takes all of `MODEL_FOR_CAUSAL_LM_MAPPING`, in some minutes. Each model type gets the small random
checkpoint of `families_sweep.py`. The whole model and its parts are loaded as an engine loads them, passes included,
the parts as threads of one process. Two prompts, one in two chunks, and eight greedy tokens each go through both in one
batch. EQUAL means equal tokens, logits within 0.01 % of the largest, and bitwise equal logits on all ranks. --page
writes the table of docs/model-families.md. --experts lets the ranks share experts whole, with so many copies.
--sequence gives each rank the hidden states of its own tokens alone. With --own the ranks are replicas that have tokens
of their own and share experts: the first one has both prompts and the others none.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import families_sweep
import torch
from attrs import evolve, frozen
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slotline.plugins.model_families.tensor_parallel import threads
from slotline.plugins.model_families.transformers_model import DecoderModel, TransformersDecoder
from slotline.plugins.model_families.trial_cache import TrialCache
from slotline.registry.contracts.communicator import Communicator
from slotline.registry.contracts.model_family import ModelContext, Shard
from slotline.registry.errors import NegotiationError, SlotlineError

LENGTHS, FIRST_CHUNK, NEW, TOLERANCE = (37, 11), 21, 8, 1e-4
MAX_LEN = 64
SHORT = "llama --tensor 2"
PAGE = Path(__file__).parents[1] / "docs" / "model-families.md"
START, END = "<!-- tensor -->\n", "<!-- end tensor -->"


@frozen(eq=False)
class Said:
    """Greedy texts of a model, and the logits [n, vocab_size] of each."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]
    notes: tuple[str, ...]
    parameters: int


def load(path: Path, shard: Shard | None = None, communicator: Communicator | None = None, **settings: Any) -> Any:
    """Return a model, or a rank's part of it, loaded as an engine loads it."""
    family = TransformersDecoder()
    whole = family.inspect(path)
    facts = whole if shard is None else family.inspect(path, shard=shard)
    given: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "optimize": True,
        "shard": shard,
        "communicator": communicator,
    }
    return family.load(ModelContext(contract=1, facts=facts, **(given | settings)))


@torch.no_grad()
def say(model: DecoderModel) -> Said:
    """Return what a model says to two prompts of one batch, the first of which comes in two chunks."""
    vocab, cache = model.facts.vocab_size, TrialCache()
    texts = [_prompt(length, vocab) for length in LENGTHS]
    done, logits = [0, 0], ([], [])  # type: ignore[var-annotated]
    steps = [[(0, FIRST_CHUNK)], [(0, LENGTHS[0] - FIRST_CHUNK), (1, LENGTHS[1])], *([[(0, 1), (1, 1)]] * (NEW - 1))]
    for step in steps:
        cache.counts = step
        ids = torch.tensor([t for r, n in step for t in texts[r][done[r] : done[r] + n]])
        places = torch.tensor([p for r, n in step for p in range(done[r], done[r] + n)])
        hidden = model.forward(ids, places, cache.attend, advance=cache.advance)
        found, start = model.compute_logits(hidden), 0
        for request, count in step:
            start += count
            done[request] += count
            if done[request] >= LENGTHS[request]:
                logits[request].append(found[start - 1].clone())
                texts[request].append(int(found[start - 1].argmax()))
    return Said(
        [text[length:] for text, length in zip(texts, LENGTHS, strict=True)],
        [torch.stack(rows) for rows in logits],
        model.notes,
        sum(parameter.numel() for parameter in model.hf_model.parameters()),
    )


def _prompt(length: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(min(5, vocab - 1), vocab, (length,), generator=generator).tolist()


def parts(path: Path, size: int, copies: int | None = None, *, sequence: bool = False, **settings: Any) -> list[Said]:
    """Return what each of `size` ranks says. With `copies`, they share experts whole, and so many are redundant.

    With `sequence`, each has hidden states of its own tokens.
    """
    shared: dict[str, Any] = {} if copies is None else {"experts": True, "redundant_experts": copies}
    shared["sequence"] = sequence
    return threads.run(size, lambda shard, ranks: say(load(path, evolve(shard, **shared), ranks, **settings)))


def replicas(path: Path, size: int, copies: int) -> list[Said]:
    """Return what the first of `size` ranks with tokens of their own says, while the others have none."""

    @torch.no_grad()
    def one(shard: Shard, ranks: Communicator) -> Said | None:
        part = evolve(shard, experts=True, redundant_experts=copies, own_tokens=True)
        model = load(path, part, ranks)
        if not model.facts.mixtures:
            raise NegotiationError("no mixture", fix="take another model")
        if shard.rank == 0:
            return say(model)
        for _ in range(NEW + 1):
            model.idle_experts()
        return None

    return [said for said in threads.run(size, one) if said is not None]


def difference(whole: Said, ranks: Sequence[Said]) -> str:
    """Return in words how ranks differ from the whole model, or an empty string."""
    first = ranks[0]
    for own, wanted in zip(first.logits, whole.logits, strict=True):
        worst = float((own - wanted).abs().nan_to_num(0.0).max() / wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
        if not worst <= TOLERANCE:
            return f"logits differ by {worst:.1e} of the largest"
    for rank in ranks:
        if not all(torch.equal(a, b) for a, b in zip(rank.logits, first.logits, strict=True)):
            return "ranks have other logits"
    return "" if first.tokens == whole.tokens else "other tokens"


def verdict(
    path: Path,
    size: int,
    whole: Said | None = None,
    copies: int | None = None,
    *,
    sequence: bool = False,
    own: bool = False,
) -> tuple[str, str]:
    """Return EQUAL, DIFF or REFUSED, with notes or the reason. `whole` is what the whole model says, if it is known."""
    whole = whole or say(load(path))
    try:
        ranks = replicas(path, size, copies or 0) if own else parts(path, size, copies, sequence=sequence)
    except NegotiationError as error:
        return "REFUSED", error.message
    wrong = difference(whole, ranks)
    share = f"{ranks[0].parameters / whole.parameters:.0%} of the parameters"
    notes = [note for note in ranks[0].notes if note.startswith("whole on each rank")]
    return ("DIFF", wrong) if wrong else ("EQUAL", "; ".join((share, *notes)))


def verdicts(
    model_type: str, architecture: str, sizes: Sequence[int], copies: int | None = None, **form: bool
) -> Mapping[int, tuple[str, str]]:
    """Return the verdict of each size. UNSERVED is what one rank does not run either."""
    path = Path(tempfile.mkdtemp(prefix="sweep-"))
    try:
        try:
            families_sweep.build(model_type, architecture, path)
            whole = say(load(path))
        except Exception as error:
            return {0: ("UNSERVED", f"{type(error).__name__}: {error}")}
        found = {}
        for size in sizes:
            try:
                found[size] = verdict(path, size, whole, copies, **form)
            except SlotlineError as error:
                found[size] = ("ERROR", error.message)
            except Exception as error:
                found[size] = ("CRASH", f"{type(error).__name__}: {error}")
        return {size: (word, " ".join(why.replace(str(path), "PATH").split())) for size, (word, why) in found.items()}
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types, by default all")
    parser.add_argument("--tensor", type=int, nargs="*", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--experts", type=int, metavar="COPIES", help="share experts whole, with so many copies")
    parser.add_argument("--sequence", action="store_true", help="divide hidden states by tokens")
    parser.add_argument("--own", action="store_true", help="let the ranks share experts alone, as replicas do")
    arguments = parser.parse_args()
    names = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    torch.set_num_threads(1)
    with families_sweep.quiet():
        for name in arguments.names or names:
            architecture = names[name] if isinstance(names[name], str) else names[name][0]
            started = time.perf_counter()
            form = {"sequence": arguments.sequence, "own": arguments.own}
            found = verdicts(name, architecture, arguments.tensor, arguments.experts, **form)
            for size, (word, reason) in found.items():
                seconds = time.perf_counter() - started
                print(f"{seconds:5.1f} {word:8} {name:22} {size} {architecture:34} {reason[:300]}", flush=True)


if __name__ == "__main__":
    main()
