"""Train the small Python language model that ships with slotline.

Four sub-commands, each usable alone; ``all`` runs them in order:

``tokenizer``  train the byte-level BPE tokenizer on the corpus
``train``      train the Llama-architecture model with that tokenizer
``evaluate``   measure the saved folder on held-out files and print samples
``card``       write the model card from the recorded numbers

The corpus is source code of Python's standard library. Example::

    python training/small_model.py all --minutes 6 --out core/slotline/core/small_model
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import math
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

END_OF_TEXT, PAD, IM_START, IM_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, PAD, IM_START, IM_END, *(f"<|reserved_{i}|>" for i in range(4))]
END_OF_TEXT_ID, PAD_ID, IM_END_ID = (SPECIAL_TOKENS.index(token) for token in (END_OF_TEXT, PAD, IM_END))

# Words take one leading space; runs of newlines and runs of spaces (indentation) stay whole, apart from
# words, so that a prompt may end after a newline or after an indentation.
SPLIT_PATTERN = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\n+| +|\t+|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "pydoc_data", "encodings", "data"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "bad", "plat-")
TEST_FOLDERS = {"test", "tests", "idle_test"}
HELD_OUT_PERCENT = 4
LONG_LINE = 30
STREAM_SHARES = {"library": 0.53, "test": 0.41, "chat": 0.06}
METRICS_FILE = "training_metrics.json"


# ---------------------------------------------------------------------------------------------- corpus


@dataclass
class Corpus:
    """Documents by kind (library, test, chat), split into training and held-out ones."""

    train: dict[str, list[str]]
    held_out: dict[str, list[str]]


def source_files(root: Path) -> Iterator[Path]:
    """Relative paths of the Python files under ``root`` that belong to the standard library."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and not any(
            part.startswith(SKIPPED_PREFIXES) for part in relative.parts
        ):
            yield relative


def parse(text: str) -> ast.Module:
    """The syntax tree, without warnings about the source's own style."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def read_source(path: Path) -> str | None:
    """The file's text with newlines as ``\\n``, or None unless it is UTF-8 and valid Python."""
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text


def is_held_out(relative: Path) -> bool:
    """Whether the hash of the relative path puts the file in the held-out split."""
    digest = hashlib.sha256(relative.as_posix().encode()).hexdigest()
    return int(digest[:8], 16) % 100 < HELD_OUT_PERCENT


def kind_of(relative: Path) -> str:
    """``test`` for a file of a test package, otherwise ``library``."""
    return "library" if TEST_FOLDERS.isdisjoint(relative.parts) else "test"


def long_lines(text: str) -> set[str]:
    """The distinct lines long enough to identify where they come from."""
    return {line for line in map(str.strip, text.split("\n")) if len(line) >= LONG_LINE}


def share_in(lines: set[str], seen: set[str]) -> float:
    """The share of ``lines`` that is in ``seen``; 1 when there are none, so that such files are dropped."""
    return len(lines & seen) / len(lines) if lines else 1.0


def without_copies(texts: Iterable[str], held_out_lines: set[str]) -> Iterator[str]:
    """Texts that neither overlap a held-out file (renamed, say) nor largely repeat an earlier text."""
    seen: set[str] = set()
    for text in texts:
        lines = long_lines(text)
        if share_in(lines, held_out_lines) < 0.3 and share_in(lines, seen) < 0.5:
            seen |= lines
            yield text


def chat_documents(text: str) -> list[str]:
    """One chat exchange for each short documented module-level function: summary asks, source answers."""
    lines, documents = text.split("\n"), []
    for node in parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if 16 <= len(summary) <= 300 and node.end_lineno - node.lineno < 60:
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            documents.append(f"{IM_START}user\n{summary}{IM_END}\n{IM_START}assistant\n{code}{IM_END}\n")
    return documents


def split(files: Iterable[tuple[Path, str | None]]) -> Corpus:
    """Split files by relative path; a held-out path is held out in every version, and the first is kept."""
    held_out: dict[Path, str] = {}
    train: dict[str, list[str]] = {"library": [], "test": []}
    for relative, text in files:
        if text is not None and is_held_out(relative):
            held_out.setdefault(relative, text)
        elif text is not None:
            train[kind_of(relative)].append(text)
    lines = set().union(*map(long_lines, held_out.values()))
    return Corpus(
        {kind: list(without_copies(texts, lines)) for kind, texts in train.items()},
        {kind: [text for path, text in held_out.items() if kind_of(path) == kind] for kind in train},
    )


def collect(roots: Iterable[Path]) -> Corpus:
    """Read every root, newest version first, and make chat exchanges from the library's training files."""
    paths = [(root, relative) for root in roots for relative in source_files(root)]
    with ProcessPoolExecutor() as pool:
        texts = pool.map(read_source, [root / relative for root, relative in paths], chunksize=32)
        corpus = split(zip((relative for _, relative in paths), texts, strict=True))
        exchanges = pool.map(chat_documents, corpus.train["library"], chunksize=8)
        corpus.train["chat"] = list(itertools.chain.from_iterable(exchanges))
    return corpus


# ------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; any byte string round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrap_tokenizer(tokenizer)


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give the tokenizer its special tokens and its chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        extra_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


# -------------------------------------------------------------------------------------- token streams


@dataclass
class Stream:
    """Documents as one tensor of tokens, with the positions at which a training window may start."""

    tokens: Tensor
    starts: Tensor


def encode_documents(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """All documents as one tensor, each with an end-of-text token before and after it."""
    ids = [END_OF_TEXT_ID]
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts[start : start + 512]):
            ids += [*encoding.ids, END_OF_TEXT_ID]
    return torch.tensor(ids, dtype=torch.int32)


def make_stream(texts: list[str], tokenizer: PreTrainedTokenizerFast, context: int, device: str) -> Stream:
    """Put a kind's tokens on the device; windows start at a document or at a line."""
    tokens = encode_documents(texts, tokenizer)
    newlines = [i for i in range(len(tokenizer)) if set(tokenizer.convert_ids_to_tokens(i)) == {"Ċ"}]
    after_newline = torch.isin(tokens, torch.tensor(newlines, dtype=torch.int32)).roll(1)
    starts = torch.nonzero(after_newline | (tokens == END_OF_TEXT_ID)).flatten()
    starts = starts[starts < len(tokens) - context - 1]
    return Stream(tokens.to(device), starts.to(device))


def sample_windows(streams: dict[str, Stream], batch: int, context: int) -> Tensor:
    """Random windows of ``context + 1`` tokens, shared out among the streams by STREAM_SHARES."""
    parts, total = [], sum(STREAM_SHARES[name] for name in streams)
    for name, stream in streams.items():
        rows = max(1, round(batch * STREAM_SHARES[name] / total))
        chosen = torch.randint(len(stream.starts), (rows,), device=stream.starts.device)
        offsets = torch.arange(context + 1, device=stream.starts.device)
        parts.append(stream.tokens[stream.starts[chosen, None] + offsets])
    return torch.cat(parts).long()


# --------------------------------------------------------------------------------------------- model


def build_model(vocab_size: int, context: int) -> LlamaForCausalLM:
    """A randomly initialised Llama-architecture model of about 6.6 million parameters."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=context,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=PAD_ID,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Drop out the output of every attention and MLP block while the model is in training mode."""

    def drop(module: torch.nn.Module, _: Any, output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def next_token_loss(model: LlamaForCausalLM, windows: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of every token of the windows but the first, padding left out."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(
        logits.float().flatten(0, 1), windows[:, 1:].flatten(), ignore_index=PAD_ID, reduction=reduction
    )


@torch.no_grad()
def stream_loss(model: LlamaForCausalLM, tokens: Tensor, context: int, batch: int = 16) -> float:
    """Mean loss in nats a token over all of ``tokens``, read in windows of ``context``; NaN if none."""
    count = len(tokens) - 1
    if count == 0:
        return math.nan
    windows = math.ceil(count / context)
    padded = F.pad(tokens.long(), (0, windows * context + 1 - len(tokens)), value=PAD_ID)
    rows = padded.unfold(0, context + 1, context)
    model.eval()
    parts = [rows[start : start + batch] for start in range(0, windows, batch)]
    return sum(float(next_token_loss(model, part, "sum")) for part in parts) / count


# ------------------------------------------------------------------------------------------- training


def make_optimizer(model: LlamaForCausalLM, options: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW, with weight decay on the matrices alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=options.device == "cuda")


def schedule(progress: float, warmup: float = 0.03) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine to zero."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


class Best:
    """The weights with the lowest held-out loss so far."""

    def __init__(self) -> None:
        """Start with no weights."""
        self.loss = math.inf
        self.weights: dict[str, Tensor] = {}

    def offer(self, loss: float, model: LlamaForCausalLM) -> None:
        """Keep a copy of the model's weights if this loss is the lowest."""
        if loss < self.loss:
            self.loss = loss
            self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}


def update(optimizer: torch.optim.Optimizer, model: LlamaForCausalLM, loss: Tensor, lr: float) -> None:
    """One optimizer step at the given learning rate, on clipped gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def fit(
    model: LlamaForCausalLM, streams: dict[str, Stream], held_out: Tensor, options: argparse.Namespace
) -> tuple[Best, dict[str, float]]:
    """Train until the time or the steps are used up; returns the best weights and what it took."""
    optimizer, best = make_optimizer(model, options), Best()
    loss_of: Callable[..., Tensor] = torch.compile(next_token_loss) if options.compile else next_token_loss
    model.train()
    update(optimizer, model, loss_of(model, sample_windows(streams, options.batch, options.context)), 0.0)
    started, step, progress = time.monotonic(), 0, 0.0  # compilation is over by now
    while progress < 1:
        windows = sample_windows(streams, options.batch, options.context)
        loss = loss_of(model, windows)
        update(optimizer, model, loss, options.lr * schedule(progress))
        step += 1
        if step % 10 == 0 or step >= options.steps:
            loss.item()  # waits for the device, so that the clock is honest
            progress = max((time.monotonic() - started) / (60 * options.minutes), step / options.steps)
        if step % options.evaluate_every == 0 or progress >= 1:
            measured = stream_loss(model, held_out, options.context)
            spent = time.monotonic() - started
            print(f"step {step:6d} {spent:6.1f} s  loss {loss:.4f}  held-out {measured:.4f}", flush=True)
            best.offer(measured, model)
            model.train()
    seconds, tokens = time.monotonic() - started, step * windows[:, 1:].numel()
    return best, {"steps": step, "tokens": tokens, "seconds": seconds}


# ---------------------------------------------------------------------------------------- sub-commands


def record(folder: Path, **numbers: Any) -> dict[str, Any]:
    """Add numbers to the folder's metrics file; returns all of them."""
    path = folder / METRICS_FILE
    metrics: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    metrics |= numbers
    path.write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n")
    return metrics


def run_tokenizer(options: argparse.Namespace, corpus: Corpus) -> None:
    """Train and save the tokenizer."""
    tokenizer = train_tokenizer([*corpus.train["library"], *corpus.train["test"]], options.vocab_size)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(options.out, save_jinja_files=False)
    config = options.out / "tokenizer_config.json"  # the class name that every version of transformers knows
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    print(f"tokenizer: {len(tokenizer)} tokens")


def run_train(options: argparse.Namespace, corpus: Corpus) -> None:
    """Train and save the model."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(options.out, trust_remote_code=False)
    streams = {
        kind: make_stream(texts, tokenizer, options.context, options.device)
        for kind, texts in corpus.train.items()
        if texts
    }
    held_out = encode_documents([t for texts in corpus.held_out.values() for t in texts], tokenizer)
    sizes = {kind: len(stream.tokens) for kind, stream in streams.items()}
    print(f"training tokens: {sizes}; held-out tokens: {len(held_out)}", flush=True)
    model = build_model(len(tokenizer), options.context).to(options.device)
    add_dropout(model, options.dropout)
    best, spent = fit(model, streams, held_out.to(options.device), options)
    model.load_state_dict(best.weights)
    train_loss = stream_loss(model, streams["library"].tokens[:400_000], options.context)
    save_model(model, options.out)
    versions = ", ".join(root.name.removeprefix("python") for root in options.corpus)
    numbers = {"python_versions": versions, "corpus_tokens": sizes, "train_loss": train_loss, **spent}
    record(options.out, recipe=recipe(options), **numbers)


def recipe(options: argparse.Namespace) -> dict[str, float]:
    """The settings that decide the outcome."""
    names = ("minutes", "batch", "context", "lr", "weight_decay", "dropout", "seed")
    return {name: getattr(options, name) for name in names}


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Save the weights in bfloat16 with their configuration."""
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=[END_OF_TEXT_ID, IM_END_ID], pad_token_id=PAD_ID
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def run_evaluate(options: argparse.Namespace, corpus: Corpus) -> None:
    """Load the saved folder, measure it on the held-out files and print samples."""
    tokenizer = AutoTokenizer.from_pretrained(options.out, trust_remote_code=False)
    model = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32, trust_remote_code=False).to(
        options.device
    )
    results: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    everything = {**corpus.held_out, "all": [t for texts in corpus.held_out.values() for t in texts]}
    for kind, texts in everything.items():
        tokens = encode_documents(texts, tokenizer).to(options.device)
        loss, size = stream_loss(model, tokens, options.context), sum(len(text.encode()) for text in texts)
        results[f"held_out_{kind}"] = {
            "files": len(texts),
            "tokens": len(tokens),
            "bytes": size,
            "loss": loss,
            "bits_per_byte": loss * (len(tokens) - 1) / math.log(2) / max(size, 1),
        }
    print(json.dumps(record(options.out, **results), indent=2))
    print_samples(model, tokenizer, corpus)


def print_samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> None:
    """Continue a few prompts and the middle of three held-out files."""
    chat = [{"role": "user", "content": "Return the sum of all the items in a list."}]
    prompts = ["def main(", "class Foo:\n    def __init__(self", "import os\n\ndef read_lines(path):\n"]
    prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    for text in corpus.held_out["library"][:3]:
        lines = text.split("\n")
        prompts.append("\n".join(lines[: len(lines) // 2][-40:]) + "\n")
    for prompt, sample in itertools.product(prompts, (False, True)):
        print(f"----- {'sampled' if sample else 'greedy'}")
        print(prompt[-300:] + "⟦" + complete(model, tokenizer, prompt, sample) + "⟧")


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, sample: bool) -> str:
    """Continue the prompt by up to 120 tokens."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    choice = {"do_sample": True, "temperature": 0.7, "top_p": 0.95} if sample else {"do_sample": False}
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=120, **choice)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def run_card(options: argparse.Namespace, corpus: Corpus) -> None:
    """Write the model card: the template beside this script, filled with the recorded numbers."""
    if options.hardware:
        record(options.out, hardware=options.hardware)
    template = Path(__file__).with_name("model_card.md").read_text()
    (options.out / "README.md").write_text(template.format_map(record(options.out)))


COMMANDS: dict[str, Callable[[argparse.Namespace, Corpus], None]] = {
    "tokenizer": run_tokenizer,
    "train": run_train,
    "evaluate": run_evaluate,
    "card": run_card,
}


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    cuda, stdlib = torch.cuda.is_available(), Path(sysconfig.get_paths()["stdlib"])
    add = parser.add_argument
    add("command", choices=[*COMMANDS, "all"])
    add("--corpus", type=Path, nargs="+", default=[stdlib], help="library folders, newest version first")
    add("--out", type=Path, default=Path("core/slotline/core/small_model"), help="the model's folder")
    add("--device", default="cuda" if cuda else "cpu")
    add("--minutes", type=float, default=6.0, help="stop after this much training time")
    add("--steps", type=int, default=1_000_000, help="or after this many steps")
    add("--vocab-size", type=int, default=4096)
    add("--context", type=int, default=2048)
    add("--batch", type=int, default=32, help="windows of --context tokens in a step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--weight-decay", type=float, default=0.5)
    add("--dropout", type=float, default=0.3)
    add("--evaluate-every", type=int, default=500, help="steps between held-out measurements")
    add("--seed", type=int, default=0)
    add("--compile", action=argparse.BooleanOptionalAction, default=cuda, help="use torch.compile")
    add("--hardware", help="what it was trained on, for the model card")
    return parser.parse_args()


def main() -> None:
    """Run the chosen sub-command, or all of them."""
    options = parse_options()
    corpus = collect(options.corpus)
    for kind in corpus.train:
        files, held = corpus.train[kind], corpus.held_out.get(kind, [])
        print(f"{kind}: {len(files)} documents, {sum(map(len, files)):,} characters, {len(held)} held out")
    for name, command in COMMANDS.items():
        if options.command in (name, "all"):
            command(options, corpus)


if __name__ == "__main__":
    main()
