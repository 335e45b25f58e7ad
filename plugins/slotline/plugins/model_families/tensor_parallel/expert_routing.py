"""Forward of a mixture whose experts are on several ranks, in the place of the experts module's own.

- `SameTokens`: all ranks have the same tokens, as in a tensor group. Each adds what its experts give, and the sum over
  the ranks behind the mixture, or behind the block that adds shared experts, joins it. Nothing is sent.
- `GatheredTokens`: each rank has as many tokens of its own. All ranks gather all tokens, add what their experts give,
  and each gets the sums of its own tokens. Shapes do not hang on the routing, so it can be captured in a graph.
- `OwnTokens`: each rank has tokens of its own, which go as in one of these two forms.
- `ExchangedTokens`: each rank has any number of tokens of its own. Each token goes to the ranks of its experts alone,
  and their sums come back. The host waits for the numbers of tokens, so it cannot be captured. A room of fixed size for
  each rank would need no such wait, but tokens beyond it would have to be dropped, which changes the output.

Where tensor groups share experts, each rank gathers or exchanges with those of its place in the other groups, and only
for the experts of these. The group, whose ranks have the same tokens, adds what all of them give.

Experts of other ranks cost nothing in the product: transformers' forms skip a token whose expert has the number behind
the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from attrs import frozen

from slotline.plugins.model_families.tensor_parallel.expert_product import sums_of
from slotline.registry.contracts.communicator import Communicator
from slotline.registry.errors import ModelError

_calls = count()


@frozen
class Column:
    """Ranks of the same place in all tensor groups that share experts.

    Attributes:
        rank: the place.
        size: number of places. The experts of one column are on every so many-th rank.
    """

    rank: int = 0
    size: int = 1


_ALONE = Column()


class SameTokens:
    """Mixture whose tokens are the same on all ranks.

    Attributes:
        same_tokens: whether they are.
    """

    same_tokens = True

    def __init__(
        self, module: Any, communicator: Communicator, column: Column = _ALONE, *, fused: bool = False
    ) -> None:
        self._module, self._column, self._fused = module, column, fused
        self.join(communicator)
        loads = getattr(module, "slotline_loads", None)
        self._one = None if loads is None else torch.ones((), dtype=torch.int64, device=loads.device)

    def join(self, communicator: Communicator) -> None:
        """Share the experts with the ranks of a communicator, by the number of experts that the mixture has now."""
        self._communicator = communicator
        self._sums = sums_of(self._module, fused=self._fused)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums of the chosen experts' outputs [tokens, hidden_size]. Here what this rank's give.

        Args:
            hidden_states: [tokens, hidden_size].
            top_k_index: [tokens, k] int64, the experts of each token among all.
            top_k_weights: [tokens, k].
        """
        self.count(top_k_index)
        return self.own_sums(hidden_states, top_k_index, top_k_weights)

    def own_sums(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return what this rank's experts add to the sums [tokens, hidden_size]."""
        own = entries(self._module.slotline_local, top_k_index)
        return self._sums(hidden_states, own, top_k_weights)

    def gathered(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the whole sums [tokens, hidden_size] of as many tokens as each other rank gives."""
        self.count(top_k_index)
        gather = self._communicator.all_gather
        given = (gather(one.contiguous()) for one in (hidden_states, top_k_index, top_k_weights))
        return self._communicator.reduce_scatter(self.own_sums(*given))

    def count(self, top_k_index: torch.Tensor) -> None:
        """Count the tokens of each expert, if that is wanted."""
        if self._one is not None:
            chosen = top_k_index.reshape(-1)
            self._module.slotline_loads.scatter_add_(0, chosen, self._one.expand_as(chosen))


class GatheredTokens(SameTokens):
    """Mixture whose ranks have as many tokens each, which all of them gather."""

    same_tokens = False

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `SameTokens`. The sums are whole. The number of tokens is the same on all ranks."""
        return self.gathered(hidden_states, top_k_index, top_k_weights)


class ExchangedTokens(SameTokens):
    """Mixture whose ranks send each token to the ranks of its experts.

    Attributes:
        calls: how often it was called.
        first: number of its first call among the first calls of all mixtures, in order.
        pause: is called while tokens travel. None to wait for them at once.
    """

    same_tokens = False
    pause: Callable[[], None] | None = None

    def __init__(
        self, module: Any, communicator: Communicator, column: Column = _ALONE, *, fused: bool = False
    ) -> None:
        super().__init__(module, communicator, column, fused=fused)
        self.calls, self.first = 0, 0
        self._none: tuple[torch.Tensor, ...] = ()

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `SameTokens`. The sums are whole. The number of tokens may be 0, and another one on each rank."""
        self.calls += 1
        if not self._none:
            self.first = next(_calls)
            self._none = tuple(x.new_empty(0, *x.shape[1:]) for x in (hidden_states, top_k_index, top_k_weights))
        self.count(top_k_index)
        ranks, slots = self._communicator.size, self._module.num_experts
        places = entries(self._module.slotline_places, top_k_index)  # [tokens, k]
        goes = torch.zeros(ranks + 1, len(places), dtype=torch.bool, device=places.device)
        goes.scatter_(0, self._holders(places // slots).T, True)
        goes = goes[:ranks]
        to, token = goes.nonzero(as_tuple=True)  # in order of the ranks
        sent, received = self._numbers(goes)
        parts = (hidden_states, places, top_k_weights)
        started = [self._communicator.all_to_all(part[token], sent, received) for part in parts]
        if self.pause is not None:
            self.pause()
        given, there, weights = (one.finish() for one in started)
        own = there - (self._communicator.rank * self._column.size + self._column.rank) * slots
        own = own.masked_fill_((own < 0) | (own >= slots), slots)
        sums = self._sums(given, own, weights) if len(given) else given
        returned = self._communicator.all_to_all(sums.contiguous(), received, sent)
        if self.pause is not None:
            self.pause()
        back = returned.finish()
        joined = back.new_zeros(ranks, *hidden_states.shape)  # added in order of the ranks
        joined[to, token] = back
        return joined.sum(0)

    def idle(self) -> None:
        """Compute what the other ranks send, without tokens of this rank. It was called with some before."""
        self(*self._none)

    def _holders(self, holders: torch.Tensor) -> torch.Tensor:
        """Return the place in the communicator [tokens, k] of holders among all ranks, behind the last of others."""
        if self._column.size == 1:
            return holders
        elsewhere = holders % self._column.size != self._column.rank
        return (holders // self._column.size).masked_fill(elsewhere, self._communicator.size)

    def _numbers(self, goes: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the numbers of tokens for each rank, and from each rank."""
        sent = goes.sum(1)
        ones = [1] * self._communicator.size
        received = self._communicator.all_to_all(sent, ones, ones).finish()
        both: list[list[int]] = torch.stack((sent, received)).tolist()
        return both[0], both[1]


class OwnTokens(ExchangedTokens):
    """Mixture whose ranks have tokens of their own.

    Attributes:
        gathers: whether all ranks give as many tokens, which all gather, as in a step that is captured. Otherwise they
            exchange them.
    """

    gathers = False

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `SameTokens`. The sums are whole."""
        form = self.gathered if self.gathers else super().__call__
        return form(hidden_states, top_k_index, top_k_weights)


def own_tokens(hf_model: Any) -> list[OwnTokens]:
    """Return the forms of a model's mixtures whose ranks have tokens of their own."""
    found = (module.__dict__.get("forward") for module in hf_model.modules())
    return [form for form in found if isinstance(form, OwnTokens)]


def entries(table: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
    """Return the entries [tokens, k] of the chosen experts in a table [experts, w], those of a token's turn."""
    if table.shape[1] == 1:
        return table[:, 0][top_k_index]
    turn = torch.arange(top_k_index.shape[0], device=table.device)[:, None] % table.shape[1]
    return table[top_k_index, turn]


def idle_pass(hf_model: Any) -> Callable[[], None]:
    """Return a function that runs the mixtures of a forward pass without tokens, in the order of their calls.

    Raises:
        ModelError: if not all mixtures are called once in each forward pass.
    """
    forms = sorted(own_tokens(hf_model), key=lambda form: form.first)
    calls = [form.calls for form in forms]
    if not calls or max(calls) >= 2 * min(calls):  # a trial of the loop over layers may have ended in the middle
        raise ModelError(
            f"{type(hf_model).__name__} does not call each of its mixtures once in a forward pass",
            fix="set parallel.expert = 1",
        )

    def run() -> None:
        for form in forms:
            form.idle()

    return run
