"""A polynomial as people write it: what differs by the number of layers only stands together, `(24*L + 10)*B*S*h`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memir.derivation.bounds import CUT, DEPTH, TRAINED, by_layers
from memir.derivation.step import ORDER
from memir.ir.size import Atom, Gen, Monomial, Size

_RANK = {name: place for place, name in enumerate((*ORDER[:3], TRAINED, *ORDER[3:]))}
LAYERS = (DEPTH, TRAINED, CUT)  # what counts layers


@dataclass(frozen=True, slots=True)
class Product:
    """One summand: a polynomial in the depth and the cut, by falling powers, times a monomial without them."""

    layers: tuple[tuple[Monomial, int], ...]  # monomial of L and L - c, coefficient
    monomial: Monomial

    @property
    def size(self) -> Size:
        """The summand."""
        return Size(self.layers) * Size(((self.monomial, 1),))


def products(size: Size, env: Mapping[str, int]) -> tuple[Product, ...]:
    """The summands of a size, the largest at `env` first."""
    found: dict[Monomial, dict[Monomial, int]] = {}
    size = by_layers(size)
    if TRAINED in size.symbols():
        env = {**env, TRAINED: env[DEPTH] - env[CUT]}
    for monomial, coefficient in size.terms:
        layers = tuple(factor for factor in monomial if factor[0] in LAYERS)
        rest = tuple(factor for factor in monomial if factor[0] not in LAYERS)
        inside = {s for atom, _ in rest if isinstance(atom, Gen) for s in atom.a.symbols() | atom.b.symbols()}
        if any(power < 0 for _, power in layers) or inside & set(LAYERS):
            layers, rest = (), monomial
        found.setdefault(rest, {})[layers] = coefficient
    made = [Product(tuple(sorted(layers.items(), key=_falling)), monomial) for monomial, layers in found.items()]
    return tuple(sorted(made, key=lambda p: (-abs(p.size.fraction(env)), p.size.text())))


def _falling(term: tuple[Monomial, int]) -> tuple[int, list[tuple[int, int]]]:
    """The key of a polynomial's order: L**2, L*c, L, c, 1."""
    monomial = term[0]
    return -sum(power for _, power in monomial), [(_RANK[str(atom)], -power) for atom, power in monomial]


def ordered(monomial: Monomial) -> list[tuple[Atom, int]]:
    """The factors in the order of ORDER, generators last."""
    return sorted(
        monomial, key=lambda f: (isinstance(f[0], Gen), _RANK.get(str(f[0]), 99) if isinstance(f[0], str) else 0, str(f[0]))
    )


@dataclass(frozen=True, slots=True)
class Style:
    """How factors and powers are written."""

    times: str
    power: Callable[[str, int], str]
    gen: Callable[[Gen], str]
    over: Callable[[str, str], str]
    symbol: Callable[[str], str] = lambda name: name


def product_text(product: Product, style: Style) -> tuple[str, str]:
    """The sign, `+` or `-`, and the summand without it."""
    top = [style.power(_atom(a, style), e) for a, e in ordered(product.monomial) if e > 0]
    bottom = [style.power(_atom(a, style), -e) for a, e in ordered(product.monomial) if e < 0]
    sign = "-" if product.layers[0][1] < 0 else "+"
    terms = [(monomial, -c if sign == "-" else c) for monomial, c in product.layers]
    if len(terms) == 1:
        ((layers, coefficient),) = terms
        head = _powers(layers, style)
        factors = [*([] if coefficient == 1 and (head or top) else [str(coefficient)]), *head, *top]
    else:
        inner = ""
        for layers, coefficient in terms:
            number = [] if abs(coefficient) == 1 and layers else [str(abs(coefficient))]
            text = style.times.join([*number, *_powers(layers, style)])
            inner += f" {'-' if coefficient < 0 else '+'} {text}" if inner else text
        factors = [f"({inner})", *top]
    text = style.times.join(factors)
    return sign, style.over(text, style.times.join(bottom)) if bottom else text


def _powers(monomial: Monomial, style: Style) -> list[str]:
    return [style.power(_atom(atom, style), e) for atom, e in ordered(monomial)]


def _atom(atom: Atom, style: Style) -> str:
    return style.symbol(atom) if isinstance(atom, str) else style.gen(atom)


def size_text(size: Size, env: Mapping[str, int], style: Style) -> str:
    """The whole size on one line."""
    return joined([product_text(product, style) for product in products(size, env)])


def joined(parts: Sequence[tuple[str, str]]) -> str:
    """Signed summands with blanks around their signs."""
    if not parts:
        return "0"
    sign, text = parts[0]
    return ("-" if sign == "-" else "") + text + "".join(f" {sign} {text}" for sign, text in parts[1:])


def plain_style() -> Style:
    """`2*B*S*h*k/a`, `ceil(S/128)`, as Markdown and terminals show it."""

    def gen(of: Gen) -> str:
        return of.text(ORDER).replace("^", "**")

    return Style("*", lambda text, e: text if e == 1 else f"{text}**{e}", gen, _over)


def _over(top: str, bottom: str) -> str:
    return f"{top}/{bottom if '*' not in bottom else f'({bottom})'}"


def conditions(domain: Sequence[str]) -> list[str]:
    """The domain for people: `8*a divides h` for `h % 8*a == 0`; bounds that follow from others are left out."""
    found = []
    for text in domain:
        left, percent, right = text.partition(" % ")
        if percent and right.endswith(" == 0"):
            text = f"{right.removesuffix(' == 0')} divides {left}"
        found.append(text)
    doubled = {text.partition(" divides ")[2] for text in found if text.partition("*")[2].partition(" divides ")[1]}
    return [text for text in found if not (text.endswith(tuple(f"a divides {d}" for d in doubled)) and "*" not in text)]
