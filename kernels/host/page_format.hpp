// The header of a stored page: what makes one object in any backend describe and check itself.
//
// DESIGN. 128 bytes, integers little-endian, followed by the stored bytes at offset header_bytes (128, or 4096 with
// zeros between, for media that want aligned payloads):
//   0 magic "CS1PAGE\n"   8 version u32 = 1   12 header_bytes u32   16 crc u32   20 codec u32
//   24 stored_bytes u64   32 raw_bytes u64    40 key 32   72 pool u16   74 rank u16   76 zero u32
//   80 namespace 32       112 XXH3-128 of the stored bytes, canonical order
// codec: 0 raw   1, 2 zstd over the byte planes (byte_planes.hpp) of values of 2 and 4 bytes. The stored bytes are what
// the codec made of the raw_bytes of the page.
// crc: CRC-32C (Castagnoli, reflected, as in iSCSI) of these 128 bytes with the crc field zero.
// A header we cannot judge (other magic, newer version, unknown codec) is somebody else's and is left alone; of a
// header with our magic and version everything must be right. An all-zero header is ours too: a file whose data never
// reached the disk.
//
// Functions are pure and may run in any thread. Pages are read under the SIGBUS guard; a fault throws MemoryFault.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cachesvc {

constexpr size_t object_id_bytes = 36;
constexpr size_t page_header_bytes = 128;
constexpr uint32_t raw_codec = 0;
constexpr uint32_t num_codecs = 3;

enum class PageCheck : uint8_t { ok, foreign, newer, bad_header, wrong_key, wrong_length, bad_checksum };

// n pages of one namespace and size: ids [n, 36] (key ‖ pool u16 ‖ rank u16) and where the payloads lie.
struct PageBatch {
    size_t num_pages;
    const uint8_t* ids;
    const uint8_t* ns;
    const uint64_t* addresses;
    size_t payload_bytes;
};

// The same pages as a codec left them: addresses are those of the stored bytes, payload_bytes is the raw length.
struct EncodedBatch {
    PageBatch pages;
    const uint64_t* stored_bytes;  // [n]; when checking: how many bytes were read, at most
    const uint32_t* codecs;        // [n]; null when checking
};

// Writes n headers of `header_bytes` (at least 128) each. Reads every payload once.
void encode_headers(const PageBatch& pages, size_t header_bytes, uint8_t* headers);
// Judges n headers of `header_bytes` each against what was asked for, and the payloads against the headers.
void check_pages(const PageBatch& pages, size_t header_bytes, const uint8_t* headers, PageCheck* checks);

// For encoded pages. check_encoded also says what it found, [n] each: codec and stored length, 0 where the check is not
// ok. Codecs it does not know are `newer`.
void encode_encoded_headers(const EncodedBatch& batch, size_t header_bytes, uint8_t* headers);
struct EncodedChecks {
    PageCheck* checks;
    uint32_t* codecs;
    uint64_t* stored_bytes;
};
void check_encoded(const EncodedBatch& batch, size_t header_bytes, const uint8_t* headers, const EncodedChecks& out);

// What n headers of `header_bytes` each say of their pages, unchecked: namespaces [n, 32], raw lengths [n].
void header_claims(const uint8_t* headers, size_t num_headers, size_t header_bytes, uint8_t* namespaces,
                   uint64_t* raw_bytes);

// key ‖ pool ‖ rank for n keys, [n, 36].
void object_ids(const uint8_t* keys, size_t num_keys, uint16_t pool, uint16_t rank, uint8_t* ids);
// Checksums of n byte ranges, [n, 16].
void checksum_ranges(const uint64_t* addresses, const uint64_t* lengths, size_t num_ranges, uint8_t* out);

uint32_t crc32c(const uint8_t* data, size_t bytes);

}  // namespace cachesvc
