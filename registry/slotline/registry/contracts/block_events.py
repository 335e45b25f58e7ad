"""Blocks of the cache as a plugin hears of them: given, returned, restored and loaded.

A plugin that keeps something of its own for each block, for instance a summary of its keys, must know when the contents
of a block become others. Most blocks are written by steps, which an attention backend sees in its `write`. Some are
not: a cached prefix comes back with the contents that it had, and a connector copies contents in.

An extension or an attention backend that declares `block_events` gets, before each step's forward pass, what happened
since the one before, in `block_events(events)`. Without such a plugin nothing is recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from typing import Any

    import numpy as np

    Blocks = np.ndarray[Any, np.dtype[np.int64]]


def _no_blocks() -> Blocks:
    import numpy as np

    return np.zeros(0, np.int64)


@frozen(kw_only=True, eq=False)
class BlockEvents:
    """Blocks of one cache group whose owner or contents changed since the last step's forward pass.

    Read `returned` first, then the others. A block that was returned and taken again since is in two arrays: in
    `returned` and in one of the others. One that was taken and returned again since, without a step, is in none. Each
    block that requests hold now and that is in none of them is held since an earlier step, and only steps have written
    to it.

    An extension gets blocks of the pool, as block managers count them. An attention backend gets kernel blocks, as its
    block tables count them. The null block is never in an event.

    Attributes:
        group: index of the cache group in the plan.
        returned: [n] int64, blocks that no request holds any more. Contents of full blocks may come back.
        given: [n] int64, blocks that a request got to write to. Their old contents have no meaning.
        restored: [n] int64, blocks of a cached prefix that a request got. The contents are those from before the block
            was returned. A block that another request holds too is in no event.
        loaded: [n] int64, blocks of a cached prefix whose contents come from elsewhere: a connector has copied them in,
            in stream order before this step. After an exception has escaped from a step all cached blocks count as
            loaded when a request gets them, since their events may not have been heard.
        moved: [n] int64, blocks of a request whose tokens in the middle were freed. Contents that it keeps were moved
            in, in stream order before this step, from blocks that it had. It may have held the block before.
        hashes: the hashes of the prefixes that `restored` and then `loaded` blocks end, one for each block. Equal
            hashes are of equal contents, also in another engine of the same model.
    """

    group: int
    returned: Blocks
    given: Blocks
    restored: Blocks
    loaded: Blocks
    moved: Blocks = field(factory=_no_blocks)
    hashes: tuple[bytes, ...] = ()
