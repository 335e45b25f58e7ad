"""Line numbers of the keys in a TOML text, which `tomllib` does not provide.

The text is known to be valid, so the scanner does not check it.
"""

from __future__ import annotations

import bisect
import re
import tomllib
from collections.abc import Callable

from slotline.registry.config.tree import KeyPath

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\n]*")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line number (from 1) of each key and table of a valid TOML text.

    An implied table has the line number of its first key.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self._breaks = [match.start() for match in re.finditer("\n", text)]

    def document(self) -> None:
        """Scan the whole text."""
        prefix: KeyPath = ()
        self._skip()
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                prefix = self._header()
            else:
                self._pair(prefix)
            self._skip()

    def _header(self) -> KeyPath:
        line = self._line()
        while self.text[self.at] == "[":
            self.at += 1
        path = self._key()
        while self.at < len(self.text) and self.text[self.at] == "]":
            self.at += 1
        self._record(path, line, explicit=True)
        return path

    def _pair(self, prefix: KeyPath) -> None:
        line = self._line()
        path = prefix + self._key()
        self._record(path, line)
        self.at += 1  # the sign `=`
        self._skip()
        self._value(path)

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            self._skip()
            match = _STRING.match(self.text, self.at) or _BARE_KEY.match(self.text, self.at)
            if match is None:
                return tuple(parts)
            parts.append(_unquote(match[0]))
            self.at = match.end()
            self._skip()
            if self.text[self.at : self.at + 1] != ".":
                return tuple(parts)
            self.at += 1

    def _value(self, path: KeyPath) -> None:
        start = self.text[self.at : self.at + 1]
        if start == "[":
            self._items("]", lambda: self._value(path))
        elif start == "{":
            self._items("}", lambda: self._pair(path))
        else:
            match = _STRING.match(self.text, self.at) or _SCALAR.match(self.text, self.at)
            self.at = match.end() if match else len(self.text)

    def _items(self, end: str, item: Callable[[], None]) -> None:
        self.at += 1
        self._skip()
        while self.at < len(self.text) and self.text[self.at] != end:
            item()
            self._skip()
            if self.text[self.at : self.at + 1] == ",":
                self.at += 1
                self._skip()
        self.at += 1

    def _skip(self) -> None:
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _line(self) -> int:
        return bisect.bisect_left(self._breaks, self.at) + 1

    def _record(self, path: KeyPath, line: int, *, explicit: bool = False) -> None:
        for length in range(1, len(path)):
            self.lines.setdefault(path[:length], line)
        if explicit:
            self.lines[path] = line
        else:
            self.lines.setdefault(path, line)


def _unquote(key: str) -> str:
    return next(iter(tomllib.loads(f"{key} = 0"))) if key[0] in "\"'" else key
