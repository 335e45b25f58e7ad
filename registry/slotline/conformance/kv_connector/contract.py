"""L0 of KV connectors: descriptor, capabilities, factory, methods, refusals."""

from __future__ import annotations

from slotline.registry.contracts import KVConnectorCapabilities, KVConnectorContext
from slotline.registry.descriptor import Kind
from slotline.testing.check import Run
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.kv_connector import Pool
from slotline.testing.refusal_checks import UNKNOWN, register_part_refusals


def _context(run: Run) -> KVConnectorContext:
    return Pool(run).context


register_contract_checks(KindContract(kind=Kind.KV_CONNECTOR, capabilities=KVConnectorCapabilities, context=_context))
register_part_refusals(
    Kind.KV_CONNECTOR,
    {
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "kv_kinds": lambda _: ("full", "sliding", "chunked", "mla", UNKNOWN),
    },
)
