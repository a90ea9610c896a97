"""The text of each token of a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

_INCOMPLETE = "\ufffd"
# A character has at most four bytes. Longer runs of broken bytes are not one character.
_LONGEST = 4


def token_decoder(run_dir: Path, model: str | None) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text, special tokens included.

    The tokenizer is that of the checkpoint folder `model`, or of the folder of that name in
    `run_dir`, which may have been moved. Without one, the text of a token is its number.
    """
    name = Path(model or "model")
    files = [folder / "tokenizer.json" for folder in (name, run_dir / name.name)]
    file = next(filter(Path.is_file, files), None)
    if file is None:
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
