"""The drafter contract, version 1: something that proposes tokens. The core verifies them, so a drafter can change how
fast text comes, never which text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, frozen

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.model_family import Model, ModelFacts
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from slotline.registry.contracts.model_family import Attend


@frozen(kw_only=True, field_transformer=declared)
class DrafterCapabilities:
    """What a drafter offers and needs.

    Attributes:
        devices: device types.
        max_tokens: most draft tokens it can propose in a row.
        tree: whether it proposes a tree instead of a chain.
        probabilities: whether it returns its own distribution, which rejection sampling then uses.
        remembers: whether requests that left change what it proposes to later ones; if not, a proposal is a function of
            the request's own history.
        needs_history: reads the token history on the host.
        needs_hidden_states: reads the last hidden states.
        needs_layers: reads hidden states of the layers that `LayerReader.layer_ids` names.
        needs_computed: sees every token that a step computes, prompts included: `Observer.observe` is called.
        needs_kv_group: has attention layers of its own, which join the model's in planning and share its blocks; the
            factory is a `KVDrafterFactory`. Goes with `needs_computed`.
        needs_grammar: proposes only tokens that the grammar state allows.
        needs_checkpoint: reads weights of its own from `DrafterContext.path`; its factory may be a
            `CheckpointDrafterFactory`, without which the conformance suite can say little of it.
        on_device: proposes without the host's tokens: of a `DraftBatch` it reads `rows` and what is on the device
            alone, and nothing in its proposal waits for the device. Steps may then overlap beside it.
        catches_up: whether `propose` itself stores what the drafter's cache lacks of a request that it proposed for
            in the step before: the token in front of the newest, since all tokens before that one are the request's or
            drafts of its own that stood. Steps of such requests alone are not shown to `observe`. Goes with
            `needs_kv_group`; every draft of such a drafter is a token.
        graphs: whether `observe` and `propose` can be captured in CUDA graphs and replayed without Python: they work on
            the device alone, read what changes from the device tensors that they are handed, `observed` included, and
            give tensors whose shapes depend on the number of requests or tokens alone. Chains without probabilities.
    """

    devices: Set[str]
    max_tokens: Max = Max()
    tree: Flag = Flag(False)
    probabilities: Flag = Flag(False)
    remembers: bool = False
    needs_history: bool = False
    needs_hidden_states: bool = False
    needs_layers: bool = False
    needs_computed: bool = False
    needs_kv_group: bool = False
    needs_grammar: bool = False
    needs_checkpoint: bool = False
    on_device: bool = False
    catches_up: bool = False
    graphs: Flag = Flag(False)


@frozen(kw_only=True)
class DrafterInspection:
    """What a drafter with attention layers of its own is asked with, before anything is built.

    Attributes:
        facts: the model's.
        num_tokens, max_model_len: as in `DrafterContext`.
        path: the draft checkpoint's folder or None.
        inspect_model: looks at the checkpoint of a whole model, through the model family that serves it; raises
            `ModelError` if none does.
        options: the plugin's own table.
    """

    facts: ModelFacts
    num_tokens: int
    max_model_len: int
    path: str | None
    inspect_model: Callable[[Path], ModelFacts]
    options: Any = None


@frozen(kw_only=True)
class DrafterContext:
    """What a drafter's factory gets.

    Attributes:
        path: the draft checkpoint's folder: what the configuration names, else the folder of the drafter's name in the
            model's, if there is one, else None.
        facts: the model's; None outside an engine, as what follows.
        compute_logits: the model's output projection, for drafters that share it: hidden states [n, hidden_size] behind
            the last norm to logits [n, vocab_size] float32, on the device.
        embed: the model's embedding, for drafters that share it: tokens [n] int64 to [n, hidden_size]; None where the
            model family gives none.
        layers: the attention layers that `KVDrafterFactory.attention_layers` named, as `attend` takes them.
        load_model: loads the checkpoint of a whole model, whose attention layers `attention_layers` named.
    """

    contract: int
    num_tokens: int
    vocab_size: int
    hidden_size: int
    max_requests: int
    max_model_len: int
    device: str
    dtype: str
    path: str | None = None
    facts: ModelFacts | None = None
    compute_logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    layers: tuple[AttentionLayer, ...] = ()
    load_model: Callable[[Path], Model] | None = None
    options: Any = None


@define(kw_only=True, eq=False)
class DraftBatch:
    """What a drafter sees after a step. Only accepted history is visible.

    Attributes:
        rows: [num_requests] int64 on the host, permanent rows of the requests that get drafts.
        token_table: [max_requests, max_model_len] int32 on the host, tokens by row; to be read up to `num_tokens` only,
            and only by a drafter that declares `needs_history`. Not to be written.
        num_tokens: [num_requests] int32 on the host, accepted tokens of each request, the newest included.
        last_token_ids: [num_requests] int64 on the device, the newest accepted tokens.
        positions: [num_requests] int64 on the device, positions of those.
        previous_token_ids: [num_requests] int64 on the device, the tokens in front of the newest; None unless the
            drafter `catches_up`.
        hidden_states: [num_requests, hidden_size] in the model's dtype, behind the last norm, of the token in front of
            the newest one, the last that the model has computed; None unless `needs_hidden_states`.
        layer_hidden_states: [num_requests, layers * hidden_size], of the same token, the states in front of the layers
            `layer_ids` side by side; None unless `needs_layers`.
        computed_index: [num_requests] int64 on the device, where that token stands in the `ComputedTokens` of the same
            step; None unless `needs_computed`, and where `propose` is captured.
        observed: [num_requests, ...] each, what `Observer.observe` returned about that token; empty if nothing.
        attend: where the drafter `needs_kv_group`: ``attend(offset)`` gives the attention of its own layers for one
            token of each request at `positions` + offset. To be called with 0, 1, .. below the number of draft tokens,
            each in its turn: an offset's keys and values are stored before the next one's queries come.
            Of a drafter that `catches_up` offset 0 takes two tokens of each request, side by side: the previous and
            the newest one, at `positions` - 1 and `positions`.
        temperature: [num_requests] float32 on the device; 0 for greedy requests.
        uniforms: [num_requests, num_tokens] float64 in [0, 1) on the host, for the drafter's own draws: they depend on
            the request's seed and the position alone, so that a text does not change with the batch around it.
    """

    rows: torch.Tensor
    token_table: torch.Tensor
    num_tokens: torch.Tensor
    last_token_ids: torch.Tensor
    positions: torch.Tensor
    previous_token_ids: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    layer_hidden_states: torch.Tensor | None = None
    computed_index: torch.Tensor | None = None
    observed: tuple[torch.Tensor, ...] = ()
    attend: Callable[[int], Attend] | None = None
    temperature: torch.Tensor | None = None
    uniforms: npt.NDArray[np.float64] | None = None


@define(kw_only=True, eq=False)
class ComputedTokens:
    """The tokens that a step computed: chunks of prompts, newest tokens, and drafts, those that fell too.

    A request's tokens stand together, in order of position. The same position comes again where a draft fell or a
    request was preempted; what is computed from it then replaces what was. Positions of a cached prefix do not come.
    The tensors live until the next step; padding may follow the last request's tokens.

    Attributes:
        rows: [num_requests] int64 on the host; requests that this step finished are among them.
        query_start_loc: [num_requests + 1] int64 on the host, where the tokens of each begin.
        token_ids, positions: [num_tokens] int64 on the device.
        next_token_ids: [num_tokens] int64 on the device, what follows each: of the last one the newest token, or the
            prompt's next. Behind a position whose draft fell they mean nothing.
        next_embeds: [num_tokens, hidden_size], the embeddings of `next_token_ids` with those of images and the like
            in their places; None where there are none among them, so that the token ids say all.
        hidden_states: [num_tokens, hidden_size], behind the last norm; None unless `needs_hidden_states`.
        layer_hidden_states: [num_tokens, layers * hidden_size]; None unless `needs_layers`.
        attend: where the drafter `needs_kv_group`: the attention of its own layers for these tokens. Each layer is
            called once, so that its cache is filled at every position that the model's is filled at.
    """

    rows: torch.Tensor
    query_start_loc: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    next_token_ids: torch.Tensor
    next_embeds: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    layer_hidden_states: torch.Tensor | None = None
    attend: Attend | None = None


@define(kw_only=True, eq=False)
class Draft:
    """A proposal.

    Attributes:
        token_ids: [num_requests, num_tokens] int64; -1 ends a request's proposal early.
        probabilities: [num_requests, num_tokens, vocab_size] float32 or float64, what each token was drawn from, given
            those before it; None for a one-point distribution.
        parents: [num_tokens] int64 for a tree: index of each token's parent, -1 for the root; None for a chain.
    """

    token_ids: torch.Tensor
    probabilities: torch.Tensor | None = None
    parents: torch.Tensor | None = None


class Drafter(Protocol):
    """What a built drafter can do."""

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """A request took a row; forget whatever the row held before."""
        ...

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose up to the negotiated number of tokens for each request."""
        ...

    def release(self, row: int) -> None:
        """The request left its row."""
        ...


class LayerReader(Drafter, Protocol):
    """A drafter that `needs_layers`.

    Attributes:
        layer_ids: the decoder layers, from 0, whose inputs it reads, in the order in which it wants them.
    """

    layer_ids: tuple[int, ...]


class Observer(Drafter, Protocol):
    """A drafter that `needs_computed`."""

    def observe(self, computed: ComputedTokens) -> tuple[torch.Tensor, ...] | None:
        """See what a step computed; called before its `propose`, also where no request gets drafts.

        A drafter that `catches_up` is spared the steps of requests that it proposed for in the step before.

        What it returns, [num_tokens, ...] each, that `propose` is handed as `DraftBatch.observed`.

        The last step of a request comes after its `release`: what a row shows belongs to the request that was admitted
        to it last. Once before the first request it is called with made-up tokens of no row, so that memory is measured
        with its own: what it raises then ends the start.
        """
        ...


class KVDrafterFactory(Protocol):
    """The factory of a drafter that `needs_kv_group`: usually a class with a class method `attention_layers`."""

    def attention_layers(self, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        """The drafter's own attention layers, indices from 0, found without reading weights.

        Raises:
            slotline.registry.errors.SlotlineError: if the draft checkpoint does not fit the model.
        """
        ...

    def __call__(self, context: DrafterContext) -> Observer:
        """Build the drafter."""
        ...


class CheckpointDrafterFactory(Protocol):
    """The factory of a drafter that `needs_checkpoint`: usually a class with a static method `write_example`."""

    def write_example(self, folder: Path, context: DrafterContext) -> None:
        """Write a small checkpoint of made-up weights into an empty folder, for the conformance suite.

        It fits `num_tokens`, `vocab_size` and `hidden_size` of the context and is the same for the same context. There
        is no model, so what a checkpoint may share with one it holds itself.
        """
        ...

    def __call__(self, context: DrafterContext) -> Drafter:
        """Build the drafter."""
        ...
