#include "region.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <limits>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "fault_guard.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace cachesvc {
namespace {

constexpr char region_magic[8] = {'C', 'S', '1', 'R', 'E', 'G', 'N', '\n'};
constexpr uint32_t region_version = 1;
constexpr size_t system_page_bytes = 4096;
constexpr size_t header_bytes = 4096;
constexpr size_t touch_chunk_bytes = size_t{32} << 20;
constexpr size_t large_page_bytes = size_t{2} << 20;
constexpr int size_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

static_assert(std::endian::native == std::endian::little, "the header is read as it lies in memory");

[[noreturn]] void throw_errno(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

UniqueFd make_memfd(const char* name, size_t bytes, size_t huge_page_bytes) {
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    if (huge_page_bytes != 0) {
        flags |= MFD_HUGETLB | static_cast<unsigned>(std::countr_zero(huge_page_bytes)) << MAP_HUGE_SHIFT;
    }
    UniqueFd fd(memfd_create(name, flags));
    if (fd.get() < 0) throw_errno("memfd_create");
    if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw_errno("ftruncate of a memfd");
    return fd;
}

// Gives every page of [begin, begin + bytes) its memory. The kernel does it without a write of ours where it can; an
// older kernel gets one atomic no-op per page, which keeps what is there.
void populate(std::byte* begin, size_t bytes) {
    if (madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) return;
    if (errno != EINVAL) throw_errno("reserving memory of a region");
    const auto touch = [begin](size_t page) {
        auto* first_byte = reinterpret_cast<uint8_t*>(begin + page * system_page_bytes);
        std::atomic_ref(*first_byte).fetch_or(0, std::memory_order_relaxed);
    };
    guarded_each(bytes / system_page_bytes, touch, [](size_t) {
        throw std::system_error(ENOMEM, std::generic_category(), "reserving memory of a region");
    });
}

// First touch is page clearing, one page after the other per thread: minutes for a large region when done serially.
// Then the kernel is asked for large pages, which most systems give shared memory on demand only: a disk moves a page of
// KV in one piece instead of 512, at twice the rate, and copies meet fewer page walks. Where it has to look for them, they
// may take half as long altogether as the clearing did, and small ones do for the rest.
void populate_in_parallel(std::byte* begin, size_t bytes, unsigned num_threads) {
    std::atomic<size_t> next{0};
    std::atomic<int> error{0};
    std::atomic<int64_t> cleared_ns{0}, collapsed_ns{0};
    const auto timed = [](std::atomic<int64_t>& total, const auto& step) {
        const auto begin = std::chrono::steady_clock::now();
        step();
        total += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
    };
    const auto work = [&] {
        for (size_t at; error == 0 && (at = next.fetch_add(touch_chunk_bytes)) < bytes;) {
            const size_t chunk_bytes = std::min(touch_chunk_bytes, bytes - at);
            try {
                timed(cleared_ns, [&] { populate(begin + at, chunk_bytes); });
                if (2 * collapsed_ns < cleared_ns) {
                    timed(collapsed_ns, [&] { madvise(begin + at, chunk_bytes, MADV_COLLAPSE); });
                }
            } catch (const std::system_error& failure) {
                error = failure.code().value();
            }
        }
    };
    const size_t num_chunks = (bytes + touch_chunk_bytes - 1) / touch_chunk_bytes;
    std::vector<std::jthread> helpers;
    for (size_t i = 1; i < std::min<size_t>(num_threads, num_chunks); ++i) helpers.emplace_back(work);
    work();
    helpers.clear();
    if (error != 0) throw std::system_error(error, std::generic_category(), "reserving memory of a region");
}

void seal(int fd) {
    if (fcntl(fd, F_ADD_SEALS, size_seals) != 0) throw_errno("sealing a memfd");
}

// Where the kernel can use large pages for shared memory: at an address that is a multiple of theirs.
void* map_shared(int fd, size_t bytes, int protection) {
    const size_t alignment = bytes >= large_page_bytes ? large_page_bytes : system_page_bytes;
    const size_t mapped_bytes = round_up(bytes, system_page_bytes);
    void* room = mmap(nullptr, mapped_bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) throw_errno("mapping a region");
    auto* begin = static_cast<std::byte*>(room);
    auto* place = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(begin), alignment));
    if (mmap(place, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        const int error = errno;
        munmap(room, mapped_bytes + alignment);
        errno = error;
        throw_errno("mapping a region");
    }
    if (place > begin) munmap(begin, static_cast<size_t>(place - begin));
    munmap(place + mapped_bytes, static_cast<size_t>(begin + alignment - place));
    return place;
}

UniqueFd duplicate(int fd, const char* name) {
    UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) throw_errno(std::string("duplicating the ") + name + " fd");
    return copy;
}

struct stat stat_sealed(int fd, const char* name) {
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & size_seals) != size_seals) {
        throw RegionInvalid(std::string(name) + " fd is not a memfd sealed against changes of its size");
    }
    struct stat status;
    if (fstat(fd, &status) != 0) throw_errno(std::string("fstat of the ") + name + " fd");
    return status;
}

void expect_equal(const char* what, uint64_t have, uint64_t expected) {
    if (have == expected) return;
    throw RegionInvalid(std::string(what) + " is " + std::to_string(have) + ", expected " + std::to_string(expected));
}

// An open file description of its own for the file behind `fd`: locks belong to descriptions.
UniqueFd reopen(int fd) {
    UniqueFd own(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC));
    if (own.get() < 0) throw_errno("opening a memfd of a region anew");
    return own;
}

// Never blocks for good: whoever asks is_held() has an exclusive lock for an instant, and a client could keep one.
void lock_shared(int fd, unsigned patience_ms) {
    for (unsigned i = 0; flock(fd, LOCK_SH | LOCK_NB) != 0; ++i) {
        if (errno != EWOULDBLOCK || i == patience_ms) throw_errno("locking a memfd of a region");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

RegionHeader read_header(int data_fd, int directory_fd) {
    const struct stat data = stat_sealed(data_fd, "data");
    const struct stat directory = stat_sealed(directory_fd, "directory");
    RegionHeader header;
    const ssize_t num_read = pread(directory_fd, &header, sizeof(header), 0);
    if (num_read < 0) throw_errno("reading a region header");
    expect_equal("bytes read of the region header", static_cast<uint64_t>(num_read), sizeof(header));
    if (!std::equal(header.magic, header.magic + sizeof(header.magic), region_magic)) {
        throw RegionInvalid("directory fd holds no region header");
    }
    expect_equal("region version", header.version, region_version);
    expect_equal("record size in bytes", header.record_bytes, sizeof(FrameRecord));
    const RegionShape shape{header.num_frames, header.frame_bytes};
    try {
        shape.check();
    } catch (const std::invalid_argument& error) {
        throw RegionInvalid(error.what());
    }
    expect_equal("stride in bytes", header.stride_bytes, shape.stride_bytes());
    expect_equal("directory size in bytes", static_cast<uint64_t>(directory.st_size), shape.directory_bytes());
    expect_equal("data size in bytes", static_cast<uint64_t>(data.st_size), header.data_bytes);
    if (header.data_bytes < shape.data_bytes()) throw RegionInvalid("data memfd is smaller than its frames");
    expect_equal("inode of the data memfd", data.st_ino, header.data_inode);
    return header;
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

UniqueFd::~UniqueFd() {
    if (fd_ >= 0) close(fd_);
}

Mapping::Mapping(int fd, size_t bytes) : Mapping(fd, bytes, PROT_READ | PROT_WRITE) {}

Mapping::Mapping(int fd, size_t bytes, int protection) : bytes_(bytes), mapped_by_(getpid()) {
    void* address = map_shared(fd, bytes, protection);
    data_ = static_cast<std::byte*>(address);
    madvise(address, bytes, MADV_HUGEPAGE);  // advice: most systems keep shared memory in small pages
    if (madvise(address, bytes, MADV_DONTFORK) != 0) {
        munmap(address, bytes);
        throw_errno("madvise(MADV_DONTFORK) of a region");
    }
}

Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_by_, other.mapped_by_);
    return *this;
}

Mapping::~Mapping() {
    if (data_ != nullptr && mapped_by_ == getpid()) munmap(data_, bytes_);
}

uint64_t RegionShape::stride_bytes() const { return round_up(frame_bytes, system_page_bytes); }
uint64_t RegionShape::data_bytes() const { return num_frames * stride_bytes(); }
uint64_t RegionShape::directory_bytes() const {
    return round_up(header_bytes + num_frames * sizeof(FrameRecord), system_page_bytes);
}

void RegionShape::check() const {
    constexpr uint64_t max_bytes = uint64_t{1} << 62;
    if (num_frames < 1 || num_frames > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
        throw std::invalid_argument("num_frames is " + std::to_string(num_frames) + ", expected [1, 2^31)");
    }
    if (frame_bytes < 1 || frame_bytes > max_bytes / num_frames - system_page_bytes) {
        throw std::invalid_argument("frame_bytes is " + std::to_string(frame_bytes) +
                                    ", expected at least 1 and at most 2^62 bytes for all frames");
    }
}

Region::Region(const RegionHeader& header, UniqueFd data_fd, UniqueFd directory_fd)
    : header_(header),
      data_fd_(std::move(data_fd)),
      directory_fd_(std::move(directory_fd)),
      data_(data_fd_.get(), header.data_bytes),
      directory_(directory_fd_.get(), RegionShape{header.num_frames, header.frame_bytes}.directory_bytes()),
      records_(reinterpret_cast<FrameRecord*>(directory_.data() + header_bytes)) {}

void Region::hold(Side side, unsigned patience_ms) {
    const std::lock_guard lock(holding_);
    Mapping& held = holds_[static_cast<int>(side)];
    if (held.data() != nullptr) return;
    const UniqueFd own = reopen(side == Side::engine ? data_fd() : directory_fd());
    lock_shared(own.get(), patience_ms);
    struct stat status;
    if (fstat(own.get(), &status) != 0) throw_errno("fstat of a memfd");
    held = Mapping(own.get(), static_cast<size_t>(status.st_blksize), PROT_NONE);
}

void Region::lock_memory() const {
    for (const Mapping* mapping : {&data_, &directory_}) {
        if (mlock(mapping->data(), mapping->bytes()) != 0) throw_errno("locking the memory of a region");
    }
}

bool Region::is_held(Side side) const {
    const UniqueFd other = reopen(side == Side::engine ? data_fd() : directory_fd());
    if (flock(other.get(), LOCK_EX | LOCK_NB) == 0) return false;
    if (errno != EWOULDBLOCK) throw_errno("asking for the lock of a region");
    return true;
}

std::shared_ptr<Region> Region::create(const RegionShape& shape, unsigned touch_threads, size_t huge_page_bytes) {
    shape.check();
    const size_t data_bytes = round_up(shape.data_bytes(), huge_page_bytes == 0 ? 1 : huge_page_bytes);
    UniqueFd data_fd = make_memfd("cachesvc-data", data_bytes, huge_page_bytes);
    UniqueFd directory_fd = make_memfd("cachesvc-directory", shape.directory_bytes(), 0);
    struct stat data;
    if (fstat(data_fd.get(), &data) != 0) throw_errno("fstat of a memfd");
    RegionHeader header{{}, region_version, sizeof(FrameRecord), {}, shape.num_frames, shape.frame_bytes,
                        shape.stride_bytes(), data_bytes, data.st_ino};
    std::copy(std::begin(region_magic), std::end(region_magic), header.magic);
    if (getentropy(header.region_id.data(), header.region_id.size()) != 0) throw_errno("getentropy");
    if (pwrite(directory_fd.get(), &header, sizeof(header), 0) != sizeof(header)) throw_errno("writing region header");
    std::shared_ptr<Region> region(new Region(header, std::move(data_fd), std::move(directory_fd)));
    populate_in_parallel(region->directory_.data(), region->directory_.bytes(), touch_threads);
    if (touch_threads > 0) populate_in_parallel(region->data_.data(), region->data_.bytes(), touch_threads);
    seal(region->data_fd());
    seal(region->directory_fd());
    return region;
}

std::shared_ptr<Region> Region::open(int data_fd, int directory_fd) {
    UniqueFd own_data_fd = duplicate(data_fd, "data");
    UniqueFd own_directory_fd = duplicate(directory_fd, "directory");
    const RegionHeader header = read_header(own_data_fd.get(), own_directory_fd.get());
    return std::shared_ptr<Region>(new Region(header, std::move(own_data_fd), std::move(own_directory_fd)));
}

}  // namespace cachesvc
