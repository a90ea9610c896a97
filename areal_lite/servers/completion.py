"""Sampling parameters, the tokens of one request, a whole completion, and an episode's session.

Log-probs are in nats, of softmax(logits / temperature), at temperature 0 (greedy) of
softmax(logits). SGLang does not renormalize them for top-p or top-k, so those are not offered:
the log-probs would be of another distribution than the one sampled from.

A request draws the same random numbers on any server and at any time. It is named by what it is
for: `GROUP-SAMPLE-TURN` in training, `evalVERSION-PROBLEM-SAMPLE-TURN` in an evaluation. A server
with `server.deterministic` hashes the seed with the position in the sequence and the token
(MurmurHash3, `multinomial_with_seed` in SGLang). A request that continues elsewhere after an abort
therefore continues the same stream of random numbers. Without that setting SGLang ignores the seed.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from areal_lite.config import RolloutConfig
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.routes import ExpertLayout
from areal_lite.servers.registry import ServerInfo


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters with which a completion is sampled.

    Args:
        temperature: 0 is greedy.
        stop_token_ids: the model's end tokens. The token that stops a sequence belongs to the
            sequence and has a log-probability.
        vocab_size: every token id is below it.
        seed: of the request. None: the server's own.
        experts: of the model, if the routes of the tokens are asked for (areal_lite/routes.py).
        first_route: the first token whose route is asked for; those before it are known.
    """

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    vocab_size: int = 2**31
    seed: int | None = None
    experts: ExpertLayout | None = None
    first_route: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or more")


def sampling_params(rollout: RolloutConfig, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters with which training samples."""
    return SamplingParams(
        rollout.max_new_tokens, rollout.temperature, tokenizer.eos_ids, tokenizer.vocab_size
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """The tokens that one request generated.

    Args:
        tokens: int32 [n].
        logprobs: float32 [n], NaN where the server had none.
        versions: int32 [n], the weight version that sampled each token.
        finish_reason: `stop`, `length` or `abort`.
        kv_version: the version when the request was sent: the oldest whose cached prefixes it
            may have used.
        routes: [r, layers, top_k] of the r tokens from `first_route` to the last but one of prompt
            and answer. None if they were not asked for, or an abort came without them.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    kv_version: int = -1
    routes: np.ndarray | None = None


@dataclass(slots=True)
class Completion:
    """A completion in progress: its chunks, and the number of requests that were sent for it.

    `finish_reason` is `abort` until the completion has ended with `stop` or `length`.
    """

    chunks: list[GenerationChunk] = field(default_factory=list)
    requests: int = 0
    finish_reason: str = "abort"

    @property
    def tokens(self) -> np.ndarray:
        """Return the tokens of all chunks, int32 [n]."""
        return np.concatenate([np.empty(0, np.int32), *(c.tokens for c in self.chunks)])

    @property
    def logprobs(self) -> np.ndarray:
        """Return the log-prob of each token, float32 [n]."""
        return np.concatenate([np.empty(0, np.float32), *(c.logprobs for c in self.chunks)])

    @property
    def versions(self) -> np.ndarray:
        """Return the weight version of each token, int32 [n]."""
        return np.concatenate([np.empty(0, np.int32), *(c.versions for c in self.chunks)])

    @property
    def routes(self) -> np.ndarray | None:
        """Return the routes of all chunks, [r, layers, top_k], or None if no chunk has any."""
        known = [c.routes for c in self.chunks if c.routes is not None]
        return np.concatenate(known) if known else None


@dataclass(slots=True)
class Session:
    """One episode on the servers: the start of its requests' ids, and where its next turn goes.

    Its turns go to the server that holds their prefix, as long as that server is ready. A session
    starts with a reservation on `server`, which is later the server of its last turn.
    """

    rid: str
    server: ServerInfo
    reserved: bool = True
    turns: int = 0


def request_seed(run_seed: int, request: str) -> int:
    """Return the seed of a request: 63 bits, the same in every release.

    Args:
        run_seed: the setting `seed`.
        request: its name within the run.
    """
    digest = hashlib.blake2b(f"{run_seed}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
