"""Findings about learning: signal, objective, numbers and optional features.

Each is a pure function of a history.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_lite.config import source_configs
from areal_lite.config.data import shares
from areal_lite.tools.diagnose.history import History, Sign, alarm, finding, hint, limit
from areal_lite.tools.formatting import short

# Below this many nats a difference grows by rounding alone.
_ROUNDING = 1e-3
_AGENT = "areal_lite.workflows.agent:Agent"
_MAX_TRACES = 16  # its default


@finding(
    "Losses, gradients or log-probs are not finite",
    flag="a skipped update, or a token whose log-prob is not finite",
    cause="updates are too large for the precision, or a server computes NaN",
    change="look at bad_batches/; lower `trainer.lr`, add `trainer.lr_warmup_steps`, or set "
    "`trainer.fp32_head=true`",
)
def bad_numbers(run: History) -> Sign | None:
    steps = [
        m["step"]
        for m in run.metrics
        if m.get("skipped")
        or m.get("critic_skipped")
        or None in (m.get("loss", 0.0), m.get("grad_norm", 0.0))
    ]
    tokens = int(np.nansum(run.values("nonfinite_tokens")))
    if not (steps or tokens):
        return None
    return alarm(
        f"{len(steps)} of {len(run.metrics)} steps with a loss or gradient that is not finite"
        f"{f' (first: step {steps[0]})' if steps else ''}, "
        f"{tokens:,} tokens whose log-prob is not finite"
    )


@finding(
    "Servers and trainer disagree about log-probs",
    flag="above {logprob_diff:g} nats, or {logprob_growth:g} times what it was at first",
    cause="servers have other weights, another precision or other kernels than the trainer",
    change="set `sync.verify=true` to check the pushes; `trainer.fp32_head=true`, and the same "
    "`trainer.dtype` and `server.args.dtype`; remove quantization from `server.args`; with a "
    "mixture of experts set `algo.routing_replay=true`",
)
def logprob_mismatch(run: History) -> Sign | None:
    recent, first = run.recent("logprob_diff"), run.first("logprob_diff")
    if not len(recent):
        return None
    now, before = float(np.median(recent)), float(np.median(first)) if len(first) else math.nan
    grew = now > max(_ROUNDING, limit("logprob_growth") * before)
    if now <= limit("logprob_diff") and not grew:
        return None
    return alarm(f"logprob_diff is {now:.2g} nats (median of recent steps), first {before:.2g}")


@finding(
    "The reward collapsed",
    flag="the mean of {recent_steps:g} steps below {reward_ratio:.0%} of its best",
    cause="updates were too large, or the data too stale",
    change="go back to a checkpoint (`trainer.keep_checkpoints`); lower `trainer.lr` or "
    "`buffer.max_staleness`, or add `algo.kl.coef`",
    unless=("bad_numbers", "logprob_mismatch"),
)
def reward_collapse(run: History) -> Sign | None:
    window, rewards = int(limit("recent_steps")), run.values("reward_mean")
    if len(rewards) < 2 * window or not np.isfinite(rewards).all() or rewards.min() < 0:
        return None
    means = np.convolve(rewards, np.full(window, 1 / window), "valid")
    best = int(means.argmax())
    if means[-1] >= limit("reward_ratio") * means[best]:
        return None
    return alarm(
        f"mean reward of {window} steps {means[best]:.2f} (until step {best + window}) -> "
        f"{means[-1]:.2f} (until step {len(rewards)})"
    )


@finding(
    "Held-out accuracy falls while the reward does not",
    flag="the newest evaluation below the best by {accuracy_drop:.0%} and two standard errors",
    cause="the policy learns the training prompts by heart, or exploits the reward function",
    change="read trajectories (`areal-lite report --inspect`); mend `reward.function`, use more "
    "prompts, stop at the best version, or add `algo.kl.coef`",
)
def falling_accuracy(run: History) -> Sign | None:
    rewards, least = run.values("reward_mean"), int(limit("least_steps"))
    sets: dict[str, list[tuple[dict[str, Any], float]]] = defaultdict(list)
    for line in run.evals:
        if (accuracy := _accuracy(line)) is not None:
            sets[line["name"]].append((line, accuracy))
    for name, lines in sets.items():
        (_, last), (best, top) = lines[-1], max(lines, key=lambda pair: pair[1])
        if not 0 <= last <= top <= 1:
            continue  # means of other rewards than shares have no known error
        error = math.sqrt((last * (1 - last) + top * (1 - top)) / best["problems"])
        steps = int(np.sum(run.values("step") <= best["version"]))
        # No reward exists before training, so the first ones of training are used.
        earlier = rewards[max(steps - least, 0) : max(steps, least)]
        later = rewards[max(steps, len(rewards) - least) :]
        if top - last <= limit("accuracy_drop") + 2 * error or not len(later):
            continue
        if later.mean() >= earlier.mean():
            return alarm(
                f"{name}: accuracy {top:.1%} (version {best['version']}) -> {last:.1%}, reward "
                f"{earlier.mean():.2f} -> {later.mean():.2f}"
            )
    return None


def _accuracy(line: Mapping[str, Any]) -> float | None:
    """Return the accuracy of an evaluation at the temperature of training, or else greedy."""
    return line["greedy"] if line.get("sampled") is None else line["sampled"]


@finding(
    "The entropy collapsed before the task is solved",
    flag="below {entropy_ratio:.0%} of the entropy at the start",
    cause="likely tokens are reinforced until nothing else is sampled",
    change="raise `algo.eps_high` (0.28 in DAPO), add `algo.entropy_coef` or `algo.kl.coef`, or "
    "lower `trainer.lr`",
    unless=("no_signal", "reward_collapse"),
)
def entropy_collapse(run: History) -> Sign | None:
    first, recent, reward = run.first("entropy"), run.recent("entropy"), run.recent("reward_mean")
    if not (len(first) and len(recent) and len(reward)):
        return None
    best = float(np.nanmax(run.columns.reward, initial=1.0))
    held_out = (_accuracy(run.evals[-1]) if run.evals else None) or 0.0
    solved = max(reward.mean(), held_out) >= limit("solved_reward") * best
    if solved or recent.mean() > limit("entropy_ratio") * first.mean():
        return None
    change = f"entropy {first.mean():.3g} -> {recent.mean():.3g} nats a token"
    return alarm(f"{change}; reward {reward.mean():.2f}")


@finding(
    "Behavior weights are far from 1",
    flag="alarm: ess below {ess:g}; hint: behave_kl above {behave_kl:g}, more than {rejected:.0%} "
    "of the tokens rejected, or a weight at the cap in {capped_steps:.0%} of the steps",
    cause="the policy moves far between sampling and training",
    change="lower `trainer.lr` or `buffer.max_staleness`; `algo.correction.mode=mask` leaves such "
    "tokens out",
    unless=("logprob_mismatch", "bad_numbers"),
)
def low_ess(run: History) -> Sign | None:
    ess, largest, out = run.recent("ess"), run.recent("weight_max"), run.recent("rejected")
    if not len(ess) or run.config.algo.loss == "tb":
        return None
    correction = run.config.algo.correction
    capped = float(np.mean(largest >= correction.cap)) if len(largest) else 0.0
    rejected = float(out.mean()) if len(out) else 0.0
    moved = run.recent("behave_kl")
    drift = float(moved.mean()) if len(moved) else 0.0
    text = (
        f"ess {ess.mean():.2f}; behave_kl {drift:.3f}; a weight at the cap of {correction.cap:g} "
        f"in {capped:.0%} of the recent steps; {rejected:.1%} of the tokens rejected"
    )
    if ess.mean() < limit("ess"):
        return alarm(text)
    at_cap = correction.mode == "cap" and capped > limit("capped_steps")
    far = drift > limit("behave_kl")
    return hint(text) if far or at_cap or rejected > limit("rejected") else None


@finding(
    "Completions are cut off",
    flag="truncated_share above {truncated_share:.0%}; alarm: {truncated_alarm:.0%}",
    cause="completions need more tokens, or grow without use",
    change="raise `rollout.max_new_tokens`; `algo.shaping.overlong_margin` punishes length "
    "gradually, and `algo.shaping.mask_truncated=true` leaves such trajectories out",
    unless=("no_signal",),
)
def truncated(run: History) -> Sign | None:
    share = run.recent("truncated_share")
    if not len(share) or share.mean() <= limit("truncated_share"):
        return None
    longest = run.config.rollout.max_new_tokens
    text = f"{share.mean():.0%} of the recent trajectories reached rollout.max_new_tokens={longest}"
    return alarm(text) if share.mean() > limit("truncated_alarm") else hint(text)


@finding(
    "The gradient norm has spikes",
    flag="above {grad_spike:g} times the median and `trainer.clip_grad`",
    cause="few tokens dominate a batch: extreme weights, or rare rewards",
    change="lower `trainer.clip_grad` or `trainer.lr`, set `algo.dual_clip=3`, or raise "
    "`trainer.batch_groups`",
    unless=("no_signal", "bad_numbers", "low_ess"),
)
def gradient_spikes(run: History) -> Sign | None:
    norms = run.values("grad_norm")
    known = norms[norms > 0]  # a batch without a signal has no gradient
    if len(known) < limit("recent_steps"):
        return None
    usual = float(np.median(known))
    high = np.flatnonzero(norms > max(run.config.trainer.clip_grad, limit("grad_spike") * usual))
    if not len(high):
        return None
    top = int(high[np.argmax(norms[high])])
    steps = "1 step" if len(high) == 1 else f"{len(high)} steps"
    return hint(
        f"{steps} above {limit('grad_spike'):g} times the median of {short(usual)}; "
        f"{short(float(norms[top]))} at step {run.metrics[top]['step']}"
    )


@finding(
    "Evaluations mix the weights of many steps",
    flag="versions further apart than {mixed_share:.0%} of `eval.every` answered one of them",
    cause="an evaluation takes long, and pushes change the servers' weights meanwhile",
    change="lower `eval.problems` or `eval.samples`, raise `eval.every`, or evaluate the saved "
    "checkpoints instead (`areal-lite eval`)",
)
def mixed_evaluations(run: History) -> Sign | None:
    every, share = run.config.eval.every, limit("mixed_share")
    mixed = [one for one in run.evals if every and np.ptp(one["versions"] or 0) > share * every]
    if not mixed:
        return None
    first = mixed[0]["versions"]
    return hint(
        f"{len(mixed)} of {len(run.evals)} evaluations, {every} steps apart; the one of version "
        f"{mixed[0]['version']} was answered by versions {first[0]} to {first[-1]}"
    )


@finding(
    "The adapters have hardly changed the model",
    flag="adapter_share below {adapter_share:g}, and a reward that did not rise by {reward_rise:g}",
    cause="updates of adapters need a larger learning rate than updates of all weights",
    change="raise `trainer.lr`, for example to ten times the rate of full training; raise "
    "`trainer.lora.alpha`, or name more layers in `trainer.lora.targets`",
    unless=("no_signal",),
)
def faint_adapters(run: History) -> Sign | None:
    shares_of_weights = run.recent("adapter_share")
    first, recent = run.first("reward_mean"), run.recent("reward_mean")
    if not (len(shares_of_weights) and len(first) and len(recent)):
        return None
    rose = recent.mean() > first.mean() + limit("reward_rise")
    if rose or shares_of_weights[-1] >= limit("adapter_share"):
        return None
    return hint(
        f"after {run.step} steps the adapters have {shares_of_weights[-1]:.2g} of the size of the "
        f"weights; reward {first.mean():.2f} -> {recent.mean():.2f}; "
        f"trainer.lr={run.config.trainer.lr:g}, trainer.lora.rank={run.config.trainer.lora.rank}"
    )


@finding(
    "Routes should be replayed, and there are none",
    flag="no recorded route in {least_steps:g} steps with `algo.routing_replay=true`",
    cause="the trajectories come from a workflow that drops routes, or from servers that record "
    "none",
    change="let `rollout.workflow` join the routes of its completions, as `Transcript` does; check "
    "`server.args`",
)
def lost_routes(run: History) -> Sign | None:
    recent = run.metrics[-int(limit("recent_steps")) :]
    if not run.config.algo.routing_replay or len(recent) < limit("least_steps"):
        return None
    if any(step.get("routes_changed") is not None for step in recent):
        return None
    return alarm(f"no token of the recent {len(recent)} steps has a recorded route")


@finding(
    "The trainer's routers would choose other experts",
    flag="above {routes_changed:.0%} of the recorded routes",
    cause="the weights moved far since the tokens were sampled, or server and trainer compute with "
    "different precision",
    change="lower `trainer.lr` or `buffer.max_staleness` if the share has grown; otherwise use the "
    "same `trainer.dtype` and `server.args.dtype`, and remove quantization from `server.args`",
    unless=("logprob_mismatch",),
)
def changed_routes(run: History) -> Sign | None:
    changed, first = run.recent("routes_changed"), run.first("routes_changed")
    if not len(changed) or changed.mean() <= limit("routes_changed"):
        return None
    before = f", first {first.mean():.0%}" if len(first) else ""
    return hint(f"{changed.mean():.0%} of the recorded routes{before}")


@finding(
    "The student does not come closer to its teacher",
    flag="reference_kl above {teacher_ratio:.0%} of its first value, which was above "
    "{teacher_kl:g} nats, with `algo.advantage.estimator=off`",
    cause="updates are too small or too large, or the teacher cannot judge texts like the "
    "student's",
    change="raise `trainer.lr` if reference_kl is flat, lower it if it grows; choose a teacher in "
    "`algo.reference` that answers the same prompts in the same format",
    unless=("bad_numbers", "logprob_mismatch"),
)
def distant_teacher(run: History) -> Sign | None:
    first, recent = run.first("reference_kl"), run.recent("reference_kl")
    if run.config.algo.advantage.estimator != "off" or not (len(first) and len(recent)):
        return None
    if first.mean() < limit("teacher_kl") or recent.mean() < limit("teacher_ratio") * first.mean():
        return None
    return alarm(f"reference_kl {first.mean():.3g} -> {recent.mean():.3g} nats a token")


@finding(
    "Agents seldom continue a conversation",
    flag="traces_mean above {traces_share:.0%} of `max_traces`",
    cause="the agent edits what was said before each request (it drops reasoning, or writes "
    "answers anew): each request then begins a trace, and server and trainer compute all of it "
    "again",
    change="return answers to the policy as they were; or raise `max_traces` in "
    "`rollout.workflow_args` if the agent is meant to work like this, as requests beyond it "
    "are refused",
)
def split_episodes(run: History) -> Sign | None:
    traces = run.recent("traces_mean")
    limits = [
        int(own.rollout.workflow_args.get("max_traces", _MAX_TRACES))
        for own in source_configs(run.config).values()
        if own.rollout.workflow == _AGENT
    ]
    if not (len(traces) and limits) or traces.mean() <= limit("traces_share") * max(limits):
        return None
    return hint(f"{traces.mean():.1f} traces in an episode, of at most {max(limits)}")


@finding(
    "A data source comes into batches less often than its weight says",
    flag="below {source_share:.0%} of its share of the groups of {recent_steps:g} steps",
    cause="its groups are filtered out, its prompts are retired or rest, or its rollouts fail",
    change="look at `uniform_groups_share/NAME` and the counts of filtered groups; give the source "
    "other prompts or another `weight`, or change `rollout.retire_above`, "
    "`rollout.rest_unsolved` or `rollout.filters`",
    unless=("workflow_failures", "reward_failures"),
)
def rare_source(run: History) -> Sign | None:
    recent = run.metrics[-int(limit("recent_steps")) :]
    planned = shares(source_configs(run.config))
    if len(planned) < 2 or len(recent) < limit("recent_steps"):
        return None
    counts = {name: sum(step.get(f"groups/{name}", 0) for step in recent) for name in planned}
    total = sum(counts.values())
    rare = [
        f"{name}: {counts[name] / total:.0%} of the recent groups, {share:.0%} by its weight"
        for name, share in planned.items()
        if total and counts[name] < limit("source_share") * share * total
    ]
    return hint("; ".join(rare)) if rare else None


@finding(
    "A data source has no signal",
    flag="equal rewards in {uniform_alarm:.0%} of the groups of one source",
    cause="its prompts are solved, or too hard, or its reward function does not tell answers apart",
    change="lower its `weight`; set `rollout.filters=[zero_variance]`, or "
    "`rollout.retire_above=0.9` and `rollout.rest_unsolved=8` where prompts repeat; read its "
    "trajectories (`areal-lite report --inspect`)",
    unless=("no_signal", "few_signals"),
)
def silent_source(run: History) -> Sign | None:
    silent = []
    for name in run.config.data.sources:
        uniform, reward = (
            run.recent(f"{key}/{name}") for key in ("uniform_groups_share", "reward_mean")
        )
        if len(uniform) and uniform.mean() >= limit("uniform_alarm"):
            silent.append(
                f"{name}: {uniform.mean():.0%} of its recent groups have equal rewards, "
                f"mean reward {np.mean(reward):.2f}"
            )
    return hint("; ".join(silent)) if silent else None


@finding(
    "The critic explains nothing",
    flag="value_explained below {value_explained:g} after {recent_steps:g} steps and more",
    cause="the critic learns slowly, or its updates are too large; advantages are then noisier "
    "than without it",
    change="change `algo.critic.lr`; let it learn longer with a smaller `trainer.lr`; or use an "
    "estimator without a critic (`algo.advantage.estimator=grpo`)",
    unless=("no_signal", "bad_numbers", "reward_collapse"),
)
def blind_critic(run: History) -> Sign | None:
    explained, few = run.recent("value_explained"), len(run.metrics) < 2 * limit("recent_steps")
    if few or not len(explained) or explained.mean() >= limit("value_explained"):
        return None
    return hint(
        f"value_explained {explained.mean():.2f} (0 knows the mean, 1 everything); "
        f"algo.critic.lr={run.config.algo.critic.lr:g}"
    )
