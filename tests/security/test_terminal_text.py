"""Text of a model or of an error acts on no terminal, and forges no line of a log."""

import asyncio
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from areal_lite import cli
from areal_lite.launch.roles import ProcessFailed, Roles
from areal_lite.servers.client import SamplingParams
from areal_lite.system.files import append_log
from areal_lite.system.processes import tail, visible
from areal_lite.tools import chat
from areal_lite.tools.report.exporter import _log_once

CLIPBOARD = "\x1b]52;c;cHduZWQ=\x07\x1b[2J"
# Signs of the model that a reader sees, or that shape a text.
PLAIN = "tab\t, line\n, é, ß, 漢字\u3000, שלום, नमस्ते, 👍🏽, ❤\ufe0f, ∑, \xa0, ﷽"


def test_only_what_a_reader_sees_stays() -> None:
    """The general categories of Unicode are the reference."""
    assert visible(PLAIN) == PLAIN
    kept = [sign for sign in map(chr, range(sys.maxunicode + 1)) if visible(sign) == sign]
    categories = {unicodedata.category(sign) for sign in kept if sign not in "\t\n"}
    # Letters, marks, numbers, punctuation and symbols, and of the rest only spaces.
    assert {category for category in categories if category[0] not in "LMNPS"} == {"Zs"}
    assert {category[0] for category in categories} == set("LMNPSZ")
    assert not [sign for sign in kept if unicodedata.name(sign, "").startswith("TAG ")]
    assert not [sign for sign in kept if "ZERO WIDTH" in unicodedata.name(sign, "")]


@pytest.mark.parametrize(
    ("sign", "code"),
    [
        ("\x1b", "\\x1b"),
        ("\r", "\\r"),
        ("\x9b", "\\x9b"),
        ("\u202e", "\\u202e"),
        ("\u2066", "\\u2066"),
        ("\u200e", "\\u200e"),
        ("\u061c", "\\u061c"),
        ("\u2028", "\\u2028"),
        ("\u200b", "\\u200b"),
        ("\ufeff", "\\ufeff"),
        ("\ud83d", "\\ud83d"),
        ("\U000e0041", "\\U000e0041"),
        ("\U000e0101", "\\U000e0101"),
    ],
)
def test_the_code_of_a_sign_is_shown(sign: str, code: str) -> None:
    assert visible(f"a{sign}b") == f"a{code}b"


FORGED = "2026-01-01 00:00:00,000 ERROR areal_lite.controller: the disk is full"
ROLE = """
import logging, sys
from areal_lite.system.processes import run_role
text = sys.argv[2].encode().decode("unicode_escape")
def work(run_dir):
    logging.getLogger("areal_lite.rollout").warning("a workflow failed: %s", text)
    raise {error}(text)
sys.exit(run_role(work, ValueError))
"""


@pytest.mark.parametrize("error", ["ValueError", "KeyError"])
def test_text_of_an_error_forges_no_line_of_a_log(error: str, tmp_path: Path) -> None:
    text = f"bad{CLIPBOARD}\n{FORGED}".encode("unicode_escape").decode()
    command = [sys.executable, "-c", ROLE.replace("{error}", error), str(tmp_path), text]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "\x1b" not in done.stderr and "bad\\x1b]52" in done.stderr
    entries = [line for line in done.stderr.splitlines() if not line.startswith("    ")]
    assert [re.match(r"\S+ \S+,\d{3} (.*?): ", line)[1] for line in entries] == [
        "WARNING areal_lite.rollout",
        "ERROR __main__",
    ]
    assert ("Traceback" in done.stderr) == (error == "KeyError"), "users mend a ValueError"


def test_a_supervisors_log_has_one_entry_for_each_text(tmp_path: Path) -> None:
    append_log(tmp_path / "restarts.log", f"trainer failed: {CLIPBOARD}\n{FORGED}")
    first, second = (tmp_path / "restarts.log").read_text().splitlines()
    assert second == f"    {FORGED}" and "\\x1b]52" in first and "\x1b" not in first


def test_the_end_of_a_log_on_the_terminal(tmp_path: Path) -> None:
    with Roles(tmp_path) as roles:
        code = f"print({CLIPBOARD!r}); raise SystemExit(1)"
        role = roles.start("controller", [sys.executable, "-c", code])
        role.process.wait()
        with pytest.raises(ProcessFailed) as failed:
            roles.check()
    assert "\\x1b]52" in str(failed.value) and "\x1b" not in str(failed.value)
    assert "\x1b" not in tail(role.log)


def test_an_answer_of_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    async def complete(*_: object) -> SimpleNamespace:
        return SimpleNamespace(tokens=np.array([2, 1]), finish_reason="stop")

    async def open_session(_: str) -> None:
        return None

    conversation = SimpleNamespace(
        params=SamplingParams(8, 1.0, (1,), 100),
        tokenizer=SimpleNamespace(decode=lambda ids: f"hello {CLIPBOARD}"),
    )
    fleet = SimpleNamespace(complete=complete, open_session=open_session)
    answer = asyncio.run(chat._answer(fleet, conversation, np.array([3])))
    assert answer == f"hello {CLIPBOARD}", "the model reads what it said"
    assert capsys.readouterr().out == "hello \\x1b]52;c;cHduZWQ=\\x07\\x1b[2J\n"


def test_messages_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", f"{tmp_path}/{CLIPBOARD}"]) != 0
    _log_once(tmp_path, f"ValueError: {CLIPBOARD}")
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and shown.count("\\x1b]52") == 2, shown
