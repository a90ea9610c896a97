"""The prompts of several sources as one set."""

from collections.abc import Mapping
from dataclasses import replace

from areal_lite.data.prompts import Prompt, PromptSet


class MixedPrompts:
    """Prompt i of source k of K, under the index K i + k, so that sources may be without end.

    A prompt has the name of its source, which is also in front of its `prompt_id`. A single source
    without a name keeps its prompts as they are.
    """

    def __init__(self, sources: Mapping[str, PromptSet]) -> None:
        self._sources = list(sources.items())

    def __getitem__(self, index: int) -> Prompt:
        place, number = divmod(index, len(self._sources))
        name, prompts = self._sources[number]
        prompt = prompts[place]
        if not name:
            return prompt
        return replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", source=name)
