"""Notes on block sizes: changed, preferred, split for the kernel."""

from __future__ import annotations

from collections.abc import Iterator

from slotline.registry.negotiation.offers import Offer
from slotline.registry.negotiation.reasons import Note
from slotline.registry.negotiation.request import AUTO
from slotline.registry.negotiation.search import CachePart, Search, Solution, chosen, unmet


def changed(search: Search, solution: Solution) -> Iterator[Note]:
    """Yield a note if the block size is not the usual one, because the chosen plugins do not accept that."""
    request = search.problem.request
    usual, size = request.default_block_size, solution.before or solution.block_size
    if isinstance(request.block_size.value, int) or size == usual:
        return
    because = [
        f"{offer.candidate.name} ({request.groups[index].name}): {' and '.join(a.describe() for a in offer.aligns)}"
        for index, offer in chosen(solution)
        if not _takes(offer, usual)
    ]
    because += [
        f"{spec.name} ({kind}): {spec.capabilities.block_sizes.describe()}"
        for kind, spec in solution.specs.items()
        if spec.capabilities.block_sizes.refusal(usual) is not None
    ]
    yield Note(
        code="N301",
        key="cache.block_size",
        text=f"default {usual} {_word(usual, size)} to {size}",
        asked=AUTO,
        resolved=str(size),
        because=tuple(because) or ("the groups have no smaller block size in common",),
    )


def preferred(search: Search, solution: Solution) -> Iterator[Note]:
    """Yield notes on the sizes that the chosen backends prefer, and on the outcome."""
    request, size = search.problem.request, solution.block_size
    missed = [request.groups[index].name for index, _ in unmet(solution)]
    if not (solution.before or missed):
        return
    asked, names = request.block_size, ", ".join(missed)
    if solution.before:
        text = f"{solution.before} {_word(solution.before, size)} to {size}, which kernels are fastest with"
        text += f"; not those of {names}, which no common size suits" if missed else ""
    elif isinstance(asked.value, int):
        text = f"{size} ({asked.origin}) stands; the kernels of {names} are faster with another"
    elif request.timed_block_size:
        text = f"{size}, which was measured, stands; the backends of {names} say that another is faster"
    else:
        text = f"{size} stands; the kernels of {names} are faster with another, which does not suit all groups"
    yield Note(
        code="N305",
        key="cache.block_size",
        text=text,
        asked=str(asked.value),
        resolved=str(size),
        because=tuple(
            f"{offer.candidate.name} ({request.groups[index].name}): {' and '.join(why for _, why in offer.preferred)}"
            for index, offer in chosen(solution)
            if offer.preferred
        ),
    )


def _word(before: int, after: int) -> str:
    return "raised" if after > before else "lowered"


def _takes(offer: Offer, size: int) -> bool:
    exact = {value for align in offer.aligns for value in align.exact if value > 0 and size % value == 0}
    return any(offer.accepts_block(value) for value in {size, *exact})


def split(solution: Solution) -> Iterator[Note]:
    """Yield notes on blocks that kernels see as several blocks."""
    for part in solution.parts:
        if part.kernel_block_size != solution.block_size and part.spec is not None:
            yield Note(
                code="N302",
                key=f"cache group {part.key[0]}",
                text=f"a block of {solution.block_size} tokens is {solution.block_size // part.kernel_block_size} "
                f"kernel blocks of {part.kernel_block_size}",
                asked=str(solution.block_size),
                resolved=str(part.kernel_block_size),
                because=_sizes_of(part, solution.block_size),
            )


def _sizes_of(part: CachePart, size: int) -> tuple[str, ...]:
    limiting = [offer for offer in part.offers if not offer.accepts_block(size)]
    return tuple(
        dict.fromkeys(f"{o.candidate.name}: {' and '.join(align.describe() for align in o.aligns)}" for o in limiting)
    )
