"""One real SGLang server for the whole test session, on a tiny random model."""

import asyncio
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.network import free_port


@dataclass(frozen=True)
class RunningServer:
    info: ServerInfo
    model: str

    @property
    def url(self) -> str:
        return self.info.url


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random float32 Qwen3 with the character tokenizer; its distributions are far from flat."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from areal_lite_quickstart.make_model import build_char_tokenizer

    tokenizer = build_char_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-model")
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session", params=[None])
def sglang_server(request, tiny_model: str, tmp_path_factory: pytest.TempPathFactory):
    """A running server: `.url`, `.info` and `.model` (the folder of its checkpoint).

    Its parameter is the algorithm for speculation, or None.
    """
    log = Path(tmp_path_factory.mktemp("sglang-server"), "server.log")
    config = ServerConfig(args={"speculative_algorithm": request.param})
    server = ServerProcess(config, tiny_model, name="test", port=free_port(), seed=1, log_path=log)
    try:
        server.start()
        asyncio.run(server.wait_ready())
        yield RunningServer(server.info, tiny_model)
    finally:
        server.stop()


@pytest.fixture(scope="session")
def current_entry_points(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a server that finds the entry points of this checkout.

    An editable install keeps those of the day on which it was made.
    """
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("metadata")
    info = folder / f"areal_lite-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(root)])}


@pytest.fixture(scope="session")
def tokenizer_only(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with the character tokenizer and no weights."""
    from areal_lite_quickstart.make_model import build_char_tokenizer

    path = tmp_path_factory.mktemp("model")
    build_char_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def run(tmp_path: Path, tokenizer_only: str):
    """run(**settings) -> Run, which is ended with the test."""
    from tests.integration.controller_run import Run

    runs: list[Run] = []

    def make(**settings) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", tokenizer_only, **settings))
        return runs[-1]

    yield make
    for made in runs:
        made.stop()
