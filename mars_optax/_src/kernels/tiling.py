"""How leaves are cut into blocks and gathered into calls: plain Python, the same on any machine."""

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

# Threads of a warpgroup, in which Mosaic GPU computes: a block is a multiple of it.
WARPGROUP: Final = 128
# Elements of a block, the largest first. On a Hopper GPU those from 512 to 2048 run at one rate.
BLOCKS: Final = (2048, 1024, 512, 256, 128)
# Elements up to which launching a kernel takes longer than what the kernel does.
SMALL: Final = 1 << 16
# Elements up to which places in a leaf are 32-bit numbers.
LARGEST: Final = 2**31 - 1
# Rows of a leaf, along the second axis of a grid.
_MOST_ROWS: Final = 65535
# Leaves of a call: each has code of its own in it.
GROUP: Final = 8
# Rows and columns of the squares in which a stack is made, of which it has whole ones.
SIDE: Final = 64


class Tiling(NamedTuple):
    """A leaf as rows, each with a factor of its own, of blocks of some elements."""

    rows: int
    blocks: int  # of a row
    block: int  # elements
    rest: int  # elements at the end that fill no block; 0 where there are several rows

    @property
    def covered(self) -> int:
        """Elements that lie in blocks."""
        return self.rows * self.blocks * self.block


def tile(size: int, rows: int = 1, *, is_whole: bool = False) -> Tiling | None:
    """The tiling of `size` elements in `rows` equal rows; None if rows do not end with a block.

    One row may have a rest, unless it is to be whole. Rows may also be too many for a grid.
    """
    length, may_rest = size // rows, rows == 1 and not is_whole
    for block in BLOCKS if rows <= _MOST_ROWS else ():
        blocks, rest = divmod(length, block)
        # A rest of some percent is not worth smaller blocks.
        if rest == 0 or (may_rest and (64 * rest <= length or block == WARPGROUP)):
            return Tiling(rows, blocks, block, rest)
    return None


def fills(size: int) -> bool:
    """Whether the blocks of a leaf that is one row leave no rest."""
    tiles = tile(size)
    return tiles is not None and tiles.rest == 0


def group(keys: Sequence[Hashable], lengths: Sequence[int]) -> list[list[int]]:
    """Indices of leaves gathered into calls of one key, each of at most so many leaves."""
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    calls = []
    for indices in members.values():
        length = lengths[indices[0]]
        calls += [indices[i : i + length] for i in range(0, len(indices), length)]
    return calls
