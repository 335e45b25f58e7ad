"""What a request of many tokens holds of the cache, token by token: windows, chunks, states and full attention.

    python benchmarks/long_sequences.py [--tokens 100000] [--prompt 3] [--svg docs/long-sequences.svg] [--json out.json]

Each model is real and tiny (one layer, random weights) and generates every token behind the prompt, alone in the
smallest pool that its plan allows; a prompt comes in chunks of 40 tokens, which hold a little more and take less time.
Two models stop at a tenth of the length: full attention, which needs a pool of all its tokens, and chunks, whose
backend on a CPU (`torch`) gathers a table as long as the sequence in each step. Figures are bytes of blocks and slots
that the request holds after each step, and the pool's own. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from command_line import positive

from slotline.core import LLM, SamplingParams
from slotline.core.kv_cache.block_pool import NULL_BLOCK

SHORT = "--tokens 300"
WINDOW = 64
_SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
_LLAMA4 = {"layer_types": ["chunked_attention"], "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    f"window of {WINDOW}": ("Mistral", {"sliding_window": WINDOW}, {}),
    f"chunks of {WINDOW}": (
        "Llama4Text",
        {**_LLAMA4, "num_local_experts": 2, "head_dim": 16, "floor_scale": 10**6},
        {"backend": "torch", "optimize": False},
    ),
    "state (Mamba-2)": ("Mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 16}, {}),
    "full attention": ("Llama", {}, {}),
}


def checkpoint(name: str, settings: dict[str, Any], length: int, path: Path) -> Path:
    """A random checkpoint of a transformers configuration."""
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, "max_position_embeddings": length, **settings})
    torch.manual_seed(0)
    getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).save_pretrained(path)
    return path


def held_bytes(llm: LLM) -> int:
    """Bytes of the blocks that all rows hold, and of a slot for each of them."""
    cache, memory = llm.engine.scheduler.cache, llm.engine.memory
    assert memory is not None
    blocks = sum(block != NULL_BLOCK for group in cache.groups for held in group.blocks for block in held)
    states = llm.plan.states
    return blocks * memory.block + (states.slot_bytes * len(llm.engine.scheduler.running) if states else 0)


def run(name: str, length: int, prompt: int, folder: Path) -> dict[str, Any]:
    """One request of `length` tokens, `prompt` of them given: what it held, at some of its lengths."""
    architecture, model, settings = MODELS[name]
    whole = name == "full attention"
    if whole or architecture == "Llama4Text":
        length, prompt = length // 10, max(1, prompt // 10)
    path = checkpoint(architecture, model, length, folder / name)
    llm = LLM(
        path,
        dtype="float32",
        block_size=16,
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=40,
        memory=f"{length}KB" if whole else "64KiB",
        **{"cache.prefix_caching": False, "observability.progress": False} | settings,
    )
    params = SamplingParams(temperature=0, max_tokens=length - prompt, ignore_eos=True, detokenize=False)
    request = llm.engine.add("long", [3 + place % 300 for place in range(prompt)], params)
    places, curve, most, start = [0], [0], 0, perf_counter()
    while llm.engine.has_work:
        llm.engine.step()
        held = held_bytes(llm)
        most = max(most, held)
        computed = int(llm.engine.rows.num_computed_tokens[request.row]) if request.row >= 0 else 0
        if computed >= 1.01 * places[-1] + 1:  # evenly on a logarithmic axis
            places.append(computed)
            curve.append(held)
    seconds = perf_counter() - start
    memory = llm.engine.memory
    assert memory is not None
    assert len(request.output_token_ids) == length - prompt
    assert request.metrics.num_preemptions == 0
    pool = (memory.num_blocks - 1) * memory.block + memory.states
    print(f"{name}: {length} tokens in {seconds:.0f} s, held {most} bytes at most, the pool has {pool}")
    return {"name": name, "tokens": places[1:], "held": curve[1:], "most": most, "pool": pool, "seconds": seconds}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """The curves as a picture."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "slotline"  # the same picture in every run
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for one in runs:
        label = f"{one['name']} (at most {one['most'] / 1024:.1f} KiB)"
        axes.plot(one["tokens"], one["held"], linewidth=1, label=label)
    axes.set(xlabel="tokens", ylabel="bytes held by the request", yscale="log", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=100_000)
    parser.add_argument("--prompt", type=positive, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(name, args.tokens, args.prompt, Path(folder)) for name in args.models]
    if args.json:
        args.json.write_text(json.dumps(runs))
    if args.svg:
        draw(runs, args.svg)


if __name__ == "__main__":
    main()
