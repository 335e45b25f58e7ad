"""The table [logits_processors.thinking_budget]."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class ThinkingBudgetOptions:
    """The marks of requests that name none.

    Attributes:
        start_token_ids: the tokens that begin thinking.
        end_token_ids: the tokens that end it.
    """

    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
