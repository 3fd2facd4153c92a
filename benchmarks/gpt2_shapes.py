"""The parameters of GPT-2 by shape, and which of them are matrices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
import optax.contrib


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT-2: a tied output layer, biases everywhere."""

    width: int
    layers: int
    heads: int
    vocabulary_size: int = 50257
    context: int = 1024


# Radford et al., Language Models are Unsupervised Multitask Learners, 2019, table 2, with the
# context and the vocabulary of the released weights. "tiny" and "mini" are ours, for a processor.
MODELS = {
    "tiny": Sizes(64, 2, 2, vocabulary_size=512, context=64),
    "mini": Sizes(64, 3, 4, vocabulary_size=512, context=64),
    "small": Sizes(768, 12, 12),
    "medium": Sizes(1024, 24, 16),
    "large": Sizes(1280, 36, 20),
    "xl": Sizes(1600, 48, 25),
}
LAYOUTS = ("flat", "stacked")


def shapes(model: str, layout: str) -> dict[str, Any]:
    """Returns the tree of a model's parameters, abstract float32 arrays.

    Args:
      model: one of `MODELS`.
      layout: "flat", a leaf for each parameter of each layer, or "stacked", one leaf for all
        layers with the layer as its first axis, as models that scan over layers have it.

    Returns:
      A nested dictionary: 4 + 12 leaves for each layer, or 16.
    """
    sizes = MODELS[model]
    width = sizes.width

    def array(*shape: int) -> Any:
        return jax.eval_shape(lambda: jnp.zeros(shape, jnp.float32))

    def norm(*leading: int) -> dict[str, Any]:
        return {"scale": array(*leading, width), "bias": array(*leading, width)}

    def linear(inputs: int, outputs: int, *leading: int) -> dict[str, Any]:
        return {"kernel": array(*leading, inputs, outputs), "bias": array(*leading, outputs)}

    def block(*leading: int) -> dict[str, Any]:
        return {
            "attention_norm": norm(*leading),
            "query_key_value": linear(width, 3 * width, *leading),
            "project": linear(width, width, *leading),
            "mlp_norm": norm(*leading),
            "expand": linear(width, 4 * width, *leading),
            "contract": linear(4 * width, width, *leading),
        }

    if layout not in LAYOUTS:
        raise ValueError(f"Expected `layout` to be one of {LAYOUTS}, got {layout!r}.")
    stacked = layout == "stacked"
    return {
        "embed": array(sizes.vocabulary_size, width),
        "position_embed": array(sizes.context, width),
        "blocks": block(sizes.layers)
        if stacked
        else {f"{layer:02}": block() for layer in range(sizes.layers)},
        "norm": norm(),
    }


def dimension_numbers(params: Any, *, embeddings: bool) -> Any:
    """Declares the matrices: the last two axes of kernels, and of embeddings where asked for.

    Args:
      params: a tree of :func:`shapes`, or the state of a :class:`benchmarks.models.GPT`.
      embeddings: whether the two embeddings are matrices. They are for the elementwise rules,
        whose clip is each matrix's own; Newton-Schulz leaves them to the vectors' rule.

    Returns:
      A tree of :class:`optax.contrib.MuonDimensionNumbers`, with None for vectors.
    """

    def of_leaf(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        names = {getattr(key, "key", None) for key in path}
        is_embedding = bool(names & {"embed", "position_embed"})
        if "kernel" in names or (embeddings and is_embedding):
            return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)
        return None

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def parameters(tree: Any) -> int:
    """Counts the parameters of a tree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def normal(tree: Any, scale: float, seed: int) -> Any:
    """Fills a tree with normal numbers, as NumPy arrays.

    They repeat after a while: a billion different ones would take a minute, and only their
    spread matters to the hardware.
    """
    rng = np.random.default_rng(seed)
    pool = rng.normal(scale=scale, size=2**20).astype(np.float32)

    def fill(leaf: Any) -> npt.NDArray[np.float32]:
        return np.resize(np.roll(pool, int(rng.integers(pool.size))), leaf.shape)

    return jax.tree.map(fill, tree)


def operands(tree: Any) -> dict[str, Any]:
    """Returns what a step takes, as :func:`normal` makes it: "params", "grads", "prev_grads"."""
    scales = {"params": 0.02, "grads": 0.01, "prev_grads": 0.01}
    return {name: normal(tree, scale, seed) for seed, (name, scale) in enumerate(scales.items())}
