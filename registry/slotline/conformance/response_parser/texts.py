"""What texts say: whole, in pieces, cut off, and several at a time."""

from __future__ import annotations

from typing import Any

from slotline.registry.contracts import ResponseRequest
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.response_parser import (
    ARGUMENTS,
    ASKED,
    REQUIRED,
    Said,
    context,
    read,
    required_call,
    some_text,
    split,
)

_PLAIN = "One line, and another.\n\n  Indented: a b c.\nThe end. "


def _call(parser: Any) -> str:
    try:
        return required_call(parser)
    except NotApplicable:
        return ""


@check(Kind.RESPONSE_PARSER, "response_parser.content.letters", Level.NUMERICS)
def content_letters(run: Run) -> None:
    """A text without markers is content to the letter, with tools and without."""
    parser = run.subject.build(context())
    for request in (ResponseRequest(), ASKED):
        for text in (_PLAIN, "x", "", "a < b", "a <"):
            if (said := read(parser, [text], request)) != Said("", text):
                raise Failed(f"{text!r} says {said}")


@check(Kind.RESPONSE_PARSER, "response_parser.calls.required", Level.NUMERICS)
def calls_required(run: Run) -> None:
    """What the constraint of a required call lets a model write is read as this call."""
    if not run.subject.descriptor.capabilities.tools:
        raise NotApplicable("it reads no calls")
    parser = run.subject.build(context())
    said = read(parser, [required_call(parser)], REQUIRED)
    if said != Said("", "", [["weather", ARGUMENTS]]):
        raise Failed(f"a call of 'weather' with {ARGUMENTS} says {said}")


@check(Kind.RESPONSE_PARSER, "response_parser.calls.cut", Level.HOSTILE)
def calls_cut(run: Run) -> None:
    """A call that breaks off in its arguments has those that were written, or they are content."""
    if not run.subject.descriptor.capabilities.tools:
        raise NotApplicable("it reads no calls")
    parser = run.subject.build(context())
    text = required_call(parser)
    begin = text.index(ARGUMENTS)
    for end in range(begin + len(ARGUMENTS)):
        said = read(parser, [text[:end]], REQUIRED)
        found = said.calls[0][1] if said.calls else ""
        if not ARGUMENTS.startswith(found):
            raise Failed(f"{text[:end]!r} says {said}")
        if text[begin:end] not in (found or said.content):
            raise Failed(f"{text[:end]!r} says {said}, and not all of the arguments")


@check(Kind.RESPONSE_PARSER, "response_parser.splitting", Level.HOSTILE, explores=True, cost=1.0)
def splitting(run: Run) -> None:
    """What any text says hangs on no splitting."""
    parser, rng = run.subject.build(context()), run.rng
    call = _call(parser)
    for _ in range(300):
        text = some_text(run.subject, call, rng)
        whole = read(parser, [text])
        for parts in (list(text), split(text, rng)):
            if (said := read(parser, parts)) != whole:
                raise Failed(f"{parts!r} says {said}, and as a whole {whole}")


@check(Kind.RESPONSE_PARSER, "response_parser.words.kept", Level.HOSTILE)
def words_kept(run: Run) -> None:
    """Words around a call are in what is said, in their order."""
    parser = run.subject.build(context())
    call = _call(parser)
    text = f"alpha beta {call}" if call else "alpha beta gamma"
    said = read(parser, [text])
    if "alpha beta" not in said.content + said.reasoning:
        raise Failed(f"{text!r} says {said}")


@check(Kind.RESPONSE_PARSER, "response_parser.readers.apart", Level.HOSTILE)
def readers_apart(run: Run) -> None:
    """Two readers that take turns say what each says alone."""
    parser, rng = run.subject.build(context()), run.rng
    call = _call(parser)
    for _ in range(20):
        texts = [some_text(run.subject, call, rng) for _ in range(2)]
        alone = [read(parser, list(text)) for text in texts]
        streams, said = [parser.start(ASKED) for _ in texts], [Said(), Said()]
        for at in range(max(map(len, texts))):
            for stream, one, text in zip(streams, said, texts, strict=True):
                one.add(stream.append(text[at : at + 1]))
        for stream, one in zip(streams, said, strict=True):
            one.add(stream.finish())
        if said != alone:
            raise Failed(f"{texts!r} say {said} in turns, and {alone} alone")
