"""A GPT as plain functions, made for throughput: layers stacked, no array of all logits.

The same function as `models.GPT` with tied embeddings and without biases.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

Params: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model, and how it computes.

    Attributes:
      vocabulary_size: number of symbols.
      context: number of positions.
      width: size of the residual stream, a multiple of `heads`.
      layers: number of blocks.
      heads: attention heads of a block.
      dtype: that of activations and products. Parameters are float32.
      attention: the implementation that `jax.nn.dot_product_attention` takes.
      unroll: whether the layers are written out, which runs faster and compiles slower.
      remat: whether the backward pass computes each block's activations again.
      logits_chunk: tokens whose logits exist at a time; the greatest common divisor of this and
        the tokens of a pass is taken.
      logits_dtype: that of the logits between their product and their softmax, which is float32.
    """

    vocabulary_size: int
    context: int
    width: int
    layers: int
    heads: int
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["xla", "cudnn"] = "xla"
    unroll: bool = True
    remat: bool = False
    logits_chunk: int = 8192
    logits_dtype: Literal["bfloat16", "float32"] = "float32"

    def flops_per_token(self) -> int:
        """Returns the operations of a forward and backward pass.

        They are 6 for each parameter of a block, 6 for each of the output layer, and those of the
        full attention: 6 N + 6 V d + 12 L d T. What is computed twice does not count.
        """
        blocks = self.layers * (12 * self.width**2 + 2 * self.width)
        head = self.vocabulary_size * self.width
        return 6 * (blocks + head) + 12 * self.layers * self.width * self.context


def init(config: Config, key: jax.Array) -> Params:
    """Draws parameters as `models.GPT` has them, float32.

    Args:
      config: the model.
      key: of `jax.random`.

    Returns:
      `embed` (vocabulary, width), `position_embed` (context, width), `blocks`, whose leaves have
      the layer as their first axis, and `norm`.
    """
    width, layers = config.width, config.layers
    keys = iter(jax.random.split(key, 8))

    def normal(scale: float, *shape: int) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape, jnp.float32)

    # 2 * layers branches are added up: their sum starts at the scale of one of them.
    residual = 0.02 / math.sqrt(2 * layers)
    shapes = {
        "query": (0.02, width, width),
        "key": (0.02, width, width),
        "value": (0.02, width, width),
        "project": (residual, width, width),
        "expand": (0.02, width, 4 * width),
        "contract": (residual, 4 * width, width),
    }
    blocks: Params = {
        name: {"kernel": normal(scale, layers, *shape)} for name, (scale, *shape) in shapes.items()
    }
    for name in ("attention_norm", "mlp_norm"):
        blocks[name] = {"scale": jnp.ones((layers, width), jnp.float32)}
    return {
        "embed": normal(0.02, config.vocabulary_size, width),
        "position_embed": normal(0.02, config.context, width),
        "blocks": blocks,
        "norm": {"scale": jnp.ones(width, jnp.float32)},
    }


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def _block(config: Config, x: jax.Array, block: Params) -> jax.Array:
    """Maps activations (batch, context, width) to the same shape."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        kernel: jax.Array = block[name]["kernel"].astype(x.dtype)
        return x @ kernel

    y = _norm(x, block["attention_norm"]["scale"])
    query, key, value = (
        linear(name, y).reshape(*y.shape[:-1], config.heads, -1)
        for name in ("query", "key", "value")
    )
    attended = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=config.attention
    )
    x = x + linear("project", attended.reshape(x.shape))
    y = linear("expand", _norm(x, block["mlp_norm"]["scale"]))
    return x + linear("contract", jax.nn.gelu(y))


def hidden(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Maps token ids (batch, length) to what the output layer takes, (batch, length, width)."""
    # Taken in float32: the gradients of a frequent token are thousands of rows to be added up.
    x = params["embed"][tokens] + params["position_embed"][: tokens.shape[-1]]
    step: Callable[[jax.Array, Params], jax.Array] = functools.partial(_block, config)
    if config.remat:
        step = jax.checkpoint(step)
    x, _ = jax.lax.scan(
        lambda x, block: (step(x, block), None),
        x.astype(config.dtype),
        params["blocks"],
        unroll=config.layers if config.unroll else 1,
    )
    return _norm(x, params["norm"]["scale"])


def _chunked(x: jax.Array, targets: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    size = math.gcd(len(x), chunk)
    return x.reshape(-1, size, x.shape[-1]), targets.reshape(-1, size)


def _losses(
    x: jax.Array, embed: jax.Array, targets: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the logits of a chunk, the logarithm of their exponentials' sum, and the loss."""
    logits = jnp.dot(x, embed.T, preferred_element_type=dtype).astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    return logits, normalizer, jnp.sum(normalizer - chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(
    x: jax.Array, embed: jax.Array, targets: jax.Array, chunk: int, dtype: Any = jnp.float32
) -> jax.Array:
    """Mean cross-entropy of a softmax over `x @ embed.T`, in nats, a chunk of tokens at a time.

    Differentiated, each chunk's part of the gradients is computed while its logits are there: three
    products, not the four of a recomputation, and no array of all logits.

    Args:
      x: (tokens, width), in the dtype of the products.
      embed: (vocabulary, width).
      targets: (tokens,), integers.
      chunk: tokens of a chunk at most; see `Config.logits_chunk`.
      dtype: of the logits as their product leaves them.

    Returns:
      A float32 scalar.
    """
    cast = embed.astype(x.dtype)

    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _losses(part[0], cast, part[1], dtype)[2], None

    total: jax.Array = jax.lax.scan(add, jnp.float32(0), _chunked(x, targets, chunk))[0]
    return total / len(x)


def _cross_entropy_forward(
    x: jax.Array, embed: jax.Array, targets: jax.Array, chunk: int, dtype: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    cast = embed.astype(x.dtype)

    def add(carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]) -> Any:
        total, d_embed = carry
        rows, labels = part
        logits, normalizer, loss = _losses(rows, cast, labels, dtype)
        hit = labels[:, None] == jnp.arange(logits.shape[-1])
        d_logits = (jnp.exp(logits - normalizer[:, None]) - hit).astype(rows.dtype)
        d_embed += jnp.dot(d_logits.T, rows, preferred_element_type=jnp.float32)
        return (total + loss, d_embed), d_logits @ cast

    zeros = (jnp.float32(0), jnp.zeros(embed.shape, jnp.float32))
    (total, d_embed), d_x = jax.lax.scan(add, zeros, _chunked(x, targets, chunk))
    return total / len(x), (d_x.reshape(x.shape), d_embed)


def _cross_entropy_backward(
    chunk: int, dtype: Any, gradients: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    del chunk, dtype
    d_x, d_embed = gradients
    scale = cotangent / len(d_x)
    return (d_x * scale).astype(d_x.dtype), d_embed * scale, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def loss(config: Config, params: Params, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in nats.

    Args:
      config: the model.
      params: as `init` makes them.
      windows: token ids of shape (batch, at most context + 1).

    Returns:
      A scalar.
    """
    x = hidden(config, params, windows[:, :-1])
    return cross_entropy(
        x.reshape(-1, config.width),
        params["embed"],
        windows[:, 1:].reshape(-1),
        config.logits_chunk,
        jnp.dtype(config.logits_dtype),
    )
