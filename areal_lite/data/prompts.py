"""Prompts in: a data set's rows as token ids, with the answer that their completions will be verified against.

Sources (`data.source`):
  * `addition`: generated on the fly, unbounded; problem i is a function of the seed and i. Held-out problems do not depend on the seed.
  * `jsonl`: a file of one JSON object a line.
  * `hf`: a folder of `<split>*.jsonl` or `<split>*.parquet` files (as data sets are laid out on the hub), a folder made by
    `save_to_disk`, or a name that `datasets.load_dataset` knows.

A row's prompt is a string or a list of messages (`role`, `content`); its answer a string, a number, or an object that is kept as JSON.

Invariants: rows are checked when the set is loaded, and an error names the file, the row and the key; prompts of more than
`data.max_prompt_tokens` tokens are left out at loading, counted in `num_too_long` and warned of; `prompt_id` depends on the row's
place in its source only, not on what else was left out, so it is the same in every run. Tokens are made on access: a set keeps text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from areal_lite.config import DataConfig
from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.system.imports import load_object

logger = logging.getLogger(__name__)


Split = Literal["train", "eval"]


Row = tuple[str, dict[str, Any]]  # where it is from, for errors and as an id; the row itself


# data.source -> what opens it, called as f(config, tokenizer, split) -> PromptSet.
SOURCES = {
    "addition": "areal_lite.quickstart.prompts:AdditionPrompts",
    "jsonl": "areal_lite.data.prompts:jsonl_prompts",
    "hf": "areal_lite.data.prompts:hf_prompts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`tokens` is what the server is sent; `text` is the same before tokenisation, for people to read.

    `messages` is the conversation that the chat template made it from; empty for a plain text.
    """

    prompt_id: str
    tokens: list[int]
    answer: str
    text: str
    messages: Sequence[Message] = ()


class PromptSet(Protocol):
    """`num_prompts` is None for an unbounded set: any index >= 0 then is a prompt. `num_too_long` prompts were left out."""

    num_prompts: int | None
    num_too_long: int

    def __getitem__(self, index: int) -> Prompt: ...


def load_prompts(config: DataConfig, model_path: str | Path, split: Split) -> PromptSet:
    """The training or the held-out prompts, tokenised for the checkpoint in `model_path`.

    Raises ValueError for a source, file, row or tokenizer that cannot be used, and for a set in which no prompt is short enough.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    name = SOURCES.get(config.source, config.source)
    if ":" not in name:
        raise ValueError(
            f"data.source={config.source}: choose one of {', '.join(SOURCES)}, or name your own"
            " as module:name"
        )
    return load_object("data.source", name)(config, Tokenizer(model_path), split)


def jsonl_prompts(config: DataConfig, tokenizer: Tokenizer, split: Split) -> PromptSet:
    """Open the JSONL file that `data.path` or `data.eval_path` names."""
    return TextPrompts(_jsonl_rows(_jsonl_path(config, split)), config, tokenizer)


def hf_prompts(config: DataConfig, tokenizer: Tokenizer, split: Split) -> PromptSet:
    """Open the Hugging Face data set that `data.path` names."""
    return TextPrompts(_hf_rows(config, split), config, tokenizer)


def load_eval_sets(
    paths: Sequence[str], config: DataConfig, model_path: str | Path
) -> dict[str, PromptSet]:
    """Further held-out prompts by the stem of their path: a .jsonl file, or what `data.source=hf` can load; keys as in `config`."""

    def load(path: str) -> PromptSet:
        source = "jsonl" if path.endswith(".jsonl") else "hf"
        return load_prompts(replace(config, source=source, eval_path=path), model_path, "eval")

    return {Path(path).stem: load(path) for path in paths}


class TextPrompts:
    """Prompts read from rows, in their order; see the module's docstring for what is checked."""

    def __init__(self, rows: Iterator[Row], config: DataConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat = config.chat
        self._rows: list[tuple[str, str, str, list[Message]]] = []
        self.num_too_long = 0
        longest = 0
        for where, row in rows:
            text, messages = self._text(where, row, config)
            answer = _answer(where, row, config.answer_key)
            length = len(self._encode(text))
            if length > config.max_prompt_tokens:
                self.num_too_long += 1
                longest = max(longest, length)
            else:
                self._rows.append((where, text, answer, messages))
        if self.num_too_long:
            logger.warning(
                "left out %d of %d prompts longer than data.max_prompt_tokens=%d tokens (the longest has %d)",
                self.num_too_long, self.num_too_long + len(self._rows), config.max_prompt_tokens, longest,
            )  # fmt: skip
        if not self._rows:
            raise ValueError(
                f"no prompt in {config.path} has at most data.max_prompt_tokens={config.max_prompt_tokens} tokens: raise it"
                if self.num_too_long
                else f"data.path={config.path} has no rows"
            )
        self.num_prompts: int | None = len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        where, text, answer, messages = self._rows[index]
        return Prompt(
            prompt_id=where,
            tokens=self._encode(text),
            answer=answer,
            text=text,
            messages=messages,
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=not self._chat)

    def _text(
        self, where: str, row: dict[str, Any], config: DataConfig
    ) -> tuple[str, list[Message]]:
        """The prompt's text, within the chat template if there is to be one, and then the messages that it is made from."""
        prompt = _value(where, row, config.prompt_key)
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        elif _is_messages(prompt):
            messages = list(prompt)
        else:
            raise ValueError(
                f"{where}: {config.prompt_key!r} must be a string or a list of messages (role, content)"
            )
        if not config.chat:
            if not isinstance(prompt, str):
                raise ValueError(
                    f"{where}: {config.prompt_key!r} is a list of messages, which data.chat=false cannot take"
                )
            return prompt, []
        if config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        return self._tokenizer.render(messages), messages


def _value(where: str, row: dict[str, Any], key: str) -> Any:
    if key not in row:
        raise ValueError(
            f"{where}: no {key!r} among its keys {sorted(row)}: set data.prompt_key and data.answer_key"
        )
    return row[key]


def _answer(where: str, row: dict[str, Any], key: str) -> str:
    value = _value(where, row, key)
    if isinstance(value, (dict, list)):
        return json.dumps(value)  # such as a program's tests
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(
            f"{where}: {key!r} must be a string, a number, an object or a list, not {type(value).__name__}"
        )
    return str(value)


def _is_messages(prompt: Any) -> bool:
    """Whether it is a conversation of text."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in prompt
        )
    )


def _jsonl_path(config: DataConfig, split: Split) -> Path:
    key = "data.path" if split == "train" else "data.eval_path"
    path: str | None = config.path if split == "train" else config.eval_path
    if path is None:
        raise ValueError(f"data.source=jsonl needs {key}, a file of one JSON object a line")
    if not Path(path).is_file():
        raise ValueError(f"{key}={path} is not a file")
    return Path(path)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}:{number}: a {type(row).__name__}, not an object of keys and values"
                )
            yield f"{path.name}:{number}", row


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import parquet

    number = 0
    for batch in parquet.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path.name}:{number}", row


def _hf_rows(config: DataConfig, split: Split) -> Iterator[Row]:
    path = (config.eval_path if split == "eval" else None) or config.path
    name = config.split if split == "train" else config.eval_split
    if path is None:
        raise ValueError("data.source=hf needs data.path, a data set's name or folder")
    folder = Path(path) / (config.name or "")
    if folder.is_dir() and not any(
        (folder / marker).is_file() for marker in ("state.json", "dataset_dict.json")
    ):
        yield from _folder_rows(folder, name)
        return
    import datasets

    if folder.is_dir():
        loaded = datasets.load_from_disk(str(folder))
        if isinstance(loaded, datasets.DatasetDict):
            if name not in loaded:
                raise ValueError(
                    f"{folder} has no split {name!r}, only {sorted(loaded)}: set data.split and data.eval_split"
                )
            loaded = loaded[name]
    else:
        loaded = datasets.load_dataset(path, config.name, split=name)
    for number, row in enumerate(loaded, start=1):
        yield f"{name}:{number}", row


def _folder_rows(folder: Path, split: str) -> Iterator[Row]:
    files = sorted([*folder.glob(f"{split}*.jsonl"), *folder.glob(f"{split}*.parquet")])
    if not files:
        raise ValueError(
            f"{folder} has no {split}*.jsonl and no {split}*.parquet: set data.path, data.name and the split's name"
        )
    for file in files:
        yield from _jsonl_rows(file) if file.suffix == ".jsonl" else _parquet_rows(file)
