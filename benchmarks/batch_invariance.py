"""How many bits of log-probabilities change with the batch around a request, with `batch_invariant` and without.

    python benchmarks/batch_invariance.py [--requests 16] [--tokens 48] [--set dtype=bfloat16] [--set model=FOLDER]

Each prompt runs alone, then all run together; the log-probabilities of prompt and output are compared as float32 bits.
A request whose sampled tokens differ counts with all of them. Exit code 1 if a bit differs under `batch_invariant`.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt
from command_line import positive

from slotline.core import LLM, RequestOutput, SamplingParams

SHORT = "--requests 2 --tokens 4"
PROMPTS = ("def main(", "import os\n", "class Parser:\n    def", "for i in range(", "x = [1, 2, ", "with open(path) as")


def bits(output: RequestOutput) -> npt.NDArray[np.int32]:
    """The log-probabilities of a request's tokens as they lie in memory."""
    entries = [*(output.prompt_logprobs or [None])[1:], *(output.outputs[0].logprobs or [])]
    return np.array([next(iter(entry.values())).logprob for entry in entries if entry], np.float32).view(np.int32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=48)
    parser.add_argument("--set", action="append", default=[], metavar="key=value", dest="settings")
    arguments = parser.parse_args()
    prompts = [PROMPTS[i % len(PROMPTS)] * (1 + i // len(PROMPTS)) for i in range(arguments.requests)]
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=arguments.tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    for invariant in (False, True):
        llm = LLM(overrides=["cache.prefix_caching=false", *arguments.settings], batch_invariant=invariant)
        alone = [llm.generate(prompt, params, progress=False)[0] for prompt in prompts]
        together = llm.generate(prompts, params, progress=False)
        changed, texts, total = 0, 0, 0
        for one, other in zip(alone, together, strict=True):
            same_text = one.outputs[0].token_ids == other.outputs[0].token_ids
            total += len(bits(one))
            texts += not same_text
            changed += int((bits(one) != bits(other)).sum()) if same_text else len(bits(one))
        print(
            f"batch_invariant = {str(invariant).lower():5}  {changed:5} of {total} log-probabilities and {texts:2} of "
            f"{len(prompts)} texts differ between a request alone and in the batch",
            flush=True,
        )
    return int(changed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
