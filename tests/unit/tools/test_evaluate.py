"""What `areal-lite eval` shows before it measures."""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest

from areal_lite.config import DataConfig, RewardConfig
from areal_lite.controller.evaluation import Scores
from areal_lite.tools import evaluate
from areal_lite.tools.commands import EvalCommandConfig
from areal_lite_quickstart.make_model import build_char_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


# Data of the user, which a worker process has.
SOURCE = """
from areal_lite.data.prompts import SOURCES

def rows(*args):
    return SOURCES["jsonl"](*args)
"""


@pytest.mark.parametrize(
    ("chat", "source"), [(True, "jsonl"), (False, "jsonl"), (True, "own_data:rows")]
)
def test_the_first_held_out_prompt_is_shown(tmp_path, monkeypatch, capsys, chat, source):
    (tmp_path / "own_data.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    config = EvalCommandConfig(
        model=str(tmp_path),
        data=DataConfig(source=source, path=str(path), eval_path=str(path), chat=chat),
        reward=RewardConfig(function="areal_lite.rewards.exact:exact_reward"),
    )

    @asynccontextmanager
    async def no_servers(*_):
        yield None

    async def scored(*_):
        return Scores(versions=[0], rewards=np.zeros((1, 2)), failures=0)

    monkeypatch.setattr(evaluate, "open_fleet", no_servers)
    monkeypatch.setattr(evaluate, "score_problems", scored)
    asyncio.run(evaluate._evaluate(config, tmp_path))
    shown = capsys.readouterr().err
    assert ("reads it: '<user>1+1=<assistant>'" if chat else "reads it: '1+1='") in shown
    assert ("leaves out the tokenizer's chat template" in shown) == (not chat)
    assert shown.count("answers end at") == 1
