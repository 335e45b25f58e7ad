"""Detection of the form in which a chat template reads a message's content: one text or a list of parts.

Like vLLM, this inspects the template's syntax tree: a loop over a message's content means parts. Here names are also
followed through assignments, filters and macros.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from jinja2 import nodes

_PICKING = frozenset({"selectattr", "rejectattr", "groupby"})
"""Filters that read a list of parts without a loop."""
_ONE = frozenset({"first", "last", "random"})


@frozen
class _Names:
    """Meanings of the template's names.

    Attributes:
        kinds: of names, and of attributes of namespaces as `ns.name`: ``messages``, ``message`` or ``content``.
        macros: parameters of each macro.
    """

    kinds: dict[str, str] = field(factory=lambda: {"messages": "messages"})
    macros: dict[str, list[str]] = field(factory=dict)

    def kind(self, node: Any) -> str | None:
        """Return the kind of an expression, if it is one of the three."""
        if isinstance(node, nodes.Name):
            return self.kinds.get(node.name)
        if isinstance(node, nodes.Filter) and node.node is not None:
            below = self.kind(node.node)
            return "message" if below == "messages" and node.name in _ONE else below
        if isinstance(node, nodes.CondExpr):
            return self.kind(node.expr1) or (self.kind(node.expr2) if node.expr2 is not None else None)
        if isinstance(node, nodes.And | nodes.Or):
            return self.kind(node.left) or self.kind(node.right)
        if isinstance(node, nodes.Getattr | nodes.Getitem):
            return self._item(node)
        return None

    def _item(self, node: Any) -> str | None:
        below, key = self.kind(node.node), _key(node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return below
        if below == "message" and key == "content":
            return "content"
        if below == "messages":
            return "message"
        return self.kinds.get(f"{node.node.name}.{key}") if isinstance(node.node, nodes.Name) else None

    def note(self, name: Any, kind: str | None) -> bool:
        """Remember the kind of a name. Return True if that is new."""
        if not name or kind is None or self.kinds.get(name) == kind:
            return False
        self.kinds[name] = kind
        return True


def reads_parts(template: nodes.Template) -> bool:
    """Return True if the template reads a message's content part by part."""
    names = _Names()
    for macro in template.find_all(nodes.Macro):
        names.macros[macro.name] = [argument.name for argument in macro.args]
    rounds = 1 + len(list(template.find_all((nodes.Assign, nodes.For, nodes.Call))))
    for _ in range(rounds):
        if not _learn(template, names):
            break
    loops = any(names.kind(loop.iter) == "content" for loop in template.find_all(nodes.For))
    picks = (one for one in template.find_all(nodes.Filter) if one.name in _PICKING and one.node is not None)
    return loops or any(names.kind(one.node) == "content" for one in picks)


def asks_for_texts(template: nodes.Template) -> bool:
    """Return True if the template tests values for being text, so that it reads content of either form."""
    return any(test.name == "string" for test in template.find_all(nodes.Test))


def _learn(template: nodes.Template, names: _Names) -> bool:
    """Follow each assignment, loop and macro call once. Return True if a name was new."""
    new = False
    for assign in template.find_all(nodes.Assign):
        new |= names.note(_target(assign.target), names.kind(assign.node))
    for loop in template.find_all(nodes.For):
        if names.kind(loop.iter) == "messages":
            new |= names.note(_target(loop.target), "message")
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and (parameters := names.macros.get(call.node.name)):
            given = [*zip(parameters, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
            for parameter, argument in given:
                new |= names.note(parameter, names.kind(argument))
    return new


def _target(node: Any) -> str | None:
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    return node.name if isinstance(node, nodes.Name) else None


def _key(node: Any) -> Any:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None
