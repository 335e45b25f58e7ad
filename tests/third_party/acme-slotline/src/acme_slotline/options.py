"""Acme's tables in a configuration file."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class BanOptions:
    """`[logits_processors.acme_ban]`: tokens that no request may use."""

    always: tuple[int, ...] = ()


@frozen(kw_only=True)
class RateOptions:
    """`[extensions.acme_rate]`: tokens for each second of requests that name no rate. 0 for no limit."""

    tokens_per_second: float = 0.0


@frozen(kw_only=True)
class ZipOptions:
    """`[kv_connector.acme_zip]`: kilobytes of compressed blocks."""

    kilobytes: int = 100_000
