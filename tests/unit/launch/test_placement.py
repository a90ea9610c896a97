"""The GPUs of each process on one machine."""

import pytest

from areal_lite.cli import checked_config
from areal_lite.config import ServerConfig, TrainerConfig
from areal_lite.launch.roles import place
from areal_lite.system import gpus as module
from areal_lite.system.gpus import resolve_device, visible_gpus
from tests.unit.system.fake_gpu import fake_gpu


def test_trainer_first_then_servers_without_overlap():
    got = place(
        [str(i) for i in range(8)],
        TrainerConfig(tensor_parallel=2, data_parallel=2),
        ServerConfig(count=2, tensor_parallel=2),
        "distributed",
    )
    assert got.trainer == ["0", "1", "2", "3"] and got.servers == [["4", "5"], ["6", "7"]]
    assert not got.shared


def test_without_gpus_all_lists_are_empty():
    assert place([], TrainerConfig(), ServerConfig(count=2), "distributed").servers == [[], []]


def test_one_gpu_is_shared_if_weights_travel_through_a_folder():
    trainer, server = (
        TrainerConfig(gpu_memory_fraction=0.6),
        ServerConfig(args={"mem_fraction_static": 0.25}),
    )
    assert place(["3"], trainer, server, "disk").shared
    with pytest.raises(ValueError, match="one_gpu"):
        place(["3"], trainer, server, "distributed")


def test_servers_and_trainer_use_the_same_gpus_in_turn():
    server = ServerConfig(count=2, tensor_parallel=2, args={"enable_memory_saver": True})
    gpus = ["0", "1", "2", "3"]
    got = place(gpus, TrainerConfig(data_parallel=4), server, "disk")
    assert got.trainer == gpus and got.servers == [["0", "1"], ["2", "3"]] and got.shared
    with pytest.raises(ValueError, match="2 GPUs for 4 trainer ranks"):
        place(gpus[:2], TrainerConfig(data_parallel=4), server, "disk")
    with pytest.raises(ValueError, match="3 GPUs for 2 servers of 2"):
        place(gpus[:3], TrainerConfig(), server, "disk")


@pytest.mark.parametrize("trainer, server", [(None, 0.25), (0.6, None), (0.6, 0.35)])
def test_both_shares_of_a_gpu_are_needed_and_leave_room(trainer, server):
    with pytest.raises(
        ValueError, match=f"{trainer}, server.args.mem_fraction_static={server} .* 0.9.*one_gpu"
    ):
        place(
            ["3"],
            TrainerConfig(gpu_memory_fraction=trainer),
            ServerConfig(args={"mem_fraction_static": server}),
            "disk",
        )


def test_too_few_gpus_are_refused():
    with pytest.raises(
        ValueError, match="2 GPUs for 2 trainer ranks and 1 servers of 1: 3 are needed"
    ):
        place(["0", "1"], TrainerConfig(data_parallel=2), ServerConfig(), "disk")


@pytest.mark.parametrize(
    "visible, expected", [("", []), ("-1", []), ("2,5", ["2", "5"]), ("GPU-abc", ["GPU-abc"])]
)
def test_visible_devices_are_respected(monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == expected


@pytest.mark.parametrize(
    "files, expected",
    [([], []), (["nvidia0", "nvidia1", "nvidiactl"], ["0", "1"]), (["dxg"], ["0"])],
    ids=["none", "two", "wsl"],
)
def test_gpus_are_counted_by_their_device_files(tmp_path, monkeypatch, files, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "_DEVICES", tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    for name in files:
        (tmp_path / name).touch()
    assert visible_gpus() == expected
    assert resolve_device("auto") == ("cuda" if expected else "cpu")


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """Make this machine look as if it had two GPUs and a torch that can use them."""
    fake_gpu(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(module, "_DEVICES", tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()


def check_run(tmp_path, *settings: str, command: str = "quickstart") -> None:
    """Check a run as its command does before it starts a process."""
    checked_config(command, [f"run_dir={tmp_path / 'run'}", *settings])


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            ["server.device=cpu"],
            r"cannot connect trainer\.device=cuda to server\.device=cpu \(auto is cuda on a "
            r"machine with a GPU\): use sync\.transport=disk",
        ),
        (["trainer.device=cpu"], r"^trainer\.device=cpu on a machine .* hide it with CUDA_VISIBLE"),
        (["trainer.device=cpu", "sync.transport=disk"], r"^trainer\.device=cpu on a machine "),
        (["sft.trainer.device=cpu"], r"^sft\.trainer\.device=cpu on a machine with a GPU"),
        (
            ["server.device=cpu", "sync.transport=disk", "trainer.data_parallel=4"],
            "2 GPUs for 4 trainer ranks and 1 servers of 0: 4 are needed",
        ),
    ],
)
def test_devices_that_do_not_go_together_are_refused(settings, message, two_gpus, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_run(tmp_path, *settings)


def test_servers_may_leave_the_gpus_to_the_trainer(two_gpus, tmp_path):
    check_run(tmp_path)
    on_disk = ["server.device=cpu", "server.count=2", "sync.transport=disk"]
    check_run(tmp_path, *on_disk, "trainer.data_parallel=2")
    cpu = ServerConfig(count=2, device="cpu")
    got = place(["0", "1"], TrainerConfig(), cpu, "disk")
    assert got.trainer == ["0"] and got.servers == [[], []] and not got.shared


def test_a_hidden_gpu_makes_a_cpu_run(two_gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_run(tmp_path, "trainer.device=cpu", "server.device=cpu")
    for key in ("trainer", "server", "sft.trainer"):
        with pytest.raises(ValueError, match=rf"^{key}\.device=cuda, but no GPU is visible"):
            check_run(tmp_path, f"{key}.device=cuda", "sync.transport=disk")
