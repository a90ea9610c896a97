"""The plugin changes SGLang's pauses, and nothing else."""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from areal_lite import sglang_plugins
from areal_lite.cpu.sglang import BucketMemory
from areal_lite.sglang_plugins import push as push_plugin


class Stream:
    def __init__(self):
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def pause(mode: str, *, overlap: bool = True) -> tuple[int, list[str]]:
    """Return how often the pause waited for each of two streams, and what SGLang was asked."""
    forward, schedule, asked = Stream(), Stream(), []
    scheduler = SimpleNamespace(
        enable_overlap=overlap, forward_stream=forward, schedule_stream=schedule
    )

    def original(self, request):
        assert self is scheduler and forward.waits == 0, "it must not launch anything afterwards"
        asked.append(request.mode)
        return "result"

    request = SimpleNamespace(mode=mode)
    assert push_plugin._finish_forward_pass(original, scheduler, request) == "result"
    assert forward.waits == schedule.waits
    return forward.waits, asked


def test_a_pause_in_place_waits_for_the_forward_pass_on_the_gpu() -> None:
    assert pause("in_place") == (1, ["in_place"])


@pytest.mark.parametrize(
    "case", [dict(mode="retract"), dict(mode="in_place", overlap=False)], ids=str
)
def test_other_pauses_stay_as_they_are(case) -> None:
    """A retraction processes the pending result itself."""
    assert pause(**case) == (0, [case["mode"]])


def test_groups_of_other_clients_stay_sglangs() -> None:
    calls = []

    def original(self, *args, **kwargs):
        calls.append((args, kwargs))
        return "SGLang's"

    updater = SimpleNamespace(tp_rank=0, device="cpu", _model_update_group={"other": object()})
    where = ("127.0.0.1", 1, 1, 2)
    assert push_plugin._join_group(original, updater, *where, "other", "nccl") == "SGLang's"
    assert push_plugin._leave_group(original, updater, "other") == "SGLang's"
    assert push_plugin._receive_weights(original, updater, group_name="other") == "SGLang's"
    assert calls == [
        ((*where, "other", "nccl"), {}),
        (("other",), {}),
        ((), {"group_name": "other"}),
    ]


def test_a_server_without_a_gpu_keeps_the_memory_of_a_bucket(monkeypatch) -> None:
    """Memory that is new costs most of the time of a push."""
    monkeypatch.setattr(push_plugin, "empty_bucket", BucketMemory())
    sent = [torch.randn(30), torch.randn(2, 5), torch.randn(50)]
    addresses = []
    for tensor in sent:

        class Member:
            def broadcast(self, data, given_up, tensor=tensor):
                data.copy_(tensor.flatten().view(torch.uint8))

        bucket = push_plugin.Layout(["w"], ["float32"], [list(tensor.shape)])
        data = push_plugin._receive(Member(), "cpu", bucket.nbytes)
        ((name, found),) = bucket.split(data)
        assert name == "w" and torch.equal(found, tensor)
        addresses.append(found.untyped_storage().data_ptr())
    assert addresses[0] == addresses[1], "a smaller bucket fits"


@pytest.mark.parametrize(
    "backend, size, kept",
    [("triton", 127, 128), ("triton", None, None), ("triton", -1, -1), ("fa3", 127, 127)],
)
def test_triton_decodes_with_the_whole_window(monkeypatch, backend, size, kept) -> None:
    context = SimpleNamespace(attention_backends=lambda: ("fa3", backend))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert push_plugin._see_whole_window(lambda model, config: size, "model", "config") == kept


def two(original, self, first, second): ...
def one_and_rest(original, *, second, **rest): ...
def anything(original, *args, **named): ...


@pytest.mark.parametrize("kind", ["AROUND", "REPLACE"])
@pytest.mark.parametrize(
    "hook, found, fits",
    [
        (two, lambda self, first, second: 0, True),
        (two, lambda self, second, first: 0, False),
        (two, lambda self, first, second, third=0: 0, False),
        (two, lambda self, first: 0, False),
        (one_and_rest, lambda first, second, third: 0, True),
        (one_and_rest, lambda first, third: 0, False),
        (anything, lambda: 0, True),
        (anything, None, False),
    ],
)
def test_a_hook_wants_the_parameters_that_it_knows(
    monkeypatch, kind: str, hook, found, fits: bool
) -> None:
    engine, registry = ModuleType("engine"), ModuleType("hook_registry")
    # One that replaces SGLang's function does not get it.
    hook = partial(hook, None) if kind == "REPLACE" else partial(hook)
    hook.__module__ = "areal_lite.engine"
    another = partial(two, None)
    another.__module__ = "other_plugin"
    kinds = SimpleNamespace(AROUND="around", REPLACE="replace")
    hooks = [(getattr(kinds, kind), hook, None), ("around", another, None)]
    registry.HookRegistry = SimpleNamespace(_hooks={"engine.work": hooks})
    registry.HookType = kinds
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    if found:
        engine.work = found
    monkeypatch.setitem(sys.modules, "engine", engine)
    if fits:
        push_plugin.check_hooks()
    else:
        with pytest.raises(ValueError, match=r"has engine\.work .* install sglang==0\.5\.\d+$"):
            push_plugin.check_hooks()


def registry_of_sglang() -> ModuleType:
    """Import the module alone. SGLang takes many seconds."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "srt/plugins/hook_registry.py"
    spec = importlib.util.spec_from_file_location("hook_registry", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_modules_that_import_a_function_get_its_hook_and_no_search_is_for_methods(
    monkeypatch,
) -> None:
    registry, engine, user = registry_of_sglang(), ModuleType("engine"), ModuleType("user")
    searches, search = [], registry._propagate_patch
    registry._propagate_patch = lambda *hook: searches.append(hook) or search(*hook)
    plugins = SimpleNamespace(hook_registry=registry)
    modules = {"sglang.srt.plugins": plugins, "megatron": None, "engine": engine, "user": user}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sglang_plugins, "installed", False)
    push_plugin.install()
    engine.Engine = type("Engine", (), {"step": lambda self: "a step"})
    engine.work = lambda: "work"
    user.work = engine.work
    registry.HookRegistry.reset()
    for target in ("engine.Engine.step", "engine.work"):
        registry.HookRegistry.register(
            target, lambda original, *args: f"more than {original(*args)}", registry.HookType.AROUND
        )
    registry.HookRegistry.apply_hooks()
    assert engine.Engine().step() == "more than a step"
    assert engine.work() == user.work() == "more than work"
    assert [owner for _, _, owner in searches] == [engine]
