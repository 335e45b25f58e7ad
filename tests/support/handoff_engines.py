"""Engines that hand prompts to each other through the connector `handoff`."""

from __future__ import annotations

import json
from typing import Any

from engine_driver import random_prompts, run_all
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import PluginError

PROMPTS = random_prompts([33, 40, 37, 26], seed=5)
MIXED = [*PROMPTS, PROMPTS[0][:16] + PROMPTS[2][:20]]
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
SMALL: dict[str, Any] = {**DEFAULTS, "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 3}
KEY = "kv_connector.handoff"
PREFILL: dict[str, Any] = {"kv_connector.name": "handoff", f"{KEY}.role": "prefill", f"{KEY}.memory": "1MiB"}


def transfers_of(llm: LLM) -> Any:
    return llm.engine.extension("kv_transfer").transfers


def connector_of(llm: LLM) -> Any:
    return transfers_of(llm).connector


def decode_settings(*addresses: tuple[str, int], timeout: float = 5.0) -> dict[str, Any]:
    names = tuple(f"{host}:{port}" for host, port in addresses)
    return {
        "kv_connector.name": "handoff", f"{KEY}.role": "decode", f"{KEY}.peers": names, f"{KEY}.timeout": timeout,
    }  # fmt: skip


ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


def prefilled(llm: LLM, prompts: list[list[int]], **more: Any) -> dict[str, Any]:
    """Have an engine compute prompts. What its answer says."""
    for number, prompt in enumerate(prompts):
        llm.engine.add(f"p{number}", prompt, FIRST, kv_transfer_params=ASKED, **more)
    run_all(llm)
    settled(llm)
    answer = llm.engine.extension("kv_transfer").answer(ASKED)
    assert answer is not None
    return json.loads(json.dumps(dict(answer)))  # type: ignore[no-any-return]


def continued(llm: LLM, prompts: list[list[int]], answer: dict[str, Any] | None, **more: Any) -> list[list[int]]:
    """The tokens of an engine that continues prompts."""
    given = {} if answer is None else {"kv_transfer_params": answer}
    requests = [llm.engine.add(f"d{n}", prompt, SHORT, **given, **more) for n, prompt in enumerate(prompts)]
    run_all(llm, 200_000)
    assert all(request.finish_reason == "length" for request in requests)
    return [list(request.output_token_ids) for request in requests]


def settled(llm: LLM) -> None:
    for _ in range(2):  # the first step may start saves
        transfers_of(llm).finish()
        llm.engine.step()
    everything_returned(llm)


def early(prefill: LLM, name: str) -> dict[str, Any]:
    """What a request says whose prompt is computed meanwhile."""
    host, port = connector_of(prefill)._server.address
    return {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": name}


def asked_early(decode: LLM, prefill: LLM, prompts: list[list[int]]) -> list[Any]:
    """Requests of the engine that decodes, which has asked for their blocks once this returns."""
    requests = [
        decode.engine.add(f"d{n}", prompt, SHORT, kv_transfer_params=early(prefill, f"t{n}"))
        for n, prompt in enumerate(prompts)
    ]
    decode.engine.step()
    assert transfers_of(decode).coming
    return requests


def prefill_all(prefill: LLM, prompts: list[list[int]]) -> None:
    """Have an engine compute prompts that another one has asked for, one after the other."""
    for n, prompt in enumerate(prompts):
        params = {**ASKED, "transfer_id": f"t{n}"}
        prefill.engine.add(f"p{n}", prompt, FIRST, kv_transfer_params=params)
        try:
            run_all(prefill)
        except PluginError:  # a step has failed, and its requests go on
            run_all(prefill)
        prefill.engine.extension("kv_transfer").answer(params)
