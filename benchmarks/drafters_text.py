"""How drafters fare on Python that the shipped model was not trained on: greedy continuations of held-out files.

    python benchmarks/drafters_text.py [--files 24] [--prompt 256] [--tokens 128] [--drafters ngram suffix]
        [--batch 1] [--drafts 4] [--set drafter.path=...]

Files of the standard library whose path the training script holds out. The first run has no drafter, and every other
one must give its texts. `suffix` meets each file once, but the files before it too. Tokens a step: of a request in a
verifying step, the token behind the drafts included; seconds are those of generating all files, `--batch` at a time.
All drafts are verified, unless `--set drafter.adaptive=true`.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

from command_line import positive

from slotline.core import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from small_model import is_held_out  # the split that the model was trained with

SHORT = "--files 2 --prompt 16 --tokens 4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=positive, default=24)
    parser.add_argument("--prompt", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=128)
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--drafts", type=positive, default=4)
    parser.add_argument("--drafters", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--set", dest="settings", action="append", default=[])
    arguments = parser.parse_args()
    expected: list[list[int]] = []
    for name in ("", *arguments.drafters):
        drafter = [f"drafter.name={name}", f"drafter.tokens={arguments.drafts}", "drafter.adaptive=false"]
        settings = [*drafter, *arguments.settings] if name else []
        llm = LLM(overrides=["observability.progress=false", "cache.prefix_caching=false", *settings])
        prompts = held_out(llm, arguments.files, arguments.prompt)
        params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True, detokenize=False)
        llm.generate([prompts[0][:8]], params)  # what is compiled is compiled
        start, texts = time.perf_counter(), []
        for first in range(0, len(prompts), arguments.batch):
            outputs = llm.generate(prompts[first : first + arguments.batch], params)
            texts += [output.outputs[0].token_ids for output in outputs]
        seconds = time.perf_counter() - start
        expected = expected or texts
        drafts = llm.engine.extension("drafts")
        line = f"{name or 'none':10} {seconds:7.2f} s for {len(prompts)} files, batch {arguments.batch}"
        if drafts is not None:
            report = drafts.to_json()
            by_position = " ".join(f"{share:.0%}" for share in report["acceptance_by_position"])
            line += f", {report['acceptance_length']:.2f} tokens a step ({by_position})"
            line += f", {sum(a == b for a, b in zip(texts, expected, strict=True))} texts equal"
        print(line, flush=True)


def held_out(llm: LLM, files: int, length: int) -> list[list[int]]:
    """The beginnings of held-out files, in tokens, of files that are long enough."""
    assert llm.engine.tokenizer is not None
    root, found = Path(sysconfig.get_paths()["stdlib"]), list[list[int]]()
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if "site-packages" in relative.parts or not is_held_out(relative):
            continue
        tokens = llm.engine.tokenizer.encode(file.read_text(encoding="utf-8", errors="ignore")[: 8 * length])
        if len(tokens) >= length:
            found.append(tokens[:length])
        if len(found) == files:
            break
    return found


if __name__ == "__main__":
    main()
