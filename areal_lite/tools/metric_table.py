"""The metrics of a training step: the group and the meaning of each.

metrics.jsonl, trackers, Prometheus and docs/diagnose.md have these names. To add a metric, log it,
add a row here, and run `python docs/diagnose_page.py > docs/diagnose.md`. The page also has the
healthy range of some.
"""

GROUPS = {
    "reward": {
        "reward_mean": "mean reward of the step's episodes",
        "reward_std": "standard deviation of the rewards of all episodes",
        "uniform_groups_share": "share of groups whose rewards are all equal",
        "distinct_share": "different completions of a prompt, as a share of all",
        "distinct_correct": "different completions of a prompt with a positive reward",
    },
    "staleness": {
        "staleness_mean": "mean staleness of the sampled tokens of the batch, in training steps",
        "staleness_max": "largest staleness of a sampled token",
        "segments_mean": "mean number of segments of the step's trajectories",
        "interrupted_share": "share of trajectories that several versions sampled",
        "masked_tokens": "sampled tokens that are too stale to train on",
        "passed_groups": "used groups that are younger than the oldest group that still runs",
        "masked_overdue": "tokens left out because they are too stale",
        "stale_square": "mean squared log-ratio of older tokens, minus `mismatch_square`",
        "server_lag": "steps from the weights of the servers to those of the trainer, at its start",
    },
    "loss": {
        "loss": "mean loss of the minibatches",
        "grad_norm": "mean gradient norm before clipping",
        "lr": "learning rate",
        "skipped": "updates that were skipped, because a loss or gradient was not finite",
        "trained_tokens": "tokens in the loss",
        "computed_share": "tokens that the updates compute, as a share of the batch's: a shared "
        "prefix counts once, a sequence without a gradient not at all",
        "clip_fraction": "share of tokens whose gradient the clip removed",
        "clip_fraction_high": "the same, of tokens with a positive advantage",
        "clip_fraction_low": "the same, of tokens with a negative advantage",
        "ratio": "mean ratio of the policy in training to the proximal policy",
        "ratio_max": "largest ratio of a token",
        "ratio_chi2": "mean squared distance of the ratio from 1",
        "extreme_ratios": "share of tokens whose ratio is above e^20 or below e^-20",
        "entropy": "mean entropy of the policy per token, in nats",
        "masked_truncated": "tokens left out because their trajectory was truncated",
        "masked_nonfinite": "tokens left out because their log-prob is not finite",
        "adapter_share": "size of what the adapters add, as a share of the weights that they adapt "
        "(Frobenius norms of s B A and of W), with `trainer.lora`",
        "reference_kl": "estimated KL(policy in training || reference policy) per trained token, "
        "in nats, with `algo.kl.coef`",
    },
    "behavior": {
        "behave_kl": "estimated KL(behavior || proximal) per trained token, in nats",
        "ess": "effective sample size of the behavior weights, as a share of 1",
        "nonfinite_tokens": "sampled tokens whose log-prob is not finite",
        "behavior_weight": "mean weight of a token after the correction",
        "rejected": "share of tokens that the correction, or a loss of your own, left out",
        "behave_kl_k1": "the same as behave_kl, by the estimator -d, which can be negative",
        "behave_abs": "mean absolute difference of proximal and behavior log-probs, in nats",
        "weight_max": "largest behavior weight before the correction",
        "mismatch_square": "mean squared log-ratio of tokens of the current version, in nats^2: "
        "the disagreement of servers and trainer",
        "logprob_diff_sampled": "log-prob difference on tokens of the current version, in nats",
        "logprob_diff_scored": "log-prob difference on sequences that a server scored, in nats",
        "logprob_diff": "the larger of the two: disagreement of servers and trainer",
        "routes_changed": "share of the recorded routes, each of a token in a layer, that the "
        "trainer's routers would have chosen otherwise, with `algo.routing_replay`",
    },
    "critic": {
        "value": "mean value that the critic gives to a trained token",
        "value_error": "mean squared difference of the critic's values and the returns",
        "value_explained": "share of the variance of the returns that the critic explains: 1 is "
        "perfect, 0 knows their mean; missing where all returns are equal",
        "value_clip_fraction": "share of tokens whose value moved beyond the clip",
        "critic_loss": "mean loss of the critic's updates",
        "critic_grad_norm": "mean gradient norm of the critic before clipping",
        "critic_lr": "learning rate of the critic",
        "critic_skipped": "updates of the critic that were skipped, as in `skipped`",
    },
    "rollout": {
        "tokens": "sampled tokens of the batch",
        "length_mean": "mean sampled tokens of a trajectory",
        "length_max": "sampled tokens of the longest trajectory",
        "truncated_share": "share of trajectories that reached the limit of new tokens",
        "trajectories": "trajectories of the batch",
        "traces_mean": "mean number of trajectories of an episode",
        "epochs": "how often each prompt was drawn; missing for prompts without end",
        "queue_depth": "groups that are left in the queue after the batch was taken",
        "in_flight": "trajectories that are being generated",
        "concurrency_limit": "trajectories that may be generated at a time",
        "admission_lead": "groups by which generation may run ahead of the batch",
        "empty_groups": "groups in which every rollout failed, since the controller started",
        "failed_rollouts": "rollouts without a trajectory, since the controller started",
        "workflow_failures": "rollouts whose workflow failed, since the controller started",
        "reward_failures": "trajectories without a reward, since the controller started",
        "judge_calls": "requests to the judge of a rubric, since the batch before",
        "judge_failed": "requests to the judge without a verdict, since the batch before",
        "judge_cached": "answers whose reward was known already, since the batch before",
        "judge_p50_s": "seconds that the judge takes, median",
        "judge_p99_s": "seconds that the judge takes, 99th percentile",
        "judge_tokens": "tokens that the judge read and wrote, since the batch before",
        "filtered_groups": "groups that a filter left out, in all",
        "retired_prompts": "prompts that are solved and no longer asked",
        "quarantined_prompts": "prompts that are no longer asked: their episodes hung or crashed",
        "resting_prompts": "prompts that nothing solved and that this epoch leaves out",
        "store_mib": "size of the store's file, in MiB",
    },
    "push": {
        "pause_s": "pause window of the push of `version` in seconds; null when nothing was pushed",
        "total_s": "seconds of the push, preparation included",
        "megabytes": "size of the pushed weights, in MiB",
        "drained": "requests that the push waited for",
        "drain_s": "seconds that it waited for them, part of `push_s`",
        "verified": "tensors that were read back and compared",
    },
    "time": {
        "time_s": "seconds since the end of the previous step, waiting included",
        "straggler_wait_s": "seconds a whole batch waited for an older group (`buffer.window`)",
        "wait_s": "seconds that the trainer waited for the batch",
        "loop_lag_p99_s": "lateness of the controller's event loop, in seconds, 99th percentile",
        "train_s": "seconds of training",
        "mfu": "operations of training, as a share of the GPUs' peak in bfloat16 over `train_s`; "
        "missing where that is unknown",
        "push_s": "seconds of the push and the comparison of log-probs before it",
    },
    "": {
        "step": "number of the step, from 1",
        "version": "weight version of the servers after the step: the steps before their last push",
        "logged_at": "wall-clock seconds at which the line was written",
        "tokens_by_staleness": "tokens in the loss by staleness, from 0",
        "behave_abs_by_staleness": "behave_abs by staleness, from 0",
        "paused_at": "wall-clock seconds at which the pause began",
        "failed": "servers that were left out of the push",
    },
}
"""The meaning of each metric, with its unit, by group. Trackers show `group/metric`.

Metrics without a group are not sent to trackers: their axis, what the axis tells as well,
wall-clock times, and lists.
"""

MEANINGS = {key: meaning for group in GROUPS.values() for key, meaning in group.items()}
"""The meaning of each metric."""

GROUP_OF = {key: name for name, group in GROUPS.items() for key in group}
"""The group of each metric; empty where trackers do not get it."""
