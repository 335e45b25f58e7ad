"""Descriptors of the response parsers. They are chosen by markers that chat templates and vocabularies hold."""

# ruff: noqa: RUF001

from __future__ import annotations

from typing import Any

from slotline.registry.contracts import ResponseParserCapabilities
from slotline.registry.descriptor import Descriptor, Kind


def _parser(name: str, summary: str, **capabilities: Any) -> Descriptor[ResponseParserCapabilities]:
    return Descriptor(
        kind=Kind.RESPONSE_PARSER,
        name=name,
        capabilities=ResponseParserCapabilities(**capabilities),
        factory=f"slotline.plugins.response_parsers.{name}:build",
        summary=summary,
    )


template = _parser(
    "template",
    "the checkpoint's own response_template, read by transformers",
    needs_template=True,
    priority=50,
    priority_reason="the checkpoint itself says how its answers are read",
)
harmony = _parser(
    "harmony", "gpt-oss: messages in channels", evidence=(("<|channel|>", "<|message|>", "<|start|>"),), priority=40
)
deepseek = _parser(
    "deepseek",
    "DeepSeek V3, R1, V3.1: calls between markers of their own",
    evidence=(("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),),
    priority=40,
)
kimi = _parser(
    "kimi",
    "Kimi K2: sections of calls",
    evidence=(("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
    priority=40,
)
minimax = _parser("minimax", "MiniMax M2: <invoke> and <parameter>", evidence=(("<minimax:tool_call>",),), priority=40)
mistral = _parser("mistral", "Mistral: [TOOL_CALLS], reasoning in [THINK]", evidence=(("[TOOL_CALLS]",),), priority=40)
glm = _parser("glm", "GLM 4.5: <arg_key> and <arg_value>", evidence=(("<arg_key>", "<arg_value>"),), priority=30)
qwen_coder = _parser(
    "qwen_coder",
    "Qwen Coder: <function=name> and <parameter=name>",
    evidence=(("<tool_call>", "<function=", "<parameter="),),
    priority=30,
)
hermes = _parser(
    "hermes",
    "Hermes and Qwen: <tool_call>{JSON}</tool_call>, reasoning between <think> and </think>",
    evidence=(("<tool_call>", "</tool_call>"), ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    priority=20,
)
llama = _parser(
    "llama",
    "Llama 3: calls are JSON objects with a name and parameters",
    evidence=(("<|python_tag|>", "<|eom_id|>"), ('"parameters":', "<|start_header_id|>")),
    reasoning=False,
    priority=20,
)
think = _parser(
    "think",
    "reasoning between <think> and </think>, no form of calls",
    evidence=(("<think>", "</think>"),),
    tools=False,
)
