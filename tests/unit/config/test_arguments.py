"""Plain words and options of the command line become overrides, whatever a folder is called."""

import io
import subprocess

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.cli import checked_config, main, parse
from areal_lite.config import command_names
from areal_lite.config.command_line import compose_config, quoted, switches
from areal_lite.config.help import show
from areal_lite.launch import preflight

FOLDERS = ["runs/a", "1", "null", "a b", "it's", 'say "x"', r"back\slash", "runs/[1,2]", "ü", "\\"]


@pytest.mark.parametrize("command", ["export", "diagnose"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_word_is_the_run_directory(command, folder):
    _, overrides = parse(command, [folder])
    assert compose_config(command, overrides).run_dir == folder


def test_words_options_and_settings_mix():
    flags, overrides = parse("report", ["--follow", "runs/a", "port=8000", "--help"])
    config = compose_config("report", overrides)
    assert (config.runs, config.port) == (["runs/a"], 8000)
    assert flags == {"--follow", "--help"}
    _, overrides = parse("report", [*FOLDERS, "out=x.html"])
    assert compose_config("report", overrides).runs == FOLDERS


PRINTABLE = st.characters(exclude_characters="$", exclude_categories=["Cs", "Cc", "Zl", "Zp"])


@given(st.text("\\'\"a ,[") | st.text(PRINTABLE))
def test_any_text_survives_quoting(text):
    [override] = OverridesParser.create().parse_overrides([f"key={quoted(text)}"])
    assert override.value() == text


def test_every_switch_of_a_command_is_one_of_its_settings():
    assert switches("diagnose") == {"--tokens": "tokens=true"}
    for command in command_names():
        compose_config(command, [override for override in switches(command).values()])


def run(capsys, *args: str) -> str:
    status = main(list(args))
    lines = capsys.readouterr().err.splitlines()
    assert status in (1, 2) and len(lines) == 1, lines
    return lines[0]


def test_mistakes_are_one_line(capsys, tmp_path):
    for command in ("report", "diagnose", "export"):
        assert f"{tmp_path} is not a run directory" in run(capsys, command, str(tmp_path))
        assert "nowhere: there is no such folder" in run(capsys, command, "nowhere")
    assert "takes one folder, not 2: runs/b" in run(capsys, "diagnose", "runs/a", "runs/b")
    assert "name one run directory, not 2" in run(capsys, "report", "--inspect", "runs/a", "runs/b")
    assert "nowhere: there is no such folder" in run(capsys, "report", "nowhere", str(tmp_path))
    assert "unknown option --folow; did you mean --follow?" in run(capsys, "report", "--folow")
    assert "--follow is for `areal-lite report`" in run(capsys, "diagnose", "--follow")
    assert "runs/a has no value: write runs/a=…" in run(capsys, "train", "runs/a")


MISREAD = [
    *("a=b", "/data/a~b", "a,b", "a, b", "(a)", "{a}", "[a]", "it's", '"a', 'b"', "a#b;c&d"),
    *("naïve", "<a>", "`a`", "!a", "a\nb\tc", "it's\n\\a", "file:///a?b=c", "a,", "a]", "$(a)"),
]


@pytest.mark.parametrize("value", MISREAD)
def test_a_misread_text_is_told_how_to_type_it(value, capsys):
    message = run(capsys, "train", "--cfg", f"data.system_prompt={value}")
    typed = message.partition(": type ")[2]
    words = subprocess.check_output(["bash", "-c", f"printf %s {typed}"], text=True)
    assert compose_config("train", [words]).data.system_prompt == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward.function=f=g",
            """cannot read reward.function=f=g: type 'reward.function="f=g"'""",
        ),
        ("data.args.name=f=g", """cannot read data.args.name=f=g: type 'data.args.name="f=g"'"""),
        ("data.path=~/a", 'cannot read data.path=~/a: type "data.path=$HOME/a"'),
        ("trainer.lr = 1", "cannot read trainer.lr = 1: type trainer.lr=1"),
        ("trainer.lr==1", "type trainer.lr=1"),
        ("trainer.lr:1", "cannot read trainer.lr:1: write KEY=VALUE"),
        ("trainer.lr=1,2", "trainer.lr=1,2 is several values: give one"),
        ("rollout.filters=a:b,c:d", """type 'rollout.filters=["a:b","c:d"]'"""),
        ('server.args={"a": 1}', "type 'server.args={a: 1}'"),
        ("nowhere=f=g", "cannot read nowhere=f=g: check its brackets and quotes"),
    ],
)
def test_a_misread_override_is_told_what_to_type(override, message, capsys):
    assert message in run(capsys, "train", "--cfg", override)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_line_that_it_would_break_within_a_word(monkeypatch):
    monkeypatch.setenv("COLUMNS", "42")
    text = f"HINT   Title\n\n  change    raise rollout.max_new_tokens; lower trainer.lr\n{'b' * 50}"
    for stream, lines in (
        (io.StringIO(), text.splitlines()),
        (
            Terminal(),
            [
                *("HINT   Title", "", "  change    raise rollout.max_new_tokens;"),
                *("            lower trainer.lr", "b" * 50),
            ],
        ),
    ):
        show(text, 12, stream)
        assert stream.getvalue().splitlines() == lines


def test_cautions_are_wrapped_for_a_terminal_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(preflight, "check_config", lambda *_: ["trainer.lr=1 is too large for it"])
    for stream, count in ((io.StringIO(), 1), (Terminal(), 2)):
        monkeypatch.setattr("sys.stderr", stream)
        checked_config("diagnose", [f"run_dir={tmp_path}"])
        first, *rest = stream.getvalue().splitlines()
        assert first.startswith("caution: trainer.lr=1") and len(rest) == count - 1
        assert all(line.startswith(" " * 9) for line in rest)


def test_a_chat_takes_a_model_or_a_run(capsys, tmp_path):
    model, run_dir = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for folder, key in ((model, "model"), (run_dir, "run_dir")):
        config = compose_config("chat", parse("chat", [str(folder)])[1])
        assert config[key] == str(folder)
    assert "set either model or run_dir" in run(capsys, "chat")
    assert "set either model or run_dir" in run(capsys, "chat", str(model), "run_dir=x")
    assert "run: there is no such folder" in run(capsys, "chat", str(run_dir))


def test_the_help_shows_both(capsys):
    for command, words in (("report", "[RUN …]"), ("export", "[RUN]")):
        assert main([command, "--help"]) == 0
        assert f"areal-lite {command} {words} [key=value …]" in capsys.readouterr().out
