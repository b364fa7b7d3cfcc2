#include "file_transfer.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <vector>

#include "fault_guard.hpp"

namespace cachesvc {
namespace {

constexpr size_t bounce_bytes = 256 * 1024;
constexpr size_t max_pieces = 512;  // below IOV_MAX (1024), and a vector that stays small

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};

// One per thread: I/O threads are few and long-lived.
uint8_t* bounce_buffer() {
    thread_local std::unique_ptr<uint8_t, Free> buffer(
        static_cast<uint8_t*>(std::aligned_alloc(direct_alignment, bounce_bytes)));
    return buffer.get();
}

enum class Direction { write, read };

// Gathers pieces of one object until a system call is worth it, then moves them.
class Transfer {
   public:
    Transfer(int fd, size_t alignment, Direction direction)
        : fd_(fd), alignment_(alignment), direction_(direction), bounce_(alignment > 1 ? bounce_buffer() : nullptr) {}

    int run(const Segments::Object& object) {
        if (alignment_ > 1 && !bounce_) return ENOMEM;
        for (size_t i = 0; i < object.lengths.size(); ++i)
            if (int error = add(reinterpret_cast<uint8_t*>(object.addresses[i]), object.lengths[i]); error || ended_)
                return error;
        return flush();
    }

    size_t moved() const { return offset_; }

   private:
    // A stretch of the bounce buffer and the memory it stands for.
    struct Stand {
        size_t at;       // in the bounce buffer
        size_t pending;  // bytes of the same flush before it
        uint8_t* memory;
        size_t bytes;
    };

    int add(uint8_t* memory, size_t bytes) {
        while (bytes > 0) {
            const size_t past = (offset_ + pending_) % alignment_;
            const bool aligned = past == 0 && reinterpret_cast<uintptr_t>(memory) % alignment_ == 0;
            size_t take;
            if (aligned && bytes >= alignment_) {
                take = bytes / alignment_ * alignment_;
                pieces_.push_back({memory, take});
            } else {
                take = std::min(bytes, bounce_bytes - bounced_);
                // An aligned remainder of this segment can still go direct once the file position is aligned again.
                if (reinterpret_cast<uintptr_t>(memory) % alignment_ == past) take = std::min(take, alignment_ - past);
                if (!add_bounce(memory, take)) return EFAULT;
            }
            pending_ += take;
            memory += take;
            bytes -= take;
            const bool is_boundary = (offset_ + pending_) % alignment_ == 0;
            if (is_boundary && (pieces_.size() >= max_pieces || bounced_ == bounce_bytes)) {
                if (int error = flush(); error || ended_) return error;
            }
        }
        return 0;
    }

    // False: the memory faults, as the kernel would say for an aligned piece.
    bool add_bounce(uint8_t* memory, size_t bytes) {
        uint8_t* place = bounce_ + bounced_;
        if (direction_ == Direction::read) stands_.push_back({bounced_, pending_, memory, bytes});
        const bool adjoins =
            !pieces_.empty() && static_cast<uint8_t*>(pieces_.back().iov_base) + pieces_.back().iov_len == place;
        if (adjoins) pieces_.back().iov_len += bytes;
        else pieces_.push_back({place, bytes});
        bounced_ += bytes;
        return direction_ == Direction::read || guarded_copy(place, memory, bytes);
    }

    // Moves all pending pieces, however often the kernel does part of it.
    int flush() {
        size_t first = 0;
        size_t done = 0;
        while (done < pending_ && !ended_) {
            const int count = static_cast<int>(std::min<size_t>(pieces_.size() - first, IOV_MAX));
            const off_t at = static_cast<off_t>(offset_ + done);
            const ssize_t result = direction_ == Direction::write ? pwritev(fd_, &pieces_[first], count, at)
                                                                  : preadv(fd_, &pieces_[first], count, at);
            if (result < 0 && errno == EINTR) continue;
            if (result < 0) return errno;
            if (result == 0 && direction_ == Direction::write) return EIO;
            ended_ = result == 0;
            done += static_cast<size_t>(result);
            for (size_t left = static_cast<size_t>(result); left > 0;) {
                iovec& piece = pieces_[first];
                const size_t used = std::min(left, piece.iov_len);
                piece.iov_base = static_cast<uint8_t*>(piece.iov_base) + used;
                piece.iov_len -= used;
                left -= used;
                first += piece.iov_len == 0;
            }
            // A direct read that ends off the alignment has met the end of the file; going on would be EINVAL.
            if (direction_ == Direction::read && done % alignment_ != 0) ended_ = true;
        }
        for (const Stand& stand : stands_)
            if (stand.pending < done &&
                !guarded_copy(stand.memory, bounce_ + stand.at, std::min(stand.bytes, done - stand.pending)))
                return EFAULT;
        offset_ += done;
        pending_ = bounced_ = 0;
        pieces_.clear();
        stands_.clear();
        return 0;
    }

    const int fd_;
    const size_t alignment_;
    const Direction direction_;
    uint8_t* const bounce_;
    std::vector<iovec> pieces_;
    std::vector<Stand> stands_;
    size_t offset_ = 0;   // file bytes moved
    size_t pending_ = 0;  // bytes in pieces_
    size_t bounced_ = 0;  // bytes of the bounce buffer in use
    bool ended_ = false;
};

}  // namespace

int write_object(int fd, const Segments::Object& object, size_t alignment) {
    return Transfer(fd, alignment, Direction::write).run(object);
}

int read_object(int fd, const Segments::Object& object, size_t alignment, size_t* got) {
    Transfer transfer(fd, alignment, Direction::read);
    const int error = transfer.run(object);
    *got = transfer.moved();
    return error;
}

}  // namespace cachesvc
