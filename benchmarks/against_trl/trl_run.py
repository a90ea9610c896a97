"""Train with TRL's GRPOTrainer, as one JSON file says, and write when each step ended.

    python trl_run.py settings.json

`benchmarks.against_trl` starts it, in an environment that has TRL.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from areal_lite.extensions import load_object


class Clock(TrainerCallback):
    """Notes the seconds at which each optimizer update ended."""

    def __init__(self):
        self.started = time.perf_counter()
        self.updates: list[float] = []

    def on_train_begin(self, args, state, control, **_):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.updates.append(time.perf_counter() - self.started)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    rows = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    if settings["chat"]:  # the files of the model disagree about the token that ends a turn
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)

    def prompt(question: str) -> str | list[dict[str, str]]:
        return [{"role": "user", "content": question}] if settings["chat"] else question

    score = load_object("reward", settings["reward"])
    rewards: list[float] = []
    tokens: list[int] = []

    def reward(completions: list, answer: list[str], completion_ids, **_) -> list[float]:
        texts = [c[0]["content"] for c in completions] if settings["chat"] else completions
        values = [score(text, a) for text, a in zip(texts, answer, strict=True)]
        rewards.append(sum(values) / len(values))
        tokens.append(sum(map(len, completion_ids)))
        return values

    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config(settings),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt(row["question"]), "answer": row["answer"]} for row in rows]
        ),
        callbacks=[clock],
    )
    trainer.train()
    ends = clock.updates[settings["minibatches"] - 1 :: settings["minibatches"]]
    record = {"seconds": ends, "rewards": rewards, "tokens": tokens}
    Path(settings["record"]).write_text(json.dumps(record))
    if settings["save"]:
        model.save_pretrained(settings["save"])
        tokenizer.save_pretrained(settings["save"])


def config(settings: dict) -> GRPOConfig:
    """Return TRL's settings: GRPO with the clip range and the optimizer of the other side.

    A generation makes the trajectories of a step. They are trained on in `minibatches` updates.
    """
    micro = settings["micro_batch"]
    trajectories = settings["groups"] * settings["group_size"]
    return GRPOConfig(
        output_dir=settings["work"],
        per_device_train_batch_size=micro,
        steps_per_generation=trajectories // micro,
        gradient_accumulation_steps=trajectories // settings["minibatches"] // micro,
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["steps"] * settings["minibatches"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta2=settings["adam_beta2"],
        adam_epsilon=settings["adam_eps"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=settings["eps_low"],
        epsilon_high=settings["eps_high"],
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        top_k=0,
        seed=settings["seed"],
        use_transformers_continuous_batching=settings["continuous_batching"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=settings["minibatches"],
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
