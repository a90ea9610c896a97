"""`areal-lite serve` refuses what cannot be served, and says what to do."""

import os
import re
import socket
import sys

import pytest

from areal_lite.config import ServerConfig, TrainConfig, save_config
from areal_lite.config.rules import check_rules
from areal_lite.run_dir.resume import write_manifest
from areal_lite.system.network import free_port
from areal_lite.tools.commands import ServeConfig
from areal_lite.tools.export import model_of_run
from areal_lite.tools.serve import check
from areal_lite_quickstart.make_model import build_char_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with what is looked at before the start."""
    folder = tmp_path_factory.mktemp("model")
    build_char_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return str(folder)


def config(model: str, follow: bool = False, port: int | None = None, **server) -> ServeConfig:
    own = ServerConfig(device="cpu", **server)
    return ServeConfig(model=model, follow=follow, port=port or free_port(), server=own)


def test_a_model_and_a_run_are_accepted(model, tmp_path):
    check(config(model))
    save_config(TrainConfig(model=model), tmp_path)
    check(config(str(tmp_path), follow=True))


def test_a_wrong_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"model={tmp_path}: no config.json there; give"):
        check(config(str(tmp_path)))


def test_only_a_run_can_be_followed(model):
    with pytest.raises(ValueError, match="is no run: give a run directory"):
        check(config(model, follow=True))


def test_an_endpoint_is_one_server(model):
    with pytest.raises(ValueError, match="server.count=2: an endpoint is one server"):
        check(config(model, count=2))


def test_a_taken_port_is_named(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port={port}: .*Address already in use; choose"):
            check(config(model, port=port))


def test_others_need_a_key(model):
    with pytest.raises(ValueError, match=r"set server.api_key='\$\{oc.env:NAME\}'"):
        check_rules(config(model, host="0.0.0.0"))
    check_rules(config(model, host="0.0.0.0", api_key="hush"))


def test_a_key_is_refused_in_a_command_line(model, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["areal-lite", "serve", "server.api_key=hush-1"])
    with pytest.raises(ValueError, match="every user of this machine can read") as refused:
        check(config(model, api_key="hush-1"))
    assert "hush" not in str(refused.value)
    monkeypatch.setattr(sys, "argv", ["areal-lite", "serve", "server.api_key=${oc.env:KEY}"])
    check(config(model, api_key="hush-1"))


def test_weights_of_an_older_checkpoint_are_refused(model, tmp_path):
    """The run went back, and has trained the step again since it was exported."""
    save_config(TrainConfig(model=model), tmp_path)
    checkpoint, exported = tmp_path / "checkpoints/step-4", tmp_path / "exports/step-4"
    for folder in (checkpoint, exported):
        folder.mkdir(parents=True)
    (checkpoint / "weights").write_text("4")
    write_manifest(checkpoint, {})
    written = (checkpoint / "manifest.json").stat().st_mtime
    os.utime(exported, (written + 1, written + 1))
    assert model_of_run(tmp_path) == exported
    os.utime(exported, (written - 1, written - 1))
    with pytest.raises(ValueError, match="step-4 is older than the checkpoint of step 4: remove"):
        model_of_run(tmp_path)


def test_a_model_that_was_moved_is_given_to_export(tmp_path):
    """Neither chat nor serve has a setting for it: their `model` is another one."""
    save_config(TrainConfig(model="/gone"), tmp_path)
    checkpoint = tmp_path / "checkpoints/step-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_text("4")
    write_manifest(checkpoint, {})
    remedy = re.escape(f"(areal-lite export {tmp_path} model=…)")
    with pytest.raises(ValueError, match=f"the model /gone, which is not there: .* {remedy}"):
        model_of_run(tmp_path)
