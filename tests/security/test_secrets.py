"""Secrets in settings reach no report, no comparison and no tracker."""

import dataclasses
from pathlib import Path

import pytest

from areal_lite.config import TrainConfig, save_config, without_secrets
from areal_lite.tools.report.page import compare_page, run_page
from areal_lite.trainer import loop
from tests.unit.tools.report.synthetic_run import hand_made

SECRETS = {
    "key": "secret-a",
    "api_key": "secret-b",
    "openai_api_key": "secret-c",
    "apiKey": "secret-d",
    "OPENAI_API_KEY": "secret-e",
    "key2": "secret-f",
    "hf_token": "secret-g",
    "accessToken": "secret-h",
    "refresh_tokens": ["secret-i"],
    "token_of_judge": "secret-j",
    "password": "secret-k",
    "db-password": 5550123,
    "ssl_keyfile_password": "secret-l",
    "passphrase": "secret-m",
    "client.secret": "secret-n",
    "Authorization": "Bearer secret-o",
    "basicAuth": "secret-p",
    "credentials": {"user": "secret-q", "more": ["secret-r"]},
    "headers": {"X-Anything": "secret-s"},
    "bearer": "secret-t",
    "sessionCookie": "secret-u",
    "judge": [{"inner": {"judge_token": "secret-v"}}],
    "url": "https://somebody:secret-w@host/path?a=b",
    "urls": ["see postgresql://u:secret-x@host:5/db and more"],
}
SHOWN = {
    "prompt_key": "question",
    "answer_key": "solution",
    "max_new_tokens": 256,
    "tokens_per_microbatch": 4096,
    "eos_token_id": 2,
    "author": "somebody",
    "keyboard": "qwerty",
    "use_auth": True,
    "api_key": None,
    "url": "https://host/a@b?mail=x@y",
    "count": 3,
    "list": ["a", 1, None],
}


def found_in(text: str) -> set[str]:
    return {mark for mark in [f"secret-{c}" for c in "abcdefghijklmnopqrstuvwx"] if mark in text}


def test_every_secret_is_hidden_and_nothing_else() -> None:
    shown = str(without_secrets(SECRETS))
    assert not found_in(shown) and "5550123" not in shown
    assert "(hidden)@host/path?a=b" in shown and "(hidden)@host:5/db and more" in shown
    assert without_secrets(SHOWN) == SHOWN


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = hand_made(tmp_path / "run")
    config.server.api_key, config.rollout.workflow_args = "secret-a", SECRETS
    config.server.args = {"admin_api_key": "secret-b"}
    save_config(config, tmp_path / "run")
    return tmp_path / "run"


def test_no_secret_is_in_a_report_or_a_comparison(run_dir: Path, tmp_path: Path) -> None:
    hand_made(tmp_path / "other")
    for page in (run_page(run_dir), compare_page([run_dir, tmp_path / "other"])):
        assert not found_in(page) and "5550123" not in page
    assert "(hidden)" in run_page(run_dir)


def test_no_secret_reaches_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(loop, "MetricsLog", lambda run_dir, logger, config: seen.append(config))
    config = TrainConfig(model="m", run_dir=str(tmp_path))
    config.server.api_key, config.rollout.workflow_args = "secret-a", dict(SECRETS)
    config.trainer.steps = 3
    config.eval.problems = 0
    loop.Reporter(config, tmp_path, None, 0)
    assert seen[0]["trainer"]["steps"] == 3 and seen[0]["rollout"]["workflow_args"]["key2"]
    assert not found_in(str(seen)) and found_in(str(dataclasses.asdict(config)))
