"""Servers that could not speculate, or would tag tokens wrongly, are refused before they start."""

from __future__ import annotations

import json

import pytest

from areal_lite.config import ServerConfig
from areal_lite.launch.preflight import check_servers


def server(device: str, algorithm: str, **args) -> ServerConfig:
    return ServerConfig(device=device, args={"speculative_algorithm": algorithm, **args})


def model(folder, kind: str) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(folder)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_without_a_gpu_models_with_attention_speculate(kind: str, tmp_path) -> None:
    check_servers(server("cpu", "history"), model(tmp_path, kind))
    check_servers(server("cpu", "HISTORY"), None)
    check_servers(ServerConfig(device="cpu"), model(tmp_path, "qwen3_next"))


def test_a_state_cannot_go_back(tmp_path) -> None:
    with pytest.raises(ValueError, match="gated delta nets.* remove it"):
        check_servers(server("cpu", "history"), model(tmp_path, "qwen3_next"))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (server("cuda", "history"), "one of SGLang's on a GPU"),
        (server("cpu", "NGRAM"), "use history without a GPU"),
        (server("cuda", "NGRAM"), "set server.args.disable_overlap_schedule=true too"),
    ],
)
def test_others_are_refused(config: ServerConfig, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_servers(config, None)
