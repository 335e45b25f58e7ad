"""The small model with a chat template that shows tools, calls and reasoning in the form of Hermes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from slotline.planner.plan import SMALL_MODEL

TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}{{ message.role }}: {% if message.reasoning_content %}<think>
{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: <think>{{ "" if enable_thinking else "</think>" }}{% endif %}"""
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY: dict[str, Any] = {"type": "object", "additionalProperties": False}
THINKS = {"structured_outputs": {"regex": r"so</think>(yes|no)", "after": " "}}
"""What has the small model end its reasoning and answer, in a prompt that opened the reasoning."""
THINKS_AND_CALLS = {
    "structured_outputs": {
        "regex": r"so</think>yes<tool_call>\n\{\"name\": \"clock\", \"arguments\": \{\}\}\n</tool_call>",
        "after": " ",
    }
}


def make_tool_model(folder: Path) -> Path:
    """Write the model into a folder that is not there yet."""
    shutil.copytree(SMALL_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
