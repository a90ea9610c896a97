"""Server and trainer on one GPU: the order of their start, their memory, and the experiments."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_lite.cli import checked_config, main
from areal_lite.config import ServerConfig, TrainConfig, TrainerConfig
from areal_lite.config.command_line import config_dir
from areal_lite.launch import local
from areal_lite.launch import roles as placement
from areal_lite.launch.roles import Placement
from areal_lite.launch.server_pool import fraction_of_free, train_pool
from areal_lite.system import gpus
from areal_lite.system.gpus import CUDA_CONTEXT, GpuMemory
from areal_lite_quickstart.command import overrides_for_gpus
from tests.unit.system.fake_gpu import fake_gpu

EXPERIMENTS = sorted(path.stem for path in (config_dir() / "experiment").glob("*.yaml"))
GIB = 2**30


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    qwen = dict(
        model_type="qwen2",
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
    )
    (folder / "config.json").write_text(json.dumps(qwen))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("shared", [True, False])
def test_on_a_shared_gpu_the_server_is_ready_before_the_trainer_starts(
    shared, tmp_path, monkeypatch
):
    log: list[str] = []

    class Pool:
        def wait_ready(self, watch):
            log.append("server ready")

    class FakeRoles:
        check = None

        def start_module(self, name, module):
            return name

        def start_ranks(self, *_):
            log.append("trainer starts")
            return []

        def wait(self, roles, watch):
            pass

    @contextmanager
    def enter(value):
        yield value

    monkeypatch.setattr(local, "train_pool", lambda *_: enter(Pool()))
    monkeypatch.setattr(local, "Roles", lambda *_: enter(FakeRoles()))
    gpus = Placement(["0"], [["0" if shared else "1"]])
    monkeypatch.setattr(local, "place_run", lambda _: gpus)
    local.train(TrainConfig(model="m", run_dir=str(tmp_path)), tmp_path)
    assert log[0] == ("server ready" if shared else "trainer starts")


@pytest.mark.parametrize("taken", [0, 10, 48])
def test_a_server_gets_the_same_memory_whatever_the_trainer_has_taken(taken):
    """SGLang: weights and cache = share x what is free once the server has its CUDA context."""
    total = 80 * GIB
    free = total - taken * GIB
    share = fraction_of_free(0.25, GpuMemory(total, free))
    assert share * (free - CUDA_CONTEXT) == pytest.approx(0.25 * total, rel=1e-3)


def test_a_share_that_is_not_free_is_never_more_than_everything():
    assert fraction_of_free(0.25, GpuMemory(80 * GIB, 5 * GIB)) == 0.99
    assert fraction_of_free(0.25, GpuMemory(80 * GIB, 0)) == 0.99


def test_each_start_of_a_server_looks_at_the_free_memory(tmp_path, monkeypatch):
    fake_gpu(tmp_path, monkeypatch, total=80000, free=79000)
    config = TrainConfig(
        model="m",
        server=ServerConfig(device="cuda", args={"mem_fraction_static": 0.25}),
        trainer=TrainerConfig(gpu_memory_fraction=0.6),
    )
    make = train_pool(config, tmp_path, {0: ["0"]}).make["server-0"]
    shares = []
    for free in (79000, 31000):
        (tmp_path / "free").write_text(str(free))
        argv = make().argv
        shares.append(float(argv[argv.index("--mem-fraction-static") + 1]))
    assert shares == [pytest.approx(20000 / 78400, 1e-3), pytest.approx(20000 / 30400, 1e-3)]
    config.trainer.gpu_memory_fraction = None
    argv = train_pool(config, tmp_path, {0: ["0"]}).make["server-0"]().argv
    assert argv[argv.index("--mem-fraction-static") + 1] == "0.25"


@pytest.mark.parametrize(
    "name", [name for name in EXPERIMENTS if name not in ("one_gpu", "in_turn")]
)
def test_every_experiment_is_valid_on_one_gpu(name, model, tmp_path, monkeypatch):
    fake_gpu(tmp_path, monkeypatch)
    shared = f"+experiment=[{name},one_gpu]"
    where = [f"model={model}", f"run_dir={tmp_path / 'run'}", "server.device=cuda"]
    config = checked_config("train", [shared, *where])
    assert config.trainer.world_size == config.server.count == config.server.tensor_parallel == 1


def test_the_quickstart_shares_the_only_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "resolve_device", lambda device: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    added = overrides_for_gpus(["seed=2"])
    always = ["make_model.head_dim=64", "sft.trainer.data_parallel=1"]
    assert added == ["+experiment=one_gpu", *always]
    assert overrides_for_gpus(["+experiment=one_gpu"]) == always
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert overrides_for_gpus([]) == always
    monkeypatch.setattr(gpus, "resolve_device", lambda device: "cpu")
    assert overrides_for_gpus([]) == []


def test_the_quickstart_is_valid_on_one_gpu(tmp_path, monkeypatch, capsys):
    fake_gpu(tmp_path, monkeypatch)
    for module in (gpus, placement):
        monkeypatch.setattr(module, "resolve_device", lambda device: "cuda")
    where = [f"run_dir={tmp_path / 'run'}", "server.device=cuda"]
    checked_config("quickstart", [*overrides_for_gpus([]), *where])
    assert main(["quickstart", "--cfg", *where]) == 0
    assert "gpu_memory_fraction: 0.6" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"sft\.trainer has 2 ranks, and 1 GPUs are visible"):
        checked_config(
            "quickstart", [*overrides_for_gpus([]), *where, "sft.trainer.data_parallel=2"]
        )


def test_two_versions_of_the_weights_must_fit_into_the_folder(model, tmp_path, monkeypatch):
    with open(model / "model.safetensors", "wb") as weights:
        weights.truncate(10 * GIB)
    where = ["+task=addition", f"model={model}", f"run_dir={tmp_path / 'run'}"]
    disk = [*where, "sync.transport=disk", f"sync.disk_path={tmp_path / 'new' / 'folder'}"]
    usage = type("Usage", (), {"free": 19 * GIB})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"19\.0 GiB are free .* weights take 20\.0") as error:
        checked_config("train", disk)
    assert str(tmp_path / "new") in str(error.value)
    usage.free = 20 * GIB
    checked_config("train", disk)


def test_a_server_without_a_cuda_compiler_is_refused_before_anything_starts(
    model, tmp_path, monkeypatch
):
    fake_gpu(tmp_path, monkeypatch)
    (tmp_path / "cuda" / "bin" / "nvcc").unlink()
    where = [f"model={model}", f"run_dir={tmp_path / 'run'}", "server.device=cuda"]
    with pytest.raises(ValueError, match="no CUDA compiler"):
        checked_config("train", ["+experiment=one_gpu", "+task=addition", *where])


@pytest.mark.parametrize(
    "concurrent, servers, expected", [(1536, 6, 320), (576, 3, 240), (1, 1, 2), (100, 3, 42)]
)
def test_a_server_runs_its_share_and_a_quarter_more(concurrent, servers, expected, tmp_path):
    config = TrainConfig(model="m", server=ServerConfig(count=servers, device="cuda"))
    config.rollout.max_concurrent = concurrent
    argv = train_pool(config, tmp_path, {0: ["0"]}).make["server-0"]().argv
    assert argv[argv.index("--max-running-requests") + 1] == str(expected)


@pytest.mark.parametrize("device, own, expected", [("cuda", None, 320), ("cuda", 9, 9)])
def test_the_requests_of_a_training_run_have_cuda_graphs(device, own, expected, tmp_path):
    config = TrainConfig(model="m")
    config.rollout.max_concurrent = 1536
    args = {} if own is None else {"max_running_requests": own}
    config.server = ServerConfig(count=6, device=device, args=args)
    argv = train_pool(config, tmp_path, {0: ["0"]}).make["server-0"]().argv
    for flag in ("--max-running-requests", "--cuda-graph-max-bs-decode"):
        assert argv[argv.index(flag) + 1] == str(expected)
    config.server.device = "cpu"
    argv = train_pool(config, tmp_path, {0: []}).make["server-0"]().argv
    assert ("--max-running-requests" in argv) == (own is not None)


def test_servers_wait_for_the_first_push(tmp_path):
    config = TrainConfig(model="m")
    config.server.device = "cpu"
    argv = train_pool(config, tmp_path, {0: []}).make["server-0"]().argv
    assert argv[argv.index("--weight-version") + 1] == "unpushed"
