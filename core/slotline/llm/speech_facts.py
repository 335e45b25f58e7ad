"""What a speech model's folder says about its prompts: tokens of languages, tasks, timestamps and earlier text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from slotline.registry.errors import ModelError, RequestError
from slotline.registry.json_file import read_object
from slotline.registry.safe_repr import safe_repr

TASKS = ("transcribe", "translate")


@frozen(kw_only=True)
class SpeechFacts:
    """Tokens of a Whisper checkpoint, from its generation_config.json.

    Attributes:
        start: begins every transcript.
        end: the end of text. Tokens from it on are no text.
        first_timestamp: the token of 0.00 s. The one before it says that there are no timestamps.
        languages: tokens by the code of their language, empty for a model of English alone.
        tasks: tokens by task, empty for the same.
        previous: stands before text that came before, None if unknown.
        rules: `suppress` and `begin_suppress` of the logits processor `speech_rules`.
        most_initial: the latest timestamp to begin with, None for any.
        max_tokens: the decoder's longest sequence.
    """

    start: int
    end: int
    first_timestamp: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    previous: int | None
    rules: Mapping[str, list[int]]
    most_initial: int | None
    max_tokens: int

    @classmethod
    def read(cls, folder: Path) -> SpeechFacts:
        """Read a folder.

        Raises:
            ModelError: if generation_config.json lacks a token, or has something else in its place.
        """
        said, config = read_object(folder / "generation_config.json"), read_object(folder / "config.json")
        try:
            end: Any = said.get("eos_token_id", config.get("eos_token_id"))
            languages = {name.strip("<|>"): int(token) for name, token in (said.get("lang_to_id") or {}).items()}
            return cls(
                start=int(said.get("decoder_start_token_id") or config["decoder_start_token_id"]),
                end=int(end[0] if isinstance(end, list) else end),
                first_timestamp=int(said["no_timestamps_token_id"]) + 1,
                languages=languages if said.get("is_multilingual", True) else {},
                tasks={name: int(said["task_to_id"][name]) for name in TASKS} if languages else {},
                previous=said.get("prev_sot_token_id"),
                rules={name: list(said.get(f"{name}_tokens") or ()) for name in ("suppress", "begin_suppress")},
                most_initial=said.get("max_initial_timestamp_index"),
                max_tokens=int(config["max_target_positions"]),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{str(folder / 'generation_config.json')!r} does not say how to transcribe: {error!r}",
                fix="download it again; it needs no_timestamps_token_id, and lang_to_id and task_to_id for languages",
            ) from error

    def language(self, given: object) -> str:
        """Return the code of a language that is given by its code or its English name.

        Raises:
            RequestError: if the model does not know it.
        """
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        name = given.lower().strip("<|>") if isinstance(given, str) else ""
        code: str = name if name in self.languages else TO_LANGUAGE_CODE.get(name, "")
        if code not in self.languages:
            if not self.languages and code == "en":
                return ""
            raise RequestError(
                f"language={safe_repr(given, 40)} is not known to this model",
                fix=f"give one of {', '.join(self.languages) or 'en'}, or leave it out to have it detected",
            )
        return code

    def prompt(self, code: str, task: str, before: list[int], *, timestamps: bool) -> list[int]:
        """Return the decoder's prompt of a window."""
        prompt = [*before, self.start]
        if self.languages:
            prompt += [self.languages[code], self.tasks[task]]
        return prompt if timestamps else [*prompt, self.first_timestamp - 1]
