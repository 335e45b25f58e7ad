"""Types of fields with ranges that only the OpenAPI document shows. `SamplingParams` checks them and names the fix."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

INSTEAD = "x-schema"
"""Key of a schema that the document has in place of the one around it."""


def _shown(**schema: Any) -> Meta:
    """Return what the document adds to the schema of a type."""
    return Meta(extra_json_schema=schema)


def _instead(schema: dict[str, Any]) -> Meta:
    """Return the schema that the document has in place of a type's own."""
    return _shown(**{INSTEAD: schema})


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


Natural = Annotated[int, _shown(minimum=0)]
Positive = Annotated[int, _shown(minimum=1)]
Outputs = Annotated[int, _shown(minimum=1, maximum=16384)]
"""Number of outputs of a prompt."""
TopK = Annotated[int, _shown(minimum=-1)]
Seed = Annotated[int, _shown(minimum=-(2**63), maximum=2**63 - 1)]
Scale = Annotated[float, _shown(minimum=0, maximum=1e9)]
Share = Annotated[float, _shown(minimum=0, maximum=1)]
TopP = Annotated[float, _shown(exclusiveMinimum=0, maximum=1)]
Penalty = Annotated[float, _shown(minimum=-2, maximum=2)]
Factor = Annotated[float, _shown(minimum=1e-9, maximum=1e9)]
Text = Annotated[str, _shown(minLength=1)]
Token = Natural
Tokens = Annotated[list[Token], _shown(minItems=1)]
TokenBias = Annotated[dict[str, float], _shown(propertyNames={"pattern": "^[0-9]+$"})]

_TOKEN = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string", "minLength": 1}
_MESSAGE = {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]}
_PROMPTS = _instead({"anyOf": [_TEXT, _list_of(_TEXT), _list_of(_TOKEN), _list_of(_list_of(_TOKEN))]})
Prompts = Annotated[str | list[str | int | list[int]], _PROMPTS]
"""A text, token ids, or a list of texts or of lists of token ids."""
PromptsOrNone = Annotated[str | list[str | int | list[int]] | None, _PROMPTS]
"""The same, or null where other prompts stand beside it."""
EmbeddedPrompts = Annotated[str | list[str], _instead({"anyOf": [_TEXT, _list_of(_TEXT)]})]
"""Prompts of embeddings, each a safetensors file in base64."""
Messages = Annotated[list[dict[str, Any]], _instead(_list_of(_MESSAGE))]
"""A conversation. What else a message holds depends on the model's template."""
