"""`slotline batch`: answer the requests of a file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from slotline.cli.command import Command, add_config_options, overrides
from slotline.cli.serve import needs_extra
from slotline.registry.config import load_config

_FAILED = 1


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("requests", metavar="IN.jsonl", help="a request a line, in OpenAI's batch format")
    parser.add_argument("answers", metavar="OUT.jsonl", help="gets an answer a line; those that it has are kept")
    add_config_options(parser)
    parser.add_argument("--model", metavar="MODEL", help="a local folder or a name on the Hub (default: small model)")


def _run(arguments: argparse.Namespace) -> int:
    with needs_extra():
        from slotline.server.batch import answered, read_batch, run_batch
    from slotline.llm.async_llm import AsyncLLM
    from slotline.llm.progress import progress_bar

    values: dict[str, Any] = {"model": arguments.model} if arguments.model else {}
    loaded = load_config(
        arguments.config, overrides=overrides(arguments), values={**values, "server.access_log": False}
    )
    lines, out = read_batch(Path(arguments.requests)), Path(arguments.answers)
    before = answered(out)
    left = [line for line in lines if line.custom_id not in before]
    failed = 0
    if left:
        llm = AsyncLLM(loaded)
        try:
            with (
                out.open("ab") as file,
                progress_bar(len(left), enabled=loaded.config.observability.progress) as bar,
            ):
                failed = asyncio.run(run_batch(llm, left, file, lambda: bar.advance(1, tokens=0)))
        finally:
            llm.close()
    kept = f", {len(lines) - len(left)} were answered before" if len(left) < len(lines) else ""
    print(f"{len(left)} requests answered, {failed} of them with an error{kept}", file=sys.stderr)
    return _FAILED if failed else 0


COMMAND = Command(
    name="batch",
    summary="answer the requests of a file, in OpenAI's batch format",
    examples=(
        "slotline batch in.jsonl out.jsonl",
        "slotline batch in.jsonl out.jsonl --model checkpoints/my-model --config run.toml",
    ),
    configure=_configure,
    run=_run,
)
