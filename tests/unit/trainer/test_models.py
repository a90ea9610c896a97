"""The calls of the training loop to its models between steps."""

from typing import Any, cast

import pytest

from areal_lite.trainer.step import Models


class FakeModel:
    """A model that records its moves."""

    def __init__(self, log: list[str], name: str):
        self.log = log
        self.name = name

    def offload(self) -> None:
        self.log.append(f"{self.name} leaves")

    def onload(self) -> None:
        self.log.append(f"{self.name} returns")


@pytest.mark.parametrize("offload", [True, False])
def test_trained_models_are_on_the_device_inside_the_block_only(offload):
    log: list[str] = []
    policy, critic = (cast(Any, FakeModel(log, name)) for name in ("policy", "critic"))
    models = Models(policy, reference=None, critic=critic, offload=offload)
    models.leave_device()
    with models.on_device():
        log.append("update")
    moves = ["policy leaves", "critic leaves"]
    back = ["policy returns", "critic returns"]
    assert log == ([*moves, *back, "update", *moves] if offload else ["update"])


def test_a_checkpoint_holds_the_trained_models():
    policy, critic, reference = (cast(Any, FakeModel([], name)) for name in "pcr")
    assert Models(policy, reference).trained == {"policy": policy}
    assert Models(policy, reference, critic).trained == {"policy": policy, "critic": critic}
