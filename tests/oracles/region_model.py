"""What a region's directory must say after each step, as plain Python objects."""

from dataclasses import dataclass, field


@dataclass
class FrameModel:
    """One frame: its generation and what its record says. Generation 0: never written, odd: being written."""

    generation: int = 0
    key: bytes = bytes(32)
    depth: int = 0
    last_use: int = 0

    @property
    def is_odd(self) -> bool:
        return self.generation % 2 == 1


@dataclass
class RegionModel:
    """The steps of the protocol; each returns what the native call must answer."""

    num_frames: int
    frames: list[FrameModel] = field(init=False)

    def __post_init__(self) -> None:
        self.frames = [FrameModel() for _ in range(self.num_frames)]

    def begin_write(self, frame: int, seen: int | None = None) -> bool:
        """False: a conflict, nothing changes."""
        model = self.frames[frame]
        if seen is not None and seen != model.generation:
            return False
        if not model.is_odd:
            model.generation += 1
        return True

    def write_record(self, frame: int, key: bytes, depth: int, last_use: int) -> bool:
        model = self.frames[frame]
        if not model.is_odd:
            return False
        model.key, model.depth, model.last_use = key, depth, last_use
        return True

    def commit(self, frame: int) -> bool:
        model = self.frames[frame]
        if not model.is_odd:
            return False
        model.generation += 1
        return True

    def snapshot(self, frame: int, key: bytes | None) -> int:
        model = self.frames[frame]
        is_wanted = key is None or key == model.key
        return 0 if model.is_odd or not is_wanted else model.generation

    def validate(self, frame: int, generation: int) -> bool:
        return generation != 0 and generation % 2 == 0 and self.frames[frame].generation == generation
