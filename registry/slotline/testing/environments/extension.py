"""An extension under test, with a table of requests and the objects of made-up steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import NOTHING, fields

from slotline.core import SamplingParams
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.registry.contracts import ExtensionContext
from slotline.testing.check import Failed, Run

Int = npt.NDArray[np.int64]
MAX_REQUESTS, MAX_MODEL_LEN, VOCAB_SIZE = 8, 64, 40


class ExtendedEngine:
    """Requests in rows, and the extension. It does what an engine does with both, without a model."""

    def __init__(self, run: Run) -> None:
        self.run, self.rng = run, np.random.default_rng(run.seed)
        self.rows = RequestTable(MAX_REQUESTS, MAX_MODEL_LEN)
        self.device = run.subject.device.type
        self.extension: Any = run.subject.build(context_of(run, self.rows))
        self.number = 0

    def has(self, method: str) -> bool:
        """Return True if the extension has a method."""
        return hasattr(self.extension, method)

    def call(self, method: str, *given: Any) -> Any:
        """Return the answer of a method, None if the extension lacks it."""
        found = getattr(self.extension, method, None)
        return None if found is None else found(*given)

    def request(self, prompt_len: int = 5) -> Request:
        """Return a new request that asks nothing of the extension."""
        self.number += 1
        prompt = self.rng.integers(0, VOCAB_SIZE, prompt_len).tolist()
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        return Request(request_id=f"request {self.number}", prompt_token_ids=prompt, params=params)

    def join(self, prompt_len: int = 5) -> Request:
        """Return a new request that has been validated and admitted."""
        request = self.request(prompt_len)
        self.call("validate", request)
        self.rows.admit(request, 0)
        self.call("admit", request)
        return request

    def leave(self, request: Request) -> None:
        """End a request."""
        row = request.row
        self.call("release", row)
        self.rows.release(request)

    def limits(self, rows: Int, counts: Int) -> Int:
        """Return the answer of `limit_tokens` for arrays that cannot be written.

        Raises:
            Failed: if it is no array of integers from 0, one for each row.
        """
        rows, counts = frozen(rows), frozen(counts)
        found = np.asarray(self.extension.limit_tokens(rows, counts))
        if found.shape != rows.shape or found.dtype.kind not in "iu" or (found < 0).any():
            raise Failed(f"limit_tokens gave {found.dtype} {list(found.shape)}, expected integers from 0 [{len(rows)}]")
        return np.minimum(found.astype(np.int64), counts)

    def logits(self, inputs: ModelInputs) -> torch.Tensor:
        """Return the answer of `process_logits` for the logits of a step.

        Raises:
            Failed: if it has another shape, dtype or device, or the given logits were written.
        """
        logits = logits_of(inputs.logits_rows).to(self.device)
        before = logits.clone()
        found = self.extension.process_logits(logits, inputs)
        if not torch.equal(before, logits):
            raise Failed("process_logits wrote into its logits")
        if not isinstance(found, torch.Tensor):
            raise Failed(f"process_logits gave {found!r:.80}, expected a tensor")
        if (found.shape, found.dtype, found.device) != (logits.shape, logits.dtype, logits.device):
            raise Failed(f"process_logits gave {found.dtype} {list(found.shape)}, expected those of its logits")
        return found

    def scheduled(self, requests: Iterable[Request]) -> SchedulerOutput:
        """Return a step of one token of each request."""
        rows = np.array([request.row for request in requests], np.int64)
        return SchedulerOutput(
            rows=frozen(rows),
            num_scheduled=frozen(np.ones(len(rows), np.int64)),
            num_computed=frozen(self.rows.num_tokens[rows] - 1),
            num_tokens=len(rows),
            num_decodes=len(rows),
        )

    def inputs(self, requests: Iterable[Request]) -> ModelInputs:
        """Return the inputs of such a step. Fields that a plain step lacks are None."""
        rows = np.array([request.row for request in requests], np.int64)
        count, places = len(rows), torch.arange(len(rows), device=self.device)
        known = {
            "rows": frozen(rows),
            "num_scheduled": frozen(np.ones(count, np.int64)),
            "num_tokens": count,
            "num_padded_tokens": count,
            "input_ids": torch.zeros(count, dtype=torch.int64, device=self.device),
            "positions": torch.from_numpy(self.rows.num_tokens[rows] - 1).to(self.device),
            "logits_indices": places,
            "logits_indices_cpu": np.arange(count),
            "logits_rows": frozen(rows),
            "query_start_loc": torch.arange(count + 1, dtype=torch.int32, device=self.device),
            "query_start_loc_cpu": np.arange(count + 1, dtype=np.int32),
            "seq_lens_cpu": self.rows.num_tokens[rows].astype(np.int32),
            "batches": (),
            "sampling": SamplingMetadata.gather(self.rows, rows),
        }
        needed = {item.name: None for item in fields(ModelInputs) if item.init and item.default is NOTHING}
        return ModelInputs(**{**needed, **{name: value for name, value in known.items() if name in needed}})


def context_of(run: Run, rows: RequestTable | None = None) -> ExtensionContext:
    """Return the arguments of the factory."""
    return ExtensionContext(
        contract=1,
        rows=rows or RequestTable(MAX_REQUESTS, MAX_MODEL_LEN),
        max_requests=MAX_REQUESTS,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        device=run.subject.device.type,
        features=frozenset(run.subject.capabilities.requires) | {"chunked_prefill", "prefix_caching"},
    )


def frozen(array: Any) -> Any:
    """Return a copy of an array that cannot be written."""
    found = np.array(array)
    found.setflags(write=False)
    return found


def logits_of(rows: Int) -> torch.Tensor:
    """Return logits [n, VOCAB_SIZE] float32 that depend on the rows alone."""
    tokens = np.arange(VOCAB_SIZE)
    return torch.from_numpy(np.sin(rows[:, None] * 3.0 + tokens).astype(np.float32))
