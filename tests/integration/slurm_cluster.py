"""A real Slurm of several nodes on this machine. Needs root.

Each node is a slurmd with its own host name and loopback address.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SwitchType=switch/none
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
KillWait=5
SlurmdTimeout=10
SlurmdParameters=config_overrides
GresTypes=gpu
"""
GPUS = 4  # GPUs of each node: device files like /dev/null


def why_not() -> str | None:
    """Return the reason why there can be no cluster here, or None.

    Installs Debian's package if it can.
    """
    if os.geteuid() != 0:
        return "a Slurm of several nodes on one machine needs root"
    if shutil.which("slurmctld") is None and shutil.which("apt-get"):
        for words in (
            ["update"],
            ["install", "-y", "--no-install-recommends", "slurm-wlm", "munge"],
        ):
            subprocess.run(
                ["apt-get", "-qq", *words],
                capture_output=True,
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            )
    missing = [
        name
        for name in ("slurmctld", "slurmd", "munged", "setpriv", "unshare")
        if shutil.which(name) is None
    ]
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)" if missing else None


class Cluster:
    """Nodes node1, node2, … with 4 CPUs and 4 fake GPUs each. A context manager.

    Commands of Slurm need the variables in `environment`.
    """

    def __init__(self, folder: Path, nodes: int, port: int):
        self.folder, self.nodes = folder, range(1, nodes + 1)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.conf = _CONF.format(host=os.uname().nodename, folder=folder, port=port)
        for i in self.nodes:
            self.conf += (
                f"NodeName=node{i} NodeAddr=127.0.1.{i} Port={port + i} "
                f"CPUs=4 RealMemory=4000 Gres=gpu:{GPUS} State=UNKNOWN\n"
            )
        self.conf += (
            f"PartitionName=test Nodes=node[1-{nodes}] Default=YES MaxTime=INFINITE State=UP\n"
        )

    def __enter__(self) -> Cluster:
        folder = self.folder
        folder.chmod(0o755)
        for name in ("munge", "state", *(f"spool.node{i}" for i in self.nodes)):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(self.conf)
        for i in range(GPUS):
            os.mknod(folder / f"nvidia{i}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        gpus = f"Name=gpu File={folder}/nvidia[0-{GPUS - 1}]"
        (folder / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=node[1-{len(self.nodes)}] {gpus}\n"
        )
        (folder / "hosts").write_text(
            Path("/etc/hosts").read_text() + "".join(f"127.0.1.{i} node{i}\n" for i in self.nodes)
        )
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        subprocess.run(["chown", "-R", "munge:munge", folder / "munge"], check=True)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        munge = {
            name: self.folder / "munge" / name for name in ("key", "socket", "pid", "log", "seed")
        }
        flags = [
            f"--{flag}={munge[name]}"
            for flag, name in (
                ("key-file", "key"),
                ("socket", "socket"),
                ("pid-file", "pid"),
                ("log-file", "log"),
                ("seed-file", "seed"),
            )
        ]
        self._run(
            "setpriv",
            "--reuid",
            "munge",
            "--regid",
            "munge",
            "--clear-groups",
            "munged",
            *flags,
            "--num-threads=2",
        )
        self._run("slurmctld", "-c")
        for i in self.nodes:
            self._start_node(i)
        self._until(self._idle, 30)

    def _start_node(self, i: int) -> None:
        """Start a slurmd with its own host name and its own /etc/hosts."""
        inside = (
            f"hostname node{i}; mount --bind {self.folder}/hosts /etc/hosts; exec slurmd -N node{i}"
        )
        self._run("unshare", "-m", "-u", "sh", "-c", inside)

    def _idle(self) -> bool:
        return self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(self.nodes)

    def __exit__(self, *_: object) -> None:
        """End the jobs first: their processes would outlive the daemons."""
        if (self.folder / "slurmctld.pid").exists():
            for job in self.run("squeue", "-h", "-o", "%A").split():
                self.run("scancel", job)
            self._until(lambda: not self.run("squeue", "-h"), 60)
        daemons = [
            int(file.read_text())
            for file in [*self.folder.glob("*.pid"), *self.folder.glob("munge/pid")]
        ]
        for pid in daemons:
            os.kill(pid, signal.SIGTERM)
        psutil.wait_procs([psutil.Process(pid) for pid in daemons if psutil.pid_exists(pid)], 20)

    @contextlib.contextmanager
    def without_node(self, i: int) -> Iterator[None]:
        """Kill all processes of a node at once, as a power failure does.

        At the end of the block the node is started again, and all nodes are idle.
        """
        processes = self.processes(i)
        (self.folder / f"slurmd.node{i}.pid").unlink()
        for process in processes:
            process.kill()
        try:
            yield
        finally:
            self._start_node(i)
            self._until(self._idle, 60)

    def processes(self, i: int) -> list[psutil.Process]:
        """Return all processes of a node, its slurmd included. They share a UTS namespace."""
        here = os.readlink(
            f"/proc/{(self.folder / f'slurmd.node{i}.pid').read_text().strip()}/ns/uts"
        )
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):  # it has just ended
                if os.readlink(f"/proc/{process.pid}/ns/uts") == here:
                    found.append(process)
        return found

    def nodes_of(self, job: str) -> list[int]:
        """Return the numbers of a running job's nodes, in the job's own order."""
        nodes = self.run("squeue", "-h", "-j", job, "-o", "%N").strip()
        return [
            int(name.removeprefix("node"))
            for name in self.run("scontrol", "show", "hostnames", nodes).split()
        ]

    def field(self, job: str, field: str) -> str:
        """Return a field of `scontrol show job`: JobState, Restarts, StartTime, …"""
        fields = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return next(
            word.removeprefix(f"{field}=") for word in fields if word.startswith(f"{field}=")
        )

    def run(self, *command: str) -> str:
        """Run a command of Slurm and return its output."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        ).stdout

    def _run(self, *command: str) -> None:
        subprocess.run(
            command,
            env=self.environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )

    @staticmethod
    def _until(true, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the simulated cluster was not ready after {seconds} s: see its logs"
                )
            time.sleep(0.25)
