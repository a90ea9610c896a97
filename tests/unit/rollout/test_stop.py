"""Texts that end an answer: exactly at the token that completes one, whatever interrupts it."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from areal_lite.config.sections import Sampling
from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rollout.episode import Episode, Rollout, _at_a_text, play, single_turn
from areal_lite.servers.client import GenerationChunk, SamplingParams, sampling_params
from areal_lite.servers.fleet import Fleet, Session
from areal_lite.servers.registry import ServerInfo
from tests.fake_sglang import EOS, logprob, next_token

SERVER = ServerInfo(name="s", url="http://s", api_key=None, tensor_parallel=1, pid=1)
PROMPTS = [[5, 6, number] for number in range(2, 10)]
BUDGET = 24


def saved(folder: Path, letters: list[str], decoder, begin: str = "") -> Tokenizer:
    """Return a tokenizer of 96 tokens: all strings of one and two `letters`, and some of three."""
    lengths = (itertools.product(letters, repeat=n) for n in (1, 2, 3))
    texts = list(dict.fromkeys("".join(word) for word in itertools.chain(*lengths)))
    texts = texts[: len(letters) + len(letters) ** 2] + texts[-96:]
    words = ["<pad>", "<eos>", *(begin + text for text in list(dict.fromkeys(texts))[:96])]
    fast = FastTokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<pad>")
    )
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoder
    fast.add_special_tokens(["<pad>", "<eos>"])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS, "vocab_size": 98}))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    """Tokens of bytes, in which é has two and a token may end within it; and tokens of words."""
    folder = partial(tmp_path_factory.mktemp, "tokens")
    return {
        "bytes": saved(folder(), ["a", "<", "/", ">", "Ã", "©", "Ġ"], decoders.ByteLevel()),
        "words": saved(folder(), ["a", "b", "<", "/", ">", "é"], decoders.Metaspace(), "▁"),
    }


def test_a_row_that_fills_up_the_vocabulary_has_no_text(tmp_path: Path) -> None:
    saved(tmp_path, ["a", "b"], decoders.ByteLevel())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": EOS, "vocab_size": 128}))
    assert Tokenizer(tmp_path).texts([2, 127]) == ["a", ""]


def first_with(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...]) -> int | None:
    """Return how many tokens it takes until the text has one of `stop`, by trying them all."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer._fast.decode(tokens[:count], skip_special_tokens=True)
        if any(one in text for one in stop):
            return count
    return None


@pytest.mark.parametrize("kind", ["bytes", "words"])
@given(st.lists(st.integers(2, 97), min_size=1, max_size=12), st.data())
def test_only_a_completing_token_completes_a_text(tokenizers, kind, tokens, data) -> None:
    tokenizer = tokenizers[kind]
    text = tokenizer.decode(tokens)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    if "\ufffd" not in stop:
        count = first_with(tokenizer, tokens, (stop,))
        assert count is not None and tokens[count - 1] in tokenizer.completing(stop)


def test_few_tokens_complete_a_text(tokenizers) -> None:
    """Others do not end a request."""
    tokenizer = tokenizers["bytes"]
    texts = {i: tokenizer.decode([2, i])[1:] for i in range(2, 98)}
    whole = {i: text for i, text in texts.items() if "\ufffd" not in text}
    found = set(tokenizer.completing("</a>")) & whole.keys()
    assert len(whole) > 25 and found == {
        i for i, text in whole.items() if text.startswith((">", "a>", "/a>", "</a>"))
    }


class Interrupted:
    """Servers whose request is aborted by a push when the answer has `at` tokens, once.

    `sampled` counts the tokens of all requests.
    """

    def __init__(self, prompt_tokens: int, at: int):
        self.length, self.version, self.sampled = prompt_tokens + at, 0, 0

    async def generate(self, server, input_ids, params: SamplingParams, rid, cache_key):
        sequence, reason = input_ids.tolist(), ""
        tokens: list[int] = []
        logprobs: list[float] = []
        while not reason:
            logprobs.append(logprob(sequence))
            tokens.append(next_token(sequence))
            sequence.append(tokens[-1])
            if len(sequence) == self.length and not self.version:
                reason = "abort"
            elif tokens[-1] in params.stop_token_ids:
                reason = "stop"
            elif len(tokens) == params.max_new_tokens:
                reason = "length"
        versions = np.full(len(tokens), self.version, np.int32)
        self.version += reason == "abort"
        self.sampled += len(tokens)
        return GenerationChunk(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=versions,
            finish_reason=reason,
        )

    async def weight_version(self, server) -> int:
        return 0

    async def check_health(self, server) -> None: ...

    async def abort_all(self, server) -> None: ...

    async def reset(self, server) -> None: ...

    async def close(self) -> None: ...


async def answer(
    tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, at: int
) -> tuple[Rollout, Interrupted]:
    client = Interrupted(len(prompt), at)
    fleet = Fleet(client, lambda: [SERVER], lambda: None)
    watching = asyncio.create_task(fleet.watch())
    try:
        session = Session("0-0", await fleet.reserve())
        fleet.router.pushing = 1
        episode = Episode(
            prompt=Prompt(prompt_id="p", tokens=prompt, answer="", text=""),
            sample_index=0,
            group_id=0,
            tokenizer=tokenizer,
            params=params,
            clock=lambda: 0.0,
            complete=partial(fleet.complete, session),
        )
        (played,) = await play(single_turn, [episode])
        assert not played.failure, played
        return played, client
    finally:
        watching.cancel()


def expected(tokenizer: Tokenizer, prompt: list[int], stop: tuple[str, ...], budget: int):
    """Return the tokens of an answer and its finish reason, by sampling one token at a time."""
    tokens: list[int] = []
    while True:
        tokens.append(next_token([*prompt, *tokens]))
        if tokens[-1] == EOS or first_with(tokenizer, tokens, stop):
            return tokens, "stop"
        if len(tokens) == budget:
            return tokens, "length"


def cases(tokenizer: Tokenizer) -> Iterator[tuple[list[int], tuple[str, ...]]]:
    """Yield prompts, and texts out of their answers, of which many span tokens."""
    for number, prompt in enumerate(PROMPTS):
        tokens, _ = expected(tokenizer, prompt, (), BUDGET)
        text = tokenizer.decode(tokens)
        start = 2 * len(text) // 3
        stop = text[start : start + 2 + number % 4].strip("\ufffd")
        yield prompt, (stop, "never") if stop else ("never",)


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_an_answer_ends_where_its_text_does_through_every_push(tokenizers, kind) -> None:
    tokenizer = tokenizers[kind]
    spans = 0

    async def run() -> None:
        nonlocal spans
        for prompt, stop in cases(tokenizer):
            tokens, reason = expected(tokenizer, prompt, stop, BUDGET)
            last = tokenizer.decode(tokens)[len(tokenizer.decode(tokens[:-1])) :]
            spans += reason == "stop" and tokens[-1] != EOS and stop[0] not in last
            params = SamplingParams(BUDGET, 1.0, (EOS,), 98, stop=stop)
            for at in range(1, len(tokens) + 2):  # the last one: no push
                played, client = await answer(tokenizer, prompt, params, at)
                (trace,) = played.traces
                assert trace.tokens[3:].tolist() == tokens, (prompt, stop, at)
                assert trace.finish_reason == reason
                assert trace.behavior_logprobs[3:].tolist() == pytest.approx(
                    [logprob([*prompt, *tokens[:i]]) for i in range(len(tokens))]
                )
                assert trace.versions[3:].tolist() == [int(i >= at) for i in range(len(tokens))]
                assert client.sampled == len(tokens), "nothing is sampled in vain"
                assert played.answer == tokenizer.decode(tokens), "the text is that of the tokens"

    asyncio.run(run())
    assert spans >= 3, "of the texts that end an answer, some span tokens"


def test_the_budget_ends_an_answer_at_a_token_that_may_complete_a_text(tokenizers) -> None:
    tokenizer = tokenizers["bytes"]

    async def run() -> set[str]:
        reasons = set()
        for prompt, stop in cases(tokenizer):
            for budget in range(1, BUDGET):
                params = SamplingParams(budget, 1.0, (EOS,), 98, stop=stop)
                played, _ = await answer(tokenizer, prompt, params, BUDGET + 1)
                (trace,) = played.traces
                found = trace.tokens[3:].tolist(), trace.finish_reason
                assert found == expected(tokenizer, prompt, stop, budget)
                reasons.add(trace.finish_reason)
        return reasons

    assert asyncio.run(run()) == {"stop", "length"}


def test_special_tokens_hide_no_text(tokenizers) -> None:
    """They are no text, so that a text may begin any number of them before its end."""
    tokenizer = tokenizers["bytes"]
    begin, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("a</", "a>"))
    tokens = np.array([*begin, *[0] * 100, *end], np.int32)
    params = SamplingParams(200, 1.0, (EOS,), 98, stop=("</a>",))
    assert _at_a_text(tokens, params, tokenizer) == "stop"
    assert _at_a_text(tokens[:-1], params, tokenizer) == "abort"


def test_settings_become_texts_and_token_ids(tokenizers) -> None:
    tokenizer = tokenizers["bytes"]
    params = sampling_params(Sampling(stop=["</a>", 7, "é"]), tokenizer)
    assert params.stop == ("</a>", "é") and params.stop_token_ids == (EOS, 7)
    with pytest.raises(ValueError, match="stop=98 is not a token id: the model has 98"):
        sampling_params(Sampling(stop=[98]), tokenizer)
