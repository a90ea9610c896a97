"""Do server and trainer agree? Log-probs of the same tokens under the same weights, from both, every step.

Two comparisons, each a mean absolute difference in nats:

* `logprob_diff_sampled`: the behavior log-probs of the sequences in the batch that were sampled wholly from the trainer's present version.
  There may be none: then it is None. Sequences that lived through a push in mode `in_place`, be it in a server's queue, are left out:
  their KV cache is of older weights.
* `logprob_diff_scored`: a server scores a few sequences of the batch as prompts, under the version that the trainer has too. Always there
  at temperature 1 (a prompt's log-probs are not scaled by the temperature).

`logprob_diff` is the larger of the two.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from areal_lite.config import TrainConfig
from areal_lite.servers.control import ServerError, in_thread, post
from areal_lite.servers.registry import ServerInfo, announced_servers

NUM_SCORED = 4
TIMEOUT_S = 10.0  # a full server may have better things to do

log = logging.getLogger(__name__)


class Probe:
    def __init__(self, run_dir: Path, config: TrainConfig):
        self.run_dir, self.config = run_dir, config

    def compare(
        self, batch, prox: torch.Tensor, version: int, servers: list[ServerInfo] | None
    ) -> dict[str, float | None]:
        """`prox` float32 [T]: the trainer's log-probs of the batch under `version`, which `servers` have too (None: all announced)."""
        own = prox.numpy()
        sampled = difference_of_fresh(batch, own, version)
        scored = (
            self._scored(batch, own, servers)
            if self.config.rollout.temperature == 1.0 and self.config.algo.prox != "loglinear"
            else None
        )
        known = [d for d in (sampled, scored) if d is not None]
        return {
            "logprob_diff_sampled": sampled,
            "logprob_diff_scored": scored,
            "logprob_diff": max(known) if known else None,
        }

    def _scored(self, batch, own: np.ndarray, servers: list[ServerInfo] | None) -> float | None:
        servers = announced_servers(self.run_dir) if servers is None else servers
        spans = [
            (int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
            for i in range(min(NUM_SCORED, batch.num_sequences))
        ]
        if not servers:
            return None
        calls = [
            in_thread(self._score, servers[i % len(servers)], batch.tokens[a:b].tolist())
            for i, (a, b) in enumerate(spans)
        ]
        differences = []
        for call, (a, b) in zip(calls, spans):
            error = call.exception()
            if error is None:
                differences.append(np.abs(call.result() - own[a + 1 : b]))
            elif not isinstance(
                error, ServerError
            ):  # a server that died is for the controller and the next push to deal with
                raise error
        if not differences:
            log.warning(
                "no server scored a sequence within %.0f s: log-probs are not compared at this step",
                TIMEOUT_S,
            )
        return float(np.concatenate(differences).mean()) if differences else None

    def _score(self, server: ServerInfo, tokens: list[int]) -> np.ndarray:
        """float32 [n - 1]: the server's log-probs of all tokens but the first."""
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body = {
            "input_ids": tokens,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = post(server, "/generate", body, TIMEOUT_S)
        return np.array(
            [p for p, _, _ in answer["meta_info"]["input_token_logprobs"][1:]], np.float32
        )


def difference_of_fresh(batch, own: np.ndarray, version: int) -> float | None:
    """Mean |behavior - own| over the sampled tokens of sequences that are wholly of `version`, KV cache included; None without one."""
    stale = (
        np.bincount(
            batch.sequence_ids, batch.loss_mask & (batch.versions != version), batch.num_sequences
        )
        > 0
    )
    stale |= batch.kv_versions != version
    chosen = batch.loss_mask & ~stale[batch.sequence_ids]
    return (
        float(np.abs(batch.behavior_logprobs[chosen] - own[chosen]).mean())
        if chosen.any()
        else None
    )
