"""PyTorch's optimizers, timm's and pytorch_optimizer's, where they are installed, on our shapes."""

import importlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import gpt2_shapes
from benchmarks.steps import floors, timing

# The package of each.
_PACKAGES = {
    "torch_adamw_fused": "torch",
    "torch_adamw_foreach": "torch",
    "timm_mars": "timm",
    "pytorch_optimizer_soap": "pytorch_optimizer",
}
NAMES = tuple(_PACKAGES)


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
    for package in ("torch", _PACKAGES[name]):
        if not _installed(package):
            return f"{package} is not installed"
    if backend == "gpu":
        if not importlib.import_module("torch").cuda.is_available():
            return "torch has no CUDA device"
    elif backend != "cpu":
        return f"torch is not measured on the backend {backend!r}"
    return None


def versions() -> dict[str, str]:
    """Returns the versions of those that are installed."""
    return {
        name: importlib.metadata.version(name)
        for name in dict.fromkeys(_PACKAGES.values())
        if _installed(name)
    }


def _optimizer(name: str, tensors: Sequence[Any], is_matrix: Sequence[bool]) -> Any:
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    if name == "timm_mars":
        return importlib.import_module("timm.optim").Mars(tensors, **settings)
    if name == "pytorch_optimizer_soap":
        # Adam for what ours leaves to AdamW: no side of the others is short enough.
        pairs = list(zip(tensors, is_matrix, strict=True))
        matrices = {"params": [tensor for tensor, flag in pairs if flag]}
        others = {"params": [tensor for tensor, flag in pairs if not flag]}
        groups = [matrices, others | {"max_precondition_dim": 1}]
        return importlib.import_module("pytorch_optimizer").SOAP(groups, **settings)
    adamw = importlib.import_module("torch").optim.AdamW
    return adamw(tensors, **{name.removeprefix("torch_adamw_"): True}, **settings)


def step_bytes(name: str, params: Any) -> int:
    """Returns the bytes of a step as :func:`benchmarks.steps.floors.step_bytes` counts them.

    Args:
      name: one of `NAMES`. timm's Mars is counted as MARS-AdamW with a clip for leaves of rank >= 2
        and AdamW for the others, as it computes; SOAP as Adam, without its covariances and bases.
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
    numbers = gpt2_shapes.dimension_numbers(params, embeddings=False)
    is_matrix = jax.tree.leaves(jax.tree.map(lambda _, its: its is not None, params, numbers))
    optimizer = _optimizer(name, tensors, is_matrix)
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
