"""An OpenEnv server of tests, `openenv_server.py PORT`: guess a number from 1 to 20 by its seed."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import (  # pyright: ignore[reportMissingImports]
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)


class Guess(Action):
    message: str


class Told(Observation):
    text: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        self.number, self.tries = random.Random(seed).randint(1, 20), 0
        return Told(text=f"Number {seed} is from 1 to 20.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
        guess = int(action.message)
        self.tries += 1
        if guess == self.number:
            return Told(text="right", done=True, reward=1 / self.tries)
        return Told(text="too low" if guess < self.number else "too high", reward=-0.01)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
