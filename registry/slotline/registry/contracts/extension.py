"""The step extension contract, version 1: features that take part in a step without a change of the core.

An extension is an object with any of the methods of `StepExtension`. The engine resolves them once, when it is built,
into tuples of bound methods in the declared order. An engine without extensions has empty tuples. Leave out the methods
that the extension does not need.

Example: an extension that limits a request to some tokens for each second of wall time has `validate`, `admit`,
`release` and `limit_tokens`.

A feature of a plan, for instance adapters or pooling, is carried by the extension that has the feature's name. Such an
extension may also have the methods of `FeatureExtension`, which reach into admission, recovery and the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from slotline.registry.capability import Set
from slotline.registry.declared import declared
from slotline.registry.errors import ContractError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from slotline.registry.contracts.block_events import BlockEvents
    from slotline.registry.contracts.kv_connector import CacheBlock

FEATURES = (
    "adapters",
    "async_scheduling",
    "chunked_prefill",
    "drafts",
    "graphs",
    "pipeline",
    "pooling",
    "prefix_caching",
    "states",
)
"""Features of a plan that an extension can require or exclude. Names in `provides` are added to them."""

CARRIED: tuple[str, ...] = (
    "cascade",
    "adapters",
    "block_events",
    "context_shards",
    "drafts",
    "freed_tokens",
    "guidance",
    "kv_scales",
    "kv_transfer",
    "microbatches",
    "multimodal",
    "pipeline_ranks",
    "pooling",
    "prefix_waits",
    "prompt_embeds",
    "repeated_steps",
    "states",
    "structured_output",
)
"""Features of a plan that an extension of the same name carries. It is built if the plan has the feature."""

METHODS = (
    "validate",
    "admit",
    "release",
    "limit_tokens",
    "before_step",
    "prepare_inputs",
    "plan",
    "forward_kwargs",
    "process_logits",
    "after_sample",
    "commit",
    "check",
)
"""Methods of `StepExtension` in the order in which a step calls them."""

FEATURE_METHODS = (
    "engine_ready",
    "outside_steps",
    "prepare_request",
    "followers",
    "linked",
    "enter",
    "leave",
    "defer",
    "collect_ready",
    "measured",
    "acquire",
    "give_back",
    "first_waiting",
    "before_schedule",
    "requeue",
    "limit_prefix",
    "limit_prefix_of",
    "limit_prompt",
    "begin_request",
    "trim_tokens",
    "unschedule",
    "find_blocks",
    "fill_block",
    "block_evicted",
    "blocks_filled",
    "held_blocks",
    "block_events",
    "forget_prefixes",
    "step_variants",
    "captured_variants",
    "graph_variant",
    "needs_eager",
    "gather_shortcut",
    "gather",
    "staging_bytes",
    "capture_kwargs",
    "captured_inputs",
    "prepare_captured",
    "computed_by",
    "wrap_forward",
    "output_head",
    "profile_memory",
    "launched",
    "plan_logits",
    "begin_logits",
    "wants_all_hidden",
    "leaves_logits",
    "ban_tokens",
    "process",
    "restrictions",
    "revise_tokens",
    "recompute",
    "roll_back",
    "advance",
    "after_step",
    "restore",
    "resume",
    "reset",
)
"""Methods that `FeatureExtension` adds."""

SPEC_METHODS = (
    "bind_caches",
    "rehearse",
    "capture_graphs",
    "arrange_spec_tokens",
    "take_results",
    "settle_step",
    "wants_final_logits",
    "keep_states",
    "extend_pending",
    "accept_tokens",
)
"""Methods that `SpecDecodeExtension` adds."""


@frozen(kw_only=True, field_transformer=declared)
class ExtensionCapabilities:
    """Capabilities that an extension declares.

    Attributes:
        devices: device types on which it runs.
        parameters: keys of `SamplingParams.extra_args` that it consumes.
        inputs: names of further arguments of `Engine.add` that it consumes, kept in `Request.inputs`.
        provides: names of features that other extensions may require or exclude.
        requires: names of features without which it cannot work, out of `FEATURES` or provided by another extension.
        excludes: names of features beside which it cannot work.
        order: extensions run in ascending order. Ties are ordered by name.
        needs_caches: whether it is built only after the caches, with `parts.memory`. It then takes no part in the
            steps over which memory is measured.
        block_events: whether it hears of blocks that change hands. It has the method `block_events` then.
        prefix_events: whether it reads which prefixes became findable and which were lost. The pool of `parts.memory`
            gives it a log then, by its method `listen`. It needs the caches.
        frees_tokens: whether it frees tokens in the middle of requests, by `freed_tokens` of
            `slotline.builder.freed_tokens`. It needs the caches then. If its options have a true attribute
            `reads_scores`, attention backends must declare `scores`.
    """

    devices: Set[str] = Set(None)
    parameters: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    excludes: tuple[str, ...] = field(default=())
    order: int = 100
    needs_caches: bool = False
    block_events: bool = False
    prefix_events: bool = False
    frees_tokens: bool = field(default=False)

    @frees_tokens.validator
    def _has_caches(self, _attribute: object, value: bool) -> None:
        if value and not self.needs_caches:
            raise ContractError(
                "ExtensionCapabilities.frees_tokens without needs_caches: it moves what the caches hold",
                fix="declare needs_caches=True too",
            )

    @excludes.validator
    def _not_both(self, _attribute: object, value: tuple[str, ...]) -> None:
        if both := sorted({*value} & {*self.requires, *self.provides}):
            raise ContractError(
                f"ExtensionCapabilities.excludes names {', '.join(both)}, which it requires or provides",
                fix="correct one of the two",
            )


@frozen(kw_only=True)
class ExtensionContext:
    """Input of an extension's factory.

    Attributes:
        contract: version of the contract.
        rows: `slotline.core.batch.request_table.RequestTable`, the numbers of all admitted requests by row. Read only.
        max_requests: rows of the table.
        max_model_len: tokens of the longest request.
        vocab_size: logits of a token.
        device: device string of the step's tensors.
        features: names of the features that the plan has.
        options: the extension's own table, typed by the plugin.
        parts: `slotline.builder.parts.Parts`, the built parts of the engine so far. None outside of an engine.
    """

    contract: int
    rows: Any
    max_requests: int
    max_model_len: int
    vocab_size: int
    device: str
    features: frozenset[str] = field(factory=frozenset)
    options: Any = None
    parts: Any = None


class StepExtension(Protocol):
    """Methods by which an extension takes part in a step. Each is optional.

    Requests are `slotline.core.batch.request.Request`. A request has a permanent `row` from its admission until it
    ends, also while it is preempted.
    """

    def validate(self, request: Any) -> None:
        """Check a new request, before it takes anything.

        Raises:
            RequestError: naming the parameter, its value and the remedy. The request is not queued.
        """
        ...

    def admit(self, request: Any) -> None:
        """Prepare for a request that joins its first step. It has its row. An error ends this request only."""
        ...

    def release(self, row: int) -> None:
        """Forget a row whose request has ended. Also called for a row that was never prepared."""
        ...

    def limit_tokens(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the most tokens that each running request may compute in this step.

        The last extension is asked first, so that an early one sees what the others leave.

        Args:
            rows: [n] int64, rows of the running requests in scheduling order.
            counts: [n] int64, tokens that each has left to compute, drafts included.

        Returns:
            [n] integers. 0 leaves a request out of the step. A number above `counts` is no limit.
        """
        ...

    def before_step(self, scheduled: Any) -> Any:
        """Return the step to run: the given `SchedulerOutput`, or one without some of its rows.

        Requests that it adds to `failed`, each with its error, end before the step runs.
        """
        ...

    def prepare_inputs(self, inputs: Any) -> Any:
        """Return the step's `ModelInputs`: the given ones, or a copy with other values."""
        ...

    def plan(self, inputs: Any) -> None:
        """Plan the extension's own kernels for a step, before its forward pass."""
        ...

    def forward_kwargs(self, inputs: Any) -> Mapping[str, Any]:
        """Return keyword arguments for the model's forward pass. The extension has to exclude `graphs`."""
        ...

    def process_logits(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Return the logits to sample from, [num_logits, vocab_size] in the dtype and on the device of `logits`.

        Logits processors and grammars have been applied. Do not write into `logits`. The rows are
        `inputs.logits_rows`, [num_logits] int64.
        """
        ...

    def after_sample(self, pending: Any) -> None:
        """Look at a step's `PendingSample`, whose tokens are still being drawn. Do not wait for the device."""
        ...

    def commit(self, output: Any) -> None:
        """Look at a step's `StepOutput` before its tokens are handed out."""
        ...

    def check(self) -> None:
        """Check the extension's own state between two steps, under `observability.check_integrity`.

        Raises:
            IntegrityError: naming what does not fit.
        """
        ...


class FeatureExtension(StepExtension, Protocol):
    """Further methods of an extension that carries a feature of the plan. Each is optional.

    `Request.inputs` holds what `Engine.add` was given beside prompt and parameters, by name. An extension may keep what
    belongs to a request there too. An attribute `notes`, a tuple of texts, is shown with the plan.
    """

    def engine_ready(self) -> None:
        """Complete the extension. The engine is built, and its graphs are captured."""
        ...

    def outside_steps(self, call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return one of the model's functions for calls outside of its forward pass, as a drafter makes them.

        Args:
            call: the embedding or the output projection, as a step calls it.
        """
        ...

    def prepare_request(self, request: Any) -> None:
        """Complete a new request before any check, for instance by parameters of another kind than sampling.

        Raises:
            RequestError: naming the parameter, its value and the remedy. The request is not queued.
        """
        ...

    def followers(self, request: Any) -> Sequence[Any]:
        """Return requests that are computed together with a validated one. They are checked and queued with it.

        Their `leader` is the request, and their `role` names their prompt in messages.
        """
        ...

    def linked(self, request: Any) -> Sequence[Any]:
        """Return the other requests that are admitted, preempted and ended together with a request."""
        ...

    def enter(self, request: Any) -> None:
        """Take what a request needs from its queueing to its end. An error refuses the request."""
        ...

    def leave(self, request: Any) -> None:
        """Give back what `enter` or `acquire` took. The request has ended, or could not be queued."""
        ...

    def defer(self, request: Any) -> bool:
        """Return True to keep an entered request until `collect_ready` hands it over, instead of queueing it now.

        This is asked again for all unfinished requests after an exception escaped from a step, before `restore`.
        """
        ...

    def collect_ready(
        self, *, idle: bool, gives_way: Callable[[], bool]
    ) -> tuple[Sequence[Any], Sequence[tuple[Any, BaseException]]]:
        """Return the deferred requests that may be queued, and those that failed, with their errors.

        Args:
            idle: the engine has nothing else to do, so that waiting is right.
            gives_way: returns True once another thread wants the engine.
        """
        ...

    def measured(self) -> Any:
        """Return what this rank has measured since the last call and decides by, nothing if it is false.

        With several ranks the first one is asked before each step. What it gives, which can be pickled, goes to the
        method `learn` of the extension on all ranks, so that they decide alike.
        """
        ...

    def acquire(self, request: Any, *, passing: bool) -> bool:
        """Take what a request needs to run, before it gets a row. Return False to let it wait.

        Args:
            passing: another request before it has to wait, so that this one would pass it.
        """
        ...

    def give_back(self, request: Any) -> None:
        """Give back what `acquire` took. The request was not admitted after all."""
        ...

    def first_waiting(self, rows: npt.NDArray[np.int64]) -> Any | None:
        """Return a waiting request that is admitted before all others, for the running `rows` [n], or None."""
        ...

    def before_schedule(self, rows: npt.NDArray[np.int64]) -> Sequence[tuple[int, Exception]]:
        """Work between two steps, before the next one is scheduled.

        Args:
            rows: [n] int64, rows of the running requests.

        Returns:
            Rows whose requests are to end, each with the error.
        """
        ...

    def requeue(self) -> Sequence[Any]:
        """Return running requests that must be computed again though no step has failed.

        Called while a step is scheduled, before anything is chosen. They are queued again, as if preempted.
        """
        ...

    def limit_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return the longest of some prefixes after which a request can resume, 0 for none.

        Args:
            hashes: of the prefixes of 1, 2, ... units, a unit being whole blocks of each cache group.
        """
        ...

    def limit_prefix_of(self, request: Any, hashes: Sequence[bytes]) -> int:
        """Return what `limit_prefix` returns, for a request. Prefixes may be those that a step could resume from later.

        Args:
            request: the request, with a row if it had one before.
            hashes: as for `limit_prefix`.
        """
        ...

    def limit_prompt(self, request: Any, computed: int, count: int) -> int | None:
        """Return the tokens of a waiting request's first step, at most `count`, after `computed` cached ones.

        None lets it wait. 0 admits it without any work in this step. The last extension is asked first.
        """
        ...

    def begin_request(self, request: Any, computed: int) -> None:
        """Set up a request that begins to run, or runs again, after `computed` cached tokens.

        It has its row and blocks. An error ends this request only.
        """
        ...

    def trim_tokens(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the tokens that running requests compute in a step, each at most the given number.

        Called after `limit_tokens` and the step's budget.

        Args:
            rows: [n] int64, as for `limit_tokens`.
            counts: [n] int64, tokens of each in this step.
        """
        ...

    def unschedule(self, request: Any) -> None:
        """Forget what was taken for a request's steps.

        It lost its blocks, by preemption or since it ended, or it was not admitted and has none.
        """
        ...

    def find_blocks(self, request: Any, group: int, hashes: Sequence[bytes]) -> Collection[bytes]:
        """Return those of `hashes` whose block the pool does not hold and the extension can fill.

        Called while a request's cached prefix is looked up. One extension of an engine may have this method.

        Args:
            request: the request, with a row if it had one before.
            group: index of the cache group.
            hashes: of prefixes that end with a block of the group.
        """
        ...

    def fill_block(self, block: CacheBlock) -> None:
        """Fill a new block of the pool before the next forward pass. `find_blocks` named its hash."""
        ...

    def block_evicted(self, block: CacheBlock) -> None:
        """Note that the pool is about to reuse a cached block. The next forward pass may overwrite it."""
        ...

    def blocks_filled(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Note blocks of a cache group that became full, with the hashes by which they are found from now on."""
        ...

    def held_blocks(self) -> Collection[int]:
        """Return the blocks of the pool that the extension holds a reference of. Read by the integrity checker."""
        ...

    def block_events(self, events: Sequence[BlockEvents]) -> None:
        """Hear which blocks of the pool were returned, given, restored and loaded since the last step.

        Called before a step's forward pass, if anything has happened. The extension declares `block_events`. Do not
        wait for the device. A block may be returned of which nothing was heard, since an exception escaped from a step.

        Args:
            events: of each cache group in which there are any.
        """
        ...

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes."""
        ...

    def step_variants(self) -> Sequence[int]:
        """Return the variants that `graph_variant` may return, in ascending order, 0 included."""
        ...

    def captured_variants(self, query_len: int) -> Sequence[int]:
        """Return the variants that graphs are captured for, in ascending order.

        Args:
            query_len: tokens of each request of a batch. 0 for batches in which they differ.
        """
        ...

    def graph_variant(self, rows: npt.NDArray[np.int64]) -> int:
        """Return the variant of captured graphs that a step of `rows` [n] needs. 0 is the plain one.

        A larger variant serves the steps of a smaller one too. One extension of an engine may have this method.
        """
        ...

    def needs_eager(self, scheduled: Any) -> bool:
        """Return True if a step cannot be replayed from a captured graph."""
        ...

    def gather_shortcut(self, preparer: Any) -> Any:
        """Return a `GatherShortcut`, which knows the inputs of some steps without a gather, or None for no step.

        Called once for each preparer, when the engine is built.

        Args:
            preparer: `slotline.core.model_runner.input_preparer.InputPreparer`, whose module has the protocol.
        """
        ...

    def gather(self, batch: Any, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> Any:
        """Return what `ModelInputs.extras` holds under the extension's name: arrays of a step, uploaded with its copy.

        Args:
            batch: `slotline.core.batch.input_batch_cpu.InputBatchCPU`, padded to the captured shape.
            upload: adds an array to the step's one copy to the device and returns the tensor there.
        """
        ...

    def staging_bytes(self, max_tokens: int) -> int:
        """Return the bytes that `gather` uploads at most in a step of `max_tokens` tokens."""
        ...

    def capture_kwargs(self, inputs: Any, broken: frozenset[str], cut: Callable[[Callable[[], None]], None]) -> Any:
        """Return keyword arguments for a forward pass that is being captured, as `forward_kwargs` for an eager one.

        Args:
            broken: names of groups whose calls cannot be captured.
            cut: ends the running capture, keeps a call, and begins another capture after it.
        """
        ...

    def output_head(self, runner: Any) -> Any:
        """Return the `OutputHead` that ends each step in place of sampling. One extension may have this method.

        Args:
            runner: `slotline.core.model_runner.model_runner.ModelRunner`, whose attributes are set. Its `head` samples.
        """
        ...

    def wrap_forward(self, runner: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that plans and runs a step's forward pass in place of `forward`. Called once.

        The function of the first extension calls that of the second, and so on.

        Args:
            runner: `slotline.core.model_runner.model_runner.ModelRunner`.
            forward: a `ForwardPass` of that module, as the function to return.
        """
        ...

    def profile_memory(self) -> Any:
        """Run the largest work of the extension beside forward passes, while the memory of a step is measured.

        Called once, on a device that works on its own, before there is a cache.

        Returns:
            What may be allocated at the same time as the largest step, for the caller to hold while it runs that.
        """
        ...

    def captured_inputs(self, inputs: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors of `gather` that captured calls read. They lie at the same addresses in each step.

        For this the shapes of what `gather` uploads may depend only on the shape of the captured step.
        """
        ...

    def prepare_captured(self, inputs: Any) -> Any:
        """Return the inputs of a made-up step whose forward pass is captured, as `prepare_inputs` for a real one."""
        ...

    def computed_by(self) -> Sequence[str]:
        """Return the full names of plugins whose output a forward pass is made of, for messages."""
        ...

    def launched(self, scheduled: Any) -> None:
        """Note that a step's forward pass has been launched."""
        ...

    def plan_logits(self, inputs: Any, indices: torch.Tensor) -> None:
        """Plan the extension's own kernels for the logits of some of a step's tokens.

        Args:
            inputs: `ModelInputs` of the step.
            indices: [n] int64 on the device of the logits, the tokens' places in the step.
        """
        ...

    def begin_logits(self, inputs: Any) -> None:
        """Prepare the work on a step's logits on the host, while its forward pass is about to run on the device."""
        ...

    def wants_all_hidden(self, inputs: Any) -> bool:
        """Return True if hidden states of all tokens of a step are needed, and not only of those that sample."""
        ...

    def leaves_logits(self, inputs: Any) -> bool:
        """Return True if the extension neither reads nor changes the logits of a step but in `ban_tokens`.

        All earlier tokens are known. If all extensions leave the logits, `process` is not called for the step, and its
        tokens are drawn in the fastest way, without a search for rows that have no token left.
        """
        ...

    def ban_tokens(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Return the logits [num_logits or more, vocab_size] with minus infinity for tokens that may not be drawn.

        Called where all extensions have left a step's logits. They may be changed in place. At least one token of each
        row must be left.
        """
        ...

    def process(self, processed: Any, inputs: Any) -> Any:
        """Return `Processed` logits: those given, or others with their touched rows and errors."""
        ...

    def restrictions(self, row: int) -> Sequence[str]:
        """Return the names of parameters by which `process` bans tokens of a row, for the error if none is left."""
        ...

    def revise_tokens(self, tokens: torch.Tensor, final: torch.Tensor | None, inputs: Any) -> torch.Tensor:
        """Return the drawn tokens [num_logits] int64 after a decision on them, on their device.

        Args:
            tokens: [num_logits] int64.
            final: [num_logits, vocab_size] float32, the logits that they were drawn from, if they were kept.
            inputs: `ModelInputs` of the step.
        """
        ...

    def recompute(self) -> Sequence[Any]:
        """Return running requests that must be computed again, once a step's device work is done.

        Called before the results of the step are used. These requests lose theirs, as if they had been preempted.
        """
        ...

    def roll_back(
        self,
        rows: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        accepted: npt.NDArray[np.int64],
        verified: npt.NDArray[np.bool_],
    ) -> None:
        """Keep only the first tokens that a step computed. Called if a step may compute tokens that do not stand.

        Args:
            rows: [n] int64, the step's rows in its order.
            counts: [n] int64, tokens that it computed of each.
            accepted: [n] int64, the leading ones of these that stand.
            verified: [n] bool, True for rows whose tokens were in question.
        """
        ...

    def advance(
        self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32], ended: Mapping[int, tuple[str, Any]]
    ) -> Mapping[int, tuple[str, Any]]:
        """Take in a token of each of `rows` [n]. Return the rows that end with it, each with reason and cause.

        Args:
            ended: rows that end for another reason.
        """
        ...

    def after_step(self, output: Any, generations: npt.NDArray[np.int64]) -> None:
        """Work after a step's tokens were handed out.

        Args:
            output: its `StepOutput`.
            generations: [max_requests] int64, of all rows when it was started. A row whose generation has changed since
                belongs to another request or begins anew.
        """
        ...

    def restore(self, requests: Sequence[Any]) -> None:
        """Make the extension's state again from the unfinished requests, after an exception escaped from a step."""
        ...

    def resume(self, request: Any, token_ids: Sequence[int]) -> None:
        """Make the state of a request with a row that of its output `token_ids`. An error ends this request."""
        ...

    def reset(self) -> None:
        """Forget what was computed with the model's old weights. No request is unfinished."""
        ...


class SpecDecodeExtension(FeatureExtension, Protocol):
    """Further methods of an extension that has a step verify tokens after the known ones. Each is optional.

    These tokens stand in `RequestTable.token_ids` after the known ones, `RequestTable.num_spec_tokens` of a row. A step
    computes a logits row after the last known token and after each of them. If blocks or tokens of a step run out, the
    scheduler drops them first.
    """

    def bind_caches(self, router: Any) -> Any:
        """Return the extension for these caches: this one, or another that takes its place.

        It is called twice when an engine is built: with caches of one block, over which memory is measured, and with
        those of the requests.

        Args:
            router: `slotline.core.model_runner.attention_dispatcher.AttentionDispatcher`.
        """
        ...

    def rehearse(self, output: Any) -> None:
        """Take the memory that the largest step takes, after a made-up step with this `StepOutput`."""
        ...

    def capture_graphs(self, graphs: Any, *, progress: bool) -> None:
        """Capture the extension's own graphs, once those of the model's `GraphRunner` are captured."""
        ...

    def arrange_spec_tokens(self, batch: Any) -> Any:
        """Return an `InputBatchCPU` with tokens to verify: the given one, or a copy that places them in another way."""
        ...

    def take_results(self) -> torch.Tensor | None:
        """Return what a forward pass left for the extension, [num_padded_tokens, ...], and forget it.

        `ForwardOutput.extras` holds it under the extension's name. It is kept with a captured pass, and a replay
        overwrites it.
        """
        ...

    def settle_step(self, launched: Any, scheduled: Any, generations: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Return a `ForwardOutput` and its `SchedulerOutput` with exact numbers. All earlier tokens are known by now.

        Args:
            launched: the forward pass, which the device may still be running.
            scheduled: the step.
            generations: [max_requests] int64, as for `after_step`.
        """
        ...

    def wants_final_logits(self, inputs: Any) -> bool:
        """Return True if `revise_tokens` needs the logits that the tokens are drawn from."""
        ...

    def keep_states(self, launched: Any, states: torch.Tensor) -> Any:
        """Return what `PendingSample.extras` and `StepOutput.extras` hold under the extension's name.

        Args:
            launched: `ForwardOutput`.
            states: [num_logits, hidden_size], the hidden states of the tokens that sample.
        """
        ...

    def extend_pending(self, pending: Any) -> Any:
        """Return the step's `PendingSample` after work on tokens that only the device knows. Do not wait for it."""
        ...

    def accept_tokens(
        self, pending: Any, token_ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """Return the logits rows whose tokens their requests get, and how many computed tokens these keep.

        Args:
            pending: `PendingSample` of a step that verifies tokens.
            token_ids: [num_logits] int64, the drawn tokens.

        Returns:
            [n] int64, ascending logits rows, for each request the one after its last known token first. And [n] int64,
            the verified tokens up to each whose keys and values count as computed, or None for all.
        """
        ...
