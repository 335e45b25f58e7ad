"""Transcription of a recording of any length: the prompts of its windows one after another, and the segments from them.

The order of the windows is that of transformers' `WhisperForConditionalGeneration.generate`: each begins where the last
complete segment ended. This module runs nothing: `Transcription.steps` yields prompts and takes their outputs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import exp
from typing import Any

from attrs import define, field, frozen

from slotline.core.api.outputs import CompletionOutput
from slotline.llm.speech_facts import TASKS, SpeechFacts
from slotline.llm.submitter import Submitter
from slotline.llm.transcripts import SECONDS, Part, Segment, Transcript, compression_ratio, divide
from slotline.ranks.replicas.front import model_folder
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import ModelError, RequestError
from slotline.registry.safe_repr import safe_repr
from slotline.text.recordings import as_samples
from slotline.text.tokenizer import Tokenizer

TASK = "transcription"


@frozen(kw_only=True)
class TranscriptionOptions:
    """What is asked of a transcript.

    Attributes:
        task: ``transcribe``, or ``translate`` into English.
        language: of the recording, by its code or its English name. None to detect it.
        prompt: text before the recording, for names and style. Its last tokens are kept.
        timestamps: divide the text into segments with times. Recordings longer than a window always have them.
        temperature: 0 takes the likeliest token.
        details: find `avg_logprob` and `no_speech_prob`, which takes one more token for each window.
    """

    task: str = "transcribe"
    language: str | None = None
    prompt: str | None = None
    timestamps: bool = False
    temperature: float = 0.0
    details: bool = False


@frozen(kw_only=True)
class Ask:
    """A prompt to run next.

    Attributes:
        prompt, params: as `LLM.generate` takes them.
        is_text: whether the text of its output is part of the transcript as it is.
    """

    prompt: dict[str, Any]
    params: SamplingParams
    is_text: bool = False


@define(kw_only=True)
class Transcription:
    """A recording that is transcribed.

    Attributes:
        features: [mel bins, frames] float32. A recording that is shorter than a window is filled with silence.
        window: frames of a window.
        duration: in seconds.
        segments: those that are complete.
    """

    facts: SpeechFacts
    tokenizer: Tokenizer
    options: TranscriptionOptions
    features: Any
    window: int
    duration: float
    before: list[int]
    segments: list[Segment] = field(factory=list, init=False)
    num_tokens: int = field(default=0, init=False)

    def steps(self) -> Generator[Ask, CompletionOutput, Transcript]:
        """Yield the prompts one after another, take the output of each, and return the transcript.

        It raises:
            RequestError: if an output failed.
        """
        options, facts = self.options, self.facts
        timed = options.timestamps or self.features.shape[-1] > self.window
        code = "" if options.language is None else facts.language(options.language)
        if not code and facts.languages:
            tokens = (yield from self._one_of(0, facts.languages.values())).token_ids
            code = next(name for name, token in facts.languages.items() if token == tokens[0])
        seek, frames = 0, int(self.features.shape[-1])
        while seek < frames:
            silence = (yield from self._one_of(seek, [facts.first_timestamp - 2])) if options.details else None
            output = yield from self._run(
                seek,
                facts.prompt(code, options.task, self.before, timestamps=timed),
                self._params(timed),
                is_text=not timed,
            )
            tokens = [token for token in output.token_ids if token != facts.end]
            count = min(self.window, frames - seek)
            parts, moved = [Part(0, count // 2, tokens)], count
            if timed:
                parts, moved = divide(tokens, facts.first_timestamp, count)
            for part in parts:
                self._add(part, seek, output, silence)
            seek += moved
        text = "".join(segment.text for segment in self.segments).strip()
        return Transcript(
            text=text, language=code, duration=self.duration, segments=self.segments, num_tokens=self.num_tokens
        )

    def _params(self, timed: bool) -> SamplingParams:
        rules: dict[str, Any] = dict(self.facts.rules)
        if timed:
            rules |= {"first_timestamp": self.facts.first_timestamp, "end": self.facts.end}
            rules |= {"most_initial": self.facts.most_initial}
        return SamplingParams(
            temperature=self.options.temperature,
            max_tokens=None,
            extra_args={"speech_rules": rules},
            logprobs=0 if self.options.details else None,
            skip_special_tokens=True,
        )

    def _one_of(self, seek: int, tokens: Any) -> Generator[Ask, CompletionOutput, CompletionOutput]:
        """Ask for the likeliest of some tokens at the begin of a window's transcript."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=tuple(tokens), logprobs=0, detokenize=False
        )
        return (yield from self._run(seek, [self.facts.start], params))

    def _run(
        self, seek: int, prompt: Sequence[int], params: SamplingParams, *, is_text: bool = False
    ) -> Generator[Ask, CompletionOutput, CompletionOutput]:
        from torch.nn.functional import pad

        heard = self.features[:, seek : seek + self.window]
        data = {"audio": {"input_features": pad(heard, (0, self.window - heard.shape[1]))}}
        output = yield Ask(
            prompt={"prompt_token_ids": list(prompt), "multi_modal_data": data}, params=params, is_text=is_text
        )
        if output.finish_reason not in ("stop", "length"):
            raise RequestError(
                f"the transcript ended with {output.finish_reason}: {output.stop_reason}", fix="send it again"
            )
        self.num_tokens += len(output.token_ids)
        return output

    def _add(self, part: Part, seek: int, output: CompletionOutput, silence: CompletionOutput | None) -> None:
        """Add a segment, unless it is blank."""
        words = [token for token in part.tokens if token < self.facts.first_timestamp]
        text = self.tokenizer.decode(words, skip_special_tokens=True)
        if not text.strip():
            return
        offset = seek * SECONDS / 2
        self.segments.append(
            Segment(
                id=len(self.segments),
                seek=seek,
                start=round(offset + part.start * SECONDS, 2),
                end=round(offset + part.end * SECONDS, 2),
                text=text,
                tokens=part.tokens,
                temperature=self.options.temperature,
                avg_logprob=_mean_logprob(output),
                compression_ratio=compression_ratio(text),
                no_speech_prob=None if silence is None else exp(silence.cumulative_logprob or 0.0),
            )
        )


def _mean_logprob(output: CompletionOutput) -> float | None:
    if output.cumulative_logprob is None:
        return None
    return output.cumulative_logprob / max(1, len(output.token_ids))


def transcription(submitter: Submitter, recording: Any, options: TranscriptionOptions) -> Transcription:
    """Return the transcription of a recording, which has read it and its options.

    Args:
        submitter: of the engine that will run it.
        recording: samples [n], a pair of samples and their rate in Hz, or the bytes of a file.

    Raises:
        RequestError: if the model does not transcribe, the recording cannot be read, or an option is wrong.
        ModelError: if the model's folder lacks what transcripts need.
    """
    from transformers import WhisperFeatureExtractor

    front = submitter.front
    if TASK not in front.limits.tasks:
        raise RequestError(
            f"this model does not transcribe; it serves {', '.join(front.limits.tasks)}",
            fix="take a Whisper checkpoint with generation_config.json, or ask in a prompt with the recording",
        )
    folder = model_folder(front)
    facts = SpeechFacts.read(folder)
    _check(facts, options)
    try:
        extractor = WhisperFeatureExtractor.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, by file and version
        raise ModelError(f"no feature extractor in {str(folder)!r}: {error}", fix="download it again") from error
    rate = int(extractor.sampling_rate)
    samples = as_samples(recording, rate)
    long = {"truncation": False, "padding": "longest"} if len(samples) > extractor.n_samples else {}
    features = extractor(samples, sampling_rate=rate, return_tensors="pt", **long).input_features[0]
    return Transcription(
        facts=facts,
        tokenizer=submitter.tokenizer,
        options=options,
        features=features,
        window=int(extractor.nb_max_frames),
        duration=len(samples) / rate,
        before=_before(facts, submitter.tokenizer, options.prompt),
    )


def _check(facts: SpeechFacts, options: TranscriptionOptions) -> None:
    if options.task not in TASKS:
        raise RequestError(f"task={safe_repr(options.task, 40)}", fix=f"give one of {', '.join(TASKS)}")
    if options.task == "translate" and not facts.languages:
        raise RequestError("this model knows English alone, so it does not translate", fix="transcribe")
    if options.language is not None:
        facts.language(options.language)
    if options.prompt is not None and not isinstance(options.prompt, str):
        raise RequestError(f"prompt={safe_repr(options.prompt, 40)} is no text", fix="give a text")


def _before(facts: SpeechFacts, tokenizer: Tokenizer, text: str | None) -> list[int]:
    """Return the tokens of a text that came before, at most half of what the decoder reads."""
    if not text or not text.strip():
        return []
    if facts.previous is None:
        raise RequestError("this model's generation_config.json has no prev_sot_token_id", fix="leave prompt out")
    tokens = tokenizer.encode_word(" " + text.strip())
    return [facts.previous, *tokens[-(facts.max_tokens // 2 - 1) :]]
