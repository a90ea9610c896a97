"""ParallelModel: this rank's part of a model, and microbatches through all parts of it.

What policy, reference and critic have in common. Entry i of any per-token result belongs to token i and is made of the tokens before it;
it is 0 for each sequence's first token, which has none. Every rank of a model is given the same microbatches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor
from transformers import AutoConfig

from areal_lite.config import TrainerConfig
from areal_lite.megatron import hf
from areal_lite.megatron.architectures import inverse_frequencies
from areal_lite.megatron.attention import PackedSequences
from areal_lite.megatron.context_parallel import LocalTokens, local_length, local_tokens
from areal_lite.megatron.head import Head, ValueLayer
from areal_lite.megatron.model import build_chunks
from areal_lite.megatron.packing import Microbatch, attention_crossover, make_microbatches
from areal_lite.megatron.parallel import init_distributed, select_dtype
from areal_lite.trajectory import TrainBatch

# Called on the last pipeline stage with what the head gave, float32 [t] each, and the microbatch.
Finish = Callable[[tuple[Tensor, ...], Microbatch], Any]


class ParallelModel:
    """Joins the process groups if `init_distributed` has not been called yet.

    model_path: a Hugging Face folder. with_values: a value layer in place of the output layer.
    Raises ValueError for a model or a setting that is not supported.
    """

    def __init__(
        self, config: TrainerConfig, model_path: str | Path, seed: int, with_values: bool = False
    ):
        self.config = config
        self.device = init_distributed(config, seed)
        self.dtype = select_dtype(config, self.device)
        self.source = Path(model_path)
        self.hf_config = AutoConfig.from_pretrained(self.source, local_files_only=True)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.dp_group = parallel_state.get_data_parallel_group()
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        self.cp_group = parallel_state.get_context_parallel_group()
        self.model = build_chunks(
            self.hf_config,
            self.dtype,
            config,
            tie=self.hf_config.tie_word_embeddings and not with_values,
        )
        last = self.model[-1]
        if with_values and last.post_process:
            last.output_layer = None  # of no use, and not loaded
        hf.load_hf(self.model, self.source, self.hf_config)
        if with_values and last.post_process:
            last.output_layer = ValueLayer(last.config)
        self.inv_freq = inverse_frequencies(self.hf_config, self.device)

    def microbatches(self, batch: TrainBatch) -> list[Microbatch]:
        """This rank's batch in microbatches of at most `tokens_per_microbatch`, of about equal cost, as many as the layout wants."""
        return make_microbatches(
            batch,
            self.config.tokens_per_microbatch,
            crossover=attention_crossover(self.model[0].config),
            group=self.dp_group
            if self.config.expert_parallel > 1
            else None,  # experts are shared with other data-parallel ranks
            multiple=self.pp_group.size() if self.config.virtual_pipeline > 1 else 1,
        )

    @torch.no_grad()
    def outputs(self, microbatches: Sequence[Microbatch], head: Head) -> Tensor:
        """float32 [T]: the head's first result for all tokens of the flat batch that `microbatches` partition, on every rank."""
        self.model.eval()
        result = torch.zeros(
            1 + max(int(m.token_index.max()) for m in microbatches), device=self.device
        )

        def finish(outputs: tuple[Tensor, ...], microbatch: Microbatch) -> None:
            if not is_filler(microbatch):
                result[microbatch.token_index] = outputs[0]

        self.run(list(self.model), microbatches, head, finish, forward_only=True)
        self.from_last_stage(result)
        return result

    def run(
        self,
        modules: list[torch.nn.Module],
        microbatches: Sequence[Microbatch],
        head: Head,
        finish: Finish,
        forward_only: bool,
    ) -> list[Any]:
        """All microbatches through `modules` (the chunks, or what wraps them); what `finish` returned for each, on the last stage.

        With gradients `finish` returns (loss, number of tokens, what to collect), as Megatron wants it.
        """
        microbatches = self._equally_many(microbatches)
        multiple = self.tp_group.size() if self.config.sequence_parallel else 1
        lengths = [local_length(m, self.cp_group.size(), multiple) for m in microbatches]
        if self.pp_group.size() > 1:  # stages send each other tensors of one shape
            lengths = [max(lengths)] * len(lengths)
        local = [
            local_tokens(m, self.cp_group.size(), self.cp_group.rank(), length)
            for m, length in zip(microbatches, lengths)
        ]
        iterators = [iter(list(zip(microbatches, local))) for _ in modules]
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, head, finish),
            data_iterator=iterators if len(modules) > 1 else iterators[0],
            model=modules,
            num_microbatches=len(microbatches),
            seq_length=lengths[0] * self.cp_group.size(),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _equally_many(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """With fillers where all ranks, or all stages, must run equally many."""
        count = len(microbatches)
        if self.config.expert_parallel > 1:  # experts are shared with other data-parallel ranks
            most = torch.tensor(count, device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.dp_group)
            count = int(most)
        if self.config.virtual_pipeline > 1:
            count = -(-count // self.pp_group.size()) * self.pp_group.size()
        return [*microbatches, *[_filler()] * (count - len(microbatches))]

    def _forward_step(
        self,
        head: Head,
        finish: Finish,
        batches: Iterator[tuple[Microbatch, LocalTokens]],
        module: torch.nn.Module,
    ):
        """Megatron's forward step: what this stage hands on, and on the last one the function that finishes the microbatch."""
        microbatch, local = next(batches)
        packed = PackedSequences.build(local, self.inv_freq, self.dtype)
        local = local.to(self.device)
        hidden = module(
            input_ids=local.tokens[None],
            position_ids=local.position_ids[None],
            attention_mask=None,
            packed_seq_params=packed,
        )
        chunk = unwrap_model(module)
        if not chunk.post_process:
            return hidden, None
        microbatch = microbatch.to(self.device)
        outputs = tuple(
            self._whole(x, local, microbatch) for x in head(chunk, hidden, local.following)
        )
        return outputs[0], lambda *_, **__: finish(outputs, microbatch)

    def _whole(self, x: Tensor, local: LocalTokens, microbatch: Microbatch) -> Tensor:
        """[l] about the tokens that follow this rank's -> [t] about the tokens of the microbatch, the same on all context-parallel ranks."""
        if self.cp_group.size() > 1:
            x = gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=False, group=self.cp_group
            )
        # What belongs to a sequence's last token, and is about the next one's first, is dropped.
        return (
            x.index_select(0, local.places).roll(1).masked_fill(microbatch.position_ids == 0, 0.0)
        )

    def from_last_stage(self, tensor: Tensor) -> None:
        """Overwrite `tensor` on all stages of the pipeline with what the last one has in it: what a loss function wrote, for example."""
        if self.pp_group.size() > 1:
            dist.broadcast(
                tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=self.pp_group
            )

    def share_from_last_stage(self, value: dict[str, float] | None) -> dict[str, float]:
        """The dictionary that the last stage gives, on all stages of the pipeline."""
        if self.pp_group.size() == 1:
            return value
        text = b"" if value is None else json.dumps(value).encode()
        size = torch.tensor(len(text), device=self.device)
        self.from_last_stage(size)
        data = torch.tensor([*text] or [0] * int(size), dtype=torch.uint8, device=self.device)
        self.from_last_stage(data)
        return json.loads(bytes(data.tolist()))


def is_filler(microbatch: Microbatch) -> bool:
    """Whether it is there only to make the number of microbatches right."""
    return not len(microbatch.token_index)


def _filler() -> Microbatch:
    one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return Microbatch(
        tokens=one,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        position_ids=one,
        token_index=none,
        max_seqlen=1,
    )
