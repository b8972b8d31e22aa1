"""Digests of sums: ranks compare their sums over ranks in messages that they exchange anyway.

Sums over ranks have no header, and reading one on a GPU would wait for it. So each rank keeps a running digest of the
sums it took part in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

BITS = 48  # of a digest, sent as a float64, which holds 53


def digest_of(text: str) -> int:
    """48-bit digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=BITS // 8).digest(), "little")


class Reductions:
    """The sums over ranks in which this rank took part. Per group: their number, a digest, and the last one."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, str, str]] = {}

    def add(self, ranks: Sequence[int], key: str, tensor: Tensor) -> None:
        group = ",".join(map(str, ranks))
        count, digest, _ = self._sums.get(group, (0, "", ""))
        entry = f"{key}, {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        self._sums[group] = count + 1, hashlib.blake2b(f"{digest} {entry}".encode(), digest_size=8).hexdigest(), entry

    def text(self) -> str:
        return "\n".join(f"{group}\t{count}\t{digest}\t{this}" for group, (count, digest, this) in self._sums.items())

    def share(self, rank: int) -> int:
        """48 bits that add up to 0 over all ranks, modulo 2**48, if the ranks of each group have summed the same.

        The first rank of a group of g adds g - 1 times its digest. Every other rank subtracts its own digest.
        """
        total = 0
        for group, (_, digest, _) in self._sums.items():
            ranks = [int(each) for each in group.split(",")]
            number = digest_of(f"{group} {digest}")
            total += number * (len(ranks) - 1) if rank == ranks[0] else -number
        return total % (1 << BITS)

    @staticmethod
    def disagreement(texts: Sequence[str]) -> str:
        """Description of a contradiction between the texts of all ranks, in rank order; "" if they agree."""
        sums_of: list[dict[str, tuple[str, str, str]]] = []
        for rank, text in enumerate(texts):
            rows = [line.split("\t") for line in text.splitlines()]
            if not all(len(row) == 4 and _is_group(row[0], len(texts)) for row in rows):
                return f"rank {rank} sent an unreadable list of its sums"
            sums_of.append({group: (count, digest, this) for group, count, digest, this in rows})
        for group in dict.fromkeys(group for sums_of_rank in sums_of for group in sums_of_rank):
            ranks = [int(rank) for rank in group.split(",")]
            first, *others = ((rank, sums_of[rank].get(group, ("no", "", "none"))) for rank in ranks)
            for rank, sums in others:
                if sums != first[1]:
                    (count, _, last), (its_count, _, its_last) = first[1], sums
                    return (
                        f"ranks {group} have different sums: rank {first[0]} made {count}, the last of {last}; rank "
                        f"{rank} made {its_count}, the last of {its_last}"
                    )
        return ""


def _is_group(text: str, world: int) -> bool:
    return all(rank.isdecimal() and len(rank) < 10 and int(rank) < world for rank in text.split(","))
