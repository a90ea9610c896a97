"""A server's gated delta net against the recurrence of transformers, for any division of tokens."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from areal_lite.cpu.kernels.delta_net import advance

KEY_HEADS, HEADS, KEYS, VALUES, TAPS = 2, 6, 4, 3, 4
CHANNELS = 2 * KEY_HEADS * KEYS + HEADS * VALUES


def expected(x, weight, decay, step):
    """Return the outputs of one request, [tokens, heads, d_v], and its state [heads, d_v, d_k]."""
    convolved = F.silu(F.conv1d(F.pad(x.T, (TAPS - 1, 0)), weight[:, None], groups=CHANNELS)).T
    sizes = KEY_HEADS * KEYS, KEY_HEADS * KEYS, HEADS * VALUES
    parts = zip(convolved.split(sizes, 1), (KEYS, KEYS, VALUES))
    q, k, v = (part.unflatten(1, (-1, width))[None] for part, width in parts)
    q, k = (part.repeat_interleave(HEADS // KEY_HEADS, 2) for part in (q, k))
    out, state = torch_recurrent_gated_delta_rule(
        q, k, v, decay.log()[None], step[None], None, True, use_qk_l2norm_in_kernel=True
    )
    return out[0], state[0].transpose(1, 2)


@pytest.mark.parametrize("calls", [[(9, 5)], [(4, 5), (5, 0)], [(1, 2), (1, 3), (7, 0)]])
def test_requests_go_on_from_their_states(calls):
    """Two requests, of 9 and 5 tokens, of which each call brings some."""
    generator = torch.Generator().manual_seed(3)
    lengths = (9, 5)
    inputs = [
        (
            torch.randn(n, CHANNELS, generator=generator),
            torch.rand(n, HEADS, generator=generator),
            torch.rand(n, HEADS, generator=generator),
        )
        for n in lengths
    ]
    weight = torch.randn(CHANNELS, TAPS, generator=generator)
    before = np.zeros((2, CHANNELS, TAPS - 1), np.float32)
    states = np.zeros((2, HEADS, VALUES, KEYS), np.float32)
    done, outputs = [0, 0], [[], []]
    for counts in calls:
        spans = [slice(start, start + count) for start, count in zip(done, counts)]
        x, decay, step = (
            torch.cat([own[part][span] for own, span in zip(inputs, spans)]).numpy()
            for part in range(3)
        )
        out = np.empty((sum(counts), HEADS, VALUES), np.float32)
        bounds = np.cumsum([0, *counts])
        advance(x, bounds, weight.numpy(), decay, step, before, states, out)
        for request in range(2):
            outputs[request].append(out[bounds[request] : bounds[request + 1]])
            done[request] += counts[request]
    for request, (x, decay, step) in enumerate(inputs):
        out, state = expected(x, weight, decay, step)
        torch.testing.assert_close(torch.from_numpy(np.concatenate(outputs[request])), out)
        torch.testing.assert_close(torch.from_numpy(states[request]), state)
