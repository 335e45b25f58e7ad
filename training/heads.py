"""Train draft heads for a model: EAGLE, EAGLE-3, DFlash or Medusa, in the folders that their authors publish.

The model itself writes most of the training text: it continues, mostly greedily, the beginnings of source files, since
a head must guess what the model would write. A head is trained on its own guesses for as many steps as it will draft
(EAGLE-3's training-time test), and then measured on held-out files. Examples::

    python training/heads.py eagle3                        # for the model that ships with slotline, into its folder
    python training/heads.py medusa --model /my/model --text /my/code --out /my/model/medusa
"""

from __future__ import annotations

import argparse
import copy
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from dflash_trainer import DFlashTrainer
from eagle_trainer import EagleTrainer
from medusa_trainer import MedusaTrainer
from small_model import Corpus, collect, encode_documents, long_lines, without_copies
from step import Step
from target import Target
from text import Prompts, Text, Writer, prompts_of
from torch import Tensor
from transformers import AutoTokenizer

TRAINERS: dict[str, Any] = {
    "eagle": EagleTrainer,
    "eagle3": EagleTrainer,
    "dflash": DFlashTrainer,
    "medusa": MedusaTrainer,
}


def more_texts(roots: list[Path], held_out: list[str]) -> list[str]:
    """What folders hold, without copies of each other and of held-out files."""
    if not roots:
        return []
    corpus, lines = collect(roots), set[str]().union(*map(long_lines, held_out))
    texts = [one for kinds in (corpus.train, corpus.held_out) for kind in ("library", "test") for one in kinds[kind]]
    return list(without_copies(texts, lines))


# ------------------------------------------------------------------------------------ training and measuring


def most_frequent(tokens: Tensor, vocab_size: int, count: int) -> Tensor:
    """The `count` tokens that a text [n] has most of, in rising order."""
    frequencies = torch.bincount(tokens, minlength=vocab_size)
    return frequencies.topk(min(count, vocab_size)).indices.sort().values


def fit(
    trainer: Any, target: Target, step: Step, text: Text, windows: Tensor, seconds: float, options: argparse.Namespace
) -> int:
    """Train until the seconds or the steps are used up; returns the steps.

    Every `options.save_seconds` the head is saved, and measured on held-out windows.
    """
    generator = torch.Generator().manual_seed(options.seed)
    started = saved = time.monotonic()
    steps, progress = 0, 0.0
    while progress < 1:
        step(text.sample(options.batch, generator), progress)
        steps += 1
        if steps % 20 == 0 or steps >= options.steps:
            loss, now = step.loss.item(), time.monotonic()  # waits for the device, so that the clock is honest
            progress = max((now - started) / seconds, steps / options.steps)
            if now - saved >= options.save_seconds or progress >= 1:
                saved = now
                trainer.save(options.out)
                length = measure(trainer, target, windows, options)["accepted_length"]
                print(
                    f"step {steps:6d} {now - started:6.1f} s  loss {loss:.4f}  accepted length {length:.3f}, "
                    f"{text.written:,} windows written, {text.read:,} read",
                    flush=True,
                )
    return steps


def accepted_lengths(drafts: Tensor, windows: Tensor, start: int) -> tuple[Tensor, int, int]:
    """How a chain of drafts fares behind position `start` of each window, verified greedily.

    Args:
        drafts: [b, t - 1, k] behind each token that follows a position; windows: [b, t] the model's greedy text.

    Returns:
        How often the draft at each place stood, [k]; the verifying steps; the tokens that they gave, bonus included.
    """
    length = windows.shape[1] - 1 - drafts.shape[2]
    right = torch.stack([windows[:, 2 + i : 2 + i + length] for i in range(drafts.shape[2])], -1)
    runs = (drafts[:, :length] == right).long().cumprod(-1).cpu()  # [b, length, k]
    stood, steps, tokens = torch.zeros(drafts.shape[2], dtype=torch.long), 0, 0
    for window in runs:
        at = start
        while at < length:
            stood += window[at]
            steps, tokens = steps + 1, tokens + 1 + int(window[at].sum())
            at += 1 + int(window[at].sum())
    return stood, steps, tokens


def prompt_length(options: argparse.Namespace) -> int:
    """Tokens of a held-out prompt."""
    return min(128, options.context // 3)


def held_out_windows(texts: list[str], tokenizer: Any, options: argparse.Namespace) -> Tensor:
    """The model's greedy continuations of held-out files, [prompts, tokens] int64 on the device."""
    generator, prompt = torch.Generator().manual_seed(1), prompt_length(options)
    shape = {"context": min(options.context, prompt + 192), "prompts": options.held_out}
    prompts = prompts_of(encode_documents(texts, tokenizer), prompt, options.held_out, generator)
    writer = Writer(argparse.Namespace(**{**vars(options), **shape}), options.device)
    return writer(prompts.tolist(), [0.0] * options.held_out).to(options.device)


def measure(trainer: Any, target: Target, windows: Tensor, options: argparse.Namespace) -> Any:
    """Mean accepted length, the bonus token included, on `held_out_windows`, in the model's dtype."""
    stood, steps, tokens = torch.zeros(options.drafts, dtype=torch.long), 0, 0
    trainer = copy.deepcopy(trainer).to(target.model.dtype).eval()
    for part in windows.split(32):
        drafts = trainer.drafts(target, part, *target.states(part))
        found = accepted_lengths(drafts, part, prompt_length(options) - 1)
        stood, steps, tokens = stood + found[0], steps + found[1], tokens + found[2]
    return {
        "accepted_length": round(tokens / steps, 3),
        "acceptance_by_position": [round(int(count) / steps, 3) for count in stood],
        "held_out_prompts": options.held_out,
        "tokens": tokens,
    }


def measure_begun(corpus: Corpus, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What the heads of `options.begin` reach on each kind of held-out text, as `measure` says."""
    target = Target(options.model, options.device, ())
    kept = torch.arange(options.draft_vocab_size, device=options.device)
    trainer = TRAINERS[options.kind](options.kind, target, options, kept).to(options.device)
    trainer.load(options.begin)
    results = {}
    for kind, texts in corpus.held_out.items():
        if texts:
            results[kind] = measure(trainer, target, held_out_windows(texts, tokenizer, options), options)
            print(f"{kind}: {json.dumps(results[kind])}", flush=True)
    return results


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    cuda, add = torch.cuda.is_available(), parser.add_argument
    add("kind", choices=[*TRAINERS])
    add("--model", type=Path, default=Path("core/slotline/core/small_model"), help="the model's folder")
    add("--out", type=Path, help="the head's folder; KIND in the model's folder by default")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    add("--text", type=Path, nargs="+", default=[stdlib], help="folders of Python source, split by path")
    add("--more-text", type=Path, nargs="+", default=[], help="folders of which nothing is held out")
    add("--text-share", type=float, default=0.5, help="share of prompts from --text where there is --more-text")
    add("--device", default="cuda" if cuda else "cpu")
    add("--devices", nargs="+", help="where writers write, in turn; --device by default")
    add("--begin", type=Path, help="a folder of Medusa heads to go on from")
    add("--measure", action="store_true", help="train nothing, but measure the heads of --begin on held-out text")
    add("--seconds", type=float, default=120.0, help="stop after this much training time")
    add("--all-seconds", type=float, default=1e9, help="or this long after the start of the script")
    add("--steps", type=int, default=1_000_000, help="or after this many steps")
    add("--save-seconds", type=float, default=60.0, help="save and measure this often")
    add("--text-seconds", type=float, default=25.0, help="time for the model to write text in")
    add("--tokens", type=int, default=12_000_000, help="or how much it writes at most")
    add("--prompts", type=int, default=2048 if cuda else 64, help="texts that a writer writes at a time")
    add("--writers", type=int, default=0, help="processes that write while heads train; 0: this one, before")
    add("--texts", type=Path, help="folder that writers write to and others may read; without writers, to read from")
    add("--sampled", type=float, default=0.25, help="share of texts that are not greedy, but sampled")
    add("--plain", type=float, default=0.0, help="share of a step's windows that are source as it stands")
    add("--renamed", type=float, default=0.0, help="share of prompts whose names are exchanged for others")
    add("--memory", default="8GiB" if cuda else "256MiB", help="keys and values of a writer's engine")
    add("--context", type=int, default=512, help="tokens of a window")
    add("--batch", type=int, default=32, help="windows in a step")
    add("--drafts", type=int, default=4, help="tokens drafted in a row")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="of matrices; muon suits Medusa's blocks")
    add("--weight-decay", type=float, default=0.05)
    add("--intermediate-size", type=int, default=0, help="of an EAGLE or DFlash head's MLP; the model's by default")
    add("--layer-ids", type=int, nargs="+", help="the model's layers, from 0, whose inputs a head reads")
    text = "tokens that an EAGLE-3 head knows (2048), or Medusa's own projections (none: it shares the model's)"
    add("--draft-vocab-size", type=int, help=text)
    add("--layers", type=int, default=2, help="residual blocks of a Medusa head, decoder layers of a DFlash head")
    add("--anchors", type=int, default=64, help="blocks of a window that a DFlash head learns from in a step")
    add("--mask-token-id", type=int, default=1, help="stands at a DFlash head's places to draft; a token of no text")
    add("--floor", type=float, default=1.0, help="what a position counts for Medusa heads behind a wrong one")
    add("--skipped", type=float, default=1.0, help="what a position counts for Medusa heads that drafts jump over")
    add(
        "--likely",
        type=float,
        default=0.0,
        help="power of a token's probability in its weight for Medusa heads, at the end",
    )
    add("--held-out", type=int, default=256, help="prompts of held-out files to measure with")
    add("--seed", type=int, default=0)
    add("--autocast", action=argparse.BooleanOptionalAction, default=cuda, help="multiply matrices in bfloat16")
    add("--compile", action=argparse.BooleanOptionalAction, default=cuda, help="use torch.compile")
    add("--graph", action=argparse.BooleanOptionalAction, default=cuda, help="capture the step as a CUDA graph")
    options = parser.parse_args(arguments)
    if options.draft_vocab_size is None:
        options.draft_vocab_size = 0 if options.kind == "medusa" else 2048
    options.out = options.out or options.model / options.kind
    if options.begin is not None and options.kind != "medusa":
        parser.error("--begin goes on from Medusa heads alone")
    if options.measure and options.begin is None:
        parser.error("--measure needs --begin, the folder of the heads")
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Write text, train, save, measure; returns what was measured, which is in metrics.json too."""
    options, started = parse_options(arguments), time.monotonic()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    corpus = collect(options.text)
    if options.measure:
        return measure_begun(corpus, tokenizer, options)
    held_out = [one for texts in corpus.held_out.values() for one in texts]
    learned = [[*corpus.train["library"], *corpus.train["test"]], more_texts(options.more_text, held_out)]
    sources = [encode_documents(texts, tokenizer) for texts in learned if texts]
    shares = [options.text_share, 1 - options.text_share][: len(sources)]
    print(f"{[len(one) for one in sources]} tokens for prompts, {time.monotonic() - started:.0f} s", flush=True)
    text = Text(Prompts(sources, shares, tokenizer, options.renamed), options)
    try:
        count = int(json.loads((options.model / "config.json").read_text())["num_hidden_layers"])
        ids = () if options.kind == "medusa" else tuple(options.layer_ids or (2, count // 2, count - 3))
        target = Target(options.model, options.device, ids)
        kept = most_frequent(torch.cat(sources), target.config.vocab_size, options.draft_vocab_size)
        trainer = TRAINERS[options.kind](options.kind, target, options, kept.to(options.device)).to(options.device)
        if options.begin is not None:
            trainer.load(options.begin)
        step = Step(trainer, target, options)
        print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
        windows = held_out_windows(held_out, tokenizer, options)
        text.begin()
        elapsed = time.monotonic() - started
        print(f"{text.windows.numel():,} tokens to learn from after {elapsed:.0f} s", flush=True)
        seconds = min(options.seconds, options.all_seconds - elapsed)
        steps = fit(trainer, target, step, text, windows, seconds, options)
    finally:
        text.close()
    results: dict[str, Any] = measure(trainer, target, windows, options)
    results |= {"steps": steps, "training_tokens": text.written * options.context}
    results |= {"seconds": round(time.monotonic() - started)}
    (options.out / "metrics.json").write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
