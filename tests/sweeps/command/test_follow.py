"""Tests of following a log: its pieces, and kills in between, do not change the resulting journal."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.command.compute import Compute
from sweeps.command.follow import Follower, MetricsError
from sweeps.command.growing import Ending, GrowingLog, HalfLineEnd, Rows
from sweeps.command.metrics import Source
from sweeps.command.settings import STDOUT, Command
from sweeps.run.journal import Journal, JournalView, read_journal
from sweeps.source.raw import read_logs

TOKENS = Compute("tokens", "tokens", per_step=False, restarts=False, factor=1.0)
COMMAND = Command(
    words=("train",), files={}, env={}, folder=Path(), source=STDOUT, is_pattern=False, step=None,
    rewards={"heldout": "reward"}, keep=("loss",), compute=TOKENS, anew=False, add=(), checkpoints=None,
    stop_signal=None, stop_file=None, stop_within_s=1.0, within=0,
)  # fmt: skip
WANTED = ("reward", "loss", "tokens")


class Member:
    """A member whose attempts write to one log, which a Follower turns into its journal.

    Args:
        run_dir: its folder.
        name: file name of its log.
        changes: fields of the Command that differ from COMMAND.
    """

    def __init__(self, run_dir: Path, name: str = "log.jsonl", **changes: Any) -> None:
        self.run_dir, self.log = run_dir, run_dir / name
        self.command = replace(COMMAND, source=str(self.log), **changes)
        self.cuts: list[HalfLineEnd] = []
        self.begun = False
        Journal(run_dir).header(axis=self.command.compute.axis)

    def attempt(self, *writes: bytes | Callable[[], object], ending: Ending | None = Ending.WHOLE) -> JournalView:
        """Append each of `writes` to the log, or call it, and poll after each. `ending` None: the member is killed."""
        earlier = read_journal(self.run_dir)
        source, journal = Source(self.command, self.run_dir, self.cuts), Journal(self.run_dir)
        follower = Follower(journal, earlier, self.command, source)
        follower.started_before, self.begun = self.begun, True
        follower.catch_up()
        self.cuts += [cut for cut in [source.mark_half_line()] if cut is not None]
        for write in writes:
            if isinstance(write, bytes):
                with self.log.open("ab") as handle:
                    handle.write(write)
            else:
                write()
            follower.update()
        if ending is not None:
            follower.update(ending)
        journal.close()
        return read_journal(self.run_dir)


def rows(*steps: int, tokens: int = 100, **more: float) -> bytes:
    """Return JSON lines with tokens, a loss and a reward at each step."""
    return b"".join(
        json.dumps(
            {"step": step, "tokens": tokens * step, "loss": 1 / (1 + step), "reward": step / 100, **more}
        ).encode()
        + b"\n"
        for step in steps
    )


def points(view: JournalView, metric: str = "eval/heldout/pass_rate") -> dict[int, tuple[float, float]]:
    """Return (reward or another metric, compute) by step."""
    return {r.step: (r.metrics[metric], r.metrics["compute/tokens"]) for r in view.records if metric in r.metrics}


# --- any split into appends --------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.floats(), st.integers(-5, 5), st.sampled_from(["0.5", "21%", "nan", "", "x", " 3 "]))
CELL = st.one_of(NUMBERS, st.none(), st.booleans(), st.just({"a": 1}))


@st.composite
def logs(draw: st.DrawFn, names: Sequence[str] = ("step",)) -> bytes:
    """Draw a log of JSON lines: sparse, with cells of many types, and with Windows line ends.

    By default there is only one name for the step column. With several, a later column may take precedence as the step,
    which changes the steps of rows that were read already.
    """
    step, tokens, lines = 0, 0.0, []
    for _ in range(draw(st.integers(0, 12))):
        further = draw(st.integers(0, 2))
        step += further
        tokens += (
            draw(st.floats(0, 1e6)) if further else 0.0
        )  # one number per step, even if the step is logged several times
        row: dict[str, Any] = {draw(st.sampled_from(names)): draw(st.sampled_from([step, str(step)]))}
        if draw(st.booleans()):
            row["tokens"] = tokens
        for name in draw(st.sets(st.sampled_from(["reward", "loss", "é"]))):
            row[name] = draw(CELL)
        lines.append(json.dumps(row, ensure_ascii=draw(st.booleans())))
    return "".join(line + draw(st.sampled_from(["\n", "\r\n", "\n\n"])) for line in lines).encode()


def pieces(whole: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Split a log into the pieces in which it is appended."""
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    return [whole[a:b] for a, b in pairwise(places)]


@settings(max_examples=100)
@given(logs(), st.lists(st.integers(0, 10_000), max_size=8))
def test_any_split_of_a_log_gives_the_journal_of_the_whole(whole: bytes, cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for name, parts in (("once", [whole]), ("pieces", pieces(whole, cuts))):
            (run_dir := Path(folder) / name).mkdir()
            member, message = Member(run_dir), ""
            try:
                member.attempt(*parts)
            except MetricsError as error:  # for example, no column of tokens
                message = str(error).replace(str(run_dir), "")
            results.append((read_journal(run_dir).deterministic(), message))
        assert results[0] == results[1]


@settings(max_examples=100)
@given(logs(names=("step", "global_step", "_step")), st.lists(st.integers(0, 10_000), max_size=6))
def test_growing_json_lines_give_the_rows_of_the_whole_file(whole: bytes, cuts: list[int]) -> None:
    assert_same_as_whole("log.jsonl", whole, cuts)


TEXT = st.one_of(
    st.floats().map(str),
    st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(["", " ", "x", "5%", "True", "1e400", "007"]),
)


@settings(max_examples=100)
@given(
    st.lists(st.lists(TEXT, max_size=5), min_size=1, max_size=8),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(0, 10_000), max_size=6),
)
def test_a_growing_csv_gives_the_rows_of_the_whole_file(table: list[list[str]], end: str, cuts: list[int]) -> None:
    lines = ["step,tokens,reward,loss", *(",".join([str(n), *cells][:4]) for n, cells in enumerate(table))]
    assert_same_as_whole("log.csv", "".join(line + end for line in lines).encode(), cuts)


def assert_same_as_whole(name: str, whole: bytes, cuts: list[int]) -> None:
    """Compare the rows of a log that is read in pieces with those of the readers of complete files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        growing = GrowingLog(path, lambda: Rows(WANTED, None))
        path.touch()
        for part in pieces(whole, cuts):
            with path.open("ab") as handle:
                handle.write(part)
            growing.update(Ending.OPEN)
        actual = growing.rows
        if actual.count:
            (log,) = read_logs(path)
            wanted = {n: log.series(n) for n in WANTED if n in log.names}
            columns = {n: list(zip(s.steps.tolist(), s.values.tolist(), strict=True)) for n, s in wanted.items()}
            assert (actual.columns, list(actual.names), actual.count) == (columns, list(log.names), log.rows)


# --- killed within a line -----------------------------------------------------------------------------------------


def test_half_a_number_is_not_read(tmp_path: Path) -> None:
    """A number that is only half written looks like a counter that went back, which would end the run."""
    member = Member(tmp_path, "log.csv")
    journal_view = member.attempt(b"step,tokens,reward\n1,1000,0.1\n2,2000,0.2\n3,3", b"000,0.3\n")
    assert points(journal_view) == {1: (0.1, 1000), 2: (0.2, 2000), 3: (0.3, 3000)}


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "stdout.txt"])
def test_a_line_torn_by_a_kill_does_not_damage_later_rows(tmp_path: Path, name: str) -> None:
    """The next attempt appends to the torn line. The two halves may look like a row, or not be a row at all."""
    member = Member(tmp_path, name)
    if name == "stdout.txt":
        member.command = replace(member.command, source=STDOUT)
    if name == "log.csv":
        member.attempt(b"step,tokens,reward\n1,1000,0.1\n2,2000,0.2\n3,30", ending=None)
        journal_view = member.attempt(b"2,2000,0.25\n", b"3,3000,0.35\n")
    else:
        member.attempt(
            b'{"step": 1, "tokens": 1000, "reward": 0.1}\n{"step": 2, "tokens": 2000, "reward": 0.2}\n{"st', ending=None
        )
        journal_view = member.attempt(
            b'{"step": 2, "tokens": 2000, "reward": 0.25}\n', b'{"step": 3, "tokens": 3000, "reward": 0.35}\n'
        )
    assert points(journal_view) == {1: (0.1, 1000), 2: (0.25, 2000), 3: (0.35, 3000)}
    again = member.attempt(ending=None)  # the same log is read again: nothing is recorded twice
    assert again.deterministic() == journal_view.deterministic()


def test_a_last_row_without_newline_counts_if_the_command_succeeded(tmp_path: Path) -> None:
    for ending, last in ((Ending.WHOLE, {1, 2}), (Ending.TORN, {1})):
        (run_dir := tmp_path / ending.value).mkdir()
        journal_view = Member(run_dir, "log.csv").attempt(b"step,tokens,reward\n1,1000,0.1\n2,2000,0.2", ending=ending)
        assert points(journal_view).keys() == last


def test_only_a_damaged_line_is_lost(tmp_path: Path) -> None:
    """Regression: one broken line made a JSON file unreadable."""
    journal_view = Member(tmp_path).attempt(rows(1, 2) + b'{"step": 3, "tok\n' + rows(4, 5))
    assert points(journal_view).keys() == {1, 2, 4, 5}


# --- attempts ----------------------------------------------------------------------------------------------------


def test_a_log_cut_back_to_its_checkpoint_is_not_a_restart(tmp_path: Path) -> None:
    """Some trainers remove log lines beyond their checkpoint before they continue."""
    member = Member(tmp_path)
    member.attempt(rows(1, 2, 3, 4, 5), ending=None)
    journal_view = member.attempt(lambda: member.log.write_bytes(rows(1, 2, 3)), rows(4, 5, 6, loss=7.0))
    assert points(journal_view).keys() == {1, 2, 3, 4, 5, 6}
    assert points(journal_view, "train/loss")[3][0] == 1 / 4 and points(journal_view, "train/loss")[4][0] == 7.0


def test_steps_of_a_dead_attempt_are_not_taken_for_the_newest(tmp_path: Path) -> None:
    """Both attempts write to one log, and the new one may have used more tokens at an earlier step."""
    member = Member(tmp_path)
    member.attempt(rows(1, 2, 3, 4, 5, 6), ending=None)
    member.attempt(rows(4, 5, tokens=130), ending=None)  # resumed from the checkpoint of step 3; the member is killed
    assert points(member.attempt(ending=None)).keys() == {1, 2, 3, 4, 5}
    journal_view = member.attempt(rows(6, 7, tokens=130))
    assert {step: compute for step, (_, compute) in points(journal_view).items()} == {
        1: 100, 2: 200, 3: 300, 4: 520, 5: 650, 6: 780, 7: 910,
    }  # fmt: skip


def test_rows_that_the_killed_member_had_not_read_replace_the_earlier_ones(tmp_path: Path) -> None:
    member = Member(tmp_path)
    member.attempt(rows(1, 2, 3, 4, 5), ending=Ending.TORN)
    with member.log.open("ab") as handle:  # the command logs this, and its member is killed before the next poll
        handle.write(rows(4, loss=7.0))
    journal_view = member.attempt(ending=None)
    assert points(journal_view, "train/loss")[4][0] == 7.0 and points(journal_view).keys() == {1, 2, 3, 4}


def test_a_late_evaluation_is_not_lost_if_the_member_is_killed(tmp_path: Path) -> None:
    member = Member(tmp_path)
    plain = [json.dumps({"step": step, "tokens": 100 * step}).encode() + b"\n" for step in range(1, 5)]
    member.attempt(*plain, ending=None)
    with member.log.open("ab") as handle:
        handle.write(b'{"step": 2, "reward": 0.5}\n')
    assert points(member.attempt(ending=None)) == {2: (0.5, 200)}


def test_a_restarted_counter_is_added_to_the_earlier_attempts(tmp_path: Path) -> None:
    member = Member(tmp_path, compute=replace(TOKENS, restarts=True))
    member.attempt(rows(1, 2, 3), ending=Ending.TORN)
    lines = [json.dumps({"step": s, "tokens": 100 * (s - 3), "reward": 0.5}).encode() + b"\n" for s in (4, 5, 6)]
    member.attempt(*lines[:2], ending=None)
    with member.log.open("ab") as handle:
        handle.write(lines[2])
    points_by_step = points(member.attempt(ending=None))
    assert [points_by_step[step][1] for step in sorted(points_by_step)] == [100, 200, 300, 400, 500, 600]


def test_a_command_that_starts_anew_sums_from_zero(tmp_path: Path) -> None:
    """The new attempt logs the same rows as the old one. They must be counted once."""
    member = Member(tmp_path, compute=replace(TOKENS, per_step=True), anew=True)
    member.attempt(rows(1, 2, 3), ending=None)
    journal_view = member.attempt(lambda: member.log.write_bytes(rows(1)), rows(2, 3), rows(4, 5))
    assert [compute for _, compute in points(journal_view).values()] == [100, 300, 600, 1000, 1500]


def test_a_fractional_step_is_refused_by_name(tmp_path: Path) -> None:
    """For example a column of epochs. Before this check the journal had steps without a reward."""
    with pytest.raises(MetricsError, match=r"^command.metrics.step: 0.5 in .*log.jsonl is no whole step; name the co"):
        Member(tmp_path).attempt(b'{"step": 0.5, "tokens": 1, "reward": 0.5}\n')


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [(rows(4, tokens=20), "tokens in .* went back at step 4"), (b'{"step": 3.5, "reward": 0.5}\n', "3.5 in .* whole")],
)
def test_the_steps_before_a_wrong_row_are_recorded(tmp_path: Path, wrong: bytes, message: str, at_once: bool) -> None:
    """A poll may read all rows at once, so that the valid ones and the wrong one come together."""
    writes = [rows(1, 2, 3) + wrong + rows(5)] if at_once else [rows(1, 2, 3), wrong, rows(5)]
    with pytest.raises(MetricsError, match=message):
        Member(tmp_path).attempt(*writes)
    assert points(read_journal(tmp_path)) == {step: (step / 100, 100 * step) for step in (1, 2, 3)}


def test_verls_log_and_a_csv_with_quotes_are_followed(tmp_path: Path) -> None:
    (one := tmp_path / "one").mkdir()
    lines = [json.dumps({"step": s, "data": {"tokens": s, "reward": 0.5}}).encode() + b"\n" for s in (1, 2, 3)]
    assert points(Member(one).attempt(*lines)).keys() == {1, 2, 3}
    (two := tmp_path / "two").mkdir()
    journal_view = Member(two, "log.csv").attempt(
        b'step,tokens,reward,note\n1,1,0.1,"a, b"\n', b'2,2,0.2,"c"\n', b"3,3,0.3,d\n"
    )
    assert points(journal_view) == {1: (0.1, 1), 2: (0.2, 2), 3: (0.3, 3)}


def test_a_poll_reads_only_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(tmp_path)
    added: list[int] = []
    add = Rows.add

    def counted(self: Rows, row: dict[str, Any]) -> None:
        added.append(1)
        add(self, row)

    monkeypatch.setattr(Rows, "add", counted)
    member.attempt(*(rows(step) for step in range(1, 101)), ending=None)
    assert len(added) == 100


# --- holes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "holes"),
    [
        (range(1, 6), range(31, 40), [(6, 30)]),
        (range(10, 40, 10), range(40, 80, 10), []),
        (range(10, 30, 10), range(50, 80, 10), [(21, 40)]),
        ([1, 2, 5, 10, 20, 50], [100, 200], []),  # distances between steps grow, so a long last distance is not a hole
        ([1], range(10, 40, 10), []),
        ([1], range(31, 40), [(2, 30)]),
        ([], range(31, 40), [(1, 30)]),
        ([], range(15, 60, 15), []),
        (range(1, 21), range(11, 40), []),
    ],
)
@pytest.mark.parametrize("killed", [False, True])
def test_steps_lost_between_two_attempts_are_a_hole(
    tmp_path: Path, before: Sequence[int], after: Sequence[int], holes: list[tuple[int, int]], killed: bool
) -> None:
    member = Member(tmp_path)
    member.attempt(rows(*before))
    if killed:  # killed before it recorded anything: the next attempt catches up
        member.attempt()
        with member.log.open("ab") as handle:
            handle.write(rows(*after))
        journal_view = member.attempt()
    else:
        journal_view = member.attempt(rows(*after))
    assert journal_view.holes == holes
    assert [r.step for r in journal_view.of_kind("train")] == sorted({*(s for s in before if s < after[0]), *after})
    assert journal_view.of_kind("train")[-1].metrics["compute/tokens"] == 100 * after[-1]


def test_lost_steps_count_the_compute_of_the_steps_before_them(tmp_path: Path) -> None:
    member = Member(tmp_path, compute=replace(COMMAND.compute, per_step=True))
    logged = [re.sub(rb'"tokens": \d+', b'"tokens": 100', rows(*steps)) for steps in (range(1, 6), range(31, 36))]
    member.attempt(logged[0])
    journal_view = member.attempt(logged[1])
    assert [r.metrics["compute/tokens"] for r in journal_view.of_kind("train")][-5:] == [
        100.0 * n for n in range(31, 36)
    ]
