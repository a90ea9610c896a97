"""Every finding: its name, when it is found, its likely cause and what to change.

Findings are printed by severity, then in this order. A finding that another one explains is left
out (`unless`). docs/diagnose_page.py writes the page of findings, metrics and thresholds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from areal_lite.tools.diagnose import integrity, learning, operation
from areal_lite.tools.diagnose.history import History, Sign


class Advice(NamedTuple):
    """A finding without its numbers. Settings stand in backticks."""

    check: Callable[[History], Sign | None]
    title: str
    # When it is found, with the thresholds in braces.
    flag: str
    cause: str
    change: str
    unless: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.check.__name__


GUIDE = (
    Advice(
        operation.stalled,
        "The run makes no progress",
        "no step for {stall_s:g} s and {stall_factor:g} usual steps, while the run is active",
        "a role hangs, and the others wait for it",
        "read the log that is named; `reward.timeout_s` and `sync.timeout_s` bound how long a hang "
        "lasts",
    ),
    Advice(
        operation.ended_early,
        "The run ended before its last step",
        "no process runs, steps are left, and no stop was requested",
        "a role failed, or the run was interrupted or killed (out of memory leaves no error)",
        "remove the cause; `resume=auto` continues from the newest checkpoint, "
        "`trainer.save_every` writes more of them",
    ),
    Advice(
        operation.failed_servers,
        "Servers failed",
        "a server was restarted or left out of a push; alarm: {restarts:g} restarts, or given up",
        "a server ran out of memory, crashed or did not answer in time",
        "read logs/server-N.log; lower `server.args.mem_fraction_static` or "
        "`server.args.max_running_requests` against lack of memory, raise `sync.timeout_s` for a "
        "slow machine",
    ),
    Advice(
        operation.restarted,
        "Controller and trainer were restarted",
        "a restart in logs/restarts.log; alarm: {restarts:g} of them",
        "one of them failed, was killed or hung; the steps after the newest checkpoint were "
        "trained again",
        "read logs/restarts.log for the cause of each; `trainer.save_every` "
        "bounds the steps that are trained again",
    ),
    Advice(
        learning.bad_numbers,
        "Losses, gradients or log-probs are not finite",
        "a skipped update, or a token whose log-prob is not finite",
        "updates are too large for the precision, or a server computes NaN",
        "look at bad_batches/; lower `trainer.lr`, add `trainer.lr_warmup_steps`, or set "
        "`trainer.fp32_head=true`",
    ),
    Advice(
        integrity.stuck_batch,
        "A batch came again",
        "two steps in a row have the same samples, token for token, which is unlikely by chance; "
        "or a step reports the tokens and the mean reward of the batch before",
        "the trainer or a server gives an old answer: a cache, a retry, or a data source that does "
        "not advance",
        "look at both steps (`areal-lite report --inspect`); check `data.source` and "
        "`rollout.workflow` if they are your own",
    ),
    Advice(
        integrity.rogue_normalizer,
        "The loss counts other tokens than were sampled",
        "the trained and the masked tokens of a step are not the tokens of its groups in the store",
        "a batch was changed between store and trainer, or a loss counts padding, prompts or a "
        "part of the ranks: every learning rate then means something else",
        "compare `trained_tokens` of the step with its groups (`areal-lite report --inspect`); "
        "check `rollout.workflow` if it is your own",
        ("stuck_batch",),
    ),
    Advice(
        integrity.lost_seed,
        "A seed does not reach the data",
        "the samples of a group are equal although the policy makes that unlikely; or prompts come "
        "in the order of their file",
        "each request is sampled with the same seed, or the shuffling ignores its seed",
        "remove a fixed seed from the requests of `rollout.workflow` and from `server.args`; check "
        "`data.source` if it is your own",
    ),
    Advice(
        learning.logprob_mismatch,
        "Servers and trainer disagree about log-probs",
        "above {logprob_diff:g} nats, or {logprob_growth:g} times what it was at first",
        "servers have other weights, another precision or other kernels than the trainer",
        "set `sync.verify=true` to check the pushes; `trainer.fp32_head=true`, and the same "
        "`trainer.dtype` and `server.args.dtype`; remove quantization from `server.args`; with a "
        "mixture of experts set `algo.routing_replay=true`",
    ),
    Advice(
        learning.reward_collapse,
        "The reward collapsed",
        "the mean of {recent_steps:g} steps below {reward_ratio:.0%} of its best",
        "updates were too large, or the data too stale",
        "go back to a checkpoint (`trainer.keep_checkpoints`); lower `trainer.lr` or "
        "`buffer.max_staleness`, or add `algo.kl.coef`",
        ("bad_numbers", "logprob_mismatch"),
    ),
    Advice(
        learning.falling_accuracy,
        "Held-out accuracy falls while the reward does not",
        "the newest evaluation below the best by {accuracy_drop:.0%} and two standard errors",
        "the policy learns the training prompts by heart, or exploits the reward function",
        "read trajectories (`areal-lite report --inspect`); mend `reward.function`, use more "
        "prompts, stop at the best version, or add `algo.kl.coef`",
    ),
    Advice(
        learning.entropy_collapse,
        "The entropy collapsed before the task is solved",
        "below {entropy_ratio:.0%} of the entropy at the start",
        "likely tokens are reinforced until nothing else is sampled",
        "raise `algo.eps_high` (0.28 in DAPO), add `algo.entropy_coef` or `algo.kl.coef`, or lower "
        "`trainer.lr`",
        ("reward_collapse",),
    ),
    Advice(
        learning.low_ess,
        "Behavior weights are far from 1",
        "alarm: ess below {ess:g}; hint: behave_kl above {behave_kl:g}, more than "
        "{rejected:.0%} of the tokens rejected, or a weight at the cap in {capped_steps:.0%} "
        "of the steps",
        "the policy moves far between sampling and training",
        "lower `trainer.lr` or `buffer.max_staleness`; `algo.correction.mode=mask` leaves such "
        "tokens out",
        ("logprob_mismatch", "bad_numbers"),
    ),
    Advice(
        learning.too_stale,
        "Tokens are staler than the objective is known to tolerate",
        "staleness_max above what `areal_lite/config/rules.py` lists for the objective",
        "`buffer.max_staleness` suits another correction of stale tokens",
        "lower `buffer.max_staleness`; or train with "
        "`algo.loss=examples.recipes.stale:loss`, or with "
        "`algo.decoupled=true` and `algo.correction.mode=cap`",
        ("low_ess",),
    ),
    Advice(
        operation.reward_failures,
        "Rewards fail",
        "above {failures:.0%} of the trajectories; alarm: {failures_alarm:.0%}",
        "the reward function raises an error or takes too long",
        "mend `reward.function`; raise `reward.timeout_s` or `reward.workers` for time-outs; ",
    ),
    Advice(
        operation.workflow_failures,
        "Rollouts fail",
        "above {failures:.0%} of the trajectories; alarm: {failures_alarm:.0%}",
        "the workflow raises an error, for example for a tool or a context that is too long",
        "mend `rollout.workflow`; `server.args.context_length` bounds prompt and answer together",
        ("failed_servers",),
    ),
    Advice(
        learning.truncated,
        "Completions are cut off",
        "truncated_share above {truncated_share:.0%}; alarm: {truncated_alarm:.0%}",
        "completions need more tokens, or grow without use",
        "raise `rollout.max_new_tokens`; `algo.shaping.overlong_margin` punishes length gradually, "
        "and `algo.shaping.mask_truncated=true` leaves such trajectories out",
    ),
    Advice(
        learning.too_easy,
        "Most groups are too easy: all their trajectories succeed",
        "uniform_groups_share above {uniform_share:.0%}, mostly successes; alarm: "
        "{uniform_alarm:.0%}",
        "the policy has solved these prompts; equal rewards give no advantage",
        "set `rollout.filters=[zero_variance]`, or `rollout.retire_above=0.9` where prompts "
        "repeat; use harder prompts",
    ),
    Advice(
        learning.too_hard,
        "Most groups are too hard: all their trajectories fail",
        "uniform_groups_share above {uniform_share:.0%}, mostly failures; alarm: "
        "{uniform_alarm:.0%}",
        "the policy cannot solve these prompts yet, or no answer can satisfy the reward function",
        "read trajectories (`areal-lite report --inspect`) and `reward.function`; raise "
        "`rollout.group_size` or `rollout.max_new_tokens`, set `rollout.filters=[zero_variance]`, "
        "or `rollout.rest_unsolved=8` where prompts repeat; use easier prompts",
        ("truncated", "reward_collapse"),
    ),
    Advice(
        learning.gradient_spikes,
        "The gradient norm has spikes",
        "above {grad_spike:g} times the median and `trainer.clip_grad`",
        "few tokens dominate a batch: extreme weights, or rare rewards",
        "lower `trainer.clip_grad` or `trainer.lr`, set `algo.dual_clip=3`, or raise "
        "`trainer.batch_groups`",
        ("bad_numbers", "low_ess"),
    ),
    Advice(
        learning.idle_clip,
        "The clip never acts",
        "clip_fraction 0 in every step",
        "with one update per batch the ratio is 1, so nothing is clipped; with several, the "
        "updates are small",
        "nothing, if one update per batch is what you want; otherwise `trainer.minibatches=2` with "
        "`algo.prox=recompute`, or a larger `trainer.lr`",
    ),
    Advice(
        learning.duplicates,
        "Completions of a prompt are the same",
        "below {distinct_share:g} on a scale from 0 (all the same) to 1 (all different)",
        "the policy is almost deterministic on these prompts",
        "raise `rollout.temperature` or `algo.entropy_coef`, or lower `rollout.group_size`",
        ("entropy_collapse", "too_easy", "too_hard", "lost_seed"),
    ),
    Advice(
        learning.mixed_evaluations,
        "Evaluations mix the weights of many steps",
        "versions further apart than {mixed_share:.0%} of `eval.every` answered one of them",
        "an evaluation takes long, and pushes change the servers' weights meanwhile",
        "lower `eval.problems` or `eval.samples`, raise `eval.every`, or evaluate the saved "
        "checkpoints instead (`areal-lite eval`)",
    ),
    Advice(
        learning.faint_adapters,
        "The adapters have hardly changed the model",
        "adapter_share below {adapter_share:g}, and a reward that did not rise by {reward_rise:g}",
        "updates of adapters need a larger learning rate than updates of all weights",
        "raise `trainer.lr`, for example to ten times the rate of full training; raise "
        "`trainer.lora.alpha`, or name more layers in `trainer.lora.targets`",
    ),
    Advice(
        learning.lost_routes,
        "Routes should be replayed, and there are none",
        "no recorded route in {least_steps:g} steps with `algo.routing_replay=true`",
        "the trajectories come from a workflow that drops routes, or from servers that record none",
        "let `rollout.workflow` join the routes of its completions, as `Transcript` does; check "
        "`server.args`",
    ),
    Advice(
        learning.changed_routes,
        "The trainer's routers would choose other experts",
        "above {routes_changed:.0%} of the recorded routes",
        "the weights moved far since the tokens were sampled, or server and trainer compute with "
        "different precision",
        "lower `trainer.lr` or `buffer.max_staleness` if the share has grown; otherwise use the "
        "same `trainer.dtype` and `server.args.dtype`, and remove quantization from `server.args`",
        ("logprob_mismatch",),
    ),
    Advice(
        learning.distant_teacher,
        "The student does not come closer to its teacher",
        "reference_kl above {teacher_ratio:.0%} of its first value, which was above "
        "{teacher_kl:g} nats, with `algo.advantage.estimator=off`",
        "updates are too small or too large, or the teacher cannot judge texts like the student's",
        "raise `trainer.lr` if reference_kl is flat, lower it if it grows; choose a teacher in "
        "`algo.reference` that answers the same prompts in the same format",
        ("bad_numbers", "logprob_mismatch"),
    ),
    Advice(
        learning.split_episodes,
        "Agents seldom continue a conversation",
        "traces_mean above {traces_share:.0%} of `max_traces`",
        "the agent edits what was said before each request (it drops reasoning, or writes answers "
        "anew): each request then begins a trace, and server and trainer compute all of it again",
        "return answers to the policy as they were; or raise `max_traces` in "
        "`rollout.workflow_args` if the agent is meant to work like this, as requests beyond it "
        "are refused",
    ),
    Advice(
        learning.rare_source,
        "A data source comes into batches less often than its weight says",
        "below {source_share:.0%} of its share of the groups of {recent_steps:g} steps",
        "its groups are filtered out, its prompts are retired or rest, or its rollouts fail",
        "look at `uniform_groups_share/NAME` and the counts of filtered groups; give the source "
        "other prompts or another `weight`, or change `rollout.retire_above`, "
        "`rollout.rest_unsolved` or `rollout.filters`",
        ("workflow_failures", "reward_failures"),
    ),
    Advice(
        learning.silent_source,
        "A data source has no signal",
        "equal rewards in {uniform_alarm:.0%} of the groups of one source",
        "its prompts are solved, or too hard, or its reward function does not tell answers apart",
        "lower its `weight`; set `rollout.filters=[zero_variance]`, or `rollout.retire_above=0.9` "
        "and `rollout.rest_unsolved=8` where prompts repeat; read its trajectories "
        "(`areal-lite report --inspect`)",
        ("too_easy", "too_hard"),
    ),
    Advice(
        learning.blind_critic,
        "The critic explains nothing",
        "value_explained below {value_explained:g} after {recent_steps:g} steps and more",
        "the critic learns slowly, or its updates are too large; advantages are then noisier than "
        "without it",
        "change `algo.critic.lr`; let it learn longer with a smaller `trainer.lr`; or use an "
        "estimator without a critic (`algo.advantage.estimator=grpo`)",
        ("bad_numbers", "reward_collapse"),
    ),
    Advice(
        operation.slow_servers,
        "The trainer waits for the servers",
        "above {wait_share:.0%} of the time, with as many requests in flight as allowed, or tokens "
        "fresher than they may be",
        "generation is slower than training",
        "raise `server.count`, or `rollout.max_concurrent` if the servers have memory for more "
        "requests; lower `rollout.max_new_tokens`",
        ("failed_servers", "stalled"),
    ),
    Advice(
        operation.tight_staleness,
        "The staleness bound holds generation back while the trainer waits",
        "above {wait_share:.0%} of the time, with tokens at the bound and fewer requests in flight "
        "than allowed",
        "a few long trajectories keep a batch open, and no others may start",
        "raise `buffer.max_staleness` by one, or lower `rollout.max_new_tokens`",
        ("failed_servers", "stalled"),
    ),
    Advice(
        operation.slow_trainer,
        "Servers idle because the trainer is slow",
        "waits below {busy_share:.0%}, a whole batch in the queue, and requests below "
        "{in_flight_share:.0%} of the limit",
        "training is slower than generation",
        "move devices from `server.count` to `trainer.data_parallel`, or raise "
        "`trainer.tokens_per_microbatch`",
    ),
    Advice(
        operation.long_pauses,
        "Pushes pause generation for long",
        "above {pause_share:.0%} of the time",
        "weights take long compared with a step, or the interrupt mode waits",
        "set `rollout.interrupt=in_place`; raise `sync.every` or `trainer.batch_groups` "
        "for fewer pushes; try another `sync.transport`",
    ),
    Advice(
        operation.stragglers,
        "Batches wait for slow groups",
        "above {straggler_share:.0%} of the time",
        "a few groups last much longer than the others, and no more may pass them",
        "raise `buffer.window` and `buffer.max_staleness`, or lower `rollout.max_new_tokens`",
    ),
    Advice(
        operation.overdue_tokens,
        "Many tokens are too stale to train on",
        "above {overdue_share:.0%} of the tokens masked, or of the groups dropped",
        "trajectories last longer than the staleness bound allows",
        "raise `buffer.max_staleness`, or lower `rollout.max_concurrent` or "
        "`rollout.max_new_tokens`",
    ),
    Advice(
        operation.busy_controller,
        "The controller is overloaded",
        "above {loop_lag_s:g} s",
        "a workflow, filter or reward computes in the controller's event loop, or it has no core",
        "move computing of `rollout.workflow` and `rollout.filters` to threads, or lower "
        "`rollout.max_concurrent`",
    ),
)
