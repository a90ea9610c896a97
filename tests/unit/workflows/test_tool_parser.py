"""Calls and thoughts in the formats of models, found by SGLang's parsers in an agent's answers."""

import subprocess
import sys
from pathlib import Path

import openai
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message
from openai.types.responses import Response

from areal_lite.data.tokenizer import Tokenizer
from areal_lite.workflows.agent import Agent
from areal_lite.workflows.tool_calls import AnswerParser
from areal_lite.workflows.tools import Tools
from tests.unit.rollout.episodes import CHAT_TEMPLATE, save_chat_tokenizer
from tests.unit.workflows.test_conversations import START, Asker, traces_of, user

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
LOOK = '{"name": "look", "arguments": {"at": "it"}}'
LLAMA = '<|python_tag|>{"name": "look", "parameters": {"at": "it"}}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


def test_the_parsers_leave_no_trace_of_sglang() -> None:
    """Importing SGLang takes ten seconds and half a gigabyte, and stand-ins without a GPU."""
    code = (
        "import sys\n"
        "from areal_lite.workflows.tool_calls import check_parsers\n"
        "check_parsers('llama3', 'qwen3')\n"
        "assert not {'torch', 'sglang', 'xgrammar', 'transformers', 'openai'} & {*sys.modules}\n"
        "import transformers\n"
        "assert transformers.__version__\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)


@pytest.mark.parametrize(
    ("marks", "parser", "thoughts"),
    [
        ("", "hermes", "deepseek-r1"),  # CHAT_TEMPLATE drops thoughts
        ("<tool_call>", "hermes", "deepseek-r1"),
        ("<|python_tag|>", "llama3", "deepseek-r1"),
        ("[TOOL_CALLS]", "mistral", "deepseek-r1"),
        (
            "<tool_call> {{ enable_thinking is defined and enable_thinking is false }}",
            "qwen",
            "qwen3",
        ),
        ("<function=f><parameter=x>", "qwen3_coder", "deepseek-r1"),
        ("<｜tool▁calls▁begin｜> <｜tool▁sep｜>", "deepseekv31", "deepseek-r1"),
        ("<|channel|>", "gpt-oss", "gpt-oss"),
    ],
)
def test_the_chat_template_chooses(tokenizer, monkeypatch, marks, parser, thoughts) -> None:
    monkeypatch.setattr(
        tokenizer, "chat_template", CHAT_TEMPLATE + f"{{% if false %}}{marks}{{% endif %}}"
    )
    chosen = AnswerParser(tokenizer)
    assert (chosen.tool_parser, chosen.thoughts) == (parser, thoughts)


def test_special_tokens_choose(tokenizer, monkeypatch) -> None:
    vocabulary = {**tokenizer.ids, "<|python_tag|>": 999}
    monkeypatch.setattr(Tokenizer, "ids", vocabulary)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert AnswerParser(tokenizer).tool_parser == "llama3"
    assert AnswerParser(tokenizer).thoughts == ""


@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_a_call_in_a_thought_is_none(tokenizer, prompt: str) -> None:
    """The prompt may have begun the thought."""
    parser, call = AnswerParser(tokenizer), f"<tool_call>{LOOK}</tool_call>"
    begun = "" if prompt else "<think>"
    for said, rest in ((call, [("look", {"at": "it"})]), ("No.", [])):
        parsed = parser.parse(f"{begun}{call}</think>{said}", TOOLS, prompt)
        assert (parsed.thought, parsed.calls) == (call, rest)
        assert parsed.thought_text == f"{begun}{call}</think>"
    assert parser.parse(f"{begun}{call}", TOOLS, prompt) == (call, begun + call, "", [], False)


@pytest.mark.parametrize(
    "body", ["{broken", "[1]", '{"name": "look", "arguments": [1]}', '"look"', "", "}" * 5]
)
@pytest.mark.parametrize("name", ["hermes", "qwen", "llama3", "mistral", "glm45", "deepseekv3"])
def test_a_broken_call_is_text(tokenizer, name: str, body: str) -> None:
    marks = {
        "hermes": "<tool_call>{}</tool_call>",
        "qwen": "<tool_call>\n{}\n</tool_call>",
        "llama3": "<|python_tag|>{}",
        "mistral": "[TOOL_CALLS] [{}]",
        "glm45": "<tool_call>{}</tool_call>",
        "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁calls▁end｜>",
    }
    text = "Hm. " + marks[name].replace("{}", body)
    parsed = AnswerParser(tokenizer, name).parse(text, TOOLS)
    assert parsed == ("", "", text, [], True)


def test_calls_are_found_by_special_tokens(tokenizer) -> None:
    """A reader's text has none of them, and the trace has what was sampled."""
    broken = '<|python_tag|>{"name"'

    async def agent(asker: Asker) -> None:
        *_, message = history = await asker.ask([user("a?")], tools=TOOLS)
        (call,) = message["tool_calls"]
        assert message["content"] == "I look."
        assert call["function"] == {"name": "look", "arguments": '{"at": "it"}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "red"}
        *_, message = history = await asker.ask([*history, result], tools=TOOLS)
        assert message == {"role": "assistant", "content": "Red."}
        *_, message = history = await asker.ask([*history, user("b?")], tools=TOOLS)
        assert message == {"role": "assistant", "content": broken}
        *_, message = await asker.ask([*history, user("c?")], tools=TOOLS, tool_choice="none")
        assert message == {"role": "assistant", "content": LLAMA}

    red = "<tool_response>red</tool_response>"
    script = [f"I look.{LLAMA}", "<|im_start|>Red.", broken, LLAMA]
    (text,) = traces_of(tokenizer, agent, script, tool_parser="llama3")
    begin = f"{START}system Tools: look a? <I look.{LLAMA}>"
    assert text == f"{begin} {red} <<|im_start|>Red.> b? <{broken}> c? <{LLAMA}>"


def test_a_stop_text_ends_what_is_parsed(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        *_, message = await asker.ask([user("a?")], tools=TOOLS, stop=["}}"])
        assert "tool_calls" not in message and message["content"] == LLAMA[:-2]

    traces_of(tokenizer, agent, [LLAMA], tool_parser="llama3")


def test_a_stream_has_calls_and_thoughts(tokenizer) -> None:
    said = f"<think>hm</think>I look. <tool_call>{LOOK}</tool_call>"

    async def agent(asker: Asker) -> None:
        stream = await asker.client.chat.completions.create(
            model="policy", messages=[user("a?")], tools=TOOLS, stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == "hm"
        assert "".join(d.content or "" for d in deltas) == "I look."
        calls = [call.function for d in deltas for call in d.tool_calls or ()]
        assert calls[0].name == "look"
        assert "".join(call.arguments for call in calls) == '{"at": "it"}'

    traces_of(tokenizer, agent, [said], reasoning_parser="auto")


def test_a_thought_beside_the_content_may_be_dropped_without_a_new_trace(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        *_, message = await asker.ask([user("a?")])
        assert message == {"role": "assistant", "content": "a", "reasoning_content": "so"}
        history = [user("a?"), {"role": "assistant", "content": "a"}, user("b?")]
        *_, message = await asker.ask(history)
        assert message == {"role": "assistant", "content": "", "reasoning_content": "cut"}

    script = ["<think>so</think>a", "<think>cut"]
    assert traces_of(tokenizer, agent, script, reasoning_parser="auto") == [
        "a? <<think>so</think>a> b? <<think>cut>"
    ]


@pytest.mark.parametrize("streams", [False, True])
def test_every_api_has_the_thought_beside_the_content(tokenizer, streams: bool) -> None:
    """A history with thoughts, or without, continues its trace in all of them."""

    async def ask_for_response(asker: Asker, **settings: object) -> Response:
        if not streams:
            return await asker.client.responses.create(model="policy", **settings)
        async with asker.client.responses.stream(model="policy", **settings) as stream:
            return await stream.get_final_response()

    async def ask_for_message(client: AsyncAnthropic, messages: list) -> Message:
        settings = {"model": "policy", "max_tokens": 90, "messages": messages}
        if not streams:
            return await client.messages.create(**settings)
        async with client.messages.stream(**settings) as stream:
            return await stream.get_final_message()

    async def agent(asker: Asker) -> None:
        answer = await ask_for_response(asker, input="a?")
        thought, said = answer.output
        assert [part.text for part in thought.content] == ["so"] and answer.output_text == "a"
        items = [user("a?"), thought.model_dump(exclude_none=True), said.model_dump(), user("b?")]
        assert (await ask_for_response(asker, input=items)).output_text == "b"
        url = str(asker.client.base_url).removesuffix("/v1/")
        history = [user("a?"), {"role": "assistant", "content": "a"}, user("b?")]
        history += [{"role": "assistant", "content": "b"}, user("c?")]
        async with AsyncAnthropic(base_url=url, api_key=asker.client.api_key) as client:
            message = await ask_for_message(client, history)
            thought, said = message.content
            assert (thought.thinking, said.text) == ("oh", "c")
            blocks = [block.model_dump() for block in message.content]
            history += [{"role": "assistant", "content": blocks}, user("d?")]
            message = await ask_for_message(client, history)
            assert [block.text for block in message.content] == ["d"]

    script = ["<think>so</think>a", "b", "<think>oh</think>c", "d"]
    (text,) = traces_of(tokenizer, agent, script, reasoning_parser="auto")
    assert text == "a? <<think>so</think>a> b? <b> c? <<think>oh</think>c> d? <d>"


def test_a_thought_that_the_prompt_has_begun(tokenizer, monkeypatch) -> None:
    """A call that is required begins without one."""
    end = "{{ '<|im_start|>assistant\\n' }}"
    assert CHAT_TEMPLATE.count(end) == 1
    template = CHAT_TEMPLATE.replace(end, "{{ '<|im_start|>assistant\\n<think>\\n' }}")
    monkeypatch.setattr(tokenizer, "chat_template", template)

    async def agent(asker: Asker) -> None:
        *_, message = history = await asker.ask([user("a?")], tools=TOOLS)
        assert (message["content"], message["reasoning_content"]) == ("a", f"so {LLAMA}")
        settings = {"tools": TOOLS, "tool_choice": "required"}
        *_, message = await asker.ask([*history, user("b?")], **settings)
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": '{"at": "it"}'}
        *_, message = await asker.ask([*history, user("c?")], tools=TOOLS)
        assert message == {"role": "assistant", "content": "", "reasoning_content": LLAMA}

    script = [f"so {LLAMA}</think>a", 'look", "arguments": {"at": "it"}}', LLAMA]
    traces_of(tokenizer, agent, script, tool_parser="llama3", reasoning_parser="auto")


def test_no_call_can_be_required_of_a_format_without_a_beginning(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        with pytest.raises(openai.BadRequestError, match=r"auto or none.*\(glm45\)"):
            await asker.ask([user("a?")], tools=TOOLS, tool_choice="required")
        await asker.ask([user("a?")])

    assert traces_of(tokenizer, agent, ["a"], tool_parser="glm45") == ["a? <a>"]


@pytest.mark.parametrize("name", ["qwen", "llama3", "mistral", "kimi_k2", "interns1"])
def test_a_begun_call_goes_on(tokenizer, name: str) -> None:
    parser = AnswerParser(tokenizer, name)
    begin, rest = parser.begin_call("look"), parser.begin_call()
    assert begin is not None and rest is not None
    assert begin.startswith(rest) and "look" in begin and "look" not in rest
    ends = {"mistral": "}]", "kimi_k2": "<|tool_call_end|><|tool_calls_section_end|>"}
    ends |= {"qwen": "}\n</tool_call>", "interns1": "}\n<|action_end|>", "llama3": "}"}
    parsed = parser.parse(begin + '{"at": "it"}' + ends[name], TOOLS)
    assert parsed.calls == [("look", {"at": "it"})]


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_names_that_sglang_lacks_are_refused(setting: str) -> None:
    agent = "tests.integration.toy_agent:three_turns"
    Agent(agent, tool_parser="qwen3_coder", reasoning_parser="qwen3")
    Tools(tool_parser="qwen3_coder")
    with pytest.raises(ValueError, match=f"workflow_args.{setting}=qwen4: SGLang knows .*auto, "):
        Agent(agent, **{setting: "qwen4"})
    with pytest.raises(ValueError, match="workflow_args.tool_parser=qwen4"):
        Tools(tool_parser="qwen4")
