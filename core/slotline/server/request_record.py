"""Notes on a request while it is answered: its prompts for the access log, parameters and counts for its span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from attrs import define, field

from slotline.core.api.outputs import PoolingRequestOutput, RequestOutput
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.text.tokenizer import Tokenizer


@define(kw_only=True, eq=False)
class RequestRecord:
    """Notes on a request of HTTP, which may hold several prompts.

    Attributes:
        request_id: from the client, or made up.
        status: of its answer, 499 until that begins.
        seconds: to the end of its answer.
        route: path of its endpoint, None if there is none.
        model: name of the model in its answer.
        params: its parameters, None until it generates.
        stream: whether its outputs are taken as they come.
        prompts: the beginnings of its prompts, empty unless they are logged.
        characters: those that `prompts` still has room for, None to keep no prompt.
        cut: whether a prompt had more.
        unfinished: number of prompts whose outputs are not complete.
        prompt_tokens, cached_tokens, output_tokens: over all finished prompts.
        finish_reasons: those of the outputs, in the order of their ends.
        first_token: seconds to the first token of the first prompt that had one.
        error: the code of its answer or the kind of its exception, None if nothing failed.
    """

    request_id: str = ""
    status: int = 499
    seconds: float = 0.0
    route: str | None = None
    model: str | None = None
    params: SamplingParams | None = None
    stream: bool = False
    prompts: list[str] = field(factory=list)
    characters: int | None = None
    cut: bool = False
    unfinished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(factory=list)
    first_token: float | None = None
    error: str | None = None

    @contextmanager
    def prompt(
        self,
        prompt: Mapping[str, Any],
        tokenizer: Tokenizer | None,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> Iterator[None]:
        """Note a prompt and what fails while it is answered. Keep its text as far as there is room.

        Args:
            prompt: for `AsyncLLM`, not checked yet.
            tokenizer: decodes a prompt of token ids.
            params: None for a prompt that is pooled.
        """
        self.unfinished += 1
        self.params, self.stream = params, stream
        if self.characters is not None:
            self._keep(prompt, tokenizer, self.characters)
        try:
            yield
        except Exception as error:
            self.error = type(error).__name__
            raise

    def _keep(self, prompt: Mapping[str, Any], tokenizer: Tokenizer | None, room: int) -> None:
        text, token_ids = prompt.get("prompt"), ()
        if (embeds := prompt.get("prompt_embeds")) is not None:
            text = f"embeddings {list(embeds.shape)}"
        elif not isinstance(text, str):
            token_ids = prompt["prompt_token_ids"]
            text = _decoded(token_ids[:room], tokenizer)
        self.cut |= len(text) > room or len(token_ids) > room
        if text := text[:room]:
            self.prompts.append(text)
        self.characters = room - len(text)

    def end(self, output: RequestOutput | PoolingRequestOutput[Any], tokens: int = 0) -> None:
        """Note the end of a prompt.

        Args:
            output: its last output.
            tokens: the number of tokens of all its outputs.
        """
        metrics = output.metrics
        self.unfinished -= 1
        self.prompt_tokens += len(output.prompt_token_ids) + metrics.num_encoder_tokens
        self.cached_tokens += metrics.num_cached_tokens
        self.output_tokens += tokens
        if self.first_token is None:
            self.first_token = metrics.time_to_first_token


def _decoded(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """Return the text of token ids, or their numbers if they have none."""
    text = ""
    if tokenizer is not None:
        with suppress(Exception):  # a number beyond the vocabulary
            text = tokenizer.decode(token_ids)
    return text or str(token_ids)


_record: ContextVar[RequestRecord] = ContextVar("request_record")


def begin_record(request_id: str, characters: int | None) -> RequestRecord:
    """Return a new record, which is the current one in this task and in those that it starts.

    Args:
        characters: those of its prompts to keep, None to keep no prompt.
    """
    record = RequestRecord(request_id=request_id, characters=characters)
    _record.set(record)
    return record


def current_record() -> RequestRecord:
    """Return the record of the request that is answered, or an empty one outside of requests."""
    return _record.get(None) or RequestRecord()
