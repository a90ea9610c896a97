"""Compare whole asynchronous runs with a long tail of lengths, with and without drafts.

    python -m benchmarks.draft_run MODEL [--at-once 8] [--steps 8] [--pairs 2] [--teach counter]

MODEL is a small chat model, such as SmolLM2-135M-Instruct. `--teach FOLDER` first makes another one
of it, by supervised training on the right answers: a policy that answers in few ways. It learns
to count: 16 prompts that come again in each epoch, with log-normal numbers to count to, 8 samples
each, without a GPU. A run is measured from its first step to its last: then it has a history. The
ratio of a pair is that of sampled tokens a second, by the clock of a machine that trainer and
server share.

Writes results/draft_run.json.
"""

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "draft_run.json"
PROMPTS = 16
TAUGHT = 120  # answers
SETTINGS = [
    "data.source=jsonl",
    "data.prompt_key=question",
    "data.answer_key=answer",
    "reward.function=benchmarks.draft_run:counted",
    "eval.problems=0",
    "rollout.group_size=8",
    "rollout.max_new_tokens=160",
    "trainer.batch_groups=4",
    "trainer.lr=1e-5",
    "buffer.max_staleness=1",
]


def counted(completion: str, answer: str) -> float:
    """Return the share of the numbers from 1 to `answer` that come in order, half if others do."""
    found, last = re.findall(r"\d+", completion)[:1000], int(answer)
    right = 0
    while right < min(last, len(found)) and found[right] == str(right + 1):
        right += 1
    return right / last * (1.0 if len(found) == last else 0.5)


def write_prompts(path: Path) -> None:
    source, lines = random.Random(1), []
    for _ in range(PROMPTS):
        last = max(2, min(40, round(math.exp(source.gauss(math.log(6), 0.8)))))
        question = f"Count from 1 to {last}. Write the numbers only."
        lines.append(json.dumps({"question": question, "answer": str(last)}) + "\n")
    path.write_text("".join(lines))


def teach(model: str, folder: Path, data: Path) -> None:
    """Train `model` on the right answers to the prompts, and write the result to `folder`."""
    import torch  # workers, which score answers with this module, do without
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-5)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for step in range(TAUGHT):
        row = rows[step % len(rows)]
        messages = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        numbers = " ".join(str(n + 1) for n in range(int(row["answer"])))
        answer = [*tokenizer(numbers)["input_ids"], tokenizer.eos_token_id]
        ids, ignored = torch.tensor([prompt + answer]), torch.full((1, len(prompt)), -100)
        labels = torch.cat((ignored, ids[:, len(prompt) :]), 1)
        network(input_ids=ids, labels=labels).loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(folder: Path, algorithm: str, *settings: str) -> float:
    """Train, and return the sampled tokens a second after the first step."""
    drafts = f"server.args={{max_total_tokens:8192,speculative_algorithm:{algorithm}}}"
    own = [*settings, f"run_dir={folder}", drafts]
    command = [sys.executable, "-m", "areal_lite", "train", *SETTINGS, *own]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = records[-1]["logged_at"] - records[0]["logged_at"]
    return sum(record["tokens"] for record in records[1:]) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--teach", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, "count.jsonl")
        write_prompts(data)
        if options.teach:
            teach(options.model, options.teach, data)
        model = options.teach or options.model
        settings = [
            f"model={model}",
            f"data.path={data}",
            f"trainer.steps={options.steps}",
            f"rollout.max_concurrent={options.at_once}",
        ]
        for number in range(options.pairs):
            speeds = {}
            for algorithm in ("null", "history"):
                folder = Path(scratch, f"{algorithm}-{number}")
                speeds[algorithm] = run(folder, algorithm, *settings)
            pairs.append({**speeds, "ratio": speeds["history"] / speeds["null"]})
            print(json.dumps(pairs[-1]), flush=True)
    rounded = [{name: round(value, 2) for name, value in pair.items()} for pair in pairs]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[f"{Path(model).name}, {options.at_once} at once"] = rounded
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
