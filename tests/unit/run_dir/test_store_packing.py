"""Packed columns: the same bits again, or a ValueError, and far fewer bytes."""

import math
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from areal_lite.run_dir.store_format import (
    pack_logprobs,
    pack_routes,
    pack_texts,
    pack_tokens,
    unpack,
    unpack_routes,
    unpack_texts,
)

BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300)


@given(BITS)
def test_any_bits_come_back(bits: list[int]) -> None:
    """NaNs with a payload, infinities and negative zeros among them."""
    raw = np.array(bits, np.uint32)
    tokens = unpack(pack_tokens(raw.view(np.int32)), np.int32, len(raw))
    logprobs = unpack(pack_logprobs(raw.view(np.float32)), np.float32, len(raw))
    assert (tokens.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert tokens.tobytes() == logprobs.tobytes() == raw.tobytes()


def test_the_layout_is_that_of_byte_planes() -> None:
    """A reader in another language can unpack a column."""
    packed = pack_tokens(np.array([0x04030201, 0x08070605], np.int32))
    assert zlib.decompress(packed) == bytes([1, 5, 2, 6, 3, 7, 4, 8])


@given(
    npst.arrays(
        st.sampled_from([np.uint8, np.uint16]),
        npst.array_shapes(min_dims=3, max_dims=3, max_side=5),
    )
)
def test_any_routes_come_back(routes: np.ndarray) -> None:
    back = unpack_routes(pack_routes(routes), len(routes))
    assert back.dtype == routes.dtype
    np.testing.assert_array_equal(back, routes)
    with pytest.raises(ValueError):
        unpack_routes(pack_routes(routes), len(routes) + 1)


def test_random_routes_take_little_more_than_their_information() -> None:
    """That of choosing 8 of 128 experts is 40.4 bits, without their order."""
    scores = np.random.default_rng(1).random((2000, 6, 128))
    routes = np.sort(np.argpartition(scores, 8)[..., :8]).astype(np.uint8)
    assert 8 * len(pack_routes(routes)) / (2000 * 6) < 1.12 * math.log2(math.comb(128, 8))


def test_routes_of_a_nonsensical_size_are_refused() -> None:
    content = zlib.compress(bytes(64))
    for header in (
        ("uint8", (2, 0, 8)),
        ("uint8", (2, -1, -8)),
        ("uint8", (2, 2**40, 8)),
        ("uint8", (2, 2, 8)),
        ("uint32", (2, 2, 4)),
    ):
        with pytest.raises(ValueError):
            unpack_routes(msgspec.msgpack.encode((header, content)), 2)


@pytest.mark.parametrize("texts", [("p ☃", "c"), ("", ""), (None, "c"), ("p", None)])
def test_texts_come_back(texts) -> None:
    assert unpack_texts(pack_texts(*texts)) == texts


def test_no_texts_take_no_space() -> None:
    assert pack_texts(None, None) is None and unpack_texts(None) == (None, None)
    assert pack_routes(None) is None and unpack_routes(None, 3) is None


@given(st.binary(max_size=40))
def test_foreign_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(content, np.int32, 5)
    with pytest.raises(ValueError):
        unpack_texts(content)
    with pytest.raises(ValueError):
        unpack_routes(content, 5)


def test_tokens_and_logprobs_take_less_than_half_of_their_bytes() -> None:
    """Ids as frequent as words are, and log-probs of which most are near 0."""
    rng = np.random.default_rng(1)
    length = 27_000
    tokens = np.minimum(rng.zipf(1.3, length), 151_000).astype(np.int32)
    margin = rng.normal(6, 5, length).astype(np.float32)
    logprobs = -np.log1p(np.exp(-margin)).astype(np.float32)
    plain = tokens.nbytes + logprobs.nbytes + 4 * length  # versions had four bytes, too
    assert len(pack_tokens(tokens)) + len(pack_logprobs(logprobs)) < 0.5 * plain
