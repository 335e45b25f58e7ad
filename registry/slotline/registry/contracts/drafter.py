"""The drafter contract, version 1.

A drafter proposes tokens and the core verifies them. A drafter can therefore change the speed of generation, but never
the text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import define, frozen

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.device import DeviceOps
from slotline.registry.contracts.model_family import Model, ModelFacts
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from slotline.registry.contracts.model_family import Attend


@frozen(kw_only=True, field_transformer=declared)
class DrafterCapabilities:
    """Capabilities and requirements that a drafter declares.

    Attributes:
        devices: device types.
        max_tokens: most draft tokens it can propose in a row.
        tree: it proposes a tree instead of a chain.
        request_trees: its trees may differ between the requests of a batch (`Draft.parents` with two dimensions), where
            `DrafterContext.form` says so. Requires `tree`.
        probabilities: it returns its own distribution, which rejection sampling then uses.
        remembers: finished requests influence its proposals for later requests. If False, a proposal is a function of
            the request's own history.
        needs_history: reads the token history on the host.
        needs_hidden_states: reads the last hidden states.
        needs_layers: reads hidden states of the layers listed in `LayerReader.layer_ids`.
        needs_computed: sees every token that a step computes, prompts included: `Observer.observe` is called.
        needs_kv_group: has attention layers of its own, which join the model's layers in planning and share its blocks.
            The factory is a `KVDrafterFactory`. Requires `needs_computed`.
        block_attention: whether a proposal computes several tokens of each request in one pass over the drafter's own
            layers (`DraftBatch.attend_block`): ``none``, ``causal``, or ``full`` for tokens that all see each other.
            For ``full`` the layers get `AttentionLayer.keys_ahead`, so that a backend without it is refused. Requires
            `needs_kv_group`.
        state: ``rows`` if it keeps something for each row that earlier steps put there and that a history by itself
            does not give back. The drafter is a `StatefulDrafter`. Requires `needs_computed` or `needs_history`, since
            not every step ends in a proposal. Its work is not captured in graphs, which know no rows.
        needs_grammar: proposes only tokens that the grammar state allows.
        needs_checkpoint: reads weights of its own from `DrafterContext.path`. The factory may be a
            `CheckpointDrafterFactory`. Without one, and without `checkpoint_form`, the conformance suite can check
            little.
        checkpoint_form: published form of the folder that it reads, if the conformance suite knows it field by field:
            ``eagle``, ``eagle3``, ``dflash`` or ``medusa``. The suite then writes such folders itself, and shows the
            drafter steps. Requires `needs_checkpoint`.
        on_device: proposes without the tokens on the host. Of a `DraftBatch` it reads only `rows` and device tensors,
            and its proposal never waits for the device. Steps can then overlap.
        catches_up: `propose` itself stores the token that the drafter's cache lacks for a request that it proposed for
            in the previous step. This is the token before the newest one. All earlier tokens are the request's own
            tokens or accepted drafts of this drafter. Steps that contain only these requests are not shown to
            `observe`. Requires `needs_kv_group`, and every draft must be a token.
        graphs: `observe` and `propose` can be captured in CUDA graphs and replayed without Python. They work only on
            the device, read changing values from the device tensors passed to them (including `observed`), and return
            tensors whose shapes depend only on the number of requests or tokens. For chains without probabilities only.
        prompt_embeds: `observe` reads `next_embeds` where it is given, and no token of a prompt. Without this a drafter
            that `needs_computed` gets no requests whose prompts are embeddings. Other drafters see such a request from
            its first output token on: `token_table` and `num_tokens` leave the prompt out.
    """

    devices: Set[str]
    max_tokens: Max = Max()
    tree: Flag = Flag(False)
    request_trees: Flag = Flag(False)
    probabilities: Flag = Flag(False)
    remembers: bool = False
    needs_history: bool = False
    needs_hidden_states: bool = False
    needs_layers: bool = False
    needs_computed: bool = False
    needs_kv_group: bool = False
    block_attention: Literal["none", "causal", "full"] = "none"
    state: Literal["none", "rows"] = "none"
    needs_grammar: bool = False
    needs_checkpoint: bool = False
    checkpoint_form: Literal["", "eagle", "eagle3", "dflash", "medusa"] = ""
    on_device: bool = False
    catches_up: bool = False
    graphs: Flag = Flag(False)
    prompt_embeds: Flag = Flag(False)


@frozen(kw_only=True)
class DrafterInspection:
    """Input of `KVDrafterFactory.attention_layers`, before anything is built.

    Attributes:
        facts: the model's facts.
        num_tokens: as in `DrafterContext`.
        max_model_len: longest sequence that the drafter proposes for or observes positions of, drafts included.
        path: the draft checkpoint's folder or None.
        inspect_model: inspects the checkpoint of a whole model through the model family that supports it. Raises
            `ModelError` if there is none.
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
    """Input of a drafter's factory.

    Attributes:
        path: the draft checkpoint's folder: the configured one, else the folder of the drafter's name inside the
            model's folder if it exists, else None.
        facts: the model's facts. None outside an engine, like the following attributes. For a drafter with blocks or a
            state, the conformance suite makes up facts, `compute_logits`, `embed` and, if it has any, `layers`.
        compute_logits: the model's output projection, for drafters that share it. Maps hidden states [n, hidden_size]
            after the last norm to logits [n, vocab_size] float32, on the device.
        embed: the model's embedding, for drafters that share it. Maps tokens [n] int64 to [n, hidden_size]. None if the
            model family provides none.
        layers: the attention layers that `KVDrafterFactory.attention_layers` returned, as `attend` takes them.
        load_model: loads the checkpoint of a whole model whose attention layers `attention_layers` returned.
        ops: operations of the device, such as `argmax`.
        form: how proposals are verified: ``chain``, ``tree`` (one tree for all requests of a batch) or
            ``request_trees``. Of a tree that is verified as a chain only the path of first children is.
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
    ops: DeviceOps | None = None
    form: str = "chain"
    options: Any = None


class BlockAttention(Protocol):
    """Protocol of `DraftBatch.attend_block`."""

    def __call__(self, num_queries: int, causal: bool = False) -> Attend:
        """Return the attention of `num_queries` tokens of each request, from the newest one's position on.

        The tokens of a request are adjacent, in order of position. Their keys and values are stored before the queries
        are computed. All queries see the request's tokens before the newest one.

        Args:
            num_queries: from 1 to 1 + the number of draft tokens.
            causal: False for tokens of a block that all see each other. True for tokens that see those before them.

        Raises:
            ContractError: if there are too many queries, or if the drafter did not declare such blocks.
        """
        ...


@define(kw_only=True, eq=False)
class DraftBatch:
    """Inputs of a drafter after a step. Only accepted history is visible.

    Attributes:
        rows: [num_requests] int64 on the host, permanent rows of the requests that get drafts.
        token_table: [max_requests, max_model_len] int32 on the host, tokens by row. It may be read up to `num_tokens`,
            by drafters that declare `needs_history`. It must not be written.
        num_tokens: [num_requests] int32 on the host, accepted tokens of each request, the newest included.
        last_token_ids: [num_requests] int64 on the device, the newest accepted tokens.
        positions: [num_requests] int64 on the device, positions of the newest tokens.
        previous_token_ids: [num_requests] int64 on the device, the tokens before the newest. None unless the drafter
            `catches_up`.
        hidden_states: [num_requests, hidden_size] in the model's dtype, after the last norm, of the token before the
            newest, which is the last token that the model has computed. None unless `needs_hidden_states`.
        layer_hidden_states: [num_requests, layers * hidden_size] of the same token: the inputs of the layers
            `layer_ids`, concatenated. None unless `needs_layers`.
        computed_index: [num_requests] int64 on the device, the index of that token in the `ComputedTokens` of the same
            step. None unless `needs_computed`, and None if `propose` is captured.
        observed: [num_requests, ...] each, the results of `Observer.observe` for that token. Empty if there are none.
        attend: for a drafter that `needs_kv_group`, ``attend(offset)`` returns the attention of its own layers for one
            token of each request at `positions` + offset. Call it with 0, 1, .. below the number of draft tokens, in
            this order: the keys and values of an offset are stored before the queries of the next one. For a drafter
            that `catches_up`, offset 0 takes two adjacent tokens of each request: the previous and the newest, at
            `positions` - 1 and `positions`.
        attend_tree: for a drafter with layers of its own and `tree`, ``attend_tree(parents, first)`` returns the
            attention of the nodes from `first` on of a tree, as many of each request. `parents` [num_nodes] or, where
            `DrafterContext.form` is ``request_trees``, [num_requests, num_nodes] int64 on the device are those of all
            nodes so far, the first ones included, whose keys and values have been stored. -1 is for a node at
            `positions`, its child is at `positions` + 1. There are at most as many nodes as draft tokens. None where
            trees are not verified.
        attend_block: for a drafter that declares `block_attention`, the attention of its own layers for a block of
            tokens of each request, `positions` included. It may be called instead of `attend` or after it.
        temperature: [num_requests] float32 on the device. 0 for greedy requests.
        uniforms: [num_requests, num_tokens] float64 in [0, 1) on the host, for the drafter's own draws. They depend
            only on the request's seed and the position, so that the rest of the batch does not change a text.
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
    attend_tree: Callable[[torch.Tensor, int], Attend] | None = None
    attend_block: BlockAttention | None = None
    temperature: torch.Tensor | None = None
    uniforms: npt.NDArray[np.float64] | None = None


@define(kw_only=True, eq=False)
class ComputedTokens:
    """Tokens that a step computed: chunks of prompts, newest tokens, and drafts, rejected ones included.

    A request's tokens are contiguous, in order of position. A position is repeated if its draft was rejected or the
    request was preempted. The new values then replace the old ones. Positions of a cached prefix are left out. The
    tensors are valid until the next step. Padding may follow the last request's tokens.

    Attributes:
        rows: [num_requests] int64 on the host, including requests that this step finished.
        served: [num_requests] bool on the host, False for a request that has left or that the drafter did not admit.
        query_start_loc: [num_requests + 1] int64 on the host, the index of each request's first token.
        token_ids, positions: [num_tokens] int64 on the device.
        next_token_ids: [num_tokens] int64 on the device, the token after each. For a request's last token it is the
            newest token or the prompt's next one. After a rejected draft the value has no meaning.
        next_embeds: [num_tokens, hidden_size], the embeddings of `next_token_ids`, with those of images, other items
            and prompts of embeddings in their places. None if there are none among them, so that the token ids are
            sufficient.
        hidden_states: [num_tokens, hidden_size], after the last norm. None unless `needs_hidden_states`.
        layer_hidden_states: [num_tokens, layers * hidden_size]. None unless `needs_layers`.
        attend: for a drafter that `needs_kv_group`, the attention of its own layers for these tokens. Call each layer
            once, so that its cache is filled at the same positions as the model's cache.
        store: for such a drafter, ``store(layer, key, value)`` fills the cache of a layer in the place of `attend`,
            where nothing attends: the keys and values come from the model's states, say (KV injection). Key and value
            are [num_tokens, num_kv_heads, head size] each.
    """

    rows: torch.Tensor
    query_start_loc: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    next_token_ids: torch.Tensor
    served: torch.Tensor | None = None
    next_embeds: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    layer_hidden_states: torch.Tensor | None = None
    attend: Attend | None = None
    store: Callable[[AttentionLayer, torch.Tensor, torch.Tensor], None] | None = None


@define(kw_only=True, eq=False)
class Draft:
    """Proposal of a drafter.

    Attributes:
        token_ids: [num_requests, num_tokens] int64. -1 ends a request's proposal early.
        probabilities: [num_requests, num_tokens, vocab_size] float32 or float64, the distribution that each token was
            drawn from, given the tokens before it. None for a one-point distribution.
        parents: [num_tokens] int64 for a tree: index of each token's parent, -1 for the root. None for a chain. A
            drafter that declares `request_trees` may give [num_requests, num_tokens]: a tree for each request. Where
            `DrafterContext.form` is ``tree`` there is one for all; where it is ``chain`` parents may be left out. The
            parents of all nodes are looked at, also of those after the end of a proposal.
    """

    token_ids: torch.Tensor
    probabilities: torch.Tensor | None = None
    parents: torch.Tensor | None = None


class Drafter(Protocol):
    """Protocol of a built drafter."""

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Start a new request in `row`, and forget the row's previous contents.

        A prompt of embeddings has no token ids.
        """
        ...

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose up to the negotiated number of tokens for each request."""
        ...

    def release(self, row: int) -> None:
        """End the request in `row`."""
        ...


class LayerReader(Drafter, Protocol):
    """Protocol of a drafter that `needs_layers`.

    Attributes:
        layer_ids: the decoder layers, from 0, whose inputs it reads, in the order of concatenation.
    """

    layer_ids: tuple[int, ...]


class Observer(Drafter, Protocol):
    """Protocol of a drafter that `needs_computed`."""

    def observe(self, computed: ComputedTokens) -> tuple[torch.Tensor, ...] | None:
        """See the tokens that a step computed. Called before `propose`, and also if no request gets drafts.

        A drafter that `catches_up` does not see steps that contain only requests that it proposed for in the previous
        step.

        The last step of a request comes after its `release`: a row belongs to the request that was admitted to it last.
        Before the first request, `observe` is called once with dummy tokens of no row, so that its memory use is
        measured. An exception in this call aborts the start.

        Returns:
            Tensors [num_tokens, ...] each, which `propose` gets as `DraftBatch.observed`, or None.
        """
        ...


class StatefulDrafter(Drafter, Protocol):
    """Protocol of a drafter that declares `state` ``rows``.

    A request keeps its row from `admit` to `release`: rows never move. Tokens that `observe` sees may fall later. Which
    of them stood shows in the positions of the request's next tokens, which begin after the last one that did. If
    `observe` or `propose` raises, the states of that step's rows are lost: the core releases these rows, and their
    requests go on without drafts.
    """

    def preempt(self, row: int) -> None:
        """Forget what the row holds of the tokens of its request, which stays on the row.

        Its tokens are computed and observed again, from the first that no cached prefix covers. Called before the first
        step that does so, after a preemption and after the engine recovered from a failed step.
        """
        ...


class KVDrafterFactory(Protocol):
    """Factory of a drafter that `needs_kv_group`: usually a class with a class method `attention_layers`."""

    def attention_layers(self, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        """Return the drafter's own attention layers, with indices from 0, without reading weights.

        Raises:
            slotline.registry.errors.SlotlineError: if the draft checkpoint does not fit the model.
        """
        ...

    def __call__(self, context: DrafterContext) -> Observer:
        """Build the drafter."""
        ...


class CheckpointDrafterFactory(Protocol):
    """Factory of a drafter that `needs_checkpoint`: usually a class with a static method `write_example`."""

    def write_example(self, folder: Path, context: DrafterContext) -> None:
        """Write a small checkpoint of dummy weights into an empty folder, for the conformance suite.

        It fits `num_tokens`, `vocab_size` and `hidden_size` of the context and is the same for the same context. There
        is no model, so the checkpoint must contain all weights that could be shared with one.
        """
        ...

    def __call__(self, context: DrafterContext) -> Drafter:
        """Build the drafter."""
        ...
