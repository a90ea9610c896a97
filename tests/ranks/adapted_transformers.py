"""transformers with an adapter beside each projection, as PEFT has, trained by autograd."""

from pathlib import Path

import torch
from torch import Tensor

from areal_lite.config import LoraConfig
from tests.ranks.engine_worker import SETTINGS, random_batch
from tests.ranks.layout_worker import RESUMED_UPDATES
from tests.ranks.lora_worker import SGD, UPDATES
from tests.ranks.test_engine import reference, reference_model
from tests.ranks.test_engine_layouts import optimizer_of, policy_loss, train

TOTAL = UPDATES + RESUMED_UPDATES


class Adapted(torch.nn.Module):
    """base(x) + scale B A x, after PEFT."""

    def __init__(self, base: torch.nn.Linear, a: torch.nn.Parameter, b: Tensor, scale: float):
        super().__init__()
        self.base, self.a, self.scale = base, a, scale
        self.b = torch.nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * ((x @ self.a.T) @ self.b.T)


def adapt(model: torch.nn.Module, tensors: dict[str, Tensor], scale: float) -> None:
    """Freeze `model` and put adapters beside its layers. Equal A in a layer are one parameter."""
    model.requires_grad_(False)
    known: list[torch.nn.Parameter] = []
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[name.replace("lora_A", "lora_B")].clone()
        shared = next((p for p in known if p.shape == a.shape and torch.equal(p, a)), None)
        if shared is None:
            shared = torch.nn.Parameter(a.clone())
            known.append(shared)
        parent, _, leaf = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, Adapted(owner.get_submodule(leaf), shared, b, scale))


def adapters_of(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            found[f"base_model.model.{name}.lora_A.weight"] = module.a.detach()
            found[f"base_model.model.{name}.lora_B.weight"] = module.b.detach()
    return found


def adapted_run(folder: Path, name: str, lora: LoraConfig, initial: dict[str, Tensor]) -> dict:
    """Train the adapters `initial` of a model as the worker does, and return what it returns."""
    batch = random_batch(16, 98, seed=100)
    model = reference_model(folder, name)
    adapt(model, initial, lora.alpha / lora.rank)
    with torch.no_grad():
        before, _ = reference(model, batch)
    optimizer = optimizer_of(model, SETTINGS["lr"])
    history = train(model, range(UPDATES), policy_loss, SETTINGS, optimizer, TOTAL)
    with torch.no_grad():
        after, _ = reference(model, batch)
    trained = {key: value.clone() for key, value in adapters_of(model).items()}
    later = range(UPDATES, TOTAL)
    further = train(model, later, policy_loss, SETTINGS, optimizer, TOTAL)
    descending = reference_model(folder, name)
    adapt(descending, initial, lora.alpha / lora.rank)
    descend(descending)
    return {
        "before": before,
        "history": history,
        "after": after,
        "adapters": trained,
        "further": further,
        "descended": adapters_of(descending),
    }


def descend(model: torch.nn.Module) -> None:
    """Update three times along the gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = SETTINGS | SGD | {"clip_grad": float("inf")}
    optimizer = torch.optim.SGD(trained, lr=SGD["lr"])
    train(model, range(3), policy_loss, settings, optimizer, TOTAL)
