"""The other ways to see a run: following it, comparing, the terminal, a trace."""

import http.client
import io
import json
import sqlite3
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from areal_lite.cli import main
from areal_lite.run_dir.metrics import append_event
from areal_lite.run_dir.reader import RunReader
from areal_lite.tools.audit.audit import audit
from areal_lite.tools.commands import ReportConfig
from areal_lite.tools.report.command import LivePage, is_loopback, page_server
from areal_lite.tools.report.page import compare_page, config_differences, run_names
from areal_lite.tools.report.rollouts import reader_filters, show_matching
from areal_lite.tools.report.run_data import read_run
from areal_lite.tools.report.summary import FACTS, count_facts
from examples.monitoring.trace import trace_events, write_trace
from tests.unit.tools.report.browser import BROWSER, Session, browse
from tests.unit.tools.report.recorded_run import unpack
from tests.unit.tools.report.synthetic_run import T0, hand_made, simulate, step_record
from tests.unit.tools.report.test_page import Page, hostile_run


@contextmanager
def serving(run_dir: Path):
    server = page_server(run_dir, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def get(path: str = "/", **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request("GET", path, headers=headers)
        return connection.getresponse()

    try:
        yield server, get
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_follow_server_answers_this_machine_only(tmp_path: Path) -> None:
    hand_made(tmp_path)
    with serving(tmp_path) as (server, get):
        assert server.server_address[0] == "127.0.0.1"
        answer = get()
        assert answer.status == 200 and answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "data-follow" in answer.read().decode()
        assert get(**{"If-None-Match": answer.headers["ETag"]}).status == 304
        port = server.server_port
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1",
            f"127.0.0.1.nip.io:{port}",
        ):
            assert get(Host=host).status == 403, host
        assert get("/config.yaml").status == 404 and get("/../config.yaml").status == 404
    assert is_loopback("localhost:80", 80) and is_loopback("[::1]:80", 80)
    assert not is_loopback("localhost:81", 80) and not is_loopback("", 80)


def test_a_browser_that_leaves_is_no_error(tmp_path: Path, capfd) -> None:
    hand_made(tmp_path)
    with serving(tmp_path) as (server, _):
        for error in (BrokenPipeError("gone"), ValueError("a defect")):
            try:
                raise error
            except Exception:
                server.handle_error(None, ("127.0.0.1", 1))
    text = capfd.readouterr().err
    assert "a defect" in text and "gone" not in text


def test_a_followed_page_has_the_steps_that_were_added(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("areal_lite.tools.report.command._LEAST_S", 0.0)
    monkeypatch.setattr("areal_lite.tools.report.command._PATIENCE", 0.0)
    hand_made(tmp_path)
    live = LivePage(tmp_path)
    before, tag = live.read()
    assert live.read() == (before, tag), "nothing changed"
    append_event(tmp_path, "metrics", {**step_record(2), "logged_at": T0 + 30, "step": 3})
    after, new_tag = live.read()
    assert new_tag != tag and b"3 of 2 training steps" in after


@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_an_open_page_shows_new_steps_by_itself(tmp_path: Path) -> None:
    hand_made(tmp_path)
    with serving(tmp_path / ".") as (server, _):

        async def use(session: Session) -> None:
            rows = "document.querySelectorAll('#steps-table tbody tr').length"
            assert await session.value(rows) == 2
            await session.value("document.querySelector('.groups button:last-child').click()")
            chosen = "document.querySelector('.groups [aria-current=true]').textContent"
            before = await session.value(chosen)
            line = {**step_record(2), "logged_at": T0 + 30, "step": 3}
            append_event(tmp_path, "metrics", line)
            await session.until(f"{rows} === 3")
            assert "3 of 2" in await session.value(
                "document.querySelector('.headline').textContent"
            )
            assert await session.value(chosen) == before

        browse(f"http://127.0.0.1:{server.server_port}/", tmp_path / "profile", use)


def test_a_comparison_names_what_differs(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for steps, folder in zip((6, 8), folders):
        folder.mkdir()
        simulate(folder, steps=steps, max_staleness=steps)
    page = Page(text := compare_page(folders))
    charts = json.loads(page.raw["data"])["charts"]
    assert [series["name"] for series in charts["staleness"]["series"]] == ["a", "b"]
    for word in ("buffer.max_staleness", "trainer.steps"):
        assert word in text
    a, b = (count_facts(read_run(folder)) for folder in folders)
    assert set(a) == set(FACTS) and b["steps"] - a["steps"] == 2


def test_settings_differ_where_any_run_differs() -> None:
    one = {"a": {"b": 1, "c": 2}, "run_dir": "x", "only": None}
    other = {"a": {"b": 1, "c": 3}, "run_dir": "y"}
    assert config_differences([one, other]) == [["a.c", "2", "3"], ["only", "null", "–"]]
    assert config_differences([one, one]) == []
    assert run_names([Path("/x/a"), Path("/y/a")]) == ["x/a", "y/a"]
    assert run_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]


@pytest.mark.parametrize(
    "filters",
    (
        {"group": 3},
        {"step": 2},
        {"version": 4},
        {"reward_min": 0.5},
        {"reward_max": 0.5},
        {"step": 3, "version": 0, "reward_min": 1.0},
        {},
    ),
)
def test_filters_choose_what_a_plain_loop_chooses(tmp_path: Path, filters: dict) -> None:
    simulate(tmp_path, steps=6)
    config = ReportConfig(**filters)
    store = RunReader(tmp_path / "trajectories.sqlite")
    expected = [
        (row["group_id"], row["sample_index"])
        for row in store.trajectories()
        if config.group in (None, row["group_id"])
        and (config.step is None or row["step"] == config.step - 1)
        and (config.version is None or config.version in row["versions"])
        and (config.reward_min is None or row["reward"] >= config.reward_min)
        and (config.reward_max is None or row["reward"] <= config.reward_max)
    ]
    chosen = reader_filters(config)
    rows = store.trajectories(**chosen)
    assert [(row["group_id"], row["sample_index"]) for row in rows] == expected
    assert store.count_trajectories(**chosen) == len(expected) > 0
    rows = store.trajectories(**chosen, limit=1)
    assert [(row["group_id"], row["sample_index"]) for row in rows] == expected[:1]
    store.close()


def test_the_terminal_gets_no_control_characters(tmp_path: Path) -> None:
    hostile_run(tmp_path)
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    for part in show_matching(tmp_path, ReportConfig(group=3)):
        console.print(part)
    text = stream.getvalue()
    assert "1 trajectory matches" in text and "[version 1, 30 tokens, mean log-prob -1]" in text
    assert "\x00" not in text and "\\x00" in text


def test_a_trace_has_every_request_step_and_push(tmp_path: Path) -> None:
    simulate(tmp_path, steps=6)
    run = read_run(tmp_path)
    timed = [{**m, "train_s": 0.5, "wait_s": 1.0, "push_s": 0.1} for m in run.metrics]
    events = list(trace_events(run.columns, timed))
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert sum(name.startswith("group ") for name in names) == len(run.columns)
    assert names.count("trains") == names.count("pushes weights") == 6
    assert sum(event["ph"] == "i" for event in events) == 6
    # Slices of a thread nest: a slice ends before the next one at its level begins.
    open_until: dict[tuple[int, int], int] = {}
    for event in events:
        if event["name"].startswith("group "):
            key = (event["pid"], event["tid"])
            assert event["ts"] >= open_until.get(key, -(10**9))
            open_until[key] = event["ts"] + event["dur"]
    path = tmp_path / "trace.json"
    assert write_trace(tmp_path, path) == len(json.loads(path.read_text())["traceEvents"])


def test_a_run_is_shown_in_every_form(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("async", "sync"):
        unpack(name, Path("runs"))
    for words in ("", "--inspect", "runs/sync"):
        assert main(["report", "runs/async", *words.split()]) == 0, capsys.readouterr().err
    for file in ("report.html", "report.png"):
        assert (tmp_path / "runs/async" / file).stat().st_size > 10_000
    assert "async and sync" in (tmp_path / "compare.html").read_text()
    assert "trajectories match; the first 3 follow" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[", "a: &x [*x", "- 1", "", "\x00"])
def test_a_damaged_configuration_is_one_line(tmp_path: Path, capsys, content: str) -> None:
    run_dir = unpack("async", tmp_path)
    (run_dir / "config.yaml").write_text(content)
    for words in (["report"], ["report", "--inspect"], ["diagnose"], ["diagnose", "--audit"]):
        assert main([*words, str(run_dir)]) == 1
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "config.yaml" in message


@pytest.mark.parametrize(
    "words", [["report"], ["report", "--follow"], ["diagnose"], ["diagnose", "--audit"]]
)
def test_a_number_that_a_flipped_bit_made_is_one_line(tmp_path: Path, capsys, words) -> None:
    run_dir = unpack("async", tmp_path)
    with sqlite3.connect(run_dir / "trajectories.sqlite") as db:
        db.execute("UPDATE trajectories SET n_tokens = n_tokens | 1 << 40 WHERE group_id = 3")
    assert main([*words, str(run_dir)]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "the records are damaged" in message


def test_settings_of_another_command_are_shown(tmp_path: Path) -> None:
    run_dir = unpack("async", tmp_path)
    (run_dir / "config.yaml").write_text("trainer: 5")
    assert main(["report", str(run_dir)]) == 0


def test_a_command_without_a_run_says_what_to_add(capsys) -> None:
    assert main(["report"]) == 1
    assert "runs: name one run directory, not 0" in capsys.readouterr().err
    assert main(["report", "nowhere", "--inspect"]) == 1
    assert "nowhere: there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["async", "sync"])
def test_the_books_of_an_unpacked_run_are_right(name: str, tmp_path: Path) -> None:
    """Its settings are those of today: an audit reads them all."""
    checks = audit(unpack(name, tmp_path), tokens=True)
    assert [check.name for check in checks if check.wrong] == []
    assert len(checks) >= 11
