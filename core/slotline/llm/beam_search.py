"""Beam search, as a loop around `LLM.generate`. Torch-free.

The rules are those of transformers' `generate(num_beams=...)`, so that the same model gives the same sequences. The
names are vLLM's. Each round asks for one token of every beam, with the log-probabilities of the most likely tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from slotline.core.api.outputs import Logprob, TokenLogprobs
from slotline.core.api.prompts import as_token_ids
from slotline.llm.progress import Progress, progress_bar
from slotline.llm.prompt_fields import Fields
from slotline.registry.contracts import StructuredOutputsParams
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.plain_values import plain_number
from slotline.registry.safe_repr import safe_repr

if TYPE_CHECKING:
    from slotline.llm.beam_grammar import BeamGrammar, Candidates
    from slotline.llm.llm import LLM


@frozen(kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Attributes:
        beam_width: beams that are kept, and sequences that are returned.
        max_tokens: most output tokens.
        ignore_eos: continue after the model's end-of-sequence tokens.
        length_penalty: a sequence's score is its log-probability divided by its number of output tokens to this power.
        forced_bos_token_id: first output token of a model whose decoder's prompt is one token, such as a translation's
            language. None for that of generation_config.json, if there is one.
        structured_outputs: constraint on the output. Scores stay the model's: banned tokens are left out, and the
            remaining
            probabilities are not rescaled.
        early_stopping: True ends a search with `beam_width` finished sequences. False also requires that the best
            running
            beam, ended now, is worse than all of them. "never" requires that it cannot become better at any length.

    Raises:
        RequestError: naming the parameter, its value and the allowed values.
    """

    beam_width: int = field(converter=plain_number)
    max_tokens: int = field(converter=plain_number)
    ignore_eos: bool = field(default=False, converter=plain_number)
    length_penalty: float = field(default=1.0, converter=plain_number)
    early_stopping: bool | str = field(default=False, converter=plain_number)
    forced_bos_token_id: int | None = field(default=None, converter=plain_number)
    structured_outputs: StructuredOutputsParams | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(f"{name}={safe_repr(value)} is not allowed", fix=f"{name} must be an integer >= 1")
        penalty = self.length_penalty
        if not isinstance(penalty, int | float) or isinstance(penalty, bool) or not -10 <= penalty <= 10:
            raise RequestError(
                f"length_penalty={safe_repr(penalty)} is not allowed",
                fix="length_penalty must be a number in [-10, 10]",
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise RequestError(
                f"early_stopping={safe_repr(self.early_stopping)} is not allowed",
                fix='early_stopping must be True, False or "never"',
            )
        first = self.forced_bos_token_id
        if first is not None and (not isinstance(first, int) or isinstance(first, bool) or first < 0):
            raise RequestError(f"forced_bos_token_id={safe_repr(first)} is not allowed", fix="give a token id, or None")
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs={safe_repr(wanted)} is not allowed", fix="give a StructuredOutputsParams or None"
            )
        if wanted is not None and self.ignore_eos:
            raise RequestError("ignore_eos beside structured_outputs in a beam search", fix="leave one of them out")


@define(kw_only=True)
class BeamSearchSequence:
    """A continuation of a prompt.

    Attributes:
        tokens: tokens of the prompt and the output.
        logprobs: one entry for each output token: the most likely tokens at its place, including itself.
        cum_logprob: the sum of its output tokens' log-probabilities.
        score: `cum_logprob` with the length penalty. Sequences are ordered by it.
        text: text of `tokens`, without special tokens. Empty if the model has no tokenizer.
        finish_reason: `stop`, `length`, or `abort` if a request of the search was aborted.
        stop_reason: the end-of-sequence token that ended it.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(factory=list)
    cum_logprob: float = 0.0
    score: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | None = None

    def then(self, token: int, entry: TokenLogprobs) -> BeamSearchSequence:
        """Return the sequence with one more token."""
        return BeamSearchSequence(
            tokens=[*self.tokens, token],
            logprobs=[*self.logprobs, entry],
            cum_logprob=self.cum_logprob + entry[token].logprob,
        )


@define(kw_only=True)
class BeamSearchOutput:
    """The sequences found for a prompt, best first."""

    sequences: list[BeamSearchSequence]


@frozen
class Rules:
    """What a checkpoint's generation_config.json says of the outputs of an encoder-decoder model.

    Attributes:
        first, last: the forced first token of an output behind a prompt of one token, and the forced last one. None for
            no such token.
        banned: tokens that no output has.
    """

    first: int | None = None
    last: int | None = None
    banned: frozenset[int] = frozenset()

    @classmethod
    def of(cls, defaults: Mapping[str, Any]) -> Rules:
        """Return the rules among the defaults of sampling parameters."""
        forced = defaults.get("extra_args") or {}
        words = defaults.get("bad_words_token_ids", ())
        banned = frozenset(word[0] for word in words if len(word) == 1)
        return cls(forced.get("forced_bos_token_id"), forced.get("forced_eos_token_id"), banned)


class Beams:
    """The search for one prompt: running beams, and the best finished sequences so far."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_ids: frozenset[int],
        rules: Rules = Rules(),
    ) -> None:
        self.params, self.rules = params, rules
        self._first = rules.first if len(prompt_token_ids) == 1 else None
        self.eos_token_ids = frozenset[int]() if params.ignore_eos else eos_token_ids
        self.running = [BeamSearchSequence(tokens=list(prompt_token_ids))]
        self.finished: list[BeamSearchSequence] = []
        self.done = False

    @property
    def num_candidates(self) -> int:
        """Return the number of continuations to examine, so that enough remain if the others end."""
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    @property
    def forced(self) -> int | None:
        """Return the next token of all beams, if there is no choice."""
        length = len(self.running[0].logprobs)
        if length == self.params.max_tokens - 1 and self.rules.last is not None:
            return self.rules.last
        return self._first if length == 0 else None

    def advance_forced(self, token: int) -> None:
        """Extend the running beams by a forced token, which costs nothing."""
        self.advance([{token: Logprob(logprob=0.0, rank=1)} for _ in self.running])

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Extend the running beams by their most likely next tokens."""
        width = self.params.beam_width
        candidates = [
            beam.then(token, entry) for beam, entry in zip(self.running, entries, strict=True) for token in entry
        ]
        candidates.sort(key=lambda beam: -beam.cum_logprob)
        candidates = candidates[: self.num_candidates]
        for beam in candidates:
            self._end(beam)
        self.finished += [beam for beam in candidates[:width] if beam.finish_reason]
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:width]
        self.running = [beam for beam in candidates if not beam.finish_reason][:width]
        self.done = not self.running or (len(self.finished) == width and not self._can_improve())

    def abort(self) -> None:
        """End the search with the running beams as they are."""
        for beam in self.running:
            self._score(beam)
            beam.finish_reason = "abort"
        self.finished = sorted(self.finished + self.running, key=lambda beam: -beam.score)[: self.params.beam_width]
        self.running, self.done = [], True

    def _score(self, beam: BeamSearchSequence) -> None:
        beam.score = beam.cum_logprob / max(1, len(beam.logprobs)) ** self.params.length_penalty

    def _end(self, beam: BeamSearchSequence) -> None:
        """Score a candidate and mark it if it ends."""
        self._score(beam)
        if beam.tokens[-1] in self.eos_token_ids:
            beam.finish_reason, beam.stop_reason = "stop", beam.tokens[-1]
        elif len(beam.logprobs) == self.params.max_tokens:
            beam.finish_reason = "length"

    def _can_improve(self) -> bool:
        """Return True if the best running beam may still displace a finished sequence."""
        if self.params.early_stopping is True:
            return False
        length, penalty = len(self.running[0].logprobs), self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.params.max_tokens
        possible: float = self.running[0].cum_logprob / length**penalty
        return possible > self.finished[-1].score


class BeamSearch:
    """The searches for some prompts, in rounds."""

    def __init__(self, llm: LLM, params: BeamSearchParams, prompts: Sequence[Mapping[str, Any]]) -> None:
        engine = llm.front
        mode = llm.loaded.config.sampling.logprobs_mode
        if not mode.endswith("_logprobs"):
            raise RequestError(
                f"beam search under sampling.logprobs_mode={mode!r}", fix='set sampling.logprobs_mode = "raw_logprobs"'
            )
        for prompt in prompts:
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "lora_request"}
            if all(feature.cross for feature in prompt.get("features", ())):
                unknown -= {"features"}
            if unknown:
                names = ", ".join(sorted("multi_modal_data" if name == "features" else name for name in unknown))
                raise RequestError(f"beam search with {names} in a prompt", fix="leave it out, or use generate()")
            length = len(prompt["prompt_token_ids"]) + params.max_tokens
            if length > engine.limits.max_model_len:
                raise RequestError(
                    f"the prompt and max_tokens={params.max_tokens} are {length} tokens, above "
                    f"max_model_len={engine.limits.max_model_len}",
                    fix="lower max_tokens, shorten the prompt, or raise scheduler.max_model_len",
                )
        eos = frozenset(engine.eos_token_ids)
        self._llm = llm
        self._rest = [{name: p[name] for name in ("cache_salt", "features") if name in p} for p in prompts]
        self._adapters = [p.get("lora_request") for p in prompts]
        rules = Rules.of(engine.sampling_defaults)
        if params.forced_bos_token_id is not None:
            rules = evolve(rules, first=params.forced_bos_token_id)
        self._searches = [Beams(as_token_ids(p["prompt_token_ids"]), params, eos, rules) for p in prompts]
        wanted = min(self._searches[0].num_candidates + len(rules.banned), engine.limits.vocab_size)
        self._grammar: BeamGrammar | None = None
        if params.structured_outputs is not None:
            from slotline.llm.beam_grammar import BeamGrammar

            self._grammar = engine.exclusively(BeamGrammar, llm.engine, params.structured_outputs)
        elif wanted > engine.limits.max_logprobs:
            raise RequestError(
                f"beam_width={params.beam_width} needs {wanted} log-probabilities a token, above "
                f"sampling.max_logprobs={engine.limits.max_logprobs}",
                fix=f"lower beam_width or set sampling.max_logprobs = {wanted}",
            )
        scored = None if self._grammar is not None else wanted
        self._sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=scored, ignore_eos=True, detokenize=False)
        self._rounds = params.max_tokens

    def run(self, progress: Progress) -> list[BeamSearchOutput]:
        """Run rounds until every search is done."""
        enabled = self._llm.loaded.config.observability.progress
        with progress_bar(self._rounds, enabled=enabled, asked=progress) as bar:
            while open_searches := [i for i, search in enumerate(self._searches) if not search.done]:
                self._round(open_searches)
                bar.advance(1, tokens=len(open_searches))
        return [self._output(search) for search in self._searches]

    def _round(self, which: Sequence[int]) -> None:
        forced = {i: token for i in which if (token := self._searches[i].forced) is not None}
        for i, token in forced.items():
            self._searches[i].advance_forced(token)
        if not (which := [i for i in which if i not in forced]):
            return
        prompts = [
            Fields(prompt_token_ids=beam.tokens, **self._rest[i]) for i in which for beam in self._searches[i].running
        ]
        adapters = [self._adapters[i] for i in which for _ in self._searches[i].running]
        candidates = self._candidates(which)
        sampling = [evolve(self._sampling, logits_processors=(one,)) for one in candidates]
        answers = self._llm.generate_as_given(prompts, sampling or [self._sampling] * len(prompts), adapters, False)
        outputs = [answer.outputs[0] for answer in answers]
        found = [one.entry for one in candidates] or [one.logprobs[0] if one.logprobs else {} for one in outputs]
        beams = iter(zip(outputs, found, strict=True))
        for i in which:
            entries, aborted = [], False
            for _ in self._searches[i].running:
                output, entry = next(beams)
                aborted |= output.finish_reason == "abort"
                if not aborted and (output.finish_reason == "error" or not entry):
                    raise RequestError(f"a beam of prompt {i} failed: {output.stop_reason}")
                banned = self._searches[i].rules.banned
                entries.append({token: value for token, value in entry.items() if token not in banned})
            if aborted:
                self._searches[i].abort()
            else:
                self._searches[i].advance(entries)

    def _candidates(self, which: Sequence[int]) -> list[Candidates]:
        """Return logits functions for the searches' beams, in order, if there is a constraint, else an empty list."""
        if self._grammar is None:
            return []
        searches = [self._searches[i] for i in which]
        outputs = [beam.tokens[-len(beam.logprobs) or len(beam.tokens) :] for s in searches for beam in s.running]
        return self._llm.front.exclusively(self._grammar.candidates, outputs, searches[0].num_candidates)

    def _output(self, search: Beams) -> BeamSearchOutput:
        tokenizer = self._llm.front.tokenizer
        for beam in search.finished:
            beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=True) if tokenizer is not None else ""
        return BeamSearchOutput(sequences=search.finished)
