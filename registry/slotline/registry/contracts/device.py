"""Contract of devices, version 1: the machine that tensors live on, and the operations that a step needs of it.

A device plugin fills the slot `device`. Its descriptor's name is the name that a configuration writes: `acme` serves
`device = "acme"` and `device = "acme:1"`. Its factory makes one `Device` for one such string.

`slotline.core.device.TorchDevice` implements all of `Device` with torch, and `TorchOps` all of `DeviceOps`. A new
device begins with both and replaces what pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from attrs import frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.declared import declared
from slotline.registry.descriptor import DeviceInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


@frozen(kw_only=True, field_transformer=declared)
class DeviceCapabilities:
    """Offer of a device.

    Attributes:
        dtypes: names of the torch dtypes that weights and activations may have.
        graphs: captured launches can be replayed without Python. The note says why not, where they cannot.
        streams: work that was launched goes on while the host prepares the next step.
        peer_copies: tensors of one device of this kind can be copied to another without passing the host.
        pinned_memory: the host can allocate memory that copies read while the host goes on.
        host_memory: the device computes in the host's memory. An upload is a view of the host's array then, and has no
            address that stays. A device with graphs must not declare it.
        priority: `device = "auto"` takes the device of the highest priority that this machine has.
        compatible_with: names of other devices whose plugins also run on this one. A backend for one of these devices
            is a candidate here, as if the machine were of that kind.
    """

    dtypes: Set[str] = Set(None)
    graphs: Flag = Flag(False)
    streams: Flag = Flag(False)
    peer_copies: Flag = Flag(False)
    pinned_memory: Flag = Flag(False)
    host_memory: Flag = Flag(False)
    priority: int = 0
    compatible_with: tuple[str, ...] = ()


@frozen(kw_only=True)
class DeviceContext:
    """Arguments of a device's factory.

    Attributes:
        contract: version that both sides speak.
        name: name of the descriptor, as `acme`.
        index: number of the device; None if the configuration names none. It is below the factory's `count()`.
        options: object of the descriptor's options class, or None.
    """

    contract: int
    name: str
    index: int | None = None
    options: Any = None


class DeviceFactory(Protocol):
    """Factory of a device plugin."""

    def count(self) -> int:
        """Return the number of devices of this kind that the machine has, 0 for none. It must not raise.

        A factory without this method, such as a function, has one device.
        """
        ...

    def __call__(self, context: DeviceContext) -> Device:
        """Return the device with the number `context.index`, or the current one if that is None."""
        ...


class Download(Protocol):
    """Tensor on its way to the host."""

    def wait(self) -> npt.NDArray[Any]:
        """Wait for this copy only, and return the array. The array is the caller's own."""
        ...


class TransferBuffer(Protocol):
    """Staged copies between host and device for one step.

    All arrays that are uploaded between `begin` and `flush` may travel in one copy. Arrays of equal sizes in equal
    order get equal addresses, unless the device declares `host_memory`.
    """

    def reserve(self, num_bytes: int) -> None:
        """Make room for the largest step. Each array takes its bytes, rounded up to a multiple of 16."""
        ...

    def begin(self) -> None:
        """Begin a step. Waits until the copies of the previous step are over, so that host buffers can be written."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return the array as a tensor on the device, of equal shape and dtype. `flush` fills it."""
        ...

    def flush(self) -> None:
        """Start the copy of all that was uploaded since `begin`."""
        ...

    def mark(self) -> None:
        """Note that all copies of this step's inputs have been started. The next `begin` waits for them."""
        ...

    def download(self, tensor: torch.Tensor) -> Download:
        """Start to bring a tensor to the host."""
        ...

    def landing(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host [count] that kernels of the device can write to."""
        ...

    def arriving(self, landed: torch.Tensor) -> Download:
        """Return the arrival of what the device has been told to write to `landed`, a part of a landing."""
        ...


class DeviceMemory(NamedTuple):
    """Memory of a device, in bytes: free, and in all."""

    free: int
    total: int


class PeakMemory(Protocol):
    """Memory that work took, in bytes, beyond what was in use before. It is known once the work is over."""

    peak: int


class Graph(Protocol):
    """Launches that are captured once and replayed without Python."""

    def begin(self) -> None:
        """Begin to capture what this thread launches, behind all that runs. Nothing has to run until `end`."""
        ...

    def end(self) -> None:
        """End the capture."""
        ...

    def replay(self) -> None:
        """Launch what was captured. It reads and writes the tensors of the capture, at their addresses."""
        ...


class GraphCapture(Protocol):
    """Session in which graphs are captured. Its graphs share the memory of what they compute.

    It is entered once. The graphs outlive it.
    """

    def __enter__(self) -> Self:
        """Make captures possible, for instance by a stream of their own."""
        ...

    def __exit__(self, *error: object) -> None:
        """Leave the stream."""
        ...

    def graph(self, *, replayed: bool = True) -> Graph:
        """Return an empty graph. One that is not `replayed` is captured to see what is launched, and dropped."""
        ...

    def finish(self) -> int:
        """Wait for the captures and return the bytes of device memory that all of them took."""
        ...


class CopyStream(Protocol):
    """Queue of copies that run while the device computes. A device without streams does them in order."""

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context in which copies are launched to this queue."""
        ...

    def wait_for_compute(self) -> None:
        """Let the copies that follow wait for all that has been launched to compute."""
        ...

    def compute_waits(self) -> None:
        """Let the computations that follow wait for all copies so far."""
        ...

    def record(self, *, copies: bool) -> Any:
        """Return an event: the end of all copies so far, or else of all computations so far."""
        ...

    def wait(self, event: Any, *, copies: bool) -> None:
        """Let the copies that follow, or else the computations, wait for an event."""
        ...


class TimePoint(Protocol):
    """Point in time of a device's work. Nothing waits for it."""

    @property
    def passed(self) -> bool:
        """Return True if the time has passed."""
        ...

    def until(self, later: Any) -> float:
        """Return the seconds until a later point of the same device. Both have passed."""
        ...


class CompiledKernel(NamedTuple):
    """Kernel that a launch waited for, since this process had not loaded it.

    Attributes:
        name: name of its function.
        seconds: time to compile it, or to load it from a cache on disk.
        on_disk: True if it was in a cache on disk.
    """

    name: str
    seconds: float
    on_disk: bool


MissingKernels = dict[Any, Any]
"""Kernels that launches lacked, in the words of the compiler that noted them."""


class KernelCompiler(Protocol):
    """Compiler of a device whose launches wait for kernels that this process has not loaded.

    The core records first steps without running them, to have their kernels compiled side by side, and tells when a
    step had to wait. All methods act for the thread that calls them.
    """

    def listen(self) -> None:
        """Notice from now on what is compiled. The core calls it again when other libraries may have been loaded."""
        ...

    def log_to(self, log: list[CompiledKernel] | None) -> list[CompiledKernel] | None:
        """Append this thread's kernels to a list from now on, None for no list, and return the previous list.

        It is called twice in each step.
        """
        ...

    def waited_for(self, kernels: Sequence[CompiledKernel]) -> None:
        """Log that a step waited for kernels."""
        ...

    def steps(
        self, max_tokens: int, max_requests: int, max_model_len: int
    ) -> Iterable[tuple[Sequence[int], int | None]]:
        """Return steps whose attention launches every kernel that a step may launch.

        Args:
            max_tokens: most tokens of a step.
            max_requests: most requests of a step.
            max_model_len: most tokens of a request with its past.

        Returns:
            For each step the query tokens of its requests, and the tokens that each of them has with its past. None
                stands for requests without a past.
        """
        ...

    def leaving_out(self, missing: MissingKernels) -> AbstractContextManager[None]:
        """Return a context in which this thread's launches that lack a kernel do nothing and are noted in `missing`."""
        ...

    def compile_all(self, missing: MissingKernels) -> None:
        """Compile what was noted. A kernel that fails is left to its launch."""
        ...


class SampledRows(Protocol):
    """Sampling parameters of n rows on the host, from which an operation may see what no row asks for.

    `temperature`, `top_p` and `log_floor` are [n] float32, `top_k` [n] int64. A temperature of 0 is greedy, a `top_k`
    of 0 and a `top_p` of 1 leave every token in, and `log_floor` is minus infinity for none.
    """

    @property
    def temperature(self) -> npt.NDArray[np.float32]:
        """Temperature of each row."""
        ...

    @property
    def top_k(self) -> npt.NDArray[np.int64]:
        """Number of tokens to keep of each row."""
        ...

    @property
    def top_p(self) -> npt.NDArray[np.float32]:
        """Probability mass to keep of each row."""
        ...

    @property
    def log_floor(self) -> npt.NDArray[np.float32]:
        """Least logit below the largest that is kept, of each row."""
        ...


class Drawn(NamedTuple):
    """Tokens that were drawn from logits.

    Attributes:
        tokens: [n] int64.
        final: the logits that they were drawn from, or None if not wanted.
        holds_nan: [n] bool, the rows that hold NaN. None says that no row does.
    """

    tokens: torch.Tensor
    final: torch.Tensor | None
    holds_nan: torch.Tensor | None


class Verified(NamedTuple):
    """Outcome of a step that verified drafts, [m] int64 on the device for each row that samples.

    Attributes:
        last: index among the logits of the last token that is accepted.
        newest: that token, 0 where the request ends with an error.
        positions: its position in the text.
        rejected: number of drafts that were rejected.
        previous: the token in front of the newest.
    """

    last: torch.Tensor
    newest: torch.Tensor
    positions: torch.Tensor
    rejected: torch.Tensor
    previous: torch.Tensor


class DecodeBatch(NamedTuple):
    """Device tensors of a decode step over n requests, which the next step overwrites.

    Attributes:
        positions: [n or more] int64.
        seq_lens: [n or more] int32.
        counters: [n or more, 4] int64, the packed parameters as 64-bit numbers, of which the last is the counter of a
            row's random numbers. Any tensor if not `drawn`.
        stride: growth of a counter in each step, modulo 2**64.
        changes: host memory that the device can read, int32.
        rows: [n] int64, permanent rows of the requests.
        table: [max_requests + 1, width] int32, block tables of all rows.
        taken: [max_requests + 1, width] int32, of which the first n rows are the block tables of the batch.
        slots: [n or more] int64, slot mapping.
        block_size: tokens in a kernel block.
        first: this is the first cache group, which advances positions and lengths too.
        drawn: some row draws, so that counters grow.
    """

    positions: torch.Tensor
    seq_lens: torch.Tensor
    counters: torch.Tensor
    stride: int
    changes: torch.Tensor
    rows: torch.Tensor
    table: torch.Tensor
    taken: torch.Tensor
    slots: torch.Tensor
    block_size: int
    first: bool
    drawn: bool


class DraftPlaces(NamedTuple):
    """Lengths and positions of a drafter's tokens, by offset behind the newest token.

    Attributes:
        seq_lens: [num_tokens, n] int32.
        positions: [num_tokens, n] int64.
        lead_positions: [2 * n] int64 of the token in front of the newest one and that one; [0] if not wanted.
    """

    seq_lens: torch.Tensor
    positions: torch.Tensor
    lead_positions: torch.Tensor


class TokenSampler(Protocol):
    """Draws for steps that want tokens and nothing else. There is one place for the tokens of a step.

    It may also have `expect(rows: SampledRows)`, which is called before each call with the sampling parameters of its
    rows.
    """

    def __call__(
        self, logits: torch.Tensor, params: torch.Tensor | None, stand_ins: torch.Tensor, *, captured: bool
    ) -> tuple[torch.Tensor, Download]:
        """Draw tokens, write them to the table of placeholders, and start them on their way to the host.

        Args:
            logits: [n or more, vocab_size] float32.
            params: [n, 8] int32 as in `DeviceOps.sample`, or None if all rows are greedy.
            stand_ins: [n] int64, indices in the table of placeholders.
            captured: the logits lie in a graph's memory, and will be found there again.

        Returns:
            Tokens [n] int64 on the device, overwritten by the next call, and their arrival.
        """
        ...


class DeviceOps(Protocol):
    """Operations of a step on one device. None of them waits for the device.

    The core takes them as bound methods when an engine is built, and calls those. Every tensor is on the device unless
    it is said otherwise. An operation must accept tensors that are not contiguous, no rows at all, and a vocabulary
    that is a multiple of nothing.
    """

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the first of the largest entries of each row [n, vocab_size], [n] int64. NaN counts as infinity."""
        ...

    def argmax_checked(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `argmax`, and which rows [n] bool hold NaN, or None if no row does."""
        ...

    def sample(
        self, logits: torch.Tensor, rows: SampledRows, params: torch.Tensor, *, keep_final: bool = False
    ) -> Drawn:
        """Draw one token for each row, by temperature, floor, top-k and top-p in this order.

        The draw inverts the cumulative distribution in the order of the tokens, at a number that depends on the seed
        and the position only.

        Args:
            logits: [n, vocab_size] float32, not changed. At least one row is not greedy.
            rows: the parameters on the host.
            params: [n, 8] int32, the parameters packed. See `slotline.core.batch.sampling_metadata.PackedParameters`.
            keep_final: the logits that are drawn from are wanted.
        """
        ...

    def apply_bitmask(
        self, logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor, *, in_place: bool = False
    ) -> torch.Tensor:
        """Return the logits with minus infinity for every token whose bit is 0.

        Args:
            logits: [n, vocab_size] float32. It is changed only if `in_place`.
            words: [m, ceil(vocab_size / 32)] int32, one bit for each token.
            rows: [m] int32, the distinct rows of logits that the words belong to.
        """
        ...

    def mark_unusable(
        self,
        logits: torch.Tensor,
        raw: torch.Tensor,
        touched: torch.Tensor | None,
        tokens: torch.Tensor,
        *,
        not_finite: int,
        none_left: int,
        all_greedy: bool,
    ) -> torch.Tensor:
        """Return the tokens with a negative number in rows where none could be drawn.

        Args:
            logits: [n, vocab_size] float32, after the logits processors; `raw` the same before them.
            touched: [n] bool, the rows to look at; None for all.
            tokens: [n] int64.
            not_finite: mark of a row whose largest logit is not finite and was finite in `raw` at the same place.
            none_left: mark of a row of minus infinities. It goes before `not_finite`.
            all_greedy: each token is the place of its row's largest logit, or of NaN.
        """
        ...

    def token_sampler(
        self, table: torch.Tensor, buffer: TransferBuffer, max_rows: int, vocab_size: int
    ) -> TokenSampler | None:
        """Return a sampler for steps that want tokens only, or None if the general way is as fast.

        Args:
            table: [vocab_size + max_requests] int64, the placeholders that the next step reads.
            buffer: of this device.
            max_rows: most rows of a step.
        """
        ...

    def put_rows(self, table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` [n, width] int32 over the distinct rows `rows` [n] int64 of `table` [m, width]."""
        ...

    def gather_rows(self, table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the rows `rows` [n] int64 of `table` [m, width] int32 to the first n rows of `out` [m, width]."""
        ...

    def advance_decode_batch(self, batch: DecodeBatch) -> Callable[[int, int], None] | None:
        """Return a function that turns a decode step's inputs into those of the step behind it, one token further.

        The function gets `at`, where the changes of this cache group begin in `batch.changes`, and `width`, the columns
        of each changed table, 0 if no table changed. From `at` on lie n numbers, the index of each request's change or
        -1, then the first columns of the changed tables [changes, width]. The function takes them into `table` and
        `taken`. Positions and lengths grow by one if this is the `first` group, and counters by `stride`. Slots follow
        from the new positions.

        None says that steps are prepared on the host each time.
        """
        ...

    def subtract_rejected(
        self,
        rejected: torch.Tensor,
        rows: torch.Tensor,
        owners: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        accepted: torch.Tensor | None,
        groups: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
    ) -> None:
        """Turn upper bounds of lengths and positions into exact numbers, in place.

        Args:
            rejected: [max_requests + 1] int64, rejected drafts of each row.
            rows: [num_requests + 1] int64, the row of each request.
            owners: [num_tokens] int64, the request of each token. `num_requests` is a padded token's.
            positions: [num_tokens] int64.
            seq_lens: [num_requests] int32.
            accepted: [num_requests] int32, which shrinks as `seq_lens` does; or None.
            groups: of each cache group its block table [num_requests, width] int32, its slots [num_tokens] int64, which
                are found anew unless negative, and the tokens in a kernel block.
        """
        ...

    def verify_drafts(
        self,
        sampled: torch.Tensor,
        drafts: torch.Tensor | None,
        expected: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        input_ids: torch.Tensor,
        logits_indices: torch.Tensor,
        table: torch.Tensor,
        rejected: torch.Tensor,
        max_drafts: int,
    ) -> Verified:
        """Accept the drafts that equal what was sampled, and note each row's newest token and its rejected drafts.

        Args:
            sampled: [num_logits] int64, the token at each place; negative where none could be drawn.
            drafts: [num_logits] int64, the draft at each place, -1 behind a row's last; None if nothing was drafted.
            expected: [4 or more, m] int64: of each row its first place, its drafts, its known tokens, its placeholder.
            rows: [m] int64, distinct permanent rows.
            places: [num_logits] int64, index in `rows` of each place.
            input_ids: [num_tokens] int64, the step's tokens or their placeholders.
            logits_indices: [num_logits] int64, the token of each place.
            table: [size] int64, the token of each id. The placeholders' entries get the newest tokens.
            rejected: [max_requests + 1] int64, written for `rows`.
            max_drafts: most drafts of a row.
        """
        ...

    def fill_drafts(
        self,
        found: torch.Tensor,
        newest: torch.Tensor,
        stand_ins: torch.Tensor,
        table: torch.Tensor,
        max_drafts: int,
        vocab_size: int,
    ) -> torch.Tensor:
        """Return a drafter's answer, and behind it the drafts as the next step reads them.

        Entries that are no token of the vocabulary, and columns that are missing, become the newest token.

        Args:
            found: [n, columns] integers, at most `max_drafts` columns.
            newest: [n] int64.
            stand_ins: [n] int64, the placeholder of each row's newest token. Those of its drafts follow it.
            table: [size] int64, which keeps the drafts.
            max_drafts: most drafts of a row.

        Returns:
            [n, columns + max_drafts] int64.
        """
        ...

    def draft_places(
        self,
        found: DraftPlaces,
        slots: torch.Tensor,
        lead_slots: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        block_size: int,
        max_model_len: int,
    ) -> None:
        """Find where a drafter's tokens lie in a cache group, and write it into `found`, `slots` and `lead_slots`.

        Token j of a request is at its position plus j. A place without a block (block 0), or behind the longest
        sequence, gets the slot -1. A negative position is no request's: its length is 0 and its slots are -1.

        Args:
            found: lengths and positions, of all cache groups.
            slots: [num_tokens, n] int64.
            lead_slots: [2 * n] int64, for the token in front of the newest one and that one; [0] if not wanted.
            positions: [n] int64 of the newest tokens.
            table: [n, width] int32, block tables.
            block_size: tokens in a kernel block.
            max_model_len: tokens of the longest sequence.
        """
        ...


class Device(Protocol):
    """One device.

    Attributes:
        name: as the configuration would write it, with its number if it has one: `acme:0`.
        torch_device: torch device string of its tensors.
        ops: its operations.
    """

    name: str
    torch_device: str
    ops: DeviceOps

    def info(self) -> DeviceInfo:
        """Return the facts that other plugins and the plan are told."""
        ...

    def memory(self) -> DeviceMemory:
        """Return free and total memory in bytes."""
        ...

    def measure_peak(self) -> AbstractContextManager[PeakMemory]:
        """Return a context that measures the peak memory of the work in it."""
        ...

    def release_cached(self) -> None:
        """Give back memory that an allocator holds and no tensor needs."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was launched is over."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context in which this device is the current one."""
        ...

    def is_capturing(self) -> bool:
        """Return whether launches of this thread are being captured."""
        ...

    def copy_stream(self) -> CopyStream:
        """Return a new queue of copies."""
        ...

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory of the device, [num_bytes] uint8, for caches."""
        ...

    def host_empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory [count] that copies to the device read without waiting, pinned if there is such memory."""
        ...

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy a small array to the device without waiting for what was launched before."""
        ...

    def transfer_buffer(self) -> TransferBuffer:
        """Return a new buffer for the copies of steps."""
        ...

    def graph_capture(self) -> GraphCapture:
        """Return a new session for captures. It is called only if the device declares graphs."""
        ...

    def compiler(self) -> KernelCompiler | None:
        """Return the compiler that launches wait for, None if they wait for none. A device may lack this method."""
        ...

    def time_point(self) -> TimePoint:
        """Return the time at which all that was launched so far is over.

        For a device without this method it is the time of the call.
        """
        ...
