"""Descriptor of the structured-output plugin `xgrammar`: masks prepared while a grammar is compiled."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from attrs import field, frozen

from slotline.registry.capability import Set
from slotline.registry.contracts.structured_output import CONSTRAINTS, StructuredOutputCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if the package is installed."""
    if find_spec("xgrammar") is None:
        return "the package xgrammar is not installed; `pip install 'slotline[structured]'` brings it"
    return descriptor.capabilities


@frozen(kw_only=True)
class XGrammarOptions:
    """Options of the plugin, in `[structured_output.xgrammar]`."""

    compile_threads: int = field(default=4, metadata={"doc": "threads that one grammar is compiled with"})
    mask_threads: int = field(
        default=0, metadata={"doc": "threads that make the masks of a step; 0 for all cores but one, 16 at most"}
    )
    compile_limit: float = field(
        default=6.0,
        metadata={
            "doc": "seconds that a constraint may take to compile, as estimated from its grammar and the vocabulary's "
            "size: a longer one is refused, since compiling cannot be stopped"
        },
    )
    cache_bytes: int = field(default=512 << 20, metadata={"doc": "memory for parts of grammars that others reuse"})


descriptor = Descriptor(
    kind=Kind.STRUCTURED_OUTPUT,
    name="xgrammar",
    capabilities=StructuredOutputCapabilities(
        constraints=Set(CONSTRAINTS),
        reusable_masks=True,
        every_tokenization=True,
        priority=10,
        priority_reason="its masks are mostly made when a grammar is compiled",
    ),
    factory="slotline.plugins.structured_output.xgrammar.backend:XGrammarBackend",
    options="slotline.plugins.structured_output.xgrammar:XGrammarOptions",
    probe="slotline.plugins.structured_output.xgrammar:probe",
    summary="grammars and masks by XGrammar",
)
