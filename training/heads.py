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
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from small_model import Corpus, collect, encode_documents, schedule
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from slotline.proposers.eagle.heads import Eagle3Head, EagleHead, HeadConfig

DECAY = 0.8
"""How much less each further draft counts in the loss (EAGLE-3, section 3.2)."""


# ----------------------------------------------------------------------------------------------- text


def prompts_of(texts: list[str], tokenizer: Any, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Random stretches [count, length] of the documents, the same for the same generator."""
    tokens = encode_documents(texts, tokenizer).long()
    starts = torch.randint(len(tokens) - length, (count,), generator=generator)
    return tokens[starts[:, None] + torch.arange(length)]


@torch.no_grad()
def continue_text(target: Any, prompts: Tensor, length: int, temperature: float) -> Tensor:
    """The model's own continuation of prompts [n, m] up to `length` tokens; greedy where temperature is 0."""
    tokens, cache, new = prompts, None, prompts
    while tokens.shape[1] < length:
        out = target(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = out.logits[:, -1].float(), out.past_key_values
        new = logits.argmax(-1, keepdim=True)
        if temperature > 0:
            new = torch.multinomial((logits / temperature).softmax(-1), 1)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def write_text(target: Any, tokenizer: Any, corpus: Corpus, options: argparse.Namespace) -> Tensor:
    """Training windows [n, context] on the device: prompts of several lengths and what the model makes of them."""
    texts = [*corpus.train["library"], *corpus.train["test"]]
    generator, windows, started, turn = torch.Generator().manual_seed(options.seed), [], time.monotonic(), 0
    while turn < 2 or time.monotonic() - started < options.text_seconds:
        length = options.context * (1, 6, 2, 4)[turn % 4] // 16
        prompts = prompts_of(texts, tokenizer, length, options.prompts, generator).to(options.device)
        temperature = 0.8 if turn % 4 == 3 else 0.0
        windows.append(continue_text(target, prompts, options.context, temperature))
        turn += 1
        if len(windows) * windows[0].numel() > options.tokens:
            break
    return torch.cat(windows)


# -------------------------------------------------------------------------------------------- the target


class Target:
    """The model that heads are trained for: its states, its embedding and its output projection, all frozen."""

    def __init__(self, path: Path, device: str, layer_ids: tuple[int, ...]) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval().requires_grad_(False)
        self.config, self.layer_ids = self.model.config, layer_ids

    @torch.no_grad()
    def states(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Of [b, t] tokens the last hidden states [b, t, size], and the inputs of the layers side by side."""
        found = self.model(windows, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
        return found[-1], torch.cat([found[layer] for layer in self.layer_ids], -1)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., size] of tokens."""
        embeddings: Tensor = self.model.get_input_embeddings()(tokens)
        return embeddings

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of last hidden states."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits


# ------------------------------------------------------------------------------------- attention in training


class Unrolled:
    """Attention of a head that drafts from every position of a window at once.

    Entry i of the first step is position i, with the target's state, and attends over entries 0 .. i. Entry i of a
    later step s is position i + s with the head's own state: it attends over what entry i of the first step saw, and
    over entry i of the steps since.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Heads of one layer (the only one), flattened over the batch, to the same shape as `query`."""
        groups = query.shape[1] // key.shape[1]
        q, k, v = (
            x.view(self.batch, -1, *x.shape[1:]).transpose(1, 2)  # [b, heads, t, head_size]
            for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        )
        self.keys.append(k)
        self.values.append(v)
        first = len(self.keys) == 1
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if first else self._later(q)
        return out.transpose(1, 2).reshape(query.shape)

    def _later(self, q: Tensor) -> Tensor:
        t, scale = q.shape[2], q.shape[3] ** -0.5
        seen = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
        first = (q @ self.keys[0].transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)  # [b, heads, t, t]
        own = [(q * key).sum(-1, keepdim=True) * scale for key in self.keys[1:]]
        weights = torch.cat([first, *own], -1).float().softmax(-1).to(q.dtype)
        out = weights[..., :t] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            out = out + weights[..., t + step, None] * value
        return out


# -------------------------------------------------------------------------------------------------- heads


class EagleTrainer(nn.Module):
    """An EAGLE or EAGLE-3 head in training.

    Args:
        kept: [draft_vocab_size] int64, the target's tokens that an EAGLE-3 head knows, in rising order.
    """

    def __init__(self, kind: str, target: Target, options: argparse.Namespace, kept: Tensor) -> None:
        super().__init__()
        self.kind, self.num_drafts = kind, options.drafts
        config = target.config.to_dict()
        names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        llama = LlamaConfig(
            **{name: config[name] for name in (*names, "max_position_embeddings", "rope_parameters")},
            intermediate_size=options.intermediate_size or config["intermediate_size"],
            num_hidden_layers=1,
        )
        shape = HeadConfig(path=options.out, llama=llama, draft_vocab_size=len(kept), layer_ids=target.layer_ids)
        self.config = shape
        self.head: Any
        if kind == "eagle3":
            self.head = Eagle3Head(shape, num_states=len(target.layer_ids))
            self.head.lm_head.weight.data.copy_(target.model.get_output_embeddings().weight[kept.cpu().tolist()])
        else:
            self.head = EagleHead(shape, bias=True)
        self.register_buffer("kept", kept)

    def logits(self, target: Target, out: Tensor) -> Tensor:
        """The head's logits over the tokens it knows."""
        logits: Tensor = self.head.lm_head(out) if self.kind == "eagle3" else target.logits(out)
        return logits

    def loss(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor) -> Tensor:
        """Mean loss over all steps and positions of [b, t] tokens."""
        batch, size = windows.shape
        length = size - 1 - self.num_drafts  # entries that have a right answer in every step
        attend, positions = Unrolled(batch), torch.arange(length, device=windows.device)
        hidden = self.head.enter((layers if self.kind == "eagle3" else last)[:, :length].flatten(0, 1))
        total = hidden.new_zeros((), dtype=torch.float32)
        for step in range(self.num_drafts):
            tokens = windows[:, 1 + step : 1 + step + length]
            out, hidden = self.head(
                target.embed(tokens).flatten(0, 1), hidden, (positions + step).repeat(batch), attend
            )
            right = last[:, 1 + step : 1 + step + length].flatten(0, 1)  # the states that give the next tokens
            total = total + DECAY**step * self._step_loss(target, out, right)
        return total / self.num_drafts

    def _step_loss(self, target: Target, out: Tensor, right: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target.logits(right).float()
            best = wanted.argmax(-1)
            if self.kind == "eagle3":
                wanted = wanted[:, self.kept]  # type: ignore[index]
            soft = wanted.softmax(-1)
        found = self.logits(target, out).float().log_softmax(-1)
        each = -(soft * found).sum(-1)
        if self.kind == "eagle3":
            known = torch.isin(best, self.kept)  # type: ignore[arg-type]
            return (each * known).sum() / known.sum().clamp_min(1)
        distance = F.smooth_l1_loss(out.float(), right.float(), reduction="none").mean(-1)
        return each.mean() + 0.1 * distance.mean()

    @torch.no_grad()
    def drafts(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor) -> Tensor:
        """Greedy drafts [b, t - 1, drafts] behind each token that follows a position."""
        batch, length = windows.shape[0], windows.shape[1] - 1
        attend, positions = Unrolled(batch), torch.arange(length, device=windows.device)
        hidden = self.head.enter((layers if self.kind == "eagle3" else last)[:, :length].flatten(0, 1))
        tokens, found = windows[:, 1:], []
        for step in range(self.num_drafts):
            out, hidden = self.head(
                target.embed(tokens).flatten(0, 1), hidden, (positions + step).repeat(batch), attend
            )
            best = self.logits(target, out).argmax(-1)
            tokens = (self.kept[best] if self.kind == "eagle3" else best).view(batch, length)  # type: ignore[index]
            found.append(tokens)
        return torch.stack(found, -1)

    def save(self, folder: Path) -> None:
        """Write the folder, in bfloat16; embedding (and EAGLE's output projection) are the target's."""
        weights = {name: value.to(torch.bfloat16).contiguous() for name, value in self.head.state_dict().items()}
        config = self.config.llama.to_dict() | {"tie_word_embeddings": False, "dtype": "bfloat16"}
        config |= {"architectures": ["LlamaForCausalLM"]}
        if self.kind == "eagle3":
            vocab_size, kept = self.config.llama.vocab_size, self.kept.cpu()  # type: ignore[union-attr,operator]
            weights["d2t"] = kept - torch.arange(len(kept))  # what is added to a draft token to make it the target's
            weights["t2d"] = torch.isin(torch.arange(vocab_size), kept)
            ids = {"eagle_aux_hidden_state_layer_ids": list(self.config.layer_ids)}
            config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(kept), "eagle_config": ids}
        write(folder, config, weights)


class MedusaTrainer(nn.Module):
    """Medusa heads in training: residual blocks, in front of the target's own output projection or one for each head.

    Args:
        kept: the target's tokens that projections of the heads' own know, in rising order; none to share the target's.
    """

    def __init__(self, kind: str, target: Target, options: argparse.Namespace, kept: Tensor) -> None:
        super().__init__()
        self.size, self.num_drafts, self.num_layers = target.config.hidden_size, options.drafts, options.layers
        self.vocab_size = target.config.vocab_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(self.size, self.size) for _ in range(self.num_layers))
            for _ in range(options.drafts)
        )
        self.register_buffer("kept", kept)
        rows = target.model.get_output_embeddings().weight[kept.cpu().tolist()].float()  # [kept, size]
        self.projections = nn.ParameterList(rows.clone() for _ in range(options.drafts if len(kept) else 0))
        for block in self.blocks.modules():
            if isinstance(block, nn.Linear):
                nn.init.normal_(block.weight, std=0.02)
                nn.init.zeros_(block.bias)

    def states(self, last: Tensor) -> list[Tensor]:
        """What the output projection reads for each head, [..., size]."""
        found = []
        for block in self.blocks:
            x = last
            for linear in block:  # type: ignore[attr-defined]
                x = x + F.silu(linear(x))
            found.append(x)
        return found

    def loss(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor) -> Tensor:
        """Mean loss over heads and positions: head k answers like the target k + 1 tokens later."""
        length = windows.shape[1] - 1 - self.num_drafts
        total = torch.zeros((), device=windows.device)
        for head, x in enumerate(self.states(last[:, :length])):
            with torch.no_grad():
                wanted = target.logits(last[:, 1 + head : 1 + head + length]).float()
                soft = (wanted[..., self.kept] if self.projections else wanted).softmax(-1)  # type: ignore[index]
            found = self.logits(target, head, x).float().log_softmax(-1)
            total = total - DECAY**head * (soft * found).sum(-1).mean()
        return total / self.num_drafts

    def logits(self, target: Target, head: int, x: Tensor) -> Tensor:
        """Logits of one head over the tokens that it knows."""
        return F.linear(x, self.projections[head]) if self.projections else target.logits(x)

    @torch.no_grad()
    def drafts(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor) -> Tensor:
        """As `EagleTrainer.drafts`."""
        states = enumerate(self.states(last[:, :-1]))
        found = torch.stack([self.logits(target, head, x).argmax(-1) for head, x in states], -1)
        return self.kept[found] if self.projections else found  # type: ignore[index]

    def save(self, folder: Path) -> None:
        """Write the folder, in bfloat16; output projections of the heads' own know `truncated_vocab_size` tokens."""
        weights = {
            f"{head}.{layer}.linear.{name}": value.detach().to(torch.bfloat16).contiguous()
            for head, block in enumerate(self.blocks)
            for layer, linear in enumerate(block)  # type: ignore[arg-type]
            for name, value in linear.named_parameters()
        }
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": self.num_drafts,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.size,
            "vocab_size": self.vocab_size,
            "original_lm_head": not self.projections,
        }
        if self.projections:
            config["truncated_vocab_size"] = len(self.kept)  # type: ignore[arg-type]
            weights["token_map"] = self.kept  # type: ignore[assignment]
            for head, rows in enumerate(self.projections):
                weights[f"{head}.{self.num_layers}.weight"] = rows.detach().to(torch.bfloat16).contiguous()
        write(folder, config, weights)


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file({name: value.cpu() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


TRAINERS: dict[str, Any] = {"eagle": EagleTrainer, "eagle3": EagleTrainer, "medusa": MedusaTrainer}


# ------------------------------------------------------------------------------------ training and measuring


def most_frequent(windows: Tensor, vocab_size: int, count: int) -> Tensor:
    """The `count` tokens that the text has most of, in rising order."""
    frequencies = torch.bincount(windows.flatten(), minlength=vocab_size)
    return frequencies.topk(min(count, vocab_size)).indices.sort().values


def fit(trainer: Any, target: Target, windows: Tensor, options: argparse.Namespace) -> int:
    """Train until the time or the steps are used up; returns the steps."""
    matrices = [p for p in trainer.parameters() if p.ndim >= 2]
    others = [p for p in trainer.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    generator, cuda = torch.Generator().manual_seed(options.seed), options.device == "cuda"
    loss_of = torch.compile(trainer.loss, dynamic=False) if options.compile else trainer.loss
    started, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        chosen = windows[torch.randint(len(windows), (options.batch,), generator=generator).to(windows.device)]
        with torch.autocast(options.device, torch.bfloat16, enabled=cuda):
            loss = loss_of(target, chosen, *target.states(chosen))
        for group in optimizer.param_groups:
            group["lr"] = options.lr * schedule(progress)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
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
    prompts = prompts_of(texts, tokenizer, prompt, options.held_out, generator).to(options.device)
    windows = continue_text(target.model, prompts, min(options.context, prompt + 192), 0.0)
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
    add("--prompts", type=int, default=2048, help="texts that it writes at a time")
    add("--context", type=int, default=512, help="tokens of a window")
    add("--batch", type=int, default=32, help="windows in a step")
    add("--drafts", type=int, default=4, help="tokens drafted in a row")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--weight-decay", type=float, default=0.05)
    add("--intermediate-size", type=int, default=0, help="of an EAGLE head's MLP; the model's by default")
    add("--layer-ids", type=int, nargs="+", help="the model's layers, from 0, whose inputs EAGLE-3 reads")
    text = "tokens that an EAGLE-3 head knows (2048), or Medusa's own projections (none: it shares the model's)"
    add("--draft-vocab-size", type=int, help=text)
    add("--layers", type=int, default=2, help="residual blocks of a Medusa head")
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
    windows = write_text(target.model, tokenizer, corpus, options)
    print(f"{windows.numel():,} tokens to learn from after {time.monotonic() - started:.0f} s", flush=True)
    kept = most_frequent(windows, target.config.vocab_size, options.draft_vocab_size)
    trainer = TRAINERS[options.kind](options.kind, target, options, kept).to(options.device)
    steps = fit(trainer, target, windows, options)
    trainer.save(options.out)
    held_out = [text for texts in corpus.held_out.values() for text in texts]
    results = measure(trainer, target, held_out, tokenizer, options)
    results |= {"steps": steps, "training_tokens": windows.numel(), "seconds": round(time.monotonic() - started)}
    (options.out / "metrics.json").write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
