"""The APIs that agents use: requests, answers and streams.

* OpenAI's Chat Completions and Responses;
* Anthropic's Messages.

Source: their public references, read in November 2026. Each request becomes messages of OpenAI's
chat, which chat templates take, so that one conversation may use all of them. A stream has the
events of the API, in its order, and is made of the whole answer.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from areal_lite.data.tokenizer import Message
from areal_lite.workflows.endpoint import chat_request as chat
from areal_lite.workflows.endpoint.chat_request import Answer, ChatRequest, RequestRefused

# The name of the policy as a model.
MODEL = "policy"

Body = dict[str, Any]
Stored = Mapping[str, list[Message]]
"""Answer id -> the messages up to the answer."""


def _openai_request(body: Body, temperature: float | None, stored: Stored) -> ChatRequest:
    chat.check_settings(body, temperature)
    chat.parse_object(body, "stream_options")
    chat.parse_count(body, "top_logprobs", least=0)
    tools = chat.parse_tools(body.get("tools"), ("function", None))
    return ChatRequest(
        messages=chat.parse_messages(body.get("messages")),
        tools=tools,
        max_tokens=chat.parse_count(body, "max_completion_tokens", "max_tokens"),
        stop=chat.parse_stop(body, "stop"),
        samples=chat.parse_count(body, "n") or 1,
        wants_logprobs=body.get("logprobs") is True,
        **chat.choose_tools(body.get("tool_choice"), tools, body.get("parallel_tool_calls")),
    )


def _openai_response(answers: list[Answer], body: Body) -> Body:
    first, completed = answers[0], sum(answer.completion_tokens for answer in answers)
    alternatives = 1 if body.get("top_logprobs") else 0
    choices = [
        {
            "index": index,
            "message": answer.message,
            "finish_reason": answer.finish_reason,
            "logprobs": answer.logprobs and {"content": _logprobs(answer, alternatives)},
        }
        for index, answer in enumerate(answers)
    ]
    return {
        "id": f"chatcmpl-{first.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": completed,
            "total_tokens": first.prompt_tokens + completed,
        },
    }


def _logprobs(answer: Answer, alternatives: int) -> list[Body]:
    """Return the log-probs of an answer. The sampled token is the only alternative known."""
    pairs = answer.logprobs or ()
    tokens = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in pairs]
    return [{**token, "top_logprobs": [token] * alternatives} for token in tokens]


def _openai_events(response: Body, body: Body) -> Iterator[Body]:
    wants_usage = chat.parse_object(body, "stream_options").get("include_usage") is True
    chunk = {key: response[key] for key in ("id", "created", "model")}
    chunk |= {"object": "chat.completion.chunk"} | ({"usage": None} if wants_usage else {})
    for choice in response["choices"]:
        content = choice["message"]["content"]
        thought = choice["message"].get("reasoning_content")
        deltas: list[Body] = [{"role": "assistant", "content": content and ""}]
        deltas += [{"reasoning_content": thought}] if thought else []
        deltas += [{"content": content}] if content else []
        for index, call in enumerate(choice["message"].get("tool_calls", ())):
            arguments = {"arguments": call["function"]["arguments"]}
            begun = {**call["function"], "arguments": ""}
            deltas.append({"tool_calls": [{"index": index, **call, "function": begun}]})
            deltas.append({"tool_calls": [{"index": index, "function": arguments}]})
        for number, delta in enumerate([*deltas, {}]):
            fields = {
                "index": choice["index"],
                "delta": delta,
                "logprobs": choice["logprobs"] if number == 1 else None,
                "finish_reason": choice["finish_reason"] if not delta else None,
            }
            yield {**chunk, "choices": [fields]}
    if wants_usage:
        yield {**chunk, "choices": [], "usage": response["usage"]}


def _openai_error(status: int, message: str, code: str) -> Body:
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return {"error": fields}


# What a response repeats of its request, with the values that stand for settings not given.
_REPEATED: Body = {
    **{"instructions": None, "max_output_tokens": None, "previous_response_id": None},
    **{"temperature": None, "top_p": 1, "tool_choice": "auto", "tools": [], "metadata": {}},
    **{"parallel_tool_calls": True, "store": True, "text": {"format": {"type": "text"}}},
    **{"reasoning": {"effort": None, "summary": None}, "truncation": "disabled", "user": None},
}
_WITH_LOGPROBS = "message.output_text.logprobs"


def _responses_request(body: Body, temperature: float | None, stored: Stored) -> ChatRequest:
    form = chat.parse_object(body, "text").get("format")
    chat.check_settings({**body, "response_format": form}, temperature)
    # Coding agents always give tools of other types, too. The policy is offered functions.
    given = chat.parse_tools(body.get("tools"), None)
    tools = [chat.function_tool(t, "parameters") for t in given if t.get("type") == "function"]
    # Instructions hold for one response: the next request gives them again, or others.
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    history = [*_earlier_messages(body, stored), *_item_messages(body.get("input"))]
    include = body.get("include")
    return ChatRequest(
        messages=chat.parse_messages([*system, *history]),
        tools=tools,
        max_tokens=chat.parse_count(body, "max_output_tokens"),
        stop=[],
        wants_logprobs=isinstance(include, list) and _WITH_LOGPROBS in include,
        history=None if body.get("store") is False else history,
        **chat.choose_tools(body.get("tool_choice"), tools, body.get("parallel_tool_calls")),
    )


def _earlier_messages(body: Body, stored: Stored) -> list[Message]:
    if (previous := body.get("previous_response_id")) is None:
        return []
    answer_id = chat.parse_text(previous, "previous_response_id").removeprefix("resp_")
    if answer_id not in stored:
        raise RequestRefused(
            f"previous_response_id={previous:.100} is no response of this episode, or its request"
            " said store=false",
            "previous_response_not_found",
        )
    return stored[answer_id]


def _item_messages(items: Any) -> list[Message]:
    """Translate items. The calls after an assistant's message are part of it."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items or not all(isinstance(i, dict) for i in items):
        raise chat.invalid("input must be a string or a list of items, not empty")
    messages: list[Message] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({"role": "tool", **result})
        elif kind != "reasoning":
            raise chat.invalid(
                f"input has an item of type {kind!r:.100}: give messages, function calls and their"
                " outputs"
            )
    return messages


def _responses_response(answers: list[Answer], body: Body) -> Body:
    (answer,) = answers
    calls, text = answer.message.get("tool_calls", []), answer.message["content"] or ""
    logprobs = _logprobs(answer, 1 if body.get("top_logprobs") else 0)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    said = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part]}
    items = [said] if text or not calls else []
    if thought := answer.message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": thought}]
        place = {"type": "reasoning", "id": f"rs_{answer.id}"}
        items.insert(0, {**place, "summary": [], "content": parts})
    for call in calls:
        place = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
        items.append({**place, **call["function"]})
    whole = answer.finish_reason != "length"
    return {
        **{key: value if (v := body.get(key)) is None else v for key, value in _REPEATED.items()},
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "error": None,
        "output": [{**item, "status": "completed"} for item in items],
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _responses_events(response: Body, body: Body) -> Iterator[Body]:
    number = itertools.count()

    def event(kind: str, **fields: Any) -> Body:
        return {"type": f"response.{kind}", "sequence_number": next(number), **fields}

    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(response["output"]):
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        empty = {**item, "status": "in_progress", **empty}
        yield event("output_item.added", output_index=index, item=empty)
        place: Body = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield event("function_call_arguments.delta", **place, delta=arguments)
            done = {"name": item["name"], "arguments": arguments}
            yield event("function_call_arguments.done", **place, **done)
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            yield event("reasoning_text.delta", **place, content_index=0, delta=text)
            yield event("reasoning_text.done", **place, content_index=0, text=text)
        else:
            (part,) = item["content"]
            text, logprobs = part["text"], part["logprobs"]
            place["content_index"] = 0
            yield event("content_part.added", **place, part={**part, "text": "", "logprobs": []})
            yield event("output_text.delta", **place, delta=text, logprobs=logprobs)
            yield event("output_text.done", **place, text=text, logprobs=logprobs)
            yield event("content_part.done", **place, part=part)
        yield event("output_item.done", output_index=index, item=item)
    yield event(response["status"], response=response)


_ROLES = ("user", "assistant", "system")
_THOUGHTS = ("thinking", "redacted_thinking")
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}
_ERROR_TYPES = {401: "authentication_error", 408: "timeout_error", 413: "request_too_large"}


def _anthropic_request(body: Body, temperature: float | None, stored: Stored) -> ChatRequest:
    form = chat.parse_object(body, "output_config").get("format") or body.get("output_format")
    chat.check_settings({**body, "response_format": form}, temperature)
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in chat.check_messages(body.get("messages")):
        messages += _chat_messages(message)
    if messages and messages[-1]["role"] == "assistant":
        raise RequestRefused("the last message must be the user's: answers are not continued")
    given = chat.parse_tools(body.get("tools"), ("custom", None))
    tools = [chat.function_tool(tool, "input_schema") for tool in given]
    choice = chat.parse_object(body, "tool_choice")
    return ChatRequest(
        messages=chat.parse_messages(messages),
        tools=tools,
        max_tokens=chat.parse_count(body, "max_tokens"),
        stop=chat.parse_stop(body, "stop_sequences"),
        **chat.choose_tools(choice, tools, not choice.get("disable_parallel_tool_use")),
    )


def _chat_messages(message: Message) -> list[Message]:
    """Translate a message. Each tool result becomes a message, and so does the text beside it."""
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        raise chat.invalid(f"role {role!r:.100} must be one of {', '.join(_ROLES)}")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    if not all(isinstance(block, dict) for block in content):
        raise chat.invalid("content must be a string or a list of objects")
    if role == "assistant":
        uses = [block for block in content if block.get("type") == "tool_use"]
        texts = [b for b in content if b.get("type") not in ("tool_use", *_THOUGHTS)]
        calls = [chat.call_message(*map(use.get, ("id", "name", "input"))) for use in uses]
        return [{"role": role, "content": texts, "tool_calls": calls}]
    messages = []
    for is_result, blocks in itertools.groupby(content, lambda b: b.get("type") == "tool_result"):
        if is_result:
            messages += [
                {"role": "tool", "tool_call_id": b.get("tool_use_id"), "content": b.get("content")}
                for b in blocks
            ]
        else:
            messages.append({"role": role, "content": list(blocks)})
    return messages


def _anthropic_response(answers: list[Answer], body: Body) -> Body:
    """Return a `message` object. It has text, which may be empty, or calls, or both."""
    (answer,) = answers
    calls, text = answer.message.get("tool_calls", []), answer.message["content"] or ""
    content: list[Body] = [] if calls and not text else [{"type": "text", "text": text}]
    if thought := answer.message.get("reasoning_content"):
        content.insert(0, {"type": "thinking", "thinking": thought, "signature": ""})
    for call in calls:
        use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        content.append({**use, "input": json.loads(call["function"]["arguments"])})
    ended = "stop_sequence" if answer.stop_text else "end_turn"
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": _STOP_REASONS.get(answer.finish_reason, ended),
        "stop_sequence": answer.stop_text,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def _anthropic_events(response: Body, body: Body) -> Iterator[Body]:
    usage = response["usage"]
    begun = {"content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**usage, "output_tokens": 0}
    yield {"type": "message_start", "message": {**response, **begun}}
    for index, block in enumerate(response["content"]):
        if (kind := block["type"]) == "tool_use":
            arguments = json.dumps(block["input"])
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        else:  # text or thinking
            empty, delta = {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {key: response[key] for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def _anthropic_error(status: int, message: str, code: str) -> Body:
    """Return the body of a refusal. Anthropic's own has no `code`."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


class Api(NamedTuple):
    """The translations of an API."""

    parse_request: Callable[[Body, float | None, Stored], ChatRequest]  # (body, temperature, …)
    response: Callable[[list[Answer], Body], Body]  # (answers, body of the request)
    events: Callable[[Body, Body], Iterator[Body]]  # (response, body of the request)
    error: Callable[[int, str, str], Body]  # (status, message, code)
    end: str = ""  # the text after the last event of a stream


OPENAI = Api(_openai_request, _openai_response, _openai_events, _openai_error, "data: [DONE]\n\n")
RESPONSES = Api(_responses_request, _responses_response, _responses_events, _openai_error)
ANTHROPIC = Api(_anthropic_request, _anthropic_response, _anthropic_events, _anthropic_error)
# By path.
APIS = {"/v1/chat/completions": OPENAI, "/v1/responses": RESPONSES, "/v1/messages": ANTHROPIC}
