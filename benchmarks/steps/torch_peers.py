"""PyTorch's optimizers and timm's, where they are installed, on the same shapes."""

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from benchmarks.steps import floors, timing

NAMES = ("torch_adamw_fused", "torch_adamw_foreach", "timm_mars")


class _State(NamedTuple):
    """What an optimizer keeps, abstract, to count bytes by."""

    prev_grad: Any
    mu: Any
    nu: Any


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def installed() -> bool:
    """Returns whether PyTorch is there."""
    return _installed("torch")


def absent(name: str, backend: str) -> str | None:
    """Says why a row cannot be measured here, or returns None.

    Args:
      name: one of `NAMES`.
      backend: JAX's default backend: PyTorch has to see the same kind of device.
    """
    package = "timm" if name.startswith("timm") else "torch"
    if not _installed("torch") or not _installed(package):
        return f"{package if _installed('torch') else 'torch'} is not installed"
    if backend == "gpu":
        if not importlib.import_module("torch").cuda.is_available():
            return "torch has no CUDA device"
    elif backend != "cpu":
        return f"torch is not measured on the backend {backend!r}"
    return None


def versions() -> dict[str, str]:
    """Returns the versions of those that are installed."""
    return {
        name: str(importlib.import_module(name).__version__)
        for name in ("torch", "timm")
        if _installed(name)
    }


def _optimizer(name: str, tensors: list[Any]) -> Any:
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    if name == "timm_mars":
        return importlib.import_module("timm.optim").Mars(tensors, **settings)
    adamw = importlib.import_module("torch").optim.AdamW
    return adamw(tensors, **{name.removeprefix("torch_adamw_"): True}, **settings)


def step_bytes(name: str, params: Any) -> int:
    """Returns the bytes of a step as :func:`benchmarks.steps.floors.step_bytes` counts them.

    Args:
      name: one of `NAMES`. timm's Mars is counted as MARS-AdamW with a clip for leaves of rank >= 2
        and AdamW for the others, as it computes.
      params: tree of parameters, concrete or abstract.
    """
    mars = name == "timm_mars"
    previous = jax.tree.map(lambda leaf: leaf if leaf.ndim >= 2 else None, params) if mars else None
    return floors.step_bytes(params, _State(previous, params, params), clipped=mars)


def _timer(torch: Any, device: str) -> Callable[[Callable[[], None], int], float]:
    """Returns a function that calls another so many times and returns milliseconds in all."""

    def on_device(run: Callable[[], None], times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    def on_host(run: Callable[[], None], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            run()
        return 1000 * (time.perf_counter() - began)

    return on_device if device == "cuda" else on_host


def measure(
    name: str, params: Any, grads: Any, *, backend: str, steps: int, repeats: int
) -> dict[str, Any]:
    """Times the steps of an optimizer of PyTorch, eagerly, with fixed gradients.

    Args:
      name: one of `NAMES`.
      params: tree of parameters, NumPy arrays.
      grads: tree of gradients, NumPy arrays.
      backend: JAX's default backend, "gpu" or "cpu".
      steps: number of steps between two events.
      repeats: number of such measurements.

    Returns:
      The figures, as those of :func:`benchmarks.steps.step_loop.measure` that PyTorch has.
    """
    torch = importlib.import_module("torch")
    device = "cuda" if backend == "gpu" else "cpu"
    tensors = []
    for param, grad in zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True):
        tensor = torch.nn.Parameter(torch.tensor(param, device=device))
        tensor.grad = torch.tensor(grad, device=device)
        tensors.append(tensor)
    optimizer = _optimizer(name, tensors)
    timed = _timer(torch, device)
    # The first steps make the state, and the caching allocator's blocks.
    timed(optimizer.step, 3)
    times = [timed(optimizer.step, steps) / steps for _ in range(repeats)]
    finite = all(bool(torch.isfinite(tensor.sum())) for tensor in tensors)
    del optimizer, tensors
    if device == "cuda":
        # JAX shares the memory.
        torch.cuda.empty_cache()
    if not finite:
        raise FloatingPointError(
            f"Expected finite parameters after the timed steps of {name}, got others. A step on "
            "such numbers may cost something else."
        )
    return timing.summary(times)
