"""The whole idea in one file: `python -m areal_lite.tour`. Read it from top to bottom.

A tiny model learns to repeat a letter as often as it is told to. It learns three times, on three
schedules, in one process and in simulated time. Only the processes are toys: the data types, the
admission of groups, the queue, the batch, the advantages and the loss are those of a real run.

    prompts ──▶ admission ──▶ Server: a token per tick ──▶ queue ──▶ batch ──▶ update ─┐
                    ▲                     ▲                                           │
                    └── version ──────────┴────────────── push ◀──────────────────────┘

Real runs: the server is SGLang on GPUs of its own (launch/server_pool.py, servers/fleet.py). The
controller is a process (controller/service.py). The trainer is Megatron-core (trainer/step.py).
tests/ranks/test_tour.py shows that `update` below and the trainer change a model equally.
"""

import copy
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from areal_lite.algo.advantages import grpo
from areal_lite.algo.losses import LossInputs, ppo_loss
from areal_lite.controller.buffer import AdmissionGate, GroupQueue
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import FinishReason, Group, Trajectory

# ── 1. The task ──────────────────────────────────────────────────────────────────────────────────
# A real run has prompts (data/prompts.py), a workflow that plays an episode (rollout/episode.py)
# and a reward function in a process of its own (rewards/pool.py).

LETTERS, STOP = 8, 0  # tokens 1 to 8 are letters; 0 ends an answer
COUNTS = 10  # tokens 9 to 18 mean: once, … ten times
MAX_NEW_TOKENS = 12
VOCABULARY = 1 + LETTERS + COUNTS

STEPS, BATCH_GROUPS, GROUP_SIZE = 80, 16, 8
TRAINING_TICKS = 4  # a training step takes as long as four tokens
LEARNING_RATE = 3e-3


def make_prompt(rng: np.random.Generator) -> np.ndarray:
    """Draw a letter and a count: int32 [2]."""
    return np.array([rng.integers(1, 1 + LETTERS), 1 + LETTERS + rng.integers(COUNTS)], np.int32)


def reward(prompt: np.ndarray, answer: np.ndarray) -> float:
    """Return the share of places at which the answer is right: the letters asked for, then STOP."""
    letter, count = prompt[0], prompt[1] - LETTERS
    right = np.array([letter] * count + [STOP])
    places = max(len(right), len(answer))
    matches = np.count_nonzero(right[: len(answer)] == answer[: len(right)])
    return float(matches / places)


def make_model(seed: int) -> PreTrainedModel:
    """Make a Qwen3 of 40 thousand random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config).float().eval()


# ── 2. The server ────────────────────────────────────────────────────────────────────────────────
# SGLang decodes all requests together, a token at a time. When a push interrupts it, requests in
# flight go on under the new weights (sglang_plugins/push.py). So each token needs a tag: the
# version that sampled it, and its log-prob under exactly these weights.


@dataclass
class Request:
    """A sequence that is being sampled."""

    group_id: int
    sample_index: int
    prompt: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def trajectory(self) -> Trajectory:
        """Return the sequence as the trainer gets it; trajectory.py has the invariants."""
        given, answer = len(self.prompt), np.array(self.tokens, np.int32)
        return Trajectory(
            group_id=self.group_id,
            prompt_id=str(self.group_id),
            sample_index=self.sample_index,
            tokens=np.concatenate([self.prompt, answer]),
            loss_mask=np.repeat([False, True], [given, len(answer)]),
            behavior_logprobs=np.array([0.0] * given + self.logprobs, np.float32),
            versions=np.array([-1] * given + self.versions, np.int32),
            finish_reason=FinishReason.STOP if answer[-1] == STOP else FinishReason.LENGTH,
            reward=reward(self.prompt, answer),
        ).check()


class Server:
    """Weights of one version, and the requests in flight."""

    def __init__(self, model: PreTrainedModel):
        self.model = copy.deepcopy(model)
        self.version = 0
        self.requests: list[Request] = []

    def push(self, model: PreTrainedModel, version: int) -> None:
        """Take new weights between two tokens. Requests in flight continue."""
        self.model.load_state_dict(model.state_dict())
        self.version = version

    @torch.no_grad()
    def decode(self) -> list[Request]:
        """Sample one token of every request, and return the requests that are finished by it."""
        if not self.requests:
            return []
        sequences = [[*request.prompt.tolist(), *request.tokens] for request in self.requests]
        last = torch.tensor([len(sequence) - 1 for sequence in sequences])
        padded = torch.zeros(len(sequences), int(last.max()) + 1, dtype=torch.long)
        for row, sequence in zip(padded, sequences):
            row[: len(sequence)] = torch.tensor(sequence)
        # A real server has the earlier tokens in its KV cache. Causality hides the padding.
        logits = self.model(padded).logits[torch.arange(len(last)), last]
        logprobs = logits.log_softmax(-1)
        sampled = torch.multinomial(logprobs.exp(), 1)
        chosen = logprobs.gather(1, sampled)[:, 0].tolist()
        for request, token, logprob in zip(self.requests, sampled[:, 0].tolist(), chosen):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
        done = [r for r in self.requests if r.tokens[-1] == STOP or len(r.tokens) == MAX_NEW_TOKENS]
        self.requests = [request for request in self.requests if request not in done]
        return done


# ── 3. The update: decoupled PPO ─────────────────────────────────────────────────────────────────
# The data is some steps old: three policies are involved. The behavior policy sampled a token. The
# proximal policy is the model just before this update, and the trust region is around it. The third
# is the one that is being trained. (AReaL, arXiv 2505.24298; formulas in algo/losses.py.)


def token_logprobs(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """Compute the log-prob of each token given the tokens before it, float [T]; 0 for the first.

    The trainer packs sequences without padding and never holds all logits (megatron/logprobs.py).
    """
    rows = list(torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist()))
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logprobs = model(padded[:, :-1]).logits.log_softmax(-1)
    chosen = logprobs.gather(-1, padded[:, 1:, None])[..., 0]
    chosen = torch.cat([torch.zeros(len(rows), 1), chosen], 1)
    return torch.cat([row[: len(tokens)] for row, tokens in zip(chosen, rows)])


def make_optimizer(model: PreTrainedModel, lr: float = LEARNING_RATE) -> torch.optim.AdamW:
    """Make the optimizer with the trainer's settings (megatron/optimizer.py)."""
    parameters = model.parameters()
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: TrainBatch) -> float:
    """Train on a batch once, and return the loss (trainer/step.py)."""
    # Step 1: an answer is as good as its reward, compared with the others of its group.
    rewards = torch.from_numpy(batch.rewards)
    advantages = grpo(rewards, torch.from_numpy(batch.group_ids))
    # Step 2: one pass gives both policies: before the first update they are the same model.
    logprobs = token_logprobs(model, batch)
    sequence_ids = torch.from_numpy(batch.sequence_ids)
    mask = torch.from_numpy(batch.loss_mask)
    inputs = LossInputs(
        logprobs=logprobs,
        prox=logprobs.detach(),
        behavior=torch.from_numpy(batch.behavior_logprobs),
        advantages=advantages[sequence_ids],
        mask=mask,
        sequence_ids=sequence_ids,
    )
    # Step 3: the clipped loss. For its age, a token weighs exp(lp_prox - lp_behavior), at most 5.
    loss = ppo_loss(inputs, denominator=int(mask.sum()), eps_low=0.2, eps_high=0.2).loss
    # Step 4: the gradient.
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


# ── 4. The schedules ─────────────────────────────────────────────────────────────────────────────
# Three settings of one mechanism (conf/schedule). `max_staleness` bounds the training steps between
# the weights that sampled a token and the weights that train on it. Admission starts no group that
# would be older when its turn comes (controller/buffer.py).


class Schedule(NamedTuple):
    """How far generation may run ahead, and whether a push waits for the requests in flight."""

    max_staleness: int
    waits: bool


SCHEDULES = {
    "sync": Schedule(0, True),  # generate, then train, in turn
    "one_step": Schedule(1, True),  # generate the next batch while training on this one
    "async": Schedule(4, False),  # generation never waits, and pushes interrupt it
}


@dataclass
class Outcome:
    """Measurements of a run: by step, the mean reward and the mean age of a token in steps."""

    ticks: int = 0
    idle: int = 0
    rewards: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    mixed: list[float] = field(default_factory=list)
    example: Trajectory | None = None


def run(schedule: Schedule, seed: int = 1) -> Outcome:
    """Train for STEPS steps, and measure.

    In each tick the server samples a token of every request. The trainer works at the same time, on
    machines of its own: an update takes TRAINING_TICKS.
    """
    rng = np.random.default_rng(seed)
    model = make_model(seed)
    optimizer, server, outcome = make_optimizer(model), Server(model), Outcome()
    gate = AdmissionGate(
        max_staleness=schedule.max_staleness, batch_groups=BATCH_GROUPS, steps=STEPS
    )
    queue = GroupQueue(schedule.max_staleness)
    finished: defaultdict[int, list[Trajectory]] = defaultdict(list)
    groups, version, batch, ready_at = 0, 0, None, 0
    while version < STEPS:
        # The controller starts as many groups as may start (controller/dispatcher.py).
        holds = schedule.waits and batch is not None and outcome.ticks >= ready_at
        while gate.can_admit() and not holds:
            gate.on_admitted()
            prompt = make_prompt(rng)
            server.requests += [Request(groups, i, prompt) for i in range(GROUP_SIZE)]
            groups += 1
        # The server samples a token of each request, whatever the trainer does.
        outcome.idle += not server.requests
        for request in server.decode():
            traces = finished[request.group_id]
            traces.append(request.trajectory())
            if len(traces) == GROUP_SIZE:
                gate.on_accepted()
                queue.put(_group(finished.pop(request.group_id)))
        outcome.ticks += 1
        # The trainer takes the oldest groups as soon as there are enough (controller/batches.py).
        if batch is None:
            if assignment := queue.take(BATCH_GROUPS, version, 1):
                batch, ready_at = assignment.shards[0], outcome.ticks + TRAINING_TICKS
                _measure(outcome, assignment.groups, batch, version)
        # It updates the model and pushes the new version, which opens admission (weights/push.py).
        elif outcome.ticks >= ready_at and not (schedule.waits and server.requests):
            update(model, optimizer, batch)
            version, batch = version + 1, None
            server.push(model, version)
            gate.on_version(version)
    return outcome


def _group(traces: list[Trajectory]) -> Group:
    """Tie the trajectories of one prompt together."""
    traces.sort(key=lambda trace: trace.sample_index)
    first = traces[0]
    return Group(
        group_id=first.group_id, prompt_id=first.prompt_id, size=len(traces), trajectories=traces
    )


def _measure(outcome: Outcome, groups: list[Group], batch: TrainBatch, version: int) -> None:
    traces = [trace for group in groups for trace in group.trajectories]
    mixed = [trace for trace in traces if len(trace.segments) > 1]
    outcome.rewards.append(float(batch.rewards.mean()))
    outcome.staleness.append(float((version - batch.versions[batch.versions >= 0]).mean()))
    outcome.mixed.append(len(mixed) / len(traces))
    outcome.example = max(mixed, key=lambda trace: len(trace.segments), default=outcome.example)


# ── 5. What it shows ─────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Run every schedule and print how they differ."""
    torch.set_num_threads(1)  # a model this small is slower with more
    print("schedule   ticks  server idle  mean age  of two versions  reward, first and last steps")
    example = None
    for name, schedule in SCHEDULES.items():
        started = time.monotonic()
        outcome = run(schedule)
        example = outcome.example or example
        first, last = np.mean(outcome.rewards[:5]), np.mean(outcome.rewards[-5:])
        print(
            f"{name:<9} {outcome.ticks:>6}  {outcome.idle / outcome.ticks:>11.0%}"
            f"  {np.mean(outcome.staleness):>8.2f}  {np.mean(outcome.mixed):>15.0%}"
            f"  {first:.2f} -> {last:.2f}   ({time.monotonic() - started:.0f} s)"
        )
        sys.stdout.flush()
    if example is not None:
        print("\na trajectory that pushes interrupted; each token has the version that sampled it:")
        print("  tokens  ", *(f"{token:>3}" for token in example.tokens))
        print("  versions", *(f"{v:>3}" if v >= 0 else "  ·" for v in example.versions))


if __name__ == "__main__":
    main()
