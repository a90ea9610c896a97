"""Run `areal-lite chat`: talk to a model, or to a run's newest checkpoint, in the terminal.

One server runs on this machine as long as the chat does. Standard input may also be a file or a
pipe, where each line is a turn. `/quit`, Ctrl-D and Ctrl-C end the chat. With `prompts=[…]` each
prompt is answered by itself, and the command ends.
"""

import sys
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.config import DataConfig, load_config
from areal_lite.config.rules import check_stop
from areal_lite.data.model_folder import check_model_folder
from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.launch.preflight import check_model, check_servers
from areal_lite.servers.client import ServerRefused, sampling_params
from areal_lite.servers.fleet import Fleet, open_fleet
from areal_lite.system.processes import visible
from areal_lite.tools.commands import ChatConfig
from areal_lite.tools.evaluate import marks_turns, reading, with_servers
from areal_lite.tools.export import model_of_run

_QUIT = "/quit"
# Tokens of a request. An answer takes several, so that it appears while it is written.
_TOKENS_AT_ONCE = 8


def check(config: ChatConfig) -> None:
    """Check the model, if one is named, and the machine. Raises ValueError."""
    if (config.model is None) == (config.run_dir is None):
        raise ValueError("set either model or run_dir: the folder of a model or of a run")
    if config.model is not None:
        check_model("model", config.model)
    check_stop("stop", config.stop)
    check_servers(config.server, config.model)


def run(config: ChatConfig) -> int:
    """Start a server, answer the prompts or the lines of standard input, and stop the server.

    Returns the exit status.
    """
    folder = Path(config.model) if config.model else model_of_run(Path(config.run_dir or ""))
    check_model_folder(folder)
    with tempfile.TemporaryDirectory(prefix="areal_lite-chat-") as scratch:
        run_dir = Path(scratch)
        turns = _turns(config, folder, run_dir)
        with_servers(config.server, str(folder), config.seed, run_dir, turns)
    return 0


def _turns(config: ChatConfig, folder: Path, run_dir: Path) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield what answers each prompt, or each line of the user."""
    run = load_config(Path(config.run_dir)) if config.run_dir else None
    data = run.data if run else DataConfig()
    if run and not config.stop:
        config = replace(config, stop=run.rollout.stop)
    tokenizer = Tokenizer(folder, data.chat_template_kwargs)
    conversation = Conversation(tokenizer, config, data.system_prompt)
    if not config.prompts:
        how = "each line is a prompt as it is" if conversation.raw else "with its chat template"
        print(f"{folder} ({how}); {_QUIT} ends the chat", file=sys.stderr)
    for number, line in enumerate(config.prompts or _lines()):
        if not number:
            lines = reading(tokenizer, conversation.text(line), conversation.raw)
            print(*lines, sep="\n", file=sys.stderr)
        if config.prompts:
            print(f"--- {line}")
        yield _turn(config, run_dir, conversation, line)


class Conversation:
    """The messages so far, and the prompt of the next answer.

    A model without a chat template gets each line as it is, and nothing of the lines before. So
    does a model whose template adds nothing to a question, such as in the addition task.
    """

    def __init__(self, tokenizer: Tokenizer, config: ChatConfig, system_prompt: str | None = None):
        self.tokenizer = tokenizer
        self.params = sampling_params(config, tokenizer, evaluates=True)
        self._messages: list[Message] = []
        if system_prompt is not None:
            self._messages.append({"role": "system", "content": system_prompt})
        self._alone = bool(config.prompts)
        self.raw = config.raw or not marks_turns(tokenizer)

    def text(self, line: str) -> str:
        """Return the text to continue for the user's `line`."""
        messages = [*self._messages, {"role": "user", "content": line}]
        return line if self.raw else self.tokenizer.render(messages)

    def prompt(self, line: str) -> np.ndarray:
        """Return the tokens of `text`: int32 [n]."""
        tokens = self.tokenizer.encode(self.text(line), add_special_tokens=self.raw)
        return np.asarray(tokens, np.int32)

    def record(self, line: str, answer: str) -> None:
        """Add a line and its answer, unless each prompt is answered by itself."""
        if not self._alone:
            said = {"user": line, "assistant": answer}
            self._messages += [{"role": role, "content": text} for role, text in said.items()]


async def _turn(config: ChatConfig, run_dir: Path, conversation: Conversation, line: str) -> None:
    """Print the answer to a line while it is written."""
    async with open_fleet(run_dir, config.seed) as fleet:
        try:
            answer = await _answer(fleet, conversation, conversation.prompt(line))
        except ServerRefused as error:  # the conversation is longer than the model's context
            print(f"\nareal-lite: {visible(str(error))}", file=sys.stderr)
        else:
            conversation.record(line, answer)


async def _answer(fleet: Fleet, conversation: Conversation, prompt: np.ndarray) -> str:
    params, decode = conversation.params, conversation.tokenizer.decode
    tokens: list[int] = []
    shown = reason = ""
    while reason != "stop" and (left := params.max_new_tokens - len(tokens)):
        part = replace(params, max_new_tokens=min(left, _TOKENS_AT_ONCE))
        so_far = np.concatenate([prompt, np.asarray(tokens, np.int32)])
        session = await fleet.open_session(f"chat-{len(prompt)}-{len(tokens)}")
        completion = await fleet.complete(session, so_far, part)
        tokens += completion.tokens.tolist()
        reason = completion.finish_reason
        # The last characters may lack bytes of the next tokens, and take back those before them.
        text = decode(tokens).rstrip("\N{REPLACEMENT CHARACTER}")
        if ends := [text.index(stop) + len(stop) for stop in params.stop if stop in text]:
            text, reason = text[: min(ends)], "stop"
        print(visible(text[len(shown) :]), end="", flush=True)
        shown = max(shown, text, key=len)
    print("" if reason == "stop" else " […]", flush=True)
    return shown


def _lines() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - the arrow keys edit a line
    terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if terminal else "").encode(errors="replace")
        except EOFError:
            return
        line = line.decode("utf-8-sig").strip()
        if line == _QUIT:
            return
        if line:
            yield line
