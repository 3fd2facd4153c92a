"""Several processes train as one does: the same parameters and the same state, shard by shard."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests.distributed import training
from tests.support import processes

_LOCAL_DEVICES = 2
_LIMIT = 240  # seconds, for a machine that is busy; a pair takes about 20


def _read(file: pathlib.Path) -> dict[tuple[str, str], dict[str, list[Any]]]:
    """What a process wrote down: for each run and leaf the shards that it holds, and where."""
    results: dict[tuple[str, str], dict[str, list[Any]]] = {}
    with np.load(file, allow_pickle=False) as arrays:
        for key in arrays.files:
            name, layout, path, number, kind = key.split(" ")
            if kind == "data":
                index = arrays[f"{name} {layout} {path} {number} index"]
                shards = results.setdefault((name, layout), {}).setdefault(path, [])
                shards.append((index, arrays[key]))
    return results


def _train(count: int) -> list[dict[Any, Any]]:
    """What each of `count` processes writes down."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"127.0.0.1:{processes.free_port()}"
        settings = (_LOCAL_DEVICES, _LIMIT)
        files = [pathlib.Path(folder) / f"{i}.npz" for i in range(count)]
        commands = [
            ["-m", "tests.distributed.worker", address, *map(str, (count, i, *settings, file))]
            for i, file in enumerate(files)
        ]
        with processes.started(commands) as children:
            processes.wait(children, _LIMIT)
        return [_read(file) for file in files]


def _assert_shards_equal(expected: np.ndarray, shards: list[Any], name: str) -> None:
    """Every shard is its part of `expected`, and together they are all of it."""
    seen = np.zeros(expected.shape, bool)
    wide = expected.astype(np.float64)
    # The mean over the batch is summed in another order: some units of the last place, which three
    # steps and Newton-Schulz amplify. A gradient on the edge may round to a neighbour in 8 bits.
    rtol = 2**-3 if expected.dtype.itemsize == 1 else 1e-5
    atol = 1e-5 * abs(wide).max(initial=0)
    for index, data in shards:
        where = tuple(slice(*pair) for pair in index)
        seen[where] = True
        np.testing.assert_allclose(
            data.astype(np.float64), wide[where], rtol=rtol, atol=atol, err_msg=name
        )
    assert seen.all(), f"{name}: no process holds a part of it"


class ProcessesTest(parameterized.TestCase):
    def _check(self, count: int):
        results = _train(count)
        for name in training.OPTIMIZERS:
            expected = {
                path: np.asarray(leaf) for path, leaf in training.leaves(training.run(name))
            }
            for layout in training.LAYOUTS:
                with self.subTest(f"{name}, {layout}"):
                    if "8_bits" in name and jax.__version_info__ < (0, 10):
                        self.skipTest("sums differ more there, and 8 bits round to neighbours")
                    parts = [result[name, layout] for result in results]
                    for path, value in expected.items():
                        shards = [shard for part in parts for shard in part[path]]
                        self.assertLen(shards, count * _LOCAL_DEVICES)
                        _assert_shards_equal(value, shards, path)
                        if layout == "fsdp" and value.ndim and "scale" not in path:
                            sizes = {data.size for _, data in shards}
                            self.assertEqual(sizes, {value.size // len(shards)}, path)

    def test_two_processes_equal_one(self):
        self._check(2)

    @pytest.mark.slow
    def test_four_processes_equal_one(self):
        self._check(4)


_SLEEPER = (
    "import sys, time; from tests.support import processes; processes.exit_with_parent(60);"
    "print('asleep', flush=True); time.sleep(60)"
)


def _is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie, which a container may leave for good."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not pathlib.Path("/proc/self").exists()


class CleanUpTest(absltest.TestCase):
    def test_children_that_hang_are_killed_and_their_output_is_shown(self):
        with (
            self.assertRaisesRegex(AssertionError, r"not done after 0.1 s(.|\n)*asleep"),
            processes.started([["-c", _SLEEPER]] * 2) as children,
        ):
            while not all("asleep" in processes.output_of(output) for _, output in children):
                time.sleep(0.02)
            processes.wait(children, 0.1)
        self.assertEqual([child.returncode for child, _ in children], [-signal.SIGKILL] * 2)

    def test_one_that_fails_ends_the_wait_for_the_others(self):
        begin = time.monotonic()
        with (
            self.assertRaisesRegex(AssertionError, "exit code 3"),
            processes.started([["-c", _SLEEPER], ["-c", "raise SystemExit(3)"]]) as children,
        ):
            processes.wait(children, 60)
        self.assertLess(time.monotonic() - begin, 30)

    def test_children_end_with_a_parent_that_is_killed(self):
        parent = (
            "import os, time\nfrom tests.support import processes\n"
            f"with processes.started([['-c', {_SLEEPER!r}]]) as [(child, output)]:\n"
            "    while 'asleep' not in processes.output_of(output): time.sleep(0.02)\n"
            "    print(child.pid, flush=True)\n"
            "    time.sleep(60)\n"
        )
        root = pathlib.Path(__file__).parents[2]
        process = subprocess.Popen(
            [sys.executable, "-c", parent], stdout=subprocess.PIPE, cwd=root, text=True
        )
        with process:
            try:
                child = int(process.stdout.readline())
                self.assertTrue(_is_alive(child))
            finally:
                process.kill()
        deadline = time.monotonic() + 10
        while _is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertFalse(_is_alive(child))


if __name__ == "__main__":
    absltest.main()
