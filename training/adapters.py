"""Train two LoRA adapters for the small model that ships with slotline.

``typed``       writes annotated signatures, ``def f(self, path: str) -> None:``
``docstrings``  writes docstrings with an ``Args:`` section that names every parameter

Each is trained on the standard library's functions after a rewriting that puts that style in place of their own, with
PEFT and nothing but Python source on this machine. Example, less than a minute on a GPU::

    python training/adapters.py --device cuda --steps 500 --batch 16
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import peft
import torch
from small_model import is_held_out, kind_of, next_token_loss, parse, read_source, source_files
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

SMALL_MODEL = Path(__file__).parents[1] / "core" / "slotline" / "core" / "small_model"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MOST_LINES = 40
PROMPTS = ("def main(", "def read_file(path, encoding", "class Parser:\n    def parse(self, text")

TYPES = (
    (
        r".*(path|name|text|string|prefix|suffix|key|msg|message|line|encoding|mode|pattern|url|title|label)s?|s|fmt",
        "str",
    ),
    (
        r".*(count|size|len|length|index|width|height|depth|limit|port|number|offset|level|timeout)|n|i|j|k|fd|pid",
        "int",
    ),
    (r"(is|has|allow|use|with|keep|force|ignore|verbose|debug|strict|quiet).*", "bool"),
    (r".*(data|bytes|buffer|buf)", "bytes"),
    (r".*(args|argv|list|items|values|lines|names|files|seq)", "list"),
    (r".*(kwargs|dict|map|mapping|options|opts|env|headers)", "dict"),
    (r"(func|function|callback|hook|factory|handler)", "Callable"),
)
"""Names of parameters, whole, and the type that they stand for; the first match counts."""


def type_of(argument: ast.arg, default: ast.expr | None) -> str:
    """An annotation for a parameter, by its default or else its name."""
    if isinstance(default, ast.Constant) and default.value is not None:
        return type(default.value).__name__
    found = next((kind for pattern, kind in TYPES if re.fullmatch(pattern, argument.arg)), "Any")
    return f"{found} | None" if isinstance(default, ast.Constant) and found != "Any" else found


def result_of(function: ast.FunctionDef) -> str:
    """An annotation for what a function returns, by its return statements."""
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)):
        return "Iterator"
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    if not values:
        return "None"
    kinds = {ast.JoinedStr: "str", ast.Compare: "bool", ast.List: "list", ast.Dict: "dict", ast.Tuple: "tuple"}
    found = {
        type(v.value).__name__ if isinstance(v, ast.Constant) and v.value is not None else kinds.get(type(v), "Any")
        for v in values
    }
    return found.pop() if len(found) == 1 else "Any"


def parameters(function: ast.FunctionDef) -> list[tuple[str, ast.arg, ast.expr | None]]:
    """Stars, name and default of each parameter, in order."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    found: list[tuple[str, ast.arg, ast.expr | None]] = [("", a, d) for a, d in zip(plain, defaults, strict=True)]
    if given.vararg:
        found.append(("*", given.vararg, None))
    found += [("", a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        found.append(("**", given.kwarg, None))
    return found


def typed(function: ast.FunctionDef, lines: list[str]) -> list[str]:
    """The function's lines with an annotated signature."""
    parts = []
    for stars, argument, default in parameters(function):
        if argument.arg in ("self", "cls"):
            parts.append(argument.arg)
            continue
        kind = "Any" if stars else type_of(argument, default)
        value = "" if default is None else f" = {ast.unparse(default)}"
        parts.append(f"{stars}{argument.arg}: {kind}{value}")
    if function.args.kwonlyargs and not function.args.vararg:
        parts.insert(len(function.args.posonlyargs) + len(function.args.args), "*")
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return [f"{indent}def {function.name}({', '.join(parts)}) -> {result_of(function)}:", *lines[1:]]


def documented(function: ast.FunctionDef, lines: list[str]) -> list[str]:
    """The function's lines with a docstring that has sections."""
    own, first = ast.get_docstring(function), function.body[0]
    summary = (own or "").strip().split("\n")[0].rstrip(".") or function.name.strip("_").replace("_", " ").capitalize()
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()) + 4)
    names = [argument.arg for _, argument, _ in parameters(function) if argument.arg not in ("self", "cls")]
    text = [f'{indent}"""{summary}.']
    if names:
        text += [
            "",
            f"{indent}Args:",
            *(f"{indent}    {name}: the {name.strip('_').replace('_', ' ')}." for name in names),
        ]
    if result_of(function) != "None":
        text += ["", f"{indent}Returns:", f"{indent}    {result_of(function)}: the result."]
    text.append(f'{indent}"""')
    after = 1 if own is None else (first.end_lineno or first.lineno) - function.lineno + 1
    return [lines[0], *text, *lines[after:]]


STYLES: dict[str, Callable[[ast.FunctionDef, list[str]], list[str]]] = {"typed": typed, "docstrings": documented}


def rewritten(text: str, style: Callable[[ast.FunctionDef, list[str]], list[str]]) -> Iterator[str]:
    """The short functions of a file whose signature is one line, in another style, methods behind their class."""
    lines = text.split("\n")
    for parent in ast.walk(parse(text)):
        for node in getattr(parent, "body", []) if isinstance(parent, ast.Module | ast.ClassDef) else []:
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None or node.decorator_list:
                continue
            own = lines[node.lineno - 1 : node.end_lineno]
            if len(own) < 2 or len(own) > MOST_LINES or not own[0].rstrip().endswith(":") or "->" in own[0]:
                continue
            if node.body[0].lineno == node.lineno:
                continue
            head = [f"class {parent.name}:", ""] if isinstance(parent, ast.ClassDef) else []
            yield "\n".join([*head, *style(node, own)]) + "\n\n\n"


def windows(style: str, tokenizer: PreTrainedTokenizerFast, context: int, root: Path) -> tuple[Tensor, Tensor]:
    """Training and held-out windows [n, context + 1] of functions in a style, shuffled."""
    texts: dict[bool, list[str]] = {False: [], True: []}
    for relative in source_files(root):
        text = read_source(root / relative) if kind_of(relative) == "library" else None
        if text is not None:
            texts[is_held_out(relative)] += rewritten(text, STYLES[style])
    result = []
    for held_out in (False, True):
        random.Random(0).shuffle(texts[held_out])
        tokens = [token for ids in tokenizer(texts[held_out]).input_ids for token in ids]
        count = len(tokens) // (context + 1)
        result.append(torch.tensor(tokens[: count * (context + 1)]).view(count, context + 1))
    return result[0], result[1]


def loss_on(model: peft.PeftModel, held_out: Tensor) -> float:
    """The mean loss per token."""
    with torch.no_grad():
        return float(torch.stack([next_token_loss(model, part) for part in held_out[:32].split(8)]).mean())


def train(style: str, options: argparse.Namespace) -> None:
    """Train and save one adapter."""
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    base = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32, trust_remote_code=False).to(
        options.device
    )
    torch.manual_seed(0)
    config = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    texts = windows(style, tokenizer, options.context, options.corpus)
    fit, held_out = (part.to(options.device) for part in texts)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr, weight_decay=0.01)
    before, start = loss_on(model, held_out), time.perf_counter()
    for step in range(options.steps):
        progress = step / options.steps
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, 20 * progress + 0.05, 2 * (1 - progress))
        batch = fit[torch.randint(len(fit), (options.batch,))]
        loss = next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"{style}: step {step}, loss {loss:.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{style}: held-out loss {before:.3f} -> {loss_on(model, held_out):.3f}")
    save(model, options.out / style)
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids], device=options.device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        print(f"--- {style}\n{tokenizer.decode(out[0])}", flush=True)


def save(model: peft.PeftModel, folder: Path) -> None:
    """Write the adapter in bfloat16, without this machine's paths and PEFT's card of blanks."""
    model.to(torch.bfloat16).save_pretrained(folder)
    model.float()
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": "slotline/small_model", "target_modules": sorted(config["target_modules"])}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("styles", nargs="*", help=f"of {', '.join(STYLES)}; all by default")
    parser.add_argument("--model", type=Path, default=SMALL_MODEL)
    parser.add_argument(
        "--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a tree of source files"
    )
    parser.add_argument("--out", type=Path, default=SMALL_MODEL / "adapters")
    for name, default in (("steps", 500), ("batch", 16), ("context", 256), ("rank", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args(arguments)


def main() -> None:
    """See the module's description."""
    options = parse_options()
    for style in options.styles or STYLES:
        train(style, options)


if __name__ == "__main__":
    main()
