"""The findings about what only some runs have, in the order of guide.py."""

from areal_lite.tools.diagnose import options
from areal_lite.tools.diagnose.advice import Advice

OPTIONS = (
    Advice(
        options.faint_adapters,
        "The adapters have hardly changed the model",
        ("adapter_share",),
        "adapter_share below {adapter_share:g}, and a reward that did not rise by {reward_rise:g}",
        "updates of adapters need a larger learning rate than those of all weights",
        "raise `trainer.lr`, to ten times that of full training for example; raise "
        "`trainer.lora.alpha`, or name more layers in `trainer.lora.targets`",
    ),
    Advice(
        options.lost_routes,
        "Routes should be replayed, and there are none",
        ("routes_changed",),
        "no recorded route in {least_steps:g} steps with `algo.routing_replay=true`",
        "the trajectories come from a workflow that drops routes, or from servers that record none",
        "let `rollout.workflow` join the routes of its completions, as `Transcript` does; check "
        "`server.args`",
    ),
    Advice(
        options.changed_routes,
        "The trainer's routers would choose other experts",
        ("routes_changed",),
        "above {routes_changed:.0%} of the recorded routes",
        "the weights moved far since the tokens were sampled, or server and trainer compute with "
        "different precision",
        "lower `trainer.lr` or `buffer.max_staleness` if the share has grown; otherwise use the "
        "same `trainer.dtype` and `server.dtype`, and remove quantization from `server.args`",
        ("logprob_mismatch",),
    ),
    Advice(
        options.distant_teacher,
        "The student does not come closer to its teacher",
        ("reference_kl",),
        "reference_kl above {teacher_ratio:.0%} of its first value, which was above "
        "{teacher_kl:g} nats, with `algo.advantage.estimator=off`",
        "updates are too small or too large, or the teacher cannot judge texts like the student's",
        "raise `trainer.lr` if reference_kl is flat, lower it if it grows; choose a teacher in "
        "`algo.reference` that answers the same prompts in the same format",
        ("bad_numbers", "logprob_mismatch"),
    ),
    Advice(
        options.split_episodes,
        "Agents seldom continue a conversation",
        ("traces_mean",),
        "traces_mean above {traces_share:.0%} of `max_traces`",
        "the agent edits what was said before each request (it drops reasoning, or writes answers "
        "anew): each request then begins a trace, and server and trainer compute all of it again",
        "return answers to the policy as they were; or raise `max_traces` in "
        "`rollout.workflow_args` if the agent is meant to work like this, as requests beyond it "
        "are refused",
    ),
    Advice(
        options.rare_source,
        "A data source comes into batches less often than its weight says",
        ("trajectories",),
        "below {source_share:.0%} of its share of the groups of {recent_steps:g} steps",
        "its groups are filtered out, its prompts are retired or rest, or its rollouts fail",
        "look at `uniform_groups_share/NAME` and the counts of filtered groups; give the source "
        "other prompts or another `weight`, or change `rollout.retire_above`, "
        "`rollout.rest_unsolved`, `rollout.active_sampling` or `rollout.filters`",
        ("workflow_failures", "reward_failures"),
    ),
    Advice(
        options.silent_source,
        "A data source has no signal",
        ("uniform_groups_share",),
        "groups of equal rewards in {uniform_alarm:.0%} of those of one source",
        "its prompts are solved, or too hard, or its reward function does not tell answers apart",
        "lower its `weight`; set `rollout.active_sampling=true`, or `rollout.retire_above=0.9` and "
        "`rollout.rest_unsolved=8` where prompts repeat; read its trajectories "
        "(`areal-lite inspect`)",
        ("too_easy", "too_hard"),
    ),
    Advice(
        options.blind_critic,
        "The critic explains nothing",
        ("value_explained", "value_error"),
        "value_explained below {value_explained:g} after {recent_steps:g} steps and more",
        "the critic learns slowly, or its updates are too large; advantages are then noisier than "
        "without it",
        "change `algo.critic.lr`; let it learn longer with a smaller `trainer.lr`; or use an "
        "estimator without a critic (`algo.advantage.estimator=grpo`)",
        ("bad_numbers", "reward_collapse"),
    ),
)
