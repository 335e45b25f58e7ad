"""A device whose operation gives a wrong shape or dtype is refused before the first request, with its package."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotline.core import LLM
from slotline.registry import PluginError

PLUGIN = """
from slotline.core.device import TorchDevice, TorchOps
from slotline.registry import Descriptor, Kind
from slotline.registry.contracts import DeviceCapabilities


class Ops(TorchOps):
    def {operation}(self, *given, **options):
        found = super().{operation}(*given, **options)
        return {answer}


offer = DeviceCapabilities(compatible_with=("cpu",), priority=-1)
odd = Descriptor(kind=Kind.DEVICE, name="odd", capabilities=offer, factory=lambda _: TorchDevice("odd", "cpu", Ops()))
"""


@pytest.mark.parametrize(
    ("operation", "answer", "message"),
    [
        ("argmax", "found.int()", r"argmax\(\) returns int32 \[2\] on cpu, expected int64 \[2\] on cpu"),
        ("argmax", "None", r"argmax\(\) returns NoneType, expected int64 \[2\] on cpu"),
        ("argmax_checked", "found[0]", r"argmax_checked\(\) returns int64 \[2\] on cpu, expected int64 .* and bool"),
        (
            "sample",
            "found._replace(tokens=found.tokens[:, None])",
            r"sample\(\) returns int64 \[2, 1\] on cpu and float32",
        ),
        (
            "sample",
            "found._replace(final=None)",
            r"sample\(\) returns int64 \[2\] on cpu and NoneType and NoneType",
        ),
        ("apply_bitmask", "found.double()", r"apply_bitmask\(\) returns float64 \[2, 33\] on cpu"),
        ("mark_unusable", "found[:1]", r"mark_unusable\(\) returns int64 \[1\] on cpu"),
    ],
)
def test_an_operation_that_answers_wrongly_is_named_with_its_package(
    operation: str, answer: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "odd_device.py"
    file.write_text(PLUGIN.format(operation=operation, answer=answer), encoding="utf-8")
    with pytest.raises(PluginError, match=f"(?s)device:odd of the inline plugin .*{message}.*fix: .*in device"):
        LLM(device="odd", memory="16MiB", max_model_len=64, **{"plugins.inline": (f"{file}:odd",)})


def test_flags_of_rows_may_be_none(tmp_path: Path) -> None:
    file = tmp_path / "odd_device.py"
    file.write_text(PLUGIN.format(operation="argmax_checked", answer="(found[0], None)"), encoding="utf-8")
    llm = LLM(device="odd", memory="16MiB", max_model_len=64, **{"plugins.inline": (f"{file}:odd",)})
    assert llm.engine.plan.device.type == "odd"
