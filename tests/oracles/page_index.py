"""Which places of a page an index may or must find, as a plain dict.

The index keeps up to four places of a key and may replace any stale one, so a place is *certain* (must be found while
its record is right) or *possible* (may have been replaced while it was stale).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

NUM_PLACES = 4

Place = tuple[int, int]  # slot, frame


@dataclass
class PageIndexOracle:
    """holds(place) -> the key the place's record shows now, or None where it is not readable."""

    holds: Callable[[Place], bytes | None]
    certain: dict[bytes, set[Place]] = field(default_factory=dict)
    possible: dict[bytes, set[Place]] = field(default_factory=dict)

    def publish(self, place: Place, was_filed: bool) -> None:
        """Takes the index's word for whether the place was filed, after checking that it may say so."""
        key = self.holds(place)
        if key is None or place not in self.certain.get(key, set()):
            self._remove(lambda other: other == place)
        if key is None:
            assert not was_filed, "a page that cannot be read was filed"
            return
        others = self.valid(key) - {place}
        if not was_filed:
            assert len(others) >= NUM_PLACES, "a place was refused although there was room"
            return
        certain = self.certain.setdefault(key, set())
        if len(certain | self.possible.get(key, set())) >= NUM_PLACES:
            stale = {other for other in certain if self.holds(other) != key and other != place}
            certain -= stale
            self.possible.setdefault(key, set()).update(stale)
        certain.add(place)

    def remove_slot(self, slot: int) -> None:
        self._remove(lambda place: place[0] == slot)

    def valid(self, key: bytes) -> set[Place]:
        """All places that may be found now."""
        filed = self.certain.get(key, set()) | self.possible.get(key, set())
        return {place for place in filed if self.holds(place) == key}

    def must_find(self, key: bytes) -> set[Place]:
        return {place for place in self.certain.get(key, set()) if self.holds(place) == key}

    def _remove(self, is_gone: Callable[[Place], bool]) -> None:
        for filed in (*self.certain.values(), *self.possible.values()):
            filed -= {place for place in filed if is_gone(place)}
