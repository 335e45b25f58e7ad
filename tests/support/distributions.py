"""The distribution of sampled texts against exact probabilities, on a vocabulary of eight.

`python tests/support/distributions.py` measures every drafter and every way to say what drafts were drawn from, and
writes the table of docs/drafters.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import dflash_folders
import head_folders
import mtp_checkpoints
import numpy as np
import numpy.typing as npt
import tiny_models
from repository import ROOT

from slotline.core import LLM, SamplingParams
from slotline.testing.oracles.drafter import ChiSquare, chi_square

if str(ROOT) not in sys.path:  # as a program
    sys.path.append(str(ROOT))
from tests.proposers.test_medusa import heads_of, written

PAGE = ROOT / "docs" / "drafters.md"
START, END = "<!-- distributions -->\n", "<!-- end -->"
VOCAB, TEXTS, K = 8, 4000, 3
PROMPT = [2, 1, 2]
LENGTH = K + 2
"""Of a text: behind its first token there is room for K drafts and one more token."""
BATCH: Mapping[str, Any] = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "memory": "16MiB"}
SETTINGS: Mapping[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cold, top-k": {"temperature": 0.6, "top_k": 5},
    "hot, top-p": {"temperature": 1.4, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "bias": {"temperature": 1.0, "logit_bias": {2: 1.5, 4: -1.0}},
    "penalties": {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4},
}
DRAFTERS = ("ngram", "suffix", "medusa", "medusa_tree", "draft_model", "eagle", "eagle3", "dflash", "mtp")
SMALLER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}

Law = dict[tuple[int, ...], npt.NDArray[np.float64]]
"""Probabilities of the next token, [VOCAB], by the tokens of the text before it."""
Build = Callable[..., Path]


def reference(
    logprobs: npt.NDArray[np.float64], output: Sequence[int], params: SamplingParams
) -> npt.NDArray[np.float64]:
    """The distribution of the next token, from the model's own, one rule after the other in float64."""
    scores = logprobs.copy()
    for token in range(VOCAB):
        if token in PROMPT or token in output:
            scores[token] = scores[token] * params.repetition_penalty  # log-probabilities are negative
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
    scores /= params.temperature
    kept = scores >= scores.max() + np.log(params.min_p) if params.min_p else np.ones(VOCAB, bool)
    if params.top_k > 0:
        kept &= scores >= np.sort(scores)[-params.top_k]
    weights = np.where(kept, np.exp(scores - scores.max()), 0.0)
    order = np.argsort(-weights)
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.top_p * weights.sum()]] = 0.0
    return np.asarray(weights / weights.sum())


def law_of(scoring: LLM, params: SamplingParams) -> Law:
    """What the tokens of a text of three are drawn from, asked of an engine without drafts, once."""
    known = _LAWS.setdefault(scoring, {})
    if (key := repr(params)) not in known:
        known[key] = _asked_law(scoring, params)
    return known[key]


def _asked_law(scoring: LLM, params: SamplingParams) -> Law:
    prefixes = [list(prefix) for length in range(3) for prefix in product(range(VOCAB), repeat=length)]
    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB)
    law = {}
    for prefix, output in zip(prefixes, scoring.generate([PROMPT + prefix for prefix in prefixes], asked), strict=True):
        entry = output.outputs[0].logprobs[0]
        law[tuple(prefix)] = reference(np.array([entry[t].logprob for t in range(VOCAB)]), prefix, params)
    return law


_LAWS: WeakKeyDictionary[LLM, dict[str, Law]] = WeakKeyDictionary()
_SEEDED: dict[str, list[SamplingParams]] = {}


def seeded(settings: Mapping[str, Any]) -> list[SamplingParams]:
    """Return the parameters of every text with these settings: each has a seed of its own. They are made once."""
    key = repr(settings)
    if key not in _SEEDED:
        _SEEDED[key] = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=i, **settings) for i in range(TEXTS)]
    return _SEEDED[key]


def against(llm: LLM, law: Law, settings: Mapping[str, Any]) -> ChiSquare:
    """Pearson's chi-square over texts by first token: the joint counts of the next two, the first places of a draft."""
    texts = llm.generate([PROMPT] * TEXTS, seeded(settings))
    counts = np.zeros((VOCAB,) * 3)
    for text in texts:
        counts[tuple(text.outputs[0].token_ids[:3])] += 1
    groups = {}
    for first in range(VOCAB):
        pairs = np.stack([law[(first,)][second] * law[(first, second)] for second in range(VOCAB)])
        groups[first] = counts[first].ravel(), pairs.ravel() * counts[first].sum()
    return chi_square(groups)


def drafting_with(name: str, folder: Path, tiny: Build) -> tuple[Path, dict[str, Any]]:
    """A model of eight tokens, and the settings of an engine in which that drafter drafts for it.

    Args:
        folder: of untrained heads, which are made there.
    """
    sizes = {"vocab_size": VOCAB, "initializer_range": 0.2}
    model = tiny("llama_deep" if name in ("eagle3", "dflash") else "llama", **sizes)
    settings: dict[str, Any] = {"drafter.name": name, "drafter.tokens": K, "drafter.adaptive": False}
    if name in ("ngram", "suffix"):
        settings[f"drafter.{name}.min_tokens"] = 1
    elif name.startswith("medusa"):
        settings["drafter.path"] = str(written(folder, heads_of(64, VOCAB), "shared"))
    elif name == "draft_model":
        settings["drafter.path"] = str(tiny("llama", **sizes, **SMALLER))
    elif name.startswith("eagle"):
        own = {"draft_vocab_size": VOCAB} if name == "eagle3" else {}
        settings["drafter.path"] = str(head_folders.build(folder, model, name, **own))
    elif name == "dflash":
        settings["drafter.path"] = str(dflash_folders.build(folder, model))
    elif name == "mtp":
        model = mtp_checkpoints.build(folder, tiny("qwen2", **sizes), "qwen2")
    return model, settings


def line(drafts: str, name: str, accepted: int, result: ChiSquare) -> str:
    """A row of the table."""
    found = f"{result.statistic:.1f} | {result.freedom} | {result.p_value:.2g}"
    return f"| {drafts} | {name} | {accepted:,} | {found} |"


def main() -> None:
    """Measure all and write the table."""
    from tiny_engines import DEFAULTS

    from tests.proposers.test_verification import CASES, measured

    root = Path(tempfile.mkdtemp(prefix="slotline-distributions-"))
    made: dict[str, Path] = {}

    def tiny(family: str, **sizes: Any) -> Path:
        key = repr((family, sorted(sizes.items())))
        if key not in made:
            made[key] = tiny_models.build(family, root / str(len(made)), **sizes)
        return made[key]

    def engines(path: Path, **settings: Any) -> LLM:
        return LLM(path, **{**DEFAULTS, **settings})

    lines = [
        "| drafts | sampling | drafts that stood | chi-square | degrees of freedom | p |",
        "|---|---|---|---|---|---|",
    ]
    cases = [(f"`{name}`", "plain", partial(by_drafter, name, root / name)) for name in DRAFTERS]
    cases += [(f"drawn; {how}", name, partial(measured, how, name)) for how, name in CASES]
    for drafts, name, measure in cases:
        lines.append(line(drafts, name, *measure(tiny, engines)))
        print(lines[-1], flush=True)  # noqa: T201
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"(?<={START}).*?(?={END})", "\n".join(lines) + "\n", page, count=1, flags=re.DOTALL))


def by_drafter(name: str, folder: Path, tiny: Build, engines: Callable[..., LLM]) -> tuple[int, ChiSquare]:
    """Drafts of that drafter that stood, and the test of the texts."""
    path, settings = drafting_with(name, folder, tiny)
    law = law_of(engines(path, **{"sampling.max_logprobs": VOCAB}, **BATCH), SamplingParams(**SETTINGS["plain"]))
    llm = engines(path, **settings, **BATCH)
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    before = drafting.counts.accepted
    result = against(llm, law, SETTINGS["plain"])
    assert drafting.counts.failures == 0
    return drafting.counts.accepted - before, result


if __name__ == "__main__":
    main()
