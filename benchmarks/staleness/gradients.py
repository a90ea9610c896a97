"""Measure how well the gradient of a stale batch points where that of fresh data does.

    python -m benchmarks.staleness.gradients --seed 1 --steps 48 112

A run at a lag of 16 (arm `moment` of the study `cures`) leaves checkpoints. At each of the steps,
its policy of 16 steps before samples batches, and the present policy as many. Each batch has one
gradient for each correction, at the present weights, with GRPO's advantages. No clip acts there.

With f the mean gradient of fresh batches and g that of a stale batch, the *alignment* of a batch is
<g, f> / sqrt(E[|g|^2] |f|^2), which falls with noise, and the *direction* is the cosine of E[g] and
f, which is below 1 by bias alone. Products of two batches that are not the same estimate both, so
that noise does not count as signal. Errors are from a jackknife over eighths of the batches.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_lite.algo.advantages import grpo
from areal_lite.algo.correction import Correction, behavior_weight
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.tools.export import export_step
from areal_lite_quickstart import addition
from areal_lite_quickstart.addition import addition_reward
from benchmarks.launch import ROOT, areal_lite
from benchmarks.staleness import records
from benchmarks.staleness.studies import Cell

LAG, GROUPS, GROUP_SIZE, EVERY = 16, 8, 16, 8
CORRECTIONS = {
    "no weight": Correction("off"),
    "tokens, up to 5": Correction("cap", 5.0),
    "geometric mean, up to 2": Correction("cap", 2.0, level="geometric"),
    "trajectories, up to 1": Correction("cap", 1.0, level="product"),
    "trajectories, up to 2": Correction("cap", 2.0, level="product"),
    "trajectories, up to 8": Correction("cap", 8.0, level="product"),
}


@dataclass(frozen=True)
class Batch:
    """Sampled trajectories, padded on the right: [n, l], their targets [n, l - 1], rewards [n]."""

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    rewards: Tensor
    groups: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, nargs="+", default=[48, 112])
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "staleness")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "staleness")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run_dir = train(args.work, args.seed)
    for step in args.steps:
        old, new = (exported(run_dir, s) for s in (step - LAG, step))
        row = {"seed": args.seed, "step": step, "batches": args.batches}
        row |= compare(old, new, args.batches, seed=step)
        with open(args.out / "gradients.jsonl", "a") as file:
            print(json.dumps(row), file=file)
        print(json.dumps(row), flush=True)


def train(work: Path, seed: int) -> Path:
    """Return the directory of a run with its checkpoints. Make it if needed."""
    run_dir = work / f"gradients-{seed}"
    if not (run_dir / "summary.json").exists():
        cell = Cell("moment", LAG, 1e-4, seed, steps=220)
        own = [f"run_dir={run_dir}", f"model={records.warm(work, seed)}"]
        kept = [f"trainer.save_every={EVERY}", "trainer.keep_checkpoints=0"]
        settings = [s for s in cell.settings if not s.startswith("trainer.save_every=")]
        areal_lite(work / f"gradients-{seed}.log", "train", *own, *settings, *kept)
    return run_dir


def exported(run_dir: Path, step: int) -> Path:
    """Return the folder of a step's weights. Export them if needed."""
    out = run_dir / "exports" / f"step-{step}"
    return out if out.exists() else export_step(run_dir, step, out)


def compare(old_path: Path, new_path: Path, batches: int, *, seed: int) -> dict:
    """Return by correction the alignment of a batch and its direction, each with its error."""
    torch.manual_seed(seed)
    old, new = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (old_path, new_path))
    tokenizer = Tokenizer(new_path)
    gradients: dict[str, list[Tensor]] = {}
    sizes = []
    for number in range(batches):
        for model, fresh in ((old, False), (new, True)):
            first = (2 * number + fresh) * GROUPS
            batch = sample(model, tokenizer, first, seed)
            with torch.no_grad():
                behavior = logprobs(model, batch)
            logps = logprobs(new, batch)
            chosen = {"fresh": Correction("off")} if fresh else CORRECTIONS
            for name, correction in chosen.items():
                loss = surrogate(batch, logps, behavior, correction)
                parts = torch.autograd.grad(loss, list(new.parameters()), retain_graph=True)
                flat = torch.cat([part.reshape(-1) for part in parts])
                gradients.setdefault(name, []).append(flat)
            if not fresh:
                sizes.append(sample_size(batch, logps.detach(), behavior))
    stacked = {name: torch.stack(own) for name, own in gradients.items()}
    found = {name: measured(own, stacked["fresh"], name) for name, own in stacked.items()}
    return {"sample_size": sum(sizes) / len(sizes), **found}


@torch.no_grad()
def sample(model, tokenizer: Tokenizer, first: int, seed: int) -> Batch:
    """Sample GROUPS groups from problem `first` on. Prompts of equal length run together."""
    problems = [
        addition.make_problem("train", first + i, seed=1000 + seed, max_digits=3)
        for i in range(GROUPS)
    ]
    rows: list[tuple[list[int], int, float, int]] = []
    for digits in sorted({problem.digits for problem in problems}):
        own = [i for i, problem in enumerate(problems) if problem.digits == digits]
        prompts = torch.tensor([tokenizer.encode(addition.prompt(problems[i])) for i in own])
        prompts = prompts.repeat_interleave(GROUP_SIZE, 0)
        attention = torch.ones_like(prompts)
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        sampled = model.generate(
            prompts, attention_mask=attention, max_new_tokens=64, pad_token_id=0, **settings
        )
        begin, end = prompts.shape[1], model.config.eos_token_id
        for number, row in enumerate(sampled.tolist()):
            completion = row[begin:]
            if end in completion:
                completion = completion[: completion.index(end) + 1]
            group = own[number // GROUP_SIZE]
            text = tokenizer.decode([token for token in completion if token != end])
            reward = addition_reward(text, addition.answer(problems[group]))
            rows.append((row[:begin] + completion, begin, reward, group))
    return padded(rows)


def padded(rows: list[tuple[list[int], int, float, int]]) -> Batch:
    """Pad trajectories, each with the length of its prompt, its reward and its group."""
    length = max(len(tokens) for tokens, *_ in rows)
    lengths = torch.tensor([len(tokens) for tokens, *_ in rows])[:, None]
    begins = torch.tensor([begin for _, begin, *_ in rows])[:, None]
    places = torch.arange(length)[None]
    return Batch(
        tokens=torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, *_ in rows]),
        attention=(places < lengths).long(),
        mask=((places >= begins) & (places < lengths))[:, 1:],
        rewards=torch.tensor([reward for *_, reward, _ in rows]),
        groups=torch.tensor([group for *_, group in rows]),
    )


def logprobs(model, batch: Batch) -> Tensor:
    """Compute the log-prob of each target: [n, l - 1]."""
    logits = model(batch.tokens, attention_mask=batch.attention).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]


def surrogate(batch: Batch, logps: Tensor, behavior: Tensor, correction: Correction) -> Tensor:
    """Return what has the gradient of the loss at the proximal policy, where every ratio is 1."""
    mask = batch.mask
    ids = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    flat = torch.ones_like(ids, dtype=torch.bool)
    weight, _ = behavior_weight(
        logps[mask].detach(), behavior[mask], flat, sequence_ids=ids, **vars(correction)
    )
    advantages = grpo(batch.rewards, batch.groups)[ids]
    return (weight * advantages * logps[mask]).sum() / mask.sum()


def sample_size(batch: Batch, prox: Tensor, behavior: Tensor) -> float:
    """Return the effective sample size of whole trajectories, as a share of them."""
    weight = torch.where(batch.mask, prox - behavior, 0.0).sum(1).exp()
    return float(weight.sum() ** 2 / (weight**2).sum() / len(weight))


def measured(own: Tensor, fresh: Tensor, name: str) -> dict[str, list[float]]:
    """Return [value, error] of the alignment and the direction of gradients [batches, size]."""
    dot = {"gg": own @ own.T, "gf": own @ fresh.T, "ff": fresh @ fresh.T}
    every = torch.arange(len(own))
    values = _of(dot, every, name == "fresh")
    parts = torch.stack([_of(dot, every[every % 8 != part], name == "fresh") for part in range(8)])
    errors = ((parts - parts.mean(0)) ** 2).sum(0).mul(7 / 8).sqrt()
    pairs = zip(values.tolist(), errors.tolist())
    return {
        key: [round(value, 3), round(error, 3)]
        for key, (value, error) in zip(("alignment", "direction"), pairs)
    }


def _of(dot: dict[str, Tensor], use: Tensor, same: bool) -> Tensor:
    """Return alignment and direction from the products of the batches `use`: [2]."""
    gg, gf, ff = (dot[key][use][:, use] for key in ("gg", "gf", "ff"))

    def different(products: Tensor) -> Tensor:
        """Average the products of two batches that are not the same."""
        off = products.sum() - products.diagonal().sum()
        return off / (len(products) * (len(products) - 1))

    cross = different(gf) if same else gf.mean()
    signal = different(ff).clamp(min=1e-30)
    own = torch.stack([gg.diagonal().mean(), different(gg).clamp(min=1e-30)])
    return cross / (own * signal).sqrt()


if __name__ == "__main__":
    main()
