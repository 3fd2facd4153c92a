"""Reading compiled programs: which collectives they have, how large, and how often they run."""

import dataclasses
import math
import re
from collections.abc import Iterator

_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_COLLECTIVE = re.compile(
    r"=\s+(?P<type>\(.*?\)|\S+)\s+(?P<kind>" + "|".join(_KINDS) + r")(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9]*[a-z0-9]*)\[(?P<shape>[0-9,<=]*)\]")
# Computations begin at the margin: `%body (arg: f32[]) -> f32[] {`.
_COMPUTATION = re.compile(r"^(?:ENTRY\s+)?%?(?P<name>[\w.\-]+)\s.*\{\s*$")
_CALL = re.compile(r"\b(?:body|condition|to_apply|calls)=%?(?P<name>[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"?(?P<count>\d+)')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: Such as `all-gather`.
      elements: Of its result on one device; of all its results, where there are several.
      bytes: Of the same.
      group_size: How many devices take part together; 0 where the text does not tell.
      times: How often it runs in one execution; None in a loop of unknown length.
    """

    kind: str
    elements: int
    bytes: int
    group_size: int
    times: int | None

    @property
    def received(self) -> float:
        """Bytes that a device receives each time, sent as sparingly as can be."""
        n = self.group_size
        if self.kind == "collective-permute":
            return self.bytes
        assert n > 0, f"{self}: the size of the group is not known"
        if self.kind == "reduce-scatter":
            return self.bytes * (n - 1)
        return (2 if self.kind == "all-reduce" else 1) * self.bytes * (n - 1) / n

    @property
    def is_in_loop(self) -> bool:
        return self.times != 1


def collectives(text: str) -> list[Collective]:
    """All collectives in the text of a compiled program, `compiled.as_text()`."""
    times = _times(text)
    found = []
    for computation, line in _lines(text):
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        arrays = [
            (math.prod(int(n.removeprefix("<=")) for n in a["shape"].split(",") if n), a["dtype"])
            for a in _ARRAY.finditer(match["type"])
        ]
        if match["start"] and len(arrays) > 1 and match["kind"] != "all-reduce":
            # The type of the first half is (operands, results, and on some backends contexts).
            arrays = [arrays[1]]
        found.append(
            Collective(
                kind=match["kind"],
                elements=sum(size for size, _ in arrays),
                bytes=sum(size * _bytes_of(dtype) for size, dtype in arrays),
                group_size=_group_size(line),
                times=times.get(computation, 1),
            )
        )
    return found


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """The instructions with the computation that each is in."""
    computation = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None and " = " not in line.split("{")[0]:
            computation = header["name"]
        elif computation:
            yield computation, line


def _times(text: str) -> dict[str, int | None]:
    """How often each computation runs, multiplied along the loops that it is nested in."""
    callers: dict[str, tuple[str, int | None]] = {}
    for computation, line in _lines(text):
        is_loop = re.search(r"\swhile\(", line) is not None
        trips = _TRIPS.search(line)
        factor = (int(trips["count"]) if trips else None) if is_loop else 1
        for call in _CALL.finditer(line):
            callers[call["name"]] = (computation, factor)

    def of(name: str) -> int | None:
        if name not in callers:
            return 1
        caller, factor = callers[name]
        outer = of(caller)
        return None if factor is None or outer is None else factor * outer

    return {name: of(name) for name in callers}


def _bytes_of(dtype: str) -> int:
    if dtype == "pred":
        return 1
    bits = re.match(r"[a-z]+(\d+)", dtype)
    assert bits is not None, dtype
    return max(1, int(bits[1]) // 8)


def _group_size(line: str) -> int:
    # One of {{0,1},{2,3}}, [groups,size]<=[...], and mesh['a'=4,'b'=2] {'b'}, the
    # last one also with an order of devices before the braces.
    listed = re.search(r"replica_groups=\{\{([0-9,]*)\}", line)
    if listed is not None:
        return len(listed[1].split(","))
    short = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line)
    if short is not None:
        return int(short[2])
    named = re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", line)
    if named is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    return 0
