"""A residual network and a vision transformer for small images, in Flax NNX."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import gpt

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


def _norm(features: int, dtype: Dtype, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(features, momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=rngs)


class ResidualBlock(nnx.Module):
    """Two convolutions of 3 x 3, with a shortcut around both."""

    def __init__(
        self, inputs: int, outputs: int, strides: int, dtype: Dtype, *, rngs: nnx.Rngs
    ) -> None:
        self.conv_1 = _convolution(inputs, outputs, 3, strides, dtype, rngs)
        self.norm_1 = _norm(outputs, dtype, rngs)
        self.conv_2 = _convolution(outputs, outputs, 3, 1, dtype, rngs)
        self.norm_2 = _norm(outputs, dtype, rngs)
        same = strides == 1 and inputs == outputs
        self.conv_shortcut = (
            None if same else _convolution(inputs, outputs, 1, strides, dtype, rngs)
        )
        self.norm_shortcut = None if same else _norm(outputs, dtype, rngs)

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
        self.stem_norm = _norm(config.width, dtype, rngs)
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
        block = gpt.GPTConfig(
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
        self.blocks = nnx.List([gpt.Block(block, rngs=rngs) for _ in range(config.depth)])
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


def build(config: ImageModelConfig, rngs: nnx.Rngs) -> ResNet | ViT:
    """Makes a model with fresh parameters."""
    return ResNet(config, rngs=rngs) if config.kind == "resnet" else ViT(config, rngs=rngs)
