"""`areal-lite chat` as a user has it: lines in, answers out, and no server afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lite.data.tokenizer import Tokenizer

QUESTIONS = ("12+34=", "Why?")
TOKENS = 20  # more than one request answers


def greedy(model: str, question: str) -> str:
    """Return what transformers answers."""
    tokenizer = Tokenizer(model)
    prompt = torch.tensor([tokenizer.encode(question)])
    network = AutoModelForCausalLM.from_pretrained(model)
    answer = network.generate(prompt, max_new_tokens=TOKENS, do_sample=False)[0, prompt.shape[1] :]
    return tokenizer.decode(answer.tolist())


def servers_of(scratch: Path) -> list[str]:
    """List the servers that a command with this folder for temporary files has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:  # it has ended, or is another user's
            continue
        if b"areal_lite.launch.serve" in command and f"TMPDIR={scratch}\0".encode() in environment:
            found.append(command.decode(errors="replace"))
    return found


def read(process: subprocess.Popen, expected: str) -> None:
    """Read as much output as `expected` has, and compare."""
    assert process.stdout is not None
    output = b""
    while len(output) < len(expected.encode()) and (
        more := os.read(process.stdout.fileno(), 65536)
    ):
        output += more
    assert output.decode() == expected


@pytest.mark.slow  # test_serve.py has the server, tests/unit/tools/test_chat.py the conversation
def test_lines_are_answered_and_the_server_is_stopped(tiny_model, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_lite", "chat", tiny_model]
        + [f"max_new_tokens={TOKENS}", "temperature=0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=open(tmp_path / "stderr", "wb"),
        env=os.environ | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        assert process.stdin is not None
        for question in QUESTIONS:
            process.stdin.write(f"{question}\n\n".encode())
            process.stdin.flush()
            answer = greedy(tiny_model, question)
            ended = len(Tokenizer(tiny_model).encode(answer)) < TOKENS
            read(process, answer + ("\n" if ended else " […]\n"))
        assert servers_of(tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, (tmp_path / "stderr").read_text()
    finally:
        process.kill()
        process.wait()
    assert not servers_of(tmp_path)
    assert not list(tmp_path.glob("areal_lite*"))


@pytest.mark.slow
def test_given_prompts_are_answered_each_by_itself(tiny_model, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "areal_lite", "chat", tiny_model, "temperature=0"]
        + [f"max_new_tokens={TOKENS}", f"prompts={list(QUESTIONS)}"],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    first, second = (f"--- {question}\n{greedy(tiny_model, question)}" for question in QUESTIONS)
    assert done.stdout.startswith(first) and second in done.stdout
    assert not servers_of(tmp_path)
