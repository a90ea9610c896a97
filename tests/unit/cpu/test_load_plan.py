"""A plan writes what the model's loader would, or refuses before it has written anything."""

import pytest
import torch

from areal_lite.cpu.memory.server import LoadPlan
from areal_lite.sglang_plugins.load_plan import LoadError
from tests.unit.cpu.staged_model import FusedModel, weights


def test_a_plan_writes_what_the_loader_would_and_only_when_it_is_run():
    expected, model, new = FusedModel(), FusedModel(), weights()
    expected.load_weights(new.items())
    untouched = model.values()
    plan = LoadPlan(model, list(new.items()))
    assert model.values() == untouched and plan.repeatable and plan.fits(model)
    plan.run()
    assert model.values() == expected.values()


def test_a_plan_that_is_run_again_writes_what_its_tensors_hold_then():
    model, new = FusedModel(), weights()
    plan = LoadPlan(model, list(new.items()))
    plan.run()
    new["q"].fill_(7.0)
    plan.run()
    assert model.qk[:4].unique().tolist() == [7.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(k=None), "leave out all or parts of qk"),
        (dict(embed=None, norm=None), "leave out all or parts of embed, norm"),
        (dict(k=torch.ones(3, 4)), r"cannot take the weights: AssertionError k has \[3, 4\]"),
        (dict(norm=torch.ones(5)), r"shape \[5\] does not fit the \[4\]"),
        (dict(norm=torch.ones(1)), r"shape \[1\] does not fit the \[4\]"),
    ],
)
def test_weights_that_do_not_make_the_model_are_refused(changes, message):
    model = FusedModel()
    before = model.values()
    with pytest.raises(LoadError, match=message):
        LoadPlan(model, list(weights(**changes).items()))
    assert model.values() == before


def test_a_tensor_that_comes_twice_does_not_stand_for_another():
    tensors = list(weights(k=None).items())
    with pytest.raises(LoadError, match="parts of qk"):
        LoadPlan(FusedModel(), tensors + [pair for pair in tensors if pair[0] == "q"])


def test_a_loader_that_computes_is_planned_anew_each_time():
    class Scaled(FusedModel):
        def load_weights(self, weights) -> None:
            super().load_weights((name, 2 * tensor) for name, tensor in weights)

    model, new = Scaled(), weights()
    plan = LoadPlan(model, list(new.items()))
    plan.run()
    assert not plan.repeatable and torch.equal(model.norm.data, 2 * new["norm"])


def test_a_loader_that_changes_weights_in_place_is_refused():
    class Added(FusedModel):
        def load_weights(self, weights) -> None:
            self.norm.data.add_(1)

    with pytest.raises(LoadError, match="add_.*use sync.transport=distributed"):
        LoadPlan(Added(), list(weights().items()))


def test_a_plan_does_not_fit_a_model_whose_parameters_moved():
    model = FusedModel()
    plan = LoadPlan(model, list(weights().items()))
    model.norm = torch.nn.Parameter(torch.zeros(4))
    assert not plan.fits(model)


def test_a_model_that_computes_more_from_its_weights_is_refused():
    model = FusedModel()
    model.post_load_weights = lambda: None
    with pytest.raises(LoadError, match="use sync.transport=distributed"):
        LoadPlan(model, list(weights().items()))
