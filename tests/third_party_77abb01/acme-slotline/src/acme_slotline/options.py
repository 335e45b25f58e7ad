"""Acme's tables in a configuration file."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class BanOptions:
    """`[logits_processors.acme_ban]`: tokens that no request may use."""

    always: tuple[int, ...] = ()
