"""Prompt sets: the rows of a data set as token ids, each with its answer for the verifier.

`data.source` names an opener: a key of SOURCES, an entry point of `extensions.DATA`, or
`module:name` of your own. It is called as f(config, tokenizer, split, **data.args) -> PromptSet.
docs/first-run.md says what a row may have. Invariants:
  * every row is checked at loading, and an error names the file, the row and the key;
  * prompts of more than `data.max_prompt_tokens` tokens are left out, with a warning, and counted
    in `num_too_long`. So are prompts with more characters than that many tokens of the longest
    kind, which are not tokenized: that could take minutes;
  * a `prompt_id` is `<file name>:<line>` or `<split>:<number>`, counted from 1, in every run;
  * a set keeps text and tokenizes on access.
"""

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from areal_lite import extensions
from areal_lite.config import DataConfig
from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.extensions import load_object, require
from areal_lite.rewards.worker import answer_check

log = logging.getLogger(__name__)
_KEYS_SHOWN = 20
_MISSING: Any = object()
_MESSAGES_OF_PYTHON = re.compile(r"\s*\[\s*\{\s*'(?:role|content)'\s*:")
_OWN = "module:function of your own, f(config, tokenizer, split)"

Split = Literal["train", "eval"]
Row = tuple[str, dict[str, Any]]  # (row id, the row itself)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt and its answer."""

    prompt_id: str
    tokens: list[int]  # what is sent to the server
    answer: str
    text: str  # the same as the tokens, for people to read
    messages: Sequence[Message] = ()  # of which the chat template made the text, if it is a chat
    source: str = ""  # the name in `data.sources`, if there are any
    tools: Sequence[dict[str, Any]] = ()  # JSON schemas of functions, which the text offers
    info: dict[str, Any] = field(default_factory=dict)  # the other columns of the row


class PromptSet(Protocol):
    """Prompts by index; `num_prompts` is None for an unbounded set, which has any index >= 0."""

    num_prompts: int | None
    num_too_long: int

    def __getitem__(self, index: int) -> Prompt: ...


def load_prompts(
    config: DataConfig, model_path: str | Path, split: Split, reward: str = ""
) -> PromptSet:
    """Load the training or the held-out prompts for the checkpoint in `model_path`.

    Raises ValueError if the source, a file, a row or the tokenizer cannot be used, if no prompt is
    short enough, or if the verifier `reward` (reward.function) of this package refuses an answer.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    tokenizer = Tokenizer(model_path, config.chat_template_kwargs)
    if config.chat and split == "train" and (caution := tokenizer.date_caution()):
        log.warning(caution)
    prompts = prompt_source(config)(config, tokenizer, split, **config.args)
    if isinstance(prompts, TextPrompts) and (check := answer_check(reward)):
        prompts.check_answers(check, config.answer_key)
    return prompts


def prompt_source(config: DataConfig) -> Callable[..., PromptSet]:
    """Return the opener of `data.source`. Raises ValueError unless it takes `data.args`.

    A class can say more before its prompts are loaded. `num_prompts = None`: they never end, and
    none comes again. `chat = False`: they are plain text.
    """
    source, known = config.source, [*SOURCES, *extensions.names(extensions.DATA)]
    if not source:
        raise ValueError(f"data.source is not set: name your data: {', '.join(known)}, or {_OWN}")
    if ":" in source:
        opener = load_object("data.source", source)
    elif not (opener := SOURCES.get(source) or extensions.load(extensions.DATA, source)):
        raise ValueError(f"data.source={source}: choose one of {', '.join(known)}, or {_OWN}")
    try:
        inspect.signature(opener).bind(config, None, "train", **config.args)
    except TypeError as error:
        raise ValueError(
            f"data.args={config.args} do not fit data.source={source}: {error}"
        ) from None
    return opener


def load_eval_sets(
    paths: Sequence[str], config: DataConfig, model_path: str | Path, reward: str = ""
) -> dict[str, PromptSet]:
    """Load more held-out sets, named by the stem of their path.

    A path is a .jsonl file or anything that `data.source=hf` can load. `data.args` are used if they
    are for the same kind of source.
    """
    sets = {}
    for path in paths:
        source = "jsonl" if path.endswith(".jsonl") else "hf"
        args = config.args if source == config.source else {}
        own = replace(config, source=source, args=args, eval_path=path)
        sets[Path(path).stem] = load_prompts(own, model_path, "eval", reward)
    return sets


def jsonl_prompts(config: DataConfig, tokenizer: Tokenizer, split: Split) -> "TextPrompts":
    """Open the JSONL file that `data.path` or `data.eval_path` names."""
    key = "path" if split == "train" else "eval_path"
    path = Path(getattr(config, key) or "null")
    if not path.is_file():
        raise ValueError(f"data.{key}={path}: no such file")
    return TextPrompts(_jsonl_file(path), config, tokenizer)


def hf_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    *,
    name: str = "",
    train_split: str = "train",
    eval_split: str = "test",
) -> "TextPrompts":
    """Open the Hugging Face data set that `data.path` names.

    Args:
        name: of the data set's configuration, or of a folder in `data.path`.
        train_split: the split to train on.
        eval_split: the split of the held-out problems.
    """
    rows = hf_rows(config, split, name, train_split if split == "train" else eval_split)
    return TextPrompts(rows, config, tokenizer)


class TextPrompts:
    """Prompts made from rows, in the order of the rows."""

    def __init__(self, rows: Iterator[Row], config: DataConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat = config.chat
        self._prompts: list[Prompt] = []  # without their tokens
        self._own_system_prompts = 0
        self._left_out: set[str] = set()  # columns
        too_long = []  # their characters
        for row_id, row in rows:
            try:
                prompt = self._prompt(row_id, row, config)
                is_too_long = self._is_too_long(prompt.text, config.max_prompt_tokens)
            except ValueError as error:
                raise ValueError(f"{row_id}: {error}") from error
            if is_too_long:
                too_long.append(len(prompt.text))
            else:
                self._prompts.append(prompt)
        self.num_too_long = len(too_long)
        if too_long:
            log.warning(
                "left out %d of %d prompts: they are longer than data.max_prompt_tokens=%d"
                " (the longest has %d characters)",
                len(too_long),
                len(too_long) + len(self._prompts),
                config.max_prompt_tokens,
                max(too_long),
            )
        if self._own_system_prompts:
            log.warning(
                "%d prompts have a system message of their own, and not data.system_prompt",
                self._own_system_prompts,
            )
        if self._left_out:
            log.warning(
                "columns %s are in no prompt's info: JSON has no such values",
                ", ".join(sorted(self._left_out)),
            )
        if not self._prompts:
            raise ValueError(
                f"no prompt in {config.path} has at most"
                f" data.max_prompt_tokens={config.max_prompt_tokens} tokens: raise it"
                if too_long
                else f"data.path={config.path} has no rows"
            )
        self.num_prompts: int | None = len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self._prompts[index]
        return replace(prompt, tokens=self._encode(prompt.text))

    def check_answers(self, check: Callable[[str], object], key: str) -> None:
        """Raise ValueError for the first row whose answer `check` refuses."""
        for prompt in self._prompts:
            try:
                check(prompt.answer)
            except ValueError as error:
                reason = f"{error}; correct {key!r}, or set data.answer_key or reward.function"
                raise ValueError(f"{prompt.prompt_id}: {reason}") from None

    def _is_too_long(self, text: str, max_tokens: int) -> bool:
        if len(text) > max_tokens * self._tokenizer.characters_per_token:
            return True
        ids = self._encode(text)
        if not ids:
            raise ValueError("the prompt has no tokens: remove the row")
        if (largest := max(ids)) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"token {largest} is not one of the model's {self._tokenizer.vocab_size}:"
                " its tokenizer is not that of its weights"
            )
        return len(ids) > max_tokens

    def _encode(self, text: str) -> list[int]:
        # A chat template has written the special tokens.
        return self._tokenizer.encode(text, add_special_tokens=not self._chat)

    def _prompt(self, row_id: str, row: dict[str, Any], config: DataConfig) -> Prompt:
        """Return the prompt of a row, without its tokens."""
        tools = _tools(row) if config.chat else []
        text, messages = self._text(row, config, tools)
        used = {config.prompt_key, config.answer_key, *(["tools"] if tools else [])}
        info = {key: value for key, value in row.items() if key not in used}
        if unsendable := {key for key, value in info.items() if not _is_sendable(value)}:
            self._left_out |= unsendable
            info = {key: value for key, value in info.items() if key not in unsendable}
        return Prompt(
            prompt_id=row_id,
            tokens=[],
            answer=_answer(row, config.answer_key),
            text=text,
            messages=messages,
            tools=tools,
            info=info,
        )

    def _text(
        self, row: dict[str, Any], config: DataConfig, tools: list[dict[str, Any]]
    ) -> tuple[str, list[Message]]:
        """Return a row's prompt as text, and the messages of a chat."""
        prompt = _value(row, config.prompt_key)
        if prompt == "":
            raise ValueError(f"{config.prompt_key!r} is empty: remove the row")
        messages = _messages(prompt)
        if messages is None:
            if not isinstance(prompt, str):
                raise ValueError(
                    f"{config.prompt_key!r} must be a string or a list of messages (role, content)"
                )
            if not config.chat:
                return prompt, []
            messages = [{"role": "user", "content": prompt}]
        elif not config.chat:
            raise ValueError(
                f"{config.prompt_key!r} is a list of messages: data.chat=false cannot take it"
            )
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                "the last message is the assistant's, and the model writes the next one: remove it"
            )
        if config.system_prompt is not None:
            if messages[0]["role"] == "system":
                self._own_system_prompts += 1
            else:
                messages.insert(0, {"role": "system", "content": config.system_prompt})
        return self._tokenizer.render(messages, tools), messages


def _value(row: dict[str, Any], key: str) -> Any:
    """Return the value of a key. Raises ValueError unless it is JSON that can be sent as UTF-8."""
    value: Any = row
    for part in [key] if key in row else key.split("."):
        value = value[part] if isinstance(value, dict) and part in value else _MISSING
    if value is _MISSING:
        raise ValueError(
            f"no key {key!r}, only {sorted(row)[:_KEYS_SHOWN]}:"
            " set data.prompt_key and data.answer_key"
        )
    try:
        # Half a surrogate pair cannot be encoded. NaN and infinities are not JSON.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{key!r} cannot be used: {error}; correct the row") from None
    return value


def _is_sendable(value: Any) -> bool:
    """Return whether JSON has such a value, so that a process of the user gets it unchanged."""
    try:
        json.dumps(value)
        msgspec.msgpack.encode(value)  # has no half surrogate pairs and no integers of 65 bits
    except (ValueError, TypeError, OverflowError, RecursionError):
        return False
    return True


def _tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions of a row, which has them as a list or as its JSON, if any."""
    tools = row.get("tools")
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("'tools' must be a list of JSON schemas of functions; correct the row")
    return _value({"tools": tools or []}, "tools")


def _answer(row: dict[str, Any], key: str) -> str:
    value = _value(row, key) if key else ""
    if isinstance(value, (dict, list)):
        return json.dumps(value)  # such as the tests of a program
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(
            f"{key!r} must be a string, a number, an object or a list, not {type(value).__name__}"
        )
    return str(value)


def _messages(prompt: Any) -> list[Message] | None:
    """Return the messages, with texts as contents, of a list or of its JSON; None if it is none."""
    if isinstance(prompt, str) and prompt.lstrip().startswith("["):
        if _MESSAGES_OF_PYTHON.match(prompt):
            raise ValueError("the prompt is a list of messages as Python prints it: write JSON")
        with suppress(ValueError, RecursionError):
            prompt = json.loads(prompt)
    if not isinstance(prompt, list) or not all(isinstance(one, dict) for one in prompt):
        return None
    # Parquet gives every message every key that one of them has.
    given = [{key: value for key, value in one.items() if value is not None} for one in prompt]
    messages = [{**one, "content": _plain(one)} for one in given]
    for call in (call for one in messages for call in one.get("tool_calls", ())):
        with suppress(TypeError, KeyError, ValueError, RecursionError):
            # Chat templates write an object as JSON, and would write JSON as a string.
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    usable = all(isinstance(m.get("role"), str) and m["content"] is not None for m in messages)
    return messages if messages and usable else None


def _plain(message: Message) -> str | None:
    """Return a message's text, which may be in parts, and empty beside calls; None for no text."""
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list) and content:
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        known = [text for text in texts if isinstance(text, str)]
        return "".join(known) if len(known) == len(content) else None
    return content if isinstance(content, str) else None


SOURCES: dict[str, Callable[..., PromptSet]] = {"jsonl": jsonl_prompts, "hf": hf_prompts}
"""The openers that the core brings, by `data.source`."""


def hf_rows(config: DataConfig, split: Split, name: str, part: str) -> Iterator[Row]:
    """Read a Hugging Face data set of any kind that prompts.py lists.

    `name` is its configuration, or empty; `part` is what it calls the split.
    """
    path = (config.eval_path if split == "eval" else None) or config.path
    if path is None:
        raise ValueError("data.source=hf needs data.path, the name or the folder of a data set")
    folder = Path(path, name)
    if folder.is_file():
        if split == "eval" and not config.eval_path:
            raise ValueError(f"data.eval_path is not set: {path} is one file, to train on")
        return _FILES.get(folder.suffix, _jsonl_file)(folder)
    if not folder.is_dir():
        datasets = require("datasets", "datasets")
        return _numbered(part, datasets.load_dataset(path, name or None, split=part))
    if any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        return _numbered(part, _saved_data_set(folder, part))
    return _folder(folder, part)


def _jsonl_file(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                # Some editors begin a file with a byte-order mark.
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8: {error}; convert the file") from None
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            except RecursionError:
                raise ValueError(f"{path}:{number}: not JSON: nested too deep") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}:{number}: a {type(row).__name__}, not an object of keys and values"
                )
            yield f"{path.name}:{number}", row


def _table_file(path: Path) -> Iterator[Row]:
    kind = path.suffix.removeprefix(".").capitalize()
    try:
        if kind == "Parquet":
            batches = require("pyarrow.parquet", "datasets").ParquetFile(path).iter_batches()
        else:
            batches = _arrow_batches(path)
        yield from _numbered(path.name, (row for batch in batches for row in batch.to_pylist()))
    except (require("pyarrow", "datasets").ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not {kind} that can be read: {error}") from None


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the batches of an Arrow file, or of a stream in a file, as `datasets` writes them."""
    ipc = require("pyarrow.ipc", "datasets")
    source = require("pyarrow", "datasets").memory_map(str(path))
    is_stream = source.read(6) != b"ARROW1"
    source.seek(0)
    if is_stream:
        yield from ipc.open_stream(source)
    else:
        reader = ipc.open_file(source)
        yield from map(reader.get_batch, range(reader.num_record_batches))


_FILES = {".jsonl": _jsonl_file, ".parquet": _table_file, ".arrow": _table_file}
"""The readers of files, by suffix."""


def _folder(folder: Path, split: str) -> Iterator[Row]:
    files = sorted(file for suffix in _FILES for file in folder.glob(f"{split}*{suffix}"))
    if not files:
        raise ValueError(
            f"{folder} has no {', no '.join(f'{split}*{suffix}' for suffix in _FILES)}:"
            " set data.path, data.args.name and the split's name"
        )
    for file in files:
        yield from _FILES[file.suffix](file)


def _saved_data_set(folder: Path, split: str) -> Any:
    datasets = require("datasets", "datasets")
    loaded = datasets.load_from_disk(str(folder))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise ValueError(
            f"{folder} has no split {split!r}, only {sorted(loaded)}:"
            " set data.args.train_split and data.args.eval_split"
        )
    return loaded[split]


def _numbered(name: str, rows: Any) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield f"{name}:{number}", row
