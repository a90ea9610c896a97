"""The text that one token can stand for, read from a tokenizer's file.

A text of n characters has at least n / `characters_per_token` tokens. So a text that is much too
long for a budget is found without encoding it, which takes seconds for each megabyte.
"""

import math
from collections.abc import Iterator
from typing import Any

# A normal form of Unicode makes one character of at most four (https://unicode.org/reports/tr15).
_NORMAL_FORM = 4
_KEEPS_TEXT = {
    *("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"),
    *("ByteLevel", "Split", "Digits", "Metaspace", "Sequence"),
}


def characters_per_token(settings: dict[str, Any]) -> float:
    """Return the most characters of text that one token can stand for.

    Infinity for a tokenizer that leaves text out, or that makes one unknown token of much text.
    `settings` is the content of tokenizer.json.
    """
    model = settings["model"]
    parts = [*_parts(settings["normalizer"]), *_parts(settings["pre_tokenizer"])]
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    knows_all = (
        byte_level
        or model.get("byte_fallback")
        or (model.get("unk_token") is not None and not model.get("fuse_unk"))
    )
    strips = any(token["lstrip"] or token["rstrip"] for token in settings["added_tokens"])
    if model["type"] != "BPE" or not knows_all or strips or not all(map(_keeps_text, parts)):
        return math.inf
    texts = [*model["vocab"], *(token["content"] for token in settings["added_tokens"])]
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
