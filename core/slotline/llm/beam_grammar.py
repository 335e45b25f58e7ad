"""Beam search under a constraint: finds the tokens allowed after each beam, and the most likely of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from slotline.core.api.outputs import Logprob, TokenLogprobs
from slotline.registry.contracts import StructuredOutputsParams
from slotline.registry.errors import ContractError, RequestError
from slotline.registry.loading import typed_failures

if TYPE_CHECKING:
    from slotline.core.engine.engine import Engine


@define(eq=False)
class Candidates:
    """Logits function of a request that changes nothing and records the most likely of the `allowed` tokens.

    Attributes:
        allowed: [vocab_size] bool.
        count: number of tokens to record.
        entry: these tokens with the model's log-probabilities, after the call.
    """

    allowed: npt.NDArray[np.bool_]
    count: int
    entry: TokenLogprobs = field(factory=dict)

    def __call__(self, output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Record the most likely allowed tokens and return the logits unchanged."""
        banned = torch.from_numpy(~self.allowed).to(logits.device)
        scores = logits.log_softmax(dim=-1).masked_fill(banned, -torch.inf)
        values, ids = scores.topk(min(self.count, int(self.allowed.sum())))
        found = zip(ids.tolist(), values.tolist(), strict=True)
        self.entry = {token: Logprob(value, rank) for rank, (token, value) in enumerate(found, 1)}
        return logits


class BeamGrammar:
    """A compiled constraint, evaluated for all beams of a round at once."""

    def __init__(self, engine: Engine, wanted: StructuredOutputsParams) -> None:
        if (absent := engine.limits.absent.get("structured_outputs")) is not None:
            reason, fix = absent(wanted)
            raise RequestError(f"structured_outputs cannot be had: {reason}", fix=fix)
        if wanted.after is not None:
            raise RequestError("structured_outputs.after in a beam search", fix="leave it out, or use generate()")
        grammars = engine.extension("structured_output")
        grammars.check_constraint(wanted.constraint)
        self._backend = grammars.compiler.backend
        self._vocab_size = engine.limits.vocab_size
        with typed_failures(
            f"structured-output plugin {grammars.name!r} failed on structured_outputs.{wanted.constraint.kind}",
            fix="change the constraint, or name another plugin with structured_output.backend",
        ):
            self._grammar = self._backend.compile(wanted.constraint)

    def candidates(self, outputs: Sequence[Sequence[int]], count: int) -> list[Candidates]:
        """Return, for each output so far, a function that records the `count` most likely tokens that may follow."""
        states = [self._backend.start(self._grammar) for _ in outputs]
        for state, output in zip(states, outputs, strict=True):
            if state.accept(output) != len(output):
                raise ContractError("a structured-output plugin refuses the tokens that its masks allowed")
        words = np.full((len(outputs), -(-self._vocab_size // 32)), -1, np.int32)
        self._backend.fill(states, [[] for _ in outputs], list(range(len(outputs))), words)
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        return [Candidates(row, count) for row in bits.astype(bool)]
