"""Frameworks of agents, unmodified: no request is refused, and a task is one trace."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from areal_lite.trajectory import Trajectory
from tests.unit.workflows.frameworks import FRAMEWORKS, RECORDED, Episode, Framework, serving
from tests.unit.workflows.test_conversations import assert_recorded

named = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)


def share_of_longest(traces: list[Trajectory]) -> float:
    sampled = [trace.num_sampled for trace in traces]
    return max(sampled) / sum(sampled)


def check(episode: Episode, framework: Framework) -> None:
    assert episode.endpoint.statuses == [200] * len(framework.says)
    assert_recorded(episode.traces, episode.scripted)
    assert share_of_longest(episode.traces) >= 0.99
    assert not any(episode.scripted.script), "the agent asked for all of the answers"


@named
def test_an_agent_solves_its_task(framework: Framework, tmp_path: Path) -> None:
    if not framework.is_installed:
        pytest.skip(f"{framework.package} is not installed")

    async def main() -> None:
        async with serving(tmp_path, framework.says) as episode:
            said = await framework.agent(episode.endpoint.base_url, episode.api_key)
            assert said == "It is 42."
        check(episode, framework)

    asyncio.run(main())


@named
def test_recorded_requests_are_answered(framework: Framework, tmp_path: Path) -> None:
    """The recorded histories name answers and calls, whose ids are counted in both."""
    requests = json.loads((RECORDED / f"{framework.name}.json").read_text())
    assert len(requests) == len(framework.says)

    async def main() -> None:
        async with serving(tmp_path, framework.says) as episode:
            headers = {"Authorization": f"Bearer {episode.api_key}"}
            root = episode.endpoint.base_url.removesuffix("/v1")
            async with aiohttp.ClientSession(root, headers=headers) as session:
                for request in requests:
                    async with session.post(request["path"], json=request["body"]) as answer:
                        assert answer.status == 200, await answer.text()
        check(episode, framework)

    asyncio.run(main())


def test_every_framework_has_a_record() -> None:
    assert {path.stem for path in RECORDED.glob("*.json")} == {f.name for f in FRAMEWORKS}
