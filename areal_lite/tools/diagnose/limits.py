"""The thresholds of the findings, each with its reason or source."""

from typing import NamedTuple


class Limit(NamedTuple):
    """A threshold and why it is where it is."""

    value: float
    reason: str


LIMITS = {
    "recent_steps": Limit(10, "steps that count as recent: more than the noise of one batch"),
    "least_steps": Limit(5, "fewer steps say nothing about a trend"),
    "stall_factor": Limit(10, "usual step times (median) without a step: evaluations fit into it"),
    "stall_s": Limit(60, "seconds that are no stall yet: six status lines of the controller"),
    "logprob_diff": Limit(
        0.05,
        "nats: bfloat16 rounds to about 0.01, float32 to 1e-6 (docs/training.md); a head of too "
        "few bits stopped the training of MiniMax-M1 (arXiv 2506.13585)",
    ),
    "logprob_growth": Limit(100, "times the first steps, above 0.001 nats: rounding does not grow"),
    "uniform_share": Limit(
        0.5, "half of the batch adds nothing (dynamic sampling of DAPO, arXiv 2503.14476)"
    ),
    "uniform_alarm": Limit(0.95, "almost no group is left to learn from"),
    "entropy_ratio": Limit(
        0.1, "of the entropy at the start: the reward is paid with it (arXiv 2505.22617)"
    ),
    "solved_reward": Limit(0.95, "of the largest reward: low entropy is right for a solved task"),
    "reward_ratio": Limit(0.5, "of the best recent mean: half of what was learned is lost"),
    "accuracy_drop": Limit(0.03, "below the best evaluation, besides two standard errors"),
    "mixed_share": Limit(0.5, "of the steps between two evaluations, which then hardly differ"),
    "ess": Limit(0.5, "half of the tokens are wasted (Kong, 1992; arXiv 2509.19128, eq. 6)"),
    "behave_kl": Limit(
        0.05,
        "nats a token: above it, most runs of benchmarks/results/staleness lost much of what they "
        "had learned; no run below it did",
    ),
    "rejected": Limit(0.1, "of the tokens left out: the batch is smaller than it looks"),
    "capped_steps": Limit(0.5, "of the recent steps have a weight at algo.correction.cap"),
    "truncated_share": Limit(0.1, "such trajectories are punished for length, not for content"),
    "truncated_alarm": Limit(0.5, "most rewards say nothing about the answer"),
    "grad_spike": Limit(20, "times the median: ten is common while rewards are rare"),
    "failures": Limit(0.01, "of the trajectories: above what flaky tools explain"),
    "failures_alarm": Limit(0.1, "of the trajectories: the data are biased towards what works"),
    "wait_share": Limit(0.3, "of the time: the trainer could take a third fewer devices"),
    "busy_share": Limit(0.05, "of the time: a trainer that waits less is always busy"),
    "in_flight_share": Limit(0.25, "of the limit: servers that run so few requests idle"),
    "full_share": Limit(0.9, "of the limit: more requests would be sent if they were allowed"),
    "overdue_share": Limit(
        0.1, "of the sampled tokens: a tenth of the servers' work is thrown away"
    ),
    "straggler_share": Limit(0.1, "of the time: the trainer has a whole batch and may not take it"),
    "distinct_share": Limit(0.1, "0 if all completions of a prompt are the same, 1 if none are"),
    "pause_share": Limit(
        0.1, "of the time, in which no server generates; docs/servers.md has the costs of each mode"
    ),
    "loop_lag_s": Limit(
        0.1, "seconds: a decode step is shorter, so requests wait for the controller"
    ),
    "adapter_share": Limit(
        0.002, "of the weights' size: bfloat16 keeps 8 bits, and rounds most of less away"
    ),
    "reward_rise": Limit(0.02, "below the noise of the mean reward of most batches"),
    "routes_changed": Limit(
        0.2, "twice what different kernels make with the same weights (arXiv 2510.11370)"
    ),
    "teacher_kl": Limit(0.02, "nats a token: as close as a few updates move a policy"),
    "teacher_ratio": Limit(0.95, "of the distance at the start: within its noise"),
    "traces_share": Limit(0.5, "of the most traces: some episodes then reach the limit"),
    "source_share": Limit(0.5, "of what its weight says: draws follow weights exactly"),
    "value_explained": Limit(0.0, "a constant explains as much"),
    "restarts": Limit(3, "restarts: one is bad luck, three are a pattern"),
}


def limit(name: str) -> float:
    """Return the value of a threshold."""
    return LIMITS[name].value
