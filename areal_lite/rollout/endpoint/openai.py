"""OpenAI's Chat Completions API. Source: its public reference, read in November 2026."""

import time
from typing import Any

from areal_lite.rollout.endpoint.messages import (
    MODEL,
    Answer,
    ChatRequest,
    check_settings,
    parse_max_tokens,
    parse_messages,
    parse_stop,
    parse_tools,
)

_USED = {"messages", "max_tokens", "max_completion_tokens", "stop", "tools"}
# These keys change nothing in the answer.
_IGNORED = {"model", "user", "metadata", "store", "safety_identifier", "service_tier"}
_ONLY_VALUE = {
    "n": 1,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "stream": False,
    "logprobs": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}


def parse_request(body: dict[str, Any], temperature: float) -> ChatRequest:
    """Check a request. Raises RequestRefused."""
    check_settings(body, temperature, _USED | _IGNORED, _ONLY_VALUE)
    return ChatRequest(
        messages=parse_messages(body.get("messages")),
        tools=parse_tools(body.get("tools")),
        max_tokens=parse_max_tokens(body, "max_completion_tokens", "max_tokens"),
        stop=parse_stop(body, "stop"),
    )


def response(answer: Answer) -> dict[str, Any]:
    """Return a `chat.completion` object."""
    choice = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def error(status: int, message: str, code: str) -> dict[str, Any]:
    """Return the body of a refusal."""
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return {"error": fields}
