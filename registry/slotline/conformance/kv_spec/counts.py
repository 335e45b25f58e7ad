"""Numbers of blocks that a request needs, holds and frees."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.kv_spec import build_group, every_kind_cases, group_cases
from slotline.testing.oracles.kv_spec import freeable_blocks


@check(Kind.KV_SPEC, "kv_spec.blocks.needed", Level.NUMERICS, cases=group_cases, cost=0.02)
def blocks_needed(run: Run) -> None:
    """The table of a request has a block for each begun stretch of block_size tokens, and none for no token."""
    group = build_group(run)
    for tokens in range(group.max_model_len + 1):
        found, wanted = group.spec.blocks_needed(tokens), -(-tokens // group.block_size)
        if found != wanted:
            raise Failed(f"blocks_needed({tokens}) is {found}, wanted {wanted}; {group.describe()}")


@check(Kind.KV_SPEC, "kv_spec.blocks.monotone", Level.NUMERICS, cases=every_kind_cases)
def blocks_monotone(run: Run) -> None:
    """A longer sequence never needs a shorter table, and no token needs no block. All answers are plain integers."""
    group, before = build_group(run), 0
    for tokens in range(group.max_model_len + 1):
        found = group.spec.blocks_needed(tokens)
        if not isinstance(found, int) or (tokens == 0 and found != 0):
            raise Failed(f"blocks_needed({tokens}) is {found!r}, wanted {'0' if tokens == 0 else 'an int'}")
        if found < before:
            raise Failed(f"blocks_needed({tokens}) is {found}, but {before} for one token less")
        before = found


@check(Kind.KV_SPEC, "kv_spec.blocks.held", Level.NUMERICS, cases=every_kind_cases)
def blocks_held(run: Run) -> None:
    """A request that grows token by token up to max_model_len never holds more than max_blocks_held."""
    group = build_group(run)
    most, table = group.spec.max_blocks_held(), group.spec.blocks_needed(group.max_model_len)
    if not isinstance(most, int) or not 0 < most <= table:
        raise Failed(f"max_blocks_held is {most!r}; the longest table has {table} blocks; {group.describe()}")
    for computed in range(group.max_model_len):
        held = group.spec.blocks_needed(computed + 1) - group.spec.blocks_freeable(computed)
        if held > most:
            raise Failed(
                f"max_blocks_held is {most}, but for token {computed} a request holds {held}: blocks_needed"
                f"({computed + 1}) - blocks_freeable({computed}); {group.describe()}"
            )


@check(Kind.KV_SPEC, "kv_spec.blocks.held_in_flight", Level.NUMERICS, cases=every_kind_cases)
def blocks_held_in_flight(run: Run) -> None:
    """Nor does a request whose table runs ahead of what is computed, by up to max_tokens_in_flight."""
    for ahead in (2, build_group(run).block_size + 1, 3 * build_group(run).block_size):
        group = build_group(run, max_tokens_in_flight=ahead)
        most = group.spec.max_blocks_held()
        for computed in range(group.max_model_len):
            tokens = min(computed + ahead, group.max_model_len)
            held = group.spec.blocks_needed(tokens) - group.spec.blocks_freeable(computed)
            if held > most:
                raise Failed(
                    f"max_blocks_held is {most} with max_tokens_in_flight={ahead}, but with {computed} tokens computed "
                    f"and {tokens} in the table a request holds {held}; {group.describe()}"
                )


@check(Kind.KV_SPEC, "kv_spec.free.keeps_needed", Level.NUMERICS, cases=group_cases)
def free_keeps_needed(run: Run) -> None:
    """No block is given back that holds a key which a later token reads."""
    group = build_group(run)
    allowed = freeable_blocks(group.layers, group.max_model_len, group.block_size)
    for computed in range(group.max_model_len):
        found = group.spec.blocks_freeable(computed)
        if found > allowed[computed]:
            raise Failed(
                f"blocks_freeable({computed}) is {found}: block {found - 1} goes, and a later token reads it; at most "
                f"{allowed[computed]} may go; {group.describe()}"
            )


@check(Kind.KV_SPEC, "kv_spec.free.without_waste", Level.NUMERICS, cases=group_cases)
def free_without_waste(run: Run) -> None:
    """A kind that is declared exact is held with at most one block that no later token reads."""
    group = build_group(run)
    if not group.exact:
        raise NotApplicable("not declared: exact kinds")
    allowed = freeable_blocks(group.layers, group.max_model_len, group.block_size)
    for computed in range(group.max_model_len):
        found = group.spec.blocks_freeable(computed)
        if found < allowed[computed] - 1:
            raise Failed(
                f"blocks_freeable({computed}) is {found}, {allowed[computed]} blocks are read by nobody any more; "
                f"{group.describe()}; a kind that is held with waste does not belong in exact_kinds"
            )


@check(Kind.KV_SPEC, "kv_spec.free.monotone", Level.NUMERICS, cases=every_kind_cases)
def free_monotone(run: Run) -> None:
    """Freed blocks stay free: blocks_freeable never falls, begins with 0 and stays within the table."""
    group, before = build_group(run), 0
    for computed in range(group.max_model_len + 1):
        found = group.spec.blocks_freeable(computed)
        if not isinstance(found, int) or not 0 <= found <= group.spec.blocks_needed(computed):
            raise Failed(
                f"blocks_freeable({computed}) is {found!r}, the table has {group.spec.blocks_needed(computed)} blocks"
            )
        if found < before:
            raise Failed(f"blocks_freeable({computed}) is {found}, but {before} for one token less: blocks are gone")
        before = found


@check(Kind.KV_SPEC, "kv_spec.answers.deterministic", Level.HOSTILE, cases=every_kind_cases)
def answers_deterministic(run: Run) -> None:
    """Answers depend only on the question: not on earlier questions, nor on the object of the group."""
    group, other, rng = build_group(run), build_group(run), run.rng
    lengths = [rng.randrange(group.max_model_len + 1) for _ in range(200)]
    for name in ("blocks_needed", "blocks_freeable"):
        expected = {tokens: getattr(other.spec, name)(tokens) for tokens in sorted(set(lengths))}
        for tokens in lengths:
            found = getattr(group.spec, name)(tokens)
            if found != expected[tokens]:
                raise Failed(
                    f"{name}({tokens}) is {found} if the questions come in random order, {expected[tokens]} in rising "
                    f"order: the spec serves many requests at a time"
                )


@check(Kind.KV_SPEC, "kv_spec.blocks.third", Level.HOSTILE, cases=every_kind_cases, cost=0.02)
def blocks_third(run: Run) -> None:
    """The third answer to a question and those after it are the first one, whatever was asked between."""
    group = build_group(run)
    lengths = sorted({0, 1, group.block_size, group.block_size + 1, group.max_model_len})
    first: dict[int, tuple[int, int, int]] = {}
    for number in range(1, 6):
        for length in lengths if number % 2 else reversed(lengths):
            spec = group.spec
            freed = spec.blocks_freeable(min(length, group.max_model_len - 1))
            found = spec.blocks_needed(length), freed, spec.max_blocks_held()
            if found != first.setdefault(length, found):
                raise Failed(
                    f"{length} tokens need, free and hold {found} blocks when asked for the {number}th time, "
                    f"{first[length]} at first; {group.describe()}"
                )
