"""Sets of worker processes that take commands over a Unix socket, and sleep (SIGSTOP) while others are measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.contenders import JOBS, JobSpec
from benchmarks.launch import launch

GRACE_SECONDS = 10.0
LOG_LINES = 25
_NUMBERS = itertools.count()


def available_memory() -> int:
    """Bytes that new data may take on this machine."""
    return psutil.virtual_memory().available


class JobError(RuntimeError):
    """A job failed, hung or could not start; the message names job and rank and ends with the job's log."""

    def __init__(self, job: str, message: str) -> None:
        super().__init__(message)
        self.job = job


class Job:
    """One environment's worker processes, `ranks` of them."""

    def __init__(self, spec: JobSpec, ranks: int, folder: Path, limit: float, environment: dict[str, str]) -> None:
        self.spec = spec
        self.ranks = ranks
        self.deadline = time.monotonic() + limit
        self._limit = int(limit)
        self._environment = {**os.environ, **environment, **spec.environment}
        label = f"{spec.name}-{ranks}-{next(_NUMBERS)}"
        self._socket_path = folder / f"{label}.sock"
        self._log_path = folder / f"{label}.log"
        self._launched: list[subprocess.Popen[bytes]] = []
        self._channels: list[socket.socket] = []
        self._received: list[bytes] = []
        self._processes: list[int] = []
        self._suspended = False
        self.ready: list[dict[str, Any]] = []

    def start(self) -> None:
        """Launches the workers and waits until all of them are ready; leaves them suspended."""
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(self._socket_path))
            server.listen(self.ranks)
            worker = ["--job", self.spec.name, "--limit", str(self._limit), "--socket", str(self._socket_path)]
            with self._log_path.open("ab") as log:
                try:
                    launch(self._launched, self.spec.mpi, self.ranks, worker, self._limit, self._environment, log)
                except OSError as error:
                    raise self._failure(str(error)) from error
            self._accept(server)
        self.ready = self._collect(time.monotonic() + 180)
        self.suspend()

    def ask(self, command: dict[str, Any], timeout: float = 300.0) -> list[dict[str, Any]]:
        """Wakes the job, has every rank run the command, suspends it; the answers in rank order."""
        self.resume()
        line = json.dumps(command).encode() + b"\n"
        try:
            for channel in self._channels:
                channel.sendall(line)
        except OSError as error:
            raise self._failure(f"a rank is gone ({error})") from error
        answers = self._collect(min(self.deadline, time.monotonic() + timeout))
        self.suspend()
        return answers

    def suspend(self) -> None:
        """Stops exactly the processes that reported themselves."""
        if self.spec.suspend:
            self._signal(signal.SIGSTOP)
            self._suspended = True

    def resume(self) -> None:
        """Lets them run again."""
        if self._suspended:
            self._signal(signal.SIGCONT)
        self._suspended = False

    def end(self) -> None:
        """Ends every process of the job: politely first, then by signal. Never raises."""
        self._signal(signal.SIGCONT)
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.sendall(b'{"do": "exit"}\n')
                channel.close()
        for stop in (None, signal.SIGTERM, signal.SIGKILL):
            if stop is signal.SIGKILL:
                self._signal(signal.SIGKILL)
            for process in self._launched:
                if stop is not None and process.poll() is None:
                    process.send_signal(stop)
            if self._wait_all(GRACE_SECONDS):
                break
        for descriptor in self._processes:
            os.close(descriptor)
        self._processes = []

    def _accept(self, server: socket.socket) -> None:
        server.settimeout(1.0)
        found: dict[int, tuple[socket.socket, int]] = {}
        deadline = time.monotonic() + 120
        while len(found) < self.ranks:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._launched):
                raise self._failure(f"{len(found)} of {self.ranks} ranks reported themselves")
            try:
                channel, _ = server.accept()
            except TimeoutError:
                continue
            hello = json.loads(channel.recv(1 << 16))
            found[hello["rank"]] = (channel, os.pidfd_open(hello["pid"]))
            channel.sendall(b"start\n")
        for rank in range(self.ranks):
            channel, process = found[rank]
            self._channels.append(channel)
            self._processes.append(process)
        self._received = [b""] * self.ranks

    def _collect(self, deadline: float) -> list[dict[str, Any]]:
        """One line of JSON from every rank; the first error or hang ends the wait."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.ranks:
            missing = [rank for rank in range(self.ranks) if rank not in answers]
            waiting = [self._channels[rank] for rank in missing]
            readable, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise self._failure(f"no answer in time from rank(s) {missing}")
            for channel in readable:
                rank, data = self._channels.index(channel), b""
                with contextlib.suppress(OSError):
                    data = channel.recv(1 << 20)
                if not data:
                    raise self._failure(f"rank {rank} ended")
                self._received[rank] += data
                if self._received[rank].endswith(b"\n"):
                    answers[rank] = json.loads(self._received[rank])
                    self._received[rank] = b""
                    if "error" in answers[rank]:
                        raise self._failure(f"rank {rank}: {answers[rank]['error']}")
        return [answers[rank] for rank in range(self.ranks)]

    def _failure(self, what: str) -> JobError:
        log = self._log_path.read_text(errors="replace").splitlines() if self._log_path.exists() else []
        tail = "\n".join(f"    {line}" for line in log[-LOG_LINES:])
        return JobError(self.spec.name, f"job {self.spec.name} ({self.ranks} ranks): {what}\n{tail}")

    def _signal(self, number: int) -> None:
        for descriptor in self._processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)

    def _wait_all(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for process in self._launched:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True


class Pool:
    """The jobs of one number of ranks, started when first asked for and all ended on the way out."""

    def __init__(self, ranks: int, folder: Path, limit: float, environment: dict[str, str]) -> None:
        self.ranks = ranks
        self._arguments = (ranks, folder, limit, environment)
        self._jobs: dict[str, Job] = {}

    def job(self, name: str) -> Job:
        """The running job of this name; JobError if it cannot start."""
        if name not in self._jobs:
            job = Job(JOBS[name], *self._arguments)
            self._jobs[name] = job
            try:
                job.start()
            except BaseException:
                self.drop(name)
                raise
        return self._jobs[name]

    def started(self, name: str) -> bool:
        """Whether the job of this name is running."""
        return name in self._jobs

    def drop(self, name: str) -> None:
        """Ends a job; the next `job(name)` starts a fresh one."""
        if name in self._jobs:
            self._jobs.pop(name).end()

    def make_room(self, wanted: int, keep: str) -> None:
        """Ends sleeping jobs, all but `keep`, until `wanted` bytes are available."""
        for name in [name for name in self._jobs if name != keep]:
            if available_memory() >= wanted:
                return
            self.drop(name)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *details: object) -> None:
        # A second Ctrl-C must not leave processes behind.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in list(self._jobs):
            self.drop(name)
        signal.signal(signal.SIGINT, previous)
