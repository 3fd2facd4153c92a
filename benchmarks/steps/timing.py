"""How steps are timed: the flags, the clock, and what the device does at most."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command, gpt2_shapes


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


def add_flags(parser: command.Flags, *, model: bool = True) -> None:
    """Adds the flags of the commands that time steps."""
    group = parser.add_argument_group("measurement")
    if model:
        group.add_argument(
            "--model",
            type=command.subset(list(gpt2_shapes.MODELS)),
            help=f"some of {','.join(gpt2_shapes.MODELS)}; by default tiny on a processor, else "
            "small",
        )
        group.add_argument(
            "--optimizers",
            type=command.listed,
            help="names or patterns such as mars*; by default all",
        )
    group.add_argument(
        "--repeats", type=command.positive, default=5, help="measurements of each row"
    )
    group.add_argument(
        "--steps",
        type=command.whole(2),
        help="steps of a measurement; by default fewer for large models",
    )
    command.add_output(parser)


def _best_seconds(run: Callable[[], Any], repeats: int) -> float:
    wait(run())
    return min(milliseconds(run) for _ in range(repeats)) / 1000


def copy_bandwidth(size: int, *, steps: int = 50, repeats: int = 5) -> float:
    """Measures the bytes per second of passes that read and write an array.

    Args:
      size: bytes of the array; several times the caches.
      steps: passes in a call.
      repeats: calls; the fastest counts, as this is a ceiling.

    Returns:
      The larger of two: a pass in place inside a compiled loop, and copies to a new buffer.
    """
    x = jnp.ones(size // 4, jnp.float32)
    # The factor is an operand: the compiler must not know what many passes come to.
    in_place = jax.jit(
        lambda x, factor: jax.lax.fori_loop(0, steps, lambda _, x: x * factor, x), donate_argnums=0
    )
    factor = jnp.float32(-1.0)
    values = [x]

    def passes() -> jax.Array:
        values[0] = in_place(values[0], factor)
        return values[0]

    def copies() -> list[jax.Array]:
        return [jnp.array(values[0], copy=True) for _ in range(8)]

    return max(
        2 * size * steps / _best_seconds(passes, repeats),
        2 * size * 8 / _best_seconds(copies, repeats),
    )


def matmul_flops(edge: int, *, steps: int = 20, repeats: int = 5) -> float:
    """Measures operations per second of products of square matrices in bfloat16.

    Args:
      edge: rows and columns.
      steps: products in a call, each of the last result and a fixed factor.
      repeats: calls; the fastest counts, as this is a ceiling.

    Returns:
      Multiplications and additions per second.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(edge, edge)), jnp.bfloat16)
    # Of this scale, the factor keeps the size of the numbers.
    factor = jnp.asarray(rng.normal(scale=edge**-0.5, size=(edge, edge)), jnp.bfloat16)
    loop = jax.jit(lambda x, y: jax.lax.fori_loop(0, steps, lambda _, x: x @ y, x))
    return 2 * edge**3 * steps / _best_seconds(lambda: loop(x, factor), repeats)


def ceilings() -> dict[str, float | int]:
    """Measures both, at sizes for the device: a GiB and 8192, or small ones on a processor."""
    on_cpu = jax.default_backend() == "cpu"
    size, edge = (2**27, 512) if on_cpu else (2**30, 8192)
    return {
        "copy_bytes_per_second": copy_bandwidth(size, steps=10 if on_cpu else 50),
        "copy_size_bytes": size,
        "bfloat16_matmul_flop_per_second": matmul_flops(edge, steps=4 if on_cpu else 20),
        "matmul_edge": edge,
    }
