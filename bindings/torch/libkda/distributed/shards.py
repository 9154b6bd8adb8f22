"""Which token rows of a packed batch each rank holds. Host arithmetic alone; the same on every rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from libkda._errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens first .. first + length of a sequence, in rows begin .. begin + length of their rank's buffer. number: its place
    among the rank's pieces."""

    sequence: int
    first: int
    length: int
    rank: int
    begin: int
    number: int


@dataclasses.dataclass(frozen=True)
class Shards:
    """The packed tokens of sequences of these lengths, cut into one run of rows a rank: rank r holds rows[r] of them, in
    order. Lengths and rows may be 0; cuts may lie anywhere."""

    lengths: tuple[int, ...]
    rows: tuple[int, ...]

    def __init__(self, lengths: Sequence[int], rows: Sequence[int]) -> None:
        object.__setattr__(self, "lengths", tuple(map(int, lengths)))
        object.__setattr__(self, "rows", tuple(map(int, rows)))
        if min((*self.lengths, *self.rows, 0)) < 0:
            raise InvalidArgument(f"shards: wanted lengths and rows >= 0, got {self.lengths} and {self.rows}")
        if not self.rows or sum(self.lengths) != sum(self.rows):
            raise InvalidArgument(
                f"shards: wanted the ranks' rows to add up to {sum(self.lengths)} tokens, got {self.rows or 'no ranks'}"
            )

    @classmethod
    def even(cls, lengths: Sequence[int], ranks: int, *, multiple: int = 64) -> Shards:
        """Equal shards but for the last ranks', cut at multiples of `multiple` rows of the batch."""
        total = sum(lengths)
        share = -(-total // max(1, ranks * multiple)) * multiple
        cuts = [min(total, r * share) for r in range(ranks + 1)]
        return cls(lengths, [b - a for a, b in zip(cuts, cuts[1:], strict=False)])

    @property
    def ranks(self) -> int:
        return len(self.rows)

    def slice(self, rank: int) -> slice:
        """The rank's rows of the batch."""
        begin = sum(self.rows[:rank])
        return slice(begin, begin + self.rows[rank])

    @functools.cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """By rank, in order; none is empty."""
        found: list[list[Piece]] = [[] for _ in self.rows]
        rank, used = 0, 0
        for sequence, length in enumerate(self.lengths):
            first = 0
            while first < length:
                while used == self.rows[rank]:
                    rank, used = rank + 1, 0
                count = min(length - first, self.rows[rank] - used)
                found[rank].append(Piece(sequence, first, count, rank, used, len(found[rank])))
                first, used = first + count, used + count
        return tuple(map(tuple, found))

    @functools.cached_property
    def by_sequence(self) -> tuple[tuple[Piece, ...], ...]:
        """By sequence, in token order."""
        found: list[list[Piece]] = [[] for _ in self.lengths]
        for pieces in self.pieces:
            for piece in pieces:
                found[piece.sequence].append(piece)
        return tuple(map(tuple, found))

    def is_split(self, sequence: int) -> bool:
        """Whether more than one rank holds tokens of the sequence."""
        return len(self.by_sequence[sequence]) > 1

    def owner(self, sequence: int) -> int:
        """The rank with the sequence's last token; of an empty one, rank 0."""
        pieces = self.by_sequence[sequence]
        return pieces[-1].rank if pieces else 0

    def history(self, sequence: int, end: int, width: int) -> list[tuple[Piece | None, int]]:
        """Where the `width` raw rows before token `end` of the sequence lie, oldest first: (piece, how many rows before the
        piece's end), or (None, column) of the request's cached window, over as many pieces as it takes (spec S-9)."""
        places: list[tuple[Piece | None, int]] = []
        for token in range(end - width, end):
            if token < 0:
                places.append((None, width + token))
                continue
            piece = next(p for p in self.by_sequence[sequence] if p.first <= token < p.first + p.length)
            places.append((piece, piece.first + piece.length - token))
        return places
