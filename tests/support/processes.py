"""Children of a test: bounded in time, killed with all they started, gone when the test dies."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).parents[2]
_OUTPUT_SHOWN = 4000  # characters of each child


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def exit_with_parent(limit: int) -> None:
    """Called in a child: it ends when its standard input closes, and after `limit` seconds.

    The parent holds the other end of the pipe, which closes however the parent ends, `SIGKILL`
    included. The alarm's default action needs no cooperation of a thread that hangs.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limit)

    def watch() -> None:
        # Unbuffered: a lock of `sys.stdin` held here would stop the interpreter from ending.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], environment: dict[str, str] | None = None
) -> Iterator[list[tuple[subprocess.Popen, Any]]]:
    """Starts Python on each of `commands` from the repository's root; kills all at the end.

    Yields:
      For each child its process and the file that its output goes to.
    """
    # Without the number of devices of the test's own process; with its quick compilation.
    inherited = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    children: list[tuple[subprocess.Popen, Any]] = []
    with contextlib.ExitStack() as stack:
        try:
            for command in commands:
                output = stack.enter_context(tempfile.TemporaryFile())
                child = subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=_ROOT,
                    env={**inherited, "PYTHONPATH": path, **(environment or {})},
                    start_new_session=True,
                )
                children.append((child, output))
            yield children
        finally:
            for child, _ in children:
                # Its group has its number, and outlives it as long as a member does.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                child.stdin.close()


def wait(children: Sequence[tuple[subprocess.Popen, Any]], timeout: float) -> None:
    """Waits until all have ended well; raises with their output as soon as one has not."""
    deadline = time.monotonic() + timeout
    running = [child for child, _ in children]
    while running:
        codes = {child: child.poll() for child in running}
        if any(codes.values()):
            raise AssertionError(f"a child failed\n{report(children)}")
        running = [child for child, code in codes.items() if code is None]
        if running and time.monotonic() > deadline:
            raise AssertionError(f"not done after {timeout} s\n{report(children)}")
        time.sleep(0.02)


def output_of(output: Any) -> str:
    """What a child has printed up to now."""
    output.seek(0)
    return output.read().decode(errors="replace")


def report(children: Sequence[tuple[subprocess.Popen, Any]]) -> str:
    """Exit code and the end of the output of each child."""
    return "\n".join(
        f"--- child {i}, exit code {child.poll()}:\n{output_of(output)[-_OUTPUT_SHOWN:]}"
        for i, (child, output) in enumerate(children)
    )
