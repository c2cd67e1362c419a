"""The agent of one machine: starts the processes of jobs, forwards their progress, and says how they ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.cluster.runner._wire import receive, send

_POLL = 0.1
_GRACE = 5.0


class Agent:
    """Runs processes for a controller until that closes the connection.

    gpus: device numbers that this machine lends; processes see theirs in ``CUDA_VISIBLE_DEVICES``.
    folder: where each job has a folder of its own, for logs, progress and checkpoints.
    secret: what the controller expects, so that nobody else's processes are run or told about.
    """

    def __init__(self, address: str, port: int, gpus: Sequence[int], folder: Path, secret: str) -> None:
        self._address, self._port = address, port
        self._gpus, self._folder, self._secret = list(gpus), Path(folder), secret
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve the controller; whatever still runs when it goes away is stopped."""
        reader, writer = await asyncio.open_connection(self._address, self._port)
        send(writer, kind="hello", secret=self._secret, gpus=self._gpus)
        try:
            while (message := await receive(reader)) is not None:
                if message["kind"] == "launch":
                    task = asyncio.create_task(self._job(writer, message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif message["kind"] == "stop":
                    await self._stop(message["job"])
        finally:
            await asyncio.gather(*(self._stop(job) for job in list(self._running)))
            for task in list(self._tasks):
                task.cancel()
            writer.close()

    async def _job(self, writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
        job = message["job"]
        folder = self._folder / job
        folder.mkdir(parents=True, exist_ok=True)
        progress = folder / "progress.json"
        progress.unlink(missing_ok=True)
        environment = {
            **os.environ,
            **message["env"],
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, message["gpus"])),
            "GOSSAMER_JOB_FOLDER": str(folder),
            "GOSSAMER_ITERATIONS": str(message["iterations"]),
            "GOSSAMER_BATCH": str(message["batch"]),
            "GOSSAMER_SUB_BATCH": str(message["sub_batch"]),
            "GOSSAMER_RESUME": "1" if message["resume"] else "0",
            "GOSSAMER_PROFILE": "1" if message["profile"] else "0",
            "GOSSAMER_GANG": str(len(message["gpus"])),
        }
        with (folder / "log.txt").open("ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *message["command"], env=environment, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                send(writer, kind="ended", job=job, code=127, why=str(error))
                return
            self._running[job] = process
            send(writer, kind="started", job=job, pid=process.pid)
            try:
                await self._follow(writer, job, process, progress)
            finally:
                del self._running[job]
        send(writer, kind="ended", job=job, code=process.returncode, why="")
        await writer.drain()

    async def _follow(
        self, writer: asyncio.StreamWriter, job: str, process: asyncio.subprocess.Process, progress: Path
    ) -> None:
        last = ""
        waiting = asyncio.create_task(process.wait())
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=_POLL)
            text = progress.read_text(encoding="utf-8") if progress.exists() else ""
            if text and text != last:
                last = text
                send(writer, kind="progress", job=job, **json.loads(text))
            if done:
                return

    async def _stop(self, job: str) -> None:
        """Ask the process group to end, and end it after a while."""
        process = self._running.get(job)
        if process is None or process.returncode is not None:
            return
        os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _GRACE)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
