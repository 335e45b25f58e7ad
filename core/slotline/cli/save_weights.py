"""`slotline save-weights`: a model's weights as they are after the passes, in a folder of their own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slotline.cli.command import Command, add_config_options, overrides


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="where to write; it must not exist, or be empty")
    add_config_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    from slotline.llm.llm import LLM

    llm = LLM(arguments.config, overrides=overrides(arguments))
    llm.save_weights(arguments.folder)
    size = sum(file.stat().st_size for file in Path(arguments.folder).glob("*.safetensors"))
    print(f"{size / 2**20:,.0f} MiB of weights in {arguments.folder}; it is a model: set model to it", file=sys.stderr)
    return 0


COMMAND = Command(
    name="save-weights",
    summary="write a model's weights as they are after the passes, to start from them without these",
    examples=("slotline save-weights --set model=checkpoints/llama saved/llama",),
    configure=_configure,
    run=_run,
)
