"""Broken logits processors, one bug each, and right ones that differ."""

from __future__ import annotations

from typing import Any

import attrs

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.logits_processor import answers, declared, right, state
from slotline.testing.reference import logits_processor as reference

_BASES = (
    reference.descriptor,
    reference.counting,
    reference.sequential,
    reference.sampled,
    reference.invariant,
    reference.paired,
)


def _mutant(name: str, summary: str, level: Level, factory: Any, **declared: Any) -> Mutant:
    base = next(item for item in _BASES if issubclass(factory, item.factory))
    capabilities = attrs.evolve(base.capabilities, **declared)
    changed = attrs.evolve(
        base, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory, capabilities=capabilities
    )
    return Mutant(name, summary, level, changed)


_PLAIN = {"speculation": Flag(False)}
"""For bugs that the checks of speculation would see sooner, though they have nothing to do with it."""
_BLIND = {**_PLAIN, "oracle": None}
"""The same, where an oracle would see them sooner too."""

MUTANTS: tuple[Mutant, ...] = (
    _mutant("validates-nothing", "accepts any parameter", Level.NUMERICS, answers.ValidatesNothing),
    _mutant("refuses-strangers", "refuses another processor's parameter", Level.CONTRACT, answers.RefusesStrangers),
    _mutant("value-error", "refuses with a ValueError", Level.NUMERICS, answers.RaisesValueError),
    _mutant("nameless-refusal", "refuses without naming the parameter", Level.NUMERICS, answers.NamesNoParameter),
    _mutant(
        "takes-parameters", "removes its parameters from the request's", Level.HOSTILE, answers.TakesParametersAway
    ),
    _mutant("answers-nothing", "admit returns None", Level.CONTRACT, answers.AnswersNothing),
    _mutant("sees-no-work", "says that there is no work though there is", Level.NUMERICS, answers.SeesNoWork),
    _mutant("holds-prompt", "keeps the caller's prompt list", Level.HOSTILE, answers.HoldsOnToThePrompt),
    _mutant("float64", "returns float64", Level.NUMERICS, answers.ReturnsFloat64),
    _mutant("bfloat16-inside", "computes in bfloat16", Level.NUMERICS, answers.ComputesInBfloat16),
    _mutant("half-inside", "penalises in float16", Level.NUMERICS, answers.ComputesInHalf),
    _mutant("token-zero", "takes token 0 of a history for token 1", Level.NUMERICS, answers.ForgetsTokenZero),
    _mutant("last-token", "takes the last token for the one before", Level.NUMERICS, answers.ForgetsTheLastToken),
    _mutant("short-window", "leaves out the first token of a text", Level.NUMERICS, answers.WindowTooShort),
    _mutant("divides-all", "divides negative logits too", Level.NUMERICS, answers.MultipliesAll),
    _mutant("by-prompt", "finds a request's settings by its prompt", Level.HOSTILE, state.SettingsByPrompt),
    _mutant(
        "equal-prompt",
        "takes an equal prompt on a row for the same request",
        Level.HOSTILE,
        state.EqualPromptIsTheSameRequest,
    ),
    _mutant("two-uses", "does nothing for a prompt's third request", Level.HOSTILE, state.OnlyTwoUses),
    _mutant("returns-nothing", "works in place and returns None", Level.NUMERICS, answers.ReturnsNothing),
    _mutant("lifts-bans", "raises minus infinity to a number", Level.NUMERICS, answers.LiftsBans),
    _mutant(
        "bans-finite",
        "declares keeps_finite and bans tokens",
        Level.NUMERICS,
        reference.RecentPenalty,
        keeps_finite=True,
    ),
    _mutant("random", "draws from the global generator", Level.NUMERICS, answers.RandomPenalty),
    _mutant("one-buffer", "returns the same memory in each step", Level.HOSTILE, answers.OneBufferForAll),
    _mutant("overflow", "NaN for large logits", Level.NUMERICS, answers.OverflowingSoftmax),
    _mutant("best-of-batch", "compares with the best logit of the batch", Level.NUMERICS, answers.BestOfTheBatch),
    _mutant(
        "clamps-best",
        "declares argmax_invariant and lets others tie with the best",
        Level.NUMERICS,
        answers.ClampsTheBest,
    ),
    _mutant(
        "last-of-ties",
        "declares argmax_invariant and keeps the last of tied best",
        Level.NUMERICS,
        answers.KeepsTheLastOfTies,
    ),
    _mutant("place-for-row", "keeps state by place in the batch", Level.HOSTILE, state.PlaceForRow, **_PLAIN),
    _mutant("first-row", "changes the first row alone", Level.HOSTILE, state.FirstRowOnly, **_PLAIN),
    _mutant("first-length", "takes the first row's length for all", Level.HOSTILE, state.FirstLengthForAll),
    _mutant("sorted-by-row", "returns the logits in the order of rows", Level.HOSTILE, state.SortedByRow),
    _mutant("last-request", "the newest request's parameters go for all", Level.HOSTILE, state.LastRequestForAll),
    _mutant("bans-pile-up", "a row keeps the bans of earlier requests", Level.HOSTILE, state.BansPileUp),
    _mutant("counts-stay", "a row keeps the counts of earlier requests", Level.HOSTILE, state.CountsAreNotReset),
    _mutant(
        "counted-stays",
        "skips as many tokens as the row's last request had",
        Level.HOSTILE,
        state.ForgetsNotWhatItCounted,
    ),
    _mutant("release-all", "forgets all counts when one request leaves", Level.HOSTILE, state.ReleaseForgetsAll),
    _mutant(
        "caches-by-length", "keeps histories by row and length over requests", Level.HOSTILE, state.CachesByRowAndLength
    ),
    _mutant("one-beyond", "reads one token beyond num_tokens", Level.HOSTILE, state.ReadsOneBeyond, **_BLIND),
    _mutant("rest-of-row", "reads what stands behind a prompt without output", Level.HOSTILE, state.ReadsRestOfRow),
    _mutant(
        "undeclared-history",
        "reads the output without declaring it",
        Level.HOSTILE,
        reference.RecentPenalty,
        needs_history=False,
        **_BLIND,
    ),
    _mutant("writes-table", "writes drafts into the core's token table", Level.HOSTILE, state.WritesDraftsIntoTable),
    _mutant("last-step-only", "misses tokens that came while the row sat out", Level.STATEFUL, state.LastStepOnly),
    _mutant("ignores-drafts", "declares speculation and ignores the drafts", Level.NUMERICS, state.IgnoresDrafts),
    _mutant("all-drafts", "assumes all drafts at every position", Level.NUMERICS, state.AllDraftsAtOnce),
    _mutant("draft-short", "leaves the newest draft out", Level.NUMERICS, state.OneDraftShort),
    _mutant("drafts-for-good", "counts drafts as if they were accepted", Level.HOSTILE, state.CountsDraftsForGood),
    _mutant("counts-calls", "takes each call for one more token", Level.NUMERICS, state.CountsCalls),
    _mutant(
        "packs-too-seldom", "packs parameters anew only if their number changed", Level.HOSTILE, state.PacksTooSeldom
    ),
    _mutant(
        "padding-for-tokens", "takes -1 before a short history for a token", Level.NUMERICS, state.PaddingForTokens
    ),
    _mutant("trusts-drafts", "takes the last step's drafts for accepted", Level.STATEFUL, state.TrustsItsDrafts),
    _mutant("moves-each-call", "takes a repeated step for the next", Level.NUMERICS, state.MovesAtEachCall),
    _mutant("goes-on", "a new request goes on where the row's last one was", Level.HOSTILE, state.GoesOn),
    _mutant("shown-by-place", "keeps what it was shown by place", Level.STATEFUL, state.RemembersByPlace),
    _mutant(
        "undeclared-sequence",
        "remembers logits without declaring it",
        Level.STATEFUL,
        reference.MovingFloor,
        sequential=False,
    ),
    _mutant("positive-floor", "a floor above the best", Level.NUMERICS, declared.PositiveFloor),
    _mutant("floor-of-ratios", "a ratio for its logarithm", Level.NUMERICS, declared.FloorOfRatios),
    _mutant("floor-untempered", "forgets the temperature", Level.NUMERICS, declared.ForgetsTemperature),
    _mutant("floor-for-all", "a request has the floor of another", Level.NUMERICS, declared.FloorForAll),
    _mutant("no-floor", "declares floors and has none", Level.CONTRACT, reference.Floor, floors=True),
    _mutant("no-prompt", "a companion without a prompt", Level.NUMERICS, declared.NoPrompt),
    _mutant("pairs-all", "a companion for requests that ask for none", Level.NUMERICS, declared.PairsAll),
    _mutant("bare-tokens", "token ids for a companion", Level.NUMERICS, declared.BareTokens),
    _mutant("eats-prompt", "cuts the caller's prompt", Level.NUMERICS, declared.EatsThePrompt),
    _mutant("first-companion", "one companion for all", Level.HOSTILE, declared.FirstCompanionForAll, **_PLAIN),
    _mutant("companions-by-row", "companions in the order of rows", Level.HOSTILE, declared.CompanionsByRow),
    _mutant("changes-companion", "writes to the companion's logits", Level.HOSTILE, declared.ChangesTheCompanion),
    _mutant("keeps-companion", "a companion's logits of an earlier step", Level.NUMERICS, declared.KeepsTheCompanion),
)

CORRECT: tuple[Correct, ...] = (
    Correct("a penalty over recent tokens, row by row and in place", reference.descriptor),
    Correct(
        "the same, all rows at once in new memory",
        attrs.evolve(reference.descriptor, name="all_rows_at_once", factory=right.AllRowsAtOnce),
    ),
    Correct("counts by row, brought up to date at each step", reference.counting),
    Correct("argmax-invariant, needs no history", reference.invariant),
    Correct("sequential: remembers what it was shown", reference.sequential),
    Correct("a floor for the sampler", reference.sampled),
    Correct("reads the logits of companions", reference.paired),
    Correct(
        "no parameters, no state, no speculation declared",
        Descriptor(
            kind=Kind.LOGITS_PROCESSOR,
            name="never_thirteen",
            capabilities=LogitsProcessorCapabilities(),
            factory=right.NeverThirteen,
        ),
    ),
)
