"""Masks kept for texts that can be continued alike, so that most steps ask the plugin for no mask.

The texts of a grammar form a graph: a node for each position, an edge for each token. A request goes from node to node.
The plugin's own state of the request follows when it is asked for something that the graph does not know. Positions are
those of a `Form`, of which each kind of constraint has its own, and whole texts where none can be made.

A plugin that forces text may allow one way to write it, chosen by the token before (see `StructuredOutput.fill`). So
where all allowed tokens begin with the same byte, a mask is kept for the last token too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import define, field

from slotline.plugins.structured_output.automaton import UnknownNotationError
from slotline.plugins.structured_output.bitmask import ban
from slotline.plugins.structured_output.choice_positions import ChoiceForm
from slotline.plugins.structured_output.json_positions import FREE_OBJECTS, JsonForm
from slotline.plugins.structured_output.rule_positions import ExpressionForm, RuleForm
from slotline.plugins.structured_output.tag_positions import TagForm
from slotline.registry.contracts import Constraint, GrammarState, StructuredOutput
from slotline.registry.errors import ContractError

Int32 = npt.NDArray[np.int32]
_BITS = 32  # of a word
_MOST_NODES = 8192
"""Of a grammar: beyond it, its graph begins anew."""
_MOST_EDGES = 4096
"""Of a node. In a string, where most tokens lead back to the node, the others are looked at each time."""
_MOST_BYTES = 64 << 20
"""Of all masks: beyond it, those that no node holds are forgotten."""
_TRIED = 512
"""Nodes of a grammar after which its texts must have met again, else it is left to the plugin."""
_LOOKED_AT = 8
"""Words of a mask, from either end, in which tokens that begin with different bytes are looked for."""


class Form(Protocol):
    """What tells the positions of texts apart. Texts with one position can go on alike.

    Attributes:
        start: the position of a request without output.
    """

    @property
    def start(self) -> Any:
        """See above."""
        ...

    def after(self, position: Any, text: bytes) -> Any:
        """Return the position after more text. None if it cannot be told."""
        ...


class Texts:
    """Form of texts that are told apart byte by byte."""

    start = b""

    def after(self, position: bytes, text: bytes) -> bytes:
        """See `Form`."""
        return position + text


def form_of(constraint: Constraint) -> Form | None:
    """Return the form of a constraint's texts. None if nothing in them repeats, as far as can be told."""
    kind, text = constraint.kind, constraint.text
    try:
        if kind == "json":
            return JsonForm.of(text) or Texts()
        if kind == "json_object":
            return FREE_OBJECTS
        if kind == "grammar":
            return RuleForm(text)
        if kind == "structural_tag":
            return TagForm(text)
        return ExpressionForm(text) if kind == "regex" else ChoiceForm(text)
    except UnknownNotationError:
        return Texts() if kind in ("regex", "choice") else None


@define(eq=False)
class KeptMask:
    """Mask [words] int32 of one or more nodes. Nobody writes to it.

    Attributes:
        leaves: whether it allows a token.
        may_force: whether it may hang on the last token, see `MaskCache.may_force`.
    """

    words: Int32
    may_force: bool = False
    leaves: bool = field(init=False)
    _endless: KeptMask | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.leaves = bool(self.words.any())

    def endless(self, eos_token_ids: Sequence[int]) -> KeptMask:
        """Return the mask that bans the ends too, which are the same in all calls."""
        if self._endless is None:
            words = self.words.copy()
            ban(words[None], np.zeros(1, np.int64), eos_token_ids)
            self._endless = self if np.array_equal(words, self.words) else KeptMask(words)
        return self._endless


@define(eq=False)
class Node:
    """Position in the texts of a grammar.

    Attributes:
        following: the nodes after tokens that may come next, as far as they are known.
        mask: of the tokens that may come next, if it does not hang on the last token.
        masks: by the last token, otherwise.
        finished: whether the text is complete and cannot go on, if that is known.
    """

    position: Any
    following: dict[int, Node] = field(factory=dict)
    mask: KeptMask | None = None
    masks: dict[int, KeptMask] = field(factory=dict)
    finished: bool | None = None


class MaskCache:
    """The kept masks of all grammars of a plugin.

    Args:
        text_of: returns the text of a token.
        eos_token_ids: are never passed in a text.
        forces: whether masks of text that must come may hang on the last token.
    """

    def __init__(self, text_of: Callable[[int], bytes], eos_token_ids: Sequence[int], *, forces: bool = True) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.forces = forces
        self._text_of = text_of
        self._texts: dict[int, bytes] = {}
        self._masks: dict[bytes, KeptMask] = {}
        self._num_bytes = 0

    def text(self, token_id: int) -> bytes:
        """Return the text of a token."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._text_of(token_id)
        return text

    def kept(self, words: Int32) -> KeptMask:
        """Return a mask equal to `words` [words]."""
        key = words.tobytes()
        mask = self._masks.get(key)
        if mask is None:
            if self._num_bytes > _MOST_BYTES:
                self._masks.clear()
                self._num_bytes = 0
            own = np.frombuffer(key, np.int32)
            mask = self._masks[key] = KeptMask(own, self.forces and self.may_force(own))
            self._num_bytes += len(key)
        return mask

    def may_force(self, words: Int32) -> bool:
        """Return False if tokens that begin differently are allowed, as far as a few of them show."""
        places = np.flatnonzero(words)
        places = places if len(places) <= 2 * _LOOKED_AT else places[np.r_[:_LOOKED_AT, -_LOOKED_AT:0]]
        bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, _BITS)
        begin: bytes | None = None
        for place, bit in zip(*np.nonzero(bits), strict=True):
            token = int(places[place]) * _BITS + int(bit)
            first = b"end" if token in self.eos_token_ids else self.text(token)[:1]
            if begin is not None and first != begin:
                return False
            begin = first
        return True


class CachedGrammar:
    """Compiled grammar with the graph of its texts.

    Attributes:
        compiled: the plugin's own.
        given_up: whether its texts do not meet again.
        met: how often a text came to a node that was there, on a known edge or not.
    """

    def __init__(self, compiled: Any, constraint: Constraint, cache: MaskCache) -> None:
        self.compiled = compiled
        self.cache = cache
        self._form = form_of(constraint)
        self.given_up = self._form is None
        self._nodes: dict[Any, Node] = {}
        self.met = 0

    def start(self, backend: StructuredOutput) -> CachedState:
        """Return the state of a request without output."""
        node = None if self.given_up or self._form is None else self._node(self._form.start)
        return CachedState(self, backend.start(self.compiled), node)

    def node_after(self, node: Node, token_id: int) -> Node | None:
        """Return the node after a legal token. None if the grammar is left to the plugin from here on."""
        before = node.position
        position = None if self._form is None else self._form.after(before, self.cache.text(token_id))
        if position is None:
            return None
        following = node if position == before else self._node(position)
        if following is not None and len(node.following) < _MOST_EDGES:
            node.following[token_id] = following
        return following

    def _node(self, position: Any) -> Node | None:
        node = self._nodes.get(position)
        if node is not None:
            self.met += 1
            return node
        if len(self._nodes) == _TRIED and self.met < _TRIED:
            self.given_up = True
            self._nodes.clear()
        if self.given_up:
            return None
        if len(self._nodes) >= _MOST_NODES:
            self._nodes.clear()
        node = self._nodes[position] = Node(position)
        return node


class CachedState:
    """State of a request that goes through the graph of its grammar. Implements `GrammarState`.

    Attributes:
        own: the plugin's state, before the last few tokens.
    """

    __slots__ = ("_behind", "_grammar", "_last", "_node", "own")

    def __init__(self, grammar: CachedGrammar, own: GrammarState, node: Node | None) -> None:
        self.own = own
        self._grammar = grammar
        self._node = node
        self._last = -1
        self._behind: list[int] = []  # tokens that `own` has not seen

    @property
    def finished(self) -> bool:
        """See the contract."""
        node = self._node
        if node is None:
            return self.own.finished
        if node.finished is None:
            node.finished = bool(self.current().finished)
        return node.finished

    def accept(self, token_ids: Sequence[int]) -> int:
        """See the contract."""
        for taken, token in enumerate(token_ids):
            node = self._node
            if node is None:
                return taken + self.own.accept(token_ids[taken:])
            following = node.following.get(token)
            if following is None:
                if not self._explore(node, token):
                    return taken
                continue
            self._node, self._last = following, token
            self._behind.append(token)
            self._grammar.met += 1
        return len(token_ids)

    def follow(self, token: int) -> bool:
        """Take a token if the graph knows that it is legal and that the text can go on. Return whether it was taken."""
        following = None if self._node is None else self._node.following.get(token)
        if following is None or following.finished is not False:
            return False
        self._node, self._last = following, token
        self._behind.append(token)
        self._grammar.met += 1
        return True

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """See the contract."""
        return self.current().count_legal(token_ids)

    def forced(self) -> Sequence[int]:
        """See the contract."""
        return self.current().forced()

    def current(self) -> GrammarState:
        """Return the plugin's state, after all tokens.

        Raises:
            ContractError: if it refuses a token that a mask of it has allowed.
        """
        if behind := self._behind:
            self._behind = []
            if self.own.accept(behind) != len(behind):
                raise ContractError("a structured-output plugin refuses tokens that its masks allowed")
        return self.own

    @property
    def place(self) -> tuple[int, int] | None:
        """What the mask of the next token hangs on. None if no mask is kept for it."""
        return None if self._node is None else (id(self._node), self._last if self._grammar.cache.forces else -1)

    def kept_mask(self) -> KeptMask | None:
        """Return the mask of the next token, if it is known."""
        node = self._node
        return None if node is None else node.mask or node.masks.get(self._last)

    def kept_masks(self, drafts: Sequence[int]) -> list[KeptMask] | None:
        """Return the masks after no and after each legal draft, as far as `StructuredOutput.fill` would write them.

        None if one is not known.
        """
        found = []
        for node, last in self._walk(drafts):
            mask = None if node is None else node.mask or node.masks.get(last)
            if mask is None:
                return None
            found.append(mask)
        return found

    def keep(self, drafts: Sequence[int], words: Int32) -> None:
        """Keep the masks [1 + drafts, words] that the plugin has written."""
        cache = self._grammar.cache
        for own, (node, last) in zip(words, self._walk(drafts), strict=False):
            if node is None:
                return
            mask = cache.kept(own)
            if mask.may_force:
                node.masks[last] = mask
            else:
                node.mask = mask

    def _walk(self, drafts: Sequence[int]) -> Iterator[tuple[Node | None, int]]:
        """Yield the node and the last token after no and after each legal draft. None is a node that is not known.

        Ends at a node whose mask is not known when the next is asked for.
        """
        node, last = self._node, self._last
        yield node, last
        for draft in drafts:
            mask = None if node is None else node.mask or node.masks.get(last)
            if node is None or mask is None or draft in self._grammar.cache.eos_token_ids or not _allows(mask, draft):
                return
            node, last = node.following.get(draft) or self._grammar.node_after(node, draft), draft
            yield node, last

    def _explore(self, node: Node, token: int) -> bool:
        """Take a token from which the graph knows no way yet. Return whether it is legal."""
        mask = self.kept_mask()
        if mask is not None and token not in self._grammar.cache.eos_token_ids:
            if not _allows(mask, token):
                return False
            self._behind.append(token)
        elif self.current().accept([token]) == 0:
            return False
        self._node, self._last = self._grammar.node_after(node, token), token
        if self._node is None:
            self.current()
        return True


def _allows(mask: KeptMask, token: int) -> bool:
    return bool(mask.words[token // _BITS] >> token % _BITS & 1)
