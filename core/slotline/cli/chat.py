"""`slotline chat`: a conversation in the terminal, with an engine of this process or a server."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

from attrs import define, field

from slotline.cli.command import Command, add_config_options, overrides
from slotline.registry.errors import ConfigError, RequestError, SlotlineError

Message = dict[str, str]
Answer = Callable[[Sequence[Message]], Iterator[tuple[str, int]]]
"""Gives the next text of the answer to a conversation, and its number of tokens, until it is complete."""
_HELP = """/system TEXT  begin again with a system message; without a text, with none
/reset        begin again
/undo         forget the last question and its answer
/save FILE    write the conversation as JSON
/exit         end, as Ctrl-D does
A line that ends with \\ goes on in the next. Ctrl-C ends an answer and keeps what is there."""


def _configure(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    parser.add_argument("--model", metavar="MODEL", help="a local folder or a name on the Hub (default: small model)")
    parser.add_argument("--url", metavar="URL", help="a server to talk to, as 'http://127.0.0.1:8000'")
    parser.add_argument("--api-key", metavar="KEY", default="", help="the server's key")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: what fits)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's)")
    parser.add_argument("--seed", type=int, metavar="N", help="another seed, another answer (default: none)")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.url and (arguments.config or arguments.set):
        raise ConfigError("--url with a configuration", fix="configure the server, or leave --url out")
    given = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}
    params = {name: value for name, value in given.items() if value is not None}
    if arguments.url:
        answer = server_answers(arguments.url, arguments.api_key, arguments.model, params)
    else:
        answer = local_answers(arguments, params)
    conversation = Conversation(answer)
    conversation.begin(arguments.system or "")
    if sys.stdin is not None and sys.stdin.isatty():
        print("/help shows the commands", file=sys.stderr)
    while (said := _read()) is not None:
        if said.strip() and not conversation.take(said):
            break
    return 0


def local_answers(arguments: argparse.Namespace, params: Mapping[str, Any]) -> Answer:
    """Return the answers of an engine that is built now.

    Raises:
        SlotlineError: if it cannot be built, or a parameter is wrong.
    """
    from slotline.llm.llm import LLM
    from slotline.registry.contracts.sampling_params import SamplingParams
    from slotline.text.template import ChatOptions

    sampling = SamplingParams(**{"max_tokens": None, **params})
    values = {"model": arguments.model} if arguments.model else {}
    llm = LLM(arguments.config, overrides=overrides(arguments), **values)

    def answer(messages: Sequence[Message]) -> Iterator[tuple[str, int]]:
        prompt = llm.submitter.chat_prompt(messages, ChatOptions())
        shown, count = "", 0
        with closing(llm.stream(prompt, sampling)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                one = output.outputs[0]
                if one.finish_reason == "error":
                    raise RequestError(f"the answer failed: {one.stop_reason}")
                yield one.text[len(shown) :], len(one.token_ids) - count
                shown, count = one.text, len(one.token_ids)

    return answer


def server_answers(url: str, key: str, model: str | None, params: Mapping[str, Any]) -> Answer:
    """Return the answers of a server with OpenAI's interface."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    def answer(messages: Sequence[Message]) -> Iterator[tuple[str, int]]:
        usage = {"include_usage": True}
        body: dict[str, Any] = {"messages": list(messages), "stream": True, "stream_options": usage, **params}
        if model:
            body["model"] = model
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        place = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        if not place.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r} is no address of a server", fix="give 'http://127.0.0.1:8000'")
        try:
            with urlopen(Request(place, json.dumps(body).encode(), headers)) as lines:  # checked above
                for line in lines:
                    yield from _texts(line.decode().strip())
        except HTTPError as error:
            raise RequestError(f"the server says {error.code}: {_said(error.read())}") from error
        except (URLError, OSError, ValueError) as error:
            raise RequestError(f"{place} cannot be reached: {error}", fix="start it with `slotline serve`") from error

    return answer


def _texts(line: str) -> Iterator[tuple[str, int]]:
    """Yield the text of an event of a stream, or the number of all tokens, which comes at the end."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise RequestError(f"the server says: {event['error'].get('message')}")
    for choice in event.get("choices", ()):
        yield choice["delta"].get("content") or "", 0
    yield "", (event.get("usage") or {}).get("completion_tokens", 0)


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


@define(eq=False)
class Conversation:
    """A conversation, and the commands that change it.

    Attributes:
        messages: so far.
    """

    _answer: Answer
    messages: list[Message] = field(factory=list, init=False)

    def begin(self, system: str) -> None:
        """Begin again, with a system message if there is a text."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def take(self, said: str) -> bool:
        """Take a command or a question. Return False if it ends the conversation."""
        if not said.startswith("/"):
            self._ask(said)
            return True
        name, _, rest = said.strip().partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/system":
            self.begin(rest.strip())
        elif name == "/reset":
            self.begin(next((one["content"] for one in self.messages if one["role"] == "system"), ""))
        elif name == "/undo":
            asked = [index for index, one in enumerate(self.messages) if one["role"] == "user"]
            del self.messages[asked[-1] if asked else len(self.messages) :]
        elif name == "/save":
            self._save(rest.strip())
        else:
            print(_HELP if name == "/help" else f"there is no command {name}; /help shows all", file=sys.stderr)
        return True

    def _ask(self, question: str) -> None:
        """Print the answer as it comes, and keep it. A question that fails is forgotten."""
        self.messages.append({"role": "user", "content": question})
        parts, count = list[str](), 0
        start = perf_counter()
        try:
            with _stopping() as stopped, closing(self._answer(self.messages)) as texts:  # type: ignore[type-var]
                for text, tokens in texts:
                    parts.append(text)
                    count += tokens
                    print(text, end="", flush=True)
                    if stopped:
                        break
        except SlotlineError as error:
            self.messages.pop()
            print(f"error: {error}", file=sys.stderr)
            return
        seconds = perf_counter() - start
        print(flush=True)
        if count:
            print(f"[{count} tokens, {count / max(seconds, 1e-9):,.1f} a second]", file=sys.stderr)
        self.messages.append({"role": "assistant", "content": "".join(parts)})

    def _save(self, name: str) -> None:
        if not name:
            print("/save needs the name of a file", file=sys.stderr)
            return
        try:
            Path(name).write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)


@contextmanager
def _stopping() -> Iterator[list[bool]]:
    """Have Ctrl-C put something into a list, and raise nothing."""
    stopped: list[bool] = []

    def note(_number: int, _frame: FrameType | None) -> None:
        stopped.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _read() -> str | None:
    """Return what the person says, None at the end. A line that ends with a backslash goes on in the next."""
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else "> ") if sys.stdin.isatty() else _line()
        except EOFError:
            return "\n".join(lines) if lines else None
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


COMMAND = Command(
    name="chat",
    summary="talk to a model in the terminal, or to a server",
    examples=(
        "slotline chat",
        "slotline chat --model checkpoints/my-model --system 'Answer in one sentence.'",
        "slotline chat --url http://127.0.0.1:8000",
    ),
    configure=_configure,
    run=_run,
)
