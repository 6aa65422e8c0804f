"""`python -m benchmarks.plan_speed [TARGET] [--methods LIST]`: candidates evaluated a second, without any bound.

One traced step; the programs of all layouts are made first and timed apart. Then every candidate is evaluated once, its peak
and its time, as the search does it. CPU seconds of one process.
"""

from __future__ import annotations

import argparse
import sys
import time

from memir.analysis.cost.collectives import collective_seconds
from memir.analysis.cost.device import device
from memir.analysis.cost.product import product_seconds
from memir.analysis.flops import work_of
from memir.api import program_of
from memir.hardware import find_card
from memir.hardware.links import Cluster, inter_link, intra_link
from memir.planner.facts import facts
from memir.planner.methods import COPIES, INNER, available, chosen
from memir.planner.search import Problem, Search
from memir.planner.variant import SOME, Variants
from memir.recipe import Recipe

SEQ, GPUS = 4096, 64


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_speed", description=__doc__)
    parser.add_argument("target", nargs="?", default="llama-3.1-8b")
    parser.add_argument("--methods", help="as memir plan takes them")
    parser.add_argument("--global-batch", type=int, default=5040 * GPUS, help="many divisors: many micro-batches")
    options = parser.parse_args()
    card = find_card("h100")
    assert card is not None
    traced = program_of(options.target, Recipe(gpu=card.compute), batch=SOME, seq=SEQ)
    variants = Variants(lambda batch, accumulate: (traced.program, traced.dims), lambda _: None)
    works = work_of(traced.program)
    layers = traced.subject.num_layers or 1
    copies, inner = chosen(options.methods, available(COPIES), available(INNER))
    problem = Problem(
        facts(traced.program, works, {**traced.env, "B": SOME, "S": SEQ}, layers),
        device(card),
        Cluster(GPUS, 8, intra_link(card), inter_link("ib-400")),
        SEQ,
        options.global_batch,
        2**62,
        ("none", "full"),
    )
    search = Search(problem, variants, copies, tuple(method for method in inner if method.axis != "pipeline"))
    candidates = [pair for pair in search.candidates() if pair[0].batch >= SOME]
    start = time.process_time()
    for candidate, _ in candidates:
        variants.get(candidate.text, candidate.batch, candidate.accumulate).ready(SEQ)
    made = time.process_time() - start
    for cached in (product_seconds, collective_seconds):
        cached.cache_clear()
    start = time.process_time()
    done = sum(search.evaluate(*pair) is not None for pair in candidates)
    seconds = time.process_time() - start
    print(f"{options.target}, {GPUS} GPUs: {variants.count} programs in {made:.1f} s of CPU")
    print(f"{done:,} candidates evaluated in {seconds:.2f} s: {done / seconds:,.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
