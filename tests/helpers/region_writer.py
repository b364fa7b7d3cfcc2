"""A process that writes frames of a region it is handed by fd, one step at a time.

    python -m tests.helpers.region_writer DATA_FD DIRECTORY_FD FIRST_FRAME END_FRAME COUNT [SIGNAL STEP]

Each of COUNT writes takes the next frame of [FIRST_FRAME, END_FRAME) and gives it the next name; every byte of a page
and of its key is the name. One byte on stdout per write. With SIGNAL and STEP the process signals itself after that
step of its first write: 0 nothing done, 1 begun, 2 record, 3 half of the bytes, 4 all bytes, 5 committed.
"""

import os
import signal
import sys

import numpy as np
from cachekernels.region import Region

NUM_STEPS = 6
NUM_NAMES = 250


def name_of_write(number: int) -> int:
    return 1 + number % NUM_NAMES


def write(region: Region, frame: int, name: int, after_step: dict[int, signal.Signals]) -> None:
    frames, half = np.array([frame], np.int32), region.frame_bytes // 2
    view = region.data()
    steps = [
        lambda: None,
        lambda: region.begin_write(frames),
        lambda: region.write_records(frames, np.full((1, 32), name, np.uint8), np.array([name], np.uint32)),
        lambda: view[frame, :half].fill(name),
        lambda: view[frame, half:].fill(name),
        lambda: region.commit(frames),
    ]
    for number, step in enumerate(steps):
        step()
        if number in after_step:
            os.kill(os.getpid(), after_step[number])


def main() -> None:
    data_fd, directory_fd, first_frame, end_frame, count, *own_signal = map(int, sys.argv[1:])
    after_step = {own_signal[1]: signal.Signals(own_signal[0])} if own_signal else {}
    region = Region.open(data_fd, directory_fd)
    for number in range(count):
        frame = first_frame + number % (end_frame - first_frame)
        write(region, frame, name_of_write(number), after_step if number == 0 else {})
        sys.stdout.buffer.write(b".")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
