"""Kernels under JAX's transformations, which go through the same function by XLA."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

Function = Callable[..., tuple[jax.Array, ...]]


def opaque(kernels: Function, xla: Function) -> Function:
    """`kernels`, batched and differentiated as `xla`, which computes the same."""

    @jax.custom_batching.custom_vmap
    def batched(*args: jax.Array) -> tuple[jax.Array, ...]:
        return kernels(*args)

    @batched.def_vmap
    def _batched(size: int, is_batched: Sequence[bool], *args: jax.Array) -> Any:
        axes = [0 if batched else None for batched in is_batched]
        outputs = jax.vmap(xla, axes, axis_size=size)(*args)
        return outputs, (True,) * len(outputs)

    run = jax.custom_jvp(batched)

    @run.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        return jax.jvp(xla, primals, tangents)

    result: Function = run
    return result
