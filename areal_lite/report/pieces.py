"""The text of each token of a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

_INCOMPLETE = "\ufffd"
# A character has at most four bytes. Longer runs of broken bytes are not one character.
_LONGEST = 4


def token_decoder(model: str | None) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text, special tokens included.

    Without the tokenizer of the checkpoint folder `model`, the text of a token is its number.
    """
    file = Path(model or "") / "tokenizer.json"
    if not file.is_file():
        return lambda ids: "".join(f"‹{i}›" for i in ids)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def token_texts(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return a text for each token, which together are the text of all.

    A token that ends within a character has no text; the token that completes it has. A token is
    decoded after its predecessor, because decoders drop a space at the start of a text.
    """
    cached = cache(decode)
    texts = []
    shown = begin = 0  # tokens [begin, shown) are the context, [shown, i] are new
    for i in range(len(ids)):
        text = cached(tuple(ids[begin : i + 1]))
        incomplete = text.endswith(_INCOMPLETE) and i + 1 - shown < _LONGEST
        if incomplete and i + 1 < len(ids):
            texts.append("")
            continue
        texts.append(text[len(cached(tuple(ids[begin:shown]))) :])
        begin, shown = shown, i + 1
    return texts
