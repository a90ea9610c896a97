"""Write data/train.jsonl and data/test.jsonl: sums of two numbers of 2 to 30."""

import json
import random
from pathlib import Path

HELD_OUT = 128  # of 841 problems


def main() -> None:
    pairs = [(a, b) for a in range(2, 31) for b in range(2, 31)]
    random.Random(0).shuffle(pairs)
    rows = [
        {"question": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}
        for a, b in pairs
    ]
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    # What is held out must never be trained on.
    for name, part in {"test": rows[:HELD_OUT], "train": rows[HELD_OUT:]}.items():
        lines = [json.dumps(row) + "\n" for row in part]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
