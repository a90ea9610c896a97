"""Train from Python: `python train.py model=FOLDER [key=value …]`.

The settings are those of the command line, and the run is the same. What Python adds is `on_step`:
your function gets the metrics of each step during the run.
"""

import sys

import areal_lite

SETTINGS = {
    "algo": "quickstart",
    "+task": "addition",
    "data.args.max_digits": 3,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 64,
    "trainer.batch_groups": 32,
    "trainer.minibatches": 4,
    "trainer.lr": 3e-4,
    "trainer.lr_schedule": "linear",
    "trainer.lr_warmup_steps": 4,
    "trainer.steps": 24,
}


def show(step: dict) -> None:
    """Draw the reward of a step as a bar."""
    bar = "█" * round(40 * step["reward_mean"])
    print(f"step {step['step']:3}  reward {step['reward_mean']:.2f}  {bar}", flush=True)


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    result = areal_lite.train(SETTINGS | given, on_step=show)
    before, after = result.summary["accuracy_before"], result.summary["accuracy_after"]
    if before is not None and after is not None:  # they are None with eval.problems=0
        print(f"held-out accuracy: {before:.0%} before, {after:.0%} after")
    print(f"the trained model: {result.model}")


if __name__ == "__main__":
    main()
