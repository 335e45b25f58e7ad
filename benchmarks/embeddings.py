"""Embeddings of texts: ours against sentence-transformers, on one random BERT of MiniLM's shape.

    OMP_NUM_THREADS=2 python benchmarks/embeddings.py [--texts 1000] [--dtypes float32 bfloat16]
    OMP_NUM_THREADS=1 python benchmarks/embeddings.py --cpu-time      # on a machine that others use
    python benchmarks/embeddings.py --device cuda --dtypes bfloat16 --batch-size 64

Both read one folder with a tokenizer of words, mean pooling and normalisation, and embed the same texts of equally many
tokens, from strings to vectors. The texts are divided among the rounds, and engines take turns in each. It prints
medians, the median of the rounds' ratios to the first engine, and the largest difference of the vectors. With
`--cpu-time` the seconds are those that the process had a core, so with one thread others do not count.
"""

from __future__ import annotations

import argparse
import importlib
import json
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
LIBRARIES = {"sentence-transformers": "sentence_transformers"}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{index}" for index in range(30_000)]
HEADS, HIDDEN, INTERMEDIATE, POSITIONS = 12, 384, 1536, 512
COLUMNS = ("dtype", "texts", "tokens each", "engine", "ms a text", "times the first engine's")

Embed = Callable[[list[str]], torch.Tensor]


def make_folder(path: Path, layers: int) -> Path:
    """Write a folder in the form of sentence-transformers with a random model."""
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
    transformers.BertModel(config).save_pretrained(path)
    transformers.BertTokenizerFast(vocab=vocab, model_max_length=POSITIONS).save_pretrained(path)
    modules = [
        {"idx": number, "name": str(number), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for number, (folder, kind) in enumerate(
            [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        )
    ]
    (path / "1_Pooling").mkdir()
    (path / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    for file, content in {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": POSITIONS, "do_lower_case": False},
    }.items():
        (path / file).write_text(json.dumps(content))
    return path


def slotline(folder: Path, dtype: str, given: argparse.Namespace) -> Embed:
    """Start an engine of ours."""
    settings: dict[str, Any] = {"scheduler.max_batched_tokens": given.step_tokens, "observability.progress": False}
    if given.device != "cpu":
        del settings["scheduler.max_batched_tokens"]
    llm = LLM(folder, device=given.device, dtype=dtype, **settings)
    return lambda texts: torch.stack([one.outputs.data for one in llm.embed(texts) if one.outputs is not None])


def sentence_transformers(folder: Path, dtype: str, given: argparse.Namespace) -> Embed:
    """Load the model with the library."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device=given.device, model_kwargs={"dtype": getattr(torch, dtype)})

    def embed(texts: list[str]) -> torch.Tensor:
        found: torch.Tensor = model.encode(
            texts, batch_size=given.batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        return found.float().cpu()

    return embed


ENGINES = {"slotline": slotline, "sentence-transformers": sentence_transformers}


def measure(
    folder: Path, dtype: str, rounds: Sequence[list[str]], given: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """Print and return the medians in milliseconds a text, and the median ratios to the first engine, by engine."""
    clock = time.process_time if given.cpu_time else time.perf_counter
    sides = {name: ENGINES[name](folder, dtype, given) for name in given.engines}
    vectors = {name: side(rounds[0]) for name, side in sides.items()}
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for number, texts in enumerate(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            start = clock()
            sides[name](texts)
            spent[name].append(1000 * (clock() - start) / len(texts))
    medians = {name: statistics.median(values) for name, values in spent.items()}
    first = next(iter(sides))
    ratios = {
        name: statistics.median(b / a for a, b in zip(spent[first], values, strict=True))
        for name, values in spent.items()
    }
    for name, values in spent.items():
        apart = (vectors[first] - vectors[name]).abs().max()
        print(
            f"{dtype} {name:22}{medians[name]:8.3f} ms a text   best {min(values):.3f}   ratio {ratios[name]:.2f}   "
            f"largest difference {apart:.1e}",
            flush=True,
        )
    return medians, ratios


def require_libraries(engines: Sequence[str]) -> None:
    """End the process with exit code 2 and a message where the library of an engine is absent."""
    for name in engines:
        try:
            importlib.import_module(LIBRARIES.get(name, "slotline"))
        except ImportError:
            error = ConfigError(
                f"this benchmark needs {name}, which cannot be imported",
                fix=f"pip install {name}, in the environment of slotline, or leave it out of --engines",
            )
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["slotline", "sentence-transformers"])
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
    require_libraries(given.engines)
    drawn = random.Random(0)
    texts = [" ".join(drawn.choices(WORDS, k=given.tokens - 2)) for _ in range(given.texts)]
    rounds = [part for number in range(given.rounds) if (part := texts[number :: given.rounds])]
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"torch {torch.__version__}, {', '.join(f'{name} {version(name)}' for name in given.engines)}, Python "
        f"{platform.python_version()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, load {load}; "
        f"{given.texts} texts of {given.tokens} tokens in {len(rounds)} rounds, "
        f"{'CPU time' if given.cpu_time else 'wall time'}"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_folder(Path(folder), given.layers)
        for dtype in given.dtypes:
            medians, ratios = measure(path, dtype, rounds, given)
            rows += [
                [dtype, str(given.texts), str(given.tokens), name, f"{medians[name]:.3f}", f"{ratios[name]:.2f}"]
                for name in medians
            ]
    if given.json:
        write_result(given.json, "embeddings", COLUMNS, rows, note=f"Load averages of the machine before: {load}.")


if __name__ == "__main__":
    main()
