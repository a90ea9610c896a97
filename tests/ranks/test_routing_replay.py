"""Replayed routes in every layout, against transformers whose routers are told what to choose."""

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lite.config import TrainerConfig
from areal_lite.system.network import free_port
from tests.ranks.architectures_worker import SETTINGS
from tests.ranks.processes import run_ranks
from tests.ranks.routing_worker import UPDATES, routed_batch
from tests.ranks.test_architectures import MODELS, make_model, reference_logprobs, weights_of
from tests.ranks.test_families import FAMILIES

WORKER = Path(__file__).with_name("routing_worker.py")
TWO = {
    "tensor": dict(tensor_parallel=2, recompute="full"),
    "interleaved": dict(pipeline_parallel=2, virtual_pipeline=2),
    "context": dict(context_parallel=2),
    "experts": dict(data_parallel=2, expert_parallel=2),
}
FOUR = {
    "pipeline": dict(data_parallel=2, pipeline_parallel=2, recompute="selective"),
    "tensor_context": dict(tensor_parallel=2, context_parallel=2),
    "tensor_experts": dict(tensor_parallel=2, data_parallel=2, expert_parallel=2),
    "experts_pipeline": dict(data_parallel=2, expert_parallel=2, pipeline_parallel=2),
    "context_pipeline": dict(context_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
}
layouts = pytest.mark.parametrize(
    "name", [*TWO, *(pytest.param(name, marks=pytest.mark.slow) for name in FOUR)]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    make_model("moe", folder / "moe")
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """results(name): what each rank of a layout computed. Layouts of a size run together."""

    @cache
    def of(world: int) -> list[dict]:
        chosen = TWO if world == 2 else FOUR
        assert all(TrainerConfig(**layout).world_size == world for layout in chosen.values())
        return launch(chosen, folder / "moe", 4, folder / f"world{world}", world)

    return lambda name: [rank[name] for rank in of(2 if name in TWO else 4)]


def launch(layouts: dict, model: Path, layers: int, out: Path, world: int) -> list[dict]:
    ports = {name: free_port() for name in layouts}
    job = {"layouts": layouts, "ports": ports, "model": str(model), "out": str(out)}
    run_ranks(WORKER, job | {"layers": layers}, out, world)
    return [torch.load(out / f"results-{rank}.pt") for rank in range(world)]


class Routed(torch.nn.Module):
    """A model of transformers that is given sequence after sequence of a batch with routes.

    `changed` counts the recorded routes that it would not have chosen, and all recorded ones.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.left = torch.empty(0)
        self.changed = [0, 0]
        mlps = [block.mlp for block in self.model.model.layers]
        blocks = [mlp for mlp in mlps if hasattr(mlp, "gate") or hasattr(mlp, "router")]
        for layer, block in enumerate(blocks):
            if hasattr(block, "route_tokens_to_experts"):  # GLM
                choose = partial(self._by_sigmoids, block.route_tokens_to_experts, block, layer)
                block.route_tokens_to_experts = choose
                continue
            gate = block.gate if hasattr(block, "gate") else block.router  # gpt-oss
            gate.forward = lambda hidden, gate=gate, layer=layer: self._choose(hidden, gate, layer)

    def _choose(self, hidden: torch.Tensor, gate, layer: int):
        biases = [gate.bias] if hasattr(gate, "bias") else []
        rows = hidden.reshape(-1, gate.hidden_dim)
        logits = torch.nn.functional.linear(rows, gate.weight, *biases)
        probs = logits.softmax(-1)
        own = probs.topk(gate.top_k).indices
        routes = self.left[: len(own), layer]
        for mine, route in zip(own.tolist(), routes.tolist()):
            if max(route) < gate.num_experts:
                self.changed[0] += set(mine) != set(route)
                self.changed[1] += 1
        chosen = torch.where(routes < gate.num_experts, routes, own)
        weights = probs.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    def _by_sigmoids(self, own, block, layer: int, logits: torch.Tensor):
        routes = self.left[: len(logits), layer]
        chosen = torch.where(routes < len(block.gate.weight), routes, own(logits)[0])
        weights = logits.sigmoid().gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * block.routed_scaling_factor

    def forward(self, tokens: torch.Tensor):
        output = self.model(tokens)
        self.left = self.left[tokens.shape[1] :]
        return output

    def logprobs(self, batch) -> torch.Tensor:
        self.left = torch.from_numpy(batch.routes.astype("int64"))
        return reference_logprobs(self, batch)


@pytest.fixture(scope="module")
def expected(folder) -> dict:
    """The same by transformers and AdamW."""
    routed = Routed(folder / "moe")
    with torch.no_grad():
        logprobs = routed.logprobs(routed_batch(12, seed=100))
        own = reference_logprobs(
            AutoModelForCausalLM.from_pretrained(folder / "moe", dtype=torch.float32),
            routed_batch(12, seed=100),
        )
    changed, recorded = routed.changed
    betas = (0.9, SETTINGS["adam_beta2"])
    optimizer = torch.optim.AdamW(
        routed.parameters(),
        lr=SETTINGS["lr"],
        betas=betas,
        eps=SETTINGS["adam_eps"],
        weight_decay=0.0,
    )
    metrics = []
    for step in range(UPDATES):
        batch = routed_batch(8, seed=step)
        loss = -routed.logprobs(batch).sum() / len(batch.tokens)
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in routed.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        optimizer.step()
        metrics.append((loss.item(), norm.item()))
    routed.model.save_pretrained(folder / "trained")
    return {
        "logprobs": logprobs,
        "own": own,
        "changed": changed / recorded,
        "metrics": metrics,
        "weights": weights_of(folder / "trained"),
    }


@layouts
def test_log_probs_are_those_of_the_recorded_experts(results, expected, name) -> None:
    assert (expected["own"] - expected["logprobs"]).abs().max() > 0.1
    for rank in results(name):
        for layout in ("logprobs", "plain"):
            assert (rank[layout] - expected["logprobs"]).abs().max() <= 5e-6
        assert (rank["own"] - expected["own"]).abs().max() <= 5e-6
        assert rank["changed"] == pytest.approx(expected["changed"], rel=1e-9)
        assert 0.2 < rank["changed"] < 1 and rank["changed_own"] != rank["changed_own"]


@pytest.mark.parametrize(
    "family, layers",
    [
        ("glm4_moe_plain", 2),
        ("gpt_oss", 4),
        ("deepseek", 3),
        ("moonlight", 3),
        ("qwen3_next", 4),
        ("qwen3_5_moe", 4),
    ],
)
def test_other_families_replay_in_the_layers_that_have_experts(
    tmp_path, monkeypatch, family, layers
) -> None:
    """Half of GLM's layers are dense, on the first pipeline stage, and the first of DeepSeek's."""
    kind, values = FAMILIES[family]
    monkeypatch.setitem(MODELS, "other", (kind, values | {"num_experts_per_tok": 2}))
    make_model("other", tmp_path / "other")
    chosen = {"tensor": dict(tensor_parallel=2), "pipeline": dict(pipeline_parallel=2)}
    routed = Routed(tmp_path / "other")
    batch = routed_batch(12, seed=100, layers=layers)
    with torch.no_grad():
        replayed = routed.logprobs(batch)
        own = reference_logprobs(
            AutoModelForCausalLM.from_pretrained(tmp_path / "other", dtype=torch.float32), batch
        )
    assert (own - replayed).abs().max() > 0.1
    for rank in launch(chosen, tmp_path / "other", layers, tmp_path / "out", 2):
        for name in chosen:
            for layout in ("logprobs", "plain"):
                assert (rank[name][layout] - replayed).abs().max() <= 5e-6
            assert (rank[name]["own"] - own).abs().max() <= 5e-6
            assert 0.2 < rank[name]["changed"] < 1


@layouts
def test_updates_match_adamw_on_transformers(results, expected, folder, name) -> None:
    ranks = results(name)
    for rank in ranks:
        for got, (loss, norm) in zip(rank["metrics"], expected["metrics"], strict=True):
            assert got["loss"] == pytest.approx(loss, rel=2e-5)
            assert got["grad_norm"] == pytest.approx(norm, rel=5e-5)
    trained = weights_of(folder / f"world{len(ranks)}" / name)
    wanted = expected["weights"]
    assert wanted.keys() == trained.keys()
    assert max((wanted[key] - trained[key]).abs().max().item() for key in wanted) <= 1e-5
