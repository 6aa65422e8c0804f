"""memir lint: each rule on the smallest program that has the habit, on the one that has not, and against real traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from memir.api import program_of
from memir.cli import main
from memir.diff.inputs import side
from memir.diff.side import Side
from memir.ir.parser import parse
from memir.lint.rules import RULES
from memir.lint.run import Linted, lint, reader, render
from memir.lint.step import LintStep
from memir.recipe import Recipe
from tests.sarif import results

ROOT = Path(__file__).resolve().parents[1]

HEAD = """memir 1
program @step
dim B, S
storage $ids : 8*B*S input live_in live_out
storage $w : 16384 parameter live_in live_out
storage $w.grad : 16384 gradient of $w
"""
VALUES = """value %ids: i64[B, S] in $ids
value %w: bf16[64, 128] in $w
"""
END = """phase optimizer
  memir.free() frees $w.grad
"""
GRAD = "  %g: bf16[64, 128] in $w.grad = aten.mm(%x, %ids)"


def step(storages: str, forward: str, backward: str, values: str = "", optimizer: str = END, **more: bool) -> LintStep:
    """A step at B=4, S=64; in `backward`, GRAD makes the gradient of w."""
    text = HEAD + storages + VALUES + values + "phase forward\n" + forward + "phase backward\n" + backward + optimizer
    return LintStep(Side("step", parse(text), {"B": 4, "S": 64}), **more)


X = "storage $x : 128*B*S activation\n"
MAKE_X = "  %x: bf16[B, S, 64] in $x = aten.embedding(%w, %ids) saves $x drops $x from m.py:1\n"
USE_X = f"{GRAD} frees $x from m.py:1\n"


def found(of: LintStep, *, everything: bool = False) -> list[tuple[str, str, int, int]]:
    """Name, line, bytes at the peak, bytes that the peak would be lower."""
    items = lint(of, lambda _, __: "", everything=everything)
    return [(i.finding.rule.name, f"{i.finding.file}:{i.finding.line}", i.finding.nbytes, i.lowers) for i in items]


def test_a_plain_step_has_no_finding() -> None:
    assert found(step(X, MAKE_X, USE_X), everything=True) == []


def test_logits_in_fp32() -> None:
    storages = X + "storage $l : 512*B*S temporary\nstorage $f : 1024*B*S temporary\nstorage $p : 1024*B*S activation\n"
    forward = MAKE_X + "  %l: bf16[B, S, 256] in $l = aten.mm(%x, %w) from m.py:2\n"
    forward += "  %f: f32[B, S, 256] in $f = aten._to_copy(%l) frees $l from m.py:3\n"
    forward += "  %p: f32[B, S, 256] in $p = aten._log_softmax(%f) saves $p drops $p frees $f from m.py:4\n"
    backward = f"{GRAD} frees $x, $p from m.py:1\n"
    # at the peak: the copy (1024) goes and the log-probabilities are half (512)
    ((name, place, nbytes, lowers),) = found(step(storages, forward, backward))
    assert (name, place, nbytes) == ("logits-in-fp32", "m.py:3", (1024 + 512) * 256)
    assert 0 < lowers <= nbytes
    narrow = forward.replace("f32", "bf16").replace("aten._to_copy", "aten.mul")
    assert found(step(storages.replace("1024", "512"), narrow, backward)) == []


def test_attention_probabilities_and_a_copy_of_them() -> None:
    storages = X + "storage $s : 8*B*S^2 activation\nstorage $c : 4*B*S^2 activation\n"
    forward = MAKE_X + "  %s: f32[B, S, S, 2] in $s = aten._softmax(%x) saves $s drops $s from m.py:2\n"
    forward += "  %c: bf16[B, S, S, 2] in $c = aten._to_copy(%s) saves $c drops $c from m.py:3\n"
    forward += "  %o: bf16[B, S, S, 2] in $c = aten.relu_(%c, %s)\n"
    backward = "  %d: bf16[B, S, S, 2] in $c = aten.mul_(%c, %s)\n" + f"{GRAD} frees $x, $s, $c from m.py:1\n"
    probabilities, copy = found(step(storages, forward, backward))
    assert probabilities == ("attention-probabilities", "m.py:2", 8 * 4 * 64**2, 8 * 4 * 64**2)
    assert copy == ("saved-twice", "m.py:3", 4 * 4 * 64**2, 4 * 4 * 64**2)


def test_a_mask_of_every_sequence_and_not_scores() -> None:
    storages = X + "storage $m : 4*B*S^2 activation\n"
    mask = (
        "  %m: f32[B, S, S] in $m = aten.clone({0}) saves $m drops $m from m.py:2\n  %n: f32[B, S, S] in $m = aten.mul_(%m)\n"
    )
    backward = "  %d: f32[B, S, S] in $m = aten.neg_(%m)\n" + f"{GRAD} frees $x, $m from m.py:1\n"
    made = step(storages, MAKE_X + mask.format("%ids"), backward)
    assert found(made) == [("mask-expanded", "m.py:2", 4 * 4 * 64**2, 4 * 4 * 64**2)]
    learned = step(storages, MAKE_X + mask.format("%x"), backward)
    assert "mask-expanded" not in [name for name, *_ in found(learned)]


def test_what_only_a_variable_holds_and_what_the_loop_still_holds() -> None:
    storages = (
        X + "storage $v : 256*B*S temporary\nstorage $o : 64*B*S temporary live_in\nstorage $n : 64*B*S temporary live_out\n"
    )
    forward = (
        MAKE_X
        + "  %v: bf16[B, S, 128] in $v = aten.mul(%x) from m.py:2\n  %n: bf16[B, S, 32] in $n = aten.mul(%x) from m.py:3\n"
    )
    backward = f"{GRAD} frees $x, $v, $o from m.py:1\n"
    items = found(step(storages, forward, backward, "value %o: bf16[B, S, 32] in $o\n"))
    assert ("held-by-variable", "m.py:2", 256 * 256, 128 * 256) in items  # without it the peak is where it is made
    assert [name for name, *_ in items].count("outputs-kept") == 2


def test_tables_of_every_layer_and_their_type() -> None:
    table = "storage $layers.{0}.cos : 65536 buffer live_in live_out\n"
    value = "value %layers.{0}.cos: f32[256, 64] in $layers.{0}.cos\n"
    many = step(X + "".join(map(table.format, range(3))), MAKE_X, USE_X, "".join(map(value.format, range(3))))
    assert found(many) == [
        ("tables-per-layer", ":0", 2 * 65536, 2 * 65536),
        ("buffer-in-fp32", ":0", 3 * 32768, 3 * 32768),
    ]
    one = step(X + table.format(0), MAKE_X, USE_X, value.format(0).replace("f32[256, 64]", "bf16[512, 64]"))
    assert found(one) == []


def test_saved_and_never_read() -> None:
    storages = X + "storage $y : 256*B*S activation\n"
    forward = MAKE_X + "  %y: bf16[B, S, 128] in $y = aten.mul(%x) saves $y drops $y from m.py:2\n"
    unread = f"{GRAD} frees $x, $y from m.py:1\n"
    assert found(step(storages, forward, unread)) == [("saved-and-unused", "m.py:2", 256 * 256, 64 * 256)]
    read = "  %z: bf16[B, S, 128] in $y = aten.neg_(%y)\n" + unread
    assert found(step(storages, forward, read)) == []


def test_gradients_that_are_not_freed_and_parameters_without_one() -> None:
    kept = HEAD.replace("gradient of $w", "gradient of $w live_in live_out")
    text = kept + X + VALUES + "value %g: bf16[64, 128] in $w.grad\nphase forward\n" + MAKE_X
    text += "phase backward\n  %h: bf16[64, 128] in $w.grad = aten.add_(%g, %x) frees $x from m.py:1\n"
    items = found(LintStep(Side("s", parse(text), {"B": 4, "S": 64})))
    assert items == [("gradients-not-freed", ":0", 16384, 16384)]
    lonely = "storage $u : 8192 parameter live_in live_out\n"
    value = "value %u: bf16[64, 64] in $u\n"
    used = MAKE_X.replace("aten.embedding(%w, %ids)", "aten.embedding(%w, %ids, %u)")
    name = ("parameter-without-gradient", ":0", 8192, 8192)
    assert found(step(X + lonely, MAKE_X, USE_X, value)) == [name]
    assert found(step(X + lonely, used, USE_X, value)) == [name]
    assert found(step(X + lonely, used, USE_X, value, has_frozen=True)) == []


def test_foreach_temporaries_are_told_where_they_are_the_peak() -> None:
    storages = X + "storage $a : 900000 temporary\nstorage $b : 800000 temporary\n"
    optimizer = "phase optimizer\n  %a: f32[9] in $a, %b: f32[8] in $b = aten._foreach_sqrt(%g) from adam.py:9\n"
    optimizer += "  memir.free() frees $a, $b, $w.grad\n"
    assert found(step(storages, MAKE_X, USE_X, optimizer=optimizer)) == [("foreach-temporaries", "adam.py:9", 800000, 800000)]


def test_checkpointing_that_lowers_nothing() -> None:
    plain = step(X, MAKE_X, USE_X)
    same = LintStep(plain.side, unrecomputed=plain.peak)
    assert [name for name, *_ in found(same)] == ["checkpoint-saves-nothing"]
    assert found(LintStep(plain.side, unrecomputed=plain.peak + 1)) == []


def test_a_comment_on_the_line_silences(tmp_path: Path) -> None:
    storages = X + "storage $y : 256*B*S activation\n"
    forward = MAKE_X + "  %y: bf16[B, S, 128] in $y = aten.mul(%x) saves $y drops $y from m.py:2\n"
    of = step(storages, forward, f"{GRAD} frees $x, $y from m.py:1\n")

    def names(comment: str) -> list[str]:
        (tmp_path / "m.py").write_text(f"x = 1\ny = x * 2  {comment}\n")
        return [item.finding.rule.name for item in lint(of, reader(tmp_path))]

    assert names("") == ["saved-and-unused"]
    assert (
        names("# memir: ignore")
        == names("# memir: ignore[MEM101, saved-and-unused] why")
        == names("#memir:ignore[MEM108]")
        == []
    )
    assert names("# memir: ignore[logits-in-fp32]") == ["saved-and-unused"]


def test_every_rule_has_its_section_in_the_docs() -> None:
    page = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    parts = page.split("\n## ")
    for rule in RULES:
        (part,) = [part for part in parts if part.startswith(rule.name + "\n")]
        assert rule.code in part
        for word in ("Why it costs", "Example", "How to mend it", "How to silence it"):
            assert f"**{word}" in part, (rule.name, word)


@pytest.fixture(scope="module")
def expanded() -> tuple[LintStep, tuple[Linted, ...]]:
    target = str(ROOT / "tests/regressions/mask_expanded/after.py")
    traced = program_of(target, Recipe(), batch=4, seq=128, cache=False)
    of = LintStep(side(target, traced))
    return of, lint(of, reader(ROOT))


def test_a_finding_gives_back_what_it_says(expanded: tuple[LintStep, tuple[Linted, ...]]) -> None:
    """The mask is [B, HEADS, S, S]; the same model with the one it is made of, [S, S], is traced as well."""
    of, items = expanded
    (mask,) = [item for item in items if item.finding.rule.name == "mask-expanded"]
    before = program_of(str(ROOT / "tests/regressions/mask_expanded/before.py"), Recipe(), batch=4, seq=128, cache=False)
    step_before = side("before", before)
    plain = step_before.line.evaluate(step_before.point).peak
    one = 2 * 128 * 128  # the [S, S] mask in bf16 that is kept in its place
    assert abs(of.peak - mask.lowers + one - plain) <= one


def test_every_format(expanded: tuple[LintStep, tuple[Linted, ...]]) -> None:
    of, items = expanded
    text = render(items, of, "text", ROOT)
    assert "MEM106 mask-expanded" in text
    assert "after.py:17: " in text
    assert json.loads(render(items, of, "json", ROOT))["findings"][0]["lowers_peak_by_bytes"] == items[0].lowers
    assert "| mask-expanded (MEM106) |" in render(items, of, "markdown", ROOT)
    assert "line=17" in render(items, of, "github", ROOT) or "after.py:17" in render(items, of, "github", ROOT)
    assert [r["ruleId"] for r in results(render(items, of, "sarif", ROOT))] == [i.finding.rule.code for i in items]


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["lint", "tests/regressions/softmax_in_fp32/after.py", "-b", "4", "-s", "128"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Model   B=4, S=128   peak ")
    assert lines[2].startswith("tests/regressions/softmax_in_fp32/after.py:25: MEM103 attention-probabilities")
    assert CliRunner().invoke(main, [*arguments, "--exit-zero"]).exit_code == 0
