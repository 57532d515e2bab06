"""Test studies of commands against kills, power cuts and damaged files: the result is the same, or the loss is named.

    python benchmarks/crashes.py [--kills 40] [--damage 20] [--seed 0] [--out docs/measured/crashes.md]

There are three kinds of study, each of a script without torch: four members that are commands, a live race of them, and
a search over a grid. Each case is a new study with one fault at a random moment:

- the process group of a member, or the controller, is killed (-9);
- the power is cut: everything is killed at once, and every file is cut to the length at which it was last synced;
- the controller is killed and one of the study's files is damaged.

Then the study is launched again until it is complete, and compared with an undisturbed one. Metrics are polled ten
times as often as usual, because members take only seconds. Exits with 1 unless each case gives the same result, names
the loss, or is refused in one line that names the file.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import optuna
import yaml

from lightning_scalerl.member.command import plan_commands
from sweeps.command import runner
from sweeps.errors import UserError
from sweeps.executor.local import LocalExecutor
from sweeps.launch.ledger import RUNS_DIR, Ledger
from sweeps.launch.observer import Observer
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.journal import JournalError, read_journal
from sweeps.run.spec import RunSpec
from sweeps.search.optuna_search import Search
from sweeps.search.race import LiveRace
from sweeps.search.race_log import RaceRecord
from sweeps.search.settings import Axis, RaceSettings, SearchSettings

PAGE = Path(__file__).resolve().parents[1] / "docs/measured/crashes.md"
STEPS = 60
GRID_VALUES = 4  # number of values of the search's grid, and of its trials
# The script saves and syncs a checkpoint after every tenth step and resumes from it. In a race, the losing recipe waits
# forever at one step (`wait`), so that it can only end by being stopped.
SCRIPT = f"""
import json, os, sys, time
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
out, seed, best = given["out"], int(given["seed"]), float(given["best"])
step = max([int(name[6:-5]) for name in os.listdir(out) if name.startswith("state-")], default=0)
while step < {STEPS}:
    step += 1
    row = {{"step": step, "tokens": 100 * step}}
    if step % 2 == 0:
        row["eval_reward"] = best * step / (step + 10) + 0.002 * ((7 * step + 3 * seed) % 5)
    print(json.dumps(row), flush=True)
    if step % 10 == 0:
        descriptor = os.open(os.path.join(out, "state-%d.json" % step), os.O_WRONLY | os.O_CREAT)
        os.fsync(descriptor)
        os.close(descriptor)
    while step == int(given["wait"]):
        time.sleep(0.05)
    time.sleep(0.01)
"""
RETRIES = {"killed": 2}  # how many times a killed member is restarted
KINDS = ("commands", "race", "search")
DAMAGE = ("metrics.jsonl", "command.json", "spec.json", "stdout.txt", "ledger.jsonl", "race.jsonl", "optuna.jsonl")


# --- a study ------------------------------------------------------------------------------------------------------


class MessageLog(Observer):
    """Observer that appends the study's messages to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, line: str) -> None:
        """Append the line."""
        with self._path.open("a") as handle:
            handle.write(line + "\n")


class Forked(LocalExecutor):
    """Executor that forks members from the controller, which has already imported everything."""

    def __init__(self, places: int) -> None:
        super().__init__("benchmarks.crashes:run_apart", places, 1)
        self._context = multiprocessing.get_context("fork")  # type: ignore[assignment]


def run_apart(run_dir: Path) -> None:
    """Run a member in its own process group, and record the group's id for `kill_member`."""
    os.setsid()
    with (run_dir.parents[2] / "members").open("a") as handle:
        handle.write(f"{os.getpid()}\n")
    runner.run_member(run_dir)


@dataclass(frozen=True)
class Place:
    """The folder of a study with its script and configuration, and the kind of the study."""

    folder: Path
    kind: str

    @property
    def study(self) -> Path:
        """Folder of the study."""
        return self.folder / "outputs"

    @property
    def log_path(self) -> Path:
        """Log of all launches of the study."""
        return self.folder / "said"

    def write(self) -> None:
        """Write the script and the configuration of the study."""
        self.folder.mkdir(parents=True)
        (self.folder / "train.py").write_text(SCRIPT)
        line = "python -S train.py --seed={seed} --out={run_dir} --best={best} --wait={wait}"
        command = {
            "line": f"{sys.executable} {line.removeprefix('python ')}",
            "metrics": {"reward": "eval_reward"},
            "compute": {"unit": "tokens", "column": "tokens"},
            "resume": {"add": "--from={checkpoint}", "checkpoints": "{run_dir}/state-*.json"},
        }
        content = {"defaults": [{"member": "command"}, "_self_"], "best": 0.5, "wait": -1, "command": command}
        content |= {"budget": {"steps": STEPS}, "study": "crashes", "output_dir": str(self.study)}
        (self.folder / "crashes.yaml").write_text(yaml.safe_dump(content, sort_keys=False))

    def planned(self, lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        """Plan members from lists of overrides."""
        return plan_commands([list(words) for words in lists], [str(self.folder / "crashes.yaml")])

    def launch(self) -> None:
        """Run the members that are not finished, as the user's command would."""
        observers = [MessageLog(self.log_path)]
        if self.kind == "search":
            study = Study.read(self.study) if Ledger(self.study).fold() else Study(self.study, [])
            axes = [Axis("best", tuple(f"0.{n}" for n in range(4, 4 + GRID_VALUES)))]
            grid = {axis.key: list(axis.choices) for axis in axes}
            settings = SearchSettings(GRID_VALUES, 2, budget=100.0 * STEPS)
            sampler: Callable[[int], Any] = lambda seed: optuna.samplers.GridSampler(grid, seed=seed)  # noqa: E731
            search = Search(study, axes, settings, ["seed=1"], self.planned, sampler)
            study.run(Forked(2), observers, RETRIES, decider=search)
            return
        losing = "best=0.4 wait=40" if self.kind == "race" else "best=0.6"
        specs = self.planned([f"{recipe} seed={seed}".split() for recipe in (losing, "best=0.8") for seed in (1, 2)])
        study = Study(self.study, specs)
        race = LiveRace(study, RaceSettings("live", budget=100.0 * STEPS, growth=1.3)) if self.kind == "race" else None
        study.run(Forked(4), observers, RETRIES, decider=race)


def controller(place: Place) -> int:
    """Start a controller in a new process that records each fsync; return its process id."""
    if (process := os.fork()) != 0:
        return process
    code = 1
    try:
        os.setsid()
        log = os.open(place.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.basicConfig(stream=sys.stderr, force=True)
        runner._POLL_S = runner._STOP_CHECK_S = 0.05
        synced = os.open(place.folder / "synced", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        fsync = os.fsync

        def recording_fsync(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            os.write(synced, b"%d %d\n" % (status.st_ino, status.st_size))

        os.fsync = recording_fsync  # type: ignore[assignment]
        place.launch()
        code = 0
    except UserError as error:
        print(f"refused: {error}", flush=True)
        code = 3
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# --- faults -------------------------------------------------------------------------------------------------------


def descendants(process: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] != b"Z":
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    processes_below = [process]
    for each in processes_below:
        processes_below += parents.get(each, [])
    return processes_below


def send(processes: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each of the processes that still exist."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def end(process: int, patience_s: float = 20.0) -> None:
    """Wait until a controller and its descendants have ended. This process is the subreaper, so it adopts orphans."""
    deadline = time.monotonic() + patience_s
    os.waitpid(process, 0)
    while len(descendants(os.getpid())) > 1 and time.monotonic() < deadline:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def kill_member(place: Place, process: int, source: random.Random) -> str:
    """Kill the process group of a running member, or the controller if no member runs."""
    members = (place.folder / "members").read_text().split() if (place.folder / "members").exists() else []
    alive = [int(each) for each in members if Path(f"/proc/{each}").exists()]
    if not alive:
        return kill_controller(place, process, source)
    with suppress(ProcessLookupError):
        os.killpg(source.choice(alive), signal.SIGKILL)
    end(process)
    return "a member killed"


def kill_controller(place: Place, process: int, source: random.Random) -> str:
    """Kill the controller."""
    send([process], signal.SIGKILL)
    end(process)
    return "the controller killed"


def cut_power(place: Place, process: int, source: random.Random) -> str:
    """Kill everything at once, and cut each file to its synced length, except checkpoints, which the command syncs."""
    everything = descendants(process)
    send(everything, signal.SIGSTOP)
    everything = [*dict.fromkeys([*everything, *descendants(process)])]
    send(everything, signal.SIGKILL)
    end(process)
    lengths: dict[int, int] = {}
    if (place.folder / "synced").exists():
        for line in (place.folder / "synced").read_text().splitlines():
            inode, length = map(int, line.split())
            lengths[inode] = length
    for path in place.study.rglob("*"):
        if path.is_file() and not path.is_symlink() and not path.name.startswith("state-"):
            status = path.stat()
            os.truncate(path, min(status.st_size, lengths.get(status.st_ino, 0)))
    return "power cut"


def damage(path: Path, how: str, source: random.Random) -> None:
    """Damage a file."""
    raw = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "empty" or not raw:
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(raw[: source.randrange(len(raw))])
    else:
        changed = bytearray(raw)
        for _ in range(3):
            changed[source.randrange(len(raw))] ^= 1 << source.randrange(8)
        path.write_bytes(bytes(changed))


# --- results ------------------------------------------------------------------------------------------------------


def outcome(place: Place) -> dict[str, Any]:
    """Return the results of a study: members with their records, looks of its race, values of its trials."""
    results: dict[str, Any] = {}
    for state in Ledger(place.study).fold().values():
        try:
            view = read_journal(place.study / RUNS_DIR / state.run)
        except JournalError:
            results[state.title] = state.state, None
            continue
        # Where a stopped member ends depends on timing, so its records are not compared.
        records = view.deterministic() if state.state == "finished" else None
        results[state.title] = state.state, records
    if place.kind == "race":
        results["looks"] = [(look.compute, look.stopped) for look in RaceRecord.read(place.study).looks]
    if place.kind == "search" and (trials := best_known(place)) is not None:
        results["trials"] = trials
    return results


def best_known(place: Place) -> list[tuple[str, float | None]] | None:
    """Return parameter and value of each trial of a search, sorted; None if its journal cannot be read."""
    from sweeps.search.trials import TRIALS_FILE, _open_study

    if not (place.study / TRIALS_FILE).exists():
        return None
    with suppress(UserError):
        trials = _open_study(place.study / TRIALS_FILE).get_trials()
        return sorted((str(each.params.get("best")), each.value) for each in trials)
    return None


def judged(place: Place, right: dict[str, Any], codes: Sequence[int]) -> tuple[str, str]:
    """Return the verdict on a study with a fault (`same`, `named`, `refused` or `WRONG`) and the evidence."""
    log_path = place.log_path.read_text() if place.log_path.exists() else ""
    if codes[-1] == 3:
        (*_, line) = (line for line in log_path.splitlines() if line.startswith("refused: "))
        named = any(f"/{name}" in line for name in (*DAMAGE, "state-"))
        return ("refused" if named else "WRONG"), line
    results_found = outcome(place)
    if results_found == right and "Traceback" not in log_path:
        return "same", ""
    views = overview(place.study)
    losing = [f"{view.recipe}: {view.reason}" for view in views if "no records of" in (view.reason or "")]
    # In a finished run a damaged line loses only itself.
    finished = [view.reason or "" for view in views if view.state == "finished"]
    losing += [reason for reason in finished if "metrics.jsonl, line" in reason]
    losing += [line for line in log_path.splitlines() if "torn or damaged" in line or "has lost lines" in line]
    refused = [view.reason for view in views if view.state == "failed" and view.reason]
    refused = [reason for reason in refused if any(f"/{name}" in reason for name in (*DAMAGE, "state-"))]
    states = {title: each[0] for title, each in results_found.items() if isinstance(each, tuple)}
    if losing and all(state in ("finished", "stopped") for state in states.values()):
        return "named", losing[0]
    if refused:
        return "refused", refused[0]
    differing = [key for key in {*results_found, *right} if results_found.get(key) != right.get(key)]
    differing += [view.reason for view in views if view.reason]
    return "WRONG", f"{differing}: {log_path[-300:]!r}"


def finished(place: Place, most: int = 3) -> list[int]:
    """Launch a study until it is complete or refused; return the exit codes."""
    codes = []
    for _ in range(most):
        process = controller(place)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        states = {state.state for state in Ledger(place.study).fold().values()}
        if codes[-1] == 3 or states <= {"finished", "stopped"}:
            break
    return codes


@dataclass(frozen=True)
class Case:
    """One study with a fault: the fault, the verdict, and its evidence."""

    kind: str
    fault: str
    verdict: str
    why: str


def cases(root: Path, kills: int, damages: int, seed: int, only: int | None) -> Iterator[Case]:
    """Run and yield the cases one by one."""
    right, durations = {}, {}
    for kind in KINDS:
        place = Place(root / kind, kind)
        place.write()
        began = time.monotonic()
        codes = finished(place, 1)
        durations[kind], right[kind] = time.monotonic() - began, outcome(place)
        assert codes == [0], place.log_path.read_text()
    ways = (kill_member, kill_controller, cut_power)
    for number in range(kills + damages) if only is None else [only]:
        source = random.Random(f"{seed} {number}")
        kind = KINDS[number % len(KINDS)]
        place = Place(root / f"{number}", kind)
        place.write()
        process = controller(place)
        begun = time.monotonic()
        # A file can only be damaged once it exists.
        while number >= kills and not any(place.study.rglob("metrics.jsonl")) and time.monotonic() < begun + 60:
            time.sleep(0.01)
        time.sleep(source.uniform(0.1, 0.9) * durations[kind])
        if number < kills:
            fault = ways[number // len(KINDS) % len(ways)](place, process, source)
        else:
            kill_controller(place, process, source)
            damageable = [path for path in sorted(place.study.rglob("*")) if path.name in DAMAGE]
            # Draw the name first, because members have more files than studies.
            name = source.choice(sorted({path.name for path in damageable}))
            how = source.choice(("truncated", "bits flipped", "deleted", "empty"))
            if name == "stdout.txt" and how == "bits flipped":
                how = "truncated"  # the log has no checksums, so flipped bits cannot be detected
            damage(source.choice([path for path in damageable if path.name == name]), how, source)
            fault = f"{name} {how}"
        verdict, why = judged(place, right[kind], finished(place))
        yield Case(kind, fault, verdict, why.replace(str(place.folder), "").replace("|", "/"))
        if verdict != "WRONG":
            shutil.rmtree(place.folder)


def page(case_list: Sequence[Case], command: str) -> str:
    """Return the page in Markdown."""
    verdicts = ("same", "named", "refused", "WRONG")
    lines = [
        "# Kills, power cuts and damaged files",
        "",
        "Does a study survive killed processes, power cuts and damaged files? There are three kinds of study. Their "
        "runs are commands of another trainer, here a short script:",
        "",
        "- **commands**: a grid of four such runs;",
        "- **race**: a race of them, which stops runs early;",
        "- **search**: a search by Optuna over a grid.",
        "",
        f"Written by `{command}`. Each of {len(case_list)} studies gets one fault at a random moment. It is then",
        "launched again until it is complete, and compared with an undisturbed study of the same kind.",
        "",
        "- A **power cut** is simulated: all processes are killed at once, and every file is cut to the length at",
        "  which it was last synced.",
        "- Before a file is **damaged**, the controller (the process that launches and follows the runs) is killed.",
        "",
        "The columns count studies by their outcome:",
        "",
        "- **same**: every step of every finished run, every comparison by the race and every value of the search are",
        "  the same as in the undisturbed study.",
        "- **named**: data are lost, and `scalerl status`, the fit or the launch reports which data.",
        "- **refused**: the launch or the run ends with one line that names the file.",
        "- **WRONG**: anything else.",
        "",
        "| study | fault | same | named | refused | WRONG |",
        "|---|---|---|---|---|---|",
    ]
    count = Counter((each.kind, each.fault, each.verdict) for each in case_list)
    for kind, fault in sorted({(each.kind, each.fault) for each in case_list}):
        lines.append(
            f"| {kind} | {fault} | " + " | ".join(str(count[kind, fault, each] or "") for each in verdicts) + " |"
        )
    total = Counter(each.verdict for each in case_list)
    lines.append("| all | | " + " | ".join(str(total[each]) for each in verdicts) + " |")
    named = [each for each in case_list if each.verdict not in ("same", "WRONG")]
    if named:
        lines += ["", "Messages where data were lost or the launch was refused:", ""]
        lines += [f"- {each.kind}, {each.fault}: {each.why[:300]}" for each in named]
    lines += [
        "",
        "Limits:",
        "",
        "- The log of a command (`stdout.txt`) has no checksums, so flipped bits in it are not noticed.",
        "- The command in this test calls `fsync` on its checkpoints. Without `fsync`, checkpoints may be empty after "
        "a power cut.",
    ]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases and print their verdicts; return 1 if data were lost without a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--damage", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of one case, to look at it alone")
    parser.add_argument("--out", type=Path, help=f"page to write, such as {PAGE.relative_to(PAGE.parents[2])}")
    options = parser.parse_args(words)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # PR_SET_CHILD_SUBREAPER: orphans of a killed controller become children of this process.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    command = f"python benchmarks/crashes.py --kills {options.kills} --damage {options.damage} --seed {options.seed}"
    case_results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), options.kills, options.damage, options.seed, options.only):
            case_results.append(case)
            print(f"{case.kind:8}  {case.fault:30}  {case.verdict}  {case.why[:300]}", flush=True)
    text = page(case_results, command)
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    return int(any(case.verdict == "WRONG" for case in case_results))


if __name__ == "__main__":
    raise SystemExit(main())
