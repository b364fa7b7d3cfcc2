#include "file_io.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#include "fault_guard.hpp"
#include "file_transfer.hpp"

namespace cachesvc {
namespace {

constexpr int max_reads = 3;  // of a file that is another one, or was touched, after each
constexpr mode_t file_mode = 0600;
constexpr size_t names_grain = 16;  // names per turn of a thread, where each takes microseconds
constexpr char digits[] = "0123456789abcdef";
constexpr char page_suffix[] = ".page";
constexpr char temporary_suffix[] = ".tmp";
constexpr char set_aside_name[] = "set-aside";

class Descriptor {
   public:
    explicit Descriptor(int fd) : fd_(fd) {}
    ~Descriptor() {
        if (fd_ >= 0) close(fd_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    operator int() const { return fd_; }

   private:
    const int fd_;
};

std::string shard_name(const ObjectId& id) { return {digits[id.bytes[0] >> 4], digits[id.bytes[0] & 15]}; }

std::string hex(const ObjectId& id) {
    std::string text(ObjectId::size * 2, '0');
    for (size_t i = 0; i < ObjectId::size; ++i) {
        text[2 * i] = digits[id.bytes[i] >> 4];
        text[2 * i + 1] = digits[id.bytes[i] & 15];
    }
    return text;
}

std::string page_path(const ObjectId& id) { return shard_name(id) + '/' + hex(id) + page_suffix; }
std::string set_aside_path(const ObjectId& id) { return std::string(set_aside_name) + '/' + hex(id) + page_suffix; }

bool parse_page_name(const char* name, ObjectId& id) {
    if (std::strlen(name) != ObjectId::size * 2 + std::strlen(page_suffix)) return false;
    if (std::strcmp(name + ObjectId::size * 2, page_suffix) != 0) return false;
    auto value = [](char digit) -> int {
        const char* place = std::strchr(digits, digit);
        return place && digit ? static_cast<int>(place - digits) : -1;
    };
    for (size_t i = 0; i < ObjectId::size; ++i) {
        const int high = value(name[2 * i]), low = value(name[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        id.bytes[i] = static_cast<uint8_t>(high << 4 | low);
    }
    return true;
}

bool ends_with(const char* name, const char* suffix) {
    const size_t length = std::strlen(name), tail = std::strlen(suffix);
    return length > tail && std::strcmp(name + length - tail, suffix) == 0;
}

// Renames unless the target exists (EEXIST). Some file systems cannot say so in one step; link + unlink is the same
// there.
int rename_new(int directory, const char* source, const char* target) {
    if (renameat2(directory, source, directory, target, RENAME_NOREPLACE) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) return errno;
    if (linkat(directory, source, directory, target, 0) != 0) return errno;
    return unlinkat(directory, source, 0) == 0 ? 0 : errno;
}

// Whether somebody has put a folder, a pipe or the like under an object's name.
bool is_foreign(int directory, const std::string& path) {
    struct stat status;
    return fstatat(directory, path.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISREG(status.st_mode);
}

// Whether the open file starts with the segments' bytes (or all of it does, when it is shorter).
bool starts_with(int fd, const Segments::Object& object) {
    uint8_t buffer[65536];
    off_t at = 0;
    for (size_t i = 0; i < object.lengths.size(); ++i) {
        const auto* seen = reinterpret_cast<const uint8_t*>(object.addresses[i]);
        for (size_t left = object.lengths[i]; left > 0;) {
            const ssize_t got = pread(fd, buffer, std::min(left, sizeof buffer), at);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) return false;
            if (got == 0) return true;
            if (!guarded_equal(buffer, seen, static_cast<size_t>(got))) return false;
            seen += got;
            at += got;
            left -= static_cast<size_t>(got);
        }
    }
    return true;
}

bool is_same(const timespec& one, const timespec& other) {
    return one.tv_sec == other.tv_sec && one.tv_nsec == other.tv_nsec;
}

// Whether a file may become another object's: it is as a writer makes it, nobody else has it, by another name or by its
// rights, and its times are fine enough to tell a reader. Those that are whole microseconds by chance are no loss.
bool is_reusable(const struct stat& status) {
    return S_ISREG(status.st_mode) && status.st_nlink == 1 && status.st_uid == geteuid() &&
           (status.st_mode & 07777) == file_mode && status.st_mtim.tv_nsec % 1000 != 0;
}

// Whatever somebody put under an object's name, opening it neither waits (for the other end of a pipe) nor leads away.
constexpr int open_object = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW;

}  // namespace

FileIo::FileIo(int directory_fd, std::string writer, bool direct, size_t num_threads)
    : directory_(fcntl(directory_fd, F_DUPFD_CLOEXEC, 0)),
      writer_(std::move(writer)),
      direct_(direct),
      threads_(num_threads) {
    if (directory_ < 0) throw std::system_error(errno, std::generic_category(), "object directory");
}

FileIo::~FileIo() { close(directory_); }

std::string FileIo::temporary_path(const ObjectId& id, uint64_t number) const {
    return shard_name(id) + '/' + hex(id) + '.' + writer_ + '.' + std::to_string(number) + temporary_suffix;
}

// ---- put ----

void FileIo::write(const ObjectId* ids, const Segments& segments, const uint8_t* which, const int64_t* modified_ns,
                   uint64_t* numbers, int32_t* errors) {
    threads_.each(segments.count, 1, [&](size_t i) {
        errors[i] = not_tried;
        if (!which[i]) return;
        const bool is_there = numbers[i] != 0;
        if (!is_there) numbers[i] = next_number_.fetch_add(1);
        errors[i] = write_one(ids[i], segments.object(i), modified_ns[i], numbers[i], is_there);
    });
}

int FileIo::write_one(const ObjectId& id, const Segments::Object& object, int64_t modified_ns, uint64_t number,
                      bool is_there) {
    const std::string path = temporary_path(id, number);
    const Descriptor file(open_temporary(id, path, is_there));
    if (file < 0) return errno;
    int error = write_object(file, object, direct_ ? direct_alignment : 1);
    if (!error) {
        const timespec when{modified_ns / 1'000'000'000, modified_ns % 1'000'000'000};
        const timespec times[2] = {when, when};
        if (futimens(file, times) != 0) error = errno;
    }
    if (error) unlinkat(directory_, path.c_str(), 0);
    return error;
}

// A descriptor, or -1 and errno. A file that is there and cannot be written (another user's) is replaced.
int FileIo::open_temporary(const ObjectId& id, const std::string& path, bool is_there) {
    const int common = O_WRONLY | O_CLOEXEC | (direct_ ? O_DIRECT : 0), create = common | O_CREAT | O_EXCL;
    if (is_there) {
        const int opened = openat(directory_, path.c_str(), common | O_NOFOLLOW);
        if (opened >= 0) return opened;
        unlinkat(directory_, path.c_str(), 0);
    }
    const int opened = openat(directory_, path.c_str(), create, file_mode);
    if (opened >= 0 || errno != ENOENT) return opened;
    if (mkdirat(directory_, shard_name(id).c_str(), 0700) != 0 && errno != EEXIST) return -1;  // its shard's first
    return openat(directory_, path.c_str(), create, file_mode);
}

void FileIo::publish(const ObjectId* ids, const uint64_t* numbers, const uint8_t* which, size_t count,
                     int32_t* errors) {
    threads_.each(count, names_grain, [&](size_t i) {
        errors[i] = not_tried;
        if (!which[i]) return;
        const std::string path = temporary_path(ids[i], numbers[i]), name = page_path(ids[i]);
        errors[i] = rename_new(directory_, path.c_str(), name.c_str());
        if (errors[i] == EEXIST && is_foreign(directory_, name)) errors[i] = EINVAL;  // as a read says
        if (errors[i]) unlinkat(directory_, path.c_str(), 0);
    });
}

void FileIo::discard(const ObjectId* ids, const uint64_t* numbers, const uint8_t* which, size_t count) {
    threads_.each(count, names_grain, [&](size_t i) {
        if (which[i]) unlinkat(directory_, temporary_path(ids[i], numbers[i]).c_str(), 0);
    });
}

// ---- get ----

void FileIo::read(const ObjectId* ids, const Segments& segments, int32_t* errors) {
    threads_.each(segments.count, 1, [&](size_t i) { errors[i] = read_one(ids[i], segments.object(i)); });
}

int FileIo::read_one(const ObjectId& id, const Segments::Object& object) {
    const std::string path = page_path(id);
    for (int attempt = 0; attempt < max_reads; ++attempt) {
        bool is_whole = false;
        const int result = read_once(path, object, &is_whole);
        if (is_whole || result > 0) return result;
    }
    return ESTALE;
}

// is_whole: the file was this object's all the time. Else, without an error, anything may have been read.
int FileIo::read_once(const std::string& path, const Segments::Object& object, bool* is_whole) {
    const Descriptor file(openat(directory_, path.c_str(), open_object | (direct_ ? O_DIRECT : 0)));
    if (file < 0) return errno;
    struct stat before, after;
    if (fstat(file, &before) != 0) return errno;
    if (!S_ISREG(before.st_mode)) return EINVAL;
    size_t got = 0;
    if (int error = read_object(file, object, direct_ ? direct_alignment : 1, &got)) return error;
    if (fstatat(directory_, path.c_str(), &after, AT_SYMLINK_NOFOLLOW) != 0) return errno;
    // By its number the file may be the same and have been another object's in between. Its times tell: each writer
    // gives it one of modification of its own when its bytes are there, and the system one of every change, which on
    // older systems is as coarse as a tick.
    *is_whole = before.st_ino == after.st_ino && before.st_dev == after.st_dev &&
                is_same(before.st_mtim, after.st_mtim) && is_same(before.st_ctim, after.st_ctim);
    const size_t wanted = object.bytes();
    return got == wanted && static_cast<size_t>(before.st_size) == wanted ? done : wrong_length;
}

void FileIo::sizes(const ObjectId* ids, size_t count, int64_t* bytes) {
    threads_.each(count, names_grain, [&](size_t i) {
        struct stat status;
        const int result = fstatat(directory_, page_path(ids[i]).c_str(), &status, AT_SYMLINK_NOFOLLOW);
        if (result == 0) bytes[i] = S_ISREG(status.st_mode) ? status.st_size : -1;
        else bytes[i] = errno == ENOENT ? -1 : -1 - errno;
    });
}

// ---- removing ----

void FileIo::remove(const ObjectId* ids, const uint8_t* set_aside, size_t count, int32_t* errors) {
    threads_.each(count, names_grain, [&](size_t i) {
        const std::string path = set_aside[i] ? set_aside_path(ids[i]) : page_path(ids[i]);
        errors[i] = unlinkat(directory_, path.c_str(), 0) == 0 ? done : errno;
    });
}

void FileIo::reuse(const ObjectId* victims, const ObjectId* ids, const int64_t* bytes, size_t count, uint64_t* numbers,
                   int32_t* errors) {
    threads_.each(count, names_grain, [&](size_t i) {
        numbers[i] = 0;
        errors[i] = reuse_one(victims[i], ids[i], bytes[i], &numbers[i]);
    });
}

int FileIo::reuse_one(const ObjectId& victim, const ObjectId& id, int64_t bytes, uint64_t* number) {
    const std::string path = page_path(victim);
    const auto removed = [&](const std::string& name) {
        return unlinkat(directory_, name.c_str(), 0) == 0 ? done : errno;
    };
    struct stat status;
    if (fstatat(directory_, path.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return errno;
    if (!is_reusable(status)) return removed(path);
    const uint64_t next = next_number_.fetch_add(1);
    const std::string kept = temporary_path(id, next);
    const auto renamed = [&] {
        return renameat(directory_, path.c_str(), directory_, kept.c_str()) == 0 ? done : errno;
    };
    int error = renamed();
    if (error == ENOENT && (mkdirat(directory_, shard_name(id).c_str(), 0700) == 0 || errno == EEXIST))
        error = renamed();
    if (error) return removed(path);  // which tells a victim that is gone from a shard that cannot be made
    // Only what is under a name that nobody looks for stays as it is.
    if (fstatat(directory_, kept.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 || !is_reusable(status) ||
        (status.st_size > bytes && !cut(kept, bytes)))
        return removed(kept);
    *number = next;
    return done;
}

bool FileIo::cut(const std::string& path, off_t bytes) {
    const Descriptor file(openat(directory_, path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
    return file >= 0 && ftruncate(file, bytes) == 0;
}

void FileIo::set_aside(const ObjectId* ids, const Segments& segments, int32_t* errors) {
    threads_.each(segments.count, 1, [&](size_t i) { errors[i] = set_aside_one(ids[i], segments.object(i)); });
}

int FileIo::set_aside_one(const ObjectId& id, const Segments::Object& object) {
    const std::string path = page_path(id), target = set_aside_path(id);
    const Descriptor file(openat(directory_, path.c_str(), open_object));
    if (file < 0) return errno;
    if (!starts_with(file, object)) return different;
    int error = rename_new(directory_, path.c_str(), target.c_str());
    if (error == ENOENT && (mkdirat(directory_, set_aside_name, 0700) == 0 || errno == EEXIST))
        error = rename_new(directory_, path.c_str(), target.c_str());
    if (error == EEXIST) return unlinkat(directory_, path.c_str(), 0) == 0 ? kept_earlier : errno;
    if (error) return error;
    // Between the comparison and the rename another writer may have put a good object under the name, in the same file
    // even: put that back.
    struct stat compared, moved;
    if (fstat(file, &compared) != 0 || fstatat(directory_, target.c_str(), &moved, AT_SYMLINK_NOFOLLOW) != 0)
        return errno;
    if (compared.st_ino == moved.st_ino && starts_with(file, object)) return done;
    rename_new(directory_, target.c_str(), path.c_str());
    return different;
}

// ---- scan ----

FileIo::Found FileIo::scan(size_t begin, size_t end) {
    std::vector<Found> parts(end - begin);
    std::vector<int> errors(end - begin, 0);
    threads_.each(parts.size(), 1, [&](size_t i) {
        const size_t shard = begin + i;
        const std::string name{digits[shard >> 4], digits[shard & 15]};
        try {
            scan_directory(name, parts[i]);
        } catch (const std::system_error& error) {
            errors[i] = error.code().value();
        }
    });
    Found all;
    for (size_t i = 0; i < parts.size(); ++i) {
        if (errors[i]) throw std::system_error(errors[i], std::generic_category(), "scan of an object directory");
        all.ids.insert(all.ids.end(), parts[i].ids.begin(), parts[i].ids.end());
        all.bytes.insert(all.bytes.end(), parts[i].bytes.begin(), parts[i].bytes.end());
        all.modified_ns.insert(all.modified_ns.end(), parts[i].modified_ns.begin(), parts[i].modified_ns.end());
        all.temporary.insert(all.temporary.end(), parts[i].temporary.begin(), parts[i].temporary.end());
    }
    return all;
}

FileIo::Found FileIo::scan_set_aside() {
    Found found;
    scan_directory(set_aside_name, found);
    return found;
}

void FileIo::scan_directory(const std::string& name, Found& found) {
    const int opened = openat(directory_, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (opened < 0 && errno == ENOENT) return;
    DIR* listing = opened < 0 ? nullptr : fdopendir(opened);
    if (!listing) {
        const int error = errno;
        if (opened >= 0) close(opened);
        throw std::system_error(error, std::generic_category(), name);
    }
    const std::unique_ptr<DIR, int (*)(DIR*)> closing(listing, closedir);
    while (const dirent* item = readdir(listing)) {
        ObjectId id;
        if (ends_with(item->d_name, temporary_suffix)) {
            found.temporary.push_back(name + '/' + item->d_name);
        } else if (parse_page_name(item->d_name, id) && (name == shard_name(id) || name == set_aside_name)) {
            struct stat status;
            if (fstatat(opened, item->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;  // removed meanwhile
            if (!S_ISREG(status.st_mode)) continue;
            found.ids.push_back(id);
            found.bytes.push_back(status.st_size);
            found.modified_ns.push_back(status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec);
        }
    }
}

}  // namespace cachesvc
