"""A model that loads weights as SGLang's do: parameters are merged, and a vocabulary is padded."""

import torch


class FusedModel(torch.nn.Module):
    """Two projections in one parameter, an embedding with padding, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.full((8, 4), -1.0))
        self.qk = torch.nn.Parameter(torch.full((6, 4), -1.0))
        self.norm = torch.nn.Parameter(torch.full((4,), -1.0))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed[: len(tensor)].data.copy_(tensor)
                self.embed[len(tensor) :].data.fill_(0)
            elif name in "qk":
                part = self.qk.data.narrow(0, 0 if name == "q" else 4, 4 if name == "q" else 2)
                assert part.shape == tensor.shape, f"{name} has {list(tensor.shape)}"
                part.copy_(tensor)
            else:
                self.norm.data.copy_(tensor)

    def values(self) -> dict[str, list]:
        return {name: parameter.tolist() for name, parameter in self.named_parameters()}


def weights(seed: int = 0, **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return random weights of the model. A change of None leaves a tensor out."""
    torch.manual_seed(seed)
    shapes = {"embed": (5, 4), "q": (4, 4), "k": (2, 4), "norm": (4,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()} | changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
