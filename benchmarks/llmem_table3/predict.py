"""memir's bytes and seconds of a model under each of LLMem's methods, and the method it would choose."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.llmem_single.predict import RECIPE, as_in_4_29
from benchmarks.llmem_table3.facts import CARD, COLUMNS, GPUS, MIB, OFFLOAD, RECIPES, SEQ, Fact, Recipe
from benchmarks.llmem_table3.ranks import of_rank, works_of_rank
from memir.analysis.cost.collectives import collective_seconds
from memir.analysis.cost.device import device
from memir.analysis.cost.parts import Costs
from memir.analysis.cost.step import Exchange, step_time
from memir.analysis.flops import Work, work_of
from memir.analysis.peak import Peak, peak
from memir.api import TracedProgram, program_of
from memir.cuda.context import context, cublas_workspace
from memir.hardware import find_card
from memir.hardware.links import Cluster, inter_link, intra_link
from memir.ir.core import Kind
from memir.ir.declarations import member_count
from memir.ir.size import Size

V100 = find_card("v100-sxm2-16gb")
HALF = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One model under one recipe. Bytes of a rank at `batch`, the largest that fits, or at 1 if none does."""

    model: str
    recipe: str
    batch: int  # sequences of a copy; 0: not even one fits
    static: int  # parameters, fp32 copy, states
    logits: int  # three times, as the paper counts them
    step: int  # what a step takes above the parameters: memir's peak
    backward: int  # tensor parallel's buffers in backward, the paper's m_back
    beside: int  # CUDA context and cuBLAS's workspaces
    paper: int  # the paper's equation at the same batch, with the same context for its m_base
    paper_one: int  # the same for one sequence
    samples: float  # a second, of all GPUs; 0 if nothing fits

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.static + self.step + self.backward + self.beside


class Step:
    """A model traced at a batch: `program` with gradients in the parameters' place, and its operators."""

    def __init__(self, fact: Fact, batch: int) -> None:
        with as_in_4_29(fact):  # type: ignore[arg-type]
            traced: TracedProgram = program_of(fact.preset, RECIPE, batch=batch, seq=SEQ, cache=False)
        held = tuple(replace(s, nbytes=Size.of(0)) if s.kind is Kind.GRADIENT else s for s in traced.program.storages)
        self.program = replace(traced.program, storages=held)
        self.works = work_of(traced.program)
        self.layers = traced.subject.num_layers or 1
        self.peaks: dict[int, Peak] = {}


class Model:
    """What is read off a model's traced steps. B is one copy's batch; a batch of 1 has a step of its own."""

    def __init__(self, fact: Fact) -> None:
        self.fact = fact
        self._steps = {2: Step(fact, 2)}
        one = self._steps[2]
        self.layers = one.layers
        self.dims = {"L": self.layers, "S": SEQ}
        found = [0, 0]
        for storage in one.program.storages:
            if storage.kind is Kind.PARAMETER:
                count = member_count(storage.name).evaluate(self.dims) * storage.nbytes.evaluate(self.dims) // HALF
                found["*" not in storage.name] += count
        self.parameters = sum(found)
        products = [
            w for w in one.works if w.phase == "forward" and w.shape.form == "product" and w.shape.dims[0] is Size.of(1)
        ]
        head = max(products, key=lambda w: w.shape.dims[2].evaluate({"B": 1, **self.dims}))
        self.hidden, self.vocabulary = head.shape.dims[3].constant, head.shape.dims[2].constant

    def at(self, batch: int) -> Step:
        """The step that holds for a batch."""
        key = min(batch, 2)
        if key not in self._steps:
            self._steps[key] = Step(self.fact, key)
        return self._steps[key]

    def env(self, batch: int) -> dict[str, int]:
        """The symbols of that step."""
        known = {"B": batch, **self.dims}
        return {name: known[name] for name in self.at(batch).program.dims}

    def step(self, batch: int, tp: int) -> int:
        """Bytes at the peak of a step above what is there before it."""
        one = self.at(batch)
        if tp not in one.peaks:
            one.peaks[tp] = peak(of_rank(one.program, tp, self.whole))
        found, env = one.peaks[tp], self.env(batch)
        return found.evaluate(env)[0] - found.resident.evaluate(env)

    def rank_works(self, batch: int, tp: int) -> list[Work]:
        """The operators of a rank."""
        return works_of_rank(self.at(batch).works, tp, self.whole)

    @property
    def whole(self) -> frozenset[int]:
        """Last extents of what is not divided."""
        return frozenset((self.hidden, self.vocabulary))


def cells(fact: Fact, link: str = "nvlink") -> list[Cell]:
    """The model's cells; its step is traced once."""
    model = Model(fact)
    return [_cell(model, recipe, link) for recipe in RECIPES]


def choice(found: list[Cell]) -> str:
    """The column of the fastest recipe that fits."""
    best = max(found, key=lambda cell: (cell.samples, -[r.name for r in RECIPES].index(cell.recipe)))
    return {r.name: r.column for r in RECIPES}[best.recipe] if best.samples else OFFLOAD


def column(found: list[Cell], name: str) -> float:
    """Samples a second of a column of Table 3: of its better recipe."""
    names = [r.name for r in RECIPES if r.column == name]
    return max(cell.samples for cell in found if cell.recipe in names)


def _cell(model: Model, recipe: Recipe, link: str) -> Cell:
    assert V100 is not None
    beside = context(V100)[1] + 2 * cublas_workspace("7.0")
    static = model.parameters * recipe.gathered // recipe.tp + model.parameters * recipe.divided // GPUS

    def needed(batch: int) -> int:
        return static + model.step(batch, recipe.tp) + _backward(model, recipe, batch) + beside

    batch = 1
    while needed(batch + 1) <= CARD * MIB:
        batch += 1
    if batch == 1 and needed(1) > CARD * MIB:  # only here is the step of one sequence wanted
        batch = 0
    shown = max(1, batch)
    element = 4 if model.fact.upcast else HALF
    return Cell(
        model.fact.name,
        recipe.name,
        batch,
        static,
        3 * shown * SEQ * model.vocabulary * element,
        model.step(shown, recipe.tp),
        _backward(model, recipe, shown),
        beside,
        _paper(model, recipe, shown, static, beside),
        _paper(model, recipe, 1, static, beside),
        round(_samples(model, recipe, batch, link), 2) if batch else 0.0,
    )


def _backward(model: Model, recipe: Recipe, batch: int) -> int:
    """m_back: a hidden state for each layer, but the rank's own part."""
    return model.layers * batch * SEQ * model.hidden * HALF * (recipe.tp - 1) // recipe.tp


def _paper(model: Model, recipe: Recipe, batch: int, static: int, beside: int) -> int:
    """The paper's equation: parameters and states, boundaries of layers, three logits, m_back."""
    element = 4 if model.fact.upcast else HALF
    outputs = (1 + model.layers) * batch * SEQ * model.hidden * HALF
    logits = 3 * batch * SEQ * model.vocabulary * element
    return static + outputs + logits + model.hidden * model.vocabulary * HALF + _backward(model, recipe, batch) + beside


def _samples(model: Model, recipe: Recipe, batch: int, link: str) -> float:
    """Sequences a second.

    Gemini gathers a chunk when it is used and reduces it when it is full, and computing waits for both, and parameters stay
    gathered until then (colossalai/zero/gemini/chunk/chunk.py: all_gather and reduce_scatter without async_op).
    """
    assert V100 is not None
    cluster = Cluster(GPUS, GPUS, intra_link(V100, link), inter_link("ib-100"))
    gpu = device(V100)
    computing = Costs(model.rank_works(batch, recipe.tp)).at(model.env(batch), gpu, model.layers)
    shard = model.parameters * HALF // recipe.tp

    def seconds(kind: str, nbytes: int, ranks: int, stride: int = 1) -> float:
        return collective_seconds(kind, nbytes, ranks, stride, cluster)

    hidden = batch * SEQ * model.hidden * HALF
    once = 2 * model.layers * seconds("all_reduce", hidden, recipe.tp)
    logits = seconds("all_gather", batch * SEQ * model.vocabulary * HALF, recipe.tp)
    forward = once + logits
    backward = 2 * once
    if recipe.name == "llmem-cdp":
        backward += seconds("all_reduce", shard, recipe.dp)
    elif recipe.dp > 1:
        forward += seconds("all_gather", shard, recipe.dp, recipe.tp)
        backward += seconds("reduce_scatter", shard, recipe.dp, recipe.tp)
    optimizer = model.parameters * (28 if recipe.divided == 0 else 28 / GPUS) / gpu.bandwidth  # Adam: 16 bytes read, 12 written
    time = step_time(computing, Exchange(inside_forward=forward, inside_backward=backward))
    return batch * recipe.dp / (time.seconds + optimizer)


def order(fact: Fact, found: list[Cell]) -> tuple[int, int]:
    """(pairs in the order of the measured times, pairs), of the columns that ran in the paper."""
    ran = [(name, seconds) for name, seconds in zip(COLUMNS, fact.seconds, strict=True) if seconds is not None]
    pairs = [(a, b) for i, a in enumerate(ran) for b in ran[i + 1 :]]
    right = sum(1 for a, b in pairs if (a[1] - b[1]) * (column(found, b[0]) - column(found, a[0])) > 0)
    return right, len(pairs)
