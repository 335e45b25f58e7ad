"""The step extension contract, version 1: features that take part in a step without a change of the core.

An extension is an object with any of the methods of `StepExtension`. The engine resolves them once, when it is built,
into tuples of bound methods in the declared order. An engine without extensions has empty tuples. Leave out the methods
that the extension does not need.

Example: an extension that limits a request to some tokens for each second of wall time has `validate`, `admit`,
`release` and `limit_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from slotline.registry.capability import Set
from slotline.registry.declared import declared
from slotline.registry.errors import ContractError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

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


@frozen(kw_only=True, field_transformer=declared)
class ExtensionCapabilities:
    """Capabilities that an extension declares.

    Attributes:
        devices: device types on which it runs.
        parameters: keys of `SamplingParams.extra_args` that it consumes.
        provides: names of features that other extensions may require or exclude.
        requires: names of features without which it cannot work, out of `FEATURES` or provided by another extension.
        excludes: names of features beside which it cannot work.
        order: extensions run in ascending order. Ties are ordered by name.
    """

    devices: Set[str] = Set(None)
    parameters: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    excludes: tuple[str, ...] = field(default=())
    order: int = 100

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
    """

    contract: int
    rows: Any
    max_requests: int
    max_model_len: int
    vocab_size: int
    device: str
    features: frozenset[str] = field(factory=frozenset)
    options: Any = None


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

        Args:
            rows: [n] int64, rows of the running requests in scheduling order.
            counts: [n] int64, tokens that each has left to compute, drafts included.

        Returns:
            [n] integers. 0 leaves a request out of the step. A number above `counts` is no limit.
        """
        ...

    def before_step(self, scheduled: Any) -> Any:
        """Return the step to run: the given `SchedulerOutput`, or one without some of its rows."""
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
