r"""What an optimizer costs a large model on many chips: memory, communication, Newton-Schulz.

Arithmetic only, nothing runs on a device. From the root of the repository:

    python -m benchmarks.planning                  # the tables of docs/sharding.md
    python -m benchmarks.planning --chips=512 --tensor=4 --tokens=8388608

`tests/benchmarks/test_planning.py` holds the formulas to compiled programs of a small model.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import command

Shapes = Mapping[tuple[int, int], int]  # matrices (in, out), and how many there are of each


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The shapes of a dense decoder with gated MLP and an output layer of its own.

    Attributes:
      name: for the tables.
      layers: number of blocks.
      width: of the residual stream.
      heads: query heads.
      kv_heads: key and value heads.
      head_dim: size of each head.
      mlp: hidden size of the MLP.
      vocab: number of tokens.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    @property
    def matrices(self) -> Shapes:
        """How many kernels (in, out) of each shape the blocks have."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = [(self.width, query), (query, self.width), (self.mlp, self.width)]
        shapes += [(self.width, key)] * 2 + [(self.width, self.mlp)] * 2
        return {shape: self.layers * shapes.count(shape) for shape in dict.fromkeys(shapes)}

    @property
    def embeddings(self) -> Shapes:
        """The same for the embedding and the output layer."""
        shapes = [(self.vocab, self.width), (self.width, self.vocab)]
        return {shape: shapes.count(shape) for shape in dict.fromkeys(shapes)}

    @property
    def scales(self) -> int:
        """Number of parameters of the norms, all in vectors."""
        return self.width * (2 * self.layers + 1)

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return _elements(self.matrices) + _elements(self.embeddings) + self.scales


# The shapes of Llama 2 (arXiv 2307.09288) of these sizes.
MODELS = (
    Transformer("7B", 32, 4096, 32, 32, 128, 11008, 32000),
    Transformer("70B", 80, 8192, 64, 8, 128, 28672, 32000),
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What an optimizer keeps, in bytes for each element.

    Attributes:
      name: for the tables.
      matrix: of a matrix.
      vector: of a parameter that is none.
      row: of each row of a matrix, for the scales of 8-bit buffers.
      takes_embeddings: whether embedding and output layer count as matrices.
      clips: whether each matrix is clipped.
      orthogonalizes: whether each matrix goes through Newton-Schulz.
    """

    name: str
    matrix: int
    vector: int = 8
    row: int = 0
    takes_embeddings: bool = False
    clips: bool = True
    orthogonalizes: bool = False


VARIANTS = (
    Variant("AdamW", 8, takes_embeddings=True, clips=False),
    Variant("mars", 12, takes_embeddings=True),
    Variant("mars, prev_grad in bfloat16", 10, takes_embeddings=True),
    Variant("mars, prev_grad in 8 bits", 9, row=4, takes_embeddings=True),
    Variant("mars, keep_prev_grad=False", 8, takes_embeddings=True, clips=False),
    Variant("mars_lion", 8, takes_embeddings=True),
    Variant("storm_adamw", 16, vector=16, takes_embeddings=True, clips=False),
    Variant("mars_m, mars_shampoo", 8, orthogonalizes=True),
    Variant("mars_m, prev_grad in 8 bits", 5, row=4, orthogonalizes=True),
    Variant("mars_m, keep_prev_grad=False", 4, clips=False, orthogonalizes=True),
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh: `fsdp` chips that divide one axis of a matrix, times `tensor` that divide another."""

    fsdp: int
    tensor: int = 1

    @property
    def chips(self) -> int:
        """Their number."""
        return self.fsdp * self.tensor

    def __str__(self) -> str:
        if self.tensor == 1:
            return f"FSDP {self.fsdp}"
        return f"FSDP {self.fsdp} x tensor {self.tensor}"


@dataclasses.dataclass(frozen=True)
class Chip:
    """A vendor's figures for one chip.

    Attributes:
      name: for the tables.
      flops: peak of dense bfloat16 products, 1/s.
      bandwidth: into the chip from the others of the mesh, bytes/s.
      source: where the figures are from.
    """

    name: str
    flops: float
    bandwidth: float
    source: str


CHIPS = (
    Chip(
        "H100 SXM",
        989e12,
        50e9,
        "[H100](https://www.nvidia.com/en-us/data-center/h100/): 1,979 TFLOP/s with sparsity, half "
        "of it dense; [DGX H100](https://www.nvidia.com/en-us/data-center/dgx-h100/): one 400 Gb/s "
        "port for each GPU, which bounds what crosses nodes (NVLink within a node has 450 GB/s)",
    ),
    Chip(
        "TPU v5p",
        459e12,
        600e9,
        "[TPU v5p](https://docs.cloud.google.com/tpu/docs/v5p): 459 TFLOP/s, 1,200 GB/s of "
        "inter-chip links in both directions together",
    ),
)


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What is put in besides the vendors' figures; none of it is measured.

    Attributes:
      matmul_share: of the peak that Newton-Schulz attains.
      link_share: of the bandwidth that collectives attain.
      model_share: of the peak that forward and backward pass attain.
      tokens: in the batch of one step.
      steps: iterations of Newton-Schulz.
    """

    matmul_share: float = 0.5
    link_share: float = 0.7
    model_share: float = 0.4
    tokens: int = 4 * 2**20
    steps: int = 5


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) * count for shape, count in shapes.items())


def matrices_of(model: Transformer, variant: Variant) -> Shapes:
    """The shapes that a variant treats as matrices, and their numbers."""
    shapes = dict(model.matrices)
    if variant.takes_embeddings:
        for shape, count in model.embeddings.items():
            shapes[shape] = shapes.get(shape, 0) + count
    return shapes


def parameter_bytes(model: Transformer, layout: Layout, width: int = 4) -> float:
    """Bytes of the parameters on a chip: kernels and embeddings divided, norms' scales whole."""
    return width * ((model.parameters - model.scales) / layout.chips + model.scales)


def state_bytes(model: Transformer, variant: Variant, layout: Layout) -> float:
    """Bytes of optimizer state on a chip, step counters left out, for float32 parameters.

    A buffer is divided as its parameter is; the scales of 8 bits only along the rows.
    """
    shapes = matrices_of(model, variant)
    matrices = _elements(shapes)
    rest = model.parameters - model.scales - matrices
    rows = sum(rows * count for (rows, _), count in shapes.items())
    divided = (variant.matrix * matrices + variant.vector * rest) / layout.chips
    return divided + variant.row * rows / layout.fsdp + variant.vector * model.scales


def update_bytes(model: Transformer, variant: Variant, layout: Layout) -> float:
    """Most temporary bytes of an update on a chip that holds parameters and state in float32.

    One direction for each parameter, and for Newton-Schulz on whole matrices all of them at once
    with the workspace of the largest: five matrices of its size.
    """
    temporary = parameter_bytes(model, layout)
    if variant.orthogonalizes:
        largest = max(math.prod(shape) for shape in model.matrices)
        temporary += 4 * (_elements(model.matrices) + 5 * largest)
    return temporary


def clip_bytes(model: Transformer, variant: Variant, layout: Layout) -> float:
    """Bytes that a chip receives for the clip: the sums of all matrices' squares, all-reduced.

    An all-reduce of r bytes over n chips is 2 r (n - 1) / n; there is one for each axis of the
    mesh that divides the matrices.
    """
    if not variant.clips:
        return 0.0
    numbers = 4 * sum(matrices_of(model, variant).values())
    return sum(2 * numbers * (n - 1) / n for n in (layout.fsdp, layout.tensor))


def iteration_flops(shape: tuple[int, int], steps: int = 5) -> float:
    """Floating-point operations of Newton-Schulz on one matrix.

    With s <= l the two sizes: X X^T and P X cost 2 s^2 l each, the square of X X^T 2 s^3.
    """
    short, long = sorted(shape)
    return float(steps * (4 * short**2 * long + 2 * short**3))


def by_aspect(shapes: Shapes) -> Shapes:
    """The matrices grouped by their sizes (short, long), since transposes iterate together."""
    groups: dict[tuple[int, int], int] = {}
    for shape, count in shapes.items():
        short, long = sorted(shape)
        groups[short, long] = groups.get((short, long), 0) + count
    return groups


@dataclasses.dataclass(frozen=True)
class Work:
    """What Newton-Schulz asks of the busiest chip in a step.

    Attributes:
      flops: floating-point operations.
      received: bytes from other chips.
      held: bytes of whole matrices that are there at once, if all come before the first goes.
    """

    flops: float
    received: float
    held: float

    def seconds(self, chip: Chip, assumptions: Assumptions) -> tuple[float, float]:
        """Time of the products, and of the communication."""
        return (
            self.flops / (chip.flops * assumptions.matmul_share),
            self.received / (chip.bandwidth * assumptions.link_share),
        )


def redundant(shapes: Shapes, layout: Layout, *, width: int = 4, steps: int = 5) -> Work:
    """Every chip gathers every matrix, and iterates on all of them.

    Args:
      shapes: the matrices.
      layout: the mesh.
      width: bytes of a number while it travels.
      steps: iterations.
    """
    gathered = width * _elements(shapes)
    flops = sum(iteration_flops(shape, steps) * count for shape, count in shapes.items())
    # What is gathered over one axis after the other arrives once.
    return Work(flops, gathered * (layout.chips - 1) / layout.chips, gathered)


def divided(shapes: Shapes, layout: Layout, *, over: int, width: int = 2, steps: int = 5) -> Work:
    """The matrices of each size are spread over chips, each of which gets whole ones.

    An all-to-all over one axis of the mesh after the other brings them, and takes them back. Where
    the work is divided over `fsdp` alone, the chips of the axis `tensor` gather each other's parts
    and repeat the work; of the results each keeps its part.

    Args:
      shapes: the matrices.
      layout: the mesh.
      over: how many chips share the work: all, or those of the axis `fsdp`.
      width: bytes of a number while it travels.
      steps: iterations.
    """
    if over not in (layout.chips, layout.fsdp):
        raise ValueError(
            f"`over`: expected {layout.chips} or {layout.fsdp}, the chips of {layout} or of its "
            f"axis fsdp, got {over}. Pass one of these."
        )
    flops, whole = 0.0, 0.0
    for shape, count in by_aspect(shapes).items():
        share = math.ceil(count / over)
        flops += share * iteration_flops(shape, steps)
        whole += share * width * math.prod(shape)
    across_fsdp = (layout.fsdp - 1) / layout.fsdp
    across_tensor = (layout.tensor - 1) / layout.tensor
    if over == layout.chips:
        received = 2 * whole * (across_fsdp + across_tensor)
    else:
        received = 2 * whole / layout.tensor * across_fsdp + whole * across_tensor
    return Work(flops, received, whole)


def training_seconds(
    model: Transformer, layout: Layout, chip: Chip, assumptions: Assumptions
) -> float:
    """Time of forward and backward pass, 6 operations for each parameter and token."""
    flops = 6 * model.parameters * assumptions.tokens / layout.chips
    return flops / (chip.flops * assumptions.model_share)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def _seconds(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def memory_table(models: Sequence[Transformer], chips: Sequence[int]) -> str:
    """State on a chip for every variant, in the FSDP layout."""
    cases = [(model, Layout(n)) for model in models for n in chips]
    rows = [["parameters, float32 (4)", *(_bytes(parameter_bytes(*case)) for case in cases)]]
    for variant in VARIANTS:
        sizes = [_bytes(state_bytes(model, variant, layout)) for model, layout in cases]
        rows.append([f"{variant.name} ({variant.matrix})", *sizes])
    header = ["", *(f"{model.name}, {layout.chips}" for model, layout in cases)]
    return _table(header, rows)


def clip_table(models: Sequence[Transformer], chips: Sequence[int], tensor: int) -> str:
    """What a chip receives for the clip of `mars`, in both layouts."""
    mars = next(variant for variant in VARIANTS if variant.name == "mars")
    layouts = [layout for n in chips for layout in (Layout(n), Layout(n // tensor, tensor))]
    rows = [
        [str(layout), *(_bytes(clip_bytes(model, mars, layout)) for model in models)]
        for layout in layouts
    ]
    counts = [sum(matrices_of(model, mars).values()) for model in models]
    header = [f"{model.name}, {n} matrices" for model, n in zip(models, counts, strict=True)]
    return _table(["layout", *header], rows)


def _ways(shapes: Shapes, layout: Layout, steps: int) -> Iterator[tuple[str, Work]]:
    yield "every chip, all matrices", redundant(shapes, layout, steps=steps)
    for over in dict.fromkeys((layout.chips, layout.fsdp)):
        yield f"divided over {over}", divided(shapes, layout, over=over, steps=steps)


def newton_schulz_tables(
    model: Transformer, chips: Sequence[int], tensor: int, assumptions: Assumptions
) -> tuple[str, str]:
    """Newton-Schulz in each layout: what it moves and holds, and how long it takes."""
    moved, times = [], []
    for layout in (layout for n in chips for layout in (Layout(n), Layout(n // tensor, tensor))):
        for way, work in _ways(model.matrices, layout, assumptions.steps):
            bytes_ = _bytes(work.received), _bytes(work.held)
            moved.append([str(layout), way, _number(work.flops / 1e12), *bytes_])
            seconds = (work.seconds(chip, assumptions) for chip in CHIPS)
            times.append([str(layout), way, *(" + ".join(map(_seconds, s)) for s in seconds)])
    header = ["layout", "Newton-Schulz"]
    return (
        _table([*header, "TFLOP", "received", "held"], moved),
        _table([*header, *(f"{chip.name}: products + links" for chip in CHIPS)], times),
    )


def training_table(
    models: Sequence[Transformer], chips: Sequence[int], assumptions: Assumptions
) -> str:
    """What forward and backward pass take."""
    rows = []
    for model in models:
        for n in chips:
            seconds = (training_seconds(model, Layout(n), chip, assumptions) for chip in CHIPS)
            rows.append([model.name, str(n), *map(_seconds, seconds)])
    return _table(["model", "chips", *(chip.name for chip in CHIPS)], rows)


def tables(
    chips: Sequence[int] = (256, 4096), tensor: int = 8, assumptions: Assumptions | None = None
) -> str:
    """All tables, as docs/sharding.md has them."""
    assumptions = assumptions or Assumptions()
    sources = _table(
        ["chip", "bfloat16, dense", "into a chip", "source"],
        [
            [
                chip.name,
                f"{chip.flops / 1e12:g} TFLOP/s",
                f"{chip.bandwidth / 1e9:g} GB/s",
                chip.source,
            ]
            for chip in CHIPS
        ],
    )
    newton_schulz = []
    for model in MODELS:
        newton_schulz += [
            f"**Newton-Schulz of {model.name}** in a step, on the busiest chip.",
            *newton_schulz_tables(model, chips, tensor, assumptions),
        ]
    return "\n\n".join(
        [
            "**Bytes of state on a chip**, for a model and a number of chips. In parentheses: "
            "bytes of each element of a matrix.",
            memory_table(MODELS, chips),
            "**Bytes that a chip receives for the clip** in a step.",
            clip_table(MODELS, chips, tensor),
            *newton_schulz,
            "**Forward and backward pass**, to compare.",
            training_table(MODELS, chips, assumptions),
            "**Inputs.** Vendors' figures:",
            sources,
            f"Assumed, not measured: Newton-Schulz at {assumptions.matmul_share:g} of the peak, "
            f"collectives at {assumptions.link_share:g} of the links, forward and backward pass at "
            f"{assumptions.model_share:g} of the peak; {assumptions.tokens:,} tokens in a batch; "
            f"{assumptions.steps} iterations.",
        ]
    )


def parser() -> command.Flags:
    """Returns the flags."""
    default = Assumptions()
    parser = command.Flags("planning", __doc__)
    parser.add_argument(
        "--chips", type=command.positives, default="256,4096", help="numbers of chips"
    )
    parser.add_argument("--tensor", type=command.positive, default=8, help="chips of that axis")
    for name, meaning in (
        ("matmul_share", "of the peak that Newton-Schulz reaches"),
        ("link_share", "of the links that collectives reach"),
        ("model_share", "of the peak that forward and backward pass reach"),
    ):
        parser.add_argument(
            f"--{name}",
            type=command.number(1e-6, 1),
            default=getattr(default, name),
            help=f"share {meaning}",
        )
    for name, meaning in (("tokens", "of a batch"), ("iterations", "of Newton-Schulz")):
        value = default.steps if name == "iterations" else default.tokens
        parser.add_argument(f"--{name}", type=command.positive, default=value, help=meaning)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables for the settings of the command line."""
    flags = parser()
    args = flags.parse_args(argv)
    for n in args.chips:
        if n % args.tensor:
            flags.fail(f"Expected multiples of --tensor={args.tensor} as --chips, got {n}.")
    assumptions = Assumptions(
        args.matmul_share, args.link_share, args.model_share, args.tokens, args.iterations
    )
    print(tables(args.chips, args.tensor, assumptions))
    return 0


if __name__ == "__main__":
    command.run("planning", main)
