"""What the compiler made of a program, read from its optimized HLO text."""

import dataclasses
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^\s*([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

# Names for parts of a buffer, and the ends of what began elsewhere: nothing runs on the device.
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "opt-barrier",
        "add-dependency",
        "partition-id",
        "replica-id",
        "copy-done",
        "async-done",
        "async-update",
    }
)

_COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|branch_computations|true_computation|false_computation"
    r"|called_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)


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
        return _arrays(self.type)

    @property
    def collective(self) -> str | None:
        """The kind of a collective; None for others, and for the end of an asynchronous one."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in _COLLECTIVES else None

    @property
    def collective_bytes(self) -> int:
        """The bytes of a collective's results on one device."""
        # The start of an asynchronous one has operands, results and perhaps contexts; only that of
        # an all-reduce has the type of its results.
        if self.opcode.endswith("-start") and self.collective != "all-reduce":
            return sum(_arrays(_parts(self.type)[1]))
        return sum(self.arrays)


@dataclasses.dataclass(frozen=True)
class LoopReport:
    """What one iteration of a loop does.

    Attributes:
      kernels: launches: fusions, calls of libraries and kernels, copies, operations on their own.
        Those of an inner loop count as often as it runs.
      copied_bytes: result bytes of the copies among them.
      carried: number of arrays that the loop carries, its counter and its invariants included.
      iterations: how often the loop runs, None where the compiler does not say.
    """

    kernels: int
    copied_bytes: int
    carried: int
    iterations: int | None


def _array_bytes(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    count = 1
    for dim in filter(None, dims.split(",")):
        count *= int(dim)
    size = 8 if dtype == "pred" else int(bits.group()) if bits else 0
    return count * size // 8


def _arrays(type_: str) -> list[int]:
    return [_array_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(type_)]


def _parts(type_: str) -> list[str]:
    """Splits a tuple's type into those of its elements."""
    parts, depth = [""], 0
    for character in type_.removeprefix("(").removesuffix(")"):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


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


def _launched(
    computations: dict[str, list[Instruction]], name: str, times: int = 1
) -> Iterator[tuple[Instruction, int]]:
    """Yields what runs on the device, and how often, inner loops and calls included."""
    for instruction in computations[name]:
        if instruction.opcode == "while":
            body = instruction.called("body")
            assert body is not None
            yield from _launched(computations, body, times * (instruction.trip_count or 1))
        elif instruction.opcode == "call" and (target := instruction.called("to_apply")):
            yield from _launched(computations, target, times)
        elif instruction.opcode not in _FREE:
            yield instruction, times


def _copied(computations: dict[str, list[Instruction]], instruction: Instruction) -> int:
    """Returns the bytes that an instruction copies, itself or as a fusion of nothing else."""
    if instruction.opcode == "copy":
        return sum(instruction.arrays)
    if instruction.opcode == "copy-start":
        return instruction.arrays[0]
    if instruction.opcode == "fusion" and (target := instruction.called("calls")):
        inside = [inner for inner in computations[target] if inner.opcode not in _FREE]
        if inside and all(inner.opcode == "copy" for inner in inside):
            return sum(sum(inner.arrays) for inner in inside)
    return 0


def loop_report(text: str) -> LoopReport:
    """Reads what one iteration of the largest loop outside all others does.

    Args:
      text: optimized HLO with a loop.

    Returns:
      The report.

    Raises:
      ValueError: If there is no loop.
    """
    computations, entry = parse(text)

    def outer_loops(name: str) -> Iterator[Instruction]:
        for instruction in computations[name]:
            if instruction.opcode == "while":
                yield instruction
            elif instruction.opcode == "call" and (target := instruction.called("to_apply")):
                yield from outer_loops(target)

    loops = list(outer_loops(entry))
    if not loops:
        raise ValueError("Expected HLO with a loop, got none. Run more than one step in it.")
    loop = max(loops, key=lambda instruction: len(instruction.arrays))
    body = loop.called("body")
    assert body is not None
    launched = list(_launched(computations, body))
    return LoopReport(
        kernels=sum(times for _, times in launched),
        copied_bytes=sum(times * _copied(computations, one) for one, times in launched),
        carried=len(loop.arrays),
        iterations=loop.trip_count,
    )


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a program.

    Attributes:
      kind: as in HLO, without "-start".
      count: how often they run; those in a loop as often as it does, or once where the compiler
        does not say how often that is; those in any branch of a condition.
      bytes: of their results on one device, added up likewise.
      in_loop: whether one of them is in a loop.
    """

    kind: str
    count: int
    bytes: int
    in_loop: bool


def _run(
    computations: dict[str, list[Instruction]], name: str, times: int = 1, in_loop: bool = False
) -> Iterator[tuple[Instruction, int, bool]]:
    """Yields every instruction, how often it runs, and whether in a loop."""
    for instruction in computations.get(name, ()):
        yield instruction, times, in_loop
        # What a collective calls is its reduction, or what it wraps.
        if instruction.collective:
            continue
        is_loop = instruction.opcode == "while"
        more = times * ((is_loop and instruction.trip_count) or 1)
        for _, several, single in _CALLED.findall(instruction.rest):
            for target in re.findall(r"[\w.\-]+", several or single):
                yield from _run(computations, target, more, in_loop or is_loop)


def collectives(text: str) -> list[Collective]:
    """Counts the collectives of a program.

    An asynchronous one, a start and a done in HLO for GPUs, counts once.

    Args:
      text: optimized HLO.

    Returns:
      One entry for each kind, by name.
    """
    computations, entry = parse(text)
    found: dict[str, Collective] = {}
    for instruction, times, in_loop in _run(computations, entry):
        if kind := instruction.collective:
            before = found.get(kind, Collective(kind, 0, 0, False))
            found[kind] = Collective(
                kind,
                before.count + times,
                before.bytes + times * instruction.collective_bytes,
                before.in_loop or in_loop,
            )
    return [found[kind] for kind in sorted(found)]
