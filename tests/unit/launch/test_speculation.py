"""Servers that could not speculate, or would tag tokens wrongly, are refused before they start."""

from __future__ import annotations

import json

import pytest

from areal_lite.config import ServerConfig
from areal_lite.launch.preflight import check_servers
from areal_lite.launch.server_pool import server_command


def model(folder, kind: str) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(folder)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_without_a_gpu_models_with_attention_speculate(kind: str, tmp_path) -> None:
    config = ServerConfig(device="cpu", speculate="history")
    check_servers(config, model(tmp_path, kind))
    check_servers(config, None)
    argv, _ = server_command(config, "m", 1, 1)
    assert argv[argv.index("--speculative-algorithm") + 1] == "HISTORY"
    assert "--speculative-algorithm" not in server_command(ServerConfig(device="cpu"), "m", 1, 1)[0]


def test_a_state_cannot_go_back(tmp_path) -> None:
    with pytest.raises(ValueError, match="gated delta nets.* set it to off"):
        folder = model(tmp_path, "qwen3_next")
        check_servers(ServerConfig(device="cpu", speculate="history"), folder)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"speculate": "history"}, "for servers without a GPU.*speculative_algorithm=NGRAM"),
        ({"args": {"speculative_algorithm": "NGRAM"}}, "set server.args.disable_overlap_schedule"),
    ],
)
def test_on_a_gpu(settings, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_servers(ServerConfig(device="cuda", **settings), None)
