"""A connection that breaks costs a request, and not the server behind it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest

from areal_lite.servers.client import (
    ConnectionLost,
    SamplingParams,
    ServerUnreachable,
    SGLangClient,
)
from areal_lite.servers.fleet import Fleet, Session
from areal_lite.servers.registry import ServerInfo
from tests.fake_sglang import FakeSGLang, completion
from tests.proxy import Proxy

PROMPT = np.array([5, 6, 7], np.int32)
BUDGET = 30
PARAMS = SamplingParams(BUDGET, 1.0, (1,))


@asynccontextmanager
async def behind_proxy(sglang: FakeSGLang) -> AsyncIterator[tuple[Proxy, ServerInfo]]:
    real = urlsplit(await sglang.start())
    proxy = Proxy(lambda _: (real.hostname, real.port))
    url = f"http://127.0.0.1:{proxy.port}"
    try:
        yield proxy, ServerInfo(name="s0", url=url, api_key=None, tensor_parallel=1, pid=1)
    finally:
        await asyncio.to_thread(proxy.close)
        await sglang.stop()


@pytest.mark.parametrize("cuts", [1, 2])
def test_a_healthy_server_loses_one_connection_of_a_request_for_free(cuts: int) -> None:
    """The second one counts: it may be the server that breaks them."""

    async def main() -> None:
        unhealthy: list[str] = []
        sglang = FakeSGLang(delay_s=0.02)
        async with behind_proxy(sglang) as (proxy, info), SGLangClient(5) as client:
            fleet = Fleet(
                client,
                lambda: [info],
                lambda: None,
                lambda server, reason: unhealthy.append(reason),
                3600,
            )
            watching = asyncio.create_task(fleet.watch())
            server, _ = await fleet.place(2)
            answers = [
                asyncio.create_task(fleet.complete(Session(str(number), server), PROMPT, PARAMS))
                for number in range(2)
            ]
            for cut in range(1, cuts + 1):
                while len(sglang.requests) < 2 * cut or not sglang.running:
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(proxy.cut)
            if cuts == 1:
                for answer in await asyncio.gather(*answers):
                    assert answer.tokens.tolist() == completion(PROMPT.tolist(), BUDGET)
                assert unhealthy == [] and fleet.counts["retries"] == 2
                assert fleet.router.load["s0"] == fleet.gate.in_flight == 0
            else:
                while not unhealthy:
                    await asyncio.sleep(0.005)
                assert "Error" in unhealthy[0] and not fleet.router.ready
            for task in (watching, *answers):
                task.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_question_is_asked_again_and_a_command_is_not() -> None:
    async def main() -> None:
        async with behind_proxy(FakeSGLang()) as (proxy, info), SGLangClient(5) as client:
            await client.check_health(info)
            proxy.delay(0.2)
            for call, lost in ((client.weight_version, False), (client.abort_all, True)):
                task = asyncio.create_task(call(info))
                await asyncio.sleep(0.1)
                await asyncio.to_thread(proxy.cut)
                if lost:
                    with pytest.raises(ConnectionLost):
                        await task
                else:
                    assert await task == 0
            proxy.close()
            with pytest.raises(ServerUnreachable) as down:
                await client.check_health(info)
            assert not isinstance(down.value, ConnectionLost)

    asyncio.run(asyncio.wait_for(main(), 30))
