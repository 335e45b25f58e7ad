"""`slotline generate`: one prompt in, its text out, as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slotline.cli.command import Command, add_config_options, add_json_option, overrides, print_json
from slotline.cli.table import plain_table
from slotline.registry.config import load_config
from slotline.registry.errors import ConfigError

if TYPE_CHECKING:
    from slotline.core.api.outputs import RequestOutput
    from slotline.core.api.prompts import Prompt
    from slotline.llm.llm import LLM
    from slotline.registry.contracts.sampling_params import SamplingParams
    from slotline.registry.lora_request import AdapterChoice


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; '-' reads standard input")
    add_config_options(parser)
    parser.add_argument(
        "--model", metavar="PATH", help="a local Hugging Face folder; default: the small model that ships"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most output tokens (default: the model's, or 128)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's, or 0.7)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="keep tokens up to this probability (default: the model's, or 1)"
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="keep the K most likely tokens (default: the model's, or 0, all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, another text (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="S", help="a string that ends the text; repeatable"
    )
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message through the chat template"
    )
    parser.add_argument(
        "--lora",
        metavar="ADAPTER",
        help="use a LoRA adapter: a folder that PEFT saved, one of [lora.adapters], or one beside the model",
    )
    parser.add_argument(
        "--stats", action="store_true", help="time the parts of the steps and show memory, on standard error"
    )
    add_json_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    text = _prompt_text(arguments.prompt)
    from slotline.llm.llm import LLM

    _params(arguments, {})  # checked before the model is loaded, to report errors early
    values: dict[str, Any] = {"model": arguments.model} if arguments.model else {}
    if arguments.stats:
        values["observability.profile"] = True
    if arguments.lora and not load_config(arguments.config, overrides=overrides(arguments)).config.lora.name:
        values["lora.name"] = "torch"
    llm = LLM(arguments.config, overrides=overrides(arguments), **values)
    params = _params(arguments, llm.front.sampling_defaults)
    adapter = _adapter(llm, arguments.lora) if arguments.lora else None
    start = perf_counter()
    output = _stream(llm, _prompt(llm, text, chat=arguments.chat), params, adapter, show=not arguments.json)
    seconds = perf_counter() - start
    if arguments.json:
        print_json(_as_json(llm, output, seconds))
    print(_summary(llm, output, seconds), file=sys.stderr)
    if arguments.stats:
        print(plain_table(("part", "value"), list(_stats(llm, output)), right=(1,)), file=sys.stderr)
    return 2 if output.outputs[0].finish_reason == "error" else 0


def _prompt_text(given: str) -> str:
    """Return the prompt, from standard input for `-`.

    Raises:
        ConfigError: if standard input is closed, or the prompt is no text.
    """
    if given == "-" and sys.stdin is None:
        raise ConfigError("the prompt is '-', and standard input is closed", fix="give the prompt as an argument")
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode()  # undecodable bytes of an argument come as surrogates
    except UnicodeError as error:
        raise ConfigError(f"the prompt is no text: {error}", fix="give it as UTF-8") from error
    return text


_DEFAULTS = MappingProxyType({"temperature": 0.7, "max_tokens": 128})
"""Values of options that are left out, if the model has no default of its own."""


def _params(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the options as parameters. Options that are not given are left to `defaults` if it has them."""
    from slotline.registry.contracts.sampling_params import SamplingParams

    asked = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    given = {name: value for name, value in asked.items() if value is not None}
    fallback = {name: value for name, value in _DEFAULTS.items() if name not in defaults}
    return SamplingParams(seed=arguments.seed, stop=arguments.stop, **{**fallback, **given})


def _prompt(llm: LLM, text: str, *, chat: bool) -> Prompt:
    """Return the text itself, or the tokens of a conversation of one message."""
    return llm.tokenizer.chat_prompt([{"role": "user", "content": text}]) if chat else text


def _adapter(llm: LLM, name: str) -> AdapterChoice:
    """Return the adapter of a folder or of a name: a loaded adapter, or a folder next to the model."""
    from slotline.ranks.replicas.front import model_folder  # with torch, which light commands do without
    from slotline.registry.lora_request import LoRARequest

    own = model_folder(llm.front) / "adapters" / name
    for folder in (Path(name), own):
        if (folder / "adapter_config.json").is_file():
            return LoRARequest(folder.resolve().name, max(llm.list_loras(), default=0) + 1, folder)
    return name


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams, adapter: AdapterChoice, *, show: bool) -> RequestOutput:
    """Generate, and print the settled part of the text after each step. Return the last output."""
    printed = ""
    if show and sys.stdout.isatty() and isinstance(prompt, str):
        print(prompt, end="", flush=True)  # a person reads the whole text, a program only the continuation
    for output in llm.stream(prompt, params, lora_request=adapter):
        text = output.outputs[0].text
        if show and len(text) > len(printed):
            print(text[len(printed) :], end="", flush=True)
            printed = text
    if show:
        print(flush=True)
    return output


def _summary(llm: LLM, output: RequestOutput, seconds: float) -> str:
    """Return a line with the plan's summary, the number of tokens, the speed, and the reason of the end."""
    done = output.outputs[0]
    first = output.metrics.time_to_first_token or 0.0
    count = len(done.token_ids)
    rate = (count - 1) / (seconds - first) if count > 1 and seconds > first else count / seconds
    ended = f"{done.finish_reason} ({done.stop_reason!r})" if done.stop_reason is not None else done.finish_reason
    return (
        f"[{llm.plan.summary()}] {len(output.prompt_token_ids)} tokens in, {count} out, {rate:,.1f} tokens/s "
        f"after {first * 1e3:,.0f} ms for the first; ended by {ended}"
    )


def _as_json(llm: LLM, output: RequestOutput, seconds: float) -> dict[str, Any]:
    from attrs import asdict

    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [asdict(one) for one in output.outputs],
        "metrics": asdict(output.metrics),
        "seconds": seconds,
        "plan": {"digest": llm.plan.digest, "summary": llm.plan.summary()},
    }


def _stats(llm: LLM, output: RequestOutput) -> Iterator[tuple[str, str]]:
    """Yield step parts in milliseconds a step, cached tokens, preemptions, memory, graphs, phases of the start."""
    profiler = llm.engine.profiler
    for name, seconds in profiler.seconds.items():
        yield f"{name}, ms a step", f"{1e3 * seconds / profiler.counts[name]:,.3f}"
    yield "prompt tokens from the prefix cache", str(output.metrics.num_cached_tokens)
    yield "preemptions", str(output.metrics.num_preemptions)
    memory = llm.engine.memory
    if memory is not None:
        yield "cache blocks", f"{memory.num_blocks:,}"
        yield "cache, MiB", f"{memory.cache / 2**20:,.1f}"
        yield "activations at their peak, MiB", f"{memory.activations / 2**20:,.1f}"
        for part in memory.devices if len(memory.devices) > 1 else ():
            yield f"cache on {part.device}, MiB", f"{part.cache / 2**20:,.1f}"
    if llm.engine.graphs is not None:
        report = llm.engine.graphs.report
        yield "graphs, MiB", f"{report.memory / 2**20:,.1f}"
        yield f"graphs of {report.shapes} shapes", f"{report.graphs:,}"
    drafts = llm.engine.extension("drafts")
    if drafts is not None and drafts.drafting.graphs is not None:
        yield "graphs of the drafter, MiB", f"{drafts.drafting.graphs.report.memory / 2**20:,.1f}"
    for name, seconds in llm.engine.startup.items():
        yield f"start, {name.replace('_', ' ')}, s", f"{seconds:,.2f}"


COMMAND = Command(
    name="generate",
    summary="continue a prompt, printing the text as it comes",
    examples=(
        'slotline generate "def main("',
        'slotline generate --model checkpoints/my-model --max-tokens 64 --temperature 0.7 --seed 1 "Once"',
        'slotline generate --lora typed "def read_file("',
        'slotline generate --chat --config run.toml "Why is the sky blue?"',
        "slotline generate --stop 'class ' --stop 'def ' --json - < prompt.txt",
    ),
    configure=_configure,
    run=_run,
)
