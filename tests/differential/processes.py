"""Boundaries of processes and threads."""

import concurrent.futures
import functools
import pathlib
import pickle
import tempfile
from typing import Any

from tests.differential import subjects
from tests.differential.meshes import CALLS_BACK
from tests.differential.situation import Results, situation
from tests.differential.subjects import Subject, eagerly, train
from tests.support import processes

_LIMIT = 240  # seconds, for a machine that is busy; a worker takes about 20


@situation(slow=True)
def threads(subject: Subject):
    """Training in two threads at once, the optimizer made in this one."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda run: run(subject), (train, eagerly)))
    return Results(results, [subjects.plain(subject)] * 2)


def _train_elsewhere(*arguments: str, optimizers: Any = None, **environment: str) -> Any:
    """What a worker started with `python *arguments` makes of every subject."""
    with tempfile.TemporaryDirectory() as folder:
        out, pickled = pathlib.Path(folder, "out"), pathlib.Path(folder, "pickled")
        command = [*arguments, "-m", "tests.differential.worker", str(_LIMIT), str(out)]
        if optimizers is not None:
            pickled.write_bytes(pickle.dumps(optimizers))
            command.append(str(pickled))
        with processes.started([command], environment) as children:
            processes.wait(children, _LIMIT)
        return pickle.loads(out.read_bytes())


def _results(subject: Subject, results: Any) -> Results:
    assert "error" not in results[subject.name], results[subject.name]["error"]
    return Results(results[subject.name]["trained"], (subjects.plain(subject),) * 2)


@functools.cache
def _optimized() -> Any:
    return _train_elsewhere("-O", "-W", "error")


@situation(slow=True)
def python_optimized(subject: Subject):
    """`python -O -W error`: without assertions, with warnings as errors."""
    return _results(subject, _optimized())


@functools.cache
def _spawned() -> Any:
    import cloudpickle

    optimizers = {s.name: cloudpickle.dumps(s.tx) for s in subjects.OPTAX + subjects.OURS}
    return _train_elsewhere(optimizers=optimizers)


@situation(slow=True, needs=("cloudpickle",))
def spawned_with_the_optimizer(subject: Subject):
    """Another process gets the optimizer by cloudpickle."""
    return _results(subject, _spawned())


@functools.cache
def _cached() -> Any:
    with tempfile.TemporaryDirectory() as cache:
        settings = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_RAISE_PERSISTENT_CACHE_ERRORS": "1",
        }
        first = _train_elsewhere(**settings)
        # It was in use: the first optimizer compiled something.
        assert next(iter(first.values()))["compiled"] > 0
        return _train_elsewhere(**settings)


@situation(slow=True, reasons=CALLS_BACK)
def compilation_cache(subject: Subject):
    """JAX's persistent cache: a second process finds every program, those on a mesh included."""
    results = _cached()
    assert results[subject.name].get("compiled", 0) == 0, results[subject.name]
    return _results(subject, results)
