"""The prompts of a chat, and the lines that it takes.

tests/integration/test_chat.py runs the command.
"""

import io
from pathlib import Path

import pytest

from areal_lite.data.tokenizer import Tokenizer
from areal_lite.quickstart.make_model import build_char_tokenizer
from areal_lite.tools.chat import Conversation, _lines
from areal_lite.tools.commands import ChatConfig

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
    assert conversation.kind == "with its chat template"


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
    assert conversation.kind == "each line is a prompt as it is"


@pytest.mark.parametrize(
    ("text", "lines"),
    [("a\n\n  b \n", ["a", "b"]), ("a\n/quit\nb\n", ["a"]), ("", []), ("a", ["a"])],
)
def test_lines_end_with_the_input_or_with_quit(monkeypatch, text, lines):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert list(_lines()) == lines
