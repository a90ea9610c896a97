"""Rewards of a judge: a frozen model that a rubric asks about each answer.

`reward.function=areal_lite.workflows.judge:rubric.md` names the file of the rubric
(docs/workflows.md, Judges): its settings in YAML (`Rubric`) between two lines of ---, and then the
question.

* Without a verdict the judge is asked again at once. After the last attempt the trajectory fails,
  as with a reward function that raises: it is never worth 0.
* Patterns run on text of a model, so they run in a reward worker: one that hangs costs its sample.
"""

import asyncio
import logging
import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from os import environ
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from areal_lite.config import ServerConfig, check_fields
from areal_lite.data.model_folder import check_model_folder
from areal_lite.launch.roles import RoleFailed
from areal_lite.launch.server_pool import server_pool
from areal_lite.rewards.pool import JudgePool
from areal_lite.rewards.worker import is_rubric
from areal_lite.servers.fleet import open_fleet
from areal_lite.system.gpus import check_cuda, divide_gpus, resolve_device, visible_gpus
from areal_lite.workers.pool import TaskFailed

log = logging.getLogger(__name__)

# Not a part of a word, of a number or of a range, and not the 10 of 8/10.
_NUMBER = r"(?<![\w./-])(?<!/ )-?\d+(?:\.\d+)?"
_PLACEHOLDER = re.compile(r"\{(\w+|info\.\w+)\}")
_FIELDS = ("prompt", "completion", "answer")
# A score is in the last characters of the text, and is found at once.
_READ, _READ_S = 2000, 2.0
_LONGEST_PAUSE_S = 60.0
# What another attempt may not meet, besides errors of the server. Other refusals stay.
_PASSING = {408, 409, 425, 429}
_ERRORS = (aiohttp.ClientError, OSError, msgspec.MsgspecError, LookupError, TypeError)
_HOST, _LOOK_EVERY_S = "127.0.0.1", 1.0
_TABLE = "CREATE TABLE IF NOT EXISTS rewards (request PRIMARY KEY, reward)"


class Rubric(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of a rubric, and its question."""

    model: str
    question: str
    url: str = ""
    server: dict[str, Any] | None = None  # settings as of `server.*`, besides host and api_key
    gpus: list[int] = []  # for the servers
    key: str = ""  # the environment variable with the API key
    score: str = _NUMBER  # the first group of its last match is the score, or all of the match
    words: dict[str, float] = {}  # scores of words: the last one in the text is the score
    range: tuple[float, float] = (0.0, 1.0)  # of scores; their place in it is the reward
    request: dict[str, Any] = {}  # more fields of a request, such as temperature and max_tokens
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = 64  # requests at a time
    per_minute: Annotated[float, msgspec.Meta(gt=0)] = math.inf  # requests
    attempts: Annotated[int, msgspec.Meta(ge=1, le=100)] = 4


def __getattr__(name: str) -> Callable[..., "Judge"]:
    """Return what makes the judge of a rubric, where a file is named as a part of this module."""
    if not is_rubric(name):
        raise AttributeError(name)
    return partial(Judge, load_rubric(name))


def load_rubric(path: str) -> Rubric:
    """Read a rubric. Raises ValueError if it cannot be used, or if its key is not set."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        _, front, question = re.split(r"^---[ \t]*\n", text, maxsplit=2, flags=re.MULTILINE)
        settings = msgspec.yaml.decode(front, type=dict[str, Any])
        rubric = msgspec.convert(settings | {"question": question.strip()}, Rubric)
        re.compile(rubric.score)
        _check(rubric)
        if rubric.server is not None:
            Servers.check(rubric)
    except (OSError, TypeError, ValueError, msgspec.MsgspecError, re.error) as error:
        what = "a rubric has settings between two lines of ---, and then a question; as words, "
        what += "yes and no need quotes in YAML"
        raise ValueError(f"the rubric {path}: {error} ({what})") from None
    return rubric


def _check(rubric: Rubric) -> None:
    names = set(_PLACEHOLDER.findall(rubric.question))
    for name in sorted(names.difference(_FIELDS)):
        if not name.startswith("info."):
            known = ", ".join(f"{{{field}}}" for field in (*_FIELDS, "info.COLUMN"))
            raise ValueError(f"{{{name}}} is unknown: choose from {known}")
    if "completion" not in names:
        raise ValueError("the question lacks {completion}, the text to judge")
    if bool(rubric.url) == (rubric.server is not None):
        raise ValueError("give either the url of a judge, or server: {} to serve the folder model")
    low, high = rubric.range
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"range={[low, high]}: give the lower end first, and two finite numbers")
    if wrong := {word: s for word, s in rubric.words.items() if not low <= s <= high}:
        raise ValueError(f"words={wrong} is not in range={[low, high]}: set range, too")
    if rubric.key and not environ.get(rubric.key):
        raise ValueError(f"key={rubric.key}: set this environment variable to the API key")


def read_score(completion: str, answer: str) -> float:
    """Return the reward that the judge's text `completion` states. It runs in a reward worker.

    `answer` has pattern, words and range as JSON. Raises ValueError without a score in the range.
    """
    pattern, words, low, high = msgspec.json.decode(answer)
    if words := {word.lower(): score for word, score in words.items()}:
        longest_first = sorted(map(re.escape, words), key=len, reverse=True)
        pattern = rf"(?i)(?<!\w)(?:{'|'.join(longest_first)})(?!\w)"
    matches = [m.group(min(m.re.groups, 1)) for m in re.finditer(pattern, completion[-_READ:])]
    score = float(words.get(matches[-1].lower(), matches[-1])) if matches else math.nan
    if not low <= score <= high:
        found = f"the score {score:g} is not" if matches else "no score is"
        raise ValueError(f"{found} from {low:g} to {high:g}: {completion[-100:]!r}")
    return (score - low) / (high - low)


class Servers:
    """The servers of a judge's own model. Their announcements and logs are in `folder`."""

    def __init__(self, rubric: Rubric, folder: Path) -> None:
        self._config = ServerConfig(host=_HOST, **rubric.server or {})
        self._model, self._gpus, self._folder = rubric.model, rubric.gpus, folder
        self._started = AsyncExitStack()

    @classmethod
    def check(cls, rubric: Rubric) -> None:
        """Check that this machine can serve the model. Raises ValueError."""
        own = cls(rubric, Path())
        check_fields(own._config)
        check_model_folder(Path(rubric.model))
        own._divided()

    def _divided(self) -> list[list[str]]:
        """Return the GPUs of each server. Raises ValueError."""
        config, named = self._config, list(map(str, self._gpus))
        if resolve_device(config.device) == "cpu":
            return [[] for _ in range(config.count)]
        if len(named) != config.count * config.tensor_parallel or set(named) - set(visible_gpus()):
            raise ValueError(
                f"gpus={self._gpus}: name {config.count * config.tensor_parallel} of the GPUs "
                f"{', '.join(visible_gpus())} for the judge; a run takes the first that it needs"
            )
        check_cuda()
        return divide_gpus(named, config.count, config.tensor_parallel)

    async def start(self) -> None:
        """Wait until a server is ready. Raises RuntimeError or TimeoutError if none can be."""
        config = replace(self._config, args={"skip_tokenizer_init": False, **self._config.args})
        gpus = dict(enumerate(self._divided()))
        folder = self._folder
        self._pool = server_pool(config, model=self._model, seed=0, run_dir=folder, gpus=gpus)
        self._pool.__enter__()
        self._started.push_async_callback(asyncio.to_thread, self._pool.__exit__)
        self._fleet = await self._started.enter_async_context(open_fleet(folder))
        log.info("waiting for the judge's server, which loads %s; logs: %s", self._model, folder)
        async with self.place():
            log.info("the judge is ready")

    async def close(self) -> None:
        """End what has been started."""
        await self._started.aclose()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[str]:
        """Reserve a server for one request, and yield its URL. Raises as `start`."""
        server = None
        while server is None:
            self._pool.check()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    server = await self._fleet.reserve()
        try:
            yield f"{server.url}/v1"
        except aiohttp.ClientError:
            await self._fleet.check(server)  # no other request may try it, if it has failed
            raise
        finally:
            self._fleet.release(server)


class Judge(JudgePool):
    """A judge. Its workers read scores, and the file `path` keeps rewards.

    A request may take `timeout_s`.
    """

    def __init__(self, rubric: Rubric, workers: int, timeout_s: float, path: Path) -> None:
        super().__init__(f"{__name__}:{read_score.__name__}", workers, _READ_S)
        self._rubric = rubric
        self._reading = msgspec.json.encode([rubric.score, rubric.words, *rubric.range]).decode()
        self._path, self._timeout_s = path, timeout_s
        self._servers = None
        if rubric.server is not None:
            digest = blake2b(msgspec.json.encode(rubric), digest_size=4).hexdigest()
            self._servers = Servers(rubric, path.with_name(f"judge-{digest}"))
        self._key = environ.get(rubric.key, "")
        self._slots = asyncio.Semaphore(rubric.concurrency)
        # Equal requests wait for each other.
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._next_at = 0.0
        self.counts, self.seconds = Counter[str](), list[float]()

    async def start(self) -> None:
        try:
            self._rewards = sqlite3.connect(self._path, isolation_level=None)
            pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL"
            self._rewards.executescript(f"{pragmas}; {_TABLE}")
        except sqlite3.Error as error:
            raise ValueError(f"{self._path}: {error}; remove it to ask the judge anew") from None
        key = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers={"Content-Type": "application/json", **key},
        )
        await super().start()
        if self._servers:
            try:
                await self._servers.start()
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        await super().close()
        if self._servers:
            await self._servers.close()
        await self._session.close()
        self._rewards.close()

    async def verdict(self, values: Mapping[str, str], begun: Callable[[], None]) -> float:
        try:
            question = _PLACEHOLDER.sub(lambda match: values[match[1]], self._rubric.question)
            message = {"role": "user", "content": question}
            body = {"model": self._rubric.model, "messages": [message], **self._rubric.request}
            request = msgspec.json.encode(body)
        except (KeyError, UnicodeEncodeError) as error:
            raise TaskFailed("exception", f"the rubric cannot be filled in: {error}") from None
        digest = blake2b(request + self._reading.encode(), digest_size=16).digest()
        lock = self._locks.setdefault(digest, asyncio.Lock())
        if lock.locked():
            begun()
        async with lock:
            with suppress(sqlite3.Error):
                kept = self._rewards.execute("SELECT reward FROM rewards WHERE request=?", [digest])
                for (reward,) in kept.fetchall():
                    self.counts["cached"] += 1
                    return reward
            async with self._slots:
                begun()
                reward = await self._ask(request)
            with suppress(sqlite3.Error):  # a full disk must not end a run because of this file
                self._rewards.execute("INSERT INTO rewards VALUES (?, ?)", [digest, reward])
            return reward

    async def _ask(self, request: bytes) -> float:
        """Return the reward of the first attempt with a verdict. Raises TaskFailed."""
        reason = failure = ""
        for _ in range(self._rubric.attempts):
            now = time.monotonic()
            turn_at = max(now, self._next_at)
            self._next_at = turn_at + 60 / self._rubric.per_minute
            await asyncio.sleep(turn_at - now)
            self.counts["calls"] += 1
            try:
                return await self.score(await self._text(request), self._reading)
            except TimeoutError:
                reason, failure = "timeout", f"no answer in reward.timeout_s={self._timeout_s:g}"
            except TaskFailed as error:
                reason, failure = error.reason, str(error)
            except RoleFailed as error:
                reason, failure = "refused", str(error)
            except _ERRORS as error:
                reason, failure = "exception", f"{type(error).__name__}: {error}"
            self.counts["failed"] += 1
            if reason == "refused":
                break
        raise TaskFailed(reason, f"no verdict of the judge: {failure}")

    async def _text(self, request: bytes) -> str:
        """Return the text with which the judge answers. Raises TaskFailed, or one of _ERRORS."""
        async with self._servers.place() if self._servers else nullcontext(self._rubric.url) as at:
            url, began = f"{at.rstrip('/')}/chat/completions", time.monotonic()
            async with self._session.post(url, data=request, allow_redirects=False) as response:
                raw = await response.read()
        if response.status == 200:
            answer = msgspec.json.decode(raw, type=dict[str, Any])
            self.seconds.append(time.monotonic() - began)
            self.counts["tokens"] += answer["usage"]["total_tokens"] if answer.get("usage") else 0
            return str(answer["choices"][0]["message"]["content"])
        with suppress(KeyError, ValueError):  # it does not ask for a pause, or names a date
            pause_s = min(float(response.headers["Retry-After"]), _LONGEST_PAUSE_S)
            self._next_at = max(self._next_at, time.monotonic() + pause_s)
        failure = f"{url} answered {response.status}: {raw[:300].decode(errors='replace')}"
        failure = failure.replace(self._key, "***") if self._key else failure
        passes = response.status in _PASSING or response.status >= 500
        raise TaskFailed("exception" if passes else "refused", failure)
