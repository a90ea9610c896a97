"""Prefills without a GPU: they wait for decode steps, and only while something decodes."""

from types import SimpleNamespace

import pytest

from areal_lite.config import ServerConfig
from areal_lite.cpu.sglang import _defer_while_decoding
from areal_lite.launch.server_pool import server_command


@pytest.mark.parametrize("decoding", [True, False])
@pytest.mark.parametrize("steps_left", [True, False])
def test_a_prefill_waits_only_while_requests_decode(decoding: bool, steps_left: bool) -> None:
    """An idle scheduler sleeps for a second between two looks."""
    batch = SimpleNamespace(is_empty=lambda: not decoding)
    scheduler = SimpleNamespace(running_batch=batch)
    deferred = _defer_while_decoding(lambda _: steps_left, scheduler)
    assert deferred == (decoding and steps_left)


@pytest.mark.parametrize("device, given", [("cpu", True), ("cuda", False)])
def test_only_servers_without_a_gpu_get_the_setting(device: str, given: bool) -> None:
    command, _ = server_command(ServerConfig(device=device), "model", 1, 1)
    assert ("--prefill-decode-interval" in command) == given
