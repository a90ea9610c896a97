"""The input and the result of a workflow.

A workflow turns a prompt into a trajectory, or into a list of several: the traces of an episode. It
is an async function, or a class whose instances are called as one:

    async def exact_match(episode: Episode) -> Trajectory:
        transcript = Transcript(episode)  # begins with the prompt's tokens
        answer = await transcript.sample_text()
        reward = float(answer.strip() == episode.prompt.answer)
        return transcript.trajectory(reward)  # without a reward, the reward function scores it

`rollout.workflow=module:name` names it by its import path. It is called once per sample of a group.
See docs/workflows.md.

Invariants:
  * tokens in, tokens out: nothing that the policy sampled is ever tokenized again;
  * an exception in a workflow costs one episode, not the run;
  * the reward function is called only if the workflow set no reward.
"""

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np

from areal_lite.config import RolloutConfig
from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.extensions import load_object
from areal_lite.routes import unrecorded
from areal_lite.servers.client import GenerationChunk, SamplingParams
from areal_lite.servers.fleet import Completion, rest_of
from areal_lite.trajectory import Trajectory
from areal_lite.workers.process import short_text

SINGLE_TURN = "areal_lite.rollout.episode:single_turn"
"""The workflow that runs in the controller: it has no code of the user."""

_END_TOKENS = 16

# (episode) -> Trajectory or list of them; if marked as grouped, (episodes) -> list of such results.
Workflow = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One sample of a group: a prompt, and the means to answer it.

    `params.max_new_tokens` bounds everything that follows the prompt, environment tokens included.
    `clock()` returns seconds. `complete(tokens, params)`, which Transcript calls, continues
    `tokens` (int32 [n]) and returns the finished Completion.
    """

    prompt: Prompt
    sample_index: int
    group_id: int
    tokenizer: Tokenizer
    params: SamplingParams
    clock: Callable[[], float]
    complete: Callable[..., Awaitable[Completion]]


def grouped(workflow: Workflow) -> Workflow:
    """Mark a function that is called once per group; a class sets `grouped = True` instead.

    It gets all episodes and returns one result for each, None for a failed one.
    """
    vars(workflow)["grouped"] = True
    return workflow


def sampled_turns(trajectory: Trajectory) -> list[slice]:
    """Return the runs of sampled tokens: the policy's turns. The last one is scored."""
    mask = trajectory.loss_mask  # the first token is never sampled
    edges = [*(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [slice(start, end) for start, end in zip(edges[::2], edges[1::2])]


def load_workflow(config: RolloutConfig) -> Workflow:
    """Import `rollout.workflow`. Raises ValueError if it cannot be used."""
    name, arguments = config.workflow, config.workflow_args
    workflow: Any = load_object("rollout.workflow", name)
    if inspect.isclass(workflow):
        try:
            workflow = workflow(**arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"rollout.workflow_args={arguments} do not fit {name}: {error}"
            ) from error
    elif arguments:
        raise ValueError(
            f"rollout.workflow_args={arguments}: {name} is a function, only a class takes any"
        )
    if not any(map(inspect.iscoroutinefunction, (workflow, type(workflow).__call__))):
        raise ValueError(
            f"rollout.workflow={name}: must be an `async def`,"
            " or a class whose instances are called as one"
        )
    return workflow


@asynccontextmanager
async def started(workflow: Workflow, config: Any) -> AsyncIterator[None]:
    """Await `workflow.start(config)` on entry and `workflow.close()` on exit, where it has them."""
    if start := getattr(workflow, "start", None):
        await start(config)
    try:
        yield
    finally:
        if close := getattr(workflow, "close", None):
            await close()


@dataclass(frozen=True, slots=True)
class Rollout:
    """The traces of an episode."""

    traces: list[Trajectory] = field(default_factory=list)
    # before and after the first sampled token of each
    texts: list[tuple[str, str]] = field(default_factory=list)
    answer: str = ""  # to score: the text of the last trace's last turn, or of all after the prompt
    failure: str = ""  # why it has no reward, or nothing at all
    timed_out: bool = False
    is_hazard: bool = False  # it hung, or it ended its process


def is_grouped(workflow: Workflow) -> bool:
    return bool(getattr(workflow, "grouped", False))


async def play(workflow: Workflow, episodes: Sequence[Episode]) -> list[Rollout]:
    """Play one episode, or a group if the workflow is grouped; check and number the traces."""
    try:
        if is_grouped(workflow):
            if len(results := await workflow(list(episodes))) != len(episodes):
                raise ValueError(
                    f"a grouped workflow returned {len(results)} results for {len(episodes)} "
                    "episodes"
                )
        else:
            results = [await workflow(episode) for episode in episodes]
    except MemoryError:
        raise  # its process has to end, too
    except BaseException as error:  # a user's code may raise anything
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # ours, not of the code
        return [_failure(error)] * len(episodes)
    return [_played(episode, result) for episode, result in zip(episodes, results)]


def _played(episode: Episode, result: Any) -> Rollout:
    traces = result if isinstance(result, list) else [result]
    try:
        for number, trace in enumerate(traces):
            _check(episode, trace)
            trace.trace_index = number
        _check_together(traces)
    except Exception as error:
        return _failure(error)
    texts = [_texts(episode, trace) for trace in traces]
    turns = sampled_turns(traces[-1])
    decode = episode.tokenizer.decode
    answer = decode(traces[-1].tokens[turns[-1]]) if len(turns) > 1 else texts[-1][1]
    return Rollout(traces, texts, answer)


def _texts(episode: Episode, trace: Trajectory) -> tuple[str, str]:
    """Return the text before the first sampled token of a trace, and the text from there on."""
    decode, prompt = episode.tokenizer.decode, episode.prompt
    start = int(trace.loss_mask.argmax())
    before, after = trace.tokens[:start], trace.tokens[start:]
    # The prompt's own text has the special tokens of the chat template.
    return prompt.text if before.tolist() == prompt.tokens else decode(before), decode(after)


def _failure(error: BaseException) -> Rollout:
    where = "".join(
        f" ({Path(f.filename).name}:{f.lineno})" for f in extract_tb(error.__traceback__)[-1:]
    )
    return Rollout(failure=short_text("workflow: {}: {}{}", type(error).__name__, error, where))


def _check_together(traces: list[Trajectory]) -> None:
    if not traces:
        raise ValueError("the workflow returned an empty list: return at least one Trajectory")
    if [trace.trace_index for trace in traces] != list(range(len(traces))):
        raise ValueError("the workflow returned the same Trajectory twice")
    if len({trace.reward is None for trace in traces}) == 2:
        raise ValueError("the workflow set a reward for some traces only: set all, or none")


def _check(episode: Episode, trajectory: Any) -> None:
    if not isinstance(trajectory, Trajectory):
        raise ValueError(f"the workflow returned {trajectory!r:.100}, not a Trajectory")
    returned = f"{trajectory.group_id}/{trajectory.sample_index}"
    wanted = f"{episode.group_id}/{episode.sample_index}"
    if returned != wanted:
        raise ValueError(f"the workflow returned trajectory {returned} for {wanted}")
    if (reward := trajectory.reward) is not None:
        if not math.isfinite(reward):
            raise ValueError(f"the workflow set the reward {reward}, which is not finite")
        trajectory.reward = float(reward)  # it may be a bool
    if not trajectory.check().num_sampled:
        raise ValueError("the workflow did not sample a single token from the policy")
    _check_tokens(trajectory.tokens, episode.params.vocab_size)


def _check_tokens(tokens: np.ndarray, size: int) -> None:
    if len(wrong := tokens[(tokens < 0) | (tokens >= size)]):
        raise ValueError(f"token {wrong[0]} is not one of the model's {size}")


class Transcript:
    """A token sequence of an episode, which becomes a trace of it.

    Sampled tokens are trained on, added tokens (of the environment) are not. `finish_reason` is
    that of the last completion, or `length` once added tokens did not fit.
    """

    def __init__(self, episode: Episode, tokens: Sequence[int] | np.ndarray | None = None):
        """Begin with `tokens`, or with the episode's prompt if None."""
        self.episode = episode
        self.finish_reason = "abort"
        self._chunks: list[GenerationChunk] = []
        self._requests = 0
        # What a turn earned, by the number of tokens up to its end, and that of the last turn.
        self._earned: dict[int, float] = {}
        self._turn_end = 0
        self._started_at = episode.clock()
        self._append(episode.prompt.tokens if tokens is None else tokens)
        self._limit = self._length + episode.params.max_new_tokens

    @property
    def tokens(self) -> np.ndarray:
        """Return all tokens so far, int32 [n]."""
        return np.concatenate([chunk.tokens for chunk in self._chunks])

    @property
    def _length(self) -> int:
        return sum(len(chunk.tokens) for chunk in self._chunks)

    @property
    def remaining_tokens(self) -> int:
        return self._limit - self._length

    def fork(self, length: int) -> "Transcript":
        """Return a transcript with the first `length` tokens as its prompt, and the same end."""
        fork = Transcript(self.episode, self.tokens[:length])
        fork._limit = self._limit
        return fork

    async def sample(
        self, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Sample a completion and return its tokens without decoding them.

        It ends at an end token, after `max_new_tokens`, or with the token that completes one of the
        texts in `stop` or `rollout.stop`, which is its last. `remaining_tokens` must be positive;
        it bounds `max_new_tokens`.
        """
        tokenizer, before, completion = self.episode.tokenizer, self.tokens, Completion()
        params, ends = self._sampling(max_new_tokens, stop)
        # A server knows no text. It ends a request at each token that may complete one, and another
        # request continues an answer that has none of them yet.
        while completion.finish_reason == "abort":
            part = await self.episode.complete(*rest_of(before, params, completion))
            completion.chunks += part.chunks
            completion.requests += part.requests
            completion.finish_reason = part.finish_reason
            if part.finish_reason == "stop" and completion.tokens[-1] not in ends:
                completion.finish_reason = _at_a_text(completion.tokens, params, tokenizer)
        self._chunks += completion.chunks
        self._turn_end = self._length
        self._requests += completion.requests
        self.finish_reason = completion.finish_reason
        return completion

    def _sampling(
        self, max_new_tokens: int | None, stop: Sequence[str]
    ) -> tuple[SamplingParams, set[int]]:
        """Return the parameters of a completion, and which of its stop tokens always end it."""
        params, tokenizer = self.episode.params, self.episode.tokenizer
        texts, budget = (*params.stop, *stop), self.remaining_tokens
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        ends = {*params.stop_token_ids, *(ids[0] for ids in encoded if len(ids) == 1)}
        may_end = ends.union(*(tokenizer.completing(text) for text in texts))
        params = replace(
            params,
            max_new_tokens=budget if max_new_tokens is None else min(max_new_tokens, budget),
            stop_token_ids=tuple(sorted(may_end)),
            first_route=sum(map(len, self._routes)),
            stop=texts,
        )
        return params, ends

    def text(self, completion: Completion) -> str:
        """Decode a completion with its special tokens, but without its end token."""
        tokens, ends = completion.tokens, self.episode.params.stop_token_ids
        ended = len(tokens) and tokens[-1] in ends
        return self.episode.tokenizer.decode(tokens[:-1] if ended else tokens, special=True)

    def end_text(self) -> str:
        """Return the text of the last tokens so far, which may have begun a thought."""
        return self.episode.tokenizer.decode(self.tokens[-_END_TOKENS:], special=True)

    def credit(self, reward: float) -> None:
        """Say what the turn that was sampled last has earned (`algo.advantage.credit=turns`)."""
        self._earned[self._turn_end] = self._earned.get(self._turn_end, 0.0) + float(reward)

    @property
    def earned(self) -> float | None:
        """Return what the turns have earned together; None if nobody has said so."""
        return sum(self._earned.values()) if self._earned else None

    async def sample_text(self, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> str:
        """Sample a completion and return its text without special tokens; see `sample`."""
        return self.episode.tokenizer.decode((await self.sample(max_new_tokens, stop)).tokens)

    def add_messages(self, messages: Sequence[Message]) -> bool:
        """Add environment messages, or return False if they do not fit (see `add_tokens`).

        They are tokenized as the chat template writes them after an answer, or as plain text.
        """
        tokenizer = self.episode.tokenizer
        if self.episode.prompt.messages:
            text = tokenizer.render_after_answer(messages)
        else:
            text = "".join(message["content"] for message in messages)
        if not self.may_fit(text):
            return False
        return self.add_tokens(tokenizer.encode(text, add_special_tokens=False))

    def may_fit(self, text: str) -> bool:
        """Return False if `text` is too long for the remaining tokens whatever it says.

        It is not encoded, which would take seconds. The finish reason then becomes `length`.
        """
        if len(text) <= self.episode.tokenizer.characters_per_token * self.remaining_tokens:
            return True
        self.finish_reason = "length"
        return False

    def add_tokens(self, tokens: Sequence[int]) -> bool:
        """Add environment tokens, or return False if they would leave no token for an answer.

        Nothing is added then, and the finish reason becomes `length`.
        """
        if (
            tokens
            and tokens[0] == self._chunks[-1].tokens[-1]
            and tokens[0] in self.episode.params.stop_token_ids
        ):
            tokens = tokens[1:]  # the policy sampled the end of its answer itself
        if len(tokens) >= self.remaining_tokens:
            self.finish_reason = "length"
            return False
        self._append(tokens)
        return True

    def trajectory(self, reward: float | None = None) -> Trajectory:
        """Return the trajectory so far; `play` checks it."""
        episode = self.episode
        versions = np.concatenate([chunk.versions for chunk in self._chunks])
        sampled = [chunk for chunk in self._chunks if chunk.finish_reason]
        return Trajectory(
            group_id=episode.group_id,
            prompt_id=episode.prompt.prompt_id,
            sample_index=episode.sample_index,
            tokens=self.tokens,
            loss_mask=versions >= 0,
            behavior_logprobs=np.concatenate([chunk.logprobs for chunk in self._chunks]),
            versions=versions,
            finish_reason=self.finish_reason,
            reward=reward,
            turn_rewards=self._turn_rewards(versions >= 0),
            started_at=self._started_at,
            finished_at=episode.clock(),
            requests=self._requests,
            kv_version=min((chunk.kv_version for chunk in sampled), default=-1),
            routes=self._all_routes(),
        )

    def _turn_rewards(self, sampled: np.ndarray) -> list[float] | None:
        """Return what each run of sampled tokens has earned; None if nobody has said so."""
        if not self._earned:
            return None
        ends = np.flatnonzero(sampled & ~np.append(sampled[1:], False)) + 1
        result = [0.0] * len(ends)
        for end, reward in self._earned.items():
            result[int(np.searchsorted(ends, end))] += reward
        return result

    def _all_routes(self) -> np.ndarray | None:
        """Return the routes of all tokens. Tokens after the last request have no record."""
        if not (known := self._routes):
            return None
        rest = self._length - sum(map(len, known))
        return np.concatenate([*known, unrecorded(rest, known[0])])

    @property
    def _routes(self) -> list[np.ndarray]:
        """Return the routes so far, in parts: of the first tokens, without a gap."""
        return [chunk.routes for chunk in self._chunks if chunk.routes is not None]

    def _append(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append environment tokens: version -1, log-prob 0.

        Raises ValueError for a token that the model lacks, which would end a server.
        """
        ids, count = np.asarray(tokens, np.int32), len(tokens)
        _check_tokens(ids, self.episode.params.vocab_size)
        self._chunks.append(
            GenerationChunk(
                tokens=ids,
                logprobs=np.zeros(count, np.float32),
                versions=np.full(count, -1, np.int32),
                finish_reason="",
            )
        )


async def single_turn(episode: Episode) -> Trajectory:
    """Play an episode of one answer: the default workflow."""
    transcript = Transcript(episode)
    await transcript.sample()
    return transcript.trajectory()


def _at_a_text(tokens: np.ndarray, params: SamplingParams, tokenizer: Tokenizer) -> str:
    """Return the finish reason of an answer whose last token may have completed a stop text."""
    # A text is in so many of the last tokens, if each has at least a byte of its UTF-8.
    longest = max(map(len, params.stop))
    tail = tokens[-4 * longest - 4 :]
    if len(tokenizer.decode(tail[:-1])) < longest + 4:  # special tokens have no text
        tail = tokens
    for part in (tail, tokens):
        text = tokenizer.decode(part)
        if not any(stop in text for stop in params.stop):
            return "length" if len(tokens) == params.max_new_tokens else "abort"
    return "stop"
