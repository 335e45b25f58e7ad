"""Looks that every schema takes before an engine sees it, whichever it is."""

from __future__ import annotations

from slotline.plugins.structured_output.json_schema import refuse_long_patterns, refuse_values_as_schemas
from slotline.plugins.structured_output.number_bounds import with_kept_bounds
from slotline.registry.contracts import Constraint
from slotline.registry.errors import RequestError

MOST_TEXT = 1_000_000
"""Characters of a constraint: it is parsed on the thread that runs the steps."""


def refuse_long_text(constraint: Constraint) -> None:
    """Refuse a constraint that takes long to read.

    Raises:
        RequestError: with its length and the limit.
    """
    if (length := len(constraint.text)) > MOST_TEXT:
        raise RequestError(
            f"structured_outputs.{constraint.kind} has {length:,} characters, more than {MOST_TEXT:,}",
            fix="make it shorter",
        )


def screened(schema: str, place: str) -> str:
    """Return a schema in the form that engines keep, or refuse it.

    Args:
        schema: the schema.
        place: the parameter with the schema, and the place in it, e.g. ``structured_outputs.json at #``.

    Raises:
        RequestError: with the JSON pointer of what no engine keeps.
    """
    refuse_values_as_schemas(schema, place)
    refuse_long_patterns(schema, place)
    return with_kept_bounds(schema, place)
