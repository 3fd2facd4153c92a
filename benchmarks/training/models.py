"""The models in Flax NNX: a GPT; a residual network and a vision transformer for small images."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from absl import logging
from flax import nnx

_EVALUATION_BATCH = 64


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


@functools.partial(jax.jit, static_argnums=0)
def evaluate(graph: nnx.GraphDef[GPT], params: Any, windows: jax.Array) -> jax.Array:
    """Averages the loss over windows (any number, context + 1), a batch at a time."""
    model = nnx.merge(graph, params)
    losses = jax.lax.map(
        lambda window: loss(model, window[None]), windows, batch_size=_EVALUATION_BATCH
    )
    return jnp.mean(losses)


def value_and_gradient(graph: Any, params: Any, windows: jax.Array) -> tuple[jax.Array, Any]:
    """Averages loss and gradients over microbatches.

    Args:
      graph: a model without its parameters.
      params: the parameters.
      windows: token ids (microbatches, windows, context + 1).
    """

    def of_one(windows: jax.Array) -> tuple[jax.Array, Any]:
        return jax.value_and_grad(lambda p: loss(nnx.merge(graph, p), windows))(params)

    if len(windows) == 1:
        return of_one(windows[0])

    def add(total: Any, one: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of_one(one)), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zeros, windows)
    value, grads = jax.tree.map(lambda x: x / len(windows), total)
    return value, grads


@dataclasses.dataclass(frozen=True)
class Work:
    """What a training step processes.

    Attributes:
      config: the model.
      batch: windows of a step.
      microbatch: windows of a forward and backward pass; gradients of several are averaged.
    """

    config: GPTConfig
    batch: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.microbatch < 1 or self.batch % self.microbatch:
            raise ValueError(
                f"Expected a batch that is a multiple of the microbatch, got {self.batch} and "
                f"{self.microbatch}. Change the batch or --microbatch."
            )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.config.context

    def model_flops(self, parameters: int) -> int:
        """Returns a step's operations, 6 a parameter and token and those of the full attention.

        The estimate of Chowdhery et al., PaLM, 2022, appendix B: what remat computes again does not
        count, and of the causal half both halves do.
        """
        config = self.config
        attention = 12 * config.layers * config.width * config.context
        return self.tokens * (6 * parameters + attention)


def add_compute_flags(group: Any) -> None:
    """Adds the flags of how a model is computed to a group of flags."""
    group.add_argument(
        "--attention",
        choices=["auto", "cudnn", "xla"],
        default="auto",
        help="who computes it; auto is cuDNN on a GPU if it can",
    )
    group.add_argument("--remat", action="store_true", help="compute activations twice")


def attention_implementation(choice: str, backend: str) -> str:
    """Decides how attention is computed.

    Args:
      choice: "xla", "cudnn", or "auto": cuDNN on a GPU if it can, else XLA.
      backend: JAX's default backend.

    Raises:
      ValueError: If cuDNN is asked for without a GPU.
    """
    if choice == "cudnn" and backend != "gpu":
        raise ValueError(
            f"Expected --attention=auto or --attention=xla where there is no GPU, got {choice} on "
            f"{backend}. cuDNN's attention needs a GPU."
        )
    if choice != "auto":
        return choice
    if backend != "gpu":
        return "xla"
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)

    def attend(x: jax.Array) -> jax.Array:
        return jnp.sum(
            jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn"),
            dtype=jnp.float32,
        )

    try:
        jax.jit(jax.grad(attend))(x).block_until_ready()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        logging.info("cuDNN's attention cannot be used, XLA's is: %s", error)
        return "xla"
    return "cudnn"


def abstract_model(config: GPTConfig) -> tuple[Any, Any]:
    """Returns a model as its graph and its abstract parameters."""
    graph, params = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    return graph, params


Dtype = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class ImageModelConfig:
    """Sizes of a model, and how it computes.

    Attributes:
      kind: `resnet`, with `depth` blocks in each of its four stages (2 is ResNet-18); or `vit`,
        with `depth` blocks of attention.
      width: channels of the first stage, or size of the residual stream.
      depth: number of blocks, see `kind`.
      classes: number of classes.
      shape: height, width and channels of an image.
      dtype: that of activations and products. Parameters are float32.
    """

    kind: Literal["resnet", "vit"]
    width: int
    depth: int
    classes: int
    shape: tuple[int, int, int]
    dtype: Dtype = "bfloat16"

    @property
    def patch(self) -> int:
        """Side of a transformer's patches."""
        return 4 if self.shape[0] >= 16 else 2


def _convolution(
    inputs: int, outputs: int, size: int, strides: int, dtype: Dtype, rngs: nnx.Rngs
) -> nnx.Conv:
    # He et al.'s initialization, by the number of outputs as in the residual networks' code.
    return nnx.Conv(
        inputs,
        outputs,
        kernel_size=(size, size),
        strides=strides,
        padding=size // 2,
        use_bias=False,
        dtype=dtype,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        rngs=rngs,
    )


def _batch_norm(features: int, dtype: Dtype, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(features, momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=rngs)


class ResidualBlock(nnx.Module):
    """Two convolutions of 3 x 3, with a shortcut around both."""

    def __init__(
        self, inputs: int, outputs: int, strides: int, dtype: Dtype, *, rngs: nnx.Rngs
    ) -> None:
        self.conv_1 = _convolution(inputs, outputs, 3, strides, dtype, rngs)
        self.norm_1 = _batch_norm(outputs, dtype, rngs)
        self.conv_2 = _convolution(outputs, outputs, 3, 1, dtype, rngs)
        self.norm_2 = _batch_norm(outputs, dtype, rngs)
        same = strides == 1 and inputs == outputs
        self.conv_shortcut = (
            None if same else _convolution(inputs, outputs, 1, strides, dtype, rngs)
        )
        self.norm_shortcut = None if same else _batch_norm(outputs, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations (batch, height, width, inputs) to outputs, smaller by the strides."""
        y = nnx.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        if self.conv_shortcut is not None and self.norm_shortcut is not None:
            x = self.norm_shortcut(self.conv_shortcut(x))
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    """He et al.'s residual network with the stem for small images: 3 x 3, without pooling."""

    def __init__(self, config: ImageModelConfig, *, rngs: nnx.Rngs) -> None:
        dtype = config.dtype
        self.stem = _convolution(config.shape[2], config.width, 3, 1, dtype, rngs)
        self.stem_norm = _batch_norm(config.width, dtype, rngs)
        blocks, inputs = [], config.width
        for stage in range(4):
            outputs = config.width * 2**stage
            for block in range(config.depth):
                strides = 2 if stage and not block else 1
                blocks.append(ResidualBlock(inputs, outputs, strides, dtype, rngs=rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, config.classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images (batch, height, width, channels) to logits (batch, classes), float32."""
        x = nnx.relu(self.stem_norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2))).astype(jnp.float32)


class ViT(nnx.Module):
    """A transformer on patches, with learned positions and the mean over patches at the end."""

    def __init__(self, config: ImageModelConfig, *, rngs: nnx.Rngs) -> None:
        height, width, channels = config.shape
        self.patch = patch = config.patch
        count = (height // patch) * (width // patch)
        block = GPTConfig(
            vocabulary_size=config.classes,
            context=count,
            width=config.width,
            layers=config.depth,
            heads=max(1, config.width // 64),
            biases=True,
            dtype=config.dtype,
            attention="xla",
            causal=False,
        )
        self.patches = nnx.Linear(
            patch * patch * channels, config.width, dtype=config.dtype, rngs=rngs
        )
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, config.width)))
        self.blocks = nnx.List([Block(block, rngs=rngs) for _ in range(config.depth)])
        self.norm = nnx.LayerNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(config.width, config.classes, dtype=config.dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images (batch, height, width, channels) to logits (batch, classes), float32."""
        batch, height, width, channels = images.shape
        side = self.patch
        x = images.reshape(batch, height // side, side, width // side, side, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, side * side * channels)
        x = self.patches(x)
        x = x + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), axis=1)).astype(jnp.float32)


def image_model(config: ImageModelConfig, rngs: nnx.Rngs) -> ResNet | ViT:
    """Makes a model with fresh parameters."""
    return ResNet(config, rngs=rngs) if config.kind == "resnet" else ViT(config, rngs=rngs)
