"""The model-family contract, version 1: how a checkpoint becomes a model that calls attention through slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.attention import AttentionLayer, CacheSlots
from slotline.registry.contracts.pooling import Pooler
from slotline.registry.contracts.state import StateLayer
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import torch

    Attend = Callable[[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    Advance = Callable[[StateLayer, Mapping[str, torch.Tensor]], torch.Tensor]
    Tap = Callable[[int, torch.Tensor], None]


class AddShares(Protocol):
    """What adds adapters' shares behind a product."""

    def __call__(
        self, names: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor, inner: torch.Tensor | None = None
    ) -> None:
        """See `AdaptableModel.adapt`."""
        ...


class StoringAttend(Protocol):
    """An `attend` of a step with a cache that a model may write to itself."""

    def slots(self, layer: AttentionLayer, key: torch.Tensor) -> CacheSlots | None:
        """Where new keys like `key` and the values of a layer go; None if its backend stores them in its own way.

        A model that stores them there before it attends says so: ``attend(layer, query, key, value, sinks,
        written=True)``. It passes them all the same.
        """
        ...

    def takes_wanted(self, layer: AttentionLayer) -> bool:
        """Whether the layer may come with the queries of the step's `wanted` tokens alone.

        A model whose last layer makes no others says so: ``attend(layer, query, key, value, sinks, wanted=True)`` with
        query [n, num_heads, head_size], and with keys and values of all tokens. It gets [n, num_heads, head_size_v].
        """
        ...

    def __call__(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        written: bool = False,
        wanted: bool = False,
    ) -> torch.Tensor:
        """As `attend` in `Model.forward`."""
        ...


@frozen(kw_only=True, field_transformer=declared)
class ModelFamilyCapabilities:
    """What a model family offers.

    Attributes:
        architectures: values of `architectures` in config.json that it loads.
        devices: device types.
        tasks: of ``generate``, ``embed`` and ``classify``.
        pipeline: whether `load` can spread a model's layers over the stages of its context.
        taps: whether `Model.forward` takes a `tap`, so that drafters can read hidden states of chosen layers.
        batch_invariant: whether `load` can give a model whose logits for a token are bitwise the same whatever else is
            in the batch and however its request is cut into steps, as long as attention's outputs are.
        adapters: whether its models are `AdaptableModel`s; `single_adapter` whether these, in a step of one adapter,
            take products with a part of the room alone: `single_rows` in `extend` and `single` in `adapt`;
            `staged_adapters` whether they say in `adapter_stages` where layers lie.
        fast_prefill: whether `Model.forward` can leave out, for tokens that nobody asks for, the layers behind the last
            one that owns a cache.
    """

    architectures: Set[str]
    devices: Set[str] = Set(None)
    tasks: Set[str] = Set(("generate",))
    pipeline: Flag = Flag(False)
    taps: Flag = Flag(False)
    batch_invariant: Flag = Flag(False)
    adapters: Flag = Flag(False)
    single_adapter: Flag = Flag(False)
    staged_adapters: Flag = Flag(False)
    fast_prefill: Flag = Flag(False)


@frozen(kw_only=True)
class ModelParts:
    """What a model consists of, in the order of a forward pass, so that it can be divided into pipeline stages.

    Attributes:
        embedding: parameters before the first layer.
        layers: parameters of each layer.
        head: parameters behind the last layer; an output projection counts here even if it is tied to the embedding.
        attention: for each of `ModelFacts.layers` the layer that it lies in.
    """

    embedding: int
    layers: tuple[int, ...]
    head: int
    attention: tuple[int, ...]


@frozen(kw_only=True)
class Stage:
    """A part of a model on a device of its own: layers `first_layer` .. `end_layer` - 1.

    The first stage has the embedding, too, and the last what follows the layers.

    Attributes:
        device: torch device string.
        first_layer, end_layer: of `ModelParts.layers`.
        num_parameters: of the part.
    """

    device: str
    first_layer: int
    end_layer: int
    num_parameters: int


@frozen(kw_only=True)
class Modality:
    """A kind of input besides text that a model takes.

    Attributes:
        name: its key in a prompt's `multi_modal_data`, e.g. ``image``.
        placeholder_token_id: the token that stands for one item in a prompt as the user writes it, and for one
            embedding of an item in a prompt as the model reads it.
        cross: whether the embeddings take no tokens' places, but are what layers of type ``cross`` read. Every prompt
            has exactly one such item, and no placeholder; in `ProcessedItem.token_ids` the placeholder's id, which is
            no token then, stands for an embedding all the same.
    """

    name: str
    placeholder_token_id: int
    cross: bool = False


@frozen(kw_only=True, eq=False)
class ProcessedItem:
    """One image, sound or the like, ready to be encoded; made on the host when its request is added.

    Attributes:
        modality: name of its modality.
        token_ids: what its placeholder in the prompt is replaced with. Those that equal the modality's
            `placeholder_token_id` take the item's embeddings, in order; others (row breaks, say) are ordinary tokens.
        inputs: what `MultimodalModel.encode` reads, by name: tensors of any shape and dtype in host memory. Items of
            equal inputs have equal embeddings: the cache finds them by a hash of the bytes.
    """

    modality: str
    token_ids: Sequence[int]
    inputs: Mapping[str, torch.Tensor]


@frozen(kw_only=True)
class ModelFacts:
    """What can be known of a checkpoint before its weights are read.

    Attributes:
        architecture: from config.json.
        path: the folder.
        vocab_size, hidden_size: sizes.
        max_model_len: longest sequence that the positions allow.
        dtype: the checkpoint's dtype by name.
        layers: the attention layers in call order.
        num_parameters: from the model's definition.
        eos_token_ids: from generation_config.json, else config.json.
        tasks: what this checkpoint can do, the one it was made for first.
        modalities: inputs besides text; where there are any, `load` returns a `MultimodalModel`.
        parts: what the model consists of; None where the family does not divide it.
        kv_scales: by layer index, the scales (of keys, of values) that the checkpoint has for an eight-bit cache.
        state_layers: the layers with a state per request; a tensor whose dtype is ``auto`` gets the activations'.
        max_encoder_len: most keys of a request in layers of type ``cross``; 0 for a model without any.
        default_max_model_len: longest sequence to serve where none is asked for; None for no other than
            `max_model_len`. Longer ones may be refused when the model is loaded.
        host_copies: how often a forward makes a tensor on the device of what lies on the host: a copy that waits, and
            that no graph can hold.
    """

    architecture: str
    path: Path
    vocab_size: int
    hidden_size: int
    max_model_len: int
    dtype: str
    layers: tuple[AttentionLayer, ...]
    num_parameters: int
    eos_token_ids: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ("generate",)
    modalities: tuple[Modality, ...] = ()
    parts: ModelParts | None = None
    kv_scales: Mapping[int, tuple[float, float]] = field(factory=dict)
    state_layers: tuple[StateLayer, ...] = ()
    max_encoder_len: int = 0
    host_copies: int = 0
    default_max_model_len: int | None = None


@frozen(kw_only=True)
class ModelContext:
    """What `load` gets: where, in which dtype, for which task, and whether the optimising passes may run.

    Attributes:
        device: torch device string; the last stage's where there are several.
        batch_invariant: whether the model must be what the capability of that name says.
        stages: the pipeline's stages, two at least, for a family that declares `pipeline`; else empty.
    """

    contract: int
    facts: ModelFacts
    device: str
    dtype: str
    task: str = "generate"
    optimize: bool = True
    offload_bytes: int = 0
    batch_invariant: bool = False
    stages: tuple[Stage, ...] = ()
    options: Any = None


class Model(Protocol):
    """A loaded model. It holds no cache and no state; attention goes through `attend`, states through `advance`.

    Attributes:
        facts: what `inspect` found.
        notes: what was done to the model while loading, in words.
        pooler: read only for a pooling task, and there it must be one.
    """

    facts: ModelFacts
    notes: tuple[str, ...]
    pooler: Pooler | None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        *,
        advance: Advance | None = None,
        tap: Tap | None = None,
        fast_prefill: bool = False,
    ) -> torch.Tensor:
        """Run flattened tokens through the model.

        Over several stages `input_ids` and `positions` lie on the first one's device, `wanted` and the result on the
        last one's, and `attend` is called with tensors of the layer's own device, which is then CUDA's current one.

        Args:
            input_ids: [num_tokens] int64.
            positions: [num_tokens] int64.
            attend: called once per attention layer as ``attend(layer, query, key, value, sinks)`` with query
                [num_tokens, num_heads, head_size], key and value [num_tokens, num_kv_heads, ...], sinks [num_heads]
                or None; returns [num_tokens, num_heads, head_size_v]. It may be a `StoringAttend`.
            wanted: [n] int64, the tokens whose hidden states are asked for; None for all. Every layer stores the
                keys and values of all tokens, but the last one's attention, and what follows it, is needed for these
                alone (see `StoringAttend.takes_wanted`).
            advance: called once per state layer as ``advance(layer, inputs)`` with the inputs of the layer's kind (see
                the state contract); returns its output, one row per token. Given only where `facts` has state layers.
            tap: called in front of each decoder layer as ``tap(index, hidden_states)``, index from 0, hidden_states
                [num_tokens, hidden_size] the sum that the layer adds to; what it keeps it copies. Given only to a
                family that declares `taps`, and only where a drafter asks.
            fast_prefill: that the layers which read other layers' caches, and behind which none owns one, are run for
                the `wanted` tokens alone: `attend` is called for them with query, key and value of these n tokens, and
                not at all where n is 0. Given only to a family that declares it, with `wanted`, and without `tap`.

        Returns:
            Last hidden states [n, hidden_size], or [num_tokens, hidden_size].
        """
        ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] float32 of hidden states [n, hidden_size]. Called for the task ``generate`` alone."""
        ...

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [num_tokens, hidden_size] of tokens [num_tokens] int64; the caller may write into them.

        Called for a model that takes more than text, and by drafters that share the embedding.
        """
        ...

    def reload_weights(self, path: Path | None = None) -> None:
        """Read the weights again, in place: from the checkpoint's folder, or from another of the same shapes."""
        ...


class MultimodalModel(Model, Protocol):
    """A model that takes more than text: items are processed, encoded once, and put in the place of placeholders.

    The core keeps the embeddings in its encoder cache and calls `encode` only for what is not there. Over several
    pipeline stages embeddings of items and of tokens lie on the first one's device.
    """

    def process(self, modality: str, item: Any) -> ProcessedItem:
        """Turn an item, as it stands in `multi_modal_data`, into the model's inputs; host work, once for each item.

        Raises:
            slotline.registry.errors.RequestError: if the item cannot be read.
        """
        ...

    def example(self, modality: str) -> ProcessedItem:
        """A made-up item, about as large as items come; the core measures memory with it."""
        ...

    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode items of one modality together, on the device.

        Args:
            items: the `inputs` of each, in host memory.

        Returns:
            For each item [n, hidden_size] in the model's dtype, a row for each placeholder token of its `token_ids`.
        """
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        advance: Advance | None = None,
        tap: Tap | None = None,
        fast_prefill: bool = False,
        encoder_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Model.forward`; `inputs_embeds` [num_tokens, hidden_size] stand in for `embed(input_ids)` if given.

        Steps without items give none, so that the embedding layer stays inside captured graphs.

        `encoder_states` [n, hidden_size] are given only to a model with a `Modality.cross`, and only in steps in which
        requests begin: the embeddings of these requests' items, one behind the other. Layers of type ``cross`` call
        `attend` with the n keys and values that they make of them, with none in other steps.
        """
        ...


class AdaptableModel(Model, Protocol):
    """A model whose linear layers adapters can join.

    Attributes:
        linears: path of each such layer, as in the checkpoint's own model -> (in_features, out_features), in the order
            of a forward pass.
        merged_linears: those that come out of one product, in the order of its columns.
        embeddings: path of the input embedding -> (num_embeddings, embedding_dim); empty where no adapter can join it.
            A model may lack it, and `extend`: then there is none to adapt, and no room.
        adapter_stages: path of each linear layer and embedding -> its pipeline stage. Read over several stages alone,
            of a family that declares `staged_adapters`.
    """

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]: ...

    @property
    def merged_linears(self) -> tuple[tuple[str, ...], ...]: ...

    @property
    def embeddings(self) -> Mapping[str, tuple[int, int]]: ...

    @property
    def adapter_stages(self) -> Mapping[str, int]: ...

    def adapt(self, add: AddShares | None, names: Collection[str] = (), *, single: bool = False) -> None:
        """Call `add` behind each of the linear layers and embeddings `names` from now on; None for no more calls.

        Args:
            add: called as ``add(names, inputs, out)`` with one layer's name, or with all names of one merged product,
                inputs [num_tokens, in_features] and out [num_tokens, all out_features], to which it adds in place.
                An embedding's inputs are token ids [num_tokens] int64. Where the layer was extended and the step has
                few tokens, `inner` [num_tokens, rows] is the inputs' product with the rows behind the weight. Where the
                product is made in parts, `inner` is [parts, num_tokens, rows] float32, and out the first of the parts.
            single: that of each room the first `single_rows` alone are multiplied. Given only to a family that
                declares `single_adapter`.
        """
        ...

    def extend(
        self, names: tuple[str, ...], rows: int, max_tokens: int, *, single_rows: int = 0
    ) -> torch.Tensor | None:
        """Make room behind the weight of one product of linear layers, or None where there can be none.

        In steps of up to `max_tokens` tokens in which the layers are adapted, their product is taken with the room as
        well. `single_rows` of the rows, the first, are for steps of one adapter, see `adapt`; given only to a family
        that declares `single_adapter`.

        Returns:
            Zeros [rows, in_features] of the weight's dtype, to be written to in place.
        """
        ...

    def add_to_weight(self, name: str, delta: torch.Tensor) -> None:
        """Add to a weight in place, until `reload_weights`: [out_features, in_features] to a linear layer's,
        [num_embeddings, embedding_dim] to an embedding's.

        Raises:
            slotline.registry.errors.ModelError: if another layer would change with it.
        """
        ...


class ModelFamily(Protocol):
    """A factory's product: first looks, then loads."""

    def inspect(self, path: Path) -> ModelFacts:
        """Read config.json and find the attention layers without reading weights.

        Raises:
            slotline.registry.errors.ModelError: if the folder is no checkpoint of this family.
        """
        ...

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        """Why a forward pass on this device in this dtype cannot be captured in a graph, in a sentence, or None."""
        ...

    def load(self, context: ModelContext) -> Model:
        """Read the weights.

        Raises:
            slotline.registry.errors.ModelError: if weights are missing or do not fit.
        """
        ...
