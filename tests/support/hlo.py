"""What the compiler made of a program, read from its optimized HLO text."""

import dataclasses
import math
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^\s*([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Array(NamedTuple):
    """The size of an array, by its type."""

    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `rest` is what follows the opcode: operands and attributes."""

    name: str
    type: str
    opcode: str
    rest: str

    def called(self, attribute: str) -> str | None:
        """Returns the computation that an attribute names, such as `body` or `to_apply`."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return match.group(1) if match else None

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs, where the compiler knows."""
        known = _TRIP_COUNT.search(self.rest)
        return int(known.group(1)) if known else None

    @property
    def arrays(self) -> list[int]:
        """The bytes of each array of the result."""
        return [array.bytes for array in arrays(self.type)]


def arrays(type_: str) -> list[Array]:
    """Returns the arrays of a type, also of a nested tuple's; of a dynamic one the largest size."""
    found = []
    for dtype, dims in _ARRAY.findall(type_):
        elements = math.prod(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
        bits = re.search(r"\d+", dtype)
        size = 8 if dtype == "pred" else int(bits.group()) if bits else 0
        found.append(Array(elements, elements * size // 8))
    return found


def parts(type_: str) -> list[str]:
    """Splits a tuple's type into those of its elements."""
    found, depth = [""], 0
    for character in type_.removeprefix("(").removesuffix(")"):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return found


def _split_type(text: str) -> tuple[str, str]:
    """Splits a tuple's or an array's type from what follows it."""
    if not text.startswith("("):
        head, _, tail = text.partition(" ")
        return head, tail
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: position + 1], text[position + 1 :]
    raise ValueError(f"Expected a closed tuple type, got {text!r}.")


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Reads the text of a module.

    Args:
      text: optimized HLO, as `jax.stages.Compiled.as_text` returns it.

    Returns:
      The instructions of every computation by its name, and the name of the entry.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header.group(2)
            computations[name] = []
            entry = name if header.group(1) else entry
        elif name and (match := _INSTRUCTION.match(line)):
            type_, rest = _split_type(match.group(2))
            if opcode := _OPCODE.match(rest):
                computations[name].append(
                    Instruction(match.group(1), type_, opcode.group(1), rest[opcode.end() :])
                )
    return computations, entry
