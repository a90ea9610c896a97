"""The trie has each distinct prefix once, and families keep together what shares."""

from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.prefixes import families, keys_of, sort_sequences
from areal_lite.train_batch import TrainBatch
from tests.unit.megatron.sequences import batch_of, tries


def computed(batch: TrainBatch, budget: int, **options) -> int:
    """Count the tokens that a model computes."""
    return sum(len(m.trie.token) for m in make_microbatches(batch, budget, **options))


def prefixes(batch: TrainBatch) -> list[bytes]:
    """Return the tokens, and routes, of each token's sequence up to it."""
    keys = keys_of(batch.tokens, batch.routes)
    starts = batch.cu_seqlens[batch.sequence_ids]
    return [keys[start : i + 1].tobytes() for i, start in enumerate(starts)]


@settings(deadline=None)
@given(tries(), st.booleans(), st.randoms())
def test_tokens_are_one_node_if_all_up_to_them_is_equal(batch, routed, random):
    if routed:
        routes = [[[random.choice((0, 0, 255))] * 2] for _ in batch.tokens]
        batch = replace(batch, routes=np.array(routes, np.uint8))
    (whole,) = make_microbatches(batch, 10_000)
    node, distinct = {}, prefixes(batch)
    for token, prefix in zip(whole.trie.node.tolist(), distinct):
        assert node.setdefault(prefix, token) == token
    assert len(set(node.values())) == len(node) == len(whole.trie.token)


@settings(deadline=None)
@given(tries(), st.data())
def test_nothing_after_the_last_scored_token_is_computed(batch, data):
    flags = st.lists(st.booleans(), min_size=len(batch.tokens), max_size=len(batch.tokens))
    scored = np.array(data.draw(flags))
    (whole,) = make_microbatches(batch, 10_000, scored=scored)
    needed, distinct = set(), prefixes(batch)
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:]):
        last = max([start + 1, *(start + np.flatnonzero(scored[start:end]))])
        needed |= set(distinct[start:last])
    assert len(whole.trie.token) == len(needed)


@settings(deadline=None)
@given(tries(), st.integers(1, 60))
def test_microbatches_hold_whole_sequences_under_the_budget(batch, budget):
    microbatches = make_microbatches(batch, budget)
    index = np.concatenate([m.token_index.numpy() for m in microbatches])
    assert sorted(index.tolist()) == list(range(len(batch.tokens)))
    for m in microbatches:
        assert len(m.trie.token) <= budget or len(m.cu_seqlens) == 2
        assert np.array_equal(batch.tokens[m.token_index.numpy()], m.tokens.numpy())


def test_a_sequence_shares_most_with_its_neighbor():
    rng = np.random.default_rng(0)
    keys = [keys_of(rng.integers(0, 2, 9).astype(np.int32), None) for _ in range(50)]
    order, shared = sort_sequences(keys)
    assert sorted(order.tolist()) == list(range(50))
    for place in range(1, 50):
        mine = keys[order[place]].tobytes()
        others = [keys[i].tobytes() for i in order[:place]]
        most = max(next((j for j in range(36) if mine[j] != o[j]), 36) // 4 for o in others)
        assert shared[place] == most


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 30), st.integers(40, 400))
def test_groups_are_cut_only_where_little_is_computed_twice(groups, prompt, answer, budget):
    """Without a forced cut at most one token in 20 is computed twice; with forced cuts, a prompt
    more for each microbatch.
    """
    rng, sequences = np.random.default_rng(prompt), []
    for _ in range(groups):
        start = rng.integers(0, 10**6, prompt)
        sequences += [np.concatenate((start, rng.integers(0, 10**6, answer))) for _ in range(8)]
    batch = batch_of([prompt + answer] * len(sequences))
    batch.tokens = np.concatenate(sequences).astype(np.int32)
    assume(prompt + answer <= budget)
    least = groups * (prompt + 8 * answer)
    found = make_microbatches(batch, budget)
    cuts = len(found) * (prompt + answer)
    assert least <= computed(batch, budget) <= 1.05 * least + cuts
    assert computed(batch, budget, share=False) == len(batch.tokens)


def test_a_forced_cut_is_where_least_is_shared():
    """Four traces of 10, of two episodes that share 2 tokens, and 8 within an episode."""
    lengths, shared = np.array([10, 10, 10, 10]), np.array([0, 8, 2, 8])
    assert families(lengths, shared, 100) == [0]
    assert families(lengths, shared, 20) == [0, 2]
    assert families(lengths, shared, 12) == [0, 2]
    assert families(lengths, shared, 10) == [0, 1, 2, 3]


def test_what_shares_little_is_packed_by_itself():
    """A system prompt of 1 in 40 tokens does not tie sequences together."""
    assert families(np.full(5, 40), np.array([0, 1, 1, 1, 1]), 1000) == [0, 1, 2, 3, 4]
