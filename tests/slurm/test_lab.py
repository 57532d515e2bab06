"""Tests of the lab: the cluster starts, fails on request, recovers, and ends no processes of others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

SCRIPT = ROOT / "slurm/lab/lab.py"
PORT = "27300"

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="a SLURM cluster needs root"),
]


class Cluster:
    """Runs the lab's commands, and SLURM's commands as a user of the lab."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def lab(self, *words: str) -> subprocess.CompletedProcess[str]:
        command, *options = words
        line = [sys.executable, str(SCRIPT), command, "--dir", str(self.root), *options]
        return subprocess.run(line, capture_output=True, text=True, timeout=300)

    def sh(self, line: str) -> str:
        result = subprocess.run(
            ["bash", "-c", f". {self.root}/env.sh; {line}"], capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, f"{line}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def states(self) -> list[str]:
        return self.sh("sinfo -h -N -p main -o %T").split()


def eventually(check: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not tmp_path, because unix sockets need a short path.
    root = Path(tempfile.mkdtemp(prefix="lab-")).resolve() / "lab"
    new_cluster = Cluster(root)
    up = new_cluster.lab("up", "--nodes", "2", "--port", PORT, "--node-down-s", "5", "--set", "MessageTimeout=5")
    try:
        assert up.returncode == 0, up.stderr
        yield new_cluster
    finally:
        new_cluster.lab("down", "--wipe")
        shutil.rmtree(root.parent)


def test_jobs_get_their_gpus(cluster: Cluster) -> None:
    # Each of the two nodes gives one GPU to its task, and the task sees it as GPU 0.
    output = cluster.sh("srun -N2 -n2 --gpus-per-node=1 bash -c 'hostname; echo gpu $CUDA_VISIBLE_DEVICES'")
    assert sorted(output.splitlines()) == ["gpu 0", "gpu 0", "n1", "n2"]
    log = cluster.root / "job.log"
    job = cluster.sh(f"""sbatch --parsable --wait -o {log} --gres=gpu:2 --wrap '
        {sys.executable} -c "import os; print(os.environ[\\"CUDA_VISIBLE_DEVICES\\"])"'""")
    assert log.read_text().strip() == "0,1"
    line = f"{job}|COMPLETED|0:0"
    assert eventually(lambda: cluster.sh(f"sacct -X -n -P -j {job} -o JobID,State,ExitCode") == line)


def test_exit_codes_are_known_without_accounting(cluster: Cluster) -> None:
    array = cluster.sh("sbatch --parsable -o /dev/null --array=0-1 --wrap 'exit $((27 + SLURM_ARRAY_TASK_ID))'")
    killed = cluster.sh("sbatch --parsable -o /dev/null --wrap 'kill -9 $$'")
    assert eventually(lambda: cluster.sh("squeue -h -o %i") == "")
    program = f"""{sys.executable} -c '
from sweeps.executor.slurm.scheduler import Slurm
slurm = Slurm()
slurm.accounted = lambda jobs: dict()
print(slurm.exit_codes(["{array}_0", "{array}_1", "{killed}", "1"]))'"""
    assert cluster.sh(program) == str({f"{array}_0": "27:0", f"{array}_1": "28:0", killed: "0:9"})


def test_a_job_over_its_memory_is_killed(cluster: Cluster) -> None:
    log = cluster.root / "memory.log"
    fill = "import time; x = b'x' * 300_000_000; time.sleep(20); print('alive')"
    command = f'sbatch --parsable --wait --mem=100M -o {log} --wrap "{sys.executable} -c \\"{fill}\\"" || true'
    job = cluster.sh(command)
    assert "exceeded memory limit" in log.read_text()
    assert "alive" not in log.read_text()
    assert eventually(lambda: cluster.sh(f"sacct -X -n -P -j {job} -o State,ExitCode") == "FAILED|0:9")


def test_jobs_see_a_mount_that_was_made_later(cluster: Cluster, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    try:
        (tmp_path / "file").write_text("late")
        assert cluster.sh(f"srun cat {tmp_path}/file") == "late"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert cluster.sh(f"srun ls {tmp_path}") == ""


@pytest.mark.full
def test_a_node_that_was_switched_off_returns(cluster: Cluster) -> None:
    log = cluster.root / "long.log"
    job = cluster.sh(f"sbatch --parsable -w n2 -D {cluster.root} -o {log} --wrap 'hostname; exec sleep 987'")
    assert eventually(lambda: log.is_file() and "n2" in log.read_text())
    assert cluster.lab("node-off", "2").stdout == "n2 is off\n"
    assert not [
        line for line in processes_in(cluster.root).values() if "slurmd -D -N n2" in line or "sleep 987" in line
    ]
    # Wait until slurmctld notices. If a node returns earlier, slurmctld waits for its report and keeps the job.
    assert eventually(lambda: "down*" in cluster.states())
    up = cluster.lab("up")
    assert up.returncode == 0, up.stderr
    assert "2 nodes up" in up.stdout
    assert eventually(lambda: "Restarts=1" in cluster.sh(f"scontrol show job {job}"))
    cluster.sh(f"scancel {job}")
    assert cluster.sh("srun -N2 -n2 hostname").split() in (["n1", "n2"], ["n2", "n1"])


def test_killed_daemons_are_restarted(cluster: Cluster) -> None:
    for name in ("slurmctld", "slurmd:n1"):
        assert cluster.lab("kill", name).stdout == f"{name} killed\n"
        assert f"{name:10} down" in cluster.lab("status").stdout
    up = cluster.lab("up", "--set", "MaxArraySize=5")
    assert up.returncode == 0, up.stderr
    assert "down" not in cluster.lab("status").stdout
    assert cluster.sh("srun hostname") in ("n1", "n2")
    refused = cluster.sh("sbatch --array=0-5 --wrap true 2>&1 || true")
    assert refused == "sbatch: error: Batch job submission failed: Invalid job array specification"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("node-off", "7"), "there is no node 7: this lab has 2"),
        (("kill", "sshd"), "no daemon sshd"),
        (("up", "--nodes", "3"), "was made with nodes 2"),
        (("up", "--set", "MaxArraySize"), "--set takes KEY=VALUE"),
    ],
)
def test_errors_are_one_line(cluster: Cluster, words: tuple[str, ...], message: str) -> None:
    result = cluster.lab(*words)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_and_a_long_directory(cluster: Cluster) -> None:
    other = Cluster(cluster.root.parent / "other")
    assert f"port {PORT} for slurmctld is in use" in other.lab("up", "--port", PORT).stderr
    assert not other.root.exists()
    assert "--dir may have 60 characters" in Cluster(Path("/tmp") / ("x" * 60)).lab("up").stderr


def test_down_ends_only_processes_of_the_lab(cluster: Cluster, tmp_path: Path) -> None:
    namesake = tmp_path / "slurmstepd"
    shutil.copy2(shutil.which("sleep") or "/bin/sleep", namesake)
    bystanders = [subprocess.Popen([name, "987"]) for name in ("sleep", str(namesake))]
    # A stale record, whose pid now belongs to another process.
    (cluster.root / "pids/slurmd:n2.old").write_text(f"{bystanders[0].pid} 1\n")
    cluster.sh(f"sbatch -D {cluster.root} -o /dev/null --wrap 'exec sleep 986'")
    assert eventually(lambda: any("sleep 986" in line for line in processes_in(cluster.root).values()))
    try:
        down = cluster.lab("down")
        assert down.returncode == 0, down.stderr
        assert eventually(lambda: not processes_in(cluster.root), 5), processes_in(cluster.root)
        assert [bystander.poll() for bystander in bystanders] == [None, None]
    finally:
        for bystander in bystanders:
            bystander.kill()
            bystander.wait()
    assert cluster.lab("down", "--wipe").returncode == 0
    assert not cluster.root.exists()


def processes_in(root: Path) -> dict[int, str]:
    """Return the processes whose working directory or command line is in the lab's folder."""
    processes = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(root) in line or (process / "cwd").readlink().is_relative_to(root):
                processes[int(process.name)] = line
        except OSError:
            continue
    return processes
