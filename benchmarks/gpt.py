"""A small GPT in Flax NNX."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model, and how it computes.

    Attributes:
      vocabulary_size: number of symbols.
      context: number of positions.
      width: size of the residual stream, a multiple of `heads`.
      layers: number of blocks.
      heads: attention heads of a block.
      biases: whether linear layers and norms have biases, as in GPT-2.
      tied: whether the embedding is the output layer too, as in GPT-2.
      dtype: that of activations and products; None is float32. Parameters are float32.
      attention: the implementation that `jax.nn.dot_product_attention` takes.
      remat: whether the backward pass computes each block's activations again.
      causal: whether a position sees those before it only; not so in an image.
    """

    vocabulary_size: int
    context: int
    width: int
    layers: int
    heads: int
    biases: bool = False
    tied: bool = False
    dtype: Literal["bfloat16", "float32"] | None = None
    attention: Literal["xla", "cudnn"] | None = None
    remat: bool = False
    causal: bool = True


def _linear(
    config: GPTConfig, inputs: int, outputs: int, scale: float, rngs: nnx.Rngs
) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=config.biases,
        dtype=config.dtype,
        kernel_init=nnx.initializers.normal(scale),
        rngs=rngs,
    )


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.width, use_bias=config.biases, dtype=config.dtype, rngs=rngs)


def _embedding(config: GPTConfig, symbols: int, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(
        symbols,
        config.width,
        dtype=config.dtype,
        embedding_init=nnx.initializers.normal(0.02),
        rngs=rngs,
    )


class Block(nnx.Module):
    """Self-attention and a two-layer perceptron, each behind a norm, each added."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        scale = 0.02
        # 2 * layers branches are added up: their sum starts at the scale of one of them.
        residual_scale = scale / (2 * config.layers) ** 0.5
        self.heads = config.heads
        self.attention = config.attention
        self.causal = config.causal
        self.attention_norm = _norm(config, rngs)
        self.query = _linear(config, width, width, scale, rngs)
        self.key = _linear(config, width, width, scale, rngs)
        self.value = _linear(config, width, width, scale, rngs)
        self.project = _linear(config, width, width, residual_scale, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.expand = _linear(config, width, 4 * width, scale, rngs)
        self.contract = _linear(config, 4 * width, width, residual_scale, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations (batch, context, width) to the same shape."""
        y = self.attention_norm(x)
        query, key, value = (
            projection(y).reshape(*y.shape[:-1], self.heads, -1)
            for projection in (self.query, self.key, self.value)
        )
        attended = jax.nn.dot_product_attention(
            query, key, value, is_causal=self.causal, implementation=self.attention
        )
        x = x + self.project(attended.reshape(x.shape))
        return x + self.contract(nnx.gelu(self.expand(self.mlp_norm(x))))


class GPT(nnx.Module):
    """A decoder-only transformer with learned positions.

    Its matrices are the blocks' kernels, the two embeddings (`embed`, `position_embed`) and, unless
    it is tied, the output layer (`head`); its vectors are the norms' scales, and biases if any.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.remat = config.remat
        self.embed = _embedding(config, config.vocabulary_size, rngs)
        self.position_embed = _embedding(config, config.context, rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = _norm(config, rngs)
        self.head = (
            None
            if config.tied
            else _linear(config, config.width, config.vocabulary_size, 0.02, rngs)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps token ids (batch, length) to logits (batch, length, vocabulary)."""
        apply = nnx.remat(Block.__call__) if self.remat else Block.__call__
        x = self.embed(tokens) + self.position_embed(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = apply(block, x)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


def loss(model: GPT, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in nats.

    Args:
      model: the model.
      windows: token ids of shape (batch, context + 1).

    Returns:
      A scalar.
    """
    logits = model(windows[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return jnp.mean(losses)
