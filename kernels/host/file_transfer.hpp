// Whole objects between memory segments and an open file, in as few system calls as possible.
//
// DESIGN. With O_DIRECT, file offset, address and length of every piece must be aligned. Segments are cut: what is
// aligned goes straight between the file and the segment; the rest passes through a bounce buffer, so that any segments
// work and only badly placed ones pay for it. An alignment of 1 makes every segment direct: buffered files take the
// same path.
#pragma once
#include <cstddef>
#include <cstdint>

#include "segments.hpp"

namespace cachesvc {

constexpr size_t direct_alignment = 4096;

// Writes the object from offset 0. Returns 0 or an errno value. alignment: 1 or direct_alignment; then the object's
// length must be a multiple of it.
int write_object(int fd, const Segments::Object& object, size_t alignment);
// Reads from offset 0 until the segments are full or the file ends; *got is how many bytes arrived. Returns 0 or errno.
int read_object(int fd, const Segments::Object& object, size_t alignment, size_t* got);

}  // namespace cachesvc
