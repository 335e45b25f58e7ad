"""Chat templates: from a conversation to the text of a prompt, as transformers renders it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from attrs import fields, frozen
from jinja2 import Template, TemplateError, TemplateSyntaxError, meta

from slotline.registry.config.faults import similar
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.loading import one_line
from slotline.registry.safe_repr import safe_repr
from slotline.text.content_format import asks_for_texts, reads_parts
from slotline.text.messages import ContentFormat, Message, plain
from slotline.text.sandbox import TemplateEnvironment, TemplateLimitError, allowed

CONTENT_FORMATS = ("auto", "string", "openai")
_FIXED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Names that templates read and that have their own arguments."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Most templates read the first, gpt-oss's reads the second."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


@frozen(kw_only=True)
class ChatOptions:
    """Options of a call of `chat` for the template.

    Attributes:
        chat_template: a template, or the name of one of the tokenizer's. None for the tokenizer's own.
        add_generation_prompt: begin the assistant's turn. None means yes, unless a message is continued.
        continue_final_message: leave the last message open, or the field of this name in it.
        tools, documents: shown by the template in addition to messages.
        content_format: ``string`` or ``openai`` for the form that the template reads, ``auto`` to detect it.
        variables: other variables that the template reads, by name.

    Raises:
        RequestError: for an invalid value.
    """

    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str = False
    tools: Sequence[Any] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    content_format: str = "auto"
    variables: Mapping[str, Any] = {}

    def __attrs_post_init__(self) -> None:
        for name, kinds, allowed_values in (
            ("chat_template", str, "a template as text, or None"),
            ("add_generation_prompt", bool, "True, False or None"),
            ("continue_final_message", bool | str, "True, False, or the name of a field"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise RequestError(f"{name}={safe_repr(value)} is not allowed", fix=f"{name} must be {allowed_values}")
        if self.content_format not in CONTENT_FORMATS:
            raise RequestError(
                f"chat_template_content_format={safe_repr(self.content_format)} is not allowed",
                fix=f"give one of {', '.join(CONTENT_FORMATS)}",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt together",
                fix="set add_generation_prompt = False to go on with the last message, or leave "
                "continue_final_message out to begin a new one",
            )

    @property
    def begins_turn(self) -> bool:
        """Return True if the assistant's turn is begun."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


def chat_options(
    chat_template_kwargs: Mapping[str, Any] | None, variables: Mapping[str, Any], **arguments: Any
) -> ChatOptions:
    """Return the options of a call. Names in `chat_template_kwargs` count as arguments.

    Raises:
        RequestError: for a value that is not allowed, or that is given twice.
    """
    named = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(named, Mapping):
        raise RequestError(
            f"chat_template_kwargs={safe_repr(named)} is no mapping",
            fix="give {'enable_thinking': False}, for instance",
        )
    defaults = {field.name: field.default for field in fields(ChatOptions)}
    given = dict(arguments)
    for name in arguments.keys() & named.keys():
        if arguments[name] != defaults[name]:
            raise RequestError(f"{name} is given twice", fix="leave it out of chat_template_kwargs")
        given[name] = named[name]
    rest = {name: value for name, value in named.items() if name not in arguments}
    if twice := rest.keys() & variables.keys():
        raise RequestError(f"{min(twice)} is given twice", fix="leave it out of chat_template_kwargs")
    return ChatOptions(variables={**variables, **rest}, **given)


class ChatTemplate:
    """A parsed template.

    Attributes:
        names: variables that it reads, including the fixed ones.
        parts, texts: the forms of contents that it reads.

    Raises:
        RequestError: if the template cannot be parsed.
    """

    def __init__(self, source: str) -> None:
        environment = TemplateEnvironment()
        try:
            tree = environment.parse(source)
            self.names = frozenset(meta.find_undeclared_variables(tree))
            self.parts = reads_parts(tree)
            self.texts = not self.parts or asks_for_texts(tree)
            self._template: Template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template cannot be read: line {error.lineno}: {error.message}", fix="correct the template"
            ) from error
        except (Exception, RecursionError, MemoryError) as error:  # the compiled source may not be valid Python
            raise RequestError(
                f"the chat template cannot be read: {one_line(error)}", fix="correct the template"
            ) from error
        self._source = source

    def render(
        self, messages: Sequence[Message], options: ChatOptions, given: ContentFormat, special: Mapping[str, str]
    ) -> str:
        """Return the text of the prompt.

        Args:
            messages: the conversation.
            options: options of the call.
            given: the content format, with the forms of this template unless the options name one.
            special: the tokenizer's special tokens, by the names that templates read.

        Raises:
            RequestError: if the template does not read an option, or if it refuses the messages.
        """
        self._refuse_unknown(options, special)
        chat = [_with_reasoning(plain(given.of(message))) for message in messages]
        final = _opened(chat[-1], options.continue_final_message, self._source)
        values: dict[str, Any] = {**special, **plain(options.variables)}
        values |= {
            "messages": chat,
            "tools": plain(tool_schemas(options.tools)),
            "documents": plain(_documents(options.documents)),
            "add_generation_prompt": options.begins_turn,
        }
        text = self._rendered(values)
        return text if final is None else _cut(text, final)

    def format(
        self, options: ChatOptions, placeholders: Mapping[str, str], modalities: frozenset[str]
    ) -> ContentFormat:
        """Return the form of contents that the template reads, or that the options name."""
        parts = self.parts if options.content_format == "auto" else options.content_format == "openai"
        texts = self.texts if options.content_format == "auto" else not parts
        return ContentFormat(parts=parts, texts=texts, placeholders=placeholders, modalities=modalities)

    def _refuse_unknown(self, options: ChatOptions, special: Mapping[str, str]) -> None:
        known = self.names - _FIXED
        for name in options.variables:
            if name in self.names and name not in _FIXED:
                continue
            if name in _SAMPLING:
                raise RequestError(
                    f"chat() has no option {name!r}", fix=f"give it as sampling_params=SamplingParams({name}=...)"
                )
            arguments = [*known, "chat_template", "continue_final_message", *_FIXED - {"messages"}]
            raise RequestError(
                f"the chat template reads no {safe_repr(name)}{similar(str(name), [*_ARGUMENTS, *arguments])}",
                fix=f"leave it out; besides its messages the template reads: {', '.join(sorted(known)) or 'nothing'}",
            )
        for name in ("tools", "documents"):
            if getattr(options, name) is not None and name not in self.names:
                raise RequestError(
                    f"the chat template reads no {name!r}", fix=f"leave {name} out, or give a chat_template that does"
                )

    def _rendered(self, values: Mapping[str, Any]) -> str:
        try:
            with allowed(len(values["messages"])):
                return "".join(self._template.generate(**values))
        except TemplateLimitError as error:
            raise RequestError(
                f"the chat template was stopped: {error}", fix="correct the template, or use generate()"
            ) from error
        except TemplateError as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}", fix="each message needs 'role' and 'content'"
            ) from error
        except (Exception, RecursionError, MemoryError) as error:
            raise RequestError(
                f"the chat template refuses the messages: {one_line(error)}",
                fix="each message needs 'role' and 'content'",
            ) from error


_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_ARGUMENTS = ("lora_request", "progress", "use_tqdm", "chat_template_kwargs", "chat_template_content_format")


@lru_cache(maxsize=32)
def chat_template(source: str) -> ChatTemplate:
    """Return the parsed template of a text. Each text is parsed once."""
    return ChatTemplate(source)


def _with_reasoning(message: Message) -> Message:
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _opened(message: Message, asked: bool | str, source: str) -> str | None:
    """Mark the position at which the last message is to be continued. Return its text, or None if it is not continued.

    Raises:
        RequestError: if there is no text to continue.
    """
    if not asked:
        return None
    name = asked if isinstance(asked, str) else "content"
    text = message.get(name)
    if text is None:
        raise RequestError(
            f"continue_final_message: the last message has no {name!r}", fix="give it one, or name another field"
        )
    names = [key for key in _REASONING if message.get(key) == text] if name in _REASONING else [name]
    if not any(key in source for key in names):
        raise RequestError(f"continue_final_message: the chat template reads no {name!r}", fix="name another field")
    if isinstance(text, list):
        part = next((part for part in reversed(text) if isinstance(part, dict) and "text" in part), None)
        if part is None:
            raise RequestError("continue_final_message: the last message has no text", fix="end it with a text part")
        text, part["text"] = part["text"], part["text"] + _TAG
    elif isinstance(text, str):
        message |= dict.fromkeys(names, text + _TAG)
    else:
        raise RequestError(f"continue_final_message: {name}={safe_repr(text)} is no text", fix="give it as a string")
    return str(text)


def _cut(rendered: str, final: str) -> str:
    """Return the text before the position at which the last message is to be continued."""
    mark = rendered.rfind(_TAG.strip())
    if mark < 0 or final.strip() not in rendered:
        raise RequestError(
            "continue_final_message: the chat template leaves out a part of the last message",
            fix="give the message as the template prints it",
        )
    return rendered[:mark] if rendered.startswith(_TAG, mark) else rendered[:mark].rstrip()


def tool_schemas(tools: Any) -> list[Any] | None:
    """Return tools as JSON schemas. Functions are read by their type hints and docstring.

    Raises:
        RequestError: for a tool that is neither.
    """
    if tools is None:
        return None
    listed = list(tools) if isinstance(tools, Iterable) and not isinstance(tools, str | Mapping) else [tools]
    schemas = []
    for tool in listed:
        if inspect.isfunction(tool) or inspect.ismethod(tool):
            from transformers.utils import get_json_schema

            try:
                tool = get_json_schema(tool)
            except Exception as error:
                raise RequestError(f"the tool {tool.__name__!r} has no schema: {one_line(error)}") from error
        if not isinstance(tool, Mapping):
            raise RequestError(
                f"tools: {safe_repr(tool)} is no tool", fix="give JSON schemas, or functions with type hints"
            )
        schemas.append(tool)
    return schemas


def _documents(documents: Any) -> list[Any] | None:
    if documents is None:
        return None
    listed = list(documents) if isinstance(documents, Iterable) and not isinstance(documents, str | Mapping) else None
    if listed is None or not all(isinstance(one, Mapping) for one in listed):
        raise RequestError(
            f"documents={safe_repr(documents)} is no list of documents", fix="give [{'title': '...', 'text': '...'}]"
        )
    return listed
