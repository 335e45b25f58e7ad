"""The model-family contract, version 1: from a checkpoint to a model that calls attention through slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts.attention import AttentionLayer, CacheSlots
from slotline.registry.contracts.attention_edges import AttentionEdges
from slotline.registry.contracts.communicator import Communicator
from slotline.registry.contracts.pooling import Pooler
from slotline.registry.contracts.state import StateLayer
from slotline.registry.contracts.weights import ModelWeights, WeightModule
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import numpy as np
    import torch

    from slotline.registry.contracts.lora import ModulePart

    Attend = Callable[[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    Advance = Callable[[StateLayer, Mapping[str, torch.Tensor]], torch.Tensor]
    Tap = Callable[[int, torch.Tensor], None]


class AddShares(Protocol):
    """Callable that adds the adapters' contribution to a product."""

    def __call__(
        self, names: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor, inner: torch.Tensor | None = None
    ) -> None:
        """Add to `out` as described in `AdaptableModel.adapt`."""
        ...


class StoringAttend(Protocol):
    """Protocol of an `attend` of a step with a cache that a model may write to itself."""

    def slots(self, layer: AttentionLayer, key: torch.Tensor) -> CacheSlots | None:
        """Return the destination of new keys like `key` and of the values of a layer.

        A model that stores them there before attention calls ``attend(layer, query, key, value, sinks, written=True)``.
        Keys and values are passed all the same.

        Returns:
            None if the layer's backend stores them in its own way.
        """
        ...

    def takes_wanted(self, layer: AttentionLayer) -> bool:
        """Return True if the layer may be called with the queries of only the step's `wanted` tokens.

        A model whose last layer computes no other queries calls ``attend(layer, query, key, value, sinks,
        wanted=True)`` with query [n, num_heads, head_size], and with keys and values of all tokens. The result is [n,
        num_heads, head_size_v].
        """
        ...

    def edges(self) -> Mapping[int, Collection[str]]:
        """Return, by layer index, the computations at its edges that a layer's backend takes over in this step.

        Layers without some may be missing, and a callable without this method takes none. See
        `slotline.registry.contracts.attention_edges`.
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
        inputs: Mapping[str, torch.Tensor] = ...,
        edges: AttentionEdges = ...,
    ) -> torch.Tensor:
        """Compute attention like `attend` in `Model.forward`.

        `inputs` are those of `AttentionLayer.inputs`, by name. They are passed for layers that have some. `edges` are
        what the layer's backend computes beside, for a call with ``written=True`` and without `wanted`.
        """
        ...


SAVED_WEIGHTS = "slotline_weights.json"
"""File of a folder that `save_weights` wrote: what the weights fit, and their files."""


@frozen(kw_only=True, field_transformer=declared)
class ModelFamilyCapabilities:
    """Capabilities that a model family declares.

    Attributes:
        architectures: values of `architectures` in config.json that it loads.
        devices: device types.
        tasks: some of ``generate``, ``embed``, ``classify`` and ``token_classify``. With ``transcription`` beside
            ``generate``, `LLM.transcribe` makes transcripts of what it generates.
        pipeline: `load` can distribute a model's layers over the stages of its context.
        taps: `Model.forward` takes a `tap`, so that drafters can read hidden states of chosen layers.
        batch_invariant: `load` can return a model whose logits for a token are bitwise independent of the rest of the
            batch and of how its request is divided into steps, provided that the outputs of attention are.
        adapters: its models are `AdaptableModel`s.
        single_adapter: in a step of one adapter, its models can multiply with only a part of the room (`single_rows` in
            `extend` and `single` in `adapt`).
        staged_adapters: its models have `adapter_stages`.
        quantized: `inspect` takes `quantized=True` and gives `ModelFacts.weight_modules`, and `load` reads the modules
            of `ModelContext.weights` through their weight format and multiplies by their plugins.
        by_inspection: it also serves architectures outside the set, which its `takes_on` names.
        fast_prefill: `Model.forward` can skip the layers after the last one that owns a cache, for tokens whose hidden
            states are not wanted.
        load_formats: values of `ModelContext.load_format` that `load` takes. With ``dummy``, `inspect` takes
            `weights=False` for a folder without weights. With ``sharded``, it does so too, and models of plain weights
            are `SavingModel`s.
        tensor: most ranks among which `load` can divide a model's layers. `inspect` takes `shard` then, and gives the
            facts of a rank's part.
        experts: ranks can share mixtures by whole experts, as `Shard.experts` says.
        expert_replicas: so can replicas with tokens of their own, as `Shard.own_tokens` says.
        expert_groups: so can replicas that are tensor groups, as `Shard.replicas` says.
        overlap: its models have `MixtureModel.forward_pieces`.
        sequence: ranks of a tensor group can add and norm hidden states of their own tokens alone, as `Shard.sequence`
            says. `inspect` refuses models where they cannot.
        pipeline_ranks: `load` can load one stage of a pipeline alone (`ModelContext.own_stage`), as a `StageModel`.
        compiled: `load` takes `ModelContext.compiler`.
        token_types: models of checkpoints with several `ModelFacts.token_types` are `TypedModel`s.
        prompt_embeds: `Model.forward` takes `inputs_embeds` after `wanted` as that of a `MultimodalModel` does, and no
            layer reads token ids, so that prompts may be given as embeddings. A model with `ModelParts.chained` false
            is left out.
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
    quantized: Flag = Flag(False)
    by_inspection: Flag = Flag(False)
    load_formats: Set[str] = Set(("hf",))
    tensor: Max = Max(1)
    experts: Flag = Flag(False)
    expert_replicas: Flag = Flag(False)
    expert_groups: Flag = Flag(False)
    overlap: Flag = Flag(False)
    pipeline_ranks: Flag = Flag(False)
    compiled: Flag = Flag(False)
    token_types: Flag = Flag(False)
    sequence: Flag = Flag(False)
    prompt_embeds: Flag = Flag(False)


@frozen(kw_only=True)
class Shard:
    """Part of each layer that one rank of a tensor group has, or one replica of those that share experts.

    Attributes:
        rank: its place in the group.
        size: number of ranks.
        experts: mixtures are divided by whole experts, and the loaded model is a `MixtureModel`. Otherwise each rank
            has a part of each expert.
        redundant_experts: copies of experts that all ranks have together, beyond one of each.
        count_experts: the model counts the tokens of each expert.
        own_tokens: each rank has tokens of its own, any number. Then only mixtures are divided, by whole experts, and
            the model has `MixtureModel.idle_experts`.
        sequence: between attention and MLPs, a rank has hidden states of its own tokens alone.
        replicas: number of tensor groups that share the experts of mixtures. Each has tokens of its own, any number.
            The model has `MixtureModel.idle_experts` then.
        replica: the place of the rank's group among them.
    """

    rank: int
    size: int
    experts: bool = False
    redundant_experts: int = 0
    count_experts: bool = False
    own_tokens: bool = False
    sequence: bool = False
    replicas: int = 1
    replica: int = 0

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks that share the experts."""
        return self.replicas * self.size

    @property
    def expert_rank(self) -> int:
        """Return the place of the rank among those that share the experts."""
        return self.replica * self.size + self.rank


@frozen(kw_only=True)
class ModelParts:
    """Parts of a model in the order of a forward pass, for the division into pipeline stages.

    Attributes:
        embedding: number of parameters before the first layer.
        layers: number of parameters of each layer.
        head: number of parameters after the last layer. An output projection counts here even if it is tied to the
            embedding.
        attention: for each of `ModelFacts.layers`, the index of its model layer.
        states: for each of `ModelFacts.state_layers`, the index of its model layer.
        chained: whether all that a layer reads of the layers before it and of the tokens are hidden states
            [num_tokens, hidden_size].
    """

    embedding: int
    layers: tuple[int, ...]
    head: int
    attention: tuple[int, ...]
    states: tuple[int, ...] = ()
    chained: bool = True


@frozen(kw_only=True)
class Stage:
    """Part of a model on its own device: layers `first_layer` .. `end_layer` - 1.

    The first stage also has the embedding, and the last one everything after the layers.

    Attributes:
        device: torch device string.
        first_layer, end_layer: indices into `ModelParts.layers`.
        num_parameters: number of parameters of the part.
    """

    device: str
    first_layer: int
    end_layer: int
    num_parameters: int


@frozen(kw_only=True)
class Modality:
    """Kind of input other than text that a model takes.

    Attributes:
        name: its key in a prompt's `multi_modal_data`, e.g. ``image``.
        placeholder_token_id: the token that represents one item in the user's prompt, and one embedding of an item in
            the prompt that the model reads.
        cross: True if the embeddings are read by layers of type ``cross`` instead of replacing tokens. Every prompt
            then has exactly one item and no placeholder. In `ProcessedItem.token_ids` the placeholder's id, which is
            not a token then, still represents one embedding.
        raw: True if `forward` reads the items' inputs themselves, and no token or embedding. Every prompt is then one
            item of one placeholder token, which stands for the row of hidden states that the item gives. The family's
            `capture_refusal` says that no graph holds them.
        prompt: True if an item is a prompt: token ids, or a text that becomes token ids before `process` gets it. A
            plain prompt of a user is this item, and the decoder's prompt begins with `ModelFacts.decoder_start`.
        prunable: True if the loaded model is a `PruningModel` for its items.
        prompt_token_id: the token that represents one item in the user's prompt, if that is another one. None if it is
            the placeholder.
    """

    name: str
    placeholder_token_id: int
    cross: bool = False
    raw: bool = False
    prompt: bool = False
    prunable: bool = False
    prompt_token_id: int | None = None


@frozen(kw_only=True, eq=False)
class ProcessedItem:
    """Image, sound or other item, ready to be encoded. It is made on the host when its request is added.

    Attributes:
        modality: name of its modality.
        token_ids: the tokens that replace its placeholder in the prompt. Those equal to the modality's
            `placeholder_token_id` take the item's embeddings, in order. Others (e.g. row breaks) are ordinary tokens.
        inputs: inputs of `MultimodalModel.encode` by name, tensors of any shape and dtype in host memory. Items with
            equal inputs have equal embeddings: the cache finds them by a hash of the bytes.
    """

    modality: str
    token_ids: Sequence[int]
    inputs: Mapping[str, torch.Tensor]


@frozen(kw_only=True)
class ModelFacts:
    """Facts of a checkpoint that are known before its weights are read.

    Attributes:
        architecture: the architecture named in config.json.
        path: the folder.
        vocab_size, hidden_size: sizes.
        max_model_len: longest sequence that the positions allow.
        dtype: the checkpoint's dtype by name.
        layers: the attention layers in call order.
        num_parameters: number of parameters, from the model's definition.
        eos_token_ids: from generation_config.json, else config.json.
        tasks: tasks that the checkpoint supports, the one it was trained for first.
        modalities: inputs other than text. If there are any, `load` returns a `MultimodalModel`.
        parts: the parts of the model, None if the family does not divide it.
        kv_scales: by layer index, the scales (of keys, of values) that the checkpoint has for an eight-bit cache.
        state_layers: the layers with a state per request. A tensor with dtype ``auto`` gets the activations' dtype.
        max_encoder_len: most keys of a request in layers of type ``cross``. 0 for a model without such layers.
        weight_modules: modules whose weights are quantized or could be, in model order. Given only by `inspect` with
            `quantized=True`.
        notes: how it is known that the architecture runs right, and what of the checkpoint is left out, in words.
        default_max_model_len: longest sequence to serve if the configuration gives none. None means `max_model_len`.
            Longer sequences may be refused when the model is loaded.
        host_copies: number of times that a forward pass copies data from the host into a device tensor. These copies
            wait and cannot be captured in a graph.
        mixtures: number of experts of each mixture whose experts ranks can share, in order.
        token_types: number of types that a token can have, such as that of a pair's first or second text.
        position_axes: number of positions that the rotary embeddings read of each token. Above 1, `load` returns a
            `MultimodalModel` with `axis_positions`, whose forward takes `position_offsets`.
        layer_embeds: number of first layers behind which embeddings of items are added. Above 0,
            `MultimodalModel.encode` returns them too, and `forward` takes `layer_embeds`.
        decoder_start: the token that a decoder's prompt begins with, of a model with a `Modality.prompt`.
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
    weight_modules: tuple[WeightModule, ...] = ()
    notes: tuple[str, ...] = ()
    mixtures: tuple[int, ...] = ()
    token_types: int = 1
    position_axes: int = 1
    layer_embeds: int = 0
    decoder_start: int = 0


@frozen(kw_only=True)
class ModelContext:
    """Input of `load`: device, dtype, task, and settings of the optimization passes.

    Attributes:
        device: torch device string. With several stages, the last stage's device.
        batch_invariant: True if the plan relies on the capability of that name.
        stages: the pipeline's stages, at least two, for a family that declares `pipeline`. Otherwise empty.
        weights: the quantized modules with their reader and their plugins, for a family that declares `quantized`. None
            for plain weights.
        captured: True if forward passes are captured in graphs. All work must go through torch or the device's queue
            then, never through a call that the host makes with an address.
        load_format: ``hf`` to read a Hugging Face checkpoint, ``sharded`` to read what `save_weights` wrote, ``dummy``
            to make random weights. Only values of the capability `load_formats`.
        progress: whether to show a progress bar on a terminal.
        shard: the part of each layer to load, whose facts `facts` are, for a family that declares `tensor`. None for
            the whole model.
        communicator: of the tensor group, which joins what the parts give. None without a shard. The outputs of
            `Model` are those of the whole model on each rank, bitwise the same.
        replicas: of the ranks with the same place in each tensor group, in order of `Shard.replica`. None if
            `Shard.replicas` is 1.
        own_stage: the stage to load alone, for a family that declares `pipeline_ranks`. The other stages are with other
            ranks, and nothing of them stays in memory. None for the whole model.
        with_embedding: the embedding is loaded beside a stage that does not begin with it, for `Model.embed`.
        compiler: the backend of torch.compile that compiles each forward pass whole, for a family that declares
            `compiled`. The passes are left out then. "" to compile nothing.
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
    captured: bool = False
    load_format: str = "hf"
    progress: bool = False
    weights: ModelWeights | None = None
    shard: Shard | None = None
    communicator: Communicator | None = None
    replicas: Communicator | None = None
    own_stage: Stage | None = None
    with_embedding: bool = False
    compiler: str = ""


class Model(Protocol):
    """Protocol of a loaded model.

    It holds no cache and no state: attention goes through `attend`, states through `advance`.

    Attributes:
        facts: the facts returned by `inspect`.
        notes: changes made to the model while loading, in words.
        pooler: the model's `Pooler`. Required for a pooling task, otherwise not read.
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

        With several stages, `input_ids` and `positions` are on the first stage's device, and `wanted` and the result on
        the last stage's. `attend` is called with tensors of the layer's own device, which is CUDA's current device
        then.

        Args:
            input_ids: [num_tokens] int64.
            positions: [num_tokens] int64.
            attend: called once per attention layer as ``attend(layer, query, key, value, sinks)`` with query
                [num_tokens, num_heads, head_size], key and value [num_tokens, num_kv_heads, ...], sinks [num_heads] or
                None. Returns [num_tokens, num_heads, head_size_v]. It may be a `StoringAttend`.
            wanted: [n] int64, the tokens whose hidden states are needed. None for all. Every layer stores the keys and
                values of all tokens. The last layer's attention and the operations after it are needed only for these
                tokens (see `StoringAttend.takes_wanted`).
            advance: called once per state layer as ``advance(layer, inputs)`` with the inputs of the layer's kind (see
                the state contract). Returns its output, one row per token. Given only if `facts` has state layers.
            tap: called before each decoder layer as ``tap(index, hidden_states)``, with index from 0 and hidden_states
                [num_tokens, hidden_size] the residual stream that the layer adds to. It copies the values that it
                keeps. Given only to a family that declares `taps`, and only if a drafter needs it. If it has
                `layer_ids`, it reads only the inputs of these layers.
            fast_prefill: True to run the trailing layers that read other layers' caches (after the last layer that owns
                one) only for the `wanted` tokens. `attend` is called for them with query, key and value of these n
                tokens, and not at all if n is 0. Given only to a family that declares it, with `wanted` and without
                `tap`.

        Returns:
            Last hidden states [n, hidden_size], or [num_tokens, hidden_size].
        """
        ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] float32 of hidden states [n, hidden_size]. Only for the task ``generate``."""
        ...

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [num_tokens, hidden_size] of tokens [num_tokens] int64. The caller may overwrite them.

        Called for a model with inputs other than text, in steps with prompts of embeddings, and by drafters that share
        the embedding.
        """
        ...

    def reload_weights(self, path: Path | None = None) -> None:
        """Read the weights again, in place, from the checkpoint's folder or from another one with the same shapes."""
        ...


class StageModel(Model, Protocol):
    """Protocol of one stage of a pipeline over ranks. Only the last stage has `compute_logits`."""

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
        received: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run flattened tokens through the stage, see `Model.forward`.

        Args:
            received: [num_tokens, hidden_size], what the stage before returned. None for the first stage.

        Returns:
            Of the last stage, hidden states [n, hidden_size] or [num_tokens, hidden_size]. Of another one, the input of
            the next stage's first layer [num_tokens, hidden_size]. `wanted` is not given then.
        """
        ...


class TypedModel(Model, Protocol):
    """Protocol of a model whose tokens can have types, such as those of a pair's first and second text."""

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
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run flattened tokens through the model, see `Model.forward`.

        Args:
            token_types: [num_tokens] int64, the type of each token. None if all are of type 0.
        """
        ...


class SavingModel(Model, Protocol):
    """Protocol of a model that can write its weights as they are after all changes of loading."""

    def save_weights(self, folder: Path) -> None:
        """Write the weights and the rest of the checkpoint into a folder that is not there yet, or is empty.

        The folder has a file `SAVED_WEIGHTS`. `ModelFamily.load` reads it with the load format ``sharded``.

        Raises:
            ModelError: if this model cannot be saved, or the folder cannot be written.
        """
        ...


class MixtureModel(Model, Protocol):
    """Protocol of a model whose mixtures' experts are shared by the ranks of its context's communicator.

    All ranks call the same methods between the same steps. The slots of the ranks are those of
    `slotline.registry.contracts.expert_placement`. `reload_weights` places experts as `load` does.
    """

    def expert_loads(self) -> Sequence[torch.Tensor]:
        """Return the tokens of each expert since the last call over all ranks, [experts] int64 for each mixture.

        Called only with `Shard.count_experts`. Tokens that fill up a batch are counted too.
        """
        ...

    def expert_placements(self) -> Sequence[np.ndarray[Any, Any]]:
        """Return the expert of each slot, [slots] int64 in host memory for each mixture."""
        ...

    def place_experts(self, placements: Sequence[np.ndarray[Any, Any]]) -> int:
        """Move experts among the ranks until each slot has its expert. No address changes.

        Args:
            placements: as `expert_placements` will return them from now on, the same on all ranks.

        Returns:
            The number of experts that came from other ranks to this one.
        """
        ...

    def idle_experts(self, pieces: int = 1) -> None:
        """Run the mixtures of a forward pass without tokens, while the other ranks run theirs with tokens.

        Called only with `Shard.own_tokens` or `Shard.replicas`, after the first forward pass.

        Args:
            pieces: of the forward pass, as the other ranks run it by `forward_pieces`.
        """
        ...

    def forward_pieces(self, pieces: Sequence[tuple[Any, ...] | None]) -> Sequence[torch.Tensor | None]:
        """Run a forward pass in pieces. While the tokens of one travel among the ranks, another one computes.

        Called only with the capability `overlap`, by all ranks with as many pieces.

        Args:
            pieces: arguments of `forward` for each piece, in the order of its tokens. None for a piece without tokens.
                The keys of a piece are in the cache before a later one attends in the same layer.

        Returns:
            What `forward` returns for each piece.
        """
        ...

    def gather_experts(self, *, gathers: bool) -> None:
        """Let mixtures gather the tokens of all ranks from now on, or exchange them as at first.

        Called only with `Shard.own_tokens` or `Shard.replicas`. While they gather, all ranks have as many tokens in a
        forward pass, and it can be captured.
        """
        ...


class GrowingMixtureModel(MixtureModel, Protocol):
    """Protocol of a `MixtureModel` whose experts another number of ranks may share while requests are unfinished.

    Its ranks have tokens of their own (`Shard.own_tokens`), and are not within a forward pass. A model without these
    methods keeps its number of ranks.
    """

    def join_experts(self, communicator: Communicator) -> None:
        """Share the experts with the ranks of another communicator from now on. No expert moves."""
        ...

    def resize_experts(
        self,
        held: Sequence[Sequence[np.ndarray[Any, Any]]],
        placements: Sequence[np.ndarray[Any, Any]],
        ranks: int,
        shard: Shard | None,
    ) -> int:
        """Move experts until the first ranks of the communicator have their slots of placements. All ranks call it.

        The weights' addresses stay where the rank has had as many slots before. No captured graph may be used again.

        Args:
            held: the experts in the slots of each rank of the communicator, [slots] int64 for each mixture.
            placements: as `expert_placements` will return them, [slots] int64 for each mixture.
            ranks: number of ranks that have slots from now on.
            shard: this rank's part from now on. None for a rank that leaves.

        Returns:
            The number of experts that came from other ranks to this one.

        Raises:
            ModelError: if they cannot move. Nothing has changed then.
        """
        ...


class MultimodalModel(Model, Protocol):
    """Protocol of a model with inputs other than text. Items are processed, encoded once, and replace placeholders.

    The core keeps the embeddings in its encoder cache and calls `encode` only for items that are missing there. With
    several pipeline stages, embeddings of items and of tokens are on the first stage's device.
    """

    def process(self, modality: str, item: Any) -> ProcessedItem:
        """Convert an item of `multi_modal_data` into the model's inputs. This is host work, done once for each item.

        Raises:
            slotline.registry.errors.RequestError: if the item cannot be read.
        """
        ...

    def example(self, modality: str) -> ProcessedItem:
        """Return a dummy item of about the largest size. The core measures memory with it."""
        ...

    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode items of one modality together, on the device.

        Args:
            modality: name of the modality.
            items: the `inputs` of each item, in host memory.

        Returns:
            For each item [n, (1 + layer_embeds) * hidden_size] in the model's dtype, with one row for each placeholder
            token of its `token_ids`: the token's embedding, then what `ModelFacts.layer_embeds` layers add, in order.
        """
        ...

    def axis_positions(
        self, token_ids: Sequence[int], items: Sequence[tuple[str, Mapping[str, torch.Tensor]]]
    ) -> tuple[np.ndarray[Any, Any], int]:
        """Return the rotary positions of a prompt. Called only if `ModelFacts.position_axes` is above 1.

        This is host work, done once for each request with items. In a request without items all axes are equal to the
        token's place.

        Args:
            token_ids: [n], the prompt as the model reads it.
            items: modality and `inputs` of each item, in the prompt's order.

        Returns:
            The positions [position_axes, n] int64, and the difference between the positions of each token after the
            prompt and its place, the same on all axes.
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
        position_offsets: torch.Tensor | None = None,
        layer_embeds: tuple[torch.Tensor, torch.Tensor] | None = None,
        raw_inputs: Sequence[Mapping[str, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """Run a step like `Model.forward`, with embeddings in place of token ids if given.

        `inputs_embeds` [num_tokens, hidden_size] replace `embed(input_ids)`. Steps without items pass none, so that the
        embedding layer stays inside captured graphs.

        `encoder_states` [n, hidden_size] are passed only to a model with a `Modality.cross`, and only in steps in which
        requests begin. They are the embeddings of these requests' items, concatenated. Layers of type ``cross`` call
        `attend` with the n keys and values computed from them, and with no keys and values in other steps.

        `position_offsets` [position_axes, num_tokens] int64 are passed only to a model with several position axes.
        Their sum with `positions` gives the positions of the rotary embeddings. Captured graphs include the sum, since
        only `positions` are advanced and corrected on the device.

        `layer_embeds` are passed only to a model with some, and only with `inputs_embeds`: indices [n] int64 of tokens,
        and values [layer_embeds, n, hidden_size] to be added to these tokens' hidden states after the first layers.

        `raw_inputs` are passed only to a model with a `Modality.raw`: the `inputs` of an item for each token, in host
        memory. Such a model serves tasks that pool, and its `encode` and `embed` are never called.
        """
        ...


class PruningModel(MultimodalModel, Protocol):
    """Protocol of a model that can do without some tokens of an item, such as those of a video that do not change."""

    def prune(self, item: ProcessedItem, rate: float) -> ProcessedItem:
        """Return an item of a prunable modality with fewer placeholder tokens. This is host work.

        `encode` returns as many embeddings of it, and `axis_positions` gives the tokens that are left their positions.

        Args:
            item: what `process` returned.
            rate: share of the tokens to leave out, above 0 and below 1. The item keeps at least the other share.
        """
        ...


class JoiningModel(MultimodalModel, Protocol):
    """Protocol of a model whose items have text at the ends of their `token_ids`, as line breaks around an image."""

    def join(self, left: Sequence[int], right: Sequence[int]) -> list[int]:
        """Return the tokens of two neighbouring pieces of a prompt, as the tokenizer makes them of their whole text.

        Only text on both sides of the joint may get other tokens, up to the next special token.
        """
        ...


class AdaptableModel(Model, Protocol):
    """Protocol of a model whose linear layers support adapters.

    Attributes:
        linears: path of each of these layers, as in the checkpoint's own model -> (in_features, out_features), in the
            order of a forward pass.
        merged_linears: tuples of layers computed by one product, in the order of its columns.
        embeddings: path of the input embedding -> (num_embeddings, embedding_dim). Empty if it supports no adapters. A
            model may lack this attribute and `extend`.
        adapter_stages: path of each linear layer and embedding -> its pipeline stage. Read only with several stages,
            from a family that declares `staged_adapters`.
        adapter_parts: path of each linear layer and embedding that is divided among the ranks of a tensor group -> this
            rank's part. Read only with a `ModelContext.shard`, by which the sizes of the others are the rank's own.
    """

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Sizes of the linear layers by path."""

    @property
    def merged_linears(self) -> tuple[tuple[str, ...], ...]:
        """Linear layers that one product computes."""

    @property
    def embeddings(self) -> Mapping[str, tuple[int, int]]:
        """Size of the input embedding by path."""

    @property
    def adapter_stages(self) -> Mapping[str, int]:
        """Pipeline stages of the layers by path."""

    @property
    def adapter_parts(self) -> Mapping[str, ModulePart]:
        """Parts of the divided layers by path."""

    def adapt(self, add: AddShares | None, names: Collection[str] = (), *, single: bool = False) -> None:
        """Call `add` after each of the linear layers and embeddings `names` from now on. None stops the calls.

        Args:
            add: called as ``add(names, inputs, out)`` with one layer's name, or with all names of one merged product,
                inputs [num_tokens, in_features] and out [num_tokens, all out_features], to which it adds in place. An
                embedding's inputs are token ids [num_tokens] int64. If the layer was extended and the step has few
                tokens, `inner` [num_tokens, rows] is the inputs' product with the rows after the weight. If the product
                is computed in parts, `inner` is [parts, num_tokens, rows] float32, and out is the first part.
            names: paths of the layers.
            single: True to multiply only the first `single_rows` of each room. Given only to a family that declares
                `single_adapter`.
        """
        ...

    def extend(
        self, names: tuple[str, ...], rows: int, max_tokens: int, *, single_rows: int = 0
    ) -> torch.Tensor | None:
        """Make room for more rows after the weight of one product of linear layers.

        In steps of up to `max_tokens` tokens in which the layers are adapted, their product includes these rows. The
        first `single_rows` of them are for steps of one adapter (see `adapt`), given only to a family that declares
        `single_adapter`.

        Returns:
            Zeros [rows, in_features] of the weight's dtype, to be written in place, or None if there can be no room.
        """
        ...

    def add_to_weight(self, name: str, delta: torch.Tensor) -> None:
        """Add `delta` to a weight in place, until `reload_weights`.

        `delta` is [out_features, in_features] for a linear layer and [num_embeddings, embedding_dim] for an embedding.

        Raises:
            slotline.registry.errors.ModelError: if another layer would change with it.
        """
        ...


class ModelFamily(Protocol):
    """Product of a model family's factory. It inspects checkpoints and loads models."""

    def inspect(self, path: Path) -> ModelFacts:
        """Read config.json and find the attention layers without reading weights.

        Raises:
            slotline.registry.errors.ModelError: if the folder is not a checkpoint of this family.

        A family that declares `quantized` is also called as ``inspect(path, quantized=True)``: the quantization
        configuration is served elsewhere then, and the facts list `weight_modules`.
        """
        ...

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        """Return the reason why a forward pass on this device in this dtype cannot be captured in a graph, or None.

        The reason is one sentence.
        """
        ...

    def load(self, context: ModelContext) -> Model:
        """Read the weights.

        Raises:
            slotline.registry.errors.ModelError: if weights are missing or do not fit.
        """
        ...


class InspectingFamily(ModelFamily, Protocol):
    """Family that declares `by_inspection`."""

    def takes_on(self, architecture: str) -> bool:
        """Return True if `inspect` can find out whether it serves an architecture outside the declared set."""
        ...
