"""Messages of `chat` with `tool_choice`: prompts that are held to their tools, and outputs read as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from slotline.core.api.outputs import RequestOutput
from slotline.llm.turns import Answers, Turn, asked_tools, read_answers
from slotline.ranks.replicas.front import Front
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.text.template import tool_schemas


@define(eq=False, kw_only=True)
class ChatReader:
    """Reader of the outputs of one conversation.

    Attributes:
        params: those of the conversation, with what holds the calls.
    """

    params: SamplingParams
    _answers: Answers
    _turns: dict[int, Turn] = field(factory=dict, init=False)
    _messages: dict[int, dict[str, Any]] = field(factory=dict, init=False)

    def read(self, output: RequestOutput, *, deltas: bool = False) -> RequestOutput:
        """Return the output, with the messages of those that are complete.

        Args:
            output: a part of the answer.
            deltas: whether it holds only what is new.
        """
        for one in output.outputs:
            turn = self._turns.setdefault(one.index, self._answers.turn())
            ended = one.finish_reason is not None
            if one.index not in self._messages and (deltas or ended):
                turn.read(one)
                if ended:
                    self._messages[one.index] = turn.message()
            one.message = self._messages.get(one.index)
        return output


def chat_readers(
    engine: Front,
    prompts: Sequence[Mapping[str, Any]],
    params: Sequence[SamplingParams],
    *,
    tools: Any,
    choice: Any,
    parallel: bool | None,
) -> list[ChatReader]:
    """Return the reader of each conversation.

    Args:
        engine: has the parser.
        prompts: of the conversations.
        params: as they were given, for each prompt.
        tools, choice, parallel: as in `LLM.chat`.

    Raises:
        ToolsError, RequestError: if the tools or the choice are wrong, or the calls cannot be held to them.
    """
    if not all(one.detokenize for one in params):
        raise RequestError("tool_choice with detokenize=False", fix="leave one of them out, since calls are text")
    request = asked_tools(engine, tool_schemas(tools), choice, parallel)
    readers = []
    for prompt, one in zip(prompts, params, strict=True):
        answers, held = read_answers(engine, request, dict(prompt), reasoning=True, params=one)
        readers.append(ChatReader(params=held, answers=answers))
    return readers


def shown_tools(tools: Any, choice: Any, parallel: bool | None) -> Any:
    """Return the tools that the template shows: none of them if none may be called.

    Raises:
        RequestError: if `parallel` is given without a choice.
    """
    if choice is None and parallel is not None:
        raise RequestError("parallel_tool_calls without tool_choice", fix='give tool_choice="auto" as well')
    return None if choice == "none" else tools
