"""Embeddings of texts on a CPU: ours against sentence-transformers, on one random BERT of MiniLM's shape.

    OMP_NUM_THREADS=2 python benchmarks/embeddings.py [--texts 1000] [--dtypes float32 bfloat16]
    OMP_NUM_THREADS=1 python benchmarks/embeddings.py --cpu-time      # on a machine that others use

Both read one folder with a tokenizer of words, mean pooling and normalisation, and embed the same texts of equally many
tokens, from strings to vectors. The texts are divided among the rounds, and both take turns in each. It prints medians,
the median of the rounds' ratios, and the largest difference of the vectors. With `--cpu-time` the seconds are those
that the process had a core, so with one thread others do not count.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from command_line import at_least, positive
from result_file import write_result

from slotline.core import LLM
from slotline.registry.errors import ConfigError

SHORT = "--texts 4 --tokens 16 --rounds 2 --layers 1 --dtypes float32"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{index}" for index in range(30_000)]
HEADS, HIDDEN, INTERMEDIATE, POSITIONS = 12, 384, 1536, 512
COLUMNS = ("dtype", "texts", "tokens each", "slotline ms a text", "sentence-transformers ms a text", "ratio")

Embed = Callable[[list[str]], torch.Tensor]


def make_folder(path: Path, layers: int) -> Path:
    """Write a folder of sentence-transformers with a random model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    vocab = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    config = transformers.BertConfig(
        vocab_size=len(vocab),
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=POSITIONS,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(path / "bert")
    transformers.BertTokenizerFast(vocab=vocab, model_max_length=POSITIONS).save_pretrained(path / "bert")
    modules = [Transformer(str(path / "bert")), Pooling(HIDDEN, pooling_mode="mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(path / "folder"), create_model_card=False)
    return path / "folder"


def ours(folder: Path, dtype: str, step_tokens: int) -> Embed:
    """An engine of slotline."""
    settings: dict[str, Any] = {"scheduler.max_batched_tokens": step_tokens, "observability.progress": False}
    llm = LLM(folder, device="cpu", dtype=dtype, **settings)
    return lambda texts: torch.stack([one.outputs.data for one in llm.embed(texts) if one.outputs is not None])


def theirs(folder: Path, dtype: str, batch_size: int) -> Embed:
    """The library's model."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def embed(texts: list[str]) -> torch.Tensor:
        found: torch.Tensor = model.encode(
            texts, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        return found.float()

    return embed


def measure(
    folder: Path, dtype: str, rounds: Sequence[list[str]], given: argparse.Namespace
) -> tuple[dict[str, float], float]:
    """Print and return the medians in milliseconds a text, and the median of the ratios."""
    clock = time.process_time if given.cpu_time else time.perf_counter
    sides = {"slotline": ours(folder, dtype, given.step_tokens)}
    sides["sentence-transformers"] = theirs(folder, dtype, given.batch_size)
    first, second = (side(rounds[0][:2]) for side in sides.values())
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for number, texts in enumerate(rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            start = clock()
            sides[name](texts)
            spent[name].append(1000 * (clock() - start) / len(texts))
    medians = {name: statistics.median(values) for name, values in spent.items()}
    mine, other = spent.values()
    ratio = statistics.median(b / a for a, b in zip(mine, other, strict=True))
    for name, values in spent.items():
        print(f"{dtype} {name:22}{medians[name]:8.2f} ms a text   best {min(values):.2f}", flush=True)
    print(f"{dtype} ratio {ratio:.2f}, largest difference of a vector {(first - second).abs().max():.1e}", flush=True)
    return medians, ratio


def require_library() -> None:
    """End the process with exit code 2 and a message where sentence-transformers is absent."""
    try:
        import sentence_transformers  # noqa: F401
    except ImportError:
        error = ConfigError(
            "this benchmark needs sentence-transformers, which cannot be imported",
            fix="pip install sentence-transformers, in the environment of slotline",
        )
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=positive, default=1000)
    parser.add_argument("--tokens", type=at_least(3), default=256, help="of each text, special ones included")
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--step-tokens", type=positive, default=2048, help="scheduler.max_batched_tokens of ours")
    parser.add_argument("--batch-size", type=positive, default=32, help="of sentence-transformers, 32 is its default")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path, help="write a result file")
    given = parser.parse_args()
    if given.tokens > POSITIONS:
        parser.error(f"--tokens {given.tokens} is above {POSITIONS}, the positions of the model")
    require_library()
    drawn = random.Random(0)
    texts = [" ".join(drawn.choices(WORDS, k=given.tokens - 2)) for _ in range(given.texts)]
    rounds = [part for number in range(given.rounds) if (part := texts[number :: given.rounds])]
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"torch {torch.__version__}, sentence-transformers {version('sentence-transformers')}, Python "
        f"{platform.python_version()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, load {load}; "
        f"{given.texts} texts of {given.tokens} tokens in {len(rounds)} rounds, "
        f"{'CPU time' if given.cpu_time else 'wall time'}"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_folder(Path(folder), given.layers)
        for dtype in given.dtypes:
            medians, ratio = measure(path, dtype, rounds, given)
            cells = [f"{value:.1f}" for value in medians.values()]
            rows.append([dtype, str(given.texts), str(given.tokens), *cells, f"{ratio:.2f}"])
    if given.json:
        write_result(given.json, "embeddings", COLUMNS, rows, note=f"Load averages of the machine before: {load}.")


if __name__ == "__main__":
    main()
