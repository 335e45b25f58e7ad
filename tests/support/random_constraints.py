"""Random constraints that both plugins take: expressions, grammars in GBNF and structural tags."""

from __future__ import annotations

from random import Random
from typing import Any

_ATOMS = ("a", "b", "ab", "1", "é", "日", r"\d", r"\w", r"\s", ".", "[ab]", "[^a]", "[a-c1-3é]", '"', r"\.", r"\n", " ")
_TIMES = ("*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}")
_ENDING = ("*", "?", "{2}", "{1,3}")  # two of `+` in a row have no end for llguidance: the first takes all
_TERMINALS = ('"a"', '"ab"', '"b"', '"1"', "[a-c]", "[0-9]", "[b-dx]", '"é"', '"("', '")"', r"[ \n]", '"a b"')
_RULES = ("root", "p", "q", "s")
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["x", "y", 1]}},
    {"type": "object"},
)


def expression(rng: Random, depth: int = 3) -> str:
    """A regular expression."""
    chance = rng.random()
    if depth == 0 or chance < 0.35:
        return rng.choice(_ATOMS)
    if chance < 0.6:
        return expression(rng, depth - 1) + expression(rng, depth - 1)
    if chance < 0.75:
        return f"({expression(rng, depth - 1)}|{expression(rng, depth - 1)})"
    return f"({expression(rng, depth - 1)}){rng.choice(_TIMES)}"


def grammar(rng: Random) -> str:
    """A grammar whose rules call later ones, and themselves between parentheses."""

    def part(rule: int, depth: int) -> str:
        chance = rng.random()
        if depth == 0 or chance < 0.4:
            own = [f'"(" {_RULES[rule]}? ")"'] if rule else []
            return rng.choice([*_TERMINALS, *own, *3 * (_RULES[rule + 1 :] or ('"c"',))])
        if chance < 0.65:
            return f"{part(rule, depth - 1)} {part(rule, depth - 1)}"
        if chance < 0.8:
            return f"({part(rule, depth - 1)} | {part(rule, depth - 1)})"
        return f"({part(rule, depth - 1)}){rng.choice(_ENDING)}"

    bodies = [part(rule, 3) for rule in range(len(_RULES))]
    return "\n".join([f'root ::= ("-" ({bodies[0]}))*', *map("{} ::= {}".format, _RULES[1:], bodies[1:])])


def structural_tag(rng: Random) -> dict[str, Any]:
    """Tags with one trigger each, or one for all."""
    names = rng.sample(["f", "g", "ab", "é"], rng.randint(1, 3))
    tags = [
        {"begin": f"<{n}>", "schema": rng.choice(_SCHEMAS), "end": rng.choice([f"</{n}>", "!", "\n"])} for n in names
    ]
    triggers = [f"<{name}" for name in names] if rng.random() < 0.5 else ["<"]
    wanted = {"at_least_one": rng.random() < 0.7, "stop_after_first": rng.random() < 0.3}
    return {"structures": tags, "triggers": triggers, **wanted}


RANDOM: dict[str, Any] = {"regex": expression, "grammar": grammar, "structural_tag": structural_tag}
"""By the parameter of `StructuredOutputsParams`."""
