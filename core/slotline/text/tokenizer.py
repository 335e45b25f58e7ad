"""Tokenizer: text to tokens, chat messages to prompts, tokens to text. A thin layer over transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import evolve

from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import ModelError, RequestError
from slotline.registry.loading import one_line
from slotline.registry.named_path import explain_name
from slotline.registry.remote_code import remote_code
from slotline.registry.safe_repr import safe_repr
from slotline.text.detokenizer import Detokenizer
from slotline.text.template import ChatOptions, chat_template


class Tokenizer:
    """Tokenizer of a Hugging Face folder.

    Raises:
        ModelError: if the folder has no tokenizer that can be loaded.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self.path = path
        if not path.is_dir():
            if (said := explain_name(str(path))) is not None:
                raise ModelError(f"tokenizer = {str(path)!r} is no folder: {said[0]}", fix=said[1])
            raise ModelError(
                f"there is no folder {str(path)!r}", fix="name one with tokenizer.json and tokenizer_config.json"
            )
        try:
            self._hf: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            self._fast = self._hf.backend_tokenizer
        except Exception as error:
            raise _unreadable(path, error) from error

    @property
    def transformers(self) -> Any:
        """Return the transformers tokenizer."""
        return self._hf

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Return the tokens of `text`, with the special tokens that the tokenizer adds to a prompt.

        Args:
            limit: the most tokens, by a cut at the tokenizer's own side that keeps the special tokens. None for all.

        Raises:
            RequestError: if a text that is not empty has no tokens, or if the text has half a surrogate pair, which is
                not a
                character. The same if `limit` leaves no room beside the special tokens.
        """
        token_ids = self._encode(text, limit=limit)
        if text and not token_ids:
            raise RequestError(
                f"the tokenizer makes no token of {safe_repr(text)}", fix="give another text, or token ids"
            )
        return token_ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, as `encode` does, in one call of the tokenizer.

        Raises:
            RequestError: see `encode`.
        """
        try:
            found: list[list[int]] = self._hf(list(texts), return_attention_mask=False)["input_ids"]
        except Exception:  # one by one, so that the message names the text
            return [self.encode(text) for text in texts]
        return [token_ids or self.encode(text) for text, token_ids in zip(texts, found, strict=True)]

    def _cut(self, texts: Sequence[str], limit: int) -> Any:
        """Return the encoding of a text or of two with at most `limit` tokens. The special tokens stay.

        Nothing is set in the tokenizer, since other threads use it.

        Raises:
            RequestError: if `limit` leaves no room beside the special tokens.
        """
        special = self._hf.num_special_tokens_to_add(pair=len(texts) > 1)
        room = limit - special
        if room < len(texts):
            raise RequestError(
                f"truncate_prompt_tokens={limit}: the tokenizer adds {special} special tokens",
                fix=f"give {special + len(texts)} or more",
            )
        parts = [self._fast.encode(text, add_special_tokens=False) for text in texts]
        for part, length in zip(parts, kept_lengths([len(part.ids) for part in parts], room), strict=True):
            part.truncate(length, direction=self._hf.truncation_side)
        return self._fast.post_process(*parts, add_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        try:
            if limit is not None:
                return list(self._cut([text], limit).ids)
            token_ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"the tokenizer cannot read {safe_repr(text)}: {_why(text, error)}",
                fix="correct the text, or give token ids",
            ) from error
        return token_ids

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> tuple[list[int], list[int]]:
        """Return the tokens of two texts as one prompt, and the type of each token.

        Args:
            limit: the most tokens, by cuts of the longer text first. None for all.

        Raises:
            RequestError: if a text has half a surrogate pair, which is not a character, or `limit` is too small.
        """
        try:
            if limit is not None:
                cut = self._cut([first, second], limit)
                return list(cut.ids), list(cut.type_ids)
            found = self._hf(first, second, return_token_type_ids=True)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"the tokenizer cannot read {safe_repr(first)} and {safe_repr(second)}: {_why(first + second, error)}",
                fix="correct the texts",
            ) from error
        return list(found["input_ids"]), list(found["token_type_ids"])

    def encode_word(self, word: str) -> list[int]:
        """Return the tokens of `word` as inside a text, without special tokens."""
        return self._encode(word, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`."""
        text: str = self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions | None = None,
        *,
        items: Mapping[str, int] = MappingProxyType({}),
        cross: frozenset[str] = frozenset(),
    ) -> list[int]:
        """Return the tokens of a conversation, formatted by a chat template for the assistant's turn.

        Args:
            messages: the conversation.
            options: options of the template. None for the tokenizer's own template and the assistant's turn.
            items: the placeholder token of each modality that the model takes.
            cross: the modalities whose items have no place in the prompt.

        Raises:
            RequestError: if the tokenizer has no chat template or the template refuses the messages.
        """
        options = options or ChatOptions()
        template = chat_template(self._template_source(options))
        places = {name: self._hf.convert_ids_to_tokens(token) for name, token in items.items() if name not in cross}
        text = template.render(
            [dict(message) for message in messages],
            options,
            template.format(options, places, frozenset(items)),
            self._hf.special_tokens_map,
        )
        return self._encode(text, add_special_tokens=False)

    def template_reads(self, name: str) -> bool:
        """Return True if the chat template reads a variable of this name. False if there is no template."""
        return bool(self._hf.chat_template) and name in chat_template(self._template_source(ChatOptions())).names

    def template_has_roles(self, *roles: str) -> bool:
        """Return True if the chat template names all of the `roles`. False if there is no template."""
        source = str(self._hf.chat_template or "")
        return all(f'"{role}"' in source or f"'{role}'" in source for role in roles)

    def _template_source(self, options: ChatOptions) -> str:
        if not self._hf.chat_template and options.chat_template is None:
            raise RequestError(
                f"the tokenizer in {str(self.path)!r} has no chat template",
                fix="use generate() with a prompt of your own, or give a chat_template",
            )
        try:
            source = self._hf.get_chat_template(options.chat_template, options.tools)
        except Exception as error:
            raise RequestError(f"no chat template was chosen: {error}", fix="name one with chat_template") from error
        if not isinstance(source, str):
            raise RequestError(
                f"the chat template is no text: {safe_repr(source)}", fix="correct tokenizer_config.json"
            )
        return source

    def detokenizer(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer:
        """Return an incremental detokenizer for one output."""
        return Detokenizer(
            self._fast,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
        )


def kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Return the lengths of one or two texts cut to `room` tokens in all, the longer one first."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    short = min(min(lengths), room // 2)
    rest = room - short
    return [short, rest] if lengths[0] <= lengths[1] else [rest, short]


def _unreadable(path: Path, error: Exception) -> ModelError:
    """Return the error of a folder whose tokenizer cannot be loaded."""
    if code := remote_code(path, "AutoTokenizer"):
        return ModelError(
            f"the tokenizer in {str(path)!r} needs code of its own, which is never run: {code}",
            fix="name a folder with a tokenizer that transformers knows, with tokenizer = '...', or convert this one "
            "to tokenizer.json and remove auto_map",
        )
    return ModelError(
        f"the tokenizer in {str(path)!r} cannot be read: {one_line(error)}",
        fix="restore tokenizer.json and tokenizer_config.json, or name another folder with tokenizer = '...'",
    )


def _why(text: str, error: Exception) -> str:
    halves = [char for char in text if "\ud800" <= char <= "\udfff"]
    return f"{halves[0]!r} is no character" if halves else one_line(error)


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with the tokens of their `bad_words`, as given and after a space, in `bad_words_token_ids`.

    Raises:
        RequestError: if there is no tokenizer, or a word has no tokens.
    """
    if tokenizer is None:
        raise RequestError(
            f"bad_words={list(params.bad_words)} needs a tokenizer and the model has none",
            fix="use bad_words_token_ids",
        )
    words = list(params.bad_words_token_ids)
    for word in params.bad_words:
        stripped = word.lstrip()
        for form in (word, stripped, f" {stripped}"):
            token_ids = tuple(tokenizer.encode_word(form))
            if not token_ids:
                raise RequestError(f"bad_words: the tokenizer makes no token of {form!r}", fix="leave it out")
            if token_ids not in words:
                words.append(token_ids)
    return evolve(params, bad_words_token_ids=words)
