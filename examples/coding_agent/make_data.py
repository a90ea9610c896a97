"""Write tasks to data/train.jsonl and data/test.jsonl: files with a bug, and with tests."""

import json
import operator
import random
from pathlib import Path

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NAMES = {
    "+": ["total", "plus", "together", "added"],
    "-": ["difference", "minus", "remaining", "less"],
    "*": ["product", "times", "area", "multiplied"],
}


def task(right: str, name: str, rng: random.Random) -> dict:
    """Return a row: `calc.py` has another operator than the right one, and a test shows it."""
    wrong = rng.choice([one for one in OPERATORS if one != right])
    tests = [f"from calc import {name}"]
    while len(tests) < 4:
        a, b = rng.randint(3, 20), rng.randint(3, 20)
        want = OPERATORS[right](a, b)
        said = f"{name}({a}, {b}) is {{{name}({a}, {b})}}, but should be {want}"
        tests.append(f'assert {name}({a}, {b}) == {want}, f"{said}"')
    code = f"def {name}(a, b):\n    return a {wrong} b\n"
    files = {"calc.py": code, "test_calc.py": "\n".join(tests) + "\n"}
    return {"question": f"Fix {name} in calc.py.", "files": files}


def main() -> None:
    rng = random.Random(0)
    Path("data").mkdir(exist_ok=True)
    for part, rounds in ("test", 4), ("train", 24):
        rows = [task(o, name, rng) for _ in range(rounds) for o in NAMES for name in NAMES[o]]
        Path(f"data/{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
