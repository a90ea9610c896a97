"""The prompts of a chat, and the lines that it takes.

tests/integration/test_chat.py runs the command.
"""

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders
from tokenizers.models import BPE

from areal_lite.config import DataConfig, RolloutConfig, TrainConfig, save_config
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.servers.client import GenerationChunk
from areal_lite.servers.fleet import Completion
from areal_lite.tools.chat import Conversation, _answer, _lines, _turns
from areal_lite.tools.commands import ChatConfig
from areal_lite_quickstart.make_model import build_char_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def tokenizer(folder: Path, template: str | None) -> Tokenizer:
    made = build_char_tokenizer()
    if template != "":
        made.chat_template = template
    made.save_pretrained(folder)
    return Tokenizer(folder)


def asked(conversation: Conversation, line: str) -> str:
    return conversation.tokenizer.decode(conversation.prompt(line))


def test_the_conversation_goes_through_the_template(tmp_path):
    conversation = Conversation(tokenizer(tmp_path, TEMPLATE), ChatConfig())
    assert asked(conversation, "one?") == "<user>one?<assistant>"
    conversation.record("one?", "1")
    assert asked(conversation, "two?") == "<user>one?<assistant>1<user>two?<assistant>"
    assert not conversation.raw


@pytest.mark.parametrize(
    ("template", "raw"),
    [(None, False), ("", False), (TEMPLATE, True)],
    ids=["no template", "a template that adds nothing", "raw=true"],
)
def test_a_line_is_the_prompt(tmp_path, template, raw):
    conversation = Conversation(tokenizer(tmp_path, template), ChatConfig(raw=raw))
    for line in ("1+1=", "2+2="):
        assert asked(conversation, line) == line
        conversation.record(line, "?")
    assert conversation.raw


@pytest.mark.parametrize("prompts", [[], ["one?", "two?"]], ids=["lines", "prompts"])
def test_the_first_prompt_is_shown_as_the_model_reads_it(tmp_path, monkeypatch, capsys, prompts):
    tokenizer(tmp_path, TEMPLATE)
    monkeypatch.setattr("sys.stdin", io.StringIO("one?\ntwo?\n"))
    for turn in _turns(ChatConfig(model=str(tmp_path), prompts=prompts), tmp_path, tmp_path):
        turn.close()  # unanswered
    shown = capsys.readouterr().err
    assert shown.count("as the model reads it") == 1
    assert "reads it: '<user>one?<assistant>'" in shown and "leaves out" not in shown


def test_a_prompt_without_the_chat_template_is_a_caution(tmp_path, monkeypatch, capsys):
    tokenizer(tmp_path, TEMPLATE)
    for turn in _turns(ChatConfig(raw=True, prompts=["one?"]), tmp_path, tmp_path):
        turn.close()
    assert "reads it: 'one?'\ncaution: it leaves out" in capsys.readouterr().err


def test_a_run_is_asked_as_it_was_trained(tmp_path, capsys):
    """With its variables of the chat template, and its system prompt."""
    template = TEMPLATE.replace("<assistant>", "<assistant>{{ mood }}")
    tokenizer(tmp_path / "model", template)
    data = DataConfig(chat_template_kwargs={"mood": "calm"}, system_prompt="Be brief.")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_config(TrainConfig(model="m", run_dir=str(run_dir), data=data), run_dir)
    config = ChatConfig(run_dir=str(run_dir), prompts=["one?"])
    for turn in _turns(config, tmp_path / "model", tmp_path):
        turn.close()
    assert "reads it: '<system>Be brief.<user>one?<assistant>calm'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\n\n  b \n", ["a", "b"]),
        ("\ufeffa\n", ["a"]),
        ("\udce9a\n", ["?a"]),
        ("a\n/quit\nb\n", ["a"]),
        ("", []),
        ("a", ["a"]),
    ],
)
def test_lines_end_with_the_input_or_with_quit(monkeypatch, text, lines):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert list(_lines()) == lines


def test_given_prompts_are_asked_each_by_itself(tmp_path):
    conversation = Conversation(tokenizer(tmp_path, TEMPLATE), ChatConfig(prompts=["a", "b"]))
    conversation.record("a", "1")
    assert asked(conversation, "b") == "<user>b<assistant>"


def servers_of(rest: list[int]) -> Any:
    """Make servers that sample the tokens of `rest`, as many at once as they are asked for."""

    class Servers:
        async def open_session(self, rid):
            return None

        async def complete(self, session, tokens, params):
            part, rest[:] = rest[: params.max_new_tokens], rest[params.max_new_tokens :]
            chunk = GenerationChunk(
                tokens=np.array(part, np.int32),
                logprobs=np.zeros(len(part), np.float32),
                versions=np.zeros(len(part), np.int32),
                finish_reason="length",
            )
            return Completion([chunk], 1, "length" if rest else "stop")

    return Servers()


def test_a_character_of_several_bytes_is_printed_once(tmp_path, capsys):
    """A decoder with a fallback to bytes takes back the characters before an incomplete one."""
    made = tokenizer(tmp_path, "")
    text = "In Amharic: ኢትዮጵያ"
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    made._fast = Fast(BPE(vocab=vocab, merges=[], byte_fallback=True))
    made._fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    conversation = Conversation(made, ChatConfig())
    answer = asyncio.run(_answer(servers_of([*text.encode()]), conversation, np.zeros(1, np.int32)))
    assert answer == text and capsys.readouterr().out == f"{text}\n"


def test_an_answer_ends_at_a_text(tmp_path, capsys):
    """Its tokens come a few at a time, and the text may end in the middle of them."""
    made = tokenizer(tmp_path, "")
    servers = servers_of(made.encode("one two three four", add_special_tokens=False))
    conversation = Conversation(made, ChatConfig(stop=["o thr", "zzz"]))
    assert asyncio.run(_answer(servers, conversation, conversation.prompt("?"))) == "one two thr"
    assert capsys.readouterr().out == "one two thr\n"


def test_the_answers_of_a_run_end_as_in_the_run(tmp_path, monkeypatch):
    tokenizer(tmp_path, TEMPLATE)
    rollout = RolloutConfig(stop=["</a>", 7])
    save_config(TrainConfig(model="m", run_dir=str(tmp_path), rollout=rollout), tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("one?\n"))
    asked_with = []
    monkeypatch.setattr(
        "areal_lite.tools.chat.Conversation",
        lambda _, config, prompt: asked_with.append(config.stop) or Conversation(_, config, prompt),
    )
    for own, expected in (([], ["</a>", 7]), (["x"], ["x"])):
        config = ChatConfig(run_dir=str(tmp_path), prompts=["one?"], stop=own)
        for turn in _turns(config, tmp_path, tmp_path):
            turn.close()
        assert asked_with.pop() == expected
