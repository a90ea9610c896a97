"""transformers with adapters of PEFT, trained by autograd: the reference of test_lora.py.

PEFT reads the files that the trainer exported. Projections of one layer that begin with the same A
share it as one parameter, as in the trainer.
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from tests.ranks.engine_worker import SETTINGS, random_batch
from tests.ranks.layout_worker import RESUMED_UPDATES
from tests.ranks.lora_worker import SGD, UPDATES
from tests.ranks.test_engine import reference, reference_model
from tests.ranks.test_engine_layouts import optimizer_of, policy_loss, train

TOTAL = UPDATES + RESUMED_UPDATES
LANGUAGE_MODEL = "base_model.model."
BACKBONE = f"{LANGUAGE_MODEL}model."  # without the output layer


def adapt(model: torch.nn.Module, adapters: Path, names: str = LANGUAGE_MODEL) -> None:
    """Put the adapters of a folder into `model` in place, and freeze everything else.

    `names` is what the names in the folder have before those of the model.
    """
    config = LoraConfig.from_pretrained(adapters)
    config.inference_mode = False
    inject_adapter_in_model(config, model)
    tensors = load_file(adapters / "adapter_model.safetensors")
    loaded = set_peft_model_state_dict(
        model, {key.removeprefix(names): tensor for key, tensor in tensors.items()}
    )
    assert not loaded.unexpected_keys and not any("lora" in key for key in loaded.missing_keys)
    known: list[torch.nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, Linear):
            own = module.lora_A["default"]
            same = (a for a in known if a.shape == own.weight.shape and torch.equal(a, own.weight))
            own.weight = next(same, own.weight)
            known.append(own.weight)


def adapters_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the adapters of a language model as PEFT would write them."""
    found = get_peft_model_state_dict(model)
    return {f"{LANGUAGE_MODEL}{key}": tensor.detach().clone() for key, tensor in found.items()}


def adapted_run(folder: Path, name: str, initial: Path) -> dict:
    """Train the adapters `initial` of a model as the worker does, and return what it returns."""
    batch = random_batch(16, 98, seed=100)
    model = reference_model(folder, name)
    adapt(model, initial)
    with torch.no_grad():
        before, _ = reference(model, batch)
    optimizer = optimizer_of(model, SETTINGS["lr"])
    history = train(model, range(UPDATES), policy_loss, SETTINGS, optimizer, TOTAL)
    with torch.no_grad():
        after, _ = reference(model, batch)
    trained = adapters_of(model)
    later = range(UPDATES, TOTAL)
    further = train(model, later, policy_loss, SETTINGS, optimizer, TOTAL)
    descending = reference_model(folder, name)
    adapt(descending, initial)
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
