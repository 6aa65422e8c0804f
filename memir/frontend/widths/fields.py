"""Which fields of a model's configuration are widths, how they hang together, and at which values the model is traced.

A width is a field with one of the usual names (`hidden_size`, `n_embd`, ...). What a model's code ties together stays tied: as
many key-value heads as heads, a hidden size that is heads times head size where no field says the head size. So the values that
are chosen are those of *atoms*, which are independent: with groups of heads the heads are a = k*g.

Values are as unlike as they can be for the code to run alike: primes, and head sizes of the target's own class, which decides
the attention kernel and its tiles (`memir.cuda.attention`, `memir.ir.attention`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count, islice
from math import lcm
from random import Random
from typing import Any

from memir.ir.domain import Condition
from memir.ir.size import Size
from memir.recipe import Recipe

# symbol -> (meaning, names of the field); the first name that the configuration has is the one
ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "h": (
        "hidden size",
        ("hidden_size", "n_embd", "d_model", "embed_dim", "n_embed", "model_dim", "emb_dim", "embd_dim", "dim", "hidden_dim"),
    ),
    "f": (
        "feed-forward width",
        ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff", "dim_feedforward", "hidden_dim"),
    ),
    "V": ("vocabulary", ("vocab_size", "n_vocab", "padded_vocab_size")),
    "a": ("attention heads", ("num_attention_heads", "n_head", "n_heads", "num_heads", "nhead")),
    "k": ("key-value heads", ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")),
    "d": ("head size", ("head_dim", "head_size", "d_head", "kv_channels")),
    "P": (
        "positions in tables",
        ("n_positions", "block_size", "max_position_embeddings", "max_seq_len", "context_length", "n_ctx"),
    ),
    "m": ("width of an expert", ("moe_intermediate_size",)),
    "E": ("experts", ("num_local_experts", "num_experts", "n_routed_experts")),
    "K": ("experts a token", ("num_experts_per_tok", "experts_per_token")),
    "t": ("tensor-parallel degree", ("tensor_parallel", "tensor_parallel_size", "tp_size")),
    "r": ("LoRA rank", ()),
}
FOLLOW = {"h": ("word_embed_proj_dim", "embedding_size")}  # fields that are another width again, where they are as large
GROUP = "g"  # heads that share one key-value head, a/k: an atom, never shown
MEANINGS = {symbol: meaning for symbol, (meaning, _) in ROLES.items()}
CLASSES = (64, 128, 192, 256)  # of head sizes: the tiles and workspaces of attention kernels change above each
TILE = 32  # what flash attention rounds a head size up to
LIMIT = 2**20  # a head size has no class above


@dataclass(frozen=True, slots=True)
class Atom:
    """One independent width. Values that the traced code was seen to take alike are multiples of `step` in `low`..`high`."""

    name: str
    value: int  # the target's
    low: int = 2
    high: int | None = None
    step: int = 1

    def allows(self, value: int) -> bool:
        """Whether the value is one of those."""
        return self.low <= value <= (self.high or value) and value % self.step == 0


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths of a target: atoms, the symbols they make up, and the fields they are written to."""

    atoms: tuple[Atom, ...]
    symbols: tuple[tuple[str, Size], ...]  # shown symbol -> its size over atoms
    fields: tuple[tuple[str, str], ...]  # field of the configuration -> symbol; "" is the recipe's LoRA rank
    limits: tuple[str, ...] = ()  # conditions of the model: no more tokens than it has positions

    @property
    def target(self) -> dict[str, int]:
        """The target's own value of each atom."""
        return {atom.name: atom.value for atom in self.atoms}

    def sizes(self, point: Mapping[str, int]) -> dict[str, int]:
        """The value of each shown symbol at a point of the atoms."""
        return {symbol: size.evaluate(point) for symbol, size in self.symbols}

    def sets(self, point: Mapping[str, int]) -> dict[str, str]:
        """The `--set` options that give the model these widths."""
        values = self.sizes(point)
        return {field: str(values[symbol]) for field, symbol in self.fields if field}

    def recipe(self, recipe: Recipe, point: Mapping[str, int]) -> Recipe:
        """The recipe with this LoRA rank."""
        if recipe.lora is None or not any(not field for field, _ in self.fields):
            return recipe
        return replace(recipe, lora=replace(recipe.lora, r=self.sizes(point)["r"]))

    def without(self, names: frozenset[str]) -> Widths:
        """The same with these atoms as numbers."""
        fixed = {atom.name: atom.value for atom in self.atoms if atom.name in names}
        return replace(
            self,
            atoms=tuple(atom for atom in self.atoms if atom.name not in names),
            symbols=tuple((symbol, size.substitute(fixed)) for symbol, size in self.symbols),
        )

    def unset(self, field: str) -> Widths:
        """The same without a field that cannot be set: what it is made of are numbers, or follow the other fields."""
        symbol = dict(self.fields)[field]
        fixed = self.without(frozenset(dict(self.symbols)[symbol].symbols()))
        return replace(fixed, fields=tuple(pair for pair in self.fields if pair[0] != field))

    def of(self, symbols: Collection[str] | None) -> Widths:
        """The same with only the atoms that these symbols are made of; heads, their groups and their size hang together."""
        if symbols is None:
            return self
        needed = {atom for symbol, size in self.symbols if symbol in symbols for atom in size.symbols()}
        needed |= {"k", GROUP} if needed & {"k", GROUP} else set()
        needed |= (
            {"h", "d"} if needed & {"h", "a", "k", "d"} else set()
        )  # configurations want heads that divide the hidden size
        return self.without(frozenset(atom.name for atom in self.atoms if atom.name not in needed))

    def factors(self) -> tuple[Size, ...]:
        """The atoms, and the shown symbols that are products of them."""
        found = [Size.of(atom.name) for atom in self.atoms] + [size for _, size in self.symbols if not size.is_constant]
        return tuple(dict.fromkeys(found))

    def domain(self) -> tuple[str, ...]:
        """The conditions on the atoms, as a program has them."""
        names = {"S", *(atom.name for atom in self.atoms)}
        found = [text for text in self.limits if (limit := Condition.read(text)) is not None and limit.symbols() <= names]
        for atom in self.atoms:
            found.append(f"{atom.name} >= {atom.low}")
            found += [f"{atom.name} <= {atom.high}"] if atom.high is not None else []
            found += [f"{atom.name} % {atom.step} == 0"] if atom.step > 1 else []
        return tuple(found)


def find_widths(config: Mapping[str, Any], recipe: Recipe) -> Widths:
    """The widths among a configuration's plain values. Fields that are not numbers above 1 are none."""
    named: dict[str, tuple[str, int]] = {}
    for symbol, (_, names) in ROLES.items():
        taken = {name for name, _ in named.values()}
        name = next((n for n in names if n not in taken and type(config.get(n)) is int and config[n] > 1), None)
        if name is not None:
            named[symbol] = (name, int(config[name]))
    atoms: dict[str, Atom] = {}
    sizes: dict[str, Size] = {}
    value = {symbol: number for symbol, (_, number) in named.items()}

    def atom(name: str, number: int, **limits: Any) -> None:
        atoms[name] = Atom(name, number, **limits)
        sizes[name] = Size.of(name)

    grouped = "a" in value and "k" in value and 1 < value["k"] < value["a"] and value["a"] % value["k"] == 0
    if grouped:
        atom("k", value["k"])
        atoms[GROUP] = Atom(GROUP, value["a"] // value["k"])
        sizes["a"] = Size.of("k") * Size.of(GROUP)
    elif "a" in value:
        atom("a", value["a"])
        if value.get("k") == value["a"]:
            sizes["k"] = sizes["a"]
    tied = "h" in value and "a" in value and "d" not in value and value["h"] % value["a"] == 0
    if "d" in value or tied:
        head = value.get("d", value["h"] // value["a"] if tied else 0)
        atom("d", head, **_class(head, _rotated(config)))
    if tied:
        sizes["h"] = sizes["a"] * sizes["d"]
    elif "h" in value:
        atom("h", value["h"])
    for symbol in ("f", "V", "P", "m", "E", "K", "t"):
        if symbol in value:  # grouped matmuls of experts take rows of whole 16 bytes (GroupedMMUtils.h)
            rows = {"step": 8, "low": 8} if symbol in ("f", "m") and "E" in value and value[symbol] % 8 == 0 else {}
            atom(symbol, value[symbol], **rows)
    fields = [(named[symbol][0], symbol) for symbol in sizes if symbol in named]
    fields += [(name, symbol) for symbol, names in FOLLOW.items() for name in names if config.get(name) == value.get(symbol, 0)]
    if recipe.lora is not None:
        atom("r", recipe.lora.r, low=1)
        fields.append(("", "r"))
    return Widths(tuple(atoms.values()), tuple(sizes.items()), tuple(fields))


def _rotated(config: Mapping[str, Any]) -> Any:
    """The part of a head that is rotated, 1 where nothing says it."""
    nested = [value for value in config.values() if isinstance(value, Mapping)]
    found = [place.get(name) for place in (config, *nested) for name in ("partial_rotary_factor", "rotary_pct")]
    return next((value for value in found if value), 1)


def _class(head: int, rotated: Any) -> dict[str, Any]:
    """The head sizes whose kernels are the target's: multiples of 8 (of what divides it, where 8 does not) in its class.

    The part of a head that is rotated, such as 0.4 of it, is a whole number of pairs.
    """
    pairs = 2 * Fraction(str(rotated)).limit_denominator(64).denominator if isinstance(rotated, float) else 1
    step = next(step for step in (8, 4, 2, 1) if head % step == 0)
    step = lcm(step, pairs) if head % lcm(step, pairs) == 0 else step
    low = max((limit for limit in CLASSES if limit < head), default=0)
    high = next((limit for limit in CLASSES if limit >= head), None)
    return {"low": -(-(low + 1) // step) * step, "high": high, "step": step}


def points(widths: Widths, number: int) -> list[dict[str, int]]:
    """`number` points to trace at, always the same; no atom has one value twice, nor the target's."""
    return list(islice(_all_points(widths), number))


def _all_points(widths: Widths) -> Any:
    columns = {atom.name: _values(atom) for atom in widths.atoms}
    for number in count():
        point = {name: values[number % len(values)] for name, values in columns.items()}
        yield _fitting(widths, point, number)


_PRIMES = {
    "k": (3, 5, 2, 7, 11),
    GROUP: (5, 2, 7, 3, 13),
    "a": (5, 7, 3, 11, 13),
    "f": (523, 677, 839, 431, 997),
    "m": (211, 307, 401, 173, 101),
    "r": (3, 5, 7, 11, 13),
    "E": (11, 13, 17, 19, 23),
    "K": (3, 5, 7, 2, 11),
    "t": (3, 5, 7, 2, 11),
}
_MORE = (29, 37, 31, 43, 41)  # hidden size a head


def _values(atom: Atom) -> list[int]:
    if atom.name == "d":
        around = [atom.value + sign * step * atom.step for step in range(1, 9) for sign in (-1, 1)]
        near = [value for value in around if atom.allows(value) and value > 0]
        other = [value for value in near if -(-value // TILE) != -(-atom.value // TILE)]  # a workspace of whole tiles differs
        return list(dict.fromkeys([*near[:1], *other[:1], *near])) or [atom.value]
    if atom.name in ("V", "P"):  # never fewer: other fields name tokens and positions
        return [_prime(atom.value * more // 100) for more in (113, 137, 179, 127, 193)]
    if atom.name == "h":
        return list(_MORE)
    return [atom.step * value for value in _PRIMES[atom.name] if atom.step * value != atom.value]


def _prime(least: int) -> int:
    return next(n for n in count(least | 1, 2) if all(n % k for k in range(3, int(n**0.5) + 1, 2)))


def _fitting(widths: Widths, point: dict[str, int], number: int) -> dict[str, int]:
    """The point with a hidden size that the heads divide, as configurations ask, and no more experts a token than there are."""
    names = {atom.name for atom in widths.atoms}
    if "h" in names:
        heads = dict(widths.symbols).get("a")
        point["h"] = 2 * _MORE[number % len(_MORE)] * (heads.evaluate(point) if heads is not None else 8)
    return point


def fresh(widths: Widths, seed: int) -> dict[str, int]:
    """A point at random, within the atoms' limits: for verification."""
    random = Random(seed)
    point = {}
    for atom in widths.atoms:
        if atom.name == "d":
            high = atom.high or max(2 * atom.value, LIMIT if atom.value > LIMIT else 512)
            point["d"] = random.randrange(max(atom.low, atom.step), high + 1, atom.step)
        elif atom.name in ("V", "P"):
            point[atom.name] = atom.value + random.randrange(1, atom.value)
        elif atom.name in ("f", "m"):
            point[atom.name] = atom.step * random.randrange(64 // atom.step, 4096 // atom.step)
        elif atom.name == "E":
            point["E"] = random.randrange(8, 40)
        else:
            point[atom.name] = random.randrange(max(atom.low, 2), 9)
    point = _fitting(widths, point, seed)
    if "h" in point:
        heads = dict(widths.symbols).get("a")
        point["h"] = random.randrange(3, 99) * (heads.evaluate(point) if heads is not None else 8)
    return point
