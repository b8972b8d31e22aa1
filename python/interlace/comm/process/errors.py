"""CommError: a failed transfer, with the missing ranks."""

from __future__ import annotations

from collections.abc import Sequence


class CommError(RuntimeError):
    """A transfer cannot be completed. The message names the rank, the operation, the missing peers and the reason.

    missing: ranks that are missing, by their global numbers; empty if none is. reason: the reason alone.
    """

    def __init__(self, text: str, missing: Sequence[int] = (), reason: str = "") -> None:
        super().__init__(text)
        self.missing, self.reason = tuple(missing), reason or text

    def copy(self) -> CommError:
        """A copy without traceback and cause."""
        return CommError(str(self), self.missing, self.reason)
