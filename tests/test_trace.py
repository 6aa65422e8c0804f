"""The tracer: what it records of a step, and that the same things are true of a model with other habits."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode

import memir
from memir.analysis.liveness import timeline
from memir.errors import InconclusiveError
from memir.ir.core import Kind, Program
from memir.ir.size import Size
from memir.ir.verify import verify
from memir.recipe import Lora, Recipe

CPU = Recipe(target="cpu", dtype="f32")
WIDTH, VOCABULARY = 24, 50


class Decoder(nn.Module):
    """An embedding, what `middle` does, and a head; targets give the loss."""

    def __init__(self, middle: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.middle = middle

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.middle is not None:
            x = self.middle(self, ids, x)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def traced(model: Any, recipe: Recipe = CPU, batch: int = 2, seq: int = 16) -> Any:
    return memir.trace(model, recipe, batch=batch, seq=seq)


def opcodes(program: Program, phase: str) -> list[str]:
    return [op.opcode for p, op in program.ops() if p.name == phase]


def test_a_step_is_in_steady_state_and_verifies() -> None:
    program = traced(Decoder()).program
    verify(program)
    assert [p.name for p in program.phases] == ["forward", "backward", "optimizer"]
    line = timeline(program).evaluate({"B": 2, "S": 16})
    assert line.start == line.after[-1]


def test_owners_of_what_lives_across_steps() -> None:
    program = traced(Decoder()).program
    kinds = {s.name: s.kind for s in program.storages if s.live_in}
    assert kinds["head.weight"] == Kind.PARAMETER
    assert kinds["head.weight.exp_avg"] == Kind.OPTIMIZER_STATE
    assert kinds["ids"] == Kind.INPUT
    gradients = {s.of: s for s in program.storages if s.kind == Kind.GRADIENT}
    assert gradients["head.weight"].nbytes == Size.of(WIDTH * VOCABULARY * 4)
    assert not gradients["head.weight"].live_out  # zero_grad is last


def test_gradients_live_across_steps_when_zero_grad_is_first() -> None:
    program = traced(Decoder(), Recipe(target="cpu", dtype="f32", zero_grad="first")).program
    verify(program)
    crossing = [s for s in program.storages if s.kind == Kind.GRADIENT]
    assert sum(s.live_in for s in crossing) == sum(s.live_out for s in crossing) == 8


def test_outputs_that_the_caller_keeps_live_through_the_next_forward() -> None:
    model = Decoder()
    kept, dropped = (traced(model, Recipe(target="cpu", dtype="f32", keep_outputs=keep)).program for keep in (True, False))
    held = [s for s in kept.storages if s.live_in and s.kind == Kind.ACTIVATION]
    assert [s.nbytes for s in held] == [Size.of(4)]  # the loss: this model returns nothing else
    assert not [s for s in dropped.storages if s.live_in and s.kind == Kind.ACTIVATION]


def test_every_operator_says_where_it_comes_from() -> None:
    program = traced(Decoder()).program
    forward = [op for p, op in program.ops() if p.name == "forward" and not op.opcode.startswith("memir.")]
    assert all("test_trace.py:" in op.source for op in forward)
    assert {op.path for op in forward} >= {"embedding", "layers.0", "layers.2", "head"}
    backward = [op for p, op in program.ops() if p.name == "backward" and op.opcode == "aten.mm"]
    assert {op.path for op in backward} == {"layers.0", "layers.1", "layers.2", "head"}
    assert all(op.forward_of is not None for op in backward)


def test_the_graph_is_a_graph_module_whose_nodes_carry_their_origin() -> None:
    result = traced(Decoder())
    assert isinstance(result.graph, torch.fx.GraphModule)
    calls = [n for n in result.fx_graph.nodes if n.op == "call_function" and n.target is torch.ops.aten.gelu.default]
    assert [(n.meta["phase"], n.meta["path"], n.meta["layer"]) for n in calls] == [("forward", "", None)] * 3
    assert all("test_trace.py:" in n.meta["source"] for n in calls)


def test_micro_batches_are_phases() -> None:
    program = traced(Decoder(), Recipe(target="cpu", dtype="f32", accumulate=2)).program
    verify(program)
    names = ["micro0.forward", "micro0.backward", "micro1.forward", "micro1.backward", "optimizer"]
    assert [p.name for p in program.phases] == names


def test_ties_stay_tied() -> None:
    model = Decoder()
    model.head.weight = model.embedding.weight
    result = traced(model)
    assert result.num_parameters == VOCABULARY * WIDTH + 3 * (WIDTH * WIDTH + WIDTH)
    assert len([s for s in result.program.storages if s.kind == Kind.GRADIENT]) == 7


def test_adapters_are_injected_and_only_they_train() -> None:
    recipe = Recipe(target="cpu", dtype="f32", lora=Lora(r=4, targets=("head",)))
    result = traced("tests/cases/small_gpt.py", recipe)
    assert result.num_trainable == 4 * (32 + 64)
    owners = {s.of for s in result.program.storages if s.kind == Kind.GRADIENT}
    assert owners == {"head.lora_A.default.weight", "head.lora_B.default.weight"}


# -- saves and drops ---------------------------------------------------------------------------------------------------


def test_what_autograd_keeps_is_on_the_operator_that_keeps_it() -> None:
    program = traced(Decoder()).program
    gelu = [op for _, op in program.ops() if op.opcode == "aten.gelu"]
    by_value = {v.name: v.storage for _, op in program.ops() for v in op.results}
    assert [by_value[op.operands[0]] in op.saves for op in gelu] == [True] * 3


def test_a_drop_is_where_python_lets_go_of_a_saved_tensor() -> None:
    def middle(_: nn.Module, __: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        doubled = x.exp()  # autograd keeps the result; Python's name for it goes at the end of this function
        y = doubled * 2
        y = y.sin()
        return y.cos()

    program = traced(Decoder(middle)).program
    forward = [op for p, op in program.ops() if p.name == "forward"]
    exp = next(op for op in forward if op.opcode == "aten.exp")
    storage = exp.results[0].storage
    assert storage in exp.saves
    dropping = [op.opcode for op in forward if storage in op.drops]
    assert dropping == ["aten.cos"]


def test_without_saves_the_forward_is_the_one_without_gradients() -> None:
    """What a real forward under no_grad holds, byte for byte, comes out of the training step's drops."""
    from memir.runtime.real import RealStep, measure_in_child

    target = "tests/cases/small_gpt.py"
    program = traced(target, CPU, batch=3, seq=40).program
    env = {"B": 3, "S": 40}
    nbytes = {s.name: s.nbytes.evaluate(env) for s in program.storages}
    resident = {s.name for s in program.storages if s.live_in}
    live, now, peak = set(resident), 0, 0
    for phase, op in program.ops():
        if phase.name != "forward":
            break
        for value in op.results:
            if value.storage not in live:
                live.add(value.storage)
                now += nbytes[value.storage]
        peak = max(peak, now + op.scratch.evaluate(env))
        for storage in {*op.frees, *op.drops} & live:
            live.discard(storage)
            now -= nbytes[storage]
    real = measure_in_child(RealStep(target, Recipe(target="cpu", dtype="f32", mode="forward"), 3, 40))
    assert peak == real.peak - real.at_start


# -- questions about values -----------------------------------------------------------------------------------------------


def test_a_question_about_positions_is_answered_as_real_data_would() -> None:
    def middle(_: nn.Module, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1])[None]
        if (torch.diff(positions, dim=-1) != 1).any():
            raise RuntimeError("positions are consecutive: this branch is never taken")
        return x * int(positions.max() >= 0)

    assert traced(Decoder(middle)).method == "symbolic"


def test_a_number_read_off_a_tensor_follows_the_symbols() -> None:
    def middle(_: nn.Module, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        length = int((torch.arange(ids.shape[1]) + 1).max())  # S, by way of a tensor
        return x + torch.zeros(length, WIDTH)

    result = traced(Decoder(middle))
    made = [s for s in result.program.storages if s.name.startswith("zeros")]
    assert [s.nbytes for s in made] == [Size.of("S") * WIDTH * 4]


def test_routing_is_balanced_and_said() -> None:
    def middle(model: Any, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        expert = flat[:, :4].topk(1).indices[:, 0]
        chosen = (expert == 2).nonzero()[:, 0]
        return x + model.layers[0](flat[chosen]).sum()

    result = traced(Decoder(middle), batch=4, seq=16)
    assert any("balanced load" in text for text in result.assumptions)
    picked = [op.results[0].shape[0] for _, op in result.program.ops() if op.opcode == "aten.nonzero"]
    assert [extent.evaluate({"B": 4, "S": 16}) for extent in picked] == [16]


def test_a_decision_by_weights_is_inconclusive_and_names_the_line() -> None:
    def middle(model: Any, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x if model.head.weight.sum() > 0 else -x

    with pytest.raises(InconclusiveError, match=r"(?s)unknown before it runs.*test_trace.py:\d+.*head.weight"):
        traced(Decoder(middle))


# -- symbols ---------------------------------------------------------------------------------------------------------------


def test_a_limit_in_the_code_becomes_the_domain() -> None:
    def middle(_: nn.Module, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert ids.shape[1] <= 77, "too long"
        return x

    assert "S <= 77" in traced(Decoder(middle)).program.domain


def test_a_specialized_symbol_falls_back_to_a_verified_fit() -> None:
    def middle(_: nn.Module, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(int(ids.shape[1]), WIDTH)  # int() makes a number of S

    result = traced(Decoder(middle))
    assert result.method == "fit"
    assert any("test_trace.py" in text and "S did not stay symbolic" in text for text in result.assumptions)
    symbolic = traced(Decoder(lambda _, ids, x: x + torch.zeros(ids.shape[1], WIDTH)))
    for batch, seq in ((2, 16), (5, 23)):
        assert memir.peak(result.program, B=batch, S=seq) == memir.peak(symbolic.program, B=batch, S=seq)


def test_operators_that_change_with_a_size_are_inconclusive() -> None:
    def middle(_: nn.Module, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(ids.shape[1]) // 7):
            x = x + 1
        return x

    result = traced(Decoder(middle))
    assert any("no formula in B and S" in text for text in result.inconclusive)
    assert result.program.domain == ("B == 2", "S == 16")


def test_a_loop_over_tokens_is_collapsed_and_exact_at_lengths_that_were_not_traced() -> None:
    from memir.runtime.real import RealStep, measure_in_child

    target = "tests/cases/token_loop.py"
    result = traced(target, CPU, batch=3, seq=40)
    verify(result.program)
    assert result.method == "fit"
    assert any("loop over tokens" in text for text in result.assumptions)
    real = measure_in_child(RealStep(target, CPU, 3, 40))
    assert abs(memir.peak(result.program, B=3, S=40) - real.peak) <= 1024  # Python numbers: a few bytes a token


def test_one_sequence_runs_its_own_operators_where_pytorch_does_so() -> None:
    def middle(_: nn.Module, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + x[:, 1:].flatten(0, 1).sum()  # a copy, but a view where B is 1

    one = traced(Decoder(middle), batch=1)
    assert one.program.domain[0] == "B == 1"
    assert one.general is not None
    assert "aten.clone" in opcodes(one.general, "forward")
    assert "aten.clone" not in opcodes(one.program, "forward")
    same = traced(Decoder(), batch=1)
    assert same.general is None
    assert "B >= 1" in same.program.domain


def test_a_sequence_as_long_as_a_table_is_in_the_domain() -> None:
    class Masked(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(32, 32))

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            length = ids.shape[1]
            _ = self.mask[:length, :length].contiguous()  # a copy, but not where S is 32
            return super().forward(ids, targets)

    whole, part = traced(Masked(), seq=32), traced(Masked(), seq=24)
    assert "aten.clone" not in opcodes(whole.program, "forward")
    assert "aten.clone" in opcodes(part.program, "forward")
    assert memir.peak(whole.program, B=2, S=32) <= memir.peak(traced(Masked(), seq=31).program, B=2, S=31) + 10**5


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_attention_that_is_causal_where_there_is_more_than_one_token(target: str) -> None:
    def middle(_: nn.Module, __: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (3, 8)).transpose(1, 2)  # as transformers 4.48 has it: the flag is symbolic
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=heads.shape[2] > 1)
        return attended.transpose(1, 2).flatten(2)

    result = traced(Decoder(middle), Recipe(target=target))
    assert result.method == "symbolic"
    kernel = "_for_cpu" if target == "cpu" else ""
    assert f"aten._scaled_dot_product_flash_attention{kernel}" in opcodes(result.program, "forward")


# -- nothing is left behind ---------------------------------------------------------------------------------------------------


def _state() -> dict[str, Any]:
    masking = sys.modules.get("transformers.masking_utils")
    return {
        "dropout": dict(torch.ops.aten.dropout.default.py_kernels),
        "one_hot": dict(torch.ops.aten.one_hot.default.py_kernels),
        "get_rng_state": torch.get_rng_state,
        "engine": torch.autograd._engine_run_backward,
        "attention": F.scaled_dot_product_attention,
        "is_tracing": getattr(masking, "is_tracing", None),
        "hooks": len(nn.modules.module._global_forward_pre_hooks) + len(nn.modules.module._global_forward_hooks),
        "compile": torch.compile,
        "path": list(sys.path),
        "dtype": torch.get_default_dtype(),
        "files": symbolic_shapes.uninteresting_files,
        "sizes": {name: getattr(SymNode, name) for name in ("add", "mul", "eq", "lt", "sym_max")},
    }


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_changed_elsewhere_is_restored(target: str, fails: bool) -> None:
    def middle(_: nn.Module, __: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert not fails, "as the user's model would"
        return x

    if importlib.util.find_spec("transformers.masking_utils"):  # so that there is something to restore, from 4.53 on
        importlib.import_module("transformers.masking_utils")
    before = _state()
    if fails:
        with pytest.raises(memir.MemirError, match="as the user's model would"):
            traced(Decoder(middle), Recipe(target=target))
    else:
        traced(Decoder(middle), Recipe(target=target))
    assert _state() == before
