"""A real Slurm of several nodes on this machine: one slurmd a node, each with a host name and a loopback address of its own. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
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
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
KillWait=5
SlurmdParameters=config_overrides
"""


def why_not() -> str | None:
    """Why there can be no cluster here; installs Debian's package where that is possible."""
    if os.geteuid() != 0:
        return "a Slurm of several nodes on one machine needs root"
    if shutil.which("slurmctld") is None and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "slurm-wlm", "munge"]
        subprocess.run(
            install, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        )
    missing = [name for name in ("slurmctld", "slurmd", "munged", "setpriv", "unshare") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)" if missing else None


class Cluster:
    """Nodes node1, node2, … of 4 CPUs. Start and stop it by `with`; `environment` is for the commands of Slurm."""

    def __init__(self, folder: Path, nodes: int, port: int):
        self.folder, self.nodes = folder, range(1, nodes + 1)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.conf = _CONF.format(host=os.uname().nodename, folder=folder, port=port)
        for i in self.nodes:
            self.conf += f"NodeName=node{i} NodeAddr=127.0.1.{i} Port={port + i} CPUs=4 RealMemory=4000 State=UNKNOWN\n"
        self.conf += f"PartitionName=test Nodes=node[1-{nodes}] Default=YES MaxTime=INFINITE State=UP\n"

    def __enter__(self) -> Cluster:
        folder = self.folder
        folder.chmod(0o755)
        for name in ("munge", "state", *(f"spool.node{i}" for i in self.nodes)):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(self.conf)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "".join(f"127.0.1.{i} node{i}\n" for i in self.nodes))
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
        munge = {name: self.folder / "munge" / name for name in ("key", "socket", "pid", "log", "seed")}
        flags = [
            f"--{flag}={munge[name]}"
            for flag, name in (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))
        ]
        self._run("setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", *flags, "--num-threads=2")
        self._run("slurmctld", "-c")
        for i in self.nodes:  # a host name and an /etc/hosts of its own
            inside = f"hostname node{i}; mount --bind {self.folder}/hosts /etc/hosts; exec slurmd -N node{i}"
            self._run("unshare", "-m", "-u", "sh", "-c", inside)
        self._until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(self.nodes), 30)

    def __exit__(self, *_: object) -> None:
        """Jobs first: their processes would outlive the daemons."""
        if (self.folder / "slurmctld.pid").exists():
            for job in self.run("squeue", "-h", "-o", "%A").split():
                self.run("scancel", job)
            self._until(lambda: not self.run("squeue", "-h"), 60)
        daemons = [int(file.read_text()) for file in [*self.folder.glob("*.pid"), *self.folder.glob("munge/pid")]]
        for pid in daemons:
            os.kill(pid, signal.SIGTERM)
        psutil.wait_procs([psutil.Process(pid) for pid in daemons if psutil.pid_exists(pid)], 20)

    def run(self, *command: str) -> str:
        """The output of a command of Slurm."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60).stdout

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, …"""
        fields = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return next(field.removeprefix("JobState=") for field in fields if field.startswith("JobState="))

    def _run(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60)

    @staticmethod
    def _until(true, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError("the simulated cluster did not get there; see its logs")
            time.sleep(0.25)
