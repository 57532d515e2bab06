#!/usr/bin/env python3
"""A real SLURM cluster on one machine (Debian or Ubuntu, root), with nodes that can be powered off.

It runs several slurmd, each in its own namespaces with fake GPUs, one munged, one slurmctld and, for a working `sacct`,
slurmdbd with a private MariaDB. It writes nothing under /etc and needs no init system: every process is recorded with
its start time, and only recorded processes are signalled. README.md describes the purpose of each setting and the
limits of the lab.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

MAX_DIR_LENGTH = 60  # paths of unix sockets in the folder may have at most 107 characters
DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld")
PACKAGES = {  # command -> Debian package
    "munged": "munge",
    "sbatch": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "unshare": "util-linux",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
}
ACCOUNTING_ONLY = ("slurmdbd", "mariadbd", "my_print_defaults")
UNSHARE = ["unshare", "--pid", "--uts", "--fork", "--kill-child", "--propagation", "slave", "--mount-proc"]
# Script of a node's process 1, which reaps orphans and survives the node's slurmd. $1 is the host name, $2 a file that
# is created when the node is ready, and $3 the node's /etc/hosts, in which the names of the nodes resolve.
NODE_INIT = 'hostname "$1" && mount --bind "$3" /etc/hosts && : >"$2" && while :; do sleep 3600 & wait $!; done'


class LabError(Exception):
    """A failure, described in one line for the user."""


@dataclass
class Knobs:
    """Options of the first `up`. Later calls keep them."""

    nodes: int = 4
    cpus: int = 4
    memory_mb: int = 16000
    gpus: int = 2
    accounting: str = "dbd"
    port: int = 26900
    node_down_s: int = 15
    requeue_wait_s: int = 5
    settings: dict[str, str] = field(default_factory=dict)
    first_job_id: int = 0
    namespaces: bool = True

    def ports(self) -> dict[str, int]:
        """Return the TCP ports of the daemons that listen on one."""
        ports = {"slurmctld": self.port}
        if self.accounting == "dbd":
            ports |= {"slurmdbd": self.port + 1, "mariadbd": self.port + 2}
        return ports | {f"slurmd:{node}": self.port + 10 + i for i, node in enumerate(self.node_names(), 1)}

    def node_names(self) -> list[str]:
        """Return n1, n2 and so on."""
        return [f"n{i}" for i in range(1, self.nodes + 1)]


def slurm_conf(knobs: Knobs, root: Path) -> str:
    """Return the text of slurm.conf."""
    host = socket.gethostname().split(".")[0]
    munge = root / "munge/munge.socket"
    lines = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": f"{knobs.port}",
        # Listen only on 127.0.0.1. slurmd can do so only if its host name resolves, which needs namespaces.
        "CommunicationParameters": "NoCtldInAddrAny" + ",NoInAddrAny" * knobs.namespaces,
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # A requeued job may not start before its old credential has expired: 120 s by default.
        "AuthInfo": f"socket={munge},cred_expire={knobs.requeue_wait_s}",
        "StateSaveLocation": f"{root}/ctld",
        "SlurmdSpoolDir": f"{root}/spool/%n",
        "SlurmctldPidFile": f"{root}/run/slurmctld.pid",
        "SlurmdPidFile": f"{root}/run/slurmd.%n.pid",
        # FirstJobId changes at each start of slurmctld, and slurmd would complain that its slurm.conf differs.
        "DebugFlags": "NO_CONF_HASH",
        "SlurmctldLogFile": f"{root}/log/slurmctld.log",
        "SlurmdLogFile": f"{root}/log/slurmd.%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "MpiDefault": "none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "1",
        # There are no cgroups here, so slurmstepd polls its tasks' memory every second and kills those above the limit.
        "JobAcctGatherParams": "OverMemoryKill,UsePss",
        # Nodes may claim more CPUs and memory than the machine has.
        "SlurmdParameters": "config_overrides",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": f"{knobs.memory_mb // knobs.cpus}",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=10000,bf_interval=1",
        "PriorityType": "priority/basic",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        # Preemption then also sends the signal of `sbatch --signal`, not only SIGTERM.
        "SlurmctldParameters": "preempt_send_user_signal",
        "ReturnToService": "2",
        "SlurmdTimeout": f"{knobs.node_down_s}",
        "KillWait": "5",
        "FirstJobId": f"{knobs.first_job_id}",
        "PropagateResourceLimits": "NONE",
        "AccountingStorageType": "accounting_storage/none",
    }
    if knobs.accounting == "dbd":
        lines |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "127.0.0.1",
            "AccountingStoragePort": f"{knobs.ports()['slurmdbd']}",
            # Clients use the munge socket that is named here; by default they would use the system's.
            "AccountingStoragePass": f"{munge}",
            "AccountingStorageTRES": "gres/gpu",
            "AccountingStoreFlags": "job_comment",
        }
    gres = ""
    if knobs.gpus:
        lines["GresTypes"] = "gpu"
        gres = f" Gres=gpu:{knobs.gpus}"
    original_keys = {key.lower(): key for key in lines}
    for key, value in knobs.settings.items():
        lines[original_keys.get(key.lower(), key)] = value
    ports = knobs.ports()
    nodes = [
        f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={ports[f'slurmd:{node}']} "
        f"CPUs={knobs.cpus} RealMemory={knobs.memory_mb}{gres} State=UNKNOWN"
        for node in knobs.node_names()
    ]
    common = "Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP"
    partitions = [
        f"PartitionName=main {common} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
        f"PartitionName=high {common} PriorityTier=10 PreemptMode=OFF",
    ]
    settings = [f"{key}={value}" for key, value in lines.items() if value]
    return "\n".join([*settings, *nodes, *partitions, ""])


def slurmdbd_conf(knobs: Knobs, root: Path, password: str) -> str:
    """Return the text of slurmdbd.conf."""
    ports = knobs.ports()
    lines = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={root}/munge/munge.socket",
        "DbdHost": "localhost",
        "DbdAddr": "127.0.0.1",
        "DbdPort": f"{ports['slurmdbd']}",
        "SlurmUser": "root",
        "LogFile": f"{root}/log/slurmdbd.log",
        "PidFile": f"{root}/run/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": f"{ports['mariadbd']}",
        "StorageLoc": "slurm_acct_db",
        "StorageUser": "slurm",
        "StoragePass": password,
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def start_time(pid: int) -> str | None:
    """Return a process's start in ticks since boot (None if it does not run). With the pid it identifies a process."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else rest[18]


def children(pid: int) -> list[int]:
    """Return the child processes of `pid`."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_for(seconds: float, failure: str, done: Callable[[], object]) -> None:
    """Return once `done()` is true; LabError after `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise LabError(f"{failure} after {seconds:g} s")
        time.sleep(0.05)


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def port_is_free(port: int) -> bool:
    """Whether no process listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def port_answers(port: int) -> bool:
    """Whether a process listens on this port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from its creation on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def install_packages(accounting: str) -> None:
    """Install missing packages without letting them start services.

    A lock allows one lab at a time: another lab would find commands of a package that is only partly installed.
    """
    with (Path(tempfile.gettempdir()) / f"slurm-lab-install-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install_packages(accounting)


def _install_packages(accounting: str) -> None:
    needed_commands = [command for command in PACKAGES if accounting == "dbd" or command not in ACCOUNTING_ONLY]
    missing = [PACKAGES[command] for command in needed_commands if not shutil.which(command)]
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise LabError(f"needs the Debian packages {' '.join(missing)}, and there is no apt-get here")
    print(f"installing {' '.join(missing)}", flush=True)
    policy = Path("/usr/sbin/policy-rc.d")
    made_policy = not policy.exists()
    if made_policy:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300"]
    try:
        for command in ([*apt, "update"], [*apt, "install", "--no-install-recommends", *missing]):
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
                raise LabError(f"cannot install {' '.join(missing)}: {reason}")
    finally:
        if made_policy:
            policy.unlink(missing_ok=True)


def can_unshare() -> bool:
    """Whether this machine allows the namespaces of a node."""
    try:
        probe = subprocess.run([*UNSHARE, "sh", "-c", "hostname slurm-lab-probe"], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


class Lab:
    """One cluster: a state directory and the processes recorded there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = os.environ | {"SLURM_CONF": f"{root}/slurm.conf"}
        self.knobs = Knobs()
        self.exists = self._knobs_file.is_file()
        if self.exists:
            self.knobs = Knobs(**json.loads(self._knobs_file.read_text()))

    @property
    def _knobs_file(self) -> Path:
        return self.root / "knobs.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the lab, so that only one command at a time changes it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # ---------------------------------------------------------------- processes

    def pid(self, name: str) -> int | None:
        """Return the pid recorded under `name`, if that process still runs."""
        try:
            pid, started = (self.root / "pids" / name).read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if start_time(int(pid)) == started else None

    def recorded(self, prefix: str) -> list[str]:
        """Return the recorded names of running processes that begin with `prefix`."""
        return sorted(path.name for path in (self.root / "pids").glob(f"{prefix}*") if self.pid(path.name))

    def launch(self, name: str, command: Sequence[str], *, wrapped: bool = False) -> None:
        """Start a process in a new session and record it; with `wrapped`, record the command's only child instead."""
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        pid = process.pid
        if wrapped:
            wait_for(10, f"{name} did not start (see {log.name})", lambda: children(pid) or process.poll() is not None)
            pid = next(iter(children(pid)), pid)
        (self.root / "pids" / name).write_text(f"{pid} {start_time(pid)}\n")

    def end(self, name: str, seconds: float) -> None:
        """Send SIGTERM to a recorded process; kill it if it still runs after `seconds`."""
        if pid := self.pid(name):
            send(pid, signal.SIGTERM)
            with contextlib.suppress(LabError):
                wait_for(seconds, name, lambda: self.pid(name) is None)
        self.kill(name)

    def kill(self, name: str) -> bool:
        """Kill a recorded process at once; return whether it was running."""
        pid = self.pid(name)
        if pid:
            send(pid, signal.SIGKILL)
            wait_for(10, f"{name} outlives SIGKILL", lambda: self.pid(name) is None)
        (self.root / "pids" / name).unlink(missing_ok=True)
        return pid is not None

    def call(self, *command: str, timeout: float = 30) -> str | None:
        """Return the output of a SLURM command, or None if it fails."""
        try:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode == 0 else None

    def steps(self) -> list[int]:
        """Return the slurmstepd processes of this cluster, identified by their sockets, each after its descendants."""
        spool = f"{self.root}/spool/"
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        sockets = {f"socket:[{row[6]}]" for row in rows if len(row) > 7 and row[7].startswith(spool)}
        process_ids: list[int] = []

        def add(pid: int) -> None:
            for child in children(pid):
                add(child)
            process_ids.append(pid)

        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "comm").read_text().strip() != "slurmstepd":
                    continue
                if sockets & {str(handle.readlink()) for handle in (process / "fd").iterdir()}:
                    add(int(process.name))
        return process_ids

    # ---------------------------------------------------------------- up

    def configure(self, given: dict[str, object], settings: dict[str, str]) -> None:
        """Merge the options of this `up` into the knobs, and write the files that SLURM reads."""
        new_options = {key: value for key, value in given.items() if value not in (None, getattr(self.knobs, key))}
        if self.exists and new_options.keys() - {"node_down_s", "requeue_wait_s"}:
            old_options = ", ".join(f"{key.replace('_', '-')} {getattr(self.knobs, key)}" for key in new_options)
            raise LabError(f"{self.root} was made with {old_options}: `down --wipe` first, or take another --dir")
        self.knobs = Knobs(**asdict(self.knobs) | new_options)
        self.knobs.settings |= settings
        if not self.exists:
            self.check_ports()
            install_packages(self.knobs.accounting)
            self.knobs.namespaces = can_unshare()
        for name in ("pids", "run", "log", "munge", "ctld", "spool", "gpu"):
            (self.root / name).mkdir(exist_ok=True)
        if not (self.root / "munge/munge.key").exists():
            write_secret(self.root / "munge/munge.key", secrets.token_bytes(1024))
            write_secret(self.root / "munge/sql.password", secrets.token_hex(18).encode())
        self.write_gres_conf()
        hosts = Path("/etc/hosts").read_text() if Path("/etc/hosts").exists() else ""
        (self.root / "hosts").write_text(f"{hosts}\n127.0.0.1 {' '.join(self.knobs.node_names())}\n")
        (self.root / "env.sh").write_text(self.exports())
        conf, text = self.root / "slurm.conf", slurm_conf(self.knobs, self.root)
        if conf.exists() and conf.read_text() != text:
            # Many settings, such as MaxArraySize, are read only at the start: restart the daemons. Jobs survive this.
            for name in [*self.recorded("slurmd:"), "slurmctld"]:
                self.end(name, 15)
        if not self.pid("slurmctld"):
            # Job ids name the folders of runs, so no id may be used twice: neither by the next cluster, nor after a
            # crash, in which slurmctld loses the state of its last five seconds.
            clock = (int(time.time()) % 60_000 + 1) * 1000
            self.knobs.first_job_id = max(clock, self.knobs.first_job_id + 1000)
        self._knobs_file.write_text(json.dumps(asdict(self.knobs), indent=1))
        conf.write_text(slurm_conf(self.knobs, self.root))

    def check_ports(self) -> None:
        """Refuse to start a daemon whose port another process holds."""
        for name, port in self.knobs.ports().items():
            if not self.pid(name) and not port_is_free(port):
                raise LabError(f"port {port} for {name} is in use: give --port another number")

    def write_gres_conf(self) -> None:
        """Make the fake GPUs and describe them."""
        lines = ["AutoDetect=off"]
        for node in self.knobs.node_names() if self.knobs.gpus else []:
            folder = self.root / "gpu" / node
            folder.mkdir(exist_ok=True)
            gres_options = f"Count={self.knobs.gpus}"
            # slurmd accepts only character devices as files, and sets CUDA_VISIBLE_DEVICES only if it is given files.
            with contextlib.suppress(PermissionError):
                for gpu in range(self.knobs.gpus):
                    if not (folder / f"nvidia{gpu}").exists():
                        os.mknod(folder / f"nvidia{gpu}", 0o020666, os.makedev(1, 3))
                gres_options = "Flags=nvidia_gpu_env File=" + ",".join(
                    f"{folder}/nvidia{i}" for i in range(self.knobs.gpus)
                )
            lines.append(f"NodeName={node} Name=gpu {gres_options}")
        (self.root / "gres.conf").write_text("\n".join([*lines, ""]))

    def exports(self) -> str:
        """Return shell lines that make SLURM commands use this cluster."""
        return (
            f"export SLURM_LAB={shlex.quote(str(self.root))}\n"
            f"export SLURM_CONF={shlex.quote(str(self.root / 'slurm.conf'))}\n"
            'case ":$PATH:" in *:/usr/sbin:*) ;; *) export PATH="$PATH:/usr/sbin:/sbin" ;; esac\n'
        )

    def up(self) -> None:
        """Start all daemons and nodes that are not running."""
        self.check_ports()
        self.start_munged()
        if self.knobs.accounting == "dbd":
            self.start_mariadbd()
            self.start_slurmdbd()
        if not self.pid("slurmctld"):
            self.launch("slurmctld", ["slurmctld", "-D"])
        self.await_daemon("slurmctld", lambda: "is UP" in (self.call("scontrol", "ping") or ""))
        for node in self.knobs.node_names():
            self.start_node(node)
        with contextlib.suppress(LabError):
            wait_for(10, "nodes are missing", lambda: not self.missing_nodes())
        for node, state in self.missing_nodes().items():
            if "drain" in state:
                # A launch that fails with slurmctld down drains its node, and restarting both daemons keeps it drained.
                self.call("scontrol", "update", f"nodename={node}", "state=resume")
            else:
                # slurmctld takes a minute or more to contact a node that it gave up; a new slurmd registers at once.
                self.end(f"slurmd:{node}", 3)
                self.start_node(node)
        try:
            wait_for(60, "nodes are missing", lambda: not self.missing_nodes())
        except LabError as error:
            reasons = (self.call("sinfo", "-h", "-R", "-o", "%n: %E") or "").split("\n")
            problems = "; ".join(
                [*(f"{node} is {state}" for node, state in self.missing_nodes().items()), *filter(None, reasons)]
            )
            raise LabError(f"not all nodes are up after 60 s: {problems} (see {self.root}/log)") from error

    def await_daemon(self, name: str, answers: Callable[[], object], seconds: float = 60) -> None:
        """Return once a daemon answers; LabError if it dies before."""

        def done() -> object:
            if not self.pid(name):
                raise LabError(f"{name} ended at its start (see {self.root}/log/{name}.log and {name}.out)")
            return answers()

        wait_for(seconds, f"{name} does not answer (see {self.root}/log)", done)

    def start_munged(self) -> None:
        """Start the authentication daemon."""
        munge, run, log = self.root / "munge", self.root / "run", self.root / "log"
        socket_path = munge / "munge.socket"
        if not self.pid("munged"):
            socket_path.unlink(missing_ok=True)
            files = {"socket": socket_path, "key-file": munge / "munge.key", "seed-file": munge / "munge.seed"}
            files |= {"pid-file": run / "munged.pid", "log-file": log / "munged.log"}
            options = [f"--{option}={path}" for option, path in files.items()]
            self.launch("munged", ["munged", "--foreground", "--force", *options])
        self.await_daemon("munged", lambda: self.call("munge", "-S", str(socket_path), "-n"))

    def start_mariadbd(self) -> None:
        """Start the accounting database."""
        port = self.knobs.ports()["mariadbd"]
        sql, password = self.root / "sql", (self.root / "munge/sql.password").read_text()
        if not self.pid("mariadbd"):
            # Give each server its own folder for temporary tables. A starting server removes all tables that it finds
            # there, even another lab's.
            temporary = sql / "tmp"
            if not (sql / "data/mysql").is_dir():
                shutil.rmtree(sql, ignore_errors=True)
                (sql / "data").mkdir(parents=True, mode=0o700)
                temporary.mkdir(mode=0o700)
                # Only 127.0.0.1 connects, so the server need not look up this machine's name on its network.
                install = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={sql}/data"]
                install += ["--skip-test-db", "--skip-name-resolve"]
                made = subprocess.run(install, capture_output=True, env=os.environ | {"TMPDIR": str(temporary)})
                log = self.root / "log/mariadb-install.out"
                log.write_bytes(made.stdout + made.stderr)
                if made.returncode:
                    shutil.rmtree(sql / "data")  # the next `up` would take a partial database for a complete one
                    last_lines = b" / ".join((made.stdout + made.stderr).strip().splitlines()[-3:])
                    raise LabError(f"cannot make the data base: {last_lines.decode(errors='replace')} (more in {log})")
            user = "'slurm'@'127.0.0.1'"
            statements = [
                "CREATE DATABASE IF NOT EXISTS slurm_acct_db;",
                f"CREATE USER IF NOT EXISTS {user} IDENTIFIED BY '{password}';",
                f"GRANT ALL ON slurm_acct_db.* TO {user};",
            ]
            write_secret(sql / "init.sql", "\n".join([*statements, ""]).encode())
            options = [f"--datadir={sql}/data", f"--socket={sql}/socket", f"--pid-file={sql}/mariadbd.pid"]
            options += ["--bind-address=127.0.0.1", f"--port={port}", "--skip-name-resolve", "--skip-log-bin"]
            temporary.mkdir(mode=0o700, exist_ok=True)
            options += [f"--init-file={sql}/init.sql", f"--log-error={self.root}/log/mariadbd.log"]
            options += [f"--tmpdir={temporary}"]
            # Without a flush at each commit the server writes less to disk, and a crash loses up to a second of
            # transactions. slurmdbd asks for the other two options.
            options += ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M"]
            options += ["--innodb-lock-wait-timeout=900"]
            self.launch("mariadbd", ["mariadbd", "--no-defaults", "--user=root", *options])
        self.await_daemon("mariadbd", lambda: port_answers(port))

    def start_slurmdbd(self) -> None:
        """Start the accounting daemon and make the cluster known to it."""
        port = self.knobs.ports()["slurmdbd"]
        if not self.pid("slurmdbd"):
            password = (self.root / "munge/sql.password").read_text()
            write_secret(self.root / "slurmdbd.conf", slurmdbd_conf(self.knobs, self.root, password).encode())
            self.launch("slurmdbd", ["slurmdbd", "-D"])
        self.await_daemon("slurmdbd", lambda: port_answers(port))
        clusters = ["sacctmgr", "-n", "-P", "list", "cluster", "format=cluster"]
        self.await_daemon("slurmdbd", lambda: self.call(*clusters) is not None)
        # slurmctld would add the row itself, but perhaps only after the first job.
        known = (self.call(*clusters) or "").split()
        if "lab" not in known and self.call("sacctmgr", "-i", "-Q", "add", "cluster", "lab") is None:
            raise LabError(f"sacctmgr cannot add the cluster (see {self.root}/log/slurmdbd.log)")

    def start_node(self, node: str) -> None:
        """Switch a node on and start its slurmd."""
        slurmd = ["slurmd", "-D", "-N", node]
        (self.root / "spool" / node).mkdir(exist_ok=True)
        if self.knobs.namespaces:
            if not self.pid(f"node:{node}"):
                # Mounts made later on the host reach the nodes only from file systems that are marked shared. systemd
                # marks all of them at boot, but containers and minimal systems do not.
                for mount in {"/", mount_point(self.root), mount_point(Path(tempfile.gettempdir()))}:
                    subprocess.run(["mount", "--make-shared", mount], capture_output=True)
                ready = self.root / "run" / f"{node}.ready"
                ready.unlink(missing_ok=True)
                init = ["bash", "-c", NODE_INIT, "slurm-lab", node, str(ready), f"{self.root}/hosts"]
                self.launch(f"node:{node}", [*UNSHARE, *init], wrapped=True)
                self.await_daemon(f"node:{node}", ready.exists, 10)
            slurmd = ["nsenter", "--target", str(self.pid(f"node:{node}")), "--pid", "--uts", "--mount", *slurmd]
        if not self.pid(f"slurmd:{node}"):
            self.launch(f"slurmd:{node}", slurmd, wrapped=self.knobs.namespaces)
            self.await_daemon(f"slurmd:{node}", lambda: port_answers(self.knobs.ports()[f"slurmd:{node}"]))

    def node_states(self) -> dict[str, str]:
        """Return the state of each node according to slurmctld."""
        lines = (self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T") or "").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def missing_nodes(self) -> dict[str, str]:
        """Return the nodes that cannot take jobs, with their states."""
        states, usable = self.node_states(), {"idle", "mixed", "allocated", "completing"}
        states_by_node = {node: states.get(node, "unknown") for node in self.knobs.node_names()}
        return {node: state for node, state in states_by_node.items() if state not in usable}

    # ---------------------------------------------------------------- faults and the end

    def node_off(self, number: int) -> str:
        """Power a node off: slurmd, steps and tasks die at once."""
        node = f"n{number}"
        if node not in self.knobs.node_names():
            raise LabError(f"there is no node {number}: this lab has {self.knobs.nodes}")
        if not self.knobs.namespaces:
            raise LabError(f"this machine gave no namespaces, so tasks would keep running: use `kill slurmd:{node}`")
        was_on = self.kill(f"node:{node}")
        # When process 1 ends, the kernel ends all other processes of its namespace.
        wait_for(10, f"slurmd of {node} outlives its node", lambda: self.pid(f"slurmd:{node}") is None)
        (self.root / "pids" / f"slurmd:{node}").unlink(missing_ok=True)
        return f"{node} is off" if was_on else f"{node} is already off"

    def kill_daemon(self, name: str) -> str:
        """Kill -9 one daemon."""
        names = [*DAEMONS, *(f"slurmd:{node}" for node in self.knobs.node_names())]
        if name not in names:
            raise LabError(f"no daemon {name}: choose from {' '.join(names)}")
        return f"{name} killed" if self.kill(name) else f"{name} is not running"

    def down(self, wipe: bool) -> str:
        """Stop all recorded processes; with `wipe`, also remove the state."""
        # With `wipe` no accounting is kept, so do not wait for jobs: they end when their nodes are switched off.
        if self.pid("slurmctld") and not (wipe and self.knobs.namespaces):
            if jobs := (self.call("squeue", "-h", "-a", "-o", "%A", timeout=10) or "").split():
                self.call("scancel", *set(jobs), timeout=20)
            with contextlib.suppress(LabError):
                wait_for(15, "jobs remain", lambda: not self.call("squeue", "-h", "-a", timeout=10))
        for name in self.recorded("slurmd:"):
            self.end(name, 5)
        for pid in self.steps():
            send(pid, signal.SIGKILL)
        for name in self.recorded("node:"):
            self.kill(name)
        for name in reversed(DAEMONS):
            self.end(name, 20)
        if wipe:
            shutil.rmtree(self.root)
        return f"stopped {self.root}"

    def status(self) -> str:
        """Return one line per daemon and node."""
        names = [name for name in DAEMONS if self.knobs.accounting == "dbd" or name not in ACCOUNTING_ONLY]
        names += [f"{kind}:{node}" for node in self.knobs.node_names() for kind in ("node", "slurmd")]
        if not self.knobs.namespaces:
            names = [name for name in names if not name.startswith("node:")]
        states = self.node_states() if self.pid("slurmctld") else {}
        rows = []
        for name in names:
            pid = self.pid(name)
            node_state = states.get(name.removeprefix("slurmd:"), "")
            rows.append(f"{name:10} {f'up    pid {pid:<8}' if pid else 'down':18} {node_state}".rstrip())
        return "\n".join(rows)


def mount_point(path: Path) -> str:
    """Return the mount point of a path's file system."""
    return str(next(folder for folder in [path, *path.parents] if folder.is_mount()))


def lab_directory(given: str | None) -> Path:
    """Return the state directory: `given`, $SLURM_LAB, or a folder in the directory for temporary files."""
    root = Path(given or os.environ.get("SLURM_LAB") or Path(tempfile.gettempdir()) / "slurm_lab").resolve()
    if len(str(root)) > MAX_DIR_LENGTH:
        raise LabError(f"--dir may have {MAX_DIR_LENGTH} characters (unix sockets go below it), not: {root}")
    if not re.fullmatch(r"[\w./+-]+", str(root)):
        raise LabError(f"--dir may have letters, digits and ._+- only, as slurm.conf knows no quotes, not: {root}")
    if root.is_dir() and any(root.iterdir()) and not (root / "lock").exists():
        raise LabError(f"{root} exists, and no lab made it")
    return root


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="A real SLURM cluster on this machine, for tests. Needs root.")
    common_options = argparse.ArgumentParser(add_help=False)
    common_options.add_argument(
        "--dir", help="state directory (default: $SLURM_LAB, or slurm_lab in the temporary folder)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", parents=[common_options], help="start everything that is not running")
    default = Knobs()
    for name in ("nodes", "cpus", "memory_mb", "gpus", "port", "node_down_s", "requeue_wait_s"):
        up.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"default {getattr(default, name)}")
    up.add_argument("--accounting", choices=("dbd", "none"), help="dbd (default): sacct works")
    up.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a line of slurm.conf; repeatable")
    down = commands.add_parser("down", parents=[common_options], help="stop everything that `up` started")
    down.add_argument("--wipe", action="store_true", help="also remove the state directory")
    off = commands.add_parser("node-off", parents=[common_options], help="power a node off")
    off.add_argument("number", type=int)
    kill = commands.add_parser("kill", parents=[common_options], help="kill -9 one daemon")
    kill.add_argument("name", help="slurmd:n1 (its tasks keep running), slurmctld, slurmdbd, mariadbd or munged")
    commands.add_parser("env", parents=[common_options], help="print the exports")
    commands.add_parser("status", parents=[common_options], help="show which daemons run, and the state of the nodes")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> str:
    """Run the command, and return the text to print."""
    root = lab_directory(options.dir)
    if options.command not in ("up", "down") and not (root / "knobs.json").is_file():
        raise LabError(f"there is no lab in {root}")
    if options.command == "env":
        return Lab(root).exports()
    if os.geteuid() != 0:
        raise LabError("must be root: SLURM's daemons and the nodes' namespaces need it")
    os.environ["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"
    if options.command == "down" and not root.is_dir():
        return f"there is no lab in {root}"
    is_new = not root.exists()
    with contextlib.ExitStack() as stack:
        lab = Lab(root)
        stack.enter_context(lab.locked())
        lab = Lab(root)
        if options.command == "up":
            return bring_up(lab, options, is_new)
        if options.command == "down":
            return lab.down(options.wipe)
        if options.command == "node-off":
            return lab.node_off(options.number)
        if options.command == "kill":
            return lab.kill_daemon(options.name)
        return lab.status()


def bring_up(lab: Lab, options: argparse.Namespace, is_new_lab: bool) -> str:
    """Configure and start the lab; return the text on how to use it."""
    started_at = time.monotonic()
    names = ("nodes", "cpus", "memory_mb", "gpus", "accounting", "port", "node_down_s", "requeue_wait_s")
    settings = dict(text.split("=", 1) for text in options.set if "=" in text)
    if len(settings) < len(options.set):
        raise LabError("--set takes KEY=VALUE, each key once")
    try:
        lab.configure({name: getattr(options, name) for name in names}, settings)
    except LabError:
        if is_new_lab:
            shutil.rmtree(lab.root)
        raise
    lab.up()
    namespaces = "" if lab.knobs.namespaces else ", without namespaces: `node-off` does not work"
    summary = f"{lab.knobs.nodes} nodes up, accounting {lab.knobs.accounting}{namespaces}"
    return f"{summary} ({time.monotonic() - started_at:.1f} s)\nuse it with: . {lab.root}/env.sh"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a failure prints one line and returns 1."""
    try:
        print(run(parse_arguments(arguments)).rstrip())
    except LabError as error:
        print(f"lab.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
