"""Whether server and trainer agree: log-probs of the same tokens under the same weights.

Every step makes up to two comparisons. Each is a mean absolute difference in nats.

* `logprob_diff_sampled` compares the behavior log-probs of sequences in the batch that the
  trainer's current version sampled from beginning to end. There may be none: then it is None.
  Sequences that were in progress during a push in mode `in_place`, even in a server's queue, are
  left out: older weights computed their KV cache.
* `logprob_diff_scored` lets a server score a few sequences of the batch as prompts, under the
  version that the trainer has too. It needs temperature 1, because the log-probs of a prompt are
  not scaled by it. It is None with replayed routes, which are not those of a prompt.

`logprob_diff` is the larger of the two.
"""

import logging
from concurrent.futures import Future
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_lite.config import TrainConfig
from areal_lite.servers.blocking import start_post
from areal_lite.servers.client import ServerError
from areal_lite.servers.registry import ServerInfo, announced_servers
from areal_lite.train_batch import TrainBatch

NUM_SCORED = 4
# A busy server may have more important work.
TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class LogprobAgreement:
    def __init__(self, run_dir: Path, config: TrainConfig):
        self._run_dir = run_dir
        algo = config.algo
        exact = algo.prox != "loglinear" and not algo.routing_replay
        self._scores = exact and config.rollout.temperature == 1.0
        self._calls: list[tuple[Future[Any], slice]] = []

    def begin(self, batch: TrainBatch, servers: list[ServerInfo] | None) -> None:
        """Let servers score a few sequences of `batch`, and do not wait for them.

        servers: those that have the trainer's weights; None means all announced servers.
        """
        if servers is None:
            servers = announced_servers(self._run_dir)
        self._calls = []
        if self._scores and servers:
            ends = batch.cu_seqlens[: min(NUM_SCORED, batch.num_sequences) + 1].tolist()
            for i, span in enumerate(starmap(slice, pairwise(ends))):
                body = {
                    "input_ids": batch.tokens[span].tolist(),
                    "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                }
                call = start_post(servers[i % len(servers)], "/generate", body, TIMEOUT_S)
                self._calls.append((call, span))

    def compare(
        self, batch: TrainBatch, prox: torch.Tensor, version: int
    ) -> dict[str, float | None]:
        """Compare the log-probs of `batch` and return the differences by metric name.

        The servers must still have the weights that they had at `begin`. prox: float32 [T], the
        log-probs under the trainer's `version`.
        """
        own = prox.numpy()
        sampled, scored = difference_of_fresh(batch, own, version), self._difference_of_scored(own)
        known = [difference for difference in (sampled, scored) if difference is not None]
        return {
            "logprob_diff_sampled": sampled,
            "logprob_diff_scored": scored,
            "logprob_diff": max(known) if known else None,
        }

    def _difference_of_scored(self, own: np.ndarray) -> float | None:
        if not self._calls:
            return None
        differences = []
        for call, span in self._calls:
            try:
                scored = call.result()["meta_info"]["input_token_logprobs"][1:]
            except ServerError:
                continue  # the controller and the next push deal with a server that died
            scored = np.array([logprob for logprob, _, _ in scored], np.float32)
            differences.append(np.abs(scored - own[span][1:]))
        if not differences:
            log.warning(
                "no server scored a sequence within %.0f s:"
                " log-probs are not compared at this step",
                TIMEOUT_S,
            )
            return None
        return float(np.concatenate(differences).mean())


def difference_of_fresh(batch: TrainBatch, own: np.ndarray, version: int) -> float | None:
    """Return the mean |behavior - own| over sampled tokens of sequences wholly of `version`.

    Their KV cache must be of `version` too. None without such a sequence.
    """
    older_tokens = batch.loss_mask & (batch.versions != version)
    stale = np.bincount(batch.sequence_ids, older_tokens, batch.num_sequences) > 0
    stale |= batch.kv_versions != version
    chosen = batch.loss_mask & ~stale[batch.sequence_ids]
    if not chosen.any():
        return None
    return float(np.abs(batch.behavior_logprobs[chosen] - own[chosen]).mean())
