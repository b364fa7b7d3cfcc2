// A directory of objects, one file each, in batches on a pool of threads.
//
// DESIGN. An object lives at  XX/<72 hex digits of its id>.page,  XX being its first two digits. It is written to
// XX/<72 hex>.<writer>.<number>.tmp  in the same directory and then renamed without replacing, so a name either is
// absent or holds a whole object, and of two writers of one id the second learns that it came second. The writer's
// token in the name tells a stale temporary file from a live writer's. Bad objects move to  set-aside/<72 hex>.page.
//
// The file of an object that leaves for the room of another becomes that one's: it loses its name first and is written
// over then. Giving blocks back and taking others halves the rate of a thin disk, and on a full one there may be none.
// So what a reader has opened may change under it: a read counts only if the file still has its name after it, and its
// times: of modification, which every writer sets to the nanosecond, and of change.
//
// Nothing is synced: after a power failure a file may be short or hold zeros, which the checksum in its header reveals.
// Everything is relative to one directory descriptor. No state is kept beyond that, a counter and the threads.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "object_id.hpp"
#include "segments.hpp"
#include "thread_pool.hpp"

namespace cachesvc {

class FileIo {
   public:
    // directory_fd is duplicated. direct: O_DIRECT for reads and writes, see file_transfer.hpp. Throws
    // std::system_error.
    FileIo(int directory_fd, std::string writer, bool direct, size_t num_threads);
    ~FileIo();
    FileIo(const FileIo&) = delete;
    FileIo& operator=(const FileIo&) = delete;

    static constexpr size_t num_shards = 256;
    // Results beside errno values, which are positive.
    static constexpr int32_t done = 0, wrong_length = -1, different = -2, kept_earlier = -3, not_tried = -4;

    // Writes temporary files of objects i with which[i], modified at modified_ns[i]; numbers[i] names each for publish
    // and discard. Where it is not 0 the file is there already, as long at most (`reuse`). One that failed is removed.
    void write(const ObjectId* ids, const Segments& segments, const uint8_t* which, const int64_t* modified_ns,
               uint64_t* numbers, int32_t* errors);
    // Gives temporary files their names; EEXIST (and the file is gone) where the object is there already, EINVAL where
    // something is that is no file. Files of objects that fail are removed.
    void publish(const ObjectId* ids, const uint64_t* numbers, const uint8_t* which, size_t count, int32_t* errors);
    void discard(const ObjectId* ids, const uint64_t* numbers, const uint8_t* which, size_t count);

    // wrong_length: the file is longer or shorter than the segments; their start is filled as far as it goes.
    void read(const ObjectId* ids, const Segments& segments, int32_t* errors);
    void remove(const ObjectId* ids, const uint8_t* set_aside, size_t count, int32_t* errors);
    // Removes objects, but keeps each one's file, cut to bytes[i] where it is longer, as temporary file of another
    // object: numbers[i] names it. 0: there is none, because of an error or because the file is not to be written over:
    // it has other names, another user's rights, or times too coarse to tell a reader.
    void reuse(const ObjectId* victims, const ObjectId* ids, const int64_t* bytes, size_t count, uint64_t* numbers,
               int32_t* errors);
    // Bytes, -1 where there is none, -errno - 1 for other errors.
    void sizes(const ObjectId* ids, size_t count, int64_t* bytes);
    // Moves objects to set-aside/ whose first bytes equal the segments: done, kept_earlier (one of that id is there
    // already, so this one was removed), different (it was replaced meanwhile), or an errno.
    void set_aside(const ObjectId* ids, const Segments& segments, int32_t* errors);

    struct Found {
        std::vector<ObjectId> ids;
        std::vector<int64_t> bytes, modified_ns;
        std::vector<std::string> temporary;  // paths below the directory
    };
    // Reads the directories of shards [begin, end) without reading a payload. Throws std::system_error.
    Found scan(size_t begin, size_t end);
    Found scan_set_aside();

   private:
    int write_one(const ObjectId& id, const Segments::Object& object, int64_t modified_ns, uint64_t number,
                  bool is_there);
    int open_temporary(const ObjectId& id, const std::string& path, bool is_there);
    int read_one(const ObjectId& id, const Segments::Object& object);
    int read_once(const std::string& path, const Segments::Object& object, bool* is_whole);
    bool cut(const std::string& path, off_t bytes);
    int reuse_one(const ObjectId& victim, const ObjectId& id, int64_t bytes, uint64_t* number);
    int set_aside_one(const ObjectId& id, const Segments::Object& object);
    void scan_directory(const std::string& name, Found& found);
    std::string temporary_path(const ObjectId& id, uint64_t number) const;

    const int directory_;
    const std::string writer_;
    const bool direct_;
    std::atomic<uint64_t> next_number_{1};
    ThreadPool threads_;
};

}  // namespace cachesvc
