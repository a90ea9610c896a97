"""Text games, next to the same games played with their own packages."""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from areal_lite.config import DataConfig
from areal_lite.config.command_line import compose_config
from areal_lite.data.prompts import Prompt, PromptSet, load_prompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.environments.games import Play, open_game
from areal_lite.system.network import free_port
from areal_lite.trajectory import Trajectory
from tests.unit.rollout.episodes import WorkflowFailed, played, playing, save_chat_tokenizer
from tests.unit.workflows.test_conversations import text_of

GUESS, LAKE = "textarena:GuessTheNumber-v0", "gymnasium:FrozenLake-v1"
FIXED = {"is_slippery": False, "render_mode": "ansi"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


def problems(tokenizer: Tokenizer, split: str = "train", **args) -> PromptSet:
    source = compose_config("train", ["model=m", "+task=games"]).data.source
    config = DataConfig(source=source, args={"size": 5, "held_out": 3, **args})
    return load_prompts(config, tokenizer.path, split)


def play(tokenizer: Tokenizer, prompt: Prompt, said: list[str], **settings) -> Trajectory:
    async def main() -> Trajectory:
        budget = settings.pop("max_new_tokens", 3000)
        async with playing(tokenizer, prompt, said, max_new_tokens=budget) as (episodes, _, _):
            ((trace,),) = await asyncio.gather(*played(Play(**settings), episodes))
            return trace.check()

    return asyncio.run(main())


@pytest.mark.parametrize("game", ["GuessTheNumber-v0", "frozen", "gymnasium:Nowhere-v1"])
def test_what_is_no_game_is_named(game: str) -> None:
    with pytest.raises(ValueError, match=f"data.args.game={game}"):
        open_game(game, {})


@pytest.mark.parametrize("game", [GUESS, LAKE])
def test_a_missing_package_is_named_with_its_remedy(game: str, monkeypatch) -> None:
    package = game.partition(":")[0]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"{package} is not installed: pip install {package}"):
        open_game(game, {})


@pytest.mark.parametrize("setting", ["max_turns", "max_answer_tokens"])
def test_limits_are_positive(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting}=0"):
        Play(**{setting: 0})


class TestTextArena:
    @pytest.fixture(autouse=True)
    def package(self):
        self.package = pytest.importorskip("textarena", reason="pip install textarena")

    def own_game(self, seed: int, said: list[str]) -> tuple[str, float | None]:
        """Return the whole last observation of the package's own game, and its reward."""
        game, is_over = self.package.make("GuessTheNumber-v0"), False
        game.reset(num_players=1, seed=seed)
        for text in said:
            is_over, _ = game.step(text)
            if is_over:
                return "", game.close()[0][0]
        return game.get_observation()[1], None

    @pytest.mark.parametrize("seed", [1, 4])
    def test_observations_and_rewards_are_those_of_the_game(self, tokenizer, seed: int) -> None:
        prompt = problems(tokenizer, game=GUESS)[seed - 1]
        first, _ = self.own_game(seed, [])
        assert prompt.messages[0]["content"].strip() in first
        right = next(n for n in range(1, 21) if self.own_game(seed, [f"[{n}]"])[1])
        said = ["[21]", "[1]" if right > 1 else "[2]", f"[{right}]"]
        whole, _ = self.own_game(seed, said[:2])
        trace = play(tokenizer, prompt, said)
        assert trace.reward == self.own_game(seed, said)[1] == 1.0
        text = text_of(tokenizer, trace)
        for answer in said:
            assert f"<{answer}>" in text
        messages = [line.removeprefix("[GAME] ") for line in whole.splitlines() if "target" in line]
        assert messages and all(message in text for message in messages)
        assert text.count("You are playing Guess The Number") == 1

    def test_an_episode_that_ends_early_has_no_reward(self, tokenizer) -> None:
        prompt = problems(tokenizer, game=GUESS)[0]
        said = ["[21]"] * 5
        assert play(tokenizer, prompt, said, max_turns=2).reward == 0.0
        short = play(tokenizer, prompt, said, max_new_tokens=20)
        assert (short.reward, short.finish_reason) == (0.0, "length")

    def test_an_action_has_a_limit_of_its_own(self, tokenizer) -> None:
        prompt = problems(tokenizer, game=GUESS)[0]
        trace = play(tokenizer, prompt, ["[21] " * 9] * 3, max_turns=2, max_answer_tokens=4)
        assert (trace.versions >= 0).sum() == 2 * 4

    def test_held_out_games_have_other_seeds(self, tokenizer) -> None:
        seeds = {}
        for split, count in ("train", 5), ("eval", 3):
            prompts = problems(tokenizer, split, game=GUESS, seed=7)
            assert prompts.num_prompts == count
            seeds[split] = [prompts[i].info["seed"] for i in range(count)]
        assert seeds == {"train": [7, 8, 9, 10, 11], "eval": [10**9, 10**9 + 1, 10**9 + 2]}


class TestGymnasium:
    @pytest.fixture(autouse=True)
    def package(self):
        self.package = pytest.importorskip("gymnasium", reason="pip install gymnasium")

    # From the start of the map of four by four to its goal.
    PATH = [1, 1, 2, 1, 2, 2]

    @pytest.mark.parametrize("actions", [PATH, [1, 2]])
    def test_observations_and_rewards_are_those_of_the_game(self, tokenizer, actions) -> None:
        game = self.package.make("FrozenLake-v1", **FIXED)
        game.reset(seed=1)
        total, drawn = 0.0, []
        for action in actions:
            _, reward, is_over, _, _ = game.step(action)
            total += reward
            drawn.append(game.render())
        assert is_over and total == float(actions == self.PATH)
        prompt = problems(tokenizer, game=LAKE, arguments=FIXED)[0]
        assert "[S]FFF\nFHFH\nFFFH\nHFFG" in prompt.messages[0]["content"]
        said = [f"<think>2</think>I take {action}." for action in actions]
        trace = play(tokenizer, prompt, said)
        assert trace.reward == sum(trace.turn_rewards) == total
        text = text_of(tokenizer, trace)
        for answer, board in zip(said, drawn[:-1]):
            assert f"<{answer}>" in text
            marked = board.replace("\x1b[41m", "[").replace("\x1b[0m", "]").replace("\n", " ")
            assert marked in text

    @pytest.mark.parametrize("said", ["", "north", "4", "-1", "9" * 30])
    def test_an_answer_without_an_action_costs_a_turn(self, tokenizer, said: str) -> None:
        prompt = problems(tokenizer, game=LAKE, arguments=FIXED)[0]
        trace = play(tokenizer, prompt, [said, *map(str, self.PATH)])
        assert trace.reward == 1.0
        assert "This is not an action: Discrete(4)." in text_of(tokenizer, trace)

    def test_a_game_of_texts(self, tokenizer, tmp_path: Path) -> None:
        spaces = self.package.spaces

        class Echo(self.package.Env):
            observation_space = action_space = spaces.Text(9)

            def reset(self, *, seed=None, options=None):
                self.seed = seed
                return f"Say {seed}", {}

            def step(self, action):
                return f"Not {action}", 1.5, action == str(self.seed), False, {}

        self.package.register("Echo-v0", Echo)
        prompt = problems(tokenizer, game="gymnasium:Echo-v0", seed=5)[0]
        trace = play(tokenizer, prompt, ["a", "too long to be one", "<think>no</think> 5 "])
        assert trace.reward == 3.0 and trace.turn_rewards == [1.5, 0.0, 1.5]
        text = text_of(tokenizer, trace)
        assert text.startswith("Say 5 <a> Not a <too long") and "is not an action" in text

    def test_other_actions_are_refused(self) -> None:
        with pytest.raises(ValueError, match="its actions are Box.*, neither numbers nor texts"):
            open_game("gymnasium:Pendulum-v1", {})


class TestOpenEnv:
    """A server of OpenEnv, which tells whether the number of a seed is higher or lower."""

    @pytest.fixture(autouse=True, scope="class")
    def url(self) -> Iterator[str]:
        pytest.importorskip("openenv.core", reason="pip install openenv-core")
        port = free_port()
        command = [sys.executable, str(Path(__file__).with_name("openenv_server.py")), str(port)]
        server, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"{url}/health")
                    break
                time.sleep(0.1)
            yield url
        finally:
            server.kill()
            server.wait()

    def test_episodes_have_sessions_of_their_own(self, tokenizer, url: str) -> None:
        found = problems(tokenizer, game=f"openenv:{url}", arguments={"observation": "text"})
        number = random.Random(2).randint(1, 20)
        said = [str(n) for n in (20, 1, number)]
        assert number not in (1, 20)

        async def main() -> list[Trajectory]:
            async with playing(tokenizer, found[1], *[said] * 4) as (episodes, _, _):
                groups = await asyncio.gather(*played(Play(), episodes))
                return [trace.check() for (trace,) in groups]

        traces = asyncio.run(main())
        assert [round(trace.reward, 6) for trace in traces] == [round(1 / 3 - 0.02, 6)] * 4
        wanted = f"Number 2 is from 1 to 20. <20> too high <1> too low <{number}>"
        assert {text_of(tokenizer, trace) for trace in traces} == {wanted}

    def test_whole_observations_are_json(self, tokenizer, url: str) -> None:
        found = problems(tokenizer, game=f"openenv:{url}")
        assert json.loads(found[0].messages[0]["content"])["text"] == "Number 1 is from 1 to 20."

    def test_mistakes_are_named(self, tokenizer, url: str) -> None:
        game = {"game": f"openenv:{url}", "arguments": {"observation": "board"}}
        with pytest.raises(ValueError, match="an observation has no board, only .*text"):
            problems(tokenizer, **game)
        with pytest.raises(ValueError, match="data.args.game=openenv:http://127.0.0.1:9, {}"):
            open_game("openenv:http://127.0.0.1:9", {})
        with pytest.raises(ValueError, match="action=guess: .* no such field, only .*message"):
            problems(tokenizer, game=f"openenv:{url}", arguments={"action": "guess"})

    def test_a_game_that_begins_differently_is_refused(self, tokenizer, url: str) -> None:
        found = problems(tokenizer, game=f"openenv:{url}")
        found[0].info["begin"] = "another"
        with pytest.raises(WorkflowFailed, match="begins differently with the same seed"):
            play(tokenizer, found[0], ["3"])
