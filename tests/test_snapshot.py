"""The exported snapshot: PyTorch's own tools accept it, its events lead back from the segments, its frames are right."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from memir.allocator.replay import simulate
from memir.allocator.settings import parse_settings
from memir.backends.snapshot import Snapshot
from memir.cli import main
from memir.errors import UsageError
from memir.ir.parser import parse
from memir.ir.unroll import bind
from tests import programs
from tests.test_allocator_replay import KEPT, STEP, M

ROOT = Path(__file__).parents[1]
CONFIGURATIONS = ("", "expandable_segments:True", "max_split_size_mb:20")
Plain = dict[str, Any]


def written(snapshot: Snapshot, text: str = STEP, **env: int) -> Plain:
    out = io.BytesIO()
    snapshot.emit(bind(parse(text), env or {"B": 1}), out)
    found = pickle.loads(out.getvalue())
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=lambda text: text or "default")
def example(request: pytest.FixtureRequest) -> Plain:
    return written(Snapshot(request.param))


def test_pytorch_sums_it_up(example: Plain) -> None:
    """It asserts that the blocks tile their segments and that all sums agree."""
    text = _memory_viz.segsum(example)
    reserved = sum(segment["total_size"] for segment in example["segments"])
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in text
    assert f"total_allocated: {_memory_viz.Bytes(24 * M + 1000 + 8)}" in text


def test_pytorch_prints_its_trace(example: Plain) -> None:
    lines = _memory_viz.trace(example).splitlines()
    assert lines[:2] == ["Device 0 ----------------", f"{len(example['device_traces'][0])} entries"]
    assert sum(" = " in line and "cudaMalloc" not in line for line in lines) == 4  # h, its workspace, d, g
    assert any(line.endswith(":15.0MiB]") for line in lines)


def test_pytorch_plots_it(example: Plain) -> None:
    for plot in (_memory_viz.trace_plot(example), _memory_viz.trace_plot(example, plot_segments=True)):
        assert "Memory Timeline" in plot
    assert "Allocator State History" in _memory_viz.segment_plot(example)
    assert _memory_viz.trace_plot(example, filter_freed=True)


def test_pytorch_makes_flame_graphs_of_it(example: Plain) -> None:
    text = _memory_viz.memory(example, format_flamegraph=lambda lines: lines)
    assert f"stream_0;active_allocated;setup:0:parameter w {12 * M}\n" in text
    assert _memory_viz.segments(example, format_flamegraph=lambda lines: lines)
    assert "only_before" in _memory_viz.compare(example["segments"], [], format_flamegraph=lambda lines: lines)


@pytest.mark.parametrize("record", ["last", "all"])
def test_it_holds_nothing_but_plain_data(record: str) -> None:
    """The viewer's unpickler knows few opcodes, and protocols up to 4; its numbers are exact below 2**53."""
    out = io.BytesIO()
    Snapshot(record=record).emit(bind(parse(STEP), {"B": 1}), out)
    known = {
        *("PROTO", "FRAME", "MEMOIZE", "BINGET", "LONG_BINGET", "MARK", "STOP", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "TUPLE2"),
    }
    for opcode, argument, _ in pickletools.genops(out.getvalue()):
        assert opcode.name in known
        assert opcode.name != "PROTO" or argument == 4
        assert not isinstance(argument, int) or abs(argument) < 2**53


def test_the_events_of_the_last_step() -> None:
    """As in the third step that test_allocator_replay.py works out: nothing is new, d has the segment of 16 MiB."""
    (trace,) = written(Snapshot())["device_traces"]
    base = min(segment["address"] for segment in written(Snapshot())["segments"])
    seen = [(e["action"], (e["addr"] - base) // M, e["size"] // M, e["frames"][0]["name"]) for e in trace]
    assert seen == [
        ("alloc", 14 + 12, 3, "activation h"),
        ("alloc", 14 + 15, 2, "workspace"),
        ("free_requested", 14 + 15, 2, "workspace"),
        ("free_completed", 14 + 15, 2, "workspace"),
        ("alloc", 46, 15, "temporary d"),
        ("free_requested", 14 + 12, 3, "activation h"),
        ("free_completed", 14 + 12, 3, "activation h"),
        ("alloc", 34, 12, "gradient g"),
        ("free_requested", 46, 15, "temporary d"),
        ("free_completed", 46, 15, "temporary d"),
        ("free_requested", 34, 12, "gradient g"),
        ("free_completed", 34, 12, "gradient g"),
    ]
    assert [event["time_us"] for event in trace] == list(range(12))


def test_frames_are_on_the_users_lines() -> None:
    (trace,) = written(Snapshot())["device_traces"]
    assert trace[4]["frames"] == [
        {"filename": "aten.mm", "line": 0, "name": "temporary d"},
        {
            "filename": "model.py",
            "line": 3,
            "name": "up (backward)",
            "fx_node_op": "call_function",
            "fx_node_name": "d",
            "fx_original_trace": 'File "model.py", line 3, in up',
        },
    ]
    # an event without a line: the module's path, or what stands for it
    assert trace[-1]["frames"][1] == {"filename": "optimizer", "line": 0, "name": "zero_grad (optimizer)"}


def test_phases_are_annotations() -> None:
    last = [(a["stage"], a["name"], a["time_us"]) for a in written(Snapshot())["external_annotations"]]
    assert last == [
        ("START", "forward", 0),
        ("END", "forward", 4),
        ("START", "backward", 4),
        ("END", "backward", 10),
        ("START", "optimizer", 10),
        ("END", "optimizer", 12),
    ]
    every = [a["name"] for a in written(Snapshot(record="all"))["external_annotations"] if a["stage"] == "START"]
    assert every == ["forward", "backward", "optimizer"] * 3


def test_the_last_step_is_the_end_of_all() -> None:
    last, every = (written(Snapshot(record=record)) for record in ("last", "all"))
    assert last["segments"] == every["segments"]
    ours, all_of_them = last["device_traces"][0], every["device_traces"][0]
    keys = ("action", "addr", "size", "stream", "frames")
    assert [[e[k] for k in keys] for e in ours] == [[e[k] for k in keys] for e in all_of_them[-len(ours) :]]
    assert [e["action"] for e in all_of_them[:2]] == ["segment_alloc", "alloc"]
    assert all_of_them[1]["frames"] == [{"filename": "setup", "line": 0, "name": "parameter w"}]


def test_settings_and_streams_are_written() -> None:
    found = written(Snapshot("expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:4"))
    assert found["allocator_settings"] == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:4",
        "max_split_size": 64 * M,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": True,
        "roundup_power2_divisions": {str(2**i): 4 for i in range(16)},
    }
    assert {segment["is_expandable"] for segment in found["segments"]} == {True}
    text = KEPT.replace("aten.mm(%w)", "aten.mm(%w) stream comm")
    out = io.BytesIO()
    Snapshot().emit(parse(text), out)
    streams = {segment["stream"] for segment in pickle.loads(out.getvalue())["segments"]}
    assert streams == {0, 1}


def test_a_failure_is_the_last_event() -> None:
    found = written(Snapshot(capacity=55 * M, record="all"))
    event = found["device_traces"][0][-1]
    assert (event["action"], event["size"], event["device_free"]) == ("oom", 12 * M, 5 * M)
    assert "addr" not in event
    assert event["frames"][0]["filename"] == "aten.mm"
    assert "raise OutOfMemoryError # 12.0MiB requested, 5.0MiB free in CUDA" in _memory_viz.trace(found)


def test_what_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match="no value is given for B"):
        Snapshot().build(parse(STEP))
    with pytest.raises(UsageError, match="record is last or all, not 'first'"):
        Snapshot(record="first").build(bind(parse(STEP), {"B": 1}))
    with pytest.raises(UsageError, match="0 steps"):
        Snapshot(steps=0).build(bind(parse(STEP), {"B": 1}))


@given(st.data(), st.sampled_from(CONFIGURATIONS), st.sampled_from(("last", "all")))
def test_undoing_the_events_leads_back(data: st.DataObject, settings: str, record: str) -> None:
    """As the viewer does it: from the final segments backwards, every block lies in memory that is there, and figures agree."""
    program = data.draw(programs.programs())
    env = data.draw(programs.points(program))
    found = Snapshot(settings, 2, record).build(bind(program, env))
    assert found["segments"] == sorted(found["segments"], key=lambda segment: segment["address"])
    pages = {p for s in found["segments"] for p in range(s["address"] // M, (s["address"] + s["total_size"]) // M)}
    blocks = {b["address"]: b for s in found["segments"] for b in s["blocks"] if b["state"] != "inactive"}
    allocated = {address: block["requested_size"] for address, block in blocks.items()}
    most = len(pages)
    for event in reversed(found["device_traces"][0]):
        touched = range(event["addr"] // M, -(-(event["addr"] + event["size"]) // M))
        match event["action"]:
            case "alloc":
                assert pages.issuperset(touched)
                assert allocated.pop(event["addr"]) == event["size"]
            case "free_completed":
                assert pages.issuperset(touched)
                assert event["addr"] not in allocated
                allocated[event["addr"]] = event["size"]
            case "segment_alloc" | "segment_map":
                assert pages.issuperset(touched)
                pages.difference_update(touched)
            case "segment_free" | "segment_unmap":
                assert pages.isdisjoint(touched)
                pages.update(touched)
        most = max(most, len(pages))
    expected = simulate(program, env, parse_settings(settings), steps=2)
    assert most * M == expected.reserved_peak
    if record == "all":
        assert (pages, allocated) == (set(), {})


ARGUMENTS = ["tests/cases/small_gpt.py", "-b", "2", "-s", "16", "--mode", "forward", "--to", "snapshot"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["export", *ARGUMENTS, *arguments])


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = run("-o", str(tmp_path / "mem.pickle"), "--alloc-conf", "expandable_segments:True")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    found = pickle.loads((tmp_path / "mem.pickle").read_bytes())
    assert found["allocator_settings"]["expandable_segments"] is True
    files = {frame["filename"] for event in found["device_traces"][0] for frame in event["frames"]}
    assert "tests/cases/small_gpt.py" in files or "small_gpt.py" in files
    # and without -o to stdout, which is a pipe here; the same bytes every time
    again = run("--alloc-conf", "expandable_segments:True")
    assert (again.exit_code, again.stderr) == (0, "")
    assert again.stdout_bytes == (tmp_path / "mem.pickle").read_bytes()


def test_bad_input_is_told_before_anything_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("memir.api.program_of", lambda *_, **__: pytest.fail("it was traced"))
    result = run("--alloc-conf", "expandable_segments:yes")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: expandable_segments is True or False, not 'yes'\n  PYTORCH_CUDA_ALLOC_CONF:1:21\n")
    assert run("--steps", "0").exit_code == 2


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = run("-o", str(tmp_path / "no" / "mem.pickle"))
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


def test_a_terminal_gets_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from memir.cli import export

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(export.sys, "stdout", Terminal())
    with pytest.raises(UsageError, match="binary"):
        export.command.main([*ARGUMENTS], standalone_mode=False)
