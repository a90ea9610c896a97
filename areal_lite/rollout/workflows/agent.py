"""Any agent code as a workflow: it talks to an OpenAI-compatible endpoint, which records what the policy is asked and what it samples."""

from __future__ import annotations

import asyncio
import inspect
import logging
from pathlib import Path

from areal_lite.config import TrainConfig
from areal_lite.rollout.episode import Episode
from areal_lite.rollout.openai_endpoint import OpenAIEndpoint
from areal_lite.system.files import write_json
from areal_lite.system.imports import load_object
from areal_lite.trajectory import Trajectory

ANNOUNCEMENT = "openai_endpoint.json"


class Agent:
    """`agent` names `module:function`: `async def agent(base_url: str, api_key: str, prompt: Prompt) -> float | None`.

    The key is the episode's own: every call under it belongs to one conversation, which becomes one trajectory. The agent returns its reward,
    or None for the reward function to score the last answer. An agent that raises, or takes longer than `timeout_s`, loses its trajectory; but
    one that ends because its token budget is used up leaves a truncated one. The endpoint listens on `host`:`port` (0: any that is free), as
    `<run_dir>/openai_endpoint.json` says.
    """

    def __init__(
        self, agent: str, timeout_s: float = 1800.0, host: str = "127.0.0.1", port: int = 0
    ):
        self._agent = load_object("rollout.workflow_args.agent", agent)
        if not inspect.iscoroutinefunction(self._agent):
            raise ValueError(
                f"{agent} must be an `async def`: one that blocks would stop everything; wrap it in asyncio.to_thread"
            )
        self._timeout_s = timeout_s
        self._endpoint = OpenAIEndpoint(host, port)
        self._announcement: Path | None = None

    async def start(self, config: TrainConfig) -> None:
        import transformers.utils.chat_template_utils  # noqa: F401  seconds, which the first request would otherwise cost everyone

        logging.getLogger("httpx").setLevel(
            logging.WARNING
        )  # agents live in this process, and it reports every request
        await self._endpoint.start()
        self._announcement = Path(config.run_dir, ANNOUNCEMENT)
        write_json(self._announcement, {"base_url": self._endpoint.base_url})

    async def close(self) -> None:
        if self._announcement:
            self._announcement.unlink(missing_ok=True)
        await self._endpoint.close()

    async def __call__(self, episode: Episode) -> Trajectory:
        with self._endpoint.conversation(episode) as (api_key, conversation):
            try:
                async with asyncio.timeout(self._timeout_s):
                    reward = await self._agent(self._endpoint.base_url, api_key, episode.prompt)
            except Exception:  # what the agent makes of our refusal to go on when its tokens are used up; anything else is its own fault
                if not conversation.truncated:
                    raise
                reward = None
        return conversation.trajectory(None if reward is None else float(reward))
