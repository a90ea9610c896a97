"""A run directory that travels: the hub on a thread, and mirrors of other machines."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from areal_lite.clusters import hub, join, run_files
from areal_lite.clusters.hub import Hub
from areal_lite.clusters.join import (
    HubClient,
    HubRefused,
    LogLines,
    Mirror,
    copy_model,
    open_folder,
    settle,
)
from areal_lite.clusters.run_files import Part, Stamp
from areal_lite.config import TrainConfig, save_config
from areal_lite.run_dir.paths import TOTALS_FILE
from areal_lite.run_dir.resume import write_manifest
from areal_lite.system.files import reading, write_atomically
from areal_lite.system.network import free_port

MARKER = "checkpoints/step-4/manifest.json"


class Served:
    """A hub of the run in `run_dir`, on a thread."""

    def __init__(self, folder: Path):
        self.run_dir, self.model = folder / "run", folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        config = TrainConfig(model=str(self.model), run_dir=str(self.run_dir))
        save_config(config, self.run_dir)
        (self.run_dir / "logs").mkdir()
        self.hub = Hub(self.run_dir, free_port(), "127.0.0.1")
        self.address = self.hub.url.removeprefix("tcp://")
        self.thread = threading.Thread(target=self.hub.serve, daemon=True)
        self.thread.start()

    def client(self) -> HubClient:
        return HubClient(self.address)

    def mirror(self, folder: Path, part: Part = Part.RECORDS) -> Mirror:
        folder.mkdir(exist_ok=True)
        return Mirror(self.client(), folder, part)

    def end(self) -> None:
        (self.run_dir / TOTALS_FILE).touch()
        self.hub._answered.clear()
        self.thread.join(10)
        self.hub._socket.close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_files.ENV_KEY, "the key of these tests")
    monkeypatch.setattr("areal_lite.clusters.join._POLL_S", 0.0)
    monkeypatch.setattr("areal_lite.clusters.hub._POLL_MS", 10)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.end()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the records of a run directory by name."""
    files = run_files.files_of(folder, Part.RECORDS)
    return {name: (folder / name).read_bytes() for name in files}


def checkpoint(folder: Path) -> None:
    """Write a checkpoint of 10 MB, with a hidden file, as a trainer does."""
    step = folder / "checkpoints/step-4"
    step.mkdir(parents=True)
    (step / "__0_0.distcp").write_bytes(bytes(range(250)) * 40_000)
    (step / ".metadata").write_bytes(b"metadata")
    write_manifest(step, {})


def test_a_checkpoint_goes_to_the_hub_and_to_the_next_machine(served, tmp_path) -> None:
    mirror = served.mirror(tmp_path / "a")
    checkpoint(tmp_path / "a")
    settle(mirror)
    other = served.mirror(tmp_path / "b")
    settle(other)
    assert contents(tmp_path / "a") == contents(served.run_dir) == contents(tmp_path / "b")
    assert contents(tmp_path / "b").keys() >= {MARKER, "checkpoints/step-4/.metadata"}


def orders(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the files that a mirror carries."""
    names: list[str] = []
    carry = mirror._carry
    monkeypatch.setattr(mirror, "_carry", lambda name: names.append(name) or carry(name))
    return names


def test_the_marker_comes_last_and_goes_first(served, tmp_path, monkeypatch) -> None:
    mirror = served.mirror(tmp_path / "a")
    carried = orders(mirror, monkeypatch)
    checkpoint(tmp_path / "a")
    settle(mirror)
    assert carried[-1] == MARKER and len(carried) == 3
    for path in sorted((tmp_path / "a/checkpoints/step-4").iterdir()):
        path.unlink()
    settle(mirror)
    assert carried[3] == MARKER and len(carried) == 6
    assert not (served.run_dir / "checkpoints/step-4").exists()


def test_a_checkpoint_that_is_read_at_the_hub_stays(served, tmp_path) -> None:
    checkpoint(served.run_dir)
    with reading(served.run_dir / MARKER):
        with pytest.raises(HubRefused, match="is being read"):
            served.client().ask("remove", MARKER)
        assert (served.run_dir / MARKER).exists()


def test_lines_are_sent_once(served, tmp_path, monkeypatch) -> None:
    mirror = served.mirror(tmp_path / "a")
    sent = 0
    ask = mirror.hub.ask

    def count(method, *arguments, **options):
        nonlocal sent
        sent += sum(len(one) for one in arguments if isinstance(one, bytes))
        return ask(method, *arguments, **options)

    monkeypatch.setattr(mirror.hub, "ask", count)
    with open(tmp_path / "a/metrics.jsonl", "a", buffering=1) as file:
        for step in range(50):
            file.write(f"{step:099d}\n")
            assert mirror.look()
    settle(mirror)
    assert (served.run_dir / "metrics.jsonl").stat().st_size == sent == 5000
    write_atomically(tmp_path / "a/metrics.jsonl", "cut off\n")
    settle(mirror)
    assert (served.run_dir / "metrics.jsonl").read_text() == "cut off\n"


def test_a_later_start_goes_on_where_the_earlier_one_was_killed(served, tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.jsonl").write_text("1\n2\n3\n")
    (served.run_dir / "metrics.jsonl").write_text("1\n2\n")
    (tmp_path / "a/evals.jsonl").write_text("1\nx\n3\n")
    (served.run_dir / "evals.jsonl").write_text("1\n2\n")
    settle(served.mirror(tmp_path / "a"))
    assert contents(tmp_path / "a") == contents(served.run_dir)
    assert (served.run_dir / "metrics.jsonl").read_text() == "1\n2\n3\n"
    assert (tmp_path / "a/evals.jsonl").read_text() == "1\n2\n"


def test_state_of_an_earlier_start_is_forgotten(served, tmp_path) -> None:
    folder = tmp_path / "a"
    open_folder(served.client(), folder)
    for name in ("stop", "servers/server-7.json"):
        write_atomically(folder / name, "old")
    write_atomically(folder / "metrics.jsonl", "1\n")
    write_atomically(served.run_dir / "servers/server-1.json", "there")
    open_folder(served.client(), folder)
    settle(served.mirror(folder, Part.STATE))
    assert {*run_files.files_of(folder, Part.STATE)} == {"config.yaml", "servers/server-1.json"}
    assert (folder / "metrics.jsonl").exists() and not (served.run_dir / "stop").exists()


def test_a_server_that_is_drained_is_never_missing(served, tmp_path) -> None:
    mirror = served.mirror(tmp_path / "a", Part.STATE)
    write_atomically(tmp_path / "a/servers/server-0.json", "address")
    settle(mirror)
    (served.run_dir / "servers/server-0.json").rename(served.run_dir / "servers/server-0.draining")
    seen = []
    while mirror.look():
        seen += [sorted(path.name for path in (tmp_path / "a/servers").iterdir())]
    assert seen == [["server-0.json"], ["server-0.draining"]]


Change = tuple[str, str, bytes]
"""The side, the name of a file, and its content; empty: it is removed."""
NAMES = ["metrics.jsonl", "checkpoints/step-1/manifest.json", "checkpoints/hf/a", "profile/b"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from("ab"), st.sampled_from(NAMES), st.binary(max_size=3)),
            max_size=4,
        ),
        max_size=5,
    )
)
@example([[("a", NAMES[0], b"1")], [("a", NAMES[0], b""), ("a", NAMES[0], b"23")]])  # one inode
def test_both_sides_end_equal(served, tmp_path, rounds: list[list[Change]]) -> None:
    folder, written = tmp_path / "a", {b""}
    for path in [folder / name for name in NAMES] + [served.run_dir / name for name in NAMES]:
        path.unlink(missing_ok=True)
    mirror = served.mirror(folder)
    for changes in rounds:
        for side, name, content in changes:
            path = (folder if side == "a" else served.run_dir) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content) if content else path.unlink(missing_ok=True)
            written.add(content)
        settle(mirror)
        assert contents(folder) == contents(served.run_dir)
        assert {*contents(folder).values()} <= written


def test_logs_get_the_lines_of_all_machines(served, tmp_path) -> None:
    (served.run_dir / "logs/servers.log").write_text("hub\n")
    for name in "ab":
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs/servers.log").write_text("of an earlier start, which sent it\n")
        lines = LogLines(served.client(), tmp_path / name)
        with open(tmp_path / name / "logs/servers.log", "a") as file:
            file.write(f"{name}\n")
        settle(lines)
    assert (served.run_dir / "logs/servers.log").read_text() == "hub\na\nb\n"


def test_a_machine_without_the_model_gets_it(served, tmp_path) -> None:
    copy_model(served.client(), served.model)  # it is there
    (served.model / "model.safetensors").write_bytes(b"x" * 5_000_000)
    whole = {path.name: path.read_bytes() for path in served.model.iterdir()}
    target = tmp_path / "deep/model"
    copy_model(served.client(), target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == whole
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_folders_of_others_are_left_alone(served, tmp_path) -> None:
    with pytest.raises(ValueError, match="the hub's own run directory"):
        open_folder(served.client(), served.run_dir)
    foreign = tmp_path / "foreign"
    write_atomically(foreign / "metrics.jsonl", "1\n")
    with pytest.raises(ValueError, match="is not empty"):
        open_folder(served.client(), foreign)
    write_atomically(foreign / run_files.IDENTITY, "another run")
    with pytest.raises(ValueError, match="of another run"):
        open_folder(served.client(), foreign)
    assert (foreign / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "", ".", "a/../../x", "link/x", "trajectories.sqlite", "lock"]
    + ["logs/server-0.log", "model:../run/config.yaml", "model:/etc/passwd", ".x.tmp"]
    + ["checkpoints/.step-4.partial/a", "heartbeats/trainer", "\0", "x" * 300],
)
def test_no_other_file_is_read_or_written(served, tmp_path, name: str) -> None:
    (served.run_dir / "link").symlink_to(tmp_path)
    (tmp_path / "x").write_text("not the run's")
    client = served.client()
    calls = (("read", 0), ("write", 0, b"y", True), ("extend", 0, b"y"), ("remove",))
    for method, *arguments in calls:
        with pytest.raises(HubRefused):
            client.ask(method, name, *arguments)
    assert (tmp_path / "x").read_text() == "not the run's"
    assert "config.yaml" in client.ask("look", Part.STATE, answer=run_files.Files)


def test_a_log_is_only_a_log(served, tmp_path) -> None:
    served.client().ask("log", "../../x.log", b"line\n")
    assert (served.run_dir / "logs/x.log").read_text() == "line\n"
    assert not (tmp_path / "x.log").exists()


def test_a_repeated_request_is_done_once(served) -> None:
    client = served.client()
    client.ask("log", "a.log", b"line\n")
    client._number -= 1
    client.ask("log", "a.log", b"line\n")
    assert (served.run_dir / "logs/a.log").read_text() == "line\n"


def test_nobody_without_the_key_is_heard(served, monkeypatch) -> None:
    monkeypatch.setenv(run_files.ENV_KEY, "another key of 16 characters")
    monkeypatch.setattr("areal_lite.clusters.join._ASK_AGAIN_S", 0.2)
    client = served.client()
    client.give_up_at = time.monotonic()
    with pytest.raises(TimeoutError, match="for the hub at .* with the same AREAL_LITE_KEY"):
        client.ask("look", Part.STATE)
    monkeypatch.setenv(run_files.ENV_KEY, "short")
    with pytest.raises(ValueError, match="openssl rand"):
        served.client()


def test_garbage_ends_nothing(served) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.curve_serverkey = run_files.key_pair()[0]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(served.hub.url)
        for message in (b"", b"\xc1", b"\x93\x01\x02"):
            socket.send(message)
            assert b"malformed" in socket.recv()
    for wrong in (("_source", "config.yaml"), ("read", "config.yaml"), ("read", 0, "config.yaml")):
        with pytest.raises(HubRefused, match="malformed"):
            served.client().ask(*wrong)
    assert served.client().ask("look", Part.STATE, answer=run_files.Files)


def test_the_hub_ends_when_the_run_is_complete_and_all_have_left(served, tmp_path) -> None:
    client = served.client()
    client.ask("look", Part.STATE)
    (served.run_dir / TOTALS_FILE).touch()
    assert not served.hub._is_over()
    client.ask("leave")
    assert served.hub._is_over()


def test_a_role_without_logs_leaves_a_hub_that_ends_with_it(served, tmp_path, monkeypatch) -> None:
    def role(*_: object) -> tuple[list[str], dict[str, str]]:
        (served.run_dir / TOTALS_FILE).touch()
        return ["true"], {}

    monkeypatch.setattr(join.signal, "signal", lambda *_: None)
    monkeypatch.setattr(join, "role_command", role)
    monkeypatch.setattr(join, "_LAST_WORDS_S", 3.0)
    monkeypatch.setattr(join, "_ASK_AGAIN_S", 0.5)
    assert join.join(served.address, tmp_path / "a", "servers", ["0", "1"]) == 0
    served.thread.join(10)
    assert not served.thread.is_alive()


def test_a_full_disk_at_the_hub_delays_a_file(served, tmp_path, monkeypatch) -> None:
    mirror = served.mirror(tmp_path / "a")
    write_atomically(tmp_path / "a/profile/x", b"1")
    real: Callable[..., Stamp | None] = run_files.write

    def full(path: Path, *rest) -> Stamp | None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(run_files, "write", full)
    with pytest.raises(HubRefused, match="No space left"):
        settle(mirror)
    monkeypatch.setattr(run_files, "write", real)
    settle(mirror)
    assert contents(served.run_dir) == {"profile/x": b"1"}


@pytest.mark.parametrize(
    "words",
    [["hub"], ["hub", "run", "x"], ["join", "here", "a:1"], ["join", "here", "a:1", "controller"]]
    + [["join", "here", "a:1", "servers", "0"], ["join", "here", "a:1", "servers", "0", "all"]]
    + [["join", "here", to, "trainer"] for to in ("a", "a:0", "a:70000", "http://a:7000", ":1")]
    + [["hub", "run", "70000"]],
)
def test_wrong_words_are_refused_before_anything_starts(words, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        {"hub": hub, "join": join}[words[0]].main()
    assert ended.value.code == 2 and "usage: " in capsys.readouterr().err
