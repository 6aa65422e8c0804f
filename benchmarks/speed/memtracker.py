"""PyTorch's own way to the same answer: `torch.distributed._tools.mem_tracker.MemTracker` under FakeTensorMode.

`python -m benchmarks.speed.memtracker llama-3.1-8b` builds the preset's model on fake tensors in bf16 and runs training steps
with AdamW (foreach) at B=1, S=2048, which are memir's defaults. Two steps, as PyTorch's own tests of it have them
(test/distributed/_tools/test_mem_tracker.py): the first one makes the optimizer's state, so only the second one is that of a
training that runs. The fake tensors are on the CPU, since those on CUDA need a PyTorch that is built for it. Prints one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from memir.frontend import presets

BATCH, SEQ, STEPS = 1, 2048, 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.memtracker", description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--layers", type=int, help="another number of layers, to try it")
    options = parser.parse_args()
    preset = presets.get(options.preset)
    if preset is None:
        parser.error(f"no preset {options.preset}")
    fields = {**preset.config, **({"num_hidden_layers": options.layers} if options.layers else {})}
    config = AutoConfig.for_model(**fields)
    seconds = []
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, ids)
        with tracker:
            for number in range(STEPS):
                start = time.perf_counter()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if number == 0:
                    tracker.reset_mod_stats()
                seconds.append(round(time.perf_counter() - start, 2))
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    print(json.dumps({"peak_bytes": peak["Total"], "step_seconds": seconds}))


if __name__ == "__main__":
    main()
