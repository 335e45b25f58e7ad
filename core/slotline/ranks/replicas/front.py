"""What takes requests: an engine of this process, or the front of its replicas."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slotline.builder.engine_builder import log_warnings
from slotline.builder.prefix_log import tells_prefixes
from slotline.builder.request_services import build_parser, limits_of, load_tokenizer
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.engine.engine import Engine
from slotline.core.engine.stop_checker import StopChecker
from slotline.planner.experts import replicas_share_experts
from slotline.planner.plan import make_plan
from slotline.planner.ranks import layout_of
from slotline.ranks.launchers import refuse_replicas_elsewhere
from slotline.ranks.replicas.front_requests import SentRequest
from slotline.ranks.replicas.growth import Growth, ScaleReport
from slotline.ranks.replicas.held_prefixes import told_blocks
from slotline.ranks.replicas.replica_front import FrontHandOut, ReplicaFront
from slotline.ranks.replicas.replica_links import ReplicaLinks
from slotline.ranks.replicas.reports import Load, load_of
from slotline.ranks.replicas.router import BLOCK, Router
from slotline.ranks.replicas.shared_growth import SharedGrowth
from slotline.ranks.start import end_engine, start_engine
from slotline.ranks.start import failure_of as failure_of_engine
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import ConfigError, RequestError, SlotlineError
from slotline.registry.ranks import Place

Front = Engine | ReplicaFront
_MARGIN = 4
"""Steps' worth of tokens that a replica may have beyond the least loaded."""
_PAUSE = 0.02
"""Seconds between two looks at requests of replicas that are to end."""
logger = logging.getLogger("slotline")


def start_front(loaded: LoadedConfig) -> Front:
    """Build an engine, or start the replicas that the configuration asks for and return their front.

    Raises:
        SlotlineError: of the kind that fits. No process is left then.
    """
    return start_engine(loaded) if loaded.config.parallel.data == 1 else _start_replicas(loaded)


def _start_replicas(loaded: LoadedConfig) -> ReplicaFront:
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise ConfigError(
            f"parallel.data = {loaded.config.parallel.data} under torchrun, which starts the ranks of one engine",
            fix="start the front without torchrun, since it starts its replicas itself",
        )
    refuse_replicas_elsewhere(loaded)
    planned = make_plan(loaded, place=Place(layout=layout_of(loaded)))  # its errors are said before anything starts
    log_warnings(planned)
    tokenizer, facts = load_tokenizer(planned), planned.facts
    parser = build_parser(planned, tokenizer)
    links = ReplicaLinks(loaded, planned.plan.digest)
    memory = links.replicas[0].ready.result().memory
    routing = loaded.config.parallel.routing
    cached = bool(memory) and planned.plan.prefix_caching and routing != "load"
    tokens = planned.plan.block_size * memory.num_blocks if memory and cached else 0
    front = ReplicaFront(
        plan=planned.plan,
        model_folder=facts.path,
        links=links,
        router=Router(
            len(links.replicas),
            margin=_MARGIN * loaded.config.scheduler.max_batched_tokens,
            remembered=tokens // BLOCK,
        ),
        told=told_blocks(planned.plan) if tells_prefixes(planned) else None,
        limits=limits_of(planned, tokenizer),
        eos_token_ids=facts.eos_token_ids,
        tokenizer=tokenizer,
        response_parser=parser,
        sampling_defaults=planned.sampling_defaults,
        plugins=planned.registry.built,
        hand_out=FrontHandOut(StopChecker(RequestTable(1, 1), facts.eos_token_ids, facts.vocab_size)),
        task=planned.task,
        has_adapters=planned.lora is not None,
        has_items=bool(facts.modalities),
        growth=(SharedGrowth if replicas_share_experts(loaded) else Growth)(planned),
    )
    logger.log(logging.WARNING if front.plan.downgrades else logging.INFO, front.plan.summary())
    return front


def engine_of(front: Front) -> Engine:
    """Return the engine of this process.

    Raises:
        RequestError: if there is none, since its replicas run in other processes.
    """
    if isinstance(front, ReplicaFront):
        raise RequestError(
            f"the {len(front.loads)} replicas of parallel.data run in other processes, and this needs their engine",
            fix="set parallel.data = 1 for it",
        )
    return front


def scale_front(
    front: Front, data: int, timeout: float | None = None, pause: Callable[[], object] | None = None
) -> ScaleReport:
    """Let so many replicas take requests. See `ReplicaFront.scale`.

    Args:
        timeout: seconds to wait for requests of replicas that are to end, where it waits for them.
        pause: is called while it waits. None to sleep for a short time.

    Raises:
        RequestError: for an engine of this process, or after the timeout.
    """
    begun = time.monotonic()

    def wait() -> None:
        if timeout is not None and time.monotonic() - begun > timeout:
            raise RequestError(
                f"the replicas that are to end have unfinished requests after {timeout:g} s",
                fix="raise the timeout, or abort the requests",
            )
        (pause or partial(time.sleep, _PAUSE))()

    if isinstance(front, ReplicaFront):
        return front.scale(data, wait)
    raise RequestError(
        "the engine runs in this process, and only replicas come and go", fix="begin with parallel.data = 2 or more"
    )


def loads_of(front: Front) -> list[Load]:
    """Return the load of the engine, or of each replica."""
    return front.loads if isinstance(front, ReplicaFront) else [load_of(front)]


def model_folder(front: Front) -> Path:
    """Return the folder of the model."""
    return front.model_folder if isinstance(front, ReplicaFront) else front.runner.model.facts.path


def failure_of(front: Front) -> SlotlineError | None:
    """Return what ended the replicas or the ranks of an engine, None while they work."""
    return front.failure if isinstance(front, ReplicaFront) else failure_of_engine(front)


def end_front(front: Front) -> None:
    """End the replicas, or the other ranks of an engine, if there are any. It takes no more requests then."""
    if isinstance(front, ReplicaFront):
        front.close()
    else:
        end_engine(front)


def refusal_of(request: Request) -> BaseException | None:
    """Return why a replica refused a request, None if it did not."""
    return request.refusal if isinstance(request, SentRequest) else None
