"""Logits processor `thinking_budget`: ends a model's thinking after a number of tokens."""

from slotline.plugins.logits_processors.thinking_budget.options import ThinkingBudgetOptions
from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="thinking_budget",
    summary="ends a model's thinking after so many tokens",
    capabilities=LogitsProcessorCapabilities(
        parameters=("thinking_token_budget", "thinking_start_token_ids", "thinking_end_token_ids"),
        needs_history=True,
        speculation=Flag(True),
        order=70,
        examples=(
            {"thinking_token_budget": 0, "thinking_start_token_ids": [3], "thinking_end_token_ids": [4, 5]},
            {"thinking_token_budget": 2, "thinking_start_token_ids": [7], "thinking_end_token_ids": [8]},
            {"thinking_token_budget": 1, "thinking_start_token_ids": [1], "thinking_end_token_ids": [2, 9, 2]},
        ),
        bad_examples=(
            {"thinking_token_budget": -1, "thinking_start_token_ids": [3], "thinking_end_token_ids": [4]},
            {"thinking_token_budget": 10**30, "thinking_start_token_ids": [3], "thinking_end_token_ids": [4]},
            {"thinking_token_budget": 3, "thinking_start_token_ids": [3], "thinking_end_token_ids": [10**9]},
            {"thinking_token_budget": 3, "thinking_start_token_ids": [], "thinking_end_token_ids": [4]},
            {"thinking_token_budget": 3},
        ),
    ),
    options=ThinkingBudgetOptions,
    factory="slotline.plugins.logits_processors.thinking_budget.processor:ThinkingBudget",
)
