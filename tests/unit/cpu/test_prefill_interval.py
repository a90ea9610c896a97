"""Prefills without a GPU: when they wait for decode steps, and how many requests begin."""

import sys
from types import SimpleNamespace

import pytest
import torch

from areal_lite.config import ServerConfig
from areal_lite.cpu.sglang import _admit_few, _defer_while_decoding, enough_requests
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


@pytest.mark.parametrize("own, expected", [(None, 4), (128, 100)])
def test_no_more_requests_begin_than_keep_a_core_at_work(
    monkeypatch: pytest.MonkeyPatch, own: int | None, expected: int
) -> None:
    """Unless a setting says how many run at a time."""
    settings = SimpleNamespace(max_running_requests=own)
    # SGLang itself would change this process for other tests.
    context = SimpleNamespace(get_schedule=lambda: settings)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    model = torch.nn.Linear(2**15, 2**12, bias=False, device="meta")
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    scheduler = SimpleNamespace(tp_worker=worker)
    begin = _admit_few(lambda self, running, **named: 100, scheduler, 60, running_batch=None)
    assert begin == expected


@pytest.mark.parametrize(
    "weights, requests", [(2**20, 8192), (2**26, 128), (135_000_000, 64), (2**40, 64)]
)
def test_a_small_model_answers_more_requests_at_once(weights: int, requests: int) -> None:
    assert enough_requests(weights) == requests
