"""CommError: a failed transfer, with the ranks it waited for."""

from __future__ import annotations

from collections.abc import Sequence


class CommError(RuntimeError):
    """A transfer cannot be completed. The message names the rank, the operation, the missing peers and the reason.

    waited: ranks that are missing, by their global numbers; empty if no rank is missing. why: the reason alone.
    """

    def __init__(self, text: str, waited: Sequence[int] = (), why: str = "") -> None:
        super().__init__(text)
        self.waited, self.why = tuple(waited), why or text

    def again(self) -> CommError:
        """A copy without traceback and cause."""
        return CommError(str(self), self.waited, self.why)
