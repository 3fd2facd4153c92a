"""The collectives of a compiled program: which, how large, among how many, how often."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from tests.support import hlo

_KINDS = frozenset(
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
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: as in HLO, without "-start".
      elements: of its result on one device; of all its results, where there are several.
      bytes: of the same.
      group_size: how many devices take part together; 0 where the text does not tell.
      times: how often one execution runs it; None in a loop of unknown length. One in a branch of
        a condition counts as if every execution took that branch.
      in_loop: whether it is in a loop.
    """

    kind: str
    elements: int
    bytes: int
    group_size: int
    times: int | None
    in_loop: bool = False

    @property
    def received(self) -> float:
        """Bytes that a device receives each time, sent as sparingly as can be."""
        n = self.group_size
        if self.kind == "collective-permute":
            return self.bytes
        if n == 0:
            raise ValueError(f"Expected a collective whose group is told, got {self}.")
        if self.kind == "reduce-scatter":
            return self.bytes * (n - 1)
        return (2 if self.kind == "all-reduce" else 1) * self.bytes * (n - 1) / n


@dataclasses.dataclass(frozen=True)
class Total:
    """The collectives of one kind in a program.

    Attributes:
      kind: as in HLO.
      count: how often they run; those in a loop as often as it does, or once where the compiler
        does not say how often that is.
      bytes: of their results on one device, added up likewise.
      in_loop: whether one of them is in a loop.
    """

    kind: str
    count: int
    bytes: int
    in_loop: bool


def _kind(instruction: hlo.Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in _KINDS else None


def _result(instruction: hlo.Instruction, kind: str) -> list[hlo.Array]:
    # The start of an asynchronous one has operands, results and perhaps contexts; only that of an
    # all-reduce has the type of its results.
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        return hlo.arrays(hlo.parts(instruction.type)[1])
    return hlo.arrays(instruction.type)


def _group_size(attributes: str) -> int:
    # One of {{0,1},{2,3}}, [groups,size]<=[...], and mesh['a'=4,'b'=2] {'b'}, the last one also
    # with an order of devices before the braces.
    if listed := re.search(r"replica_groups=\{\{([0-9,]*)\}", attributes):
        return len(listed[1].split(","))
    if short := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(short[2])
    if named := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    return 0


def collectives(text: str) -> list[Collective]:
    """Reads the collectives of a program.

    An asynchronous one, a start and a done in HLO for GPUs, counts once.

    Args:
      text: optimized HLO, as `jax.stages.Compiled.as_text` returns it.

    Returns:
      One entry for each instruction, in the order in which they run.
    """
    computations, entry = hlo.parse(text)

    def walk(name: str, times: int | None, in_loop: bool) -> Iterator[Collective]:
        for instruction in computations.get(name, ()):
            # What a collective calls is its reduction, or what it wraps.
            if kind := _kind(instruction):
                sizes = _result(instruction, kind)
                yield Collective(
                    kind,
                    sum(size.elements for size in sizes),
                    sum(size.bytes for size in sizes),
                    _group_size(instruction.rest),
                    times,
                    in_loop,
                )
                continue
            is_loop, inner = instruction.opcode == "while", times
            if is_loop:
                trips = instruction.trip_count
                inner = None if times is None or trips is None else times * trips
            for _, several, single in _CALLED.findall(instruction.rest):
                for target in re.findall(r"[\w.\-]+", several or single):
                    yield from walk(target, inner, in_loop or is_loop)

    return list(walk(entry, 1, False))


def totals(found: Sequence[Collective]) -> list[Total]:
    """Adds up the collectives of each kind; the result is sorted by kind."""
    sums: dict[str, Total] = {}
    for one in found:
        before = sums.get(one.kind, Total(one.kind, 0, 0, False))
        times = 1 if one.times is None else one.times
        sums[one.kind] = Total(
            one.kind,
            before.count + times,
            before.bytes + times * one.bytes,
            before.in_loop or one.in_loop,
        )
    return [sums[kind] for kind in sorted(sums)]
