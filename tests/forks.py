"""Scripts as processes of their own, forked from one that has imported what all of them need: torch and the first
optimizer cost 3 s in every new Python, a fork some milliseconds.

    python forks.py FOLDER MODULE ...
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from select import POLLIN, poll
from types import ModuleType, TracebackType
from typing import Any

MIDEPOCH = (
    "midepoch.open.files",
    "midepoch.memory.tables",
    "midepoch.loader.make",
    "midepoch.audit",
    "midepoch.testing",
)
"""What most scripts import of it."""

PYTHON = "FORKS_PYTHON"
"""In the environment of a script: the program that it takes for Python."""

PATIENCE = 300
"""Seconds after which a script is killed: it hangs."""


def forked(action: Callable[[], Any]) -> int:
    """Do this in a fork of this very process: 0 if it gave something true. A hang is a status other than 0, too."""
    return together(action)[0]


def together(*actions: Callable[[], Any]) -> list[int]:
    """Do these in forks of this very process at the same time: 0 for each that gave something true."""
    children = []
    for action in actions:
        if not (child := os.fork()):
            status = 1
            try:
                signal.alarm(60)
                status = 0 if action() else 1
            finally:
                os._exit(status)  # never back into the tests
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


class Forks:
    """Runs scripts with ``modules`` in place already. What a script does to its process stays there.

    All test processes of a run share one server for the same modules: it ends when the last of them has closed.
    """

    def __init__(self, *modules: str) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        name = hashlib.sha256(" ".join((str(os.getuid()), run, *modules)).encode()).hexdigest()[:16]
        self._folder = Path(tempfile.gettempdir(), f"forks-{name}")  # the path of a socket has 107 bytes at most
        with locked(self._folder):
            try:
                self._socket = self._connected()
            except OSError:
                self._start(modules)
                self._socket = self._connected()
        self._answers = self._socket.makefile()

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._folder / "socket"))
        except OSError:
            connection.close()
            raise
        return connection

    def _start(self, modules: Sequence[str]) -> None:
        """Start the server, a process that outlives this one if another still needs it. It listens when this returns."""
        own = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # no threads where forks come from
        own["HF_HOME"] = str(self._folder / "hf")  # read when a package of Hugging Face is imported
        with open(self._folder / "log", "wb") as log:
            subprocess.run(
                [sys.executable, __file__, str(self._folder), *modules],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **own},
                check=True,
            )

    def run(
        self,
        *commands: Sequence[str],
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        envs: Sequence[dict[str, str]] | None = None,
        together: bool = False,
        teardown: bool = False,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Each a script and its arguments, all at once; ``env`` is what differs from this process's environment.

        ``envs``: what differs further for each. ``together``: when one ends badly, the others are killed. ``teardown``:
        modules and their objects are torn down at the end, which takes 0.5 s with torch in place.
        """
        own = [{**os.environ, **(env or {}), **each} for each in envs or [{}] * len(commands)]
        request = {
            "commands": commands,
            "cwd": str(cwd or Path.cwd()),
            "envs": own,
            "together": together,
            "teardown": teardown,
        }
        line = ""
        with suppress(ConnectionError):
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            answered = poll()  # select() takes no descriptors from 1,024 on
            answered.register(self._socket, POLLIN)
            line = self._answers.readline() if answered.poll(1000 * (PATIENCE + 60)) else ""
        if not line:
            said = (self._folder / "log").read_text()[-3000:]
            raise RuntimeError(f"the process that scripts are forked from hangs, or has ended: {said}")
        answers = json.loads(line)
        return [
            subprocess.CompletedProcess(command, *answer) for command, answer in zip(commands, answers, strict=True)
        ]

    def ranks(self, size: int, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
        """A script as ``size`` ranks of torch, which end well."""
        done = self.world(size, *command, cwd=cwd, env=env)
        assert not any(one.returncode for one in done), "\n".join(one.stderr[-3000:] for one in done)

    def world(
        self, size: int, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> list[subprocess.CompletedProcess[str]]:
        """A script as ``size`` ranks of torch, in the environment that torchrun makes, around a store of our own.

        torchrun is one more Python that imports torch, and starts a new one for each rank: 3 s each.
        """
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        here = {
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size)),
            **dict.fromkeys(("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks do not choose one among them to serve the others
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        each = [dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)) for rank in range(size)]
        return self.run(*[command] * size, cwd=cwd, env=here, envs=each, together=True)

    def executable(self, path: Path, *first: str) -> None:
        """Make a program that does what Python does with its arguments, after those given here, in a fork."""
        path.write_text(_EXECUTABLE.format(sys.executable, str(self._folder / "socket"), list(first)))
        path.chmod(0o755)

    def program(self, size: int, script: Path, *arguments: str) -> int:
        """A script alone or as ``size`` ranks, to its end: the first exit status that is not 0. It says what went wrong."""
        command = [str(script), *arguments]
        done = self.world(size, *command) if size > 1 else self.run(command, teardown=True)
        sys.stdout.write("".join(one.stdout for one in done))
        sys.stderr.write("".join(one.stderr[-6000:] for one in done if one.returncode))
        return next((one.returncode for one in done if one.returncode), 0)

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not only closed: whatever this process has forked since, and still runs, has the connection open as well.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._answers.close()
        self._socket.close()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is made if need be, and that its server removes in the end."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError), open(folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / "lock")):
                yield
                return


def listen(folder: Path, modules: Sequence[str]) -> None:
    """Be a server: a fork for each connection, until the last connection has ended."""
    with suppress(FileNotFoundError):
        os.unlink(folder / "socket")  # of a server that has ended
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    if os.fork():
        os._exit(0)  # who started it need not wait for it
    os.setsid()
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    connections: set[int] = set()
    listener.settimeout(0.2)
    quiet = time.monotonic() + PATIENCE
    while True:
        while connections and (pid := os.waitpid(-1, os.WNOHANG)[0]):
            connections.remove(pid)
            quiet = 0.0  # somebody was here: with the last connection it ends
        over = not connections and time.monotonic() > quiet
        with locked(folder) if over else nullcontext():  # nobody connects meanwhile
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if over:
                    shutil.rmtree(folder)
                    os._exit(0)
                continue
        if not (pid := os.fork()):
            listener.close()
            serve(connection)
            os._exit(0)
        connection.close()
        connections.add(pid)


_EXECUTABLE = """#!{} -SEs
import json, os, signal, socket, sys

connection = socket.socket(socket.AF_UNIX)
connection.connect({!r})
request = {{"command": {} + sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
socket.send_fds(connection, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
code = int(connection.makefile().readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def serve(connection: socket.socket) -> None:
    """Answer the requests of one connection: those of ``Forks.run``, or that of an executable, with its files."""
    first, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    line = _line(connection, first)
    if files:
        request = json.loads(line)
        if not (pid := os.fork()):
            os.close(connection.detach())
            become(request["command"], request["cwd"], request["env"], *files)
        threading.Thread(target=_kill_without, args=(connection.dup(), pid), daemon=True).start()
        connection.sendall(b"%d\n" % wait_for([pid], together=False)[pid])
        return
    while line:
        request = json.loads(line)
        running = []
        gate, opened = os.pipe()  # none begins before all are there, as ranks that a launcher starts
        for command, env in zip(request["commands"], request["envs"], strict=True):
            out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
            if not (pid := os.fork()):
                os.close(connection.detach())
                os.close(opened)
                os.read(gate, 1)
                os.close(gate)
                nothing = os.open(os.devnull, os.O_RDONLY)
                become(command, request["cwd"], env, nothing, out.fileno(), err.fileno(), teardown=request["teardown"])
                return
            running.append((pid, out, err))
        os.close(opened)
        os.close(gate)
        codes = wait_for([pid for pid, _, _ in running], request["together"])
        answers = []
        for pid, out, err in running:
            answers.append((codes[pid], *(file.read() for file in (out, err) if not file.seek(0))))
            out.close()
            err.close()
        connection.sendall(json.dumps(answers).encode() + b"\n")
        line = _line(connection)


def _kill_without(connection: socket.socket, pid: int) -> None:
    """Kill a fork when the program that it stands for has been killed."""
    with suppress(OSError):
        connection.recv(1)
        os.kill(pid, signal.SIGKILL)


def _line(connection: socket.socket, received: bytes = b"") -> bytes:
    """The next line, of which so much was received already; nothing if the connection has ended."""
    while not received.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:
            return b""
        received += more
    return received


def wait_for(pids: Sequence[int], together: bool) -> dict[int, int]:
    """The exit codes of these children, which are all there are."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] and together:
            for other in set(pids) - set(codes):
                os.kill(other, signal.SIGKILL)  # it may wait for the one that has gone, for ever
    return codes


def become(command: list[str], cwd: str, env: dict[str, str], *files: int, teardown: bool = False) -> None:
    """Be a Python that was started with this script (or -m, or -c, and what follows) and these files, to its end.

    Without a teardown it ends here: after threads, what was registered for the exit, and what is written at last.
    """
    for number, file in enumerate(files):
        os.dup2(file, number)
    signal.alarm(PATIENCE)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.executable = env.get(PYTHON, sys.executable)
    if command[0] == "-u":  # which torchrun passes to its ranks
        command = command[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[0] = cwd if command[0] in ("-m", "-c") else os.path.dirname(os.path.abspath(command[0]))
    sys.path += [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    if teardown:
        execute(command)
        return
    code: Any = 0
    try:
        execute(command)
    except SystemExit as problem:
        code = problem.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def execute(command: list[str]) -> None:
    first, *rest = command
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    code = rest.pop(0) if first == "-c" else Path(first).read_text()
    sys.argv = [first, *rest]
    main: Any = ModuleType("__main__")
    main.__builtins__ = builtins
    if first != "-c":
        main.__file__ = first
    sys.modules["__main__"] = main
    exec(compile(code, "<string>" if first == "-c" else first, "exec"), main.__dict__)


if __name__ == "__main__":
    listen(Path(sys.argv[1]), sys.argv[2:])
