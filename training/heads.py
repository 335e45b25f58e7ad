"""Train draft heads for a model: EAGLE, EAGLE-3 or Medusa, in the folders that their authors publish.

The model itself writes most of the training text: it continues, mostly greedily, the beginnings of source files, since
a head must guess what the model would write. A head is trained on its own guesses for as many steps as it will draft
(EAGLE-3's training-time test), and then measured on held-out files. Examples::

    python training/heads.py eagle3                        # for the model that ships with slotline, into its folder
    python training/heads.py medusa --model /my/model --text /my/code --out /my/model/medusa
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from eagle_trainer import EagleTrainer
from medusa_trainer import MedusaTrainer
from muon import Muon
from small_model import collect, encode_documents, schedule
from target import Target
from text import Text, Writer, prompts_of
from torch import Tensor
from transformers import AutoTokenizer

TRAINERS: dict[str, Any] = {"eagle": EagleTrainer, "eagle3": EagleTrainer, "medusa": MedusaTrainer}


# ------------------------------------------------------------------------------------ training and measuring


def most_frequent(windows: Tensor, vocab_size: int, count: int) -> Tensor:
    """The `count` tokens that the text has most of, in rising order."""
    frequencies = torch.bincount(windows.flatten(), minlength=vocab_size)
    return frequencies.topk(min(count, vocab_size)).indices.sort().values


def fit(trainer: Any, target: Target, text: Text, options: argparse.Namespace) -> int:
    """Train until the time or the steps are used up; returns the steps."""
    matrices = [p for name, p in trainer.named_parameters() if p.ndim >= 2 and "bias" not in name]
    others = [p for name, p in trainer.named_parameters() if p.ndim < 2 or "bias" in name]
    groups = [{"params": others, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = []
    if options.optimizer == "muon":
        optimizers.append(Muon(matrices, lr=options.lr, weight_decay=options.weight_decay))
    else:
        groups.append({"params": matrices, "weight_decay": options.weight_decay})
    optimizers.append(torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95)))
    generator, cuda = torch.Generator().manual_seed(options.seed), options.device == "cuda"
    loss_of = torch.compile(trainer.loss, dynamic=False) if options.compile else trainer.loss
    started, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        chosen = text.sample(options.batch, generator)
        with torch.autocast(options.device, torch.bfloat16, enabled=cuda):
            loss = loss_of(target, chosen, *target.states(chosen))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = options.lr * schedule(progress)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == 1:
            loss.item()
            started = time.monotonic()  # compilation is over by now
        if step % 20 == 0 or step >= options.steps:
            value = loss.item()  # waits for the device, so that the clock is honest
            progress = max((time.monotonic() - started) / options.seconds, step / options.steps)
            if step % 500 == 0 or progress >= 1:
                print(f"step {step:6d} {time.monotonic() - started:6.1f} s  loss {value:.4f}", flush=True)
    return step


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


def measure(trainer: Any, target: Target, texts: list[str], tokenizer: Any, options: argparse.Namespace) -> Any:
    """Mean accepted length, the bonus token included, on the model's greedy continuations of held-out files."""
    generator, prompt = torch.Generator().manual_seed(1), min(128, options.context // 3)
    shape = {"context": min(options.context, prompt + 192), "prompts": options.held_out}
    prompts = prompts_of(encode_documents(texts, tokenizer), prompt, options.held_out, generator)
    writer = Writer(argparse.Namespace(**{**vars(options), **shape}))
    windows = writer(prompts.tolist(), [0.0] * options.held_out).to(options.device)
    stood, steps, tokens = torch.zeros(options.drafts, dtype=torch.long), 0, 0
    trainer.to(target.model.dtype).eval()
    for part in windows.split(32):
        found = accepted_lengths(trainer.drafts(target, part, *target.states(part)), part, prompt - 1)
        stood, steps, tokens = stood + found[0], steps + found[1], tokens + found[2]
    return {
        "accepted_length": round(tokens / steps, 3),
        "acceptance_by_position": [round(int(count) / steps, 3) for count in stood],
        "held_out_prompts": options.held_out,
        "tokens": tokens,
    }


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
    add("--device", default="cuda" if cuda else "cpu")
    add("--seconds", type=float, default=120.0, help="stop after this much training time")
    add("--steps", type=int, default=1_000_000, help="or after this many steps")
    add("--text-seconds", type=float, default=25.0, help="time for the model to write text in")
    add("--tokens", type=int, default=12_000_000, help="or how much it writes at most")
    add("--prompts", type=int, default=2048 if cuda else 64, help="texts that a writer writes at a time")
    add("--writers", type=int, default=0, help="processes that write while heads train; 0: this one, before")
    add("--renamed", type=float, default=0.0, help="share of prompts whose names are exchanged for others")
    add("--memory", default="8GiB" if cuda else "256MiB", help="keys and values of a writer's engine")
    add("--context", type=int, default=512, help="tokens of a window")
    add("--batch", type=int, default=32, help="windows in a step")
    add("--drafts", type=int, default=4, help="tokens drafted in a row")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="of matrices; muon suits Medusa's blocks")
    add("--weight-decay", type=float, default=0.05)
    add("--intermediate-size", type=int, default=0, help="of an EAGLE head's MLP; the model's by default")
    add("--layer-ids", type=int, nargs="+", help="the model's layers, from 0, whose inputs EAGLE-3 reads")
    text = "tokens that an EAGLE-3 head knows (2048), or Medusa's own projections (none: it shares the model's)"
    add("--draft-vocab-size", type=int, help=text)
    add("--layers", type=int, default=2, help="residual blocks of a Medusa head")
    add("--floor", type=float, default=1.0, help="what a position counts for Medusa heads behind a wrong one")
    add("--held-out", type=int, default=256, help="prompts of held-out files to measure with")
    add("--seed", type=int, default=0)
    add("--compile", action=argparse.BooleanOptionalAction, default=cuda, help="use torch.compile")
    options = parser.parse_args(arguments)
    if options.draft_vocab_size is None:
        options.draft_vocab_size = 0 if options.kind == "medusa" else 2048
    options.out = options.out or options.model / options.kind
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Write text, train, save, measure; returns what was measured, which is in metrics.json too."""
    options, started = parse_options(arguments), time.monotonic()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    corpus = collect(options.text)
    count = int(json.loads((options.model / "config.json").read_text())["num_hidden_layers"])
    target = Target(options.model, options.device, tuple(options.layer_ids or (2, count // 2, count - 3)))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = Text([*corpus.train["library"], *corpus.train["test"]], tokenizer, options)
    print(f"{text.windows.numel():,} tokens to learn from after {time.monotonic() - started:.0f} s", flush=True)
    kept = most_frequent(text.windows, target.config.vocab_size, options.draft_vocab_size)
    trainer = TRAINERS[options.kind](options.kind, target, options, kept).to(options.device)
    steps = fit(trainer, target, text, options)
    text.close()
    trainer.save(options.out)
    held_out = [one for texts in corpus.held_out.values() for one in texts]
    results = measure(trainer, target, held_out, tokenizer, options)
    results |= {"steps": steps, "training_tokens": text.windows.numel(), "seconds": round(time.monotonic() - started)}
    (options.out / "metrics.json").write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
