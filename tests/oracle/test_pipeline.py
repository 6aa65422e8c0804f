"""pipeline-parallel against torch.distributed.pipelining on real processes: each rank's bytes at start, peak and end."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import memir
from memir.analysis.liveness import timeline
from memir.ir.verify import verify
from memir.passes.data_parallel import DataParallel
from memir.passes.pipeline_parallel import PipelineParallel
from memir.runtime.measure import Measured
from tests.pipeline_rank import Case

ROOT = Path(__file__).parents[2]
SCALARS = 256  # bytes: Python numbers in operators, and what a generator's mask adds

LLAMA = ("examples/llama.py:small", {"n_layers": "4", "dim": "64"})
GPT = ("examples/gpt.py", {"n_embd": "64", "n_layer": "4", "n_head": "4", "vocab_size": "512", "block_size": "128"})
HF_LLAMA = (
    "llama-3.2-1b",
    {
        "hidden_size": "64",
        "intermediate_size": "128",
        "num_hidden_layers": "4",
        "num_attention_heads": "4",
        "num_key_value_heads": "2",
        "head_dim": "16",
        "vocab_size": "512",
        "tie_word_embeddings": "false",
    },
)
GPT2 = ("gpt2", {"n_embd": "64", "n_layer": "4", "n_head": "4", "vocab_size": "512", "n_positions": "128"})
CASES = {
    "llama gpipe": Case(*LLAMA, (2,), "gpipe"),
    "llama 1f1b, outputs not returned": Case(*LLAMA, (3,), "1f1b", outputs=False),
    "llama interleaved": Case(*LLAMA, (1, 2, 3), "interleaved-1f1b"),
    "llama 1f1b on 4": Case(LLAMA[0], {"n_layers": "6", "dim": "64"}, (1, 3, 5), "1f1b", degree=4, microbatches=6),
    "llama 1f1b, checkpointed": Case(*LLAMA, (2,), "1f1b", recipe={"checkpoint": "full"}),
    "Hugging Face's llama 1f1b": Case(*HF_LLAMA, (2,), "1f1b"),
    "gpt 1f1b, tied": Case(*GPT, (2,), "1f1b"),
    "gpt interleaved, tied": Case(*GPT, (1, 2, 3), "interleaved-1f1b", microbatches=6),
    "llama zero-bubble": Case(*LLAMA, (1, 2, 3), "zero-bubble"),
    "Hugging Face's llama zero-bubble": Case(*HF_LLAMA, (1, 2, 3), "zero-bubble"),
    "gpt zero-bubble, tied": Case(*GPT, (1, 2, 3), "zero-bubble", microbatches=2, outputs=False),
    "llama zbv": Case(*LLAMA, (1, 2, 3), "zbv"),
    "Hugging Face's llama zbv": Case(*HF_LLAMA, (1, 2, 3), "zbv", microbatches=2, outputs=False),
    "llama 1f1b, two copies": Case(*LLAMA, (2,), "1f1b", copies=2),
    "gpt-2 gpipe, tied": Case(*GPT2, (2,), "gpipe", microbatches=3),
}


def real(case: Case, folder: Path) -> list[Measured]:
    (folder / "case").write_bytes(pickle.dumps(case))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "pipeline_rank.py"), str(rank), str(folder)],
            cwd=ROOT,
            env=env,
            stderr=subprocess.PIPE,
        )
        for rank in range(case.ranks)
    ]
    try:
        logs = [child.communicate(timeout=600)[1].decode(errors="replace") for child in ranks]
    finally:
        for child in ranks:
            child.kill()
    assert all(child.returncode == 0 for child in ranks), "\n".join(log[-1500:] for log in logs)
    return [pickle.loads((folder / f"measured{rank}").read_bytes()) for rank in range(case.ranks)]


@pytest.mark.parametrize("name", CASES)
def test_every_rank(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.chdir(ROOT)
    traced = memir.trace(case.target, case.full_recipe(), batch=case.batch, seq=case.seq, sets=case.sets)
    for rank, measured in enumerate(real(case, tmp_path)):
        program = PipelineParallel(
            degree=case.degree,
            stage=rank % case.degree,
            schedule=case.schedule,  # type: ignore[arg-type]
            microbatches=case.microbatches,
            at=case.cuts,
            tied="error" if case.schedule == "zbv" else "copy",
            outputs=case.outputs,
            gloo=True,
        ).run(traced.program)
        program = DataParallel(degree=case.copies).run(program)
        verify(program)
        numbers = timeline(program).evaluate({"B": case.batch, "S": case.seq})
        assert (numbers.start, numbers.after[-1]) == (measured.at_start, measured.at_end), rank
        assert abs(numbers.peak - measured.peak) <= SCALARS, rank
