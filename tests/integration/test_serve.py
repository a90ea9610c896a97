"""Use `areal-lite serve` as evaluators and curl do, and compare it with transformers."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lite.config import TrainConfig, save_config
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.run_dir.resume import write_manifest
from areal_lite.system.network import free_port
from tests.integration.test_chat import servers_of

QUESTION = "12+34="
TOKENS = 20
LONG = 1900
KEY = "hush-63d0b1"


def greedy(model: str, question: str, count: int) -> str:
    """Return the answer of transformers, without its end token."""
    tokenizer = Tokenizer(model)
    prompt = torch.tensor([tokenizer.encode(question)])
    network = AutoModelForCausalLM.from_pretrained(model)
    answer = network.generate(prompt, max_new_tokens=count, do_sample=False)[0, prompt.shape[1] :]
    return tokenizer.decode(answer.tolist()).removesuffix("<eos>")


class Served:
    """A running `areal-lite serve`."""

    def __init__(self, scratch: Path, entry_points: dict[str, str], *words: str):
        self.scratch = scratch
        self._errors = open(scratch / "stderr", "wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "areal_lite", "serve", *words, f"port={free_port()}"],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ
            | entry_points
            | {"TMPDIR": str(scratch), "CUDA_VISIBLE_DEVICES": "", "SERVE_KEY": KEY},
        )
        assert self.process.stdout is not None
        self.says = self.process.stdout.readline()
        self.example = self.process.stdout.readline()
        assert self.example, self.errors
        self.url = self.says.split()[0]
        self.client = openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0)

    @property
    def errors(self) -> str:
        return (self.scratch / "stderr").read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.errors:
            assert time.monotonic() < deadline and self.process.poll() is None, self.errors
            time.sleep(0.02)

    def answer(self, model: str, question: str, count: int = TOKENS) -> str | None:
        answer = self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=count,
        )
        return answer.choices[0].message.content

    def interrupt(self) -> int:
        """Press Ctrl-C and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory, current_entry_points) -> Iterator[Served]:
    """An endpoint with a key. The last test ends it."""
    scratch = tmp_path_factory.mktemp("serve")
    key = "server.api_key=${oc.env:SERVE_KEY}"
    served = Served(scratch, current_entry_points, f"model={tiny_model}", key)
    yield served
    served.kill()


def test_the_models_are_listed(served, tiny_model):
    listed = served.client.models.list().data
    assert [model.id for model in listed] == [Path(tiny_model).name]
    assert served.says.startswith(f"{served.url} serves {tiny_model} as model {listed[0].id};")


def test_chat_and_completion_answer_as_transformers_does(served, tiny_model):
    expected = greedy(tiny_model, QUESTION, TOKENS)
    assert served.answer("any", QUESTION) == expected
    settings = {"model": "any", "temperature": 0, "max_tokens": TOKENS}
    completed = served.client.completions.create(prompt=QUESTION, **settings)
    assert completed.choices[0].text == expected


def test_both_stream(served, tiny_model):
    expected = greedy(tiny_model, QUESTION, TOKENS)
    settings = {"model": "any", "temperature": 0, "max_tokens": TOKENS, "stream": True}
    chat = served.client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], **settings
    )
    texts = [part.choices[0].delta.content or "" for part in chat if part.choices]
    assert "".join(texts) == expected and len(texts) > 2
    parts = served.client.completions.create(prompt=QUESTION, **settings)
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected


def test_the_log_probs_that_lm_eval_asks_for_are_those_of_transformers(served, tiny_model):
    """This is a request of `local-completions` (lm-eval 0.4.13), for two prompts at once."""
    prompts = [Tokenizer(tiny_model).encode(text) for text in ("12+34=46", "12+34=47")]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    choices = served.client.completions.create(model="any", seed=1234, **body).choices
    network = AutoModelForCausalLM.from_pretrained(tiny_model)
    for ids, choice in zip(prompts, choices, strict=True):
        computed = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [computed[i - 1, ids[i]].item() for i in range(1, len(ids))]
        found = choice.logprobs.token_logprobs
        assert found[0] is None
        assert found[1 : len(ids)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [  # of local-chat-completions (lm-eval 0.4.13), and of openai-api (inspect-ai 0.3.285)
        {"max_tokens": 24, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
        {"max_tokens": 24, "temperature": 0.0},
    ],
)
def test_the_chats_of_evaluators_are_answered(served, tiny_model, settings):
    messages = [{"role": "user", "content": QUESTION}]
    answer = served.client.chat.completions.create(model="any", messages=messages, **settings)
    assert answer.choices[0].message.content == greedy(tiny_model, QUESTION, 24).split("\n\n")[0]


def test_the_example_runs_and_no_command_line_has_the_key(served):
    done = subprocess.run(
        ["bash", "-c", f"{served.example.strip()} --silent --fail"],
        env=os.environ | {"KEY": KEY},
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["choices"], done
    assert served.example.startswith("curl ") and KEY not in served.says + served.example
    lines = [path for path in Path("/proc").glob("[0-9]*/cmdline") if KEY in _text(path)]
    assert not lines


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


@pytest.mark.parametrize("key", ["", "another"])
def test_without_the_key_nothing_is_answered(served, key):
    header = f'-H "Authorization: Bearer {key}"' if key else ""
    curl = f"curl --silent -o /dev/null -w %{{http_code}} {header} {served.url}/models"
    assert subprocess.run(shlex.split(curl), capture_output=True, text=True).stdout == "401"


def test_ctrl_c_leaves_nothing(served):
    assert servers_of(served.scratch)
    assert served.interrupt() == 130, served.errors
    assert not servers_of(served.scratch)
    assert not list(served.scratch.glob("areal_lite*"))
    assert "Traceback" not in served.errors


@pytest.fixture(scope="module")
def other_model(tiny_model, tmp_path_factory) -> str:
    """The tiny model with other weights."""
    folder = tmp_path_factory.mktemp("other")
    network = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(1)
    for weight in network.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    network.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_bytes(Path(tiny_model, file).read_bytes())
    return str(folder)


def publish(run_dir: Path, step: int, model: str) -> None:
    """Write a checkpoint that was exported already."""
    (run_dir / "exports").mkdir(exist_ok=True)
    folder = run_dir / "checkpoints" / f"step-{step}"
    scratch = folder.with_name(f"{step}.tmp")
    scratch.mkdir(parents=True)
    (scratch / "weights").write_text(str(step))
    write_manifest(scratch, {})
    (run_dir / "exports" / f"step-{step}").symlink_to(model)
    scratch.rename(folder)


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_a_checkpoint_that_appears_during_requests_is_loaded_after_them(
    tiny_model, other_model, tmp_path, current_entry_points
):
    run_dir = tmp_path / "run"
    save_config(TrainConfig(model=tiny_model, run_dir=str(run_dir)), run_dir)
    served = Served(tmp_path, current_entry_points, str(run_dir), "--follow")
    try:
        assert f"serves step 0 of {run_dir} as model run;" in served.says
        begun = threading.Barrier(9)

        def long_answer(number: int) -> int:
            """Return the number of tokens of a long answer."""
            parts = served.client.completions.create(
                model="any",
                prompt=f"{number}+",
                max_tokens=LONG,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            next(parts)
            begun.wait(60)
            last = list(parts)[-1]
            assert last.usage is not None
            return last.usage.completion_tokens

        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(long_answer, number) for number in range(8)]
            begun.wait(60)
            publish(run_dir, 1, other_model)
            served.wait_for("step 1: loading it once the answers in progress have ended")
            assert not any(answer.done() for answer in answers), "they ended too early to show"
            during = served.answer("any", QUESTION)
            assert [answer.result() for answer in answers] == [LONG] * 8
        served.wait_for(f"serving step 1 of {run_dir}")
        new = greedy(other_model, QUESTION, TOKENS)
        assert served.answer("any", QUESTION) == new != greedy(tiny_model, QUESTION, TOKENS)
        # It came before the server was told to load, or waited until it had loaded.
        assert during in (new, greedy(tiny_model, QUESTION, TOKENS))
        assert [model.id for model in served.client.models.list().data] == ["run"]

        damaged = run_dir / "checkpoints" / "step-2"
        publish(run_dir, 2, tiny_model)
        (damaged / "weights").write_text("other")
        publish(run_dir, 3, "/nowhere")
        served.wait_for("step 1 stays until the next checkpoint")
        assert served.answer("any", QUESTION) == new
        assert served.interrupt() == 130
        assert not re.search("Traceback|Exception", served.errors)
    finally:
        served.kill()
    assert not servers_of(tmp_path)
