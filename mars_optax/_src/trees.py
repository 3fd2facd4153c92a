"""Mapping over several trees at once, where some are absent and several results come out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def rows(inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For each leaf of the first input a tuple with those of all inputs.

    Args:
      inputs: Trees of the structure of the first, or None for an absent one, whose leaves are None.
    """
    leaves = jax.tree.leaves(inputs[0])
    treedef: Any = jax.tree.structure(inputs[0])
    columns = [
        [None] * len(leaves) if tree is None else treedef.flatten_up_to(tree) for tree in inputs[1:]
    ]
    return list(zip(leaves, *columns, strict=True))


def unzip(results: Sequence[tuple[Any, ...]], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """From the results of each leaf to a tree for each of `outputs`, None for the absent ones.

    Args:
      results: For each leaf as many values as there are `outputs`.
      outputs: For each result the tree whose structure it takes, or None for an absent one.
    """
    columns = list(zip(*results, strict=True)) or [()] * len(outputs)
    # The output's own structure, not that of the first input: metadata in its nodes may differ.
    return tuple(
        None if tree is None else jax.tree.unflatten(jax.tree.structure(tree), column)
        for tree, column in zip(outputs, columns, strict=True)
    )


def map_unzip(
    fn: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Maps `fn` over the leaves of `inputs` and returns a tree for each of its results."""
    return unzip([fn(*row) for row in rows(inputs)], outputs)
