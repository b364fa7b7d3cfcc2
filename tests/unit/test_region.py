"""Regions: sealing, opening, the reader and writer rules call by call, copies, closing."""

import ctypes
import fcntl
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from cachekernels import region as regions
from cachekernels.arrays import I32, U8, U32, U64
from cachekernels.region import Region, RegionClosed, RegionInvalid, WriterConflict, copy_frames

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def frame_list(*frames: int) -> I32:
    return np.array(frames, np.int32)


def keys_of(*names: int) -> U8:
    return np.stack([np.full(32, name, np.uint8) for name in names])


def depths_of(*depths: int) -> U32:
    return np.array(depths, np.uint32)


def fill(region: Region, frame: int, name: int) -> None:
    """Writes one whole page whose every byte is `name`, under the key whose every byte is `name`."""
    frames = frame_list(frame)
    region.begin_write(frames)
    region.data()[frame] = name
    region.write_records(frames, keys_of(name), depths_of(name), last_use=7)
    region.commit(frames)


def read_out(region: Region, frames: I32, generations: U64) -> tuple[list[bool], U8]:
    out = np.full((len(frames), region.frame_bytes), 0xEE, np.uint8)
    addresses = np.array([row.ctypes.data for row in out], np.uint64)
    return region.read(frames, generations, addresses).tolist(), out


@pytest.fixture
def region() -> Region:
    return Region.create(8, 5000)


# --- memory, sealing, opening


def test_layout(region: Region) -> None:
    assert (region.num_frames, region.frame_bytes, region.stride_bytes) == (8, 5000, 8192)
    assert region.data_address % 4096 == 0
    assert region.frame_addresses(frame_list(0, 3)).tolist() == [
        region.data_address,
        region.data_address + 3 * 8192,
    ]
    assert region.data().shape == (8, 8192)
    assert region.page_bytes in (4096, 2 << 20)
    assert len(region.region_id) == 16
    assert region.region_id != Region.create(1, 1).region_id
    assert not region.data().any()
    assert not any(column.any() for column in region.records())


def test_both_files_are_sealed_against_resizing(region: Region) -> None:
    for fd in (region.data_fd, region.directory_fd):
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)


def test_fds_are_not_inherited_and_memory_is_reserved(region: Region) -> None:
    for fd in (region.data_fd, region.directory_fd):
        assert not os.get_inheritable(fd)
        status = os.fstat(fd)
        assert status.st_blocks * 512 >= status.st_size


def test_touch_threads_0_leaves_the_data_to_first_use() -> None:
    region = Region.create(1000, 4096, touch_threads=0)
    assert os.fstat(region.data_fd).st_blocks == 0


def test_an_opened_region_is_the_same_memory(region: Region) -> None:
    fill(region, 2, 9)
    other = Region.open(region.data_fd, region.directory_fd)
    assert other.region_id == region.region_id
    assert other.data_address != region.data_address
    assert (other.data()[2] == 9).all()
    assert other.snapshot(frame_list(2), keys_of(9)).tolist() == [2]
    fill(other, 2, 4)
    assert region.snapshot(frame_list(2), None).tolist() == [4]


def test_open_keeps_its_own_fds(region: Region) -> None:
    data_fd, directory_fd = os.dup(region.data_fd), os.dup(region.directory_fd)
    other = Region.open(data_fd, directory_fd)
    assert {data_fd, directory_fd}.isdisjoint({other.data_fd, other.directory_fd})
    os.close(data_fd)
    os.close(directory_fd)
    fill(other, 0, 3)
    assert (region.data()[0] == 3).all()


HEADER_FIELDS = {
    "magic": (0, b"CS2REGN\n", "holds no region header"),
    "version": (8, struct.pack("<I", 2), "region version is 2, expected 1"),
    "record size": (12, struct.pack("<I", 128), "record size in bytes is 128, expected 64"),
    "num_frames": (32, struct.pack("<Q", 9), "data memfd is smaller than its frames"),
    "no frames": (32, struct.pack("<Q", 0), r"num_frames is 0, expected \[1, 2\^31\)"),
    "endless frames": (32, struct.pack("<Q", 1 << 40), "num_frames is 1099511627776"),
    "frame_bytes": (40, struct.pack("<Q", 1 << 63), "frame_bytes is 9223372036854775808"),
    "frame_bytes beyond stride": (40, struct.pack("<Q", 8193), "stride in bytes is 8192, expected 12288"),
    "stride": (48, struct.pack("<Q", 4096), "stride in bytes is 4096, expected 8192"),
    "data size": (56, struct.pack("<Q", 1 << 30), "data size in bytes is"),
    "inode": (64, struct.pack("<Q", 1), "inode of the data memfd is"),
}


@pytest.mark.parametrize("name", HEADER_FIELDS)
def test_open_checks_every_field_of_the_header(region: Region, name: str) -> None:
    offset, value, message = HEADER_FIELDS[name]
    os.pwrite(region.directory_fd, value, offset)
    with pytest.raises(RegionInvalid, match=message):
        Region.open(region.data_fd, region.directory_fd)


def test_open_wants_a_sealed_matching_pair(region: Region) -> None:
    twin = Region.create(8, 5000)
    with pytest.raises(RegionInvalid, match="inode of the data memfd"):
        Region.open(twin.data_fd, region.directory_fd)
    with pytest.raises(RegionInvalid, match="holds no region header"):
        Region.open(region.data_fd, region.data_fd)
    longer = Region.create(100, 5000)
    os.pwrite(longer.directory_fd, os.pread(region.directory_fd, 128, 0), 0)
    with pytest.raises(RegionInvalid, match="directory size in bytes is 12288, expected 8192"):
        Region.open(region.data_fd, longer.directory_fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Region.open(-1, region.directory_fd)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_open_refuses_what_could_be_cut_under_us(region: Region, seals: int) -> None:
    size = os.fstat(region.data_fd).st_size
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, size)
    fcntl.fcntl(loose, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(RegionInvalid, match="data fd is not a memfd sealed"):
        Region.open(loose, region.directory_fd)
    with pytest.raises(RegionInvalid, match="directory fd is not a memfd sealed"):
        Region.open(region.data_fd, loose)
    os.close(loose)


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (1 << 31, 1), (2, 1 << 62), (1 << 20, 1 << 45)])
def test_impossible_sizes(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"num_frames is|frame_bytes is"):
        Region.create(*shape, touch_threads=0)


def test_too_large_says_need_have_reserve() -> None:
    with pytest.raises(regions.RegionTooLarge, match=r"need .* GiB, have .* GiB .* kept in reserve; ask for at most"):
        Region.create(1 << 20, 1 << 30)
    with pytest.raises(regions.RegionTooLarge) as caught:
        Region.create(1, 4096, reserve_bytes=1 << 60)
    assert caught.value.need_bytes >= 4096
    assert caught.value.have_bytes > 0
    assert caught.value.reserve_bytes == 1 << 60


def test_huge_pages_that_are_gone_again_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    has_some = regions.free_huge_page_bytes(2 << 20) >= 4 << 20
    monkeypatch.setattr(regions, "free_huge_page_bytes", lambda page_bytes: 1 << 40)
    region = Region.create(4, 4096)
    assert region.page_bytes == (2 << 20 if has_some else 4096)


# --- the protocol, one call at a time


def test_one_write_and_read(region: Region) -> None:
    frames = frame_list(1, 5)
    region.begin_write(frames)
    assert region.snapshot(frames, None).tolist() == [0, 0]
    region.data()[frames] = 8
    region.write_records(frames, keys_of(1, 2), depths_of(10, 20), last_use=99)
    assert region.snapshot(frames, None).tolist() == [0, 0]
    region.commit(frames)
    generations = region.snapshot(frames, keys_of(1, 2))
    assert generations.tolist() == [2, 2]
    assert region.validate(frames, generations).tolist() == [True, True]
    valid, out = read_out(region, frames, generations)
    assert valid == [True, True]
    assert (out == 8).all()
    records = region.records()
    assert records.generations.tolist() == [0, 2, 0, 0, 0, 2, 0, 0]
    assert (records.keys[[1, 5]] == keys_of(1, 2)).all()
    assert records.depths[[1, 5]].tolist() == [10, 20]
    assert records.last_use[[1, 5]].tolist() == [99, 99]


def test_a_snapshot_is_a_miss_unless_stable_and_of_that_key(region: Region) -> None:
    fill(region, 0, 1)
    fill(region, 1, 2)
    region.begin_write(frame_list(1))
    assert region.snapshot(frame_list(0, 1, 2), None).tolist() == [2, 0, 0]
    assert region.snapshot(frame_list(0, 0), keys_of(1, 3)).tolist() == [2, 0]


@pytest.mark.parametrize("byte", range(32))
def test_every_byte_of_a_key_counts(region: Region, byte: int) -> None:
    fill(region, 0, 1)
    almost = keys_of(1)
    almost[0, byte] ^= 128
    assert region.snapshot(frame_list(0), almost).tolist() == [0]
    region.begin_write(frame_list(1))
    region.write_records(frame_list(1), almost, depths_of(0))
    region.commit(frame_list(1))
    assert region.snapshot(frame_list(1, 1), np.concatenate([almost, keys_of(1)])).tolist() == [2, 0]


def test_a_read_is_refused_once_the_frame_moved(region: Region) -> None:
    frames = frame_list(0)
    fill(region, 0, 1)
    seen = region.snapshot(frames, None)
    region.begin_write(frames)
    assert region.validate(frames, seen).tolist() == [False]
    assert read_out(region, frames, seen)[0] == [False]
    region.commit(frames)
    assert region.validate(frames, seen).tolist() == [False]
    assert read_out(region, frames, seen)[0] == [False]
    assert region.validate(frames, region.snapshot(frames, None)).tolist() == [True]


@pytest.mark.parametrize("generation", [0, 1])
def test_unreadable_generations_never_validate(region: Region, generation: int) -> None:
    """A miss stays a miss, also where the record happens to say the same number."""
    frames = frame_list(0)
    if generation == 1:
        region.begin_write(frames)
    assert region.records().generations[0] == generation
    asked = np.array([generation], np.uint64)
    assert region.validate(frames, asked).tolist() == [False]
    assert read_out(region, frames, asked)[0] == [False]


def test_an_odd_frame_stays_odd_when_it_is_rewritten(region: Region) -> None:
    frames = frame_list(3)
    region.begin_write(frames)
    region.begin_write(frames)
    assert region.records().generations[3] == 1
    region.commit(frames)
    assert region.records().generations[3] == 2


def test_two_writers_conflict(region: Region) -> None:
    fill(region, 0, 1)
    frames = frame_list(0, 1)
    seen = region.records().generations[[0, 1]]
    fill(region, 0, 2)
    with pytest.raises(WriterConflict, match=r"another writer was faster: frames \[0\]") as caught:
        region.begin_write(frames, seen=seen)
    assert caught.value.frames == [0]
    assert region.records().generations[[0, 1]].tolist() == [4, 1]
    with pytest.raises(WriterConflict):
        region.begin_write(frame_list(1), seen=np.array([3], np.uint64))


def test_a_write_needs_its_begin(region: Region) -> None:
    region.begin_write(frame_list(0))
    with pytest.raises(WriterConflict, match=r"written without begin_write: frames \[1\]"):
        region.write_records(frame_list(0, 1), keys_of(1, 2), depths_of(0, 0))
    assert not region.records().keys.any()
    with pytest.raises(WriterConflict, match=r"a commit without begin_write: frames \[1\]"):
        region.commit(frame_list(0, 1))
    assert region.records().generations[:2].tolist() == [1, 0]


def test_a_frame_named_twice_is_committed_once(region: Region) -> None:
    frames = frame_list(0, 0)
    region.begin_write(frames)
    region.commit(frames)
    assert region.records().generations[0] == 2


def test_touch_keeps_the_generation(region: Region) -> None:
    fill(region, 0, 1)
    region.touch(frame_list(0, 1), 1 << 40)
    records = region.records()
    assert records.last_use[:3].tolist() == [1 << 40, 1 << 40, 0]
    assert records.generations[:2].tolist() == [2, 0]


def test_a_frame_is_copied_whole_and_not_beyond(region: Region) -> None:
    fill(region, 0, 5)
    out = np.zeros(region.frame_bytes + 8, np.uint8)
    region.read(frame_list(0), region.snapshot(frame_list(0), None), np.array([out.ctypes.data], np.uint64))
    assert (out[: region.frame_bytes] == 5).all()
    assert not out[region.frame_bytes :].any()


@pytest.mark.parametrize("frame", [-1, 8, 2**31 - 1])
def test_frames_out_of_range_change_nothing(region: Region, frame: int) -> None:
    frames = frame_list(0, frame)
    two = np.zeros(2, np.uint64)
    calls = [
        lambda: region.begin_write(frames),
        lambda: region.write_records(frames, keys_of(1, 1), depths_of(1, 1)),
        lambda: region.commit(frames),
        lambda: region.snapshot(frames, None),
        lambda: region.validate(frames, two),
        lambda: region.read(frames, two, two),
        lambda: region.touch(frames, 1),
        lambda: region.frame_addresses(frames),
        lambda: copy_frames(region, frames, two, region, frame_list(0, 1), keys_of(1, 1), depths_of(0, 0)),
    ]
    for call in calls:
        with pytest.raises(IndexError, match=rf"frames\[1\] is {frame}, expected \[0, 8\)"):
            call()


def test_bad_arrays_say_what_was_expected(region: Region) -> None:
    frames = frame_list(0, 1)
    with pytest.raises(TypeError, match="frames: expected dtype int32, got int64"):
        region.begin_write(np.array([0, 1]))
    with pytest.raises(ValueError, match=r"keys: expected shape \[2, 32\], got \[1, 32\]"):
        region.snapshot(frames, keys_of(1))
    with pytest.raises(ValueError, match=r"depths: expected shape \[2\], got \[1\]"):
        region.write_records(frames, keys_of(1, 2), depths_of(1))
    with pytest.raises(ValueError, match=r"generations: expected shape \[2\], got \[3\]"):
        region.validate(frames, np.zeros(3, np.uint64))


# --- copies between regions


def test_copy_frames(region: Region) -> None:
    target = Region.create(4, 5000)
    for frame in range(4):
        fill(region, frame, frame + 1)
    source_frames = frame_list(0, 1, 2, 3)
    keys = keys_of(1, 2, 3, 4)
    generations = region.snapshot(source_frames, keys)
    fill(region, 1, 77)  # rewritten since
    region.begin_write(frame_list(2))  # being rewritten
    keys[3] = 99  # not its key
    copied = copy_frames(region, source_frames, generations, target, source_frames, keys, depths_of(5, 6, 7, 8))
    assert copied.tolist() == [True, False, False, False]
    assert target.snapshot(source_frames, None).tolist() == [2, 0, 0, 0]
    assert target.records().generations.tolist() == [2, 1, 1, 1]
    assert (target.data()[0, :5000] == 1).all()
    assert target.records().depths[0] == 5
    assert (target.records().keys[0] == keys[0]).all()


def test_copy_refuses_a_key_that_came_back_elsewhere(region: Region) -> None:
    """The right generation number with another key: frames of two regions mixed up by the caller."""
    target = Region.create(4, 5000)
    fill(region, 0, 1)
    fill(region, 1, 2)
    copied = copy_frames(
        region, frame_list(1), np.array([2], np.uint64), target, frame_list(0), keys_of(1), depths_of(0)
    )
    assert copied.tolist() == [False]


def test_copy_wants_equal_frames_and_a_free_target(region: Region) -> None:
    fill(region, 0, 1)
    generations = region.snapshot(frame_list(0), None)
    with pytest.raises(ValueError, match="frame_bytes differ: source 5000, target 5001"):
        copy_frames(region, frame_list(0), generations, Region.create(1, 5001), frame_list(0), keys_of(1), depths_of(0))


# --- the end of a region


def test_a_closed_region_says_so(region: Region) -> None:
    region.close()
    region.close()
    for call in (region.records, region.data, lambda: region.data_fd, lambda: region.begin_write(frame_list(0))):
        with pytest.raises(RegionClosed, match="region is closed"):
            call()


def test_views_outlive_close(region: Region) -> None:
    fill(region, 0, 6)
    view = region.data()[0]
    region.close()
    del region
    assert (view == 6).all()


def test_open_and_close_leave_no_fds_and_no_mappings() -> None:
    def footprint() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("cachesvc-" in line for line in maps)

    before = footprint()
    for _ in range(50):
        region = Region.create(2, 4096)
        other = Region.open(region.data_fd, region.directory_fd)
        other.close()
        region.close()
    assert footprint() == before


def map_private_page(address: int) -> None:
    """Anonymous memory at exactly this address, which must be free. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if libc.mmap(address, 4096, protection, flags, -1, 0) != address:
        raise OSError("the address is taken")


def test_a_forked_child_is_refused_and_harms_nothing(region: Region) -> None:
    fill(region, 0, 6)
    address = region.data_address
    child = os.fork()
    if child == 0:
        status = 1
        try:
            region.records()
        except RegionClosed as error:
            # The region's addresses are free here: what the child maps there must survive the region's end.
            map_private_page(address)
            region.close()
            ctypes.memset(address, 1, 4096)
            status = 0 if "before a fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (region.data()[0] == 6).all()


def test_mappings_are_not_inherited(region: Region) -> None:
    """Under a fork, copied page tables of a large region would stall the parent."""
    flags: dict[str, str] = {}
    name = ""
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in line.split()[0] and "cachesvc-" in line:
                name = f"{region.data_address:x}" if line.startswith(f"{region.data_address:x}-") else "other"
            elif line.startswith("VmFlags:") and name:
                flags[name], name = line, ""
    assert " dc" in flags[f"{region.data_address:x}"]


LARGE_PAGE_BYTES = 2 << 20


def in_large_pages(address: int) -> int:
    """Bytes of the mapping at `address` that lie in large pages of shared memory."""
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    (ours,) = (lines for lines in mappings if f"{address:x}-" in lines)
    return 1024 * sum(int(line.split()[1]) for line in ours.splitlines() if line.startswith("ShmemPmdMapped:"))


def kernel_gives_large_pages() -> bool:
    """MADV_COLLAPSE of shared memory came with Linux 6.1, and asks for support of large pages."""
    version = tuple(map(int, os.uname().release.split(".")[:2]))
    return version >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").exists()


def test_memory_that_was_cleared_is_in_large_pages_where_the_kernel_has_them() -> None:
    found = 0
    for _ in range(3):  # what it has at this moment is the machine's affair
        region = Region.create(4, LARGE_PAGE_BYTES, touch_threads=1)
        address = region.data().ctypes.data
        assert address % LARGE_PAGE_BYTES == 0
        found += in_large_pages(address)
        region.close()
    assert found or not kernel_gives_large_pages()
