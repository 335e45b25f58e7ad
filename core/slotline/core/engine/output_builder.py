"""Output objects of finished and running requests."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.core.api.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.text.tokenizer import Tokenizer


def request_output(
    requests: Sequence[Request], rows: RequestTable | None, tokenizer: Tokenizer | None
) -> RequestOutput:
    """Build the public form of a prompt's requests (one per output). Without rows they hold their tokens themselves."""
    first = requests[0]
    return RequestOutput(
        request_id=first.request_id,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs and with_token_texts(first.prompt_logprobs, tokenizer),
        outputs=[_completion(request, rows, tokenizer) for request in requests],
        finished=all(request.finished for request in requests),
        metrics=first.metrics,
    )


def _completion(request: Request, rows: RequestTable | None, tokenizer: Tokenizer | None) -> CompletionOutput:
    tokens = request.output_token_ids
    if not request.finished:
        tokens = rows.output_token_ids(request.row) if rows is not None and request.row >= 0 else list(tokens)
    logprobs: list[TokenLogprobs] | None = None
    if request.logprobs is not None:
        logprobs = [entry for entry in with_token_texts(request.logprobs, tokenizer) if entry is not None]
    settled = request.params.detokenize and request.detokenizer is not None and not request.finished
    text = request.detokenizer.settled if settled and request.detokenizer else request.text
    return CompletionOutput(
        index=request.index,
        text=text,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        cumulative_logprob=None if logprobs is None else sum(next(iter(e.values())).logprob for e in logprobs),
    )


def with_token_texts(
    entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None
) -> list[TokenLogprobs | None]:
    """Return log-probabilities with the text of each token, if there is a tokenizer."""
    if tokenizer is None:
        return list(entries)
    texts = {token: tokenizer.decode([token]) for token in {token for entry in entries if entry for token in entry}}
    return [
        entry and {token: value._replace(decoded_token=texts[token]) for token, value in entry.items()}
        for entry in entries
    ]
