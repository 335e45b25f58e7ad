"""Effect of speculation on a workload: acceptance and cost of drafts, and the same run without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slotline.cli.workloads import Workload

if TYPE_CHECKING:
    from slotline.cli.bench_run import Run
    from slotline.llm.llm import LLM


def drafts_report(llm: LLM, work: Workload, count: int, run: Run) -> dict[str, Any] | None:
    """Return the drafter's figures over all runs so far, and the speedup of `run` over `count` runs without drafts.

    None without a drafter.
    """
    from slotline.cli.bench_run import median_run, timed_runs

    drafts = llm.engine.extension("drafts")
    if drafts is None:
        return None
    drafting = drafts.drafting
    report: dict[str, Any] = drafting.to_json()
    drafting.paused = True
    try:
        plain = median_run(timed_runs(llm, work, count))
    finally:
        drafting.paused = False
    cost = drafting.to_json()["plain_seconds"]  # more of them by now than adaptive lengths left
    report |= {"plain_seconds": cost, "plain_s": plain.seconds, "speedup": plain.seconds / run.seconds}
    return report | {"remembers": drafting.remembers}


def drafts_text(drafts: dict[str, Any]) -> str:
    """Return the report as text for people."""
    by_position = ", ".join(f"{share:.0%}" for share in drafts["acceptance_by_position"])
    lines = [
        f"drafts: {drafts['acceptance_length']:.2f} tokens of a request in a verifying step, the one after them "
        f"included; accepted by position {by_position}; {drafts['failures']} lost to failures",
        f"costs: a proposal {drafts['draft_seconds'] * 1e3:,.2f} ms, a decoding step that verifies "
        f"{drafts['verify_seconds'] * 1e3:,.2f} ms, one that does not {drafts['plain_seconds'] * 1e3:,.2f} ms",
        f"speedup: {drafts['speedup']:.2f}x the same engine without drafts ({drafts['plain_s']:,.3f} s)",
    ]
    if drafts["remembers"]:
        lines.append("the drafter remembers requests that left: all runs but the first repeat texts that it has seen")
    if decided := drafts["adaptive"]:
        chosen = ", ".join(f"{k}: {count:,}" for k, count in enumerate(decided["chosen"]))
        lines.append(
            f"adaptive: {decided['mean_tokens']:.2f} drafts kept on average ({chosen}), "
            f"{decided['steps_without']:,} steps decided against the drafter"
        )
    if drafts["last_failure"]:
        lines.append(f"last failure: {drafts['last_failure']}")
    return "\n".join(lines)
