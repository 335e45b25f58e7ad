"""Choice of the response parser by what a checkpoint's tokenizer says of the form of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from slotline.planner.component_selection import device_need, refusal_of
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ResponseParserCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.json_file import read_json
from slotline.registry.negotiation import Setting, candidates

KEY = "response_parser.name"


@frozen(kw_only=True)
class AnswerFacts:
    """What a checkpoint says of the form of its answers.

    Attributes:
        chat_template: its text, that for tools if there are several. Empty if there is none.
        special_tokens: texts of the added tokens, in no order.
        model_type: as in config.json, empty if it has none.
        has_template: whether the tokenizer has a `response_template`.
    """

    chat_template: str = ""
    special_tokens: tuple[str, ...] = ()
    model_type: str = ""
    has_template: bool = False

    def evidence(self, capabilities: ResponseParserCapabilities) -> str:
        """Return what speaks for a parser, in words. Empty if nothing does."""
        if capabilities.needs_template:
            return "the tokenizer has a response_template" if self.has_template else ""
        if self.model_type and self.model_type in capabilities.model_types:
            return f"the model's type is {self.model_type!r}"
        held = max((texts for texts in capabilities.evidence if self._holds(texts)), key=len, default=())
        where = "the chat template has" if all(text in self.chat_template for text in held) else "the tokenizer has"
        return f"{where} {', '.join(map(repr, held))}" if held else ""

    def _holds(self, texts: tuple[str, ...]) -> bool:
        return all(text in self.chat_template or text in self.special_tokens for text in texts)


@frozen(kw_only=True)
class ResponseParserChoice:
    """The response parser, or the reason why there is none.

    Attributes:
        descriptor: the plugin's descriptor, or None.
        setting: `response_parser.name`, asked and resolved, with what spoke for it.
        facts: the facts that decided.
    """

    descriptor: Descriptor[Any] | None
    setting: Setting
    facts: AnswerFacts


def read_answer_facts(folder: Path, tokenizer: Path | None) -> AnswerFacts:
    """Return what the files of a checkpoint say of the form of its answers. Files that cannot be read say nothing.

    Args:
        folder: of the model.
        tokenizer: the folder of its tokenizer, if that is another one.
    """
    at = tokenizer or folder
    config = _object(at / "tokenizer_config.json")
    decoder = config.get("added_tokens_decoder")
    tokens = list(decoder.values()) if isinstance(decoder, dict) else _object(at / "tokenizer.json").get("added_tokens")
    found = (token.get("content") for token in tokens or () if isinstance(token, dict))
    return AnswerFacts(
        chat_template=_template(at, config.get("chat_template")),
        special_tokens=tuple(text for text in found if isinstance(text, str)),
        model_type=str(_object(folder / "config.json").get("model_type") or ""),
        has_template=isinstance(config.get("response_template"), dict),
    )


def choose_response_parser(
    loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo, task: str, facts: AnswerFacts
) -> ResponseParserChoice:
    """Return the response parser that the configuration names, or the one that the checkpoint speaks for.

    Raises:
        NegotiationError: if the named one cannot be used, or if the task generates no text.
    """
    asked, origin = loaded.config.response_parser.name, loaded.origins[KEY].where
    named = asked not in ("auto", "none")
    if asked == "none" or task != "generate":
        if named:
            raise NegotiationError(f"{KEY} = {asked!r} ({origin}): task {task!r} generates no text", fix="remove it")
        because = f'{KEY} = "none" ({origin})' if asked == "none" else f"task {task!r} generates no text"
        return _chosen(asked, None, because, facts)
    if named:
        registry.load(Kind.RESPONSE_PARSER, asked, required=True)
    found = {one.name: one for one in candidates(registry, Kind.RESPONSE_PARSER, info)}
    needs = (device_need(info),)
    if named:
        if (why := refusal_of(found[asked], needs)) is not None:
            raise NegotiationError(f"{KEY} = {asked!r} ({origin}) cannot be used: {why}", fix="remove it")
        if found[asked].capabilities.needs_template and not facts.has_template:
            raise NegotiationError(
                f"{KEY} = {asked!r} ({origin}) cannot be used: the tokenizer has no response_template",
                fix="name another parser",
            )
        best, because = found[asked], f"{origin}: {facts.evidence(found[asked].capabilities) or 'no other reason'}"
    else:
        usable = [
            (one, why)
            for one in found.values()
            if refusal_of(one, needs) is None and (why := facts.evidence(one.capabilities))
        ]
        if not usable:
            return _chosen(asked, None, "auto: neither chat template nor special tokens have a known form", facts)
        best, why = max(usable, key=lambda pair: (pair[0].capabilities.priority, pair[0].name))
        because = f"auto: {why}" + "".join(_others(best.name, usable))
    assert best.descriptor is not None  # otherwise there would be a reason against it
    return _chosen(asked, evolve(best.descriptor, capabilities=best.capabilities), because, facts)


def _others(best: str, usable: list[tuple[Any, str]]) -> Iterator[str]:
    """Yield a remark for each parser that was possible too."""
    for one, why in usable:
        if one.name != best:
            yield f"; before {one.name} ({why})"


def _chosen(asked: str, descriptor: Descriptor[Any] | None, because: str, facts: AnswerFacts) -> ResponseParserChoice:
    resolved = "none" if descriptor is None else descriptor.name
    setting = Setting(key=KEY, asked=asked, resolved=resolved, origin=because, explicit=asked != "auto")
    return ResponseParserChoice(descriptor=descriptor, setting=setting, facts=facts)


def _object(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _template(folder: Path, given: Any) -> str:
    """Return the text of a chat template: a file of its own, or in tokenizer_config.json."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    if isinstance(given, list):
        templates = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
        given = templates.get("tool_use") or templates.get("default")
    return given if isinstance(given, str) else ""
