"""What CUDA's kernels take that a program does not count, told in numbers at the asked point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memir.cuda.platform import multiprocessors, threads_of_multiprocessor
from memir.ir.core import Op, Program, Repeat, Value
from memir.ir.layout import product
from memir.ir.size import Size
from memir.ir.workspaces import embedding_backward, shared_sum, summed

_SUMS = ("aten.sum.dim_IntList", "aten.sum", "aten.mean.dim")
_EMBEDDING = "aten.embedding_dense_backward"
_MIB = 2**20


def uncounted(program: Program, env: Mapping[str, int], gpu: str) -> str:
    """A sentence about workspaces that are no polynomial (`memir.ir.workspaces`); nothing where all are under 1 MiB."""
    device = multiprocessors(gpu), threads_of_multiprocessor(gpu)
    values = {value.name: value for value in program.values}
    most = {"a gradient that is summed over all tokens (biases, norms)": 0, "the embedding's gradient": 0}
    sums, embedding = most
    for op in _operators(program):
        values.update((value.name, value) for value in op.results)
        operands = [values[name] for name in op.operands if name in values]
        if op.opcode in _SUMS and len(operands) == 1 and op.results:
            most[sums] = max(most[sums], _of_sum(operands[0], op.results[0], env, device))
        elif op.opcode == _EMBEDDING and len(operands) == 2:
            most[embedding] = max(most[embedding], _of_embedding(operands[0], operands[1], op.results[0], env))
    told = [f"{nbytes / _MIB:,.0f} MiB for {what}" for what, nbytes in most.items() if nbytes >= _MIB]
    point = ", ".join(f"{name}={env[name]}" for name in ("B", "S") if name in env)
    return f"not counted: workspaces alive during one operator; at {point} {' and '.join(told)}" if told else ""


def _of_sum(source: Value, result: Value, env: Mapping[str, int], device: tuple[int, int]) -> int:
    rows, width = summed(source, result)
    return shared_sum(rows.evaluate(env), width, source.dtype, *device) if width and _known(rows, env) else 0


def _of_embedding(grad: Value, indices: Value, result: Value, env: Mapping[str, int]) -> int:
    count, (rows, width) = product(indices.shape), result.shape
    if not _known(count, env) or not rows.is_constant or not width.is_constant:
        return 0
    return embedding_backward(count.evaluate(env), rows.constant, width.constant, grad.dtype)


def _known(size: Size, env: Mapping[str, int]) -> bool:
    return not size.symbols() - env.keys()


def _operators(program: Program) -> Iterator[Op]:
    waiting: list[Op | Repeat] = [op for phase in reversed(program.phases) for op in reversed(phase.ops)]
    while waiting:
        op = waiting.pop()
        if isinstance(op, Repeat):
            waiting += reversed(op.body)
        else:
            yield op
