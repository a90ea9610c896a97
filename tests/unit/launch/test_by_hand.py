"""Commands that start the roles of a run by hand: wrong words start nothing."""

from pathlib import Path

import pytest

from areal_lite.launch import prepare, server_pool


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (server_pool, ["run", "0"]),
        (server_pool, ["run", "0", "two"]),
        (server_pool, ["run", "0", "2", "until_end"]),
        (prepare, []),
        (prepare, ["begin"]),
        (prepare, ["start", "run"]),
    ],
)
def test_wrong_words_are_refused(module, words, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["module", *words])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2 and "usage: " in capsys.readouterr().err


def test_a_run_that_was_not_prepared_gets_no_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["prepare", "begin", str(tmp_path / "run")])
    assert prepare.main() == 1 and "config.yaml cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
