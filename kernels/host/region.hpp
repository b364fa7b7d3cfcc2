// A region: shared memory cut into equal frames (the data memfd) and one record per frame (the directory memfd).
//
// DESIGN. Both memfds are sealed against any change of size, so a mapping that was valid once stays valid. The
// directory starts with a 4096-byte header, written once before the fds are handed out; whoever opens a region reads it
// with pread, checks it, and never looks at it again, because a client could change it later. Mappings are not
// inherited by fork.
//
// Who is dead? Each side of a region holds one memfd: the engine the data, the node the directory. To hold it is to map
// a page of it through an open file description of one's own that has a shared lock. The description is not in any fd
// table and the mapping not in a forked child, so the lock goes when the holder unmaps or its process is gone, and at no
// other time: an exclusive lock can then be had, and nobody of that side writes the region any more.
//   directory  [0, 4096) RegionHeader   [4096, 4096 + 64 n) FrameRecord, frame by frame   padded to 4096
//   data       frame i at [i * stride, i * stride + frame_bytes)   stride: frame_bytes rounded up to 4096
//
// Threads: the functions that map and unmap are for one thread; the mapped memory is shared under the rules of
// frame_record.hpp.
#pragma once
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "frame_record.hpp"

namespace cachesvc {

using RegionId = std::array<uint8_t, 16>;

struct RegionHeader {
    char magic[8];  // "CS1REGN\n"
    uint32_t version;
    uint32_t record_bytes;
    RegionId region_id;
    uint64_t num_frames;
    uint64_t frame_bytes;
    uint64_t stride_bytes;
    uint64_t data_bytes;
    uint64_t data_inode;  // ties the directory to its data memfd
};

// What was handed in as a region is not one (of this version).
class RegionInvalid : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

class UniqueFd {
public:
    explicit UniqueFd(int fd = -1) : fd_(fd) {}
    UniqueFd(UniqueFd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    UniqueFd& operator=(UniqueFd&& other) noexcept;
    ~UniqueFd();
    int get() const { return fd_; }

private:
    int fd_;
};

// A shared mapping of the first `bytes` of an fd, read-write unless `protection` says otherwise.
class Mapping {
public:
    Mapping() = default;
    Mapping(int fd, size_t bytes);
    Mapping(int fd, size_t bytes, int protection);
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    ~Mapping();
    std::byte* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    std::byte* data_ = nullptr;
    size_t bytes_ = 0;
    pid_t mapped_by_ = 0;  // a forked child has no such mapping to remove
};

struct RegionShape {
    uint64_t num_frames;
    uint64_t frame_bytes;
    uint64_t stride_bytes() const;
    uint64_t data_bytes() const;  // without rounding to huge pages
    uint64_t directory_bytes() const;
    // Throws std::invalid_argument for no frames, empty frames, or more than int32 frame numbers and 2^62 bytes can
    // hold.
    void check() const;
};

// Whose life a lock tells: the engine holds the data memfd, the node the directory memfd.
enum class Side { engine, node };

class Region {
public:
    // Makes both memfds, reserves every page with `touch_threads` threads (0: leaves the data to first use), seals.
    // `huge_page_bytes`: 0, or a size of which the system keeps enough pages free. Throws std::system_error.
    static std::shared_ptr<Region> create(const RegionShape& shape, unsigned touch_threads, size_t huge_page_bytes);
    // Maps an existing region; the fds are duplicated, the caller keeps its own. Throws RegionInvalid,
    // std::system_error.
    static std::shared_ptr<Region> open(int data_fd, int directory_fd);

    const RegionHeader& header() const { return header_; }
    size_t num_frames() const { return header_.num_frames; }
    size_t frame_bytes() const { return header_.frame_bytes; }
    int data_fd() const { return data_fd_.get(); }
    int directory_fd() const { return directory_fd_.get(); }
    std::byte* data() const { return data_.data(); }
    std::byte* frame(int32_t frame) const { return data_.data() + static_cast<size_t>(frame) * header_.stride_bytes; }
    FrameRecord& record(int32_t frame) const { return records_[frame]; }

    // Holds the region for `side` until this object goes; idempotent. Throws std::system_error: EWOULDBLOCK when
    // somebody keeps an exclusive lock on that memfd for longer than `patience_ms`. Any thread.
    void hold(Side side, unsigned patience_ms);
    // Keeps all of its memory from being swapped out for as long as this object maps it; idempotent. Throws
    // std::system_error: EPERM, ENOMEM or EAGAIN where the process may not lock so much. Any thread.
    void lock_memory() const;
    // Whether any process holds the region for `side`, this one included. May say true for a moment while somebody else
    // asks, never false while it is held. Any thread.
    bool is_held(Side side) const;

private:
    Region(const RegionHeader& header, UniqueFd data_fd, UniqueFd directory_fd);

    RegionHeader header_;
    UniqueFd data_fd_, directory_fd_;
    std::mutex holding_;
    Mapping holds_[2];  // before the mappings they speak for, so that they go after them
    Mapping data_, directory_;
    FrameRecord* records_;
};

}  // namespace cachesvc
