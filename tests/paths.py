"""Measure how far a prompt and a request travel: files to the trainer's batch, calls to the server.

The real controller runs here with a fake server and real reward workers.

* files: modules of the package in which this process runs a function, from the draw of a prompt
  until the trainer has the batch with its group;
* calls: functions of the package, from Transcript.sample to the HTTP request.

`python tests/paths.py` prints both.
"""

import asyncio
import inspect
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType, SimpleNamespace

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from areal_lite.config import TrainConfig, save_config  # noqa: E402
from areal_lite.controller.protocol import ControllerClient  # noqa: E402
from areal_lite.controller.service import serve  # noqa: E402
from areal_lite.data.sampler import PromptSampler  # noqa: E402
from areal_lite.servers.registry import ServerInfo, announce_server  # noqa: E402
from tests.fake_sglang import FakeSGLang  # noqa: E402

PACKAGE = f"{ROOT}/areal_lite/"


class Recorder:
    """Records the files of a window, and the functions on the way of a request."""

    def __init__(self) -> None:
        self.recording = False
        self.files: set[str] = set()
        self.calls: list[str] = []

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.recording and event == "call" and code.co_filename.startswith(PACKAGE):
            if code.co_name != "<module>":
                self.files.add(code.co_filename.removeprefix(PACKAGE))

    def request_sent(self) -> None:
        """Record the coroutines that wait for a request, and the functions that send it."""
        if not self.calls:
            sending = [frame.function for frame in inspect.stack() if PACKAGE in frame.filename]
            self.calls = [*_waiting("sample"), *reversed(sending)]


def _waiting(first: str) -> list[str]:
    """Return the coroutines of the package from `first` on, in the task that waits in it."""
    for task in asyncio.all_tasks():
        names, awaited = [], task.get_coro()
        while awaited is not None and hasattr(awaited, "cr_code"):
            if awaited.cr_code.co_filename.startswith(PACKAGE):
                names.append(awaited.cr_code.co_name)
            awaited = awaited.cr_await
        if first in names:
            return names[names.index(first) :]
    return []


def measure() -> SimpleNamespace:
    """Return `files` and `calls` of a prompt and a request."""
    recorder = Recorder()
    draw, send = PromptSampler.next, aiohttp.ClientSession._request

    def drawn(sampler: PromptSampler) -> int:
        recorder.recording = True
        return draw(sampler)

    async def sent(session: aiohttp.ClientSession, method: str, url: str, **options: object):
        if url.endswith("/generate"):
            recorder.request_sent()
        return await send(session, method, url, **options)

    PromptSampler.next, aiohttp.ClientSession._request = drawn, sent
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(_run(Path(folder), recorder))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        PromptSampler.next, aiohttp.ClientSession._request = draw, send
    return SimpleNamespace(files=sorted(recorder.files), calls=recorder.calls)


async def _run(folder: Path, recorder: Recorder) -> None:
    """Run a controller until its first batch is there."""
    from areal_lite_quickstart.command import MakeModelConfig
    from areal_lite_quickstart.make_model import run as make_model

    make_model(MakeModelConfig(out=str(folder / "model"), hidden_size=16, num_layers=1))
    rows = [json.dumps({"question": f"{n}+1=?", "answer": str(n + 1)}) for n in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    config = TrainConfig(model=str(folder / "model"), run_dir=str(folder / "run"))
    config.data.source, config.data.path = "jsonl", str(folder / "rows.jsonl")
    config.reward.function = "areal_lite.rewards.exact:exact_reward"
    config.rollout.group_size, config.rollout.max_new_tokens = 2, 8
    config.trainer.batch_groups = config.trainer.steps = 1
    config.buffer.max_staleness, config.eval.problems = 0, 0
    run_dir = folder / "run"
    save_config(config, run_dir)
    fake = FakeSGLang()
    url = await fake.start()
    info = ServerInfo(name="server-0", url=url, api_key=None, tensor_parallel=1, pid=1)
    announce_server(run_dir, info)

    def train() -> None:
        client = ControllerClient(run_dir, 60)
        client.batch(0, 0, 1)
        recorder.recording = False
        client.finish()
        client.close()

    trainer = asyncio.get_running_loop().run_in_executor(None, train)
    await serve(run_dir)
    await trainer
    await fake.stop()


if __name__ == "__main__":
    found = measure()
    print(f"{len(found.files)} files from prompt to batch: {', '.join(found.files)}")
    print(f"{len(found.calls)} calls of a request: {' -> '.join(found.calls)}")
