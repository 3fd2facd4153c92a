"""Times forms of the Newton-Schulz iteration on stacks, against the ceiling of matrix products.

    python -m benchmarks.steps.newton_schulz_forms

Every form does 5 steps in bfloat16. The share counts the operations of the usual one,
X <- a X + (b A + c A A) X with A = X X^T: 5 (4 m m n + 2 m m m) for an m x n matrix, so a form that
needs fewer may come to more than 1.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from optax.contrib import MuonDimensionNumbers

import mars_optax
from benchmarks import command, output
from benchmarks.steps import timing

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
# GPT-2 XL: query, key and value together, output, perceptron; small: perceptron, output.
_LARGE = "48x1600x4800,48x1600x1600,48x1600x6400,12x768x3072,12x768x768"


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -2, -1)


def _polynomial(gram: jax.Array, a: float) -> jax.Array:
    identity = jnp.eye(gram.shape[-1], dtype=jnp.float32)
    return (a * identity + _B * _wide(gram) + _C * _wide(gram @ gram)).astype(gram.dtype)


def _product(x: jax.Array) -> jax.Array:
    return _polynomial(x @ _transposed(x), _A) @ x


def _product_and_x(x: jax.Array) -> jax.Array:
    rest = _polynomial(x @ _transposed(x), 0.0) @ x
    return (_A * _wide(x) + _wide(rest)).astype(x.dtype)


def _looped(step: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    result: jax.Array = jax.lax.fori_loop(0, _STEPS, lambda _, x: step(x), x)
    return result


def _written_out(step: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    for _ in range(_STEPS):
        x = step(x)
    return x


def _on_gram(x: jax.Array) -> jax.Array:
    gram = x @ _transposed(x)
    total = jnp.eye(x.shape[-2], dtype=x.dtype)
    for _ in range(_STEPS):
        factor = _polynomial(gram, _A)
        total, gram = factor @ total, factor @ (gram @ factor)
    return total @ x


def _package(x: jax.Array) -> jax.Array:
    return mars_optax.orthogonalize(
        x, steps=_STEPS, weight_dimension_numbers=MuonDimensionNumbers(1, 2)
    )


FORMS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "a X added, loop": lambda x: _looped(_product_and_x, x),
    "a X added, written out": lambda x: _written_out(_product_and_x, x),
    "P X, loop": lambda x: _looped(_product, x),
    "P X, written out": lambda x: _written_out(_product, x),
    "P X, one matrix at a time": lambda x: jax.lax.map(lambda y: _written_out(_product, y), x),
    "on A alone, bfloat16": _on_gram,
    "mars_optax.orthogonalize": _package,
}


def operations(batch: int, m: int, n: int) -> int:
    """Counts the multiplications and additions of the usual form."""
    return batch * _STEPS * (4 * m * m * n + 2 * m**3)


def measure(
    form: Callable[[jax.Array], jax.Array], stack: tuple[int, int, int], *, inner: int, repeats: int
) -> dict[str, float]:
    """Times a form.

    Args:
      form: what is timed, on a stack of bfloat16 matrices of Frobenius norm 1.
      stack: the number of matrices, their rows and columns.
      inner: runs in a call, each on what the last one gave, brought back to its size.
      repeats: calls.

    Returns:
      Milliseconds of a run, and temporary bytes of the call.
    """
    _, m, n = stack
    values = np.random.default_rng(0).standard_normal(stack, dtype=np.float32) / np.sqrt(m * n)
    x = jnp.asarray(values, jnp.bfloat16)
    scale = jnp.float32(1 / np.sqrt(m))

    def run(x: jax.Array, scale: jax.Array) -> jax.Array:
        def body(_: Any, x: jax.Array) -> jax.Array:
            return (_wide(form(x)) * scale).astype(jnp.bfloat16)

        result: jax.Array = jax.lax.fori_loop(0, inner, body, x)
        return result

    compiled = jax.jit(run).lower(x, scale).compile()
    timing.wait(compiled(x, scale))
    times = [timing.milliseconds(lambda: compiled(x, scale)) / inner for _ in range(repeats)]
    memory = compiled.memory_analysis()
    return {
        **timing.summary(times),
        "temporary_bytes": 0 if memory is None else memory.temp_size_in_bytes,
    }


def rows(
    stacks: Sequence[tuple[int, int, int]],
    names: Sequence[str],
    ceiling: float,
    *,
    inner: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Measures every form on every stack; one that fails has an "error" in place of its figures."""
    for stack in stacks:
        for name in names:
            form = FORMS[name]
            row = command.guarded(
                {"stack": "x".join(map(str, stack)), "name": name},
                lambda form=form, stack=stack: measure(form, stack, inner=inner, repeats=repeats),  # type: ignore[misc]
            )
            if "ms" in row:
                row["ceiling_share"] = operations(*stack) / (row["ms"] / 1000) / ceiling
            yield row


def text(measured: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows as a table."""
    table = [["stack", "form", "ms", "min..max", "share of ceiling", "temp MB"]]
    for row in measured:
        if "error" in row:
            table.append([row["stack"], row["name"], row["error"], "", "", ""])
            continue
        table.append(
            [
                row["stack"],
                row["name"],
                f"{row['ms']:.3f}",
                f"{row['ms_min']:.3f}..{row['ms_max']:.3f}",
                f"{row['ceiling_share']:.2f}",
                f"{row['temporary_bytes'] / 1e6:.1f}",
            ]
        )
    return output.aligned(table)


def _stacks(text: str) -> list[tuple[int, int, int]]:
    stacks = []
    for given in command.listed(text):
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", given)
        sizes = tuple(map(int, match.groups())) if match else ()
        if len(sizes) != 3 or min(sizes) < 1 or sizes[1] > sizes[2]:
            raise ValueError(f"Expected BATCHxMxN with 1 <= M <= N, got {given[:99]!r}.")
        stacks.append(sizes)
    return stacks


def parser() -> command.Flags:
    """Returns the flags."""
    parser = command.Flags("steps.newton_schulz_forms", __doc__)
    timing.add_flags(parser, model=False)
    group = parser.add_argument_group("forms")
    group.add_argument(
        "--stacks",
        type=_stacks,
        help="stacks as BATCHxMxN; by default of GPT-2 XL and small, on a processor 4x64x256",
    )
    group.add_argument("--form", default="*", help="a name or a pattern such as 'P X*'")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, measures, writes and prints the result."""
    flags = parser()
    args = flags.parse_args(argv)
    stacks = args.stacks or _stacks("4x64x256" if jax.default_backend() == "cpu" else _LARGE)
    names = fnmatch.filter(FORMS, args.form)
    try:
        if not names:
            raise ValueError(
                f"Expected one of {'; '.join(FORMS)}, or a pattern of them, as --form, got "
                f"{args.form!r}."
            )
        out = output.make_folder(args.out)
    except ValueError as error:
        flags.fail(error)
    tree: dict[str, Any] = {"environment": output.environment(args.commit), "rows": []}
    path = out / "results.json"
    command.announce(
        "newton_schulz_forms",
        f"{len(names)} forms of Newton-Schulz",
        f"{output.devices()}, {len(stacks)} stacks of random matrices",
        path,
    )
    tree["ceilings"] = timing.ceilings()
    for row in rows(
        stacks,
        names,
        tree["ceilings"]["bfloat16_matmul_flop_per_second"],
        inner=args.steps or 4,
        repeats=args.repeats,
    ):
        logging.info("%s, %s: %s ms", row["stack"], row["name"], row.get("ms", "no"))
        tree["rows"].append(row)
        output.write_json(output.jsonable(tree), path)
    return command.conclude(tree, text(tree["rows"]), path)


if __name__ == "__main__":
    command.run("newton_schulz_forms", main, rows=True)
