"""Environments of the package verifiers: their prompts, their turns and their rubrics.

    +task=verifiers data.args.environment=my_env data.args.arguments={difficulty: 2}

An environment is a module with `load_environment(**arguments)`. It asks the policy at the endpoint
for agents (workflows/agent.py), and its rubric gives the reward.
"""

import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from areal_lite.config import DataConfig
from areal_lite.data.prompts import Prompt, Split, TextPrompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.extensions import require

# Later releases have no `load_environment`.
_PACKAGE = "'verifiers<0.3'"


def problems(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    *,
    environment: str = "",
    arguments: Mapping[str, Any] | None = None,
) -> TextPrompts:
    """Open the data set of an environment. Raises ValueError if it cannot be used.

    Args:
        environment: its name.
        arguments: of its `load_environment`.
    """
    own = {"environment": environment, "arguments": dict(arguments or {})}
    loaded = _environment(environment, json.dumps(own["arguments"]))
    data = loaded.get_dataset() if split == "train" else loaded.get_eval_dataset()
    numbered = enumerate(data.to_list(), start=1)
    rows = ((f"{environment}/{split}:{n}", {**row, "verifiers": own}) for n, row in numbered)
    answer = "answer" if "answer" in data.column_names else ""
    return TextPrompts(rows, replace(config, prompt_key="prompt", answer_key=answer), tokenizer)


async def play(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Play an episode and return its reward. Raises RuntimeError if the environment fails."""
    row = dict(prompt.info)
    own = row.pop("verifiers")
    row |= {"prompt": list(prompt.messages), "answer": prompt.answer}
    client = _client(base_url).with_options(api_key=api_key)
    chat = require("verifiers.clients", _PACKAGE).OpenAIChatCompletionsClient(client)
    environment = _environment(own["environment"], json.dumps(own["arguments"]))
    output = await environment.run_rollout(row, chat, "policy", {})
    error = output.get("error")
    if error and error["error"] != "EmptyModelResponseError":  # which is the policy's own failure
        raise RuntimeError(f"verifiers: {error['error_chain_repr']}")
    return float(output["reward"])


@cache
def _client(base_url: str) -> Any:
    return require("openai", "openai").AsyncOpenAI(base_url=base_url, api_key="one per episode")


@cache
def _environment(name: str, arguments: str) -> Any:
    """Load an environment. Raises ValueError if it cannot be used."""
    package = require("verifiers", _PACKAGE)
    if not hasattr(package, "load_environment"):
        raise ValueError(
            f"verifiers {package.__version__} has no environments of this kind:"
            f" pip install {_PACKAGE}"
        )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        environment = package.load_environment(name, **json.loads(arguments))
    except Exception as error:  # it is code of the user
        raise ValueError(f"data.args.environment={name}: {error}") from error
    finally:
        # An environment takes the signals of the whole process.
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
    if environment.requires_group_rollouts:
        raise ValueError(
            f"data.args.environment={name}: its rubric compares the answers of a group; use one"
            " that scores each answer"
        )
    return environment
