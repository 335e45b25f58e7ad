"""The compliance cases of Open Responses, judged by types made from its OpenAPI document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openresponses_types as open_responses
import pytest
from running_server import RunningServer

CASES = json.loads((Path(__file__).parent / "data" / "open_responses.json").read_text("utf-8"))["cases"]
EVENTS = {
    next(iter(kind.model_fields["type"].annotation)).value: kind
    for name, kind in vars(open_responses).items()
    if name.endswith("StreamingEvent") and name != "ErrorStreamingEvent"
}


def answered(case: dict[str, Any], url: str) -> tuple[Any, list[Any]]:
    """The response at the end, and the events that led to it."""
    body = {**case["request"], **case["help"], "stream": case.get("stream", False), "seed": 1, "temperature": 0.5}
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return answer.json(), []
    assert answer.headers["content-type"].startswith("text/event-stream")
    *told, last = [block for block in answer.text.split("\n\n") if block]
    assert last == "data: [DONE]"
    events = []
    for block in told:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events[-1]["response"], events


@pytest.mark.spread(2)
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_cases_of_open_responses(case: dict[str, Any], request: pytest.FixtureRequest) -> None:
    running: RunningServer = request.getfixturevalue("seeing" if case.get("image") else "tool_server")
    response, events = answered(case, running.url)
    resource = open_responses.ResponseResource.model_validate(response)
    for event in events:
        EVENTS[event["type"]].model_validate(event)
    kinds = {event["type"] for event in events}
    items = {(event["type"], event["item"]["type"]) for event in events if "item" in event}
    holds = {
        "output": bool(resource.output),
        "completed": resource.status == "completed",
        "function_call": any(item.type == "function_call" for item in resource.output),
        "events": len(events) > 4 and kinds <= EVENTS.keys(),
        "function_call_events": {
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
        }
        <= kinds
        and {("response.output_item.added", "function_call"), ("response.output_item.done", "function_call")} <= items,
    }
    assert [check for check in case["checks"] if not holds[check]] == []
    running.everything_returned()
