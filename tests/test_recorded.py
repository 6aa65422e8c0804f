"""Recorded snapshots: read as data only, checked, reckoned backwards, and compared with what was predicted."""

from __future__ import annotations

import copy
import datetime
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from memir import api
from memir.analysis.liveness import flatten, timeline
from memir.backends.snapshot import Snapshot
from memir.cli import main
from memir.errors import InconclusiveError, UsageError
from memir.ir.parser import parse
from memir.ir.unroll import bind
from memir.recorded.compare import Comparison, Difference, Request, compare
from memir.recorded.history import Figures, history
from memir.recorded.recording import Recording, frame_texts, parse_recording, read_recording
from memir.recorded.steps import by_sizes
from memir.recorded.text import to_data, to_text
from memir.recorded.unpickle import unpickle
from memir.report import Subject
from tests import programs
from tests.test_allocator_replay import SMALL, STEP, M

Plain = dict[str, Any]


def snapshot(record: str = "all", text: str = STEP) -> Plain:
    """What memir exports of the program in text: three steps from an empty GPU on."""
    return Snapshot(record=record).build(bind(parse(text), {"B": 1}))


def recording(data: object) -> Recording:
    return parse_recording(data, "mem.pickle")


def without_annotations(data: Plain) -> Plain:
    return {**data, "external_annotations": []}


# what is read


class Evil:
    """Would make a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("deep", [False, True])
def test_nothing_in_a_pickle_is_run(protocol: int, deep: bool, tmp_path: Path) -> None:
    evil: object = Evil(tmp_path / "made")
    if deep:
        evil = snapshot() | {"allocator_settings": {"x": [evil]}}
    with pytest.raises(UsageError, match=r"is not only data: it names .*mkdir, and nothing of it was run"):
        unpickle(pickle.dumps(evil, protocol), "mem.pickle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'touch made'\ntR.",  # GLOBAL, REDUCE
        b"(S'touch made'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch made'\no.",  # OBJ
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",  # STACK_GLOBAL
        b"\x80\x02cbuiltins\nobject\n)\x81.",  # NEWOBJ
        b"\x80\x02cbuiltins\nobject\n)}\x92.",  # NEWOBJ_EX
        b"cbuiltins\ngetattr\n.",
        b"Pid\n.",  # PERSID
        b"\x80\x02K\x01Q.",  # BINPERSID
    ],
)
def test_every_way_to_name_something_is_refused(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is not only data: it (names|refers)"):
        unpickle(data, "mem.pickle")
    assert list(tmp_path.iterdir()) == []


def test_the_extension_registry_names_nothing_either() -> None:
    with pytest.raises(UsageError):
        unpickle(b"\x80\x02\x82\x01.", "mem.pickle")


@pytest.mark.parametrize(
    "value", [datetime.date(2025, 1, 1), Path("x"), 1j, range(3), slice(1)], ids=lambda v: type(v).__name__
)
def test_objects_are_no_data(value: object) -> None:
    with pytest.raises(UsageError, match="is not only data"):
        unpickle(pickle.dumps([value]), "mem.pickle")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 a zip file",
        b"{'segments': []}",
        b"\x80\x04",
        b"\x80\x63.",
        b".",
        b"\x80\x02h\x05.",
        b"]}s.",
        b"\xff" * 9,
    ],
)
def test_what_is_no_pickle_is_told(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"mem\.pickle is no pickle, or a damaged one"):
        unpickle(data, "mem.pickle")


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_snapshot_is_read_or_refused(place: int, byte: int) -> None:
    """One byte altered, or the end cut off: never another error than the one for people."""
    data = bytearray(pickle.dumps(snapshot("last"), 4))
    place %= len(data)
    for damaged in (data[:place], data[:place] + bytes([byte]) + data[place + 1 :]):
        try:
            history(recording(unpickle(bytes(damaged), "mem.pickle")), "mem.pickle")
        except UsageError:
            continue


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="cannot read"):
            read_recording(path)


def altered(change: Callable[[Plain], object]) -> Plain:
    data = copy.deepcopy(snapshot("last"))
    change(data)
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (altered(lambda d: d.pop("segments")), "it is a dict without 'segments'"),
        (altered(lambda d: d.pop("device_traces")), "it has no 'device_traces': torch before 2.0 wrote it"),
        ([], "it is a list, as torch.cuda.memory_snapshot"),
        (7, "it is an int without 'segments'"),
        (altered(lambda d: d.update(device_traces=[[]])), "has no events of device 0: the history was not recorded"),
        (altered(lambda d: d.update(segments=None)), "segments is a NoneType, not list"),
        (altered(lambda d: d["segments"].append(3)), r"segments\[5\] is an int, not dict"),
        (altered(lambda d: d["segments"][0].pop("address")), r"segments\[0\] has no 'address'"),
        (altered(lambda d: d["segments"][0].update(total_size=5)), r"the blocks of segments\[0\] have"),
        (altered(lambda d: d["segments"][0].update(address="x")), r"segments\[0\].address is a str, not int"),
        (altered(lambda d: d["segments"][0].update(address=True)), r"segments\[0\].address is a bool, not int"),
        (altered(lambda d: d["segments"][0].update(address=-1)), r"segments\[0\].address is -1"),
        (altered(lambda d: d["segments"][0]["blocks"][0].pop("requested_size")), "a torch before 2.1 wrote it"),
        (altered(lambda d: d["device_traces"][0][2].pop("size")), r"device_traces\[0\]\[2\] has no 'size'"),
        (altered(lambda d: d["device_traces"][0][2].update(frames=3)), r"device_traces\[0\]\[2\].frames is an int"),
        (altered(lambda d: d.update(external_annotations={})), "external_annotations is a dict, not list"),
        (altered(lambda d: d["segments"][0].update(device=1)), "is of several devices: 0, 1"),
    ],
)
def test_what_is_no_snapshot_is_told_with_its_place(data: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recording(data)


def test_one_of_several_devices_is_read() -> None:
    data = snapshot()
    segments = data["segments"] + [{**s, "device": 1} for s in data["segments"][:2]]
    both = {**data, "segments": segments, "device_traces": [data["device_traces"][0], data["device_traces"][0][:5]]}
    found = parse_recording(both, "mem.pickle", 1)
    assert (len(found.segments), len(found.events), found.annotations) == (2, 5, ())
    with pytest.raises(UsageError, match="has nothing of device 2"):
        parse_recording(both, "mem.pickle", 2)


def test_what_later_versions_add_is_passed_over() -> None:
    data = snapshot("last")
    data["device_traces"][0].insert(3, {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": []})
    data["device_traces"][0].insert(3, {"action": "user_defined", "new": 1})
    data["new"] = [1.5, None, (2, True)]
    assert recording(data).events == recording(snapshot("last")).events


# figures


def test_figures_are_reckoned_backwards() -> None:
    found = history(recording(snapshot("all")), "mem.pickle")
    assert found.start == Figures(0, 0, 0)
    resident = 24 * M + 1008
    assert found.after[-1] == Figures(resident, 24 * M + SMALL, 62 * M)
    last = history(recording(snapshot("last")), "mem.pickle")
    assert last.start == last.after[-1] == found.after[-1]
    # while g is made: w, m, d, g
    assert last.peak(0, len(last.after)) == Figures(51 * M + 1008, 51 * M + SMALL, 62 * M)


@given(st.data())
def test_the_peak_of_an_exported_step_is_that_of_the_live_bytes(data: st.DataObject) -> None:
    program = data.draw(programs.programs())
    env = data.draw(programs.points(program))
    exported = Snapshot(steps=2).build(bind(program, env))
    if exported["device_traces"][0]:
        found = history(recording(exported), "mem.pickle")
        assert found.peak(0, len(found.after)).requested == timeline(flatten(program)).evaluate(env).peak


def test_events_that_contradict_the_segments_are_told() -> None:
    with pytest.raises(UsageError, match="the events contradict the segments: before event"):
        history(recording(altered(lambda d: d.update(segments=[], device_traces=[d["device_traces"][0][:1]]))), "mem.pickle")


# steps and comparisons


def compared(recorded: Plain, predicted: Plain | None = None) -> Comparison:
    return compare(recording(predicted or snapshot("last")), recording(recorded), "mem.pickle")


@pytest.mark.parametrize("change", [lambda d: d, without_annotations], ids=["annotations", "sizes"])
def test_a_step_equals_itself(change: Callable[[Plain], Plain]) -> None:
    found = compared(change(snapshot("all")))
    assert (found.first, found.only_predicted, found.only_recorded) == (None, (), ())
    assert found.agrees(0)
    assert [row.name for row in found.phases] == ["forward", "backward", "optimizer"]
    for row in (found.steady, found.step, *found.phases[:2]):
        assert row.predicted == row.recorded
        assert row.num_predicted == row.num_recorded
    assert found.by == ("annotations" if change(snapshot("last"))["external_annotations"] else "sizes")


def test_the_step_of_torchs_own_annotation() -> None:
    """torch.optim annotates its step itself; a loop says forward and backward."""
    data = snapshot("all")
    for entry in data["external_annotations"]:
        if entry["name"] == "optimizer":
            entry["name"] = "Optimizer.step#AdamW.step"
    data["external_annotations"].insert(
        0, {"stage": "START", "name": "Optimizer.zero_grad#AdamW.zero_grad", "device": 0, "time_us": 3}
    )
    found = compared(data)
    assert (found.by, found.first) == ("annotations", None)


def grown(data: Plain, size: int, change: Callable[[Plain], object]) -> Plain:
    """The snapshot without annotations, all events of that size in the last step changed."""
    data = copy.deepcopy(without_annotations(data))
    events = data["device_traces"][0]
    for event in events[-12:]:
        if event["size"] == size:
            change(event)
    return data


def test_the_first_difference_is_named() -> None:
    data = grown(snapshot("all"), 15 * M, lambda event: event.update(size=16 * M))
    found = compared(data)
    place = "model.py:3 up (backward)"
    assert found.first == Difference(3, Request(15 * M, place), Request(16 * M, place))
    assert (found.only_predicted, found.only_recorded) == (((15 * M, 1),), ((16 * M, 1),))
    assert not found.agrees(0)
    assert not found.agrees(M - 1)
    assert found.agrees(M)
    # the backward phase begins with the request that differs, which is known; the optimizer's makes none and is not told
    assert [row.recorded is not None for row in found.phases] == [True, False, False]


def test_requests_that_a_step_makes_besides() -> None:
    """A batch that is copied before the step, and a workspace in it."""
    data = copy.deepcopy(without_annotations(snapshot("all")))
    events = data["device_traces"][0]
    first = len(events) - 12
    address = events[first]["addr"] + 4 * M
    extra = [
        {"action": action, "addr": address, "size": 2048, "stream": 0, "frames": []}
        for action in ("alloc", "free_requested", "free_completed")
    ]
    events[first + 5 : first + 5] = copy.deepcopy(extra)
    events[first:first] = copy.deepcopy(extra)
    found = compared(data)
    assert found.first is not None
    assert (found.first.number, found.first.predicted, found.first.recorded) == (
        4,
        Request(12 * M, "model.py:3 up (backward)"),
        Request(2048, ""),
    )
    assert (found.only_predicted, found.only_recorded) == ((), ((2048, 1),))
    assert found.step.num_recorded == 5
    assert found.agrees(0)


def test_a_step_that_ends_early_has_no_request_where_the_other_has_one() -> None:
    data = copy.deepcopy(without_annotations(snapshot("all")))
    events = data["device_traces"][0]
    gone = [n for n, e in enumerate(events) if e["frames"][0]["name"] == "gradient g"][-3:]
    data["device_traces"] = [[e for n, e in enumerate(events) if n not in gone]]
    found = compared(data)
    assert found.first == Difference(4, Request(12 * M, "model.py:3 up (backward)"), None)


def test_a_recording_of_something_else_is_inconclusive() -> None:
    data = without_annotations(snapshot("all", STEP.replace("12582912", "11534336").replace("3145728", "4194304")))
    other = [event for event in data["device_traces"][0] if event["size"] not in (2 * M, 15 * M)]
    data = {**data, "device_traces": [other], "segments": snapshot("last")["segments"]}
    with pytest.raises(InconclusiveError, match="no step in it asks for what the predicted one does"):
        compared(data)


def test_of_a_recording_that_begins_within_a_step_a_whole_one_is_taken() -> None:
    data = copy.deepcopy(without_annotations(snapshot("all")))
    data["device_traces"][0] = data["device_traces"][0][:-4]  # within the last backward: the sizes before are those of step 2
    step = by_sizes(recording(data), [3 * M, 2 * M, 15 * M, 12 * M])
    assert step is not None


def test_the_users_frame_is_shown() -> None:
    from memir.recorded.compare import user_frame

    frames = [
        {"filename": "??", "line": 0, "name": "c10::Allocator"},
        {"filename": "/env/lib/python3.12/site-packages/torch/nn/functional.py", "line": 9, "name": "gelu"},
        {"filename": "/home/me/model.py", "line": 42, "name": "forward"},
    ]
    (event,) = recording(
        altered(lambda d: d["device_traces"].__setitem__(0, [{**d["device_traces"][0][0], "frames": frames}]))
    ).events
    assert user_frame(event) == "/home/me/model.py:42 forward"
    assert frame_texts(event)[0] == "??:0 c10::Allocator"


# what is printed


def test_the_screen() -> None:
    data = grown(snapshot("all"), 15 * M, lambda event: event.update(size=16 * M))
    assert to_text(compared(data), "model.py   B=1 S=1") == (
        "model.py   B=1 S=1   recorded: 45 events, the step told by sizes\n"
        "\n"
        "  bytes                      predicted            recorded             error\n"
        "  between steps             25,166,832          25,166,832                +0\n"
        "  forward                   30,409,712          30,409,712                +0\n"
        "  backward                  53,478,384                   ?\n"
        "  optimizer                 37,749,744                   ?\n"
        "  peak                      53,478,384          54,526,960        -1,048,576  -1.9230%\n"
        "  allocated                 53,478,912          54,527,488        -1,048,576  -1.9230%\n"
        "  reserved                  65,011,712          65,011,712                +0\n"
        "  allocations                        4                   4                +0\n"
        "\n"
        "  first difference: allocation 3 of the step\n"
        "    predicted       15,728,640  model.py:3 up (backward)\n"
        "    recorded        16,777,216  model.py:3 up (backward)\n"
        "  predicted only: 1 x 15,728,640\n"
        "  recorded only: 1 x 16,777,216"
    )
    assert to_text(compared(snapshot()), "x").endswith("\n\n  no difference: the same sizes in the same order")


def test_the_data() -> None:
    found = to_data(compared(snapshot()))
    assert json.loads(json.dumps(found)) == found
    assert (found["schema_version"], found["step_told_by"], found["first_difference"]) == (1, "annotations", None)
    assert found["phases"][1]["recorded"]["requested"] == found["step"]["predicted"]["requested"] == 51 * M + 1008


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's target is the program STEP."""
    subject = Subject("model.py", "Model", "model.py:1", 3, 3, None, None, ())
    traced = api.TracedProgram(parse(STEP), None, subject, {"B": 1, "S": 1}, {}, (), ())
    monkeypatch.setattr(api, "program_of", lambda *_, **__: traced)


def run(tmp_path: Path, data: object, *arguments: str) -> Result:
    path = tmp_path / "mem.pickle"
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
    return CliRunner().invoke(main, ["compare", "model.py", str(path), *arguments])


@pytest.mark.usefixtures("target")
def test_the_exit_codes(tmp_path: Path) -> None:
    result = run(tmp_path, snapshot())
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("model.py   B=1 S=1   recorded: 45 events, the step told by annotations\n")
    other = grown(snapshot("all"), 15 * M, lambda event: event.update(size=16 * M))
    assert run(tmp_path, other).exit_code == 1
    assert run(tmp_path, other, "--tolerance", str(M)).exit_code == 0
    result = run(tmp_path, pickle.dumps(Evil(tmp_path / "made")))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert not (tmp_path / "made").exists()
    assert run(tmp_path, snapshot(), "--device", "3").exit_code == 2
    assert run(tmp_path, snapshot(), "--alloc-conf", "x").exit_code == 2
    unlike = copy.deepcopy(without_annotations(snapshot("all")))
    unlike["device_traces"][0] = unlike["device_traces"][0][:2]
    assert run(tmp_path, unlike).exit_code == 3


@pytest.mark.usefixtures("target")
def test_json(tmp_path: Path) -> None:
    found = json.loads(run(tmp_path, snapshot(), "--format", "json").stdout)
    assert found["step"]["recorded_allocations"] == 4
