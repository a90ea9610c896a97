"""Print how two models answer five held-out problems: `python before_after.py BEFORE AFTER`."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def answers(folder: str, questions: list[str]) -> list[str]:
    """Return the greedy answers of a model, as transformers generates them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    texts = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
        answer = tokens[prompt.input_ids.shape[1] :]
        texts.append(tokenizer.decode(answer, skip_special_tokens=True))
    return texts


def main(before: str, after: str) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = [json.loads(line) for line in Path("data/test.jsonl").read_text().splitlines()[:5]]
    questions = [row["question"] for row in rows]
    table = Table("question", "before", "after", title="Greedy answers to held-out problems")
    for cells in zip(questions, answers(before, questions), answers(after, questions), strict=True):
        table.add_row(*(" ".join(cell.split()) for cell in cells))
    Console(markup=False).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
