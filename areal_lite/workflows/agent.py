"""Any agent code as a workflow, by an HTTP endpoint that records its requests."""

import inspect
import logging
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.config.data import sampling_of_evaluation
from areal_lite.extensions import load_object
from areal_lite.rollout.episode import Episode
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.endpoint.server import AgentEndpoint


def preload() -> None:
    """Import what takes seconds, once for all workers: they fork afterwards."""
    import transformers.utils.chat_template_utils  # noqa: F401


class Agent(AgentEndpoint):
    """A workflow that runs `async def agent(base_url, api_key, prompt) -> float | None`.

    The API key belongs to the episode. The requests under it are one conversation or up to
    `max_traces`, each of which becomes a trace. The agent returns a reward, or None to have the
    reward function score the last answer. An agent that raises loses its episode. If a budget was
    used up, it leaves the traces that it has instead.

    Each worker process has an endpoint, on the first free port of `host` from `port` on; 0 picks
    any free port. Calls are found by `tool_parser`, a parser of SGLang by name or `auto`. With a
    `reasoning_parser`, the thoughts of an answer are beside its content.
    """

    def __init__(self, agent: str, max_traces: int = 16, **endpoint: Any):
        if max_traces < 1:
            raise ValueError(f"max_traces={max_traces} must be at least 1")
        self._agent = load_object("rollout.workflow_args.agent", agent)
        if not inspect.iscoroutinefunction(self._agent):
            raise ValueError(
                f"{agent} must be an `async def`: a plain function would block all agents of its"
                " process. Wrap it in asyncio.to_thread"
            )
        self._max_traces = max_traces
        super().__init__(**endpoint)

    async def start(self, config: TrainConfig) -> None:
        """Listen."""
        # Agents run in this process, and what their clients ask by logs every request at INFO.
        for name in ("httpx", "httpx2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        most_first = config.data.max_prompt_tokens
        longest = max(config.rollout.max_new_tokens, sampling_of_evaluation(config).max_new_tokens)
        await self.listen(most_first + longest, most_first)

    async def __call__(self, episode: Episode) -> list[Trajectory]:
        with self.conversations(episode, self._max_traces) as (api_key, conversations):
            try:
                reward = await self._agent(self.base_url, api_key, episode.prompt)
            except Exception:
                # An agent may raise when we refuse a request because a budget is used up.
                if not conversations.truncated:
                    raise
                reward = None
        return conversations.traces(None if reward is None else float(reward))
