"""Measures the time of calls that run on a device."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def wait(values: Any) -> None:
    """Waits until the arrays of a tree are there."""
    jax.block_until_ready(values)  # type: ignore[no-untyped-call, unused-ignore]


def milliseconds(run: Callable[[], Any]) -> float:
    """Returns the milliseconds of a call, and of what it left to the device."""
    began = time.perf_counter()
    wait(run())
    return 1000 * (time.perf_counter() - began)


def summary(times: Sequence[float]) -> dict[str, float]:
    """Returns median, smallest and largest of milliseconds."""
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
