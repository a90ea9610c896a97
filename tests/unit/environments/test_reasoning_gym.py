"""Problems of reasoning-gym, and their scores next to those of the package's own evaluators."""

import asyncio
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from areal_lite.config import DataConfig
from areal_lite.data.prompts import Prompt, PromptSet, load_prompts
from areal_lite.environments.reasoning_gym import reward
from areal_lite.rewards.pool import RewardPool
from areal_lite_quickstart.make_model import build_char_tokenizer

gym = pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
from reasoning_gym.utils import extract_answer  # noqa: E402

MODULE = "areal_lite.environments.reasoning_gym"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_char_tokenizer().save_pretrained(folder)
    return folder


def problems(model: Path, split: str = "train", **args) -> PromptSet:
    config = DataConfig(
        source=f"{MODULE}:problems",
        args=args,
        chat=False,
        max_prompt_tokens=10**5,
        prompt_key="unused",
    )
    return load_prompts(config, model, split)


TASKS = [
    *("chain_sum", "leg_counting", "countdown", "sudoku", "knights_knaves", "word_ladder"),
    *(
        "fraction_simplification",
        "maze",
        "polynomial_multiplication",
        "graph_color",
        "zebra_puzzles",
    ),
    *("simple_equations", "isomorphic_strings", "ransom_note", "knight_swap", "tower_of_hanoi"),
    *("propositional_logic", "rush_hour", "letter_counting", "bf", "arc_1d", "puzzle24"),
]
# In the last of them, a thought has another answer.
SAID = ["<answer>{}</answer>", "{}", "<answer>{}", "<answer>17</answer> No: <answer>\n{} </answer>"]


def test_a_missing_package_is_named_with_its_remedy(model: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="reasoning_gym is not installed: pip install reasoning-g"):
        problems(model, tasks=["chain_sum"])


def test_the_source_has_a_name() -> None:
    """The entry point of the installed package may be older than the checkout."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["areal_lite.data"]["reasoning_gym"] == f"{MODULE}:problems"


def test_scores_are_those_of_the_tasks_own_evaluators(model: Path) -> None:
    prompts = problems(model, tasks=TASKS, size=2 * len(TASKS), held_out=len(TASKS))
    assert prompts.num_prompts == 2 * len(TASKS)
    right = wrong = 0
    for number, name in enumerate(2 * TASKS):
        prompt, task = prompts[number], gym.create_dataset(name, seed=1, size=2 * len(TASKS))
        entry = task[number // len(TASKS)]
        assert (prompt.text, prompt.answer) == (entry["question"], entry["answer"] or "")
        assert (prompt.prompt_id, prompt.info["task"]) == (f"{name}/1:{number}", name)
        for answer in (prompt.answer, "17", "", "not an answer", "(" * 50, "∀\u2028½", "1/0"):
            for form in SAID:
                text = form.format(answer)
                try:
                    score = task.score_answer(answer=extract_answer(text), entry=entry)
                except Exception:
                    score = 0.0
                assert reward(text, "", prompt.info) == score, (name, text)
                right, wrong = right + (score == 1.0), wrong + (score < 1.0)
    assert right > 3 * len(TASKS) and wrong > 20 * len(TASKS)


def test_configs_reach_the_task_and_its_evaluator(model: Path) -> None:
    (prompt,) = prompts_of(
        problems(model, tasks={"chain_sum": {"min_terms": 9, "max_terms": 9}}, size=1)
    )
    assert prompt.text.count("+") + prompt.text.count("-") >= 8
    assert prompt.info["config"] == {"min_terms": 9, "max_terms": 9}


def prompts_of(prompts: PromptSet) -> list[Prompt]:
    assert prompts.num_prompts is not None
    return [prompts[i] for i in range(prompts.num_prompts)]


def test_held_out_problems_are_the_same_for_all_seeds_and_never_trained_on(model: Path) -> None:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    args = {"tasks": {"chain_sum": config}, "size": 100, "held_out": 50}
    held_out = [p.text for p in prompts_of(problems(model, "eval", **args))]
    assert len(held_out) == 50
    assert held_out == [p.text for p in prompts_of(problems(model, "eval", seed=9, **args))]
    trained = [[p.text for p in prompts_of(problems(model, seed=s, **args))] for s in (0, 1000)]
    assert trained[0] != trained[1]
    for texts in trained:
        assert 0 < len(texts) < 100 and set(texts).isdisjoint(held_out)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"tasks": ["maze", "mazes"]}, r"data.args.tasks.mazes=\{\}: Dataset 'mazes'"),
        ({"tasks": {"maze": {"sides": 3}}}, r"data.args.tasks.maze=\{'sides': 3\}.*unexpected key"),
        ({"tasks": {"chain_sum": {"min_terms": 0}}}, r"tasks.chain_sum.*min_terms must be pos"),
        ({"tasks": []}, "data.args: name tasks"),
        ({"tasks": ["maze"], "size": 0}, "size and held_out must be positive"),
        ({"tasks": ["maze"], "seed": 10**9}, "seed from 0 to"),
        ({}, "data.args: name tasks"),
        ({"task": []}, r"do not fit data.source=.*unexpected keyword argument .task"),
        ({"tasks": {"coin_flip": {"min_trials": 3, "max_trials": 3}}}, "every problem is a held"),
    ],
)
def test_what_cannot_be_used_is_named(model: Path, args: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        problems(model, **args)


def test_a_problem_is_scored_as_it_was_asked_in_another_process(model: Path) -> None:
    """Some tasks iterate over sets of texts: the same seed makes other problems elsewhere."""
    prompts = prompts_of(problems(model, tasks=["polynomial_multiplication"], size=8))

    async def main() -> list[float]:
        async with RewardPool(f"{MODULE}:reward") as pool:
            texts = [f"<answer>{prompt.answer}</answer>" for prompt in prompts]
            return [await pool.score(t, p.answer, p.info) for t, p in zip(texts, prompts)]

    assert asyncio.run(main()) == [1.0] * 8
    script = "import reasoning_gym as g\n"
    script += "d = g.create_dataset('polynomial_multiplication', seed=1, size=8)\n"
    script += "print([d[i]['question'] for i in range(8)])"
    asked = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(asked) == 2, "the test proves nothing: problems do not depend on the process"
