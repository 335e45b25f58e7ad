"""A plugin of each kind with one method that fails, in each way that a method can. The rest is a shipped plugin's."""

from __future__ import annotations

import sys
from typing import Any

from attrs import evolve
from broken_plugins import _SHIPPED, armed

from slotline.registry.loading import resolve_factory


class Failing:
    """What a shipped factory made, but for one method."""

    def __init__(self, built: Any, method: str, how: str) -> None:
        self._built, self._method, self._how = built, method, how

    def __getattr__(self, name: str) -> Any:
        if name != self._method:
            return getattr(self._built, name)
        if self._how == "absent":
            raise AttributeError(name)
        return {
            "few": self._few,
            "raises": self._raises,
            "exits": self._exits,
            "none": self._none,
            "later": self._later,
        }[self._how]

    def _few(self) -> None:
        """Take no argument."""

    def _raises(self, *arguments: Any) -> Any:
        return {}["no such table"]

    def _exits(self, *arguments: Any) -> Any:
        sys.exit(0)

    def _later(self, *arguments: Any) -> Any:
        return self._raises() if armed else getattr(self._built, self._method)(*arguments)

    def _none(self, *arguments: Any) -> Any:
        return None


def __getattr__(name: str) -> Any:
    """`KIND__METHOD__HOW`."""
    kind, _, rest = name.partition("__")
    method, _, how = rest.partition("__")
    if kind not in _SHIPPED or not how:
        raise AttributeError(name)
    shipped = _SHIPPED[kind].descriptor

    def factory(*context: Any) -> Any:
        return Failing(resolve_factory(shipped)(*context), method, how)

    return evolve(shipped, name="failing", factory=factory)
