"""Several prompt sets as one."""

import asyncio
import json
from pathlib import Path

import pytest

from areal_lite.config import DataConfig
from areal_lite.controller.sources import Source, drawn_prompt
from areal_lite.data.prompts import Prompt, PromptSet, load_prompts
from areal_lite_quickstart.make_model import build_char_tokenizer


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, PromptSet]:
    build_char_tokenizer().save_pretrained(tmp_path)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = DataConfig(source="jsonl", path=f"{tmp_path}/own.jsonl", chat=False)
    configs = {"own": files, "made": DataConfig(source="addition")}
    return {name: load_prompts(data, tmp_path, "train") for name, data in configs.items()}


def drawn(sets: dict[str, PromptSet], index: int) -> Prompt:
    sources = {
        name: Source(config=None, prompts=prompts, eval_prompts=None, rewards=None)
        for name, prompts in sets.items()
    }
    return asyncio.run(drawn_prompt(sources, index))


def test_prompts_have_their_source(sets: dict[str, PromptSet]) -> None:
    mixed = [drawn(sets, i) for i in range(6)]
    assert [(mixed[2 * i].prompt_id, mixed[2 * i].text) for i in range(3)] == [
        (f"own/own.jsonl:{i + 1}", f"{i}+1=") for i in range(3)
    ]
    assert drawn(sets, 2 * 10**9 + 1).prompt_id == f"made/addition/train/1:{10**9}"
    assert (mixed[4].source, mixed[1].source) == ("own", "made")
    assert mixed[4].tokens == sets["own"][2].tokens


def test_a_single_set_stays_as_it_is(sets: dict[str, PromptSet]) -> None:
    alone = {"": sets["own"]}
    assert [drawn(alone, i) for i in range(3)] == [sets["own"][i] for i in range(3)]
