"""Checkpoints: how they are written, which run they belong to, and what happens to damaged ones."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_scalerl import ConfigurationError, Evaluate, ResumableCheckpoint, RolloutDataModule, RunLog, ScaleRL
from lightning_scalerl.axes.loss import DAPO
from lightning_scalerl.callbacks import checkpoint_file, run_log
from lightning_scalerl.callbacks.checkpoint_file import IDENTITY, DirectCheckpointIO
from lightning_scalerl.callbacks.checkpointing import checkpoints, newest_checkpoint, unusable
from lightning_scalerl.state import StateRegistry
from sweeps.run.activity import activity
from sweeps.run.journal import JOURNAL_FILE, read_journal
from tests.examples import every
from tests.helpers import SMALL, SMALL_CORE, CountingTask, fit, quiet
from tests.paths import ROOT

CORE = re.escape(SMALL_CORE)


def lines_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (run_dir / JOURNAL_FILE).read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


def file_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)[0]
        handle.seek(offset)
        handle.write(bytes([byte ^ 1 << bit]))


def middle_of_a_tensor(path: Path) -> int:
    """An offset in the middle of the largest tensor of a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        tensors = [record for record in archive.infolist() if "/data/" in record.filename]
        largest = max(tensors, key=lambda record: record.file_size)
    return largest.header_offset + 200 + largest.file_size // 2


def python(program: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, timeout=300, env=environment, **options,
    )  # fmt: skip


# --- writing ----------------------------------------------------------------------------------------------------

BALLAST = """
import sys, torch
from pathlib import Path
from lightning.pytorch import Callback, Trainer
from lightning_scalerl import ResumableCheckpoint, RolloutDataModule, ScaleRL
from tests.helpers import SMALL, CountingTask, quiet

class Ballast(Callback):
    "State of the given number of MB, as a large model would have."
    def __init__(self, megabytes):
        self.parts = [torch.full((250_000,), float(n)) for n in range(megabytes)]
    def state_dict(self):
        return {"parts": self.parts}

def train(model, directory, megabytes, steps=1, **options):
    module = ScaleRL(model, "scalerl_core", overrides=SMALL)
    trainer = Trainer(max_steps=steps, callbacks=[Ballast(megabytes), ResumableCheckpoint(directory, 1)],
                      **{**quiet(), "enable_checkpointing": True})
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()), **options)
"""

MEASURED = f"""{BALLAST}
def memory(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1000

save, written, grown = Trainer.save_checkpoint, set(), []
def measured(self, *arguments, **options):
    Path("/proc/self/clear_refs").write_text("5")
    before, watching[0] = memory("VmRSS"), True
    save(self, *arguments, **options)
    watching[0] = False
    grown.append(memory("VmHWM") - before)
def audit(event, arguments):
    if watching[0] and event == "open" and isinstance(arguments[2], int) and arguments[2] & 3:
        written.add(str(arguments[0]))
watching = [False]
Trainer.save_checkpoint = measured
sys.addaudithook(audit)
train(sys.argv[1], sys.argv[2], 300)
print("GROWN", max(grown), *written)
"""


@pytest.mark.full
def test_a_checkpoint_needs_no_second_copy_of_the_state(tiny_model_path: str, tmp_path: Path) -> None:
    """300 MB of state are written to one file, without a copy in memory or in the node's temporary folder."""
    directory = tmp_path / "checkpoints"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = python(MEASURED, tiny_model_path, str(directory), env={"TMPDIR": str(temporary)})
    assert done.returncode == 0, done.stderr[-2000:]
    _, grown, *written = done.stdout[done.stdout.index("GROWN") :].split()
    (path,) = checkpoints(directory)
    assert path.stat().st_size > 300e6
    assert float(grown) < 60, "MB"
    assert [Path(name).parent for name in written] == [directory] and written[0].endswith(".part")


KILLED = f"""{BALLAST}
import os, signal
from lightning_scalerl.callbacks import checkpoint_file
write, done = checkpoint_file._File.write, [0]
def killed(self, content):
    done[0] += content.nbytes
    if done[0] > 20e6:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, content)
newest = max(Path(sys.argv[2]).glob("*.ckpt"), default=None)
if sys.argv[3] == "killed":
    checkpoint_file._File.write = killed
train(sys.argv[1], sys.argv[2], 40, steps=int(sys.argv[4]), ckpt_path=newest, weights_only=True)
"""


@pytest.mark.full
def test_a_kill_during_a_save_keeps_the_earlier_checkpoints(tiny_model_path: str, tmp_path: Path) -> None:
    """Whole checkpoints stay. Only the newest partial file is kept, because a whole checkpoint needs the space."""
    directory = tmp_path / "checkpoints"
    assert python(KILLED, tiny_model_path, str(directory), "whole", "2").returncode == 0
    whole = ["step-00000001.ckpt", "step-00000002.ckpt"]
    files_before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert sorted(files_before) == whole
    for _ in range(3):
        killed = python(KILLED, tiny_model_path, str(directory), "killed", "3")
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        partial_files = [path for path in directory.iterdir() if path.suffix == ".part"]
        assert len(partial_files) == 1 and 10e6 < partial_files[0].stat().st_size < 30e6 < len(files_before[whole[0]])
        assert {
            path.name: path.read_bytes() for path in directory.iterdir() if path not in partial_files
        } == files_before
    assert newest_checkpoint(directory).path == directory / whole[1]
    assert python(KILLED, tiny_model_path, str(directory), "whole", "3").returncode == 0
    assert file_names(directory) == ["step-00000002.ckpt", "step-00000003.ckpt"]


def test_a_full_disk_raises_the_systems_own_error(tmp_path: Path) -> None:
    """A full disk is recognized by the system's own OSError, which torch's writer does not raise."""
    # A limit on the file size acts like a full disk.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            DirectCheckpointIO().save_checkpoint({"weights": torch.zeros(2_000_000)}, tmp_path / "x.part")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous_handler)


def test_checkpoints_have_checksums_even_if_the_script_turned_them_off(tmp_path: Path) -> None:
    from torch.serialization import get_crc32_options, set_crc32_options

    set_crc32_options(False)
    try:
        DirectCheckpointIO().save_checkpoint({"scalerl": {}, "w": torch.ones(99)}, tmp_path / "step-00000001.ckpt")
        assert not get_crc32_options()
    finally:
        set_crc32_options(True)
    assert unusable(tmp_path / "step-00000001.ckpt") is None


@pytest.mark.slow
def test_the_trainers_own_checkpoint_io_is_kept(tiny_model_path: str, tmp_path: Path) -> None:
    module = fit(tiny_model_path, tmp_path, steps=1)
    assert not isinstance(module.trainer.strategy.checkpoint_io, DirectCheckpointIO)


# --- flipped bits -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    fit(tiny_model_path, run_dir, steps=4, checkpoint_every=2)
    return run_dir


@pytest.mark.slow
def test_a_leftover_of_a_broken_save_cannot_be_loaded(whole_run: Path, tiny_model_path: str) -> None:
    """It may be complete, but this is unknown, because it never got its final name."""
    (newest, _) = sorted((whole_run / "checkpoints").glob("*.ckpt"), reverse=True)
    for suffix in (".1a2b3c4d.part", ".void"):
        leftover = newest.with_suffix(suffix)
        shutil.copy(newest, leftover)
        module = ScaleRL(tiny_model_path, "scalerl_core", overrides=SMALL)
        with pytest.raises(ConfigurationError, match=f"ckpt_path: .*{suffix}' is what a broken save has left"):
            Trainer(max_steps=5, **quiet()).fit(
                module, datamodule=RolloutDataModule(CountingTask()), ckpt_path=leftover, weights_only=True
            )
        leftover.unlink()


def equal_bitwise(one: Any, other: Any) -> bool:
    """Return True if both are equal bit for bit, including types and order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_layout = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return same_layout and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal_bitwise(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal_bitwise, one, other))
    return bool(one == other) or (one != one and other != other)


def offsets_to_flip(path: Path, source: random.Random) -> Iterator[int]:
    """Offsets all over the file, and as many in the small critical parts: record headers, directory, end."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        headers = [record.header_offset for record in archive.infolist()]
        directory = archive.start_dir
    for _ in range(120):
        yield source.randrange(size)
        yield source.choice(headers) + source.randrange(90)
        yield source.randrange(directory, size)
        yield source.randrange(size - 98, size)
    # The attributes of directory entries. One of their bits makes torch take a tensor for a folder and read nothing.
    entry = directory
    raw = path.read_bytes()
    for _ in range(20):
        yield entry + 38
        entry = raw.index(b"PK\x01\x02", entry + 4)


@pytest.mark.full
def test_no_flipped_bit_changes_what_is_loaded(whole_run: Path, tmp_path: Path) -> None:
    """Each flip is detected or does not affect what is loaded."""
    path = tmp_path / "step-00000004.ckpt"
    path.write_bytes((whole_run / "checkpoints" / path.name).read_bytes())
    assert unusable(path) is None
    saved = torch.load(path, weights_only=True)
    source = random.Random(5)
    detected = 0
    offsets = list(offsets_to_flip(path, source))
    for offset in offsets:
        bit = 4 if offset in offsets[-20:] else source.randrange(8)
        flip(path, offset, bit)
        if unusable(path) is not None:
            detected += 1
        else:
            assert equal_bitwise(torch.load(path, weights_only=True), saved), (offset, bit)
        flip(path, offset, bit)
    assert detected > len(offsets) // 4
    assert unusable(path) is None


@pytest.mark.slow
def test_a_flipped_bit_costs_the_steps_since_the_previous_checkpoint(
    tiny_model_path: str, whole_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The fallback is printed and recorded, and the result equals that of the undisturbed run."""
    fit(tiny_model_path, tmp_path, steps=3, checkpoint_every=1)
    newest = tmp_path / "checkpoints" / "step-00000003.ckpt"
    flip(newest, middle_of_a_tensor(newest))
    capfd.readouterr()
    newest_usable = newest_checkpoint(tmp_path / "checkpoints")
    assert newest_usable.path == tmp_path / "checkpoints" / "step-00000002.ckpt"
    ((checkpoint, reason),) = [(entry.checkpoint, entry.why) for entry in newest_usable.passed_over]
    assert checkpoint == newest.name and re.fullmatch(
        r"damaged: the checksum of archive/data/\d+ does not match", reason
    )
    messages = capfd.readouterr().err.splitlines()
    assert messages == [f"checkpoint {newest.name} is skipped, {reason}; using step-00000002.ckpt instead"]
    module = ScaleRL(tiny_model_path, "scalerl_core", overrides=SMALL)
    callbacks = [Evaluate(2, 2), RunLog(tmp_path, passed_over=newest_usable.passed_over), saver(tmp_path, 2)]
    trainer = Trainer(max_steps=4, callbacks=callbacks, **{**quiet(), "enable_checkpointing": True})
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()), ckpt_path=newest_usable.path, weights_only=True)
    (resume,) = lines_of(tmp_path, "resume")
    assert resume["step"] == 2 and resume["passed_over"] == [{"checkpoint": newest.name, "why": reason}]
    assert read_journal(tmp_path).passed_over == resume["passed_over"]
    trained, undisturbed = (
        [record.deterministic() for record in read_journal(run).of_kind("train")] for run in (tmp_path, whole_run)
    )
    assert [without_waste(entry) for entry in trained] == [without_waste(entry) for entry in undisturbed]


def without_waste(record: tuple[str, int, dict[str, float]]) -> tuple[str, int, dict[str, float]]:
    kind, step, metrics = record
    return kind, step, {name: value for name, value in metrics.items() if "wasted" not in name}


def saver(run_dir: Path, every: int) -> ResumableCheckpoint:
    return ResumableCheckpoint(run_dir / "checkpoints", every)


@pytest.mark.slow
def test_repeated_fallbacks_leave_no_stale_files(tiny_model_path: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    fit(tiny_model_path, tmp_path, steps=2, checkpoint_every=1)
    for steps in (3, 4, 5):
        newest, previous = checkpoints(directory)
        flip(newest, middle_of_a_tensor(newest))
        (directory / "step-00000009.12345678.part").write_bytes(b"half")
        fit(tiny_model_path, tmp_path, steps=steps, checkpoint_every=1, resume=True)
        assert newest_checkpoint(directory).path == directory / f"step-{steps:08d}.ckpt"
        assert file_names(directory) == [f"step-{steps - 1:08d}.ckpt", f"step-{steps:08d}.ckpt"]
        assert previous.exists() or steps > int(previous.stem[5:])


# --- which run they belong to -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_skipped(
    whole_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(whole_run / "checkpoints", tmp_path / "checkpoints"))
    own_checkpoint = newest_checkpoint(directory).path
    assert own_checkpoint == directory / "step-00000004.ckpt"
    saved = torch.load(own_checkpoint, weights_only=True)
    assert saved[IDENTITY]["run"] is None, "a script's checkpoint has no run"
    assert newest_checkpoint(directory, run="abc").path == own_checkpoint, "a checkpoint without a run fits any run"
    saved[IDENTITY]["run"] = "def"
    torch.save(saved, directory / "step-00000006.ckpt")
    usable = newest_checkpoint(directory, run="abc")
    assert usable.path == own_checkpoint
    assert [(entry.checkpoint, entry.why) for entry in usable.passed_over] == [
        ("step-00000006.ckpt", "of another run, def")
    ]
    assert (
        "step-00000006.ckpt is skipped, of another run, def; using step-00000004.ckpt instead" in capfd.readouterr().err
    )
    for run in ("def", None):
        newest = newest_checkpoint(directory, run=run)
        assert newest.path == directory / "step-00000006.ckpt" and newest.passed_over == ()


def test_a_checkpoint_beyond_a_step_is_skipped(whole_run: Path) -> None:
    directory = whole_run / "checkpoints"
    usable = newest_checkpoint(directory, at_most=3)
    assert usable.path == directory / "step-00000002.ckpt"
    assert [(entry.checkpoint, entry.why) for entry in usable.passed_over] == [("step-00000004.ckpt", "beyond step 3")]
    assert newest_checkpoint(directory, at_most=4).passed_over == ()
    none_usable = newest_checkpoint(directory, at_most=1)
    assert none_usable.path is None and len(none_usable.passed_over) == 2
    pipe = directory / "step-00000008.ckpt"
    os.mkfifo(pipe)  # opening it would block for ever
    try:
        assert [(entry.checkpoint, entry.why) for entry in newest_checkpoint(directory, at_most=8).passed_over] == [
            (pipe.name, "no regular file")
        ]
    finally:
        pipe.unlink()


def test_a_checkpoint_that_the_journal_does_not_record_is_skipped(whole_run: Path, tmp_path: Path) -> None:
    """Without a journal, or with another program's file of that name, no checkpoint is skipped."""
    directory = tmp_path / "checkpoints"
    shutil.copytree(whole_run / "checkpoints", directory)
    newest, previous = checkpoints(directory)
    assert newest_checkpoint(directory).path == newest
    lines = (whole_run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    first_checkpoint = next(n for n, line in enumerate(lines) if line.startswith(b'{"kind":"checkpoint"'))
    for kept_lines, path, reason in (
        (lines, newest, None),
        (lines[: first_checkpoint + 2], previous, "beyond step 2, the last checkpoint that metrics.jsonl records"),
        (lines[:1], None, "not recorded in metrics.jsonl"),
        ([b'{"loss": 1}\n'], newest, None),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(kept_lines))
        usable = newest_checkpoint(directory)
        assert usable.path == path
        assert {entry.why for entry in usable.passed_over} == ({reason} if reason else set())


def continue_run(model: str, path: Path, seed: int = 0, recipe: str = "scalerl_core", **options: Any) -> ScaleRL:
    module = ScaleRL(model, recipe, overrides=[*SMALL, *options.get("overrides", ())])
    trainer = Trainer(max_steps=options.get("steps", 6), callbacks=options.get("callbacks", []), **quiet())
    data = RolloutDataModule(options.get("task") or CountingTask(), seed=seed)
    trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    every(
        5,
        every(
            5,
            [
                ({"seed": 1}, f"{CORE} seed 0, and this one is {CORE} seed 1;"),
                ({"recipe": "scalerl"}, rf"{CORE} seed 0, and this one is scalerl\+async_mode\.k=3 seed 0 "),
                (
                    {"overrides": ["advantage=gae", "critic=value_network", "filter=none"]},
                    f"{CORE} seed 0, and this one is .*critic ",
                ),
                (
                    {"callbacks": [DAPO()]},
                    rf"{CORE} seed 0, and this one is {CORE}\+loss=DAPO seed 0 \(loss CISPO, not DAPO\);",
                ),
                ({"overrides": ["kl=fixed"]}, rf"{CORE} seed 0, and this one is .* \(kl "),
            ],
            pytest.mark.full,
        ),
    ),
    ids=["seed", "recipe", "critic", "choice", "override"],
)
def test_a_script_cannot_resume_from_another_run(
    tiny_model_path: str, whole_run: Path, options: dict[str, Any], said: str
) -> None:
    path = whole_run / "checkpoints" / "step-00000002.ckpt"
    with pytest.raises(ConfigurationError, match=f"^ckpt_path: {path} is of another run, {said}") as caught:
        continue_run(tiny_model_path, path, **options)
    assert "ScaleRL.load_from_checkpoint(path)" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"task": CountingTask(prompts=7)}, "prompts"),
        ({"overrides": ["loss.max_ratio=9"]}, "loss.max_ratio .*, now 9"),
        ({"overrides": ["batch.prompts=5"]}, "batch.prompts 3, now 5"),
        ({"overrides": ["optimizer.lr=0.5"]}, "optimizer.lr .*, now 0.5"),
        ({"overrides": ["context.temperature=0.5"]}, "context.temperature 1.0, now 0.5"),
    ],
    ids=["prompts", "choice", "batch", "learning rate", "temperature"],
)
def test_a_script_cannot_resume_with_other_settings_or_prompts(
    tiny_model_path: str, whole_run: Path, options: dict[str, Any], changed: str
) -> None:
    """If it could, completions of the old prompts would be trained on as if they answered the new ones."""
    path = whole_run / "checkpoints" / "step-00000002.ckpt"
    with pytest.raises(ConfigurationError, match=rf"does not fit this run, whose settings have changed: {changed}; "):
        continue_run(tiny_model_path, path, **options)


@pytest.mark.slow
def test_another_budget_or_a_checkpoint_of_an_earlier_version_can_resume(
    tiny_model_path: str, whole_run: Path, tmp_path: Path
) -> None:
    path = whole_run / "checkpoints" / "step-00000002.ckpt"
    assert continue_run(tiny_model_path, path, steps=5).completed_steps == 5
    saved = torch.load(path, weights_only=True)
    del saved[IDENTITY]["choices"]["adapter"]  # as if this version did not have the axis yet
    saved[IDENTITY]["recipe"] += "+loss=CISPO"  # as an earlier version stored it
    torch.save(saved, tmp_path / path.name)
    assert continue_run(tiny_model_path, tmp_path / path.name).completed_steps == 6
    del saved[IDENTITY]
    torch.save(saved, tmp_path / path.name)
    assert newest_checkpoint(tmp_path, run="abc").path == tmp_path / path.name
    assert continue_run(tiny_model_path, tmp_path / path.name).completed_steps == 6


def test_members_are_distinguished_by_their_run(
    tiny_model_path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def member(run: str, title: str, run_dir: Path, path: Path | None = None, choice: Any = None) -> None:
        module = ScaleRL(tiny_model_path, "scalerl_core", overrides=SMALL)
        log = RunLog(run_dir, {"run": run, "recipe": title})
        callbacks = [*([choice] if choice else []), log, saver(run_dir, 1)]
        options = {**quiet(), "enable_checkpointing": True}
        trainer = Trainer(max_steps=1 if path is None else 2, callbacks=callbacks, **options)
        trainer.fit(module, datamodule=RolloutDataModule(CountingTask()), ckpt_path=path, weights_only=True)

    member("aa", "one", tmp_path / "a")
    (path,) = checkpoints(tmp_path / "a" / "checkpoints")
    with pytest.raises(ConfigurationError, match=r"one seed 0 \(aa\), and this one is other seed 0 \(bb\);"):
        member("bb", "other", tmp_path / "b", path)
    capfd.readouterr()
    member("aa", "one by another name", tmp_path / "c", path)
    printed = capfd.readouterr().err
    assert f"warning: {tmp_path / 'c' / 'metrics.jsonl'} lacks step 1, because the checkpoint is newer;" in printed
    assert read_journal(tmp_path / "c").missing == "no records of step 1", "its records begin after step 1"


def test_state_that_does_not_fit_raises_a_configuration_error() -> None:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            state["gone"]

    registry = StateRegistry()
    registry.register("prompts", Part())
    with pytest.raises(ConfigurationError, match=r"checkpoint: its state of 'prompts' does not fit this run .KeyError"):
        registry.load_state_dict({"prompts": {}})


# --- changed code -----------------------------------------------------------------------------------------------


def facts(name: str, torch_version: str = "2.13.0") -> dict[str, Any]:
    return {"commit": name, "diff": None, "files": name, "folders": {}, "versions": {"torch": torch_version}}


def train_with(
    code: Any, monkeypatch: pytest.MonkeyPatch, model: str, run_dir: Path, steps: int, **options: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_log, "code_facts", lambda named, imported: code)
        module = ScaleRL(model, "scalerl_core", overrides=SMALL)
        callbacks = [Evaluate(2, 2), RunLog(run_dir, **options), saver(run_dir, 1)]
        trainer = Trainer(max_steps=steps, callbacks=callbacks, **{**quiet(), "enable_checkpointing": True})
        path = newest_checkpoint(run_dir / "checkpoints").path
        trainer.fit(module, datamodule=RolloutDataModule(CountingTask()), ckpt_path=path, weights_only=True)


@pytest.mark.slow
def test_resuming_with_changed_code_is_printed_and_recorded(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = facts("aaaa"), facts("bbbb", "2.14.0")
    train_with(first, monkeypatch, tiny_model_path, tmp_path, 1)
    assert "changed code" not in capfd.readouterr().err
    assert read_journal(tmp_path).header["code"] == first
    train_with(second, monkeypatch, tiny_model_path, tmp_path, 2)
    warning = "from step 1 the run continues with changed code: commit aaaa -> bbbb, torch 2.13.0 -> 2.14.0"
    assert f"warning: {warning}" in capfd.readouterr().err.splitlines()
    train_with(second, monkeypatch, tiny_model_path, tmp_path, 3)
    assert "changed code" not in capfd.readouterr().err, "the code has not changed since step 2"
    assert [resume["code"] for resume in lines_of(tmp_path, "resume")] == [second, second]
    changes = read_journal(tmp_path).code_changes
    assert [(change.step, change.what) for change in changes] == [
        (1, ("commit aaaa -> bbbb", "torch 2.13.0 -> 2.14.0"))
    ]


@pytest.mark.slow
def test_strict_code_refuses_changed_code_and_changes_no_file(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_with(facts("aaaa"), monkeypatch, tiny_model_path, tmp_path, 1, strict_code=True)
    files_before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ConfigurationError, match=r"^launch.strict_code: .* until step 1 \(commit aaaa -> bbbb\); go"):
        train_with(facts("bbbb"), monkeypatch, tiny_model_path, tmp_path, 2, strict_code=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == files_before
    train_with(facts("aaaa"), monkeypatch, tiny_model_path, tmp_path, 2, strict_code=True)
    train_with(facts("bbbb"), monkeypatch, tiny_model_path, tmp_path, 3, strict_code=False)
    train_with(facts("bbbb"), monkeypatch, tiny_model_path, tmp_path, 4, strict_code=True)


@pytest.mark.slow
def test_a_journal_of_an_earlier_version_resumes_without_a_warning(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train_with(facts("aaaa"), monkeypatch, tiny_model_path, tmp_path, 1)
    header, *records = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    entry = {key: value for key, value in json.loads(header).items() if key not in ("code", "crc")}
    (tmp_path / JOURNAL_FILE).write_text("\n".join([json.dumps(entry), *records, ""]))
    train_with(facts("bbbb"), monkeypatch, tiny_model_path, tmp_path, 2, strict_code=True)
    assert "changed code" not in capfd.readouterr().err
    assert read_journal(tmp_path).code_changes == []


def test_code_facts_describe_this_checkout(tiny_model_path: str, tmp_path: Path) -> None:
    """Here `code_facts` is not patched: the header has the real versions and a file digest of 12 characters."""
    from sweeps.run.provenance import code_facts

    fit(tiny_model_path, tmp_path, steps=1)
    recorded = read_journal(tmp_path).header["code"]
    assert recorded["versions"] == code_facts()["versions"]
    assert set(recorded) == {"commit", "diff", "files", "folders", "versions"} and len(recorded["files"]) == 12


# --- activity --------------------------------------------------------------------------------------------------


def test_writing_and_reading_a_large_checkpoint_note_activity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing or reading 100 GB on a slow file server takes longer than a run may go without activity."""
    noted: list[str] = []
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(activity, "note", noted.append)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor) or sync(descriptor))
    monkeypatch.setattr(checkpoint_file, "SYNC_BYTES", 1 << 20)
    monkeypatch.setattr(checkpoint_file, "READ_BYTES", 1 << 18)
    path = tmp_path / "step-00000001.ckpt"
    DirectCheckpointIO().save_checkpoint({str(number): torch.rand(1 << 17) for number in range(16)}, path)  # 8 MiB
    assert noted.count("checkpoint") >= 16 and len(synced) >= 8, "the file is synced in parts, not only at the end"
    noted.clear()
    assert checkpoint_file.damage(path) is None
    assert noted.count("checkpoint") >= 32


def test_saves_log_nothing_about_weights_only(
    tiny_model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning logs its default of `weights_only` at each save that does not set it."""
    with caplog.at_level("INFO", logger="lightning.pytorch.trainer.connectors.checkpoint_connector"):
        fit(tiny_model_path, tmp_path, steps=2, checkpoint_every=1)
    assert len(checkpoints(tmp_path / "checkpoints")) == 2 and "weights_only" not in caplog.text
