"""Sandbox for chat templates, which are code from a checkpoint: bounds their work and the text they make.

jinja2's sandbox keeps a template from Python's internals, but not from looping: three nested loops over `range(99999)`
practically never end, and `x ~ x` in a loop of forty doubles a text beyond any memory. Here each iteration, call and
filter is counted, each text and list is measured before it is made, and processor time is limited too. Everything
runs in the caller's thread.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from attrs import define, field
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 1_000_000
"""Work of one rendering: an iteration is one step, a call or a filter several. Messages add some."""
STEPS_OF_A_CALL = 8
STEPS_OF_A_MESSAGE = 1_000
MAX_SECONDS = 5.0
"""Processor time of one rendering in its own thread."""
MAX_LENGTH = 2**24
"""Characters of a text, and items of a list."""
MAX_BITS = 2**20
"""Bits of a number."""
MAX_MADE = 2**29
"""Characters and items of all texts and lists that one rendering makes."""


class TemplateLimitError(Exception):
    """A template exceeded its limits."""


@define
class Allowance:
    """Remaining budget of a rendering.

    Attributes:
        steps: steps of work.
        shown: characters that it may still print.
        made: characters and items that it may still make.
        deadline: limit of the thread's processor time, in seconds.
    """

    steps: int
    shown: int = MAX_LENGTH
    made: int = MAX_MADE
    deadline: float = field(factory=lambda: time.thread_time() + MAX_SECONDS)

    def step(self, count: int = 1) -> None:
        """Count steps.

        Raises:
            TemplateLimitError: if there are too many steps, or if time is up.
        """
        before = self.steps >> 4
        self.steps -= count
        if self.steps < 0:
            raise TemplateLimitError("it takes too many steps: does a loop never end?")
        if self.steps >> 4 != before and time.thread_time() > self.deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def show(self, length: int) -> None:
        """Count printed characters."""
        self.shown -= length
        if self.shown < 0:
            refuse_length(MAX_LENGTH + 1)

    def make(self, length: int) -> None:
        """Count characters or items of one more text or list."""
        refuse_length(length)
        self.made -= length
        if self.made < 0:
            raise TemplateLimitError(f"it makes texts and lists of more than {MAX_MADE:,} characters and items")


_allowance: ContextVar[Allowance] = ContextVar("allowance")


@contextmanager
def allowed(messages: int) -> Iterator[None]:
    """Allow the templates rendered inside the work of a conversation of `messages` messages."""
    token = _allowance.set(Allowance(MAX_STEPS + STEPS_OF_A_MESSAGE * messages))
    try:
        yield
    finally:
        _allowance.reset(token)


def refuse_length(length: int) -> None:
    """Refuse a text, list or number that is too large.

    Raises:
        TemplateLimitError: with the limit.
    """
    if length > MAX_LENGTH:
        raise TemplateLimitError(f"it makes something longer than {MAX_LENGTH:,} characters or items")


def _refuse_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it computes a number of more than {MAX_BITS:,} bits")


def length_as_text(value: Any, depth: int = 0) -> int:
    """Return the approximate number of characters in `str(value)`. Counting stops at the limit."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, list | tuple | dict | set):
        return 16
    if depth > 50:
        raise TemplateLimitError("it prints lists of lists without end")
    length = 2
    for item in [*value, *value.values()] if isinstance(value, dict) else value:
        length += 4 + length_as_text(item, depth + 1)
        refuse_length(length)
    return length


class _Counted:
    """Iterable that counts its iterations."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        step = _allowance.get().step
        for value in self._values:
            step()
            yield value

    def __len__(self) -> int:
        return len(self._values)


@jinja2.pass_context  # type: ignore[untyped-decorator]
def _counted(_context: Any, values: Any) -> _Counted:
    return _Counted(values)


@jinja2.pass_context  # type: ignore[untyped-decorator]
def _shown(_context: Any, value: Any) -> Any:
    _allowance.get().show(length_as_text(value))
    return value


@jinja2.pass_context  # type: ignore[untyped-decorator]
def _joined(context: Any, values: list[Any]) -> Any:
    _allowance.get().make(sum(map(length_as_text, values)))
    return (markup_join if context.eval_ctx.autoescape else str_join)(values)


@jinja2.pass_context  # type: ignore[untyped-decorator]
def _counted_text(_context: Any, length: int) -> str:
    _allowance.get().show(length)
    return ""


_ADDED = {
    "slotline_counted": _counted,
    "slotline_shown": _shown,
    "slotline_joined": _joined,
    "slotline_counted_text": _counted_text,
}
_LONG_TEXT = 64
"""Length from which a template's own text is counted each time, in characters."""
_WIDENING = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "to_bytes", "tojson", "zfill"}
)
"""Filters and methods whose output grows with a number."""
_PRINTING = frozenset({"format", "format_map", "join", "pprint", "string", "tojson", "urlencode", "xmlattr"})
"""Filters and methods that make one text of all their arguments."""
_COUNTING = frozenset({"generate_lorem_ipsum", "lipsum"})
"""Functions whose work is a multiple of a number."""
_MANY = 1000
"""Limit of that number, and of the decimal places of a rounded number."""
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^{}]*(\d{6}|\{)")


def _refuse_growth(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a filter or method before it makes too much. The first argument is the value it works on."""
    given = [*args, *kwargs.values()]
    if not given:
        return
    subject = given[0]
    if name in _WIDENING:
        number = max((one for one in given if isinstance(one, int)), default=0)
        refuse_length(
            number * (len(subject) if name in ("expandtabs", "indent") and hasattr(subject, "__len__") else 1)
        )
    if name in _COUNTING and any(isinstance(one, int) and abs(one) > _MANY for one in given):
        raise TemplateLimitError(f"it calls {name} with a number above {_MANY}")
    if name == "round" and any(isinstance(one, int) and abs(one) > _MANY for one in given[1:]):
        raise TemplateLimitError(f"it rounds to more than {_MANY} places")
    if name in _PRINTING:
        refuse_length(sum(map(length_as_text, given)))
    if name == "join" and len(args) > 1:
        refuse_length(max(_length(a) * length_as_text(b) for a, b in ((subject, args[1]), (args[1], subject))))
    if name in ("format", "format_map") and isinstance(subject, str):
        refuse_length((subject.count("{") + subject.count("%")) * max(map(length_as_text, given)))
        if _WIDTH.search(subject):
            raise TemplateLimitError(f"it formats with a width that is too large: {subject[:40]!r}")
    if name == "replace" and len(args) > 2 and all(isinstance(one, str) for one in args[:3]):
        refuse_length(len(subject) + subject.count(args[1]) * len(args[2]))
    if name == "translate" and len(args) > 1 and isinstance(args[1], Mapping):
        refuse_length(_length(subject) * max(map(length_as_text, args[1].values()), default=0))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with counting, and with a check that refuses results that are too large."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # copies jinja2's attribute for passed arguments
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _allowance.get().step(STEPS_OF_A_CALL)
        args = _with_measured_items(name, args, first)
        _refuse_growth(name, args[first:], kwargs)
        return _measured(function(*args, **kwargs))

    return filtered


def _with_measured_items(name: str, args: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    """Return the arguments with a generator's items measured. `join` gets the items as a list."""
    if len(args) <= index or not isinstance(args[index], Iterator):
        return args
    items: Any = _measured_items(args[index])
    return (*args[:index], list(items) if name == "join" else items, *args[index + 1 :])


def _measured_items(items: Iterator[Any]) -> Iterator[Any]:
    length = 0
    for item in items:
        length += 1 + length_as_text(item)
        refuse_length(length)
        yield item


def _measured(result: Any) -> Any:
    """Return the result, unless it is too long."""
    if (length := _length(result)) > 1:
        _allowance.get().make(length)
    return result


class GenerationTag(Extension):  # type: ignore[misc]
    """The tag `{% generation %}` of transformers, which marks an assistant's output. Here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Any) -> Any:
        """Return the tag's body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):  # type: ignore[misc]
    """Namespace without the names of Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}, which begins with an underscore")


class TemplateEnvironment(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """Environment in which transformers renders chat templates, with the bounds of an `Allowance`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    filters: dict[str, Any]
    globals: dict[str, Any]

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()} | _ADDED
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _TemplateDict(),
            "namespace": _Namespace,
        }

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object and count the call."""
        _allowance.get().step(STEPS_OF_A_CALL)
        if isinstance(obj, LoopContext) and args:
            args = (_Counted(args[0]), *args[1:])
        else:
            name, owner = getattr(obj, "__name__", ""), _owner(obj)
            args = _with_measured_items(name, args, 0)
            _refuse_growth(name, args if owner is None else (owner, *args), kwargs)
        return _measured(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation unless its result would be too large."""
        sizes = [len(one) if hasattr(one, "__len__") else 0 for one in (left, right)]
        numbers = [one if isinstance(one, int) else 0 for one in (left, right)]
        if operator == "+":
            _allowance.get().make(sum(sizes))
        elif operator == "*":
            _allowance.get().make(max(sizes[0] * numbers[1], sizes[1] * numbers[0], 0))
            _refuse_bits(sum(number.bit_length() for number in numbers))
        elif operator == "**":
            _refuse_bits(numbers[0].bit_length() * abs(numbers[1]))
        elif isinstance(left, str):
            _refuse_growth("format", (left, right), {})
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: Any, *args: Any, **kwargs: Any) -> str:
        """Generate the template's Python code, with loops, joined texts and printed values passed through filters."""
        for loop in list(source.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "slotline_counted")
        for output in list(source.find_all(nodes.Output)):
            output.nodes = [part for one in output.nodes for part in _counted_parts(one)]
        _replace_concats(source)
        text: str = super()._generate(source, *args, **kwargs)
        return text


def _filtered(node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted_parts(node: Any) -> list[Any]:
    """Return the parts of an output that print `node`, counted."""
    if not isinstance(node, nodes.TemplateData):
        return [_filtered(node, "slotline_shown")]
    if len(node.data) < _LONG_TEXT:
        return [node]
    return [_filtered(nodes.Const(len(node.data), lineno=node.lineno), "slotline_counted_text"), node]


def _owner(method: Any) -> Any:
    """Return the text or number that a method belongs to, or None for other callables."""
    owner = getattr(method, "__self__", getattr(getattr(method, "__wrapped__", None), "__self__", None))
    return owner if isinstance(owner, str | bytes | int) else None


def _replace_concats(node: Any) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_without_concats(one) for one in value])
        else:
            setattr(node, name, _without_concats(value))


def _without_concats(node: Any) -> Any:
    if not isinstance(node, nodes.Node):
        return node
    _replace_concats(node)
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "slotline_joined")
    return node


class _TemplateDict:
    """The function `dict`, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dictionary of these keys."""
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # local time, as in transformers
