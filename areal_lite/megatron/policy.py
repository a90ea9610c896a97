"""The models: their common base, trained models, the policy and the critic.

Each trainer rank has one object of each, and every rank calls every method, with the same
microbatches on every rank of a model. Entry i of a per-token result is about token i and computed
from the tokens before it. The first token of a sequence has none before it: its log-prob is 0, and
its value is that of the state after the sequence's last token. A model knows nothing of rewards,
advantages or servers: the loss is a function given to `update`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor
from transformers import AutoConfig

from areal_lite.config import TrainerConfig
from areal_lite.data.model_folder import has_delta_net
from areal_lite.megatron.attention import PackedSequences, rotations
from areal_lite.megatron.delta_net import Pieces
from areal_lite.megatron.experts import install_replay
from areal_lite.megatron.flops import Operations
from areal_lite.megatron.hf import SHARD_BYTES, AdapterStream, WeightStream, export_hf, load_hf
from areal_lite.megatron.logprobs import Head, ValueLayer, lm_head, value_head
from areal_lite.megatron.lora import adapters
from areal_lite.megatron.model import Backbone, Chunks, build_chunks
from areal_lite.megatron.optimizer import (
    apply_gradients,
    build_optimizer,
    build_scheduler,
    is_sharded,
    move_moments,
)
from areal_lite.megatron.packing import (
    LocalTokens,
    Microbatch,
    attention_crossover,
    local_length,
    local_tokens,
    make_microbatches,
    to_device,
)
from areal_lite.megatron.parallel import init_distributed, process_group, select_dtype
from areal_lite.megatron.parameters import query_dim
from areal_lite.megatron.prefixes import build_trie, unshared
from areal_lite.system import heartbeat
from areal_lite.train_batch import TrainBatch

# Called on the last pipeline stage with the results of the head, float32 [t], and the microbatch.
# With gradients it returns (loss, number of tokens, what to collect), as Megatron expects.
FinishMicrobatch = Callable[[tuple[Tensor, ...], Microbatch], Any]
# (*results, microbatch) -> (share of the global loss, detached scalars to sum). Results, [t] each,
# carry gradients: log-probs and entropies of a policy, values of a critic.
LossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class ParallelModel:
    """The model of a Hugging Face folder, on the process groups of `config`.

    It joins them if `init_distributed` has not been called. seed: of torch's generators and of
    adapters. Raises ValueError for a model or a setting that is not supported.
    """

    replays_routes = False
    with_values = False  # a value layer stands in place of the output layer
    operations: ClassVar[float] = 0.0
    """The floating-point operations of this rank's share of the data, in all models so far."""

    def __init__(self, config: TrainerConfig, model_path: str | Path, seed: int):
        self.config = config
        self.device = init_distributed(config, seed)
        self.dtype = select_dtype(config, self.device)
        self.source = Path(model_path)
        self.hf_config = AutoConfig.from_pretrained(self.source, local_files_only=True)
        self._operations = Operations(
            self.hf_config, self.source, has_head=not self.with_values, frozen=config.lora.rank > 0
        )
        self.tp_group = process_group(parallel_state.get_tensor_model_parallel_group())
        self.dp_group = process_group(parallel_state.get_data_parallel_group())
        self.pp_group = process_group(parallel_state.get_pipeline_model_parallel_group())
        self.cp_group = process_group(parallel_state.get_context_parallel_group())
        tie = self.hf_config.tie_word_embeddings and not self.with_values
        self.chunks = build_chunks(self.hf_config, self.dtype, config, tie=tie)
        self.model = Chunks(self.chunks)
        last: Any = self.chunks[-1]
        has_value_layer = self.with_values and last.post_process
        if has_value_layer:
            last.output_layer = None  # not loaded
        load_hf(self.chunks, self.source, self.hf_config)
        for name, adapter in adapters(self.chunks):
            adapter.initialize(seed, name)
        if has_value_layer:
            last.output_layer = ValueLayer(last.config)
        self.rotations = rotations(self.hf_config, self.device)

    def language_head(self, temperature: float) -> Head:
        """Make the head of this model that returns log-probs and entropies."""
        return partial(
            lm_head,
            temperature=temperature,
            vocab_size=self.hf_config.vocab_size,
            fp32=self.config.fp32_head,
        )

    def microbatches(self, batch: TrainBatch, scored: np.ndarray | None = None) -> list[Microbatch]:
        """Pack this rank's batch into microbatches of at most `tokens_per_microbatch` tokens.

        scored: bool [T], the tokens that need a log-prob; by default all of them.
        """
        return make_microbatches(
            batch if self.replays_routes else replace(batch, routes=None),
            self.config.tokens_per_microbatch,
            crossover=attention_crossover(self.chunks[0].config),
            multiple=self.pp_group.size() if self.config.virtual_pipeline > 1 else 1,
            scored=scored,
            share=self.config.share_prefixes,
        )

    @torch.no_grad()
    def outputs(self, microbatches: Sequence[Microbatch], head: Head, num: int = 1) -> Tensor:
        """Compute the head's first `num` results for all tokens of a flat batch, on every rank.

        The microbatches partition the batch. Returns float32 [num, T].
        """
        self.model.eval()
        tokens = 1 + max(int(m.token_index.max()) for m in microbatches)
        result = torch.zeros(num, tokens, device=self.device)

        def finish(outputs: tuple[Tensor, ...], microbatch: Microbatch) -> None:
            if not is_filler(microbatch):
                result[:, microbatch.token_index] = torch.stack(outputs[:num])

        self.run(self.chunks, microbatches, head, finish, forward_only=True)
        self.from_last_stage(result)
        return result

    def run(
        self,
        modules: Sequence[torch.nn.Module],
        microbatches: Sequence[Microbatch],
        head: Head,
        finish: FinishMicrobatch,
        forward_only: bool,
    ) -> list[Any]:
        """Run all microbatches through `modules`: the chunks, or wrappers of them.

        Returns the results of `finish`, one for each microbatch, on the last stage.
        """
        ParallelModel.operations += self._operations.count(microbatches, backward=not forward_only)
        microbatches = self._with_fillers(microbatches)
        size, rank = self.cp_group.size(), self.cp_group.rank()
        lengths = [local_length(m, size, self.tp_group.size()) for m in microbatches]
        if self.pp_group.size() > 1:  # stages send each other tensors of one shape
            lengths = [max(lengths)] * len(lengths)
        local = [
            local_tokens(m, size, rank, length, states=self.with_values)
            for m, length in zip(microbatches, lengths)
        ]
        iterators = [iter(list(zip(microbatches, local))) for _ in modules]
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, head, finish),
            data_iterator=iterators if len(modules) > 1 else iterators[0],
            model=list(modules),
            num_microbatches=len(microbatches),
            seq_length=lengths[0] * size,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _with_fillers(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Add fillers where all ranks, or all stages, must run equally many microbatches."""
        count = len(microbatches)
        if self.config.expert_parallel > 1:  # shares experts with other data-parallel ranks
            most = torch.tensor(count, device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.dp_group)
            count = int(most)
        if self.config.virtual_pipeline > 1:
            count = -(-count // self.pp_group.size()) * self.pp_group.size()
        return [*microbatches, *[_filler()] * (count - len(microbatches))]

    def _forward_step(
        self,
        head: Head,
        finish: FinishMicrobatch,
        batches: Iterator[tuple[Microbatch, LocalTokens]],
        module: torch.nn.Module,
    ):
        """Run this stage on the next microbatch: Megatron's forward step.

        Returns the output for the next stage, and on the last one how to finish the microbatch.
        """
        heartbeat.beat()
        microbatch, local = next(batches)
        hf, dtype = self.hf_config, self.dtype
        packed = PackedSequences.build(local, self.rotations, query_dim(hf), dtype)
        if any(has_delta_net(hf)):
            packed.pieces = Pieces.build(local, hf.linear_conv_kernel_dim, self.device, dtype)
        local = to_device(local, self.device)
        chunk: Any = unwrap_model(module)
        assert isinstance(chunk, Backbone)
        routes = local.routes
        if routes is not None:
            routes = routes.chunk(self.tp_group.size())[self.tp_group.rank()]
        for replay in chunk.replays:
            replay.routes = None if routes is None else routes[:, replay.layer]
        hidden = module(
            input_ids=local.tokens[None],
            position_ids=local.position_ids[None],
            attention_mask=None,
            packed_seq_params=packed,
        )
        if not chunk.post_process:
            return hidden, None
        microbatch = to_device(microbatch, self.device)
        results = head(chunk, hidden, local.rows, local.targets)
        outputs = tuple(self._per_token(x, local) for x in results)
        return outputs[0], lambda *_, **__: finish(outputs, microbatch)

    def _per_token(self, x: Tensor, local: LocalTokens) -> Tensor:
        """Copy the results of this rank's rows, [r], to the tokens of the microbatch, [t].

        The result is the same on all context-parallel ranks; it is 0 for a token that has no row.
        """
        if self.cp_group.size() > 1:
            x = gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=False, group=self.cp_group
            )
        return torch.cat((x, x.new_zeros(1))).index_select(0, local.result_index)

    def from_last_stage(self, tensor: Tensor) -> None:
        """Overwrite `tensor` on all pipeline stages with its content on the last stage."""
        if self.pp_group.size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(tensor, last, group=self.pp_group)

    def share_from_last_stage(self, value: dict[str, float] | None) -> dict[str, float]:
        """Return, on all pipeline stages, the `value` of the last stage; others pass None."""
        if self.pp_group.size() == 1:
            assert value is not None
            return value
        shared = [value]
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(shared, last, group=self.pp_group, device=self.device)
        assert shared[0] is not None
        return shared[0]


def is_filler(microbatch: Microbatch) -> bool:
    """Return whether the microbatch only makes up the number of microbatches."""
    return not len(microbatch.token_index)


def _filler() -> Microbatch:
    one = torch.zeros(1, dtype=torch.int64)
    return Microbatch(
        tokens=one,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        position_ids=one,
        token_index=torch.zeros(0, dtype=torch.int64),
        scored=torch.zeros(1, dtype=torch.bool),
        trie=build_trie(np.ones(1, np.int64), np.zeros(1, np.int64), unshared(1), 1),
    )


class TrainableModel(ParallelModel):
    """A ParallelModel with gradients, optimizer and schedule."""

    def __init__(self, config: TrainerConfig, model_path: str | Path, seed: int):
        super().__init__(config, model_path, seed)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded(config)
        )
        self.ddps = [
            DistributedDataParallel(config=chunk.config, ddp_config=ddp_config, module=chunk)
            for chunk in self.chunks
        ]
        self.optimizer = build_optimizer(config, self.hf_config, self.dtype, self.ddps)
        self.scheduler = build_scheduler(config, self.optimizer)

    def step(
        self,
        microbatches: Sequence[Microbatch],
        head: Head,
        loss_fn: LossFn,
        lr_factor: float = 1.0,
    ) -> dict[str, float]:
        """Run one optimizer step on the sum of the losses, without rescaling it.

        The sum is over microbatches and data-parallel ranks. The schedule advances even when the
        step is skipped: update k, counted from 1, uses its k-th learning rate.

        `loss_fn` is called on the last pipeline stage, on all context- and tensor-parallel ranks
        alike, with whole microbatches. Its scalars have the same names for every microbatch on
        every rank; `*_max` are reduced to their maximum. `lr_factor` multiplies the learning rate
        of this step only.

        Returns, on every rank, the reduced scalars and what `apply_gradients` does. Raises
        ValueError without a microbatch.
        """
        if not microbatches:
            raise ValueError("an update needs at least one microbatch on every data-parallel rank")
        for ddp in self.ddps:
            ddp.train()
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        no_tokens = torch.zeros((), dtype=torch.int)

        def finish(outputs: tuple[Tensor, ...], microbatch: Microbatch):
            if is_filler(microbatch):
                return torch.stack(outputs).sum() * 0.0, no_tokens, {}
            share, scalars = loss_fn(*outputs, microbatch)
            return share, no_tokens, {**scalars, "loss": share.detach()}

        collected = self.run(self.ddps, microbatches, head, finish, forward_only=False)
        finalize_model_grads([*self.ddps])
        scalars = [one for one in collected if one]  # fillers have none
        metrics = self.share_from_last_stage(self._reduce(scalars) if collected else None)
        self.scheduler.step(1)
        return metrics | apply_gradients(
            self.optimizer, self.config.clip_grad, metrics["loss"], lr_factor
        )

    def offload(self) -> None:
        """Move the moments to host memory and free the gradient buffers, until `onload`.

        This frees 12 of the 18 bytes that a bfloat16 parameter takes with Adam, unsharded.
        Master weights stay, because in float32 they are the model's own.
        """
        cuda = torch.cuda.is_available()
        move_moments(self.optimizer, torch.device("cpu"))
        for ddp in self.ddps:  # synchronizing also ends the copies to host memory
            ddp.offload_grad_buffers(synchronize=cuda, empty_cache=cuda)

    def onload(self) -> None:
        """Undo `offload`; the gradients are zero."""
        for ddp in self.ddps:
            ddp.restore_grad_buffers(synchronize=torch.cuda.is_available())
        move_moments(self.optimizer, self.device)

    def _reduce(self, scalars: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum the scalars over microbatches and data-parallel ranks; `*_max`: their maximum."""
        names = sorted(scalars[0], key=lambda name: name.endswith("_max"))
        sums = sum(not name.endswith("_max") for name in names)
        values = torch.stack(
            [torch.stack([one[name].double() for name in names]) for one in scalars]
        )
        total, peak = values[:, :sums].sum(0), values[:, sums:].amax(0)
        dist.all_reduce(total, group=self.dp_group)
        if len(peak):
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.dp_group)
        return dict(zip(names, total.tolist() + peak.tolist()))


class Policy(TrainableModel):
    """The trained policy on this rank.

    routing_replay: whether its routers follow the routes of a batch (experts.py).
    """

    def __init__(
        self, config: TrainerConfig, model_path: str | Path, seed: int, routing_replay: bool = False
    ):
        super().__init__(config, model_path, seed)
        self.replays_routes = routing_replay
        if routing_replay:
            for chunk in self.chunks:
                chunk.replays = install_replay(chunk, self.device)
        self.weights = WeightStream(self.chunks, self.hf_config)
        lora = config.lora.rank > 0
        self.adapters = AdapterStream(self.chunks, self.hf_config) if lora else None

    def logprobs(self, microbatches: Sequence[Microbatch], temperature: float = 1.0) -> Tensor:
        """Compute the log-probs of all tokens of a flat batch: float32 [T], on every rank.

        The microbatches partition the batch.
        """
        return self.outputs(microbatches, self.language_head(temperature))[0]

    def logprobs_and_entropies(
        self, microbatches: Sequence[Microbatch], temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probs and the entropies in nats: float32 [T] each; see `logprobs`."""
        logprobs, entropies = self.outputs(microbatches, self.language_head(temperature), num=2)
        return logprobs, entropies

    def update(
        self,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn,
        temperature: float = 1.0,
        lr_factor: float = 1.0,
    ) -> dict[str, float]:
        """Run one optimizer step on the sum of `loss_fn`; see `TrainableModel.step`."""
        return self.step(microbatches, self.language_head(temperature), loss_fn, lr_factor)

    def export_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face checkpoint. It is complete when the call returns on any rank."""
        buckets = self.weights.buckets(SHARD_BYTES)
        if dist.get_rank() == 0:
            export_hf(buckets, self.source, Path(folder), self.dtype)
        else:
            for _ in buckets:
                pass
        dist.barrier()


class Critic(TrainableModel):
    """A value model from the policy's folder, with a TrainerConfig of its own.

    A scalar value layer, zero at first, stands in place of the output layer. Entry i of the values
    is the value of the state before token i, as the module says.
    """

    with_values = True

    def values(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Compute the values of all tokens of a flat batch: float32 [T], on every rank."""
        return self.outputs(microbatches, value_head)[0]

    def update(self, microbatches: Sequence[Microbatch], loss_fn: LossFn) -> dict[str, float]:
        """Run one optimizer step on the sum of `loss_fn` over the microbatches."""
        return self.step(microbatches, value_head, loss_fn)
