"""What abstract base classes have answered during a capture, as one guard."""

from __future__ import annotations

import abc

from fusewright._native import isinstance


class AbstractChecks:
    """Guard callable: abstract base classes still give the same answers about classes that do not derive from them.

    While nothing has been registered with any of them, one comparison tells.
    """

    __slots__ = ("answers", "token")

    def __init__(self) -> None:
        self.answers: dict[tuple[type, type], bool] = {}
        self.token = abc.get_cache_token()

    def note(self, cls: type, base: type, answer: bool) -> None:
        """`issubclass(cls, base)` gave `answer`."""
        if isinstance(base, abc.ABCMeta) and base not in cls.__mro__:
            self.answers[cls, base] = answer

    def __call__(self, subject: object) -> bool:
        token = abc.get_cache_token()
        if token != self.token:
            if any(issubclass(cls, base) is not answer for (cls, base), answer in self.answers.items()):
                return False
            self.token = token
        return True

    def __repr__(self) -> str:
        return f"answers of abstract base classes: {[(cls.__name__, base.__name__) for cls, base in self.answers]}"
