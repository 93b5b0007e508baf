"""`Entries`: a snapshot of some entries of some dictionaries, which it can restore."""

from collections.abc import Hashable, Iterable
from typing import Any

_ABSENT = object()


class Entries:
    """A snapshot of entries of dictionaries; a key that is absent at construction is removed again by `put_back`."""

    def __init__(self, places: Iterable[tuple[dict[Any, Any], Hashable]]) -> None:
        """Store the value in each of `places`, pairs of a dictionary and a key."""
        self._before = [(mapping, key, mapping.get(key, _ABSENT)) for mapping, key in places]

    def put_back(self) -> None:
        """Restore every entry; may be interrupted and repeated."""
        for mapping, key, value in self._before:
            if value is _ABSENT:
                mapping.pop(key, None)
            elif mapping.get(key, _ABSENT) is not value:
                mapping[key] = value
