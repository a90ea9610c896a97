"""Coding agents as they ask: every field of their requests is taken, and a task is one trace."""

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from areal_lite.data.tokenizer import Tokenizer
from tests.unit.rollout.episodes import save_chat_tokenizer
from tests.unit.workflows.test_conversations import Asker, asking, assert_recorded

LIST = '<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>'
READ = '<tool_call>{"name": "shell", "arguments": {"command": ["cat", "a.py"]}}</tool_call>'
SCRIPT = [f"I look.{LIST}", LIST + READ, READ, "Done."]
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
    "required": ["command"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


async def streamed(asker: Asker, path: str, body: dict, headers: dict) -> AsyncIterator[dict]:
    url = str(asker.client.base_url) + path
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


async def by_responses(asker: Asker) -> int:
    """Solve a task as Codex does: it stores nothing, and sends all items with each request."""
    items: list[dict] = [
        {
            "type": "message",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }
        for role, text in (
            ("developer", "The sandbox is read-only."),
            ("user", "<environment_context>sh</environment_context>"),
            ("user", "Fix it."),
        )
    ]
    headers = {"Authorization": f"Bearer {asker.client.api_key}", "originator": "codex_cli_rs"}
    body = {
        "model": "policy",
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": [
            {"type": "function", "name": "shell", "strict": False, "parameters": PARAMETERS},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "mcp", "tools": []},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "low"},
        "client_metadata": {"session": "0199"},
    }
    for requests in range(1, 9):
        events = [event async for event in streamed(asker, "responses", body, headers)]
        assert events[-1]["type"] == "response.completed" and events[-1]["response"]["usage"]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        calls = [item for item in done if item["type"] == "function_call"]
        items += done
        items += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"}
            for call in calls
        ]
        if not calls:
            return requests
    raise AssertionError("the agent does not end")


async def by_messages(asker: Asker) -> int:
    """Solve a task as Claude Code does: it marks what a server may cache, and moves the mark."""
    cached = {"cache_control": {"type": "ephemeral"}}
    headers = {
        "x-api-key": asker.client.api_key,
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "interleaved-thinking-2025-05-14",
    }
    messages: list[dict] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Be careful.</system-reminder>"},
                {"type": "text", "text": "Fix it."},
            ],
        }
    ]
    body = {
        "model": "policy",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are a coding agent.", **cached},
            {"type": "text", "text": "The folder is /code.", **cached},
        ],
        "tools": [{"name": "shell", "description": "Runs.", "input_schema": PARAMETERS}],
        "metadata": {"user_id": "me"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "betas": ["interleaved-thinking-2025-05-14"],
    }
    for requests in range(1, 9):
        last = [{**block} for block in messages[-1]["content"]]
        last[-1] |= cached
        sent = [*messages[:-1], {**messages[-1], "content": last}]
        asked = streamed(asker, "messages?beta=true", {**body, "messages": sent}, headers)
        blocks: list[dict] = []
        async for event in asked:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "text_delta":
                    blocks[-1]["text"] += delta["text"]
                else:
                    blocks[-1]["input"] = json.loads(delta["partial_json"])
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "a.py"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        messages += [{"role": "assistant", "content": blocks}]
        if not results:
            return requests
        messages += [{"role": "user", "content": results}]
    raise AssertionError("the agent does not end")


@pytest.mark.parametrize("agent", [by_responses, by_messages])
def test_a_task_is_one_trace(tokenizer, agent) -> None:
    async def main() -> None:
        async with asking(tokenizer, list(SCRIPT), 16, 5000) as asker:
            assert await agent(asker) == len(SCRIPT)
            traces = asker.conversations.traces(0.5)
        assert_recorded(traces, asker.scripted)
        assert len(traces) == 1

    asyncio.run(main())
