"""A small GPT in Flax NNX."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model; `width` is a multiple of `heads`."""

    vocabulary_size: int
    context: int
    width: int
    layers: int
    heads: int


# width, layers, heads
SIZES = {
    "tiny": (32, 1, 2),
    "small": (64, 3, 4),
    "medium": (256, 6, 8),
    "large": (512, 8, 8),
    "gpt2": (768, 12, 12),
}


def sized(size: str, *, vocabulary_size: int, context: int) -> GPTConfig:
    """Completes one of `SIZES` to a model's configuration."""
    width, layers, heads = SIZES[size]
    return GPTConfig(vocabulary_size, context, width, layers, heads)


def _linear(inputs: int, outputs: int, scale: float, rngs: nnx.Rngs) -> nnx.Linear:
    initializer = nnx.initializers.normal(scale)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=initializer, rngs=rngs)


class Block(nnx.Module):
    """Causal self-attention and a two-layer perceptron, each behind a norm, each added."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        scale = 0.02
        # 2 * layers branches are added up: their sum starts at the scale of one of them.
        residual_scale = scale / (2 * config.layers) ** 0.5
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.query = _linear(width, width, scale, rngs)
        self.key = _linear(width, width, scale, rngs)
        self.value = _linear(width, width, scale, rngs)
        self.project = _linear(width, width, residual_scale, rngs)
        self.mlp_norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.expand = _linear(width, 4 * width, scale, rngs)
        self.contract = _linear(4 * width, width, residual_scale, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations (batch, context, width) to the same shape."""
        y = self.attention_norm(x)
        query, key, value = (
            projection(y).reshape(*y.shape[:-1], self.heads, -1)
            for projection in (self.query, self.key, self.value)
        )
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.reshape(x.shape))
        return x + self.contract(nnx.gelu(self.expand(self.mlp_norm(x))))


class GPT(nnx.Module):
    """A decoder-only transformer with learned positions, without biases.

    Its matrices are the blocks' kernels, the two embeddings (`embed`, `position_embed`) and the
    output layer (`head`); its vectors are the norms' scales.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        initializer = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(
            config.vocabulary_size, config.width, embedding_init=initializer, rngs=rngs
        )
        self.position_embed = nnx.Embed(
            config.context, config.width, embedding_init=initializer, rngs=rngs
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, use_bias=False, rngs=rngs)
        self.head = _linear(config.width, config.vocabulary_size, 0.02, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps token ids (batch, length) to logits (batch, length, vocabulary)."""
        x = self.embed(tokens) + self.position_embed(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: GPT, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in nats.

    Args:
      model: the model.
      windows: token ids of shape (batch, context + 1).

    Returns:
      A scalar.
    """
    logits = model(windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return jnp.mean(losses)
