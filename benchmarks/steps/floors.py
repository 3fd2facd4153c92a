"""What a step has to move and to multiply at least."""

from typing import Any

import jax
import optax.contrib

MuonDimensionNumbers = optax.contrib.MuonDimensionNumbers


def previous_gradients(state: Any, params: Any) -> list[int | None]:
    """Finds the previous gradients that a state keeps.

    Args:
      state: an optimizer's state, concrete or abstract, in whatever wrappers.
      params: the parameters that it was made for.

    Returns:
      For every leaf of the state, the index among the parameters' leaves of the parameter that it
      is the previous gradient of, or None where it is something else.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    index = {path: position for position, (path, _) in enumerate(paths)}

    def find(path: Any) -> int | None:
        for position, key in enumerate(path):
            if getattr(key, "name", None) == "prev_grad":
                return index.get(path[position + 1 :])
        return None

    return [find(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]


def kept_by_reference(state: Any, params: Any) -> list[int | None]:
    """Finds the previous gradients whose buffer can be the gradient's own.

    Those of :func:`previous_gradients` in the parameter's dtype, which is the gradient's. Others,
    in bfloat16 or 8 bits, are written in every step.
    """
    leaves = jax.tree.leaves(state)
    by_index = jax.tree.leaves(params)
    return [
        found if found is not None and leaf.dtype == by_index[found].dtype else None
        for leaf, found in zip(leaves, previous_gradients(state, params), strict=True)
    ]


def _bytes(array: Any) -> int:
    return int(array.size) * int(array.dtype.itemsize)


def step_bytes(params: Any, state: Any, *, clipped: bool, donated: bool = False) -> int:
    r"""Returns the bytes that a step moves if each buffer is read and written once.

    Read once: the gradient, the parameters, the state. Written once: the parameters, the state,
    but for a previous gradient in the gradient's own dtype, which need not be written: the buffer
    of this step's gradient becomes the next step's previous gradient. Where the state is donated,
    the gradient is written into the buffer of the one before. The norm of a clip has to be known
    before anything can be written: the gradient and the previous gradient are read twice. So per
    parameter, in float32, and with a donated state:

    ==========================================  ====================================  ==  =======
    step                                        read and written                      B   donated
    ==========================================  ====================================  ==  =======
    AdamW                                       g, 2 (p, mu, nu)                      28  28
    MARS without clip                           g, prev, 2 (p, mu, nu)                32  36
    MARS                                        2 (g, prev), 2 (p, mu, nu)            40  44
    MARS, previous gradient in bfloat16         2 g, 3 prev, 2 (p, mu, nu)            38  38
    MARS without the previous gradient          g, 2 (p, mu, nu)                      28  28
    Lion                                        g, 2 (p, mu)                          20  20
    MARS-Lion without clip                      g, prev, 2 (p, mu)                    24  28
    MARS-Lion                                   2 (g, prev), 2 (p, mu)                32  36
    ==========================================  ====================================  ==  =======

    Leaves under a vector rule are counted by their own state. Of Newton-Schulz only the operations
    are counted, by :func:`newton_schulz_flops`, not the matrices that go in and out. What a state
    has beside its trees over the parameters, such as the step count, is not counted.

    Args:
      params: tree of parameters, concrete or abstract; gradients have the same dtypes.
      state: the optimizer's state for them, concrete or abstract.
      clipped: whether leaves with a previous gradient are clipped by the norm of their corrected
        gradient.
      donated: whether a step writes the previous gradient into the donated buffer of the one
        before.

    Returns:
      The number of bytes.
    """
    by_index = jax.tree.leaves(params)
    total = sum(3 * _bytes(param) for param in by_index)
    found = previous_gradients(state, params)
    referenced = kept_by_reference(state, params)
    paths = {path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    lengths = {len(path) for path in paths}
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    for (path, leaf), index, in_place in zip(leaves, found, referenced, strict=True):
        if not any(path[len(path) - length :] in paths for length in lengths):
            continue
        total += _bytes(leaf) * (2 if donated or in_place is None else 1)
        if clipped and index is not None:
            total += _bytes(leaf) + _bytes(by_index[index])
    return total


def newton_schulz_flops(params: Any, axes: Any, steps: int = 5) -> int:
    r"""Returns the operations of Newton-Schulz as usually written.

    A step on a matrix with short side :math:`m` and long side :math:`n` makes
    :math:`A = X X^T`, :math:`A^2` and :math:`B X`: :math:`4 m^2 n + 2 m^3` operations. Forms that
    need fewer are credited with these.

    Args:
      params: tree of parameters, concrete or abstract.
      axes: tree of :class:`optax.contrib.MuonDimensionNumbers` with one reduction and one output
        axis, None for leaves without Newton-Schulz; slices along other axes are matrices each.
      steps: number of steps.

    Returns:
      The number of multiplications and additions.
    """

    def of_leaf(numbers: Any, leaf: Any) -> int:
        if numbers is None:
            return 0
        short, long = sorted((leaf.shape[numbers.reduction_axis], leaf.shape[numbers.output_axis]))
        batch = leaf.size // (short * long)
        return int(batch * steps * (4 * short**2 * long + 2 * short**3))

    counts = jax.tree.map(
        of_leaf, axes, params, is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers)
    )
    return sum(jax.tree.leaves(counts))
