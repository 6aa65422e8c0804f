"""What Hypothesis draws: sizes, anything that has a text form, and programs that keep every rule of the IR."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from memir.ir.core import Kind, Op, Phase, Program, Repeat, Storage, Value
from memir.ir.layout import contiguous
from memir.ir.size import ONE, ZERO, Size, ceil_div, floor_div, max_of, min_of

SYMBOLS = ("B", "S", "L")
environments = st.fixed_dictionaries({symbol: st.integers(1, 300) for symbol in SYMBOLS})


@st.composite
def polynomials(draw: st.DrawFn, symbols: tuple[str, ...] = SYMBOLS, lowest: int = -9, most: int = 4) -> Size:
    """At most `most` terms with whole exponents."""
    size = ZERO
    for _ in range(draw(st.integers(0, most))):
        term = Size.of(draw(st.integers(lowest, 200)))
        for symbol in symbols:
            term = term * Size.of(symbol) ** draw(st.sampled_from((0, 0, 1, 1, 2)))
        size = size + term
    return size


def sizes(symbols: tuple[str, ...] = SYMBOLS) -> st.SearchStrategy[Size]:
    """Polynomials over symbols and generators within generators."""

    def grow(inner: st.SearchStrategy[Size]) -> st.SearchStrategy[Size]:
        divisors = st.one_of(st.integers(1, 130).map(Size.of), st.sampled_from(symbols).map(Size.of))
        return st.one_of(
            st.builds(ceil_div, inner, divisors),
            st.builds(floor_div, inner, divisors),
            st.builds(max_of, inner, inner),
            st.builds(min_of, inner, inner),
            st.builds(lambda a, b: a * b, inner, inner),
            st.builds(lambda a, b: a + b, inner, inner),
        )

    return st.recursive(polynomials(symbols, most=2), grow, max_leaves=3)


def shards() -> st.SearchStrategy[Size]:
    """Sizes divided by symbols: B*S*t^-1."""
    return st.builds(lambda a, e: a * Size.of("t") ** -e, polynomials(), st.integers(1, 2))


# Names as programs have them, and names nobody would choose.
names = st.one_of(st.from_regex(r"[a-z_.\-]{1,4}(\[(i|i-1|L-1-i|:3|0,L)\])?", fullmatch=True), st.text(max_size=5))
_optional = st.one_of(st.none(), names)
_all_sizes = st.one_of(sizes(), shards())
_lists = st.lists(names, max_size=3).map(tuple)


@st.composite
def _texts(draw: st.DrawFn) -> Value:
    """A value without any rule kept."""
    shape = tuple(draw(st.lists(_all_sizes, max_size=3)))
    strides = contiguous(shape) if draw(st.booleans()) else tuple(draw(st.lists(_all_sizes, max_size=3)))
    return Value(draw(names), draw(names), shape, strides, draw(st.one_of(st.just(ZERO), _all_sizes)), draw(names))


_ops = st.builds(
    Op,
    opcode=names,
    operands=_lists,
    results=st.lists(_texts(), max_size=2).map(tuple),
    frees=_lists,
    drops=_lists,
    saves=_lists,
    scratch=st.one_of(st.just(ZERO), _all_sizes),
    stream=names | st.just(""),
    path=st.text(max_size=9),
    source=st.text(max_size=9),
    forward_of=_optional,
)
_bodies = st.recursive(
    st.lists(_ops, max_size=3).map(tuple),
    lambda inner: st.lists(_ops | st.builds(Repeat, index=names, count=_all_sizes, body=inner), max_size=3).map(tuple),
    max_leaves=3,
)
documents = st.builds(
    Program,
    name=st.text(max_size=5),
    dims=_lists,
    domain=st.lists(st.text(max_size=9), max_size=2).map(tuple),
    mesh=st.lists(st.tuples(names, _all_sizes), max_size=2).map(tuple),
    storages=st.lists(
        st.builds(
            Storage,
            name=names,
            nbytes=_all_sizes,
            kind=st.sampled_from(Kind),
            device=names,
            of=_optional,
            live_in=st.booleans(),
            live_out=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    values=st.lists(_texts(), max_size=2).map(tuple),
    phases=st.lists(st.builds(Phase, name=names, ops=_bodies), max_size=2).map(tuple),
)  # every field anything: has a text form, and keeps no rule


@dataclass
class _Builder:
    """Grows a flat program that keeps the rules, one operator at a time."""

    draw: st.DrawFn
    symbols: tuple[str, ...]
    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    live: list[Value] = field(default_factory=list)  # one value for each storage that may die
    dropped: set[str] = field(default_factory=set)
    count: int = 0

    def tensor(self) -> tuple[Value, Size]:
        """A fresh value, contiguous, transposed or a slice, and the bytes of its storage."""
        name = f"t{self.count}"
        self.count += 1
        extents = tuple(self.draw(st.lists(st.sampled_from([*self.symbols, 1, 3, 64]), max_size=3)))
        shape = tuple(Size.of(e) for e in extents)
        dtype, itemsize = self.draw(st.sampled_from((("bf16", 2), ("f32", 4), ("i64", 8), ("bool", 1))))
        strides = contiguous(shape)
        numel = ONE
        for extent in shape:
            numel = numel * extent
        if self.draw(st.booleans()):
            shape, strides = shape[::-1], strides[::-1]
        offset = self.draw(st.sampled_from((ZERO, ONE, Size.of(64))))
        spare = self.draw(st.sampled_from((0, 0, 512)))
        return Value(name, dtype, shape, strides, offset, name), (numel + offset) * itemsize + spare

    def resident(self) -> None:
        """A parameter, state or input: alive before and after."""
        value, nbytes = self.tensor()
        kind = self.draw(st.sampled_from((Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE)))
        device = self.draw(st.sampled_from(("gpu", "gpu", "host")))
        self.storages.append(Storage(value.name, nbytes, kind, device, None, live_in=True, live_out=True))
        self.values.append(value)

    def op(self) -> Op:
        operands = tuple(v.name for v in self.draw(st.lists(st.sampled_from(self.values + self.live), max_size=3)))
        results: list[Value] = []
        for _ in range(self.draw(st.integers(0, 2))):
            value, nbytes = self.tensor()
            kind = self.draw(st.sampled_from((Kind.ACTIVATION, Kind.TEMPORARY, Kind.GRADIENT)))
            of = self.values[0].storage if kind is Kind.GRADIENT else None
            self.storages.append(Storage(value.name, nbytes, kind, of=of))
            results.append(value)
            if self.draw(st.booleans()):
                self.count += 1
                results.append(Value(f"v{self.count}", "u8", (), (), ZERO, value.name))
        self.live += [r for r in results if r.name == r.storage]
        alive = [v.storage for v in self.live]
        saves = tuple(dict.fromkeys(self.draw(st.lists(st.sampled_from(alive), max_size=2)))) if alive else ()
        drops = tuple(n for n in saves if n not in self.dropped and self.draw(st.booleans()))
        self.dropped.update(drops)
        frees = tuple(n for n in alive if n not in saves and self.draw(st.integers(0, 3)) == 0)
        self.live = [v for v in self.live if v.storage not in frees]
        return Op(
            self.draw(st.sampled_from(("aten.mm", "aten.add_.Tensor", "aten.relu"))),
            operands,
            tuple(results),
            frees,
            drops,
            saves,
            scratch=self.draw(st.sampled_from((ZERO, Size.of(4096), Size.of("B") if "B" in self.symbols else ONE))),
            path=self.draw(st.sampled_from(("", "layers.0.mlp"))),
            source=self.draw(st.sampled_from(("", "model.py:7"))),
            forward_of=self.draw(st.sampled_from((None, self.values[0].name))),
        )


@st.composite
def flat_programs(draw: st.DrawFn) -> Program:
    """A valid program without Repeats: residents, operators, everything freed in the end."""
    symbols = draw(st.sampled_from(((), ("B",), ("B", "S"))))
    builder = _Builder(draw, symbols)
    for _ in range(draw(st.integers(1, 3))):
        builder.resident()
    phases = [Phase(name, tuple(builder.op() for _ in range(draw(st.integers(0, 5))))) for name in ("forward", "backward")]
    if builder.live:
        phases.append(Phase("end", (Op("memir.free", frees=tuple(v.storage for v in builder.live)),)))
    domain = ("S <= 1024",) if "S" in symbols and draw(st.booleans()) else ()
    return Program("flat", symbols, domain, (), tuple(builder.storages), tuple(builder.values), tuple(phases))


@st.composite
def repeated_programs(draw: st.DrawFn) -> Program:
    """A valid model in layers: forward keeps a family, backward frees it in reverse, temporaries within each layer.

    The count is the symbol L or a number; with micro-batches both Repeats are within another one.
    """
    micro = draw(st.booleans())
    number = draw(st.integers(1, 4))
    count = draw(st.sampled_from((Size.of("L"), Size.of(number))))
    extent = "L" if not count.is_constant else f":{number}"
    width = Size.of(draw(st.sampled_from((8, 64))))
    shape = (Size.of("B"), Size.of("S"), width)
    nbytes = 2 * shape[0] * shape[1] * width
    outer, family = ("m, ", f":2, {extent}") if micro else ("", extent)
    first, single = (f"{outer}-1", ":2, -1") if micro else ("-1", "-1")
    reverse = f"{extent.lstrip(':')}-1-i"
    last = f"{outer}{extent.lstrip(':')}-1"

    def tensor(name: str, storage: str) -> Value:
        return Value(name, "bf16", shape, contiguous(shape), ZERO, storage)

    storages = [
        Storage(f"w[{extent}]", 2 * width * width, Kind.PARAMETER, live_in=True, live_out=True),
        Storage(f"s[{extent}]", 4 * width, Kind.OPTIMIZER_STATE, of=f"w[{extent}]", live_in=True, live_out=True),
        *(Storage(f"{n}[{x}]", nbytes, k) for n, k in (("h", Kind.ACTIVATION), ("g", Kind.GRADIENT)) for x in (family, single)),
    ]
    weights = Value(f"w[{extent}]", "bf16", (width, width), (width, ONE), ZERO, f"w[{extent}]")
    temporaries = draw(st.integers(0, 2))
    storages += [Storage(f"t{k}[{family}]", nbytes + 512, Kind.TEMPORARY) for k in range(temporaries)]
    body: list[Op | Repeat] = []
    source = f"h[{outer}i-1]"
    for k in range(temporaries):
        body.append(Op("aten.mm", (source, "w[i]"), (tensor(f"t{k}", f"t{k}[{outer}i]"),), path="layers.{i}.mlp"))
        source = f"t{k}"
    frees = tuple(f"t{k}[{outer}i]" for k in range(temporaries))
    body.append(Op("aten.relu", (source,), (tensor(f"h[{outer}i]", f"h[{outer}i]"),), frees, saves=(f"h[{outer}i-1]",)))
    back = Op(
        "aten.threshold_backward",
        (f"g[{outer}i-1]", f"h[{outer}{reverse}]"),
        (tensor(f"g[{outer}i]", f"g[{outer}i]"),),
        (f"g[{outer}i-1]", f"h[{outer}{reverse}]"),
        forward_of=f"h[{outer}{reverse}]",
    )
    forward = (Op("aten.embedding", (), (tensor(f"h[{first}]", f"h[{first}]"),)), Repeat("i", count, tuple(body)))
    backward = (
        Op("aten.ones_like", (f"h[{last}]",), (tensor(f"g[{first}]", f"g[{first}]"),)),
        Repeat("i", count, (back,)),
        Op("memir.free", frees=(f"g[{last}]", f"h[{first}]")),
    )
    if micro:
        phases = (Phase("step", (Repeat("m", Size.of(2), (*forward, *backward)),)),)
    else:
        phases = (Phase("forward", forward), Phase("backward", backward))
    dims = ("B", "S") if count.is_constant else SYMBOLS
    return Program("layers", dims, (), (("data", Size.of(8)),), tuple(storages), (weights,), phases)


programs = st.one_of(flat_programs(), repeated_programs())
