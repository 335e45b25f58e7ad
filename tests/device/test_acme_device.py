"""A device of another distribution runs the whole engine: it gives the CPU's text, with graphs as it declares them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cli_cases import pretend_project_installed
from repository import TESTS

from slotline.core import LLM, SamplingParams
from slotline.registry import ConfigError, PluginRegistry, load_config
from slotline.registry.devices import Devices

ACME = TESTS / "third_party" / "acme-device"
PROMPTS = ["def main(", "import os\nimport sys\n\n\nclass Reader:\n" * 2, "for"]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "memory": "64MiB",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
}


@pytest.fixture(scope="module", autouse=True)
def acme_is_installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
            monkeypatch.delitem(sys.modules, name)  # of another test's package of that name
        pretend_project_installed(monkeypatch, tmp_path_factory.mktemp("site"), ACME)
        yield


def tokens(llm: LLM, **params: Any) -> list[list[int]]:
    asked = SamplingParams(max_tokens=12, ignore_eos=True, **{"temperature": 0, **params})
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, asked, progress=False)]


@pytest.fixture(scope="module")
def on_the_cpu() -> LLM:
    return LLM(device="cpu", **SMALL)


@pytest.fixture(scope="module")
def on_acme() -> LLM:
    return LLM(device="acme:0", **{"graphs.sizes": (1, 2, 4)}, **SMALL)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}])
def test_the_text_is_the_cpus(params: dict[str, Any], on_acme: LLM, on_the_cpu: LLM) -> None:
    assert tokens(on_acme, **params) == tokens(on_the_cpu, **params)


def test_graphs_are_negotiated_from_what_the_device_declares(on_acme: LLM, on_the_cpu: LLM) -> None:
    plan = on_acme.engine.plan
    assert plan.device.type == "acme"
    assert plan.graphs.resolved != "none"
    assert on_acme.engine.graphs is not None
    assert on_acme.engine.graphs.report.graphs > 0
    assert on_the_cpu.engine.plan.graphs.resolved == "none"


def test_the_devices_own_operations_are_those_of_the_engine(on_acme: LLM, on_the_cpu: LLM) -> None:
    assert type(on_acme.engine.runner.ops).__name__ == "AcmeOps"
    assert type(on_the_cpu.engine.runner.ops).__name__ == "CpuOps"
    assert on_acme.engine.compiler is None


def test_a_number_that_no_device_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="device = 'acme:7' is not there: 2 acme devices"):
        LLM(device="acme:7", **SMALL)


def test_a_transfer_buffer_keeps_addresses_and_brings_arrays_there_and_back() -> None:
    import numpy as np

    device = Devices(PluginRegistry.discover(load_config(environ={}))).named("acme")
    buffer = device.transfer_buffer()
    buffer.reserve(1 << 12)
    found = []
    for step in range(3):
        buffer.begin()
        arrays = [np.full((3, 5), step, np.int32), np.arange(7) + step, np.zeros((0, 4), np.float32)]
        sent = [buffer.upload(array) for array in arrays]
        buffer.flush()
        buffer.mark()
        for array, tensor in zip(arrays, sent, strict=True):
            np.testing.assert_array_equal(buffer.download(tensor).wait(), array)
        found.append([tensor.data_ptr() for tensor in sent[:2]])
    assert found[0] == found[1] == found[2]
