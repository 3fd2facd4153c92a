"""Mapping over several trees at once, where some are absent and several results come out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def map_unzip(
    fn: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Maps `fn` over the leaves of `inputs` and returns a tree for each of its results.

    Args:
      fn: A function of one leaf of each input, returning a tuple of as many values as there are
        `outputs`.
      inputs: Trees of the structure of the first, or None for an absent one, whose leaves are None.
      outputs: For each result the tree whose structure it takes, or None for an absent one.

    Returns:
      A tree for each of `outputs`, None for the absent ones.
    """
    leaves = jax.tree.leaves(inputs[0])
    treedef: Any = jax.tree.structure(inputs[0])
    columns = [
        [None] * len(leaves) if tree is None else treedef.flatten_up_to(tree) for tree in inputs[1:]
    ]
    rows = [fn(*row) for row in zip(leaves, *columns, strict=True)]
    results = list(zip(*rows, strict=True)) or [()] * len(outputs)
    # The output's own structure, not that of the first input: metadata in its nodes may differ.
    return tuple(
        None if tree is None else jax.tree.unflatten(jax.tree.structure(tree), result)
        for tree, result in zip(outputs, results, strict=True)
    )
