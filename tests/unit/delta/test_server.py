"""Changes that are added to a server's parameters leave what loading whole weights would."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.delta.server import Changes, _Plan, decode, encode, link
from areal_lite.sglang_plugins.load_plan import LoadError
from areal_lite.weights.broadcast import FlatBucket, flatten

BF16 = torch.bfloat16


class ServerModel(torch.nn.Module):
    """Loads as SGLang's models do: merged, cut by rows and by columns, transposed, and widened."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape, dtype in (
            ("embed", (9, 4), BF16),
            ("qk", (6, 4), BF16),
            ("down", (5, 3), BF16),
            ("experts", (2, 4, 6), BF16),
            ("norm", (4,), torch.float32),
            ("bias", (3,), torch.float32),
            ("one", (1, 1), BF16),
        ):
            parameter = torch.nn.Parameter(torch.full(shape, -1.0, dtype=dtype))
            setattr(self, name, parameter)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed[:7].data.copy_(tensor[2:])  # the rows of a rank
                self.embed[7:].data.fill_(0)
            elif name in ("q", "k"):
                self.qk.data.narrow(0, 0 if name == "q" else 4, len(tensor)).copy_(tensor)
            elif name == "down":
                self.down.data.copy_(tensor[:, 3:])  # its columns
            elif name[0] == "e":
                self.experts.data[int(name[1])].copy_(tensor.t())
            else:
                getattr(self, name).data.copy_(tensor)

    def bits(self) -> dict[str, bytes]:
        return {n: p.data.view(torch.uint8).numpy().tobytes() for n, p in self.named_parameters()}


SHAPES = {"embed": (9, 4), "q": (4, 4), "k": (2, 4), "down": (5, 6), "e0": (6, 4), "e1": (6, 4)}
SHAPES |= {"norm": (4,), "bias": (3,), "one": (1, 1)}


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return weights of any bits: infinities and all else."""
    generator = torch.Generator().manual_seed(seed)
    draw = {n: torch.randint(-(2**15), 2**15, s, generator=generator) for n, s in SHAPES.items()}
    named = {name: bits.to(torch.int16).view(BF16) for name, bits in draw.items()}
    named["bias"] = torch.randn(3, generator=generator)
    # A float32 parameter does not keep the bits of a NaN in bfloat16.
    named["norm"] = torch.randn(4, generator=generator).to(BF16)
    return list(named.items())


def stepped(tensors: list[tuple[str, torch.Tensor]], seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors with other bits in about a tenth of their elements."""
    generator = torch.Generator().manual_seed(seed)
    pairs = zip(tensors, weights(seed), strict=True)
    return [
        (name, torch.where(torch.rand(old.shape, generator=generator) < 0.1, new, old))
        for (name, old), (_, new) in pairs
    ]


def padded(bucket: FlatBucket) -> torch.Tensor:
    return torch.nn.functional.pad(bucket.data, (0, -len(bucket.data) % 8))


def split(bucket: FlatBucket) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a bucket as a server does: views of its memory."""
    from areal_lite.sglang_plugins.push import Layout

    return Layout(*bucket.description.values()).split(bucket.data)


def started(model: ServerModel, bucket: FlatBucket, state: str = "s0") -> Changes:
    changes = Changes(model)
    tensors = split(bucket)
    changes.replace("", state, bucket.data, tensors)
    model.load_weights(tensors)
    return changes


@given(
    st.integers(1, 400_000),
    st.floats(0, 0.2),
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 2**15]),
)
def test_changes_are_what_changed(length, share, seed, largest):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(-(2**15), 2**15, (4 * length,), generator=generator).to(torch.int16)
    change = torch.randint(-largest, largest + 1, old.shape, generator=generator).to(torch.int16)
    change *= torch.rand(old.shape, generator=generator) < share
    new = old + change
    data = encode(old.view(torch.uint8), new.view(torch.uint8))
    words = (old != new).view(-1, 4).any(1)
    assert (data is None) == bool(words.float().mean() > 0.5)
    if data is None:
        return
    at, found = decode(data)
    assert (at.diff() > 0).all() and at.max() < len(old)
    patched = old.clone()
    patched[at] += found
    assert torch.equal(patched, new)


def test_a_small_step_of_bfloat16_costs_about_a_byte_a_change():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(10**6, generator=generator) / 50
    old, new = exact.to(BF16), (exact + 1e-6 * torch.sign(exact)).to(BF16)
    changed = (old.view(torch.int16) != new.view(torch.int16)).sum().item()
    assert 0 < changed < 0.05 * len(exact)
    assert len(encode(old.view(torch.uint8), new.view(torch.uint8)) or b"") in range(1, 2 * changed)


@pytest.mark.parametrize("offset", [0, 64])
def test_a_model_gets_what_it_would_load(offset):
    model, expected = ServerModel(), ServerModel()
    tensors = weights(0)
    first = flatten(tensors)
    memory = torch.zeros(offset + len(first.data), dtype=torch.uint8)
    memory[offset:] = first.data  # a bucket may lie within kept memory
    first = FlatBucket(first.description, memory[offset:])
    changes = started(model, first)
    state, old = "s0", padded(first)
    for seed in range(1, 20):
        tensors = stepped(tensors, seed)
        new = padded(flatten(tensors))
        data = encode(old, new)
        assert data is not None
        after = link(state, data)
        changes.add(state, after, data, first.description["names"])
        expected.load_weights(tensors)
        assert model.bits() == expected.bits()
        state, old = after, new


def test_changes_are_added_once_and_only_to_what_they_change():
    model = ServerModel()
    first, second = flatten(weights(0)), flatten(stepped(weights(0), 1))
    changes = started(model, first)
    names, data = first.description["names"], encode(padded(first), padded(second))
    assert data is not None
    before = model.bits()
    for wrong in (
        lambda: changes.add("s9", link("s9", data), data, names),
        lambda: changes.add("s0", link("s0", data), data, names[1:]),
        lambda: changes.add("s0", link("s0", data + b"x"), data, names),
        lambda: changes.replace("s9", "s10", first.data, split(first)),
        lambda: Changes(model).add("s0", link("s0", data), data, names),
    ):
        with pytest.raises(LoadError, match="does not hold the weights|not have their checksum"):
            wrong()
        assert model.bits() == before
    for _ in range(2):  # a push that goes on without a server sends a bucket again
        changes.add("s0", link("s0", data), data, names)
    expected = ServerModel()
    expected.load_weights(stepped(weights(0), 1))
    assert model.bits() == expected.bits()


def test_a_server_whose_addition_failed_needs_whole_weights(monkeypatch):
    model = ServerModel()
    first, second = flatten(weights(0)), flatten(stepped(weights(0), 1))
    changes = started(model, first)
    names, data = first.description["names"], encode(padded(first), padded(second))
    assert data is not None
    monkeypatch.setattr("areal_lite.delta.server.decode", lambda _: 1 / 0)
    for error in (ZeroDivisionError, LoadError):
        with pytest.raises(error):
            changes.add("s0", link("s0", data), data, names)


def _doubled(model, weights):
    ServerModel.load_weights(model, ((name, 2 * tensor) for name, tensor in weights))


def _twice(model, weights):
    for name, tensor in weights:
        ServerModel.load_weights(model, [(name, tensor)] * 2)


def _repeated(model, weights):
    for name, tensor in weights:
        getattr(model, name).data.copy_(tensor.expand(4))


def test_a_weight_that_is_repeated_changes_in_every_place():
    model = type("Other", (ServerModel,), {"load_weights": _repeated})()
    bucket = flatten([("norm", torch.ones(1))])
    plan = _Plan(model, bucket.data, split(bucket))
    model.load_weights(split(bucket))
    plan.add(torch.tensor([1]), torch.tensor([0x80], dtype=torch.int16))
    assert model.norm.tolist() == [2.0] * 4


def _narrowed(model, weights):
    ServerModel.load_weights(model, weights)


@pytest.mark.parametrize(
    ("load", "tensors", "message"),
    [
        (_doubled, weights(0), "computes its weights"),
        (_twice, weights(0), "loads a weight twice"),
        (_narrowed, [("one", torch.ones(1, 1))], "holds torch.bfloat16, and gets torch.float32"),
        (_narrowed, [("q", torch.ones(4, 5))], "does not fit"),
    ],
)
def test_a_model_that_changes_could_not_keep_right_is_refused(load, tensors, message):
    model = type("Other", (ServerModel,), {"load_weights": load})()
    before = model.bits()
    with pytest.raises(LoadError, match=message):
        bucket = flatten(tensors)
        Changes(model).replace("", "s0", bucket.data, split(bucket))
    assert model.bits() == before
