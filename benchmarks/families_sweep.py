"""Which of transformers' architectures run, and whether they give transformers' own tokens.

    OMP_NUM_THREADS=1 python benchmarks/families_sweep.py [llama qwen3_5 ...] [--json FILE] [--set key=value]

Without names it takes all of `MODEL_FOR_CAUSAL_LM_MAPPING`, in some minutes. Each model type gets a small random
checkpoint in float32: the class's default configuration, shrunk. Four prompts are generated twice, the second time over
cached prefixes, and compared with transformers' `generate` of each prompt alone. EQUAL means equal tokens in both runs
and log-probabilities within 1e-3.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from family_settings import COMMON, ENCODERS_AS_DECODERS, PATCHES, VISION, VOCAB
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families.shrinking import SIZES, small_settings
from slotline.registry.errors import SlotlineError

SHORT = "gpt2"
LENGTHS, NEW, LARGEST, TOLERANCE = (3, 37, 18, 61), 24, 20_000_000, 1e-3
SETTINGS: Mapping[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "memory": "16MiB",
    "scheduler.max_batched_tokens": 24,
    "enable_prefix_caching": True,
    "multimodal.text_only": True,
    "observability.progress": False,
}
_TEXT = ("text", "decoder", "language", "llm", "thinker")

Text = tuple[list[int], torch.Tensor]
"""Generated tokens and their log-probabilities."""


def build(model_type: str, architecture: str, path: Path, overrides: Mapping[str, Any] | None = None) -> int:
    """Write a small random checkpoint, and return its number of parameters."""
    config_class, model_class = CONFIG_MAPPING[model_type], getattr(transformers, architecture)
    own = getattr(model_class, "config_class", None)
    if isinstance(own, type) and not issubclass(config_class, own):
        config_class = own
    config = _config(config_class, {**PATCHES.get(model_type, {}), **(overrides or {})})
    if model_type in ENCODERS_AS_DECODERS:
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"still {size:,} parameters after shrinking")
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    _widen(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    model.save_pretrained(path)
    return int(size)


def _config(config_class: Any, extra: Mapping[str, Any], sizes: Mapping[str, int] = SIZES) -> Any:
    """Return the small configuration of a class. What it does not take is left out, name by name."""
    default = config_class()
    changes = small_settings(default, sizes) | {k: v for k, v in COMMON.items() if k in default.to_dict()}
    for name in getattr(config_class, "sub_configs", None) or {}:
        part = getattr(default, name, None)
        if part is not None and hasattr(part, "model_type") and name not in extra:
            is_text = any(word in name for word in _TEXT)
            changes[name] = _config(
                type(part), PATCHES.get(part.model_type, {}), SIZES if is_text else VISION
            ).to_dict()
    changes |= extra
    changes = {
        name: value for name, value in changes.items() if value is not ... and not _is_alias(default, name, changes)
    }
    _fit_rope(default, changes)
    while True:
        try:
            return config_class(**changes)
        except Exception as error:
            named = re.search(r"unexpected keyword argument '(\w+)'|[Ff]ield '(\w+)'", str(error))
            name = (named[1] or named[2]) if named else ""
            if name not in changes:
                raise
            del changes[name]


def _is_alias(config: Any, name: str, changes: Mapping[str, Any]) -> bool:
    own = (getattr(type(config), "attribute_map", None) or {}).get(name)
    return own is not None and own in changes


def _fit_rope(default: Any, changes: dict[str, Any]) -> None:
    """Let sections and factors of rotary embeddings fit the small heads."""
    rope = getattr(default, "rope_parameters", None)
    if (
        not isinstance(rope, dict)
        or "rope_parameters" in changes
        or not re.search("mrope_section|short_factor", str(rope))
    ):
        return
    half = int(changes.get("head_dim", 16) * float(rope.get("partial_rotary_factor") or 1)) // 2
    fitting = dict(rope)
    if sections := fitting.get("mrope_section"):
        shares = [half // len(sections)] * len(sections)
        fitting["mrope_section"] = [shares[0] + half - sum(shares), *shares[1:]]
    for name in ("short_factor", "long_factor"):
        if fitting.get(name):
            fitting[name] = [1.0 + i / 4 for i in range(half)]
    changes["rope_parameters"] = fitting


@torch.no_grad()
def _widen(model: torch.nn.Module) -> None:
    """Let every weight matter: matrices get a deviation of 0.15, and what starts at 0 or 1 gets noise."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.15
        if not parameter.is_floating_point() or "A_log" in name:
            continue
        if parameter.ndim == 1:
            parameter.add_(noise)
        elif not parameter.isfinite().all() or float(parameter.std()) < 1e-6:
            parameter.copy_(noise)
        elif float(parameter.std()) < 0.1:
            parameter.mul_(0.15 / float(parameter.std()))


def prompts() -> list[list[int]]:
    """Return the four prompts."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, VOCAB - 8, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.no_grad()
def of_transformers(path: Path, architecture: str) -> list[Text]:
    """Return what transformers generates with its own cache."""
    said: Exception | None = None
    for attention in ("eager", "sdpa"):
        model_class = getattr(transformers, architecture)
        try:
            model = model_class.from_pretrained(
                path, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
            ).eval()
            return [_generated(model, torch.tensor([prompt])) for prompt in prompts()]
        except Exception as error:
            said = said or error
    raise said or ValueError("no attention implementation")


def _generated(model: Any, ids: torch.Tensor) -> Text:
    for module in model.modules():  # RecurrentGemma keeps states in its modules
        for name in {"conv1d_state", "recurrent_states"} & vars(module).keys():
            setattr(module, name, None)
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)
    tokens = out.sequences[0, -NEW:]
    logits = torch.cat([step[:1].double().reshape(1, -1) for step in out.logits])  # [NEW, vocab_size]
    if bool(logits.isnan().any()):
        raise ValueError("transformers' logits are not numbers")
    return tokens.tolist(), logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def of_slotline(path: Path, settings: Mapping[str, Any]) -> tuple[list[list[Text]], str]:
    """Return what two runs generate, and the kinds of layers."""
    llm = LLM(str(path), **settings)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1)
    runs = []
    for _ in range(2):
        outputs = [request.outputs[0] for request in llm.generate(prompts(), params, progress=False)]
        runs.append([(list(out.token_ids), _log_probabilities(out)) for out in outputs])
    facts = llm.engine.runner.model.facts
    kinds = Counter([layer.kv_kind for layer in facts.layers] + [layer.state_kind for layer in facts.state_layers])
    return runs, ", ".join(f"{number} {kind}" for kind, number in kinds.items())


def _log_probabilities(out: Any) -> torch.Tensor:
    steps = zip(out.token_ids, out.logprobs, strict=True)
    return torch.tensor([getattr(step[t], "logprob", step[t]) for t, step in steps], dtype=torch.float64)


def difference(runs: Iterable[Sequence[Text]], expected: Sequence[Text]) -> str:
    """Return the first difference in words, or an empty string."""
    for number, run in enumerate(runs):
        for length, (tokens, found), (own, wanted) in zip(LENGTHS, run, expected, strict=True):
            where = f"run {number}, prompt of {length} tokens"
            if tokens != own:
                first = next(i for i, (a, b) in enumerate(zip(tokens, own, strict=True)) if a != b)
                return f"{where}: other text from new token {first} on"
            if (worst := float((found - wanted).abs().max())) > TOLERANCE:
                return f"{where}: log-probabilities differ by {worst:.2g}"
    return ""


def verdict(model_type: str, architecture: str, settings: Mapping[str, Any] = SETTINGS) -> tuple[str, str]:
    """Return EQUAL, DIFF, REFUSED, CRASH, NOREF or NOBUILD, with the kinds of layers or the reason."""
    path, stage = Path(tempfile.mkdtemp(prefix="sweep-")), "NOBUILD"
    try:
        build(model_type, architecture, path)
        stage = "NOREF"
        expected = of_transformers(path, architecture)
        stage = "CRASH"
        runs, kinds = of_slotline(path, settings)
        reason = difference(runs, expected)
        return ("DIFF", reason) if reason else ("EQUAL", kinds)
    except SlotlineError as error:
        return "REFUSED", re.sub(r"\s+", " ", error.message.replace(str(path), "PATH"))
    except Exception as error:
        return stage, re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:200]
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and progress bars of transformers and slotline back."""
    theirs, before, disabled = transformers.logging, transformers.logging.get_verbosity(), logging.root.manager.disable
    shown = theirs.is_progress_bar_enabled()
    theirs.set_verbosity(theirs.CRITICAL)
    theirs.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        theirs.set_verbosity(before)
        if shown:
            theirs.enable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types, by default all")
    parser.add_argument("--json", type=Path, help="write the verdicts there")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of slotline")
    arguments = parser.parse_args()
    names = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown := set(arguments.names) - names.keys():
        parser.error(f"transformers generates with no model type {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    settings = {**SETTINGS, **dict(one.split("=", 1) for one in arguments.set)}
    found = {}
    with quiet():
        for name in arguments.names or names:
            architecture = names[name] if isinstance(names[name], str) else names[name][0]
            started = time.perf_counter()
            word, reason = verdict(name, architecture, settings)
            found[name] = {"architecture": architecture, "verdict": word, "reason": reason}
            print(f"{time.perf_counter() - started:5.1f} {word:8} {name:22} {architecture:34} {reason}", flush=True)
    counts = Counter(one["verdict"] for one in found.values())
    print(f"{counts['EQUAL']} of {len(found)} equal: " + ", ".join(f"{n} {word}" for word, n in counts.most_common()))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
