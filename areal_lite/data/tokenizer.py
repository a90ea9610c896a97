"""A tokenizer without torch, ready in milliseconds: text to token ids and back.

`transformers.AutoTokenizer` imports torch, which takes seconds. Every fast tokenizer saves
`tokenizer.json`, which needs the package `tokenizers` only. The function that `apply_chat_template`
calls renders the chat templates, so the text is the same.

Invariants:
  * saved settings of truncation and padding are ignored: they would cut prompts silently;
  * nothing is downloaded, and no code of a checkpoint runs except its sandboxed chat template.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from areal_lite.system.files import read_json

Message = dict[str, Any]  # {"role": "user", "content": "..."}
_ANSWER = "(the-answer-goes-here)"
# SGLang stops at this token of Llama 3 wherever a tokenizer has it.
_END_OF_MESSAGE = "<|eom_id|>"
_MOST_TEXTS = 64  # whose completing tokens are kept
_TODAY = "2024-07-26"  # where Llama's templates know no date


class Tokenizer:
    """The tokenizer of a Hugging Face checkpoint folder.

    `eos_ids` end a completion. They are those at which a server stops: of generation_config.json
    first, then of config.json and of the tokenizer. `ends` has the files that name each. Every id
    that the model can sample is below `vocab_size`. The chat template gets `template_kwargs`, and
    `today` among them as the date, on any day. Raises ValueError if the folder has no usable
    tokenizer.
    """

    def __init__(
        self, model_path: str | Path, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(model_path)
        self._template_kwargs = dict(template_kwargs or {})
        self.completing = lru_cache(_MOST_TEXTS)(self._find_completing)
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{file} does not exist: model must be a checkpoint folder with a fast tokenizer"
            )
        try:
            self._fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises no narrower class
            raise ValueError(
                f"{file}: not a fast tokenizer ({error}); copy the checkpoint again"
            ) from None
        self._fast.no_truncation()
        self._fast.no_padding()
        settings = read_json(self.path / "tokenizer_config.json")
        # A special token is saved as a string or as the fields of an added token.
        self._special_tokens: dict[str, Any] = {}
        for key, value in settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                self._special_tokens[key] = text
        self._variables: dict[str, Any] = {"strftime_now": self._find_today().strftime}
        self._variables |= self._special_tokens | self._template_kwargs
        self.chat_template = self._find_chat_template(settings)
        self.vocab_size = self._find_vocab_size()
        self.ends = self._find_ends()
        self.eos_ids = tuple(self.ends)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, including the tokens that the tokenizer adds around it.

        Other threads run meanwhile: the method for one text would keep the interpreter's lock.
        """
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    @property
    def ids(self) -> dict[str, int]:
        """Return the id of every token by its name, special tokens included."""
        return self._fast.get_vocab()

    @cached_property
    def characters_per_token(self) -> float:
        """Return the most characters of text that one token can stand for, perhaps infinity."""
        return characters_per_token(read_json(self.path / "tokenizer.json"))

    @cached_property
    def _texts(self) -> list[str]:
        """Return the text that each token adds to a word, by its id: with its space in front."""
        # A model may sample a row that only fills up its vocabulary.
        ids = range(max(*self.ids.values(), self.vocab_size - 1) + 1)
        word = next((i for i in ids if self.decode([i]).encode().isalnum()), ids[0])
        before, *texts = self._fast.decode_batch([[word], *([word, i] for i in ids)])
        return [text[len(before) :] for text in texts]

    def texts(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the text of each token id; special tokens have none."""
        return [self._texts[i] for i in np.asarray(ids).tolist()]

    def _find_completing(self, text: str) -> tuple[int, ...]:
        """Return the tokens with which an answer may first contain `text`.

        They have it in them, or begin with an end of it. U+FFFD is a part of a character.
        """
        characters = set(text if text.isascii() else text + "\ufffd")

        def may_complete(token: str) -> bool:
            if characters.isdisjoint(token):
                return False
            begins = any(text.endswith(token[: i + 1]) for i in range(len(token)))
            return begins or text in token or ("\ufffd" in token and not text.isascii())

        return tuple(i for i, token in enumerate(self._texts) if may_complete(token))

    def decode(self, ids: Sequence[int] | np.ndarray, special: bool = False) -> str:
        """Return the text of token ids; special tokens are left out unless `special` is true."""
        return self._fast.decode(np.asarray(ids).tolist(), skip_special_tokens=not special)

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> str:
        """Render a conversation with the chat template, up to where the assistant speaks next.

        `tools` are JSON schemas of functions. Raises ValueError if there is no template, or if it
        refuses or leaves out what the policy should read.
        """
        if self.chat_template is None:
            raise ValueError(
                f"the tokenizer in {self.path} has no chat template: set data.chat=false"
            )
        # This import takes half a second, and only chats need it.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, _ = render_jinja_template(
                [list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self.chat_template,
                add_generation_prompt=True,
                **self._variables,
            )
        except Exception as error:  # a template is code of the checkpoint: it may raise anything
            kind = type(error).__name__
            raise ValueError(
                f"the chat template refuses these messages: {kind}: {error}"
            ) from error
        _check_rendered(texts[0], messages, tools or ())
        return texts[0]

    def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the token ids of `render(messages, tools)`."""
        # The template writes the special tokens itself.
        return self.encode(self.render(messages, tools), add_special_tokens=False)

    def render_after_answer(self, messages: Sequence[Message]) -> str:
        """Render the end of an answer, `messages`, and the beginning of the next answer.

        Answers never pass through the template, because it may trim them or drop parts.
        """
        text = self.render(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, *messages]
        )
        if text.count(_ANSWER) != 1:
            raise ValueError(
                f"the chat template in {self.path} does not write an answer as it is, so that no"
                " message can follow one: use a workflow of a single turn, or another template"
            )
        return text.partition(_ANSWER)[2]

    def date_caution(self) -> str | None:
        """Say which date the chat template writes, if the settings do not choose it."""
        chosen = self._template_kwargs.keys() & {"today", "date_string"}
        if chosen or "strftime_now" not in (self.chat_template or ""):
            return None
        return (
            f"the chat template writes the date of the day, which is {_TODAY} here, so that prompts"
            " stay as they are: data.chat_template_kwargs.today=DATE sets another"
        )

    def _find_today(self) -> date:
        today = str(self._template_kwargs.get("today", _TODAY))
        with suppress(ValueError):
            return date.fromisoformat(today)
        raise ValueError(f"data.chat_template_kwargs.today={today}: write a date as {_TODAY}")

    def _find_chat_template(self, settings: dict[str, Any]) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: not UTF-8: {error}; copy the checkpoint again") from None
        template = settings.get("chat_template")
        try:
            if isinstance(template, list):  # several templates, by name
                template = {t["name"]: t["template"] for t in template}.get("default")
        except (KeyError, TypeError):
            template = False
        if template is not None and not isinstance(template, str):
            raise ValueError(
                f"{self.path / 'tokenizer_config.json'}: chat_template is neither a string nor a"
                " list of names and templates; copy the checkpoint again"
            )
        return template

    def _find_ends(self) -> dict[int, list[str]]:
        ends: dict[int, list[str]] = {}
        for name in ("generation_config.json", "config.json"):
            given = read_json(self.path / name).get("eos_token_id")
            for i in given if isinstance(given, list) else [given]:
                if i is not None and not (type(i) is int and 0 <= i < self.vocab_size):
                    raise ValueError(
                        f"{self.path / name}: eos_token_id={i!r} is not a token id below"
                        f" {self.vocab_size}; correct it or remove it"
                    )
                if i is not None:
                    ends.setdefault(i, []).append(name)
        last = self._special_tokens.get("eos_token")
        for text, files in ((last, ["tokenizer_config.json"]), (_END_OF_MESSAGE, [])):
            if text is not None and (i := self._fast.token_to_id(text)) is not None:
                ends.setdefault(i, []).extend(files)
        return ends

    def _find_vocab_size(self) -> int:
        """Return the rows of the model's embedding, which may be more than there are tokens."""
        file = self.path / "config.json"
        size = read_json(file).get("vocab_size") or self._fast.get_vocab_size()
        if type(size) is not int or size < 1:
            raise ValueError(
                f"{file}: vocab_size={size!r} is not a positive integer; copy the checkpoint again"
            )
        return size


def _check_rendered(
    text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> None:
    """Raise ValueError if a rendered conversation lacks a message or a tool.

    A template may write a content as JSON, and shorten what the assistant said before.
    """
    for message in messages:
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else ""
        written = (said, json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False))
        if message["role"] != "assistant" and not any(form in text for form in written):
            raise ValueError(
                f"the chat template leaves out a message of role {message['role']!r}:"
                f" {said[:100]!r}"
            )
    names = [str(tool.get("function", tool).get("name")) for tool in tools]
    if lost := [name for name in names if name not in text]:
        raise ValueError(f"the chat template leaves out the tool {lost[0]!r}: use another model")


# A normal form of Unicode makes one character of at most four (https://unicode.org/reports/tr15).
_NORMAL_FORM = 4
_KEEPS_TEXT = {
    *("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"),
    *("ByteLevel", "Split", "Digits", "Metaspace", "Sequence"),
}


def characters_per_token(settings: dict[str, Any]) -> float:
    """Return the most characters of text that one token can stand for, by tokenizer.json.

    Infinity for a tokenizer that leaves text out, or that makes one unknown token of much text.
    """
    model = settings["model"]
    added = settings.get("added_tokens") or ()
    parts = [*_parts(settings.get("normalizer")), *_parts(settings.get("pre_tokenizer"))]
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    knows_all = (
        byte_level
        or model.get("byte_fallback")
        or (model.get("unk_token") is not None and not model.get("fuse_unk"))
    )
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    if model.get("type") != "BPE" or not knows_all or strips or not all(map(_keeps_text, parts)):
        return math.inf
    texts = [*model["vocab"], *(token["content"] for token in added)]
    return _NORMAL_FORM * max(map(len, texts))


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """Yield a normalizer or pre-tokenizer and the ones within it."""
    if isinstance(node, dict):
        yield node
        for inner in (*node.get("normalizers", ()), *node.get("pretokenizers", ())):
            yield from _parts(inner)


def _keeps_text(part: dict[str, Any]) -> bool:
    """Return whether a normalizer or pre-tokenizer keeps a text's length, up to a normal form."""
    if part["type"] == "Replace":
        old = part["pattern"].get("String")
        return old is not None and len(old) <= len(part["content"])
    if part["type"] == "Split":
        return part["behavior"] != "Removed"
    return part["type"] in _KEEPS_TEXT
