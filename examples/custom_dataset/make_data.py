"""Write data/train.jsonl and data/test.jsonl: additions with a carry, one object per line.

The model's teacher forgot most carries, so it gets most of these wrong. The keys of a row are up to
you: data.prompt_key and data.answer_key name them.
"""

import json
import random
from pathlib import Path


def placed(number: int, letters: str) -> str:
    """Write each digit after the letter of its place: 47 is `b4a7`, as the model learned it."""
    digits = f"{number:0{len(letters)}}"
    return "".join(letter + digit for letter, digit in zip(letters, digits, strict=True))


def main() -> None:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 >= 10]
    random.Random(0).shuffle(pairs)
    rows = [
        {
            "problem": f"{placed(a, 'ba')}+{placed(b, 'BA')}=?",
            "solution": placed(a + b, "yz" if a + b < 100 else "xyz"),
        }
        for a, b in pairs
    ]
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    # What is held out must never be trained on.
    for name, part in {"test": rows[:200], "train": rows[200:]}.items():
        lines = [json.dumps(row) + "\n" for row in part]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
