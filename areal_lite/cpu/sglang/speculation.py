"""Speculation without a draft model: several tokens of an answer in one pass, none changed.

docs/servers.md (Drafts from earlier answers) says how. SGLang's own sampler samples a token at
every row, as it would at that position without a draft: same parameters, same seed, same log-prob.
A row after the first token that differs from the draft has seen a wrong token, and is dropped.

Requests have drafts of different lengths, so a step runs as an extension of each request. Slots
of the KV cache behind the last right token are written again in the next step.
"""

import dataclasses
import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from torch import Tensor

from areal_lite.cpu.drafts import LONGEST, Drafted, History, Pace, PromptHistory, StoredAnswers
from areal_lite.sglang_plugins import ENV_NAME, ENV_STORE

NAME = "HISTORY"
_ROWS = 8  # of a request in a step: its next token and seven drafted ones
_GROUPS = 4096  # whose prompts are remembered
# Tokens of answers to learn from the run's store: at the start (a second), and at each look.
_AT_START, _AT_ONCE = 2**16, 2**11
_LOOK_EVERY_S = 1.0


def register() -> None:
    """Make the algorithm known to SGLang."""
    SpeculativeAlgorithm.register(NAME, spec_class=HistoryAlgorithm)(lambda _: HistoryWorker)
    target = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"
    HookRegistry.register(target, _assign_slots, HookType.REPLACE)


class HistoryAlgorithm(CustomSpecAlgo):
    """The algorithm, with the methods that SGLang calls and its base class lacks."""

    def _no(self) -> bool:  # to what SGLang asks of algorithms with a draft model
        return False

    has_draft_kv = carries_draft_hidden_states = need_topk = _no

    def handle_server_args(self, server_args: Any) -> None:
        server_args.speculative_num_draft_tokens = _ROWS

    def create_future_map(self, *args: Any, **named: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        device, *rest = args
        return FutureMap(device, cast(Any, self), *rest, **named)


class _Rows(SpecInput):
    """The rows of one step. Between steps it carries nothing: requests have all their tokens."""

    draft_token_num = _ROWS  # at most

    def __init__(self, positions: Tensor | None = None) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions

    def filter_batch(self, *_: Any, **__: Any) -> None:
        pass

    def merge_batch(self, _: SpecInput) -> None:
        pass


@dataclasses.dataclass
class _Answer:
    """A request of the last step, and how many of its tokens the history of its prompt has."""

    req: Req
    history: PromptHistory
    noted: int
    ends: set[int]  # the tokens that end it


class HistoryWorker(BaseSpecWorker):
    """Runs the steps of a server: prefills as SGLang does, decode steps with drafts."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self._history, self._pace = History(), Pace()
        self._prompts: OrderedDict[str, int] = OrderedDict()  # by group, as hashes
        self._answers: list[_Answer] = []
        self._stored: StoredAnswers | None = None
        if store := os.environ.get(ENV_STORE):
            vocabulary = self.model_runner.model_config.vocab_size
            self._stored = StoredAnswers(Path(store), os.environ[ENV_NAME], vocabulary)
            self._learn(_AT_START)

    def _learn(self, most: int) -> None:
        """Note what the run's store has from elsewhere, the newest `most` tokens."""
        assert self._stored is not None
        for tokens, sampled in self._stored.new(most):
            self._history.learn(tokens, sampled)
        self._look_at = time.monotonic() + _LOOK_EVERY_S

    @property
    def draft_worker(self) -> None:
        return None

    def alloc_memory_pool(self, *_: Any, **__: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            self._target_worker.get_memory_pool()
        )

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run a prefill, or a decode step in which each request gets one token or more."""
        if batch.forward_mode.is_decode():
            return self._decode(batch)
        result = self._target_worker.forward_batch_generation(batch)
        result.accept_lens = torch.ones(len(batch.reqs), dtype=torch.int32)
        result.new_seq_lens = batch.seq_lens.clone()
        result.next_draft_input = _Rows()
        result.speculative_num_draft_tokens = _ROWS
        return result

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        started = time.process_time()  # other load of the machine says nothing about rows
        drafts = self._drafts(batch)
        counts = torch.tensor([1 + len(draft) for draft in drafts])
        rows = [[req.output_ids[-1], *draft] for req, draft in zip(batch.reqs, drafts)]
        forward = self._forward_batch(batch, torch.tensor(sum(rows, [])), counts)
        result = self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True
        )
        sampled = self._sample(batch, result.logits_output, forward.positions, counts)
        places = _places(counts)
        right = sampled[places[:, :-1]] == forward.input_ids[places[:, 1:]]
        right &= torch.arange(1, _ROWS) < counts[:, None]
        accepted = 1 + right.int().cumprod(-1).sum(-1)
        _by_request(result.logits_output, places, batch.return_logprob)
        self._pace.note(len(sampled), time.process_time() - started)
        result.next_token_ids = sampled[places].flatten()
        result.accept_lens = accepted.int()
        result.new_seq_lens = batch.seq_lens + accepted
        result.next_draft_input = _Rows()
        result.speculative_num_draft_tokens = _ROWS
        return result

    def _drafts(self, batch: ScheduleBatch) -> list[list[int]]:
        """Note the new tokens of every request, and return a draft for each."""
        for answer in self._answers:
            _note(answer)  # the finished ones, too
        if self._stored and time.monotonic() > self._look_at:
            self._learn(_AT_ONCE)
        self._history.trim()
        # By object: a client may use an id again.
        known = {id(answer.req): answer for answer in self._answers}
        self._answers = [known.get(id(req)) or self._begin(req) for req in batch.reqs]
        if _needs_each_token(batch):
            return [[]] * len(batch.reqs)
        drafts = [_draft(answer) for answer in self._answers]
        floor = self._pace.floor(len(drafts), [row.chance for draft in drafts for row in draft])
        return [[row.token for row in draft if row.chance >= floor] for draft in drafts]

    def _begin(self, req: Req) -> _Answer:
        """Find the history of a request: that of the first prompt of its group.

        Ids of requests are RUN-GROUP-SAMPLE-TURN-REQUEST. A request that continues an answer, or
        an agent, begins with more than the prompt.
        """
        group = req.rid.rsplit("-", 3)[0]
        prompt = self._prompts.setdefault(group, hash(tuple(req.origin_input_ids)))
        if len(self._prompts) > _GROUPS:
            self._prompts.popitem(last=False)
        # A prefill samples one token, also after a retraction.
        answer = _Answer(req, self._history.of(prompt), len(req.output_ids) - 1, _ends(req))
        answer.history.begin(req.origin_input_ids)
        _note(answer)
        return answer

    def _forward_batch(self, batch: ScheduleBatch, tokens: Tensor, counts: Tensor) -> ForwardBatch:
        """Return the batch of a step: request r is extended by `counts[r]` of `tokens`."""
        before = batch.seq_lens.repeat_interleave(counts)
        firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        positions = before + torch.arange(len(tokens)) - firsts
        requests = batch.req_pool_indices.repeat_interleave(counts)
        batch.forward_mode, batch.input_ids = ForwardMode.TARGET_VERIFY, tokens
        batch.out_cache_loc = batch.req_to_token_pool.req_to_token[requests, positions].long()
        batch.spec_info = _Rows(positions)
        forward = ForwardBatch.init_new(
            batch, self.model_runner, return_hidden_states_before_norm=False
        )
        forward.seq_lens = batch.seq_lens + counts
        forward.seq_lens_cpu, forward.seq_lens_sum = forward.seq_lens, int(forward.seq_lens.sum())
        forward.extend_prefix_lens, forward.extend_seq_lens = batch.seq_lens, counts
        return forward

    def _sample(
        self, batch: ScheduleBatch, logits: LogitsProcessorOutput, positions: Tensor, counts: Tensor
    ) -> Tensor:
        """Sample a token at each row, int64 [rows], and set the log-probs of `logits`."""
        info = batch.sampling_info
        if len(positions) > len(counts):
            info = _repeated(info, counts)
        info.update_regex_vocab_mask()
        assert logits.next_token_logits is not None
        info.apply_logits_bias(logits.next_token_logits)
        repeats = counts.tolist()
        return self.model_runner.sampler(
            logits,
            info,
            batch.return_logprob,
            _repeat(batch.top_logprobs_nums, repeats),
            _repeat(batch.token_ids_logprobs, repeats),
            positions,
        ).long()


def _assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Set the slots of request r from `start_offset[r]` to `end_offset[r]` to the next free ones.

    SGLang has this kernel in Triton only.
    """
    done = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    for request, start, end in rows:
        req_to_token[request, start:end] = out_cache_loc[done : done + end - start]
        done += end - start


def _needs_each_token(batch: ScheduleBatch) -> bool:
    """Return whether what a request may say next depends on its last token: it gets no draft."""
    info = batch.sampling_info
    penalties = info.acc_additive_penalties, info.acc_scaling_penalties
    return (
        batch.has_grammar
        or info.has_custom_logit_processor
        or any(penalty is not None for penalty in penalties)
    )


def _note(answer: _Answer) -> None:
    """Note the tokens that a request has sampled since the last step."""
    new = len(answer.req.output_ids) - answer.noted
    tail = _tail(answer.req, new + LONGEST)
    for at in range(len(tail) - new, len(tail)):
        answer.history.note(tail[max(at - LONGEST, 0) : at], tail[at])
    answer.noted += new


def _ends(req: Req) -> set[int]:
    """Return the tokens that end a request, as SGLang's `Req` finds them."""
    if req.sampling_params.ignore_eos:
        return set()
    ends = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    tokenizer: Any = req.tokenizer
    if tokenizer is not None:
        ends |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
    return ends


def _draft(answer: _Answer) -> list[Drafted]:
    most = answer.req.sampling_params.max_new_tokens
    assert most is not None  # SGLang sets it
    left = most - len(answer.req.output_ids)
    return answer.history.draft(_tail(answer.req, LONGEST), min(_ROWS, left) - 1, answer.ends)


def _tail(req: Req, length: int) -> list[int]:
    """Return the last tokens of prompt and answer, at most `length`."""
    answer = req.output_ids[-length:]
    missing = length - len(answer)
    return [*(req.origin_input_ids[-missing:] if missing else ()), *answer]


def _places(counts: Tensor) -> Tensor:
    """Return the rows of each request, int64 [requests, _ROWS], its last one again at the end."""
    ends = counts.cumsum(0)[:, None]
    return torch.minimum(ends - counts[:, None] + torch.arange(_ROWS), ends - 1)


def _repeated(info: SamplingBatchInfo, counts: Tensor) -> SamplingBatchInfo:
    names = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")
    found = {name: getattr(info, name) for name in names}
    repeated = {n: v.repeat_interleave(counts, 0) for n, v in found.items() if v is not None}
    return dataclasses.replace(info, **repeated)


def _repeat(values: list[Any] | None, counts: list[int]) -> list[Any] | None:
    if values is None:
        return None
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


def _by_request(logits: LogitsProcessorOutput, places: Tensor, with_logprobs: bool) -> None:
    """Order the log-probs of rows as SGLang reads them: `_ROWS` for each request."""
    if not with_logprobs:
        return
    assert logits.next_token_logprobs is not None
    logits.next_token_logprobs = logits.next_token_logprobs[places]
    flat = places.flatten().tolist()
    for name in (
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
        "next_token_token_ids_logprobs_idx",
    ):
        if rows := getattr(logits, name):
            setattr(logits, name, [rows[row] for row in flat])
