"""Settings under which the servers could not take the pushed weights are refused."""

import pytest

from areal_lite.config import LoraConfig, ServerConfig, SyncConfig, TrainConfig, TrainerConfig
from areal_lite.config.rules import check_push, check_rules

WITH_ADAPTERS = TrainerConfig(lora=LoraConfig(rank=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(server=ServerConfig(args={"quantization": "fp8"})),
            "server.args.quantization=fp8: .* remove it",
        ),
        (
            dict(server=ServerConfig(device="cpu"), trainer=TrainerConfig(device="cuda")),
            "sync.transport=auto cannot connect .* use sync.transport=disk",
        ),
        (
            dict(server=ServerConfig(device="cuda"), trainer=TrainerConfig(device="cpu")),
            "cannot connect trainer.device=cpu to server.device=cuda .* sync.transport=disk",
        ),
        (
            dict(server=ServerConfig(device="cuda"), sync=SyncConfig(transport="memory")),
            "sync.transport=memory is for servers without GPUs.* use sync.transport=distributed",
        ),
        (
            dict(server=ServerConfig(tensor_parallel=2), sync=SyncConfig(transport="memory")),
            "server.tensor_parallel=2: .*memory is for servers of one process",
        ),
        (
            dict(server=ServerConfig(args={"enable_symm_mem": True})),
            "server.args.enable_symm_mem=True: .* remove it",
        ),
        (
            dict(server=ServerConfig(args={"preferred_sampling_params": {"top_p": 0.9}})),
            "server.args.preferred_sampling_params=.*top_p.* the whole vocabulary.* so remove it",
        ),
        (
            dict(sync=SyncConfig(transport="adapters")),
            "sync.transport=adapters needs adapters: set trainer.lora.rank",
        ),
        (
            dict(sync=SyncConfig(transport="adapters", verify=True), trainer=WITH_ADAPTERS),
            "sync.verify=true with sync.transport=adapters: it compares .* leave one out",
        ),
        (
            dict(sync=SyncConfig(timeout_s=300)),
            "sync.timeout_s=300 must be less than the 300 s",
        ),
        (
            dict(
                sync=SyncConfig(timeout_s=120),
                server=ServerConfig(args={"watchdog_timeout": 60}),
            ),
            "sync.timeout_s=120 must be less than the 60 s",
        ),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check_push(TrainConfig(model="m", **settings))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mem_fraction_static", True, "must be more than 0 and at most 1"),
        ("max_running_requests", True, "must be an integer from 1"),
        ("max_total_tokens", "many", "must be an integer from 1"),
        ("watchdog_timeout", "900 s", "must be a number of seconds above 0"),
        ("watchdog_timeout", 0, "must be a number of seconds above 0"),
        ("speculative_algorithm", True, "must be a name"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused(key, value, message):
    with pytest.raises(ValueError, match=f"server.args.{key}={value}: {message}"):
        check_rules(TrainConfig(model="m", server=ServerConfig(args={key: value})))
    check_rules(TrainConfig(model="m", server=ServerConfig(args={key: None})))  # not set


def test_accepted():
    check_push(TrainConfig(model="m"))
    alone = SyncConfig(transport="adapters")
    check_push(TrainConfig(model="m", sync=alone, trainer=WITH_ADAPTERS))
    cpu_servers = dict(server=ServerConfig(device="cpu"), trainer=TrainerConfig(device="cuda"))
    check_push(TrainConfig(model="m", sync=SyncConfig(transport="disk"), **cpu_servers))
    check_push(TrainConfig(model="m", sync=SyncConfig(transport="memory"), **cpu_servers))
    patient = dict(server=ServerConfig(args={"watchdog_timeout": 900}))
    check_push(TrainConfig(model="m", sync=SyncConfig(timeout_s=600), **patient))


IN_TURN = {
    "rollout.interrupt": "retract",
    "sync.transport": "disk",
    "trainer.offload": True,
    "server.args": {"enable_memory_saver": True},
}


def in_turn(**changes: object) -> TrainConfig:
    config = TrainConfig(model="m")
    for key, value in (IN_TURN | changes).items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return config


def test_gpus_may_be_used_in_turn():
    check_push(in_turn())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rollout.interrupt", "in_place", "set rollout.interrupt=retract, not in_place"),
        ("sync.every", 2, "set sync.every=1, not 2"),
        ("sync.transport", "distributed", "NCCL refuses .* set sync.transport=disk"),
        ("trainer.offload", False, "set trainer.offload=true, not false, or see .*in_turn"),
        ("server.host", "node", "is for one machine, and server.host=node"),
    ],
)
def test_what_turns_need(key, value, message):
    with pytest.raises(ValueError, match=f"enable_memory_saver=true .*{message}"):
        check_push(in_turn(**{key: value}))
