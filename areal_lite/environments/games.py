"""Games of gymnasium and TextArena, and environments of OpenEnv, as conversations with the policy.

    +task=games data.args.game=textarena:GuessTheNumber-v0
    +task=games data.args.game=gymnasium:FrozenLake-v1 data.args.arguments={render_mode: ansi}
    +task=games data.args.game=openenv:http://127.0.0.1:8000 data.args.arguments={action: code}

A prompt is the first observation of a game with a seed. An answer is an action. The reward of an
episode is the sum of the game's rewards.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.request import urlopen

from areal_lite.config import DataConfig
from areal_lite.data.prompts import Split, TextPrompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.extensions import require
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory
from areal_lite.workers.marks import called

Turn = tuple[str, float, bool]
"""An observation, the reward, and whether the game is over."""
_HELD_OUT_SEED = 10**9
_COLORED = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m", re.DOTALL)


class Gymnasium:
    """A game of gymnasium whose actions are texts or numbers.

    The last integer of an answer is its number. An answer without an action costs a turn.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        gymnasium = require("gymnasium", "gymnasium")
        self._env = gymnasium.make(name, **arguments)
        self._actions = self._env.action_space
        if not isinstance(self._actions, gymnasium.spaces.Discrete | gymnasium.spaces.Text):
            raise ValueError(f"its actions are {self._actions}, neither numbers nor texts")

    def reset(self, seed: int) -> str:
        return self._text(self._env.reset(seed=seed)[0])

    def step(self, text: str) -> Turn:
        numbers, action = re.findall(r"-?\d{1,9}", text), text.strip()
        if hasattr(self._actions, "n"):
            action = int(numbers[-1]) if numbers else None
        if action not in self._actions:
            return f"This is not an action: {self._actions}.", 0.0, False
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return self._text(observation), float(reward), terminated or truncated

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: Any) -> str:
        """Return what the game draws as text, with brackets for colors, or the observation."""
        if isinstance(observation, str) or self._env.render_mode != "ansi":
            return str(observation)
        return _COLORED.sub(r"[\1]", self._env.render())


class TextArena:
    """A game of TextArena for one player, whose rewards come at the end."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        # Only its own messages since the last action, and not the whole game so far.
        self._env = require("textarena", "textarena").make(f"{name}-raw", **arguments)

    def reset(self, seed: int) -> str:
        self._env.reset(num_players=1, seed=seed)
        return self._observation()

    def step(self, text: str) -> Turn:
        is_over, _ = self._env.step(text)
        if not is_over:
            return self._observation(), 0.0, False
        rewards, _ = self._env.close()
        return "", float(rewards[0]), True

    def close(self) -> None: ...

    def _observation(self) -> str:
        _, messages = self._env.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender < 0)


class OpenEnv:
    """An environment of an OpenEnv server, by its URL.

    Each episode has a session of its own there. The server's environment must take a seed.

    Args:
        action: the field of an action that takes the answer.
        observation: the field of an observation that the policy reads. None: all of them, as JSON.
        timeout_s: how long the server may take for a reply.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        client = require("openenv.core", "'openenv-core>=0.3'").GenericEnvClient
        self._env = client(url, message_timeout_s=timeout_s).sync()
        self._env.connect()
        self._url, self._action, self._field = url, action, observation

    def check_action(self) -> None:
        """Check that actions of the server have the field for an answer. Raises ValueError."""
        with urlopen(f"{self._url}/schema", timeout=60) as answer:
            known = json.load(answer)["action"]["properties"]
        if self._action not in known:
            raise ValueError(
                f"data.args.arguments.action={self._action}: actions of {self._url} have no such"
                f" field, only {', '.join(known)}"
            )

    def reset(self, seed: int) -> str:
        return self._text(self._env.reset(seed=seed).observation)

    def step(self, text: str) -> Turn:
        result = self._env.step({self._action: text})
        return self._text(result.observation), float(result.reward or 0.0), result.done

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: dict[str, Any]) -> str:
        if self._field is None:
            return json.dumps(observation)
        if self._field not in observation:
            raise ValueError(f"an observation has no {self._field}, only {', '.join(observation)}")
        return str(observation[self._field])


def open_game(game: str, arguments: Mapping[str, Any]) -> Gymnasium | TextArena | OpenEnv:
    """Open a game, such as `textarena:Wordle-v0`. Raises ValueError if it cannot be used."""
    kind, _, name = game.partition(":")
    if kind not in ("gymnasium", "textarena", "openenv"):
        raise ValueError(
            f"data.args.game={game}: write gymnasium:NAME, textarena:NAME or openenv:URL"
        )
    try:
        if kind == "openenv":
            return OpenEnv(name, **arguments)
        return (Gymnasium if kind == "gymnasium" else TextArena)(name, arguments)
    except Exception as error:  # the packages have many classes of errors
        raise ValueError(f"data.args.game={game}, {dict(arguments)}: {error}") from error


def problems(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    *,
    game: str = "",
    arguments: Mapping[str, Any] | None = None,
    size: int = 1000,
    held_out: int = 200,
    seed: int = 1,
) -> TextPrompts:
    """Open the first observations of a game with `size` seeds, or with `held_out` other ones."""
    first, count = (seed, size) if split == "train" else (_HELD_OUT_SEED, held_out)
    own = {"game": game, "arguments": dict(arguments or {})}
    opened, key = open_game(**own), config.prompt_key
    if isinstance(opened, OpenEnv):
        opened.check_action()
    rows = (
        (f"{game}/{s}", {key: (begin := opened.reset(s)), "begin": begin, "seed": s, **own})
        for s in range(first, first + count)
    )
    prompts = TextPrompts(rows, replace(config, answer_key=""), tokenizer)
    opened.close()
    return prompts


class Play:
    """A workflow that plays the game of its prompt, at most `max_turns` actions.

    An action has at most `max_answer_tokens` (None: as many as the trajectory has left).
    """

    def __init__(self, max_turns: int = 20, max_answer_tokens: int | None = None) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns} must be at least 1")
        if max_answer_tokens is not None and max_answer_tokens < 1:
            raise ValueError(f"max_answer_tokens={max_answer_tokens} must be at least 1")
        self._max_turns, self._max_answer_tokens = max_turns, max_answer_tokens

    async def __call__(self, episode: Episode) -> Trajectory:
        info = episode.prompt.info
        game = await called(open_game, info["game"], info["arguments"])
        try:
            if await called(game.reset, info["seed"]) != info["begin"]:
                raise ValueError(
                    f"data.args.game={info['game']} begins differently with the same seed: the"
                    " prompt would be that of another game"
                )
            return await self._play(episode, game)
        finally:
            await called(game.close)

    async def _play(self, episode: Episode, game: Gymnasium | TextArena | OpenEnv) -> Trajectory:
        transcript = Transcript(episode)
        for turn in range(self._max_turns):
            text = await transcript.sample_text(self._max_answer_tokens)
            _, _, said = text.rpartition("</think>")
            observation, reward, is_over = await called(game.step, said)
            transcript.credit(reward)
            told = [{"role": "user", "content": observation}]
            if is_over or turn == self._max_turns - 1 or not transcript.add_messages(told):
                break
        return transcript.trajectory(transcript.earned)
