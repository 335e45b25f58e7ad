"""Time to the first token where another process computes the prompt: blocks of whole steps, layer by layer, and early.

    python benchmarks/handoff_overlap.py benchmarks/models/llama-100m [--length 512] [--rounds 9] [--rates 0 125 12.5]
        [--device cpu] [--set KEY=VALUE] [--json FILE]

Weights are random. Two engines prefill, each in a process of its own. One copies blocks of whole steps
(`kv_connector.handoff.layers = "off"`), the other one layer by layer. This process decodes. Each round has a new prompt
for each kind, in turn, and nothing else runs:

* `whole steps, then asked`: the engine that decodes is asked once the prompt is computed
* `layers, then asked`: the same, and each layer's blocks are copied beside later layers
* `whole steps, early`: both engines are asked at once, and blocks come once their step has ended
* `layers, early`: both engines are asked at once, and each layer's blocks come beside later layers

A rate is that of the link in millions of bytes a second, which a process between them keeps to. With 0 there is no
link: blocks come through shared memory. Printed are medians of the time from asking to the first token of the engine
that decodes, its ratio to that of the first kind, the time until the prompt was computed, the time from there until the
last block was in the cache, which is what transfers cost, its ratio, and the time from the last block to the first
token. The last one bounds what could be won by beginning that step while layers still come.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections import defaultdict
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from command_line import positive
from prefill_decode_gpu import build, free_port, params_of, ready, see
from result_file import print_rows, write_result

SHORT = (
    "benchmarks/models/llama-tiny --length 48 --rounds 1 --rates 0 --memory 16MiB --cache 4MiB --kinds 'layers, early'"
)
COLUMNS = (
    "link MB/s", "kind", "first token ms", "of the first kind", "prompt computed ms", "from there to the last block ms",
    "of the first kind's", "last block to first token ms", "blocks loaded", "lost",
)  # fmt: skip
KINDS = {
    "whole steps, then asked": ("off", False),
    "layers, then asked": ("auto", False),
    "whole steps, early": ("off", True),
    "layers, early": ("auto", True),
}
"""Of each kind, `kv_connector.handoff.layers` of the engine that prefills, and whether both are asked at once."""
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


class Times(NamedTuple):
    """Seconds of a prompt since it was asked for, and blocks that came and did not."""

    first_token: float
    computed: float
    last_block: float
    loaded: int
    lost: int


def prefill(arguments: argparse.Namespace, address: str, layers: str, pipe: Any) -> None:
    """Compute the prompts that come through a pipe, in a process of its own, until None comes."""
    see(arguments.cards[0])
    settings = ["kv_connector.name=handoff", "kv_connector.handoff.role=prefill"]
    settings += [f"kv_connector.handoff.layers={layers}", f"kv_connector.handoff.address={address}"]
    settings += [f"kv_connector.handoff.memory={arguments.memory}", "kv_connector.handoff.timeout=60"]
    engine = build(arguments, settings).engine
    pipe.send("ready")
    number = 0
    while (asked := pipe.recv()) is not None:
        prompt, params = asked
        engine.add(f"prefill {number}", prompt, params_of(1), kv_transfer_params=params)
        number += 1
        while engine.has_work:
            engine.step()
        pipe.send(dict(engine.extension("kv_transfer").answer(params)))
        for _ in range(3):  # saves end
            engine.step()


def link(address: tuple[str, int], port: int, rate: float, pipe: Any) -> None:
    """Stand between an engine that decodes and one that prefills, in a process of its own.

    Args:
        address: of the engine that prefills.
        port: where it is asked.
        rate: bytes a second that it answers with.
        pipe: is told when it is ready.
    """
    from slotline.plugins.kv_connectors.handoff import wire

    def answer(near: socket.socket) -> None:
        far = socket.create_connection(address)
        Thread(target=pour, args=(near, far, float("inf")), daemon=True).start()
        hello = wire.receive(far)
        wire.send(near, {**hello, "secret": ""})  # so that nobody maps the memory
        pour(far, near, rate)

    listener = socket.create_server(("127.0.0.1", port))
    pipe.send("ready")
    while True:
        Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def pour(source: socket.socket, target: socket.socket, rate: float) -> None:
    """Pass bytes on, at a rate in bytes a second, until a side ends."""
    free = 0.0  # when the link can take more
    with suppress(OSError):
        while data := source.recv(1 << 14):
            free = max(free, perf_counter()) + len(data) / rate
            time.sleep(max(free - perf_counter(), 0.0))
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


class Decode:
    """The engine that decodes, and pipes to those that prefill.

    Args:
        peers: addresses that blocks may come from.
        prefills: pipes, by what `kv_connector.handoff.layers` is there.
    """

    def __init__(self, arguments: argparse.Namespace, peers: list[str], prefills: dict[str, Any]) -> None:
        see(arguments.cards[1])
        settings = ["kv_connector.name=handoff", "kv_connector.handoff.role=decode"]
        settings += [f"kv_connector.handoff.peers={json.dumps(peers)}", "kv_connector.handoff.timeout=60"]
        settings += [f"cache.memory={arguments.cache}"] if arguments.cache else []
        self.engine, self.prefills, self.number = build(arguments, settings).engine, prefills, 0
        self.transfers, self.last = self.engine.extension("kv_transfer").transfers, 0.0
        arrived = self.transfers.connector.arrived

        def noted() -> Any:
            found = arrived()
            self.last = perf_counter() if found else self.last
            return found

        self.transfers.connector.arrived = noted

    def time(self, prompt: list[int], layers: str, peer: str, *, early: bool) -> Times:
        """Time a prompt that nobody has computed before."""
        self.number += 1
        host, port = peer.rsplit(":", 1)
        counts, name, start = self.transfers.agreement.counts, f"prompt {self.number}", perf_counter()
        self.prefills[layers].send((prompt, {**ASKED, "transfer_id": name}))
        params = {"do_remote_prefill": True, "remote_host": host, "remote_port": int(port)}
        request, computed, first = None, 0.0, 0.0
        if early:
            request = self.add(prompt, {**params, "transfer_id": name})
        while request is None or not request.finished or not computed:
            if not computed and self.prefills[layers].poll(0.0 if early else None):
                self.prefills[layers].recv()
                computed = perf_counter() - start
                request = request or self.add(prompt, params)
            self.engine.step()
            if not first and request is not None and request.finished:
                first = perf_counter() - start
        after = self.transfers.agreement.counts
        return Times(first, computed, self.last - start, after.loads - counts.loads, after.lost - counts.lost)

    def add(self, prompt: list[int], params: dict[str, Any]) -> Any:
        """Add a request for one token."""
        return self.engine.add(f"decode {self.number}", prompt, params_of(1), kv_transfer_params=params)


def measure(arguments: argparse.Namespace) -> dict[tuple[float, str], list[Times]]:
    """Start the other processes, and return the times by rate and kind."""
    context, processes, places = get_context("spawn"), list[Any](), dict[tuple[float, str], str]()
    prefills, kinds = dict[str, Any](), {kind: KINDS[kind] for kind in arguments.kinds}

    def started(target: Any, *given: Any) -> Any:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(*given, there), name=target.__name__, daemon=True)
        processes.append(process)
        process.start()
        ready(here, process)
        return here

    try:
        for layers in dict.fromkeys(layers for layers, _ in kinds.values()):
            address = ("127.0.0.1", free_port())
            prefills[layers] = started(prefill, arguments, "{}:{}".format(*address), layers)
            for rate in arguments.rates:
                port = free_port() if rate else address[1]
                places[rate, layers] = f"127.0.0.1:{port}"
                if rate:
                    started(link, address, port, 1e6 * rate)
        runs, times = Decode(arguments, list(places.values()), prefills), defaultdict[Any, list[Times]](list)
        rng = np.random.default_rng(3)
        for number in range(arguments.rounds + 1):
            for rate in arguments.rates:
                for kind, (layers, early) in kinds.items():
                    prompt = rng.integers(5, 200, arguments.length).tolist()
                    found = runs.time(prompt, layers, places[rate, layers], early=early)
                    if number:  # the first round warms up
                        times[rate, kind].append(found)
        return dict(times)
    finally:
        for process in processes:
            process.terminate()
            process.join(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cards", nargs=2, default=["", ""], metavar="CARD", help="for prefill and for decode")
    parser.add_argument("--length", type=positive, default=512, help="tokens of a prompt")
    parser.add_argument("--rounds", type=positive, default=9, help="prompts of each kind")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 125.0, 12.5], help="of links in MB/s")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--memory", default="1GiB", help="kv_connector.handoff.memory of the engines that prefill")
    parser.add_argument("--cache", default="", help="cache.memory of the engine that decodes, empty for its choice")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write a result file")
    parser.set_defaults(context=1, steps=1, running=1, tokens=1)
    arguments = parser.parse_args()
    times, rows = measure(arguments), list[list[str]]()
    for rate in arguments.rates:
        whole = median(one.first_token for one in times[rate, arguments.kinds[0]])
        exposed = median(one.last_block - one.computed for one in times[rate, arguments.kinds[0]])
        for kind in arguments.kinds:
            own = times[rate, kind]
            first = median(one.first_token for one in own)
            computed = median(one.computed for one in own)
            came = median(one.last_block - one.computed for one in own)
            behind = median(one.first_token - one.last_block for one in own)
            seconds = (f"{1e3 * first:.1f}", f"{first / whole:.3f}", f"{1e3 * computed:.1f}")
            transfer = (f"{1e3 * came:.1f}", f"{came / exposed:.2f}", f"{1e3 * behind:.1f}")
            blocks = (str(sum(one.loaded for one in own)), str(sum(one.lost for one in own)))
            rows.append([f"{rate:g}" if rate else "memory", kind, *seconds, *transfer, *blocks])
    print_rows(COLUMNS, rows)
    if arguments.json is not None:
        note = f"Prompts of {arguments.length} tokens, {arguments.rounds} of each kind in turn; medians"
        write_result(arguments.json, "handoff_overlap", COLUMNS, rows, note=note)


if __name__ == "__main__":
    main()
