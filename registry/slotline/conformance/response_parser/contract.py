"""L0 of response parsers: descriptor, capabilities, factory, methods, and refusals."""

from __future__ import annotations

from slotline.registry.contracts import ResponseParserCapabilities
from slotline.registry.descriptor import Kind
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.response_parser import context
from slotline.testing.refusal_checks import UNKNOWN, register_part_refusals

register_contract_checks(
    KindContract(kind=Kind.RESPONSE_PARSER, capabilities=ResponseParserCapabilities, context=lambda _run: context())
)
register_part_refusals(Kind.RESPONSE_PARSER, {"devices": lambda _: ("cpu", "cuda", UNKNOWN)})
