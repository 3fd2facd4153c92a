"""Times an optimizer's step, inside one compiled loop or called from Python."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.steps import floors, timing
from tests.support import hlo

PROGRAMS = ("loop", "step")

# (gradients, state, parameters) -> (parameters, state)
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Carry:
    """Takes a state apart into what the loop carries and what stays outside of it.

    Attributes:
      treedef: the state's structure.
      references: :func:`floors.kept_by_reference` of the state.
    """

    treedef: Any
    references: list[int | None]

    @classmethod
    def of(cls, state: Any, params: Any) -> "Carry":
        """Makes one for a state, concrete or abstract, and its parameters."""
        return cls(jax.tree.structure(state), floors.kept_by_reference(state, params))

    def carried(self, state: Any) -> list[Any]:
        """Returns the leaves that the loop carries."""
        leaves = self.treedef.flatten_up_to(state)
        return [leaf for leaf, found in zip(leaves, self.references, strict=True) if found is None]

    def outside(self, grads: Any) -> list[Any]:
        """Picks, from a tree of gradients, those that are previous gradients kept by reference."""
        leaves = jax.tree.leaves(grads)
        return [leaves[found] for found in self.references if found is not None]

    def whole(self, carried: list[Any], outside: list[Any]) -> Any:
        """Puts a state together."""
        ours, theirs = iter(carried), iter(outside)
        return self.treedef.unflatten(
            [next(ours if found is None else theirs) for found in self.references]
        )


def build_step(step: Step, carry: Carry) -> Callable[..., Any]:
    """Builds one step whose previous gradients come from outside of what it returns.

    As in :func:`build_loop`, so that no gradient is copied into a stored previous one.

    Args:
      step: the step to time.
      carry: how to take its state apart.

    Returns:
      The step: it maps parameters, carried leaves of the state, gradients, and those outside of the
      carry to parameters and carried leaves.
    """

    def one(params: Any, carried: list[Any], grads: Any, outside: list[Any]) -> Any:
        params, state = step(grads, carry.whole(carried, outside), params)
        return params, carry.carried(state)

    return one


def build_loop(step: Step, carry: Carry, steps: int) -> Callable[..., Any]:
    """Builds a loop of steps that costs what the steps cost, and nothing else.

    Gradients and previous gradients are two trees that stay the same. Two traps are in that:

    * In a carry, a loop's invariant has to be copied: the gradient into the stored previous one,
      8 B per parameter. No step has to pay that: the gradient's buffer can become the previous one;
      where the state is donated, the pass that reads both can write the gradient into the donated
      buffer, 4 B, see :func:`compile_step`. So the previous gradients that are kept by reference
      stay outside of the carry: they are put into the state before a step, and dropped after.
    * What depends on the two gradients alone, as the norm of a clip does, would be computed once
      before the loop. So the gradients pass a barrier together with the carry.

    One step an iteration: within an iteration the compiler could make one pass of two steps.

    Args:
      step: the step to time.
      carry: how to take its state apart.
      steps: number of iterations, at least 2 (the compiler unrolls a loop of one).

    Returns:
      The loop: it maps parameters, carried leaves of the state, gradients, and those outside of
      the carry to parameters and carried leaves.
    """
    one = build_step(step, carry)

    def loop(params: Any, carried: list[Any], grads: Any, outside: list[Any]) -> Any:
        def body(_: Any, values: Any) -> Any:
            (params, carried), grads_, outside_ = _barrier((values, grads, outside))
            return one(params, carried, grads_, outside_)

        return jax.lax.fori_loop(0, steps, body, (params, carried))

    return loop


# Names for parts of a buffer, and the ends of what began elsewhere: nothing runs on the device.
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "opt-barrier",
        "add-dependency",
        "partition-id",
        "replica-id",
        "copy-done",
        "async-done",
        "async-update",
    }
)


@dataclasses.dataclass(frozen=True)
class LoopReport:
    """What one iteration of a loop does.

    Attributes:
      kernels: launches: fusions, calls of libraries and kernels, copies, operations on their own.
        Those of an inner loop count as often as it runs.
      copied_bytes: result bytes of the copies among them.
      carried: number of arrays that the loop carries, its counter and its invariants included.
      iterations: how often the loop runs, None where the compiler does not say.
    """

    kernels: int
    copied_bytes: int
    carried: int
    iterations: int | None


def _launched(
    computations: dict[str, list[hlo.Instruction]], name: str, times: int = 1
) -> Iterator[tuple[hlo.Instruction, int]]:
    """Yields what runs on the device, and how often, inner loops and calls included."""
    for instruction in computations[name]:
        if instruction.opcode == "while":
            body = instruction.called("body")
            assert body is not None
            yield from _launched(computations, body, times * (instruction.trip_count or 1))
        elif instruction.opcode == "call" and (target := instruction.called("to_apply")):
            yield from _launched(computations, target, times)
        elif instruction.opcode not in _FREE:
            yield instruction, times


def _copied(computations: dict[str, list[hlo.Instruction]], instruction: hlo.Instruction) -> int:
    """Returns the bytes that an instruction copies, itself or as a fusion of nothing else."""
    if instruction.opcode == "copy":
        return sum(instruction.arrays)
    if instruction.opcode == "copy-start":
        return instruction.arrays[0]
    if instruction.opcode == "fusion" and (target := instruction.called("calls")):
        inside = [inner for inner in computations[target] if inner.opcode not in _FREE]
        if inside and all(inner.opcode == "copy" for inner in inside):
            return sum(sum(inner.arrays) for inner in inside)
    return 0


def _launches(computations: dict[str, list[hlo.Instruction]], name: str) -> dict[str, int]:
    """Counts the kernels of a computation and the bytes that they copy."""
    launched = list(_launched(computations, name))
    return {
        "kernels": sum(times for _, times in launched),
        "copied_bytes": sum(times * _copied(computations, one) for one, times in launched),
    }


def loop_report(text: str) -> LoopReport:
    """Reads what one iteration of the largest loop outside all others does.

    Args:
      text: optimized HLO with a loop.

    Returns:
      The report.

    Raises:
      ValueError: If there is no loop.
    """
    computations, entry = hlo.parse(text)

    def outer_loops(name: str) -> Iterator[hlo.Instruction]:
        for instruction in computations[name]:
            if instruction.opcode == "while":
                yield instruction
            elif instruction.opcode == "call" and (target := instruction.called("to_apply")):
                yield from outer_loops(target)

    loops = list(outer_loops(entry))
    if not loops:
        raise ValueError("Expected HLO with a loop, got none. Run more than one step in it.")
    loop = max(loops, key=lambda instruction: len(instruction.arrays))
    body = loop.called("body")
    assert body is not None
    return LoopReport(
        **_launches(computations, body), carried=len(loop.arrays), iterations=loop.trip_count
    )


def _barrier(values: Any) -> Any:
    return jax.lax.optimization_barrier(values)  # type: ignore[no-untyped-call, unused-ignore]


def _abstract(tree: Any) -> Any:
    return jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree))


def _compile(
    function: Callable[..., Any], *operands: Any
) -> tuple[jax.stages.Compiled, str, dict[str, Any]]:
    """Compiles a function that its first two operands are donated to.

    Returns:
      The compiled function, its HLO, and what compiling took.
    """
    began = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=(0, 1)).lower(*operands)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    text = compiled.as_text()
    assert text is not None
    memory = compiled.memory_analysis()
    figures = {
        "trace_seconds": traced - began,
        "compile_seconds": done - traced,
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
    }
    return compiled, text, figures


def compile_loop(
    step: Step, params: Any, state: Any, steps: int
) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """Compiles a loop of steps, and reads what became of it.

    Args:
      step: the step.
      params: the parameters, concrete or abstract; their buffers and the state's are donated.
      state: the optimizer's state, likewise.
      steps: number of iterations.

    Returns:
      The compiled loop, and the figures: seconds of tracing with lowering and of compiling, bytes
      of temporary memory (None where the backend does not say), kernels of a step, bytes that it
      copies, and the number of arrays that are computed before the loop instead of in it.
    """
    carry = Carry.of(state, params)
    params, carried = _abstract(params), carry.carried(_abstract(state))
    outside = carry.outside(params)
    loop = build_loop(step, carry, steps)
    compiled, text, figures = _compile(loop, params, carried, params, outside)
    report = loop_report(text)
    # A compiler may unroll the loop: its iterations are then fewer than the steps.
    share = (report.iterations or steps) / steps
    arguments = 2 * len(jax.tree.leaves(params)) + len(carried) + len(outside)
    figures |= {
        "kernels": round(report.kernels * share),
        "copied_bytes": round(report.copied_bytes * share),
        # The loop's counter is one more.
        "hoisted_arrays": max(0, report.carried - 1 - arguments),
    }
    return compiled, figures


def compile_step(step: Step, params: Any, state: Any) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """Compiles a step as a training loop in Python calls it, and reads what became of it.

    Its arguments are laid out in row-major order, while a loop may carry arrays transposed. Its
    results have the order of the donated arguments: JAX gives a result the first donated buffer of
    its shape that is left, and in another order the compiler would have to copy.

    Args:
      step: the step.
      params: the parameters, concrete or abstract; their buffers and the state's are donated.
      state: the optimizer's state, likewise.

    Returns:
      The compiled step, of parameters, state and gradients, and the figures of
      :func:`compile_loop`, but for the arrays before the loop.
    """

    def one(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        return step(grads, state, params)

    params, state = _abstract(params), _abstract(state)
    compiled, text, figures = _compile(one, params, state, params)
    return compiled, figures | _launches(*hlo.parse(text))


def require_finite(params: Any) -> None:
    """Raises a `FloatingPointError` where parameters have left the numbers: no step is like that.

    Args:
      params: the parameters after the timing.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not bool(jnp.isfinite(jnp.sum(leaf))):
            raise FloatingPointError(
                f"Expected finite parameters after the timed steps, got others in "
                f"{jax.tree_util.keystr(path)}. A step on such numbers may cost something else."
            )


def measure(
    step: Step,
    params: Any,
    init: Callable[[Any], Any],
    grads: Any,
    prev_grads: Any,
    *,
    steps: int,
    repeats: int,
    program: str = "loop",
) -> dict[str, Any]:
    """Times a step, see :func:`build_loop`, :func:`compile_loop` and :func:`compile_step`.

    Args:
      step: the step.
      params: the parameters; their buffers are given up.
      init: makes the optimizer's state for them.
      grads: the gradients of every step.
      prev_grads: the previous gradients of every step. A step that is called from Python keeps its
        own: it gets these as gradients in every other step.
      steps: number of steps in a measurement.
      repeats: number of measurements.
      program: out of `PROGRAMS`: one call of a loop, or a call for each step.

    Returns:
      The figures.
    """
    state = init(params)
    if program == "loop":
        compiled, figures = compile_loop(step, params, state, steps)
        carry = Carry.of(state, params)
        calls: list[tuple[Any, ...]] = [(grads, carry.outside(prev_grads))]
        # The state's own previous gradients are not used: their memory is free.
        state = carry.carried(state)
    else:
        compiled, figures = compile_step(step, params, state)
        calls = [((grads, prev_grads)[number % 2],) for number in range(steps)]
    values = [params, state]
    del params, state

    def run() -> list[Any]:
        for operands in calls:
            values[:] = compiled(*values, *operands)
        return values

    timing.wait(run())
    figures |= timing.summary([timing.milliseconds(run) / steps for _ in range(repeats)])
    require_finite(values[0])
    return figures
