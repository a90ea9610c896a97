"""The plan describes prompts and pushes: when they come, and which side waits for them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig, Qwen3Config

from areal_lite.config import BufferConfig, ReplayConfig, SyncConfig, TrainConfig
from areal_lite.launch.roles import Placement
from areal_lite.tools.dry_run import (
    cadence_line,
    objective_lines,
    process_lines,
    prompt_lines,
    read_config,
    trainer_lines,
)
from areal_lite_quickstart.make_model import build_char_tokenizer


@pytest.mark.parametrize(
    ("every", "buffer", "text"),
    [
        (1, {"max_staleness": 0}, "after every step; generation waits for it"),
        (1, {"max_staleness": 4}, "after every step; generation runs up to 4 steps ahead of it"),
        (4, {"max_staleness": 3}, "after every 4 steps; generation waits for it"),
        (4, {"max_staleness": 8}, "after every 4 steps; generation runs up to 5 steps ahead of it"),
        # The window takes two steps of the bound.
        (
            2,
            {"max_staleness": 4, "window": 64},
            "generation runs up to 1 step ahead of it",
        ),
        (2, {"replay": ReplayConfig(capacity=8)}, "every 2 steps; generation never waits"),
    ],
)
def test_the_cadence(every: int, buffer: dict, text: str) -> None:
    config = TrainConfig(model="m", buffer=BufferConfig(**buffer), sync=SyncConfig(every=every))
    assert text in cadence_line(config)


def test_a_replay_buffer_has_tokens_of_any_age() -> None:
    config = TrainConfig(model="m")
    assert objective_lines(config)[0].endswith(", tokens: staleness up to 4")
    config.buffer.replay.capacity = 8
    assert objective_lines(config)[0].endswith(", tokens: of any age")


def own_data(folder: Path, row: dict[str, str]) -> TrainConfig:
    build_char_tokenizer().save_pretrained(folder)
    config = TrainConfig(model=str(folder))
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    config.data.source, config.data.chat = "jsonl", False
    config.data.path, config.data.eval_path = f"{folder}/train.jsonl", f"{folder}/test.jsonl"
    return config


def test_the_plan_shows_the_first_prompt(tmp_path: Path) -> None:
    config = own_data(tmp_path, {"question": "1+1=\n", "answer": "2"})
    config.rollout.group_size, config.rollout.max_new_tokens = 4, 5
    assert prompt_lines(config) == [
        f"training: jsonl, {tmp_path}/train.jsonl, 3 prompts",
        f"held-out: jsonl, {tmp_path}/test.jsonl, 3 prompts",
        r"the first one, as the model reads it: '1+1=\n'",
        "its answer: '2'",
        "5 tokens, the mean of 3 prompts: computed once a group, they save the "
        "trainer 38 % of its tokens, more if answers are shorter",
    ]
    config.trainer.share_prefixes = False
    assert len(prompt_lines(config)) == 4
    config.data.source = "addition"
    config.data.path, config.eval.problems = None, 0
    assert prompt_lines(config)[0] == "training: addition, without end"


def test_the_plan_shows_both_ends_of_the_prompt_and_what_it_leaves_out(tmp_path: Path) -> None:
    config = own_data(tmp_path, {"question": "1+" * 300 + "2=", "answer": "2"})
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    shown, caution = prompt_lines(config)[2:4]
    assert "reads it: '1+1+" in shown and " … " in shown and shown.endswith("+1+2='")
    assert caution.startswith("caution: it leaves out the tokenizer's chat template")
    config.data.chat = True
    lines = prompt_lines(config)
    assert lines[2].endswith("2=<assistant>'") and "leaves out" not in str(lines)


def test_the_plan_lists_the_sources(tmp_path: Path) -> None:
    config = own_data(tmp_path, {"question": "1+1=\n", "answer": "2"})
    reward = {"function": "my:reward", "workers": 3}
    config.data.sources = {
        "files": {"weight": 3},
        "made": {"source": "addition", "reward": reward},
    }
    assert [line for line in prompt_lines(config) if "save the trainer" not in line][:6] == [
        "files: 75 % of the draws",
        f"training: jsonl, {tmp_path}/train.jsonl, 3 prompts",
        f"held-out: jsonl, {tmp_path}/test.jsonl, 3 prompts",
        r"the first one, as the model reads it: '1+1=\n'",
        "its answer: '2'",
        "made: 25 % of the draws",
    ]
    assert "training: addition, without end" in prompt_lines(config)
    assert "reward of made: my:reward" in objective_lines(config)
    placement = Placement(trainer=[], servers=[[]])
    assert any("4 reward workers" in line for line in process_lines(config, placement))


def test_the_plan_refuses_rows_that_the_run_would_refuse(tmp_path: Path) -> None:
    config = own_data(tmp_path, {"problem": "1+1=", "answer": "2"})
    with pytest.raises(ValueError, match=r"train.jsonl:1: no key 'question', only"):
        prompt_lines(config)
    config = own_data(tmp_path, {"question": "1+1=", "answer": "2"})
    (tmp_path / "test.jsonl").write_text("hello")
    with pytest.raises(ValueError, match=r"test.jsonl:1: not JSON"):
        prompt_lines(config)


@pytest.mark.parametrize("change", [{"rms_norm_eps": "1e-6"}, {"layer_types": ["full_attention"]}])
def test_a_configuration_that_transformers_refuses_is_one_line(tmp_path: Path, change) -> None:
    config = Qwen3Config(num_hidden_layers=2).to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json: transformers refuses it: .+") as error:
        read_config(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_larger_teacher_takes_its_own_memory(tmp_path: Path) -> None:
    def model(**sizes: int) -> PretrainedConfig:
        return Qwen3Config(vocab_size=100, hidden_size=64, **sizes)

    own, teacher = model(num_hidden_layers=2), model(num_hidden_layers=8)
    teacher.save_pretrained(tmp_path)
    config = TrainConfig(model="m")

    def weights(reference: str, hf: PretrainedConfig) -> str:
        config.algo.reference = reference
        (line,) = [x for x in trainer_lines(config, hf, torch.float32) if x.startswith("reference")]
        assert reference in line
        return line.partition(reference)[0]

    as_policy = weights("m", teacher)
    assert weights(str(tmp_path), own) == as_policy != weights("m", own)
    config.data.sources = {"a": {}, "b": {"reference": "m"}, "c": {"reference": str(tmp_path)}}
    lines = trainer_lines(config, own, torch.float32)
    assert sum(line.startswith("reference") for line in lines) == 2, "a folder is loaded once"


def test_the_plan_downloads_nothing(tmp_path: Path) -> None:
    config = own_data(tmp_path, {"question": "1+1=", "answer": "2"})
    config.data.source, config.data.path, config.data.eval_path = "hf", "openai/gsm8k", None
    assert prompt_lines(config) == [
        "training: hf, openai/gsm8k, not looked at: it is on the hub",
        "held-out: hf, openai/gsm8k, not looked at: it is on the hub",
    ]
