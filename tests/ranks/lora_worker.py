"""One rank of the adapter tests: `lora_worker.py JOB`, with torchrun's environment.

JOB is a JSON file of cases (see test_lora.py), which run one after another. Rank 0 writes the
results of every rank to results.pt in the job's folder `out`.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from areal_lite.config import LoraConfig, TrainerConfig
from areal_lite.megatron.lora import added_share, is_adapter, without_adapters
from areal_lite.megatron.parallel import init_distributed, shutdown
from areal_lite.megatron.policy import Policy
from tests.ranks.engine_worker import SETTINGS, TEMPERATURE, load, save
from tests.ranks.layout_worker import RESUMED_UPDATES, Case

UPDATES = 10
BUCKET_BYTES = 3000
SGD = {"optimizer": "sgd", "lr": 1.0, "clip_grad": 0.0, "weight_decay": 0.0}


class AdapterCase(Case):
    """One layout with adapters in one model."""

    def trained(self) -> dict:
        """Train, save, go on training, and go on once more from the checkpoint."""
        engine = Policy(self.config, self.path, seed=1)
        save(engine, self.out / "initial")
        base = {n: p.clone() for n, p in engine.model.named_parameters() if not is_adapter(n)}
        results = {"before": engine.logprobs(self.microbatches, TEMPERATURE)}
        results["history"] = [self.update(engine, step) for step in range(UPDATES)]
        results["after"] = engine.logprobs(self.microbatches, TEMPERATURE)
        with without_adapters(engine.chunks):
            results["without"] = engine.logprobs(self.microbatches, TEMPERATURE)
        parameters = dict(engine.model.named_parameters())
        results["base_is_same"] = all(torch.equal(parameters[n], x) for n, x in base.items())
        results["base_has_gradients"] = any(
            p.grad is not None or hasattr(p, "main_grad")
            for n, p in parameters.items()
            if not is_adapter(n)
        )
        results["adapters"] = sum(p.numel() for n, p in parameters.items() if is_adapter(n))
        buffers = [buffer for ddp in engine.ddps for buffer in ddp.buffers]
        results["gradients"] = sum(buffer.numel_unpadded for buffer in buffers)
        results["share"] = added_share(engine.chunks)
        engine.export_hf(self.out / "export")
        save(engine, self.out / "checkpoint")
        assert engine.adapters is not None
        results["pushed"] = [
            {name: tensor.clone() for name, tensor in bucket}
            for bucket in engine.adapters.buckets(BUCKET_BYTES)
        ]
        results["further"] = self.further(engine)
        return results

    def further(self, engine: Policy) -> list[dict[str, float]]:
        return [self.update(engine, UPDATES + step) for step in range(RESUMED_UPDATES)]

    def resumed(self, checkpoint: str) -> dict:
        engine = Policy(self.config, self.path, seed=2)  # another seed: all comes from the file
        load(engine, Path(checkpoint))
        resumed = engine.logprobs(self.microbatches, TEMPERATURE)
        return {"resumed": resumed, "resumed_further": self.further(engine)}

    def refused(self, checkpoint: str) -> str:
        """Load a checkpoint of other adapters; return the error."""
        other = replace(self.config, lora=replace(self.config.lora, alpha=1.0))
        try:
            load(Policy(other, self.path, seed=1), Path(checkpoint))
        except ValueError as error:
            return str(error)
        return "not refused"

    def descended(self) -> None:
        """Write what gradient descent without Adam makes of the adapters."""
        engine = Policy(replace(self.config, **SGD), self.path, seed=1)
        for step in range(3):
            self.update(engine, step)
        save(engine, self.out / "descended")


def run(case: dict, out: Path) -> dict:
    lora = {"lora": LoraConfig(**case["lora"])}
    steps = {"steps": UPDATES + RESUMED_UPDATES}
    config = TrainerConfig(**SETTINGS | steps | case["layout"] | lora)
    init_distributed(config, seed=1)
    runs = AdapterCase(config, case["model"], out / case["name"])
    results = runs.trained() | runs.resumed(case["resume"])
    results["refused"] = runs.refused(case["resume"])
    runs.descended()
    if case["critic"]:
        results |= runs.critic()
    return results


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    out, collected = Path(job["out"]), {}
    for case in job["cases"]:
        os.environ["MASTER_PORT"] = str(case["port"])
        results = run(case, out)
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, results)
        collected[case["name"]] = everywhere
        if dist.get_rank() == 0:
            torch.save(collected, out / "results.pt")
        shutdown()


if __name__ == "__main__":
    main()
