#include "page_format.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>

#include "copy_threads.hpp"
#include "fault_guard.hpp"
#include "page_checksum.hpp"

namespace cachesvc {
namespace {

constexpr uint8_t page_magic[8] = {'C', 'S', '1', 'P', 'A', 'G', 'E', '\n'};
constexpr uint32_t page_version = 1;

struct PageHeader {
    uint8_t magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint32_t crc;
    uint32_t codec;
    uint64_t stored_bytes;
    uint64_t raw_bytes;
    uint8_t id[object_id_bytes];
    uint32_t zero;
    uint8_t ns[32];
    uint8_t checksum[checksum_bytes];
};
static_assert(sizeof(PageHeader) == page_header_bytes && offsetof(PageHeader, ns) == 80);
static_assert(std::endian::native == std::endian::little, "the header is written as it lies in memory");

constexpr std::array<uint32_t, 256> make_crc_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
        table[byte] = crc;
    }
    return table;
}
constexpr std::array<uint32_t, 256> crc_table = make_crc_table();

uint32_t header_crc(PageHeader header) {
    header.crc = 0;
    return crc32c(reinterpret_cast<const uint8_t*>(&header), sizeof(header));
}

struct Stored {
    uint32_t codec;
    uint64_t bytes;
};

PageHeader describe(const PageBatch& pages, size_t i, size_t header_bytes, Stored stored) {
    PageHeader header{};
    std::copy(std::begin(page_magic), std::end(page_magic), header.magic);
    header.version = page_version;
    header.header_bytes = static_cast<uint32_t>(header_bytes);
    header.codec = stored.codec;
    header.stored_bytes = stored.bytes;
    header.raw_bytes = pages.payload_bytes;
    std::memcpy(header.id, pages.ids + i * object_id_bytes, sizeof(header.id));
    std::memcpy(header.ns, pages.ns, sizeof(header.ns));
    page_checksum(reinterpret_cast<const void*>(pages.addresses[i]), stored.bytes, header.checksum);
    header.crc = header_crc(header);
    return header;
}

bool is_all_zero(const PageHeader& header) {
    static constexpr PageHeader zero{};
    return std::memcmp(&header, &zero, sizeof(header)) == 0;
}

// What lengths and codecs a reader can take.
struct Expected {
    uint32_t codecs;       // how many it knows
    uint64_t least_bytes;  // of stored_bytes
    uint64_t most_bytes;
};

// Everything but the payload. From the outside in: a field means something only once the ones before it hold.
PageCheck check_header(const PageHeader& header, const PageBatch& pages, size_t i, size_t header_bytes,
                       const Expected& expected) {
    if (is_all_zero(header)) return PageCheck::bad_header;
    if (std::memcmp(header.magic, page_magic, sizeof(page_magic)) != 0) return PageCheck::foreign;
    if (header.version != page_version) return PageCheck::newer;
    if (header.crc != header_crc(header) || header.header_bytes != header_bytes) return PageCheck::bad_header;
    if (header.codec >= expected.codecs) return PageCheck::newer;
    const bool is_asked_for = std::memcmp(header.id, pages.ids + i * object_id_bytes, sizeof(header.id)) == 0 &&
                              std::memcmp(header.ns, pages.ns, sizeof(header.ns)) == 0;
    if (!is_asked_for) return PageCheck::wrong_key;
    const bool has_length = header.raw_bytes == pages.payload_bytes && header.stored_bytes >= expected.least_bytes &&
                            header.stored_bytes <= expected.most_bytes &&
                            (header.codec != raw_codec || header.stored_bytes == header.raw_bytes);
    return has_length ? PageCheck::ok : PageCheck::wrong_length;
}

PageCheck check_page(const PageHeader& header, const PageBatch& pages, size_t i, size_t header_bytes,
                     const Expected& expected) {
    const PageCheck check = check_header(header, pages, i, header_bytes, expected);
    if (check != PageCheck::ok) return check;
    uint8_t checksum[checksum_bytes];
    page_checksum(reinterpret_cast<const void*>(pages.addresses[i]), header.stored_bytes, checksum);
    return std::memcmp(checksum, header.checksum, sizeof(checksum)) == 0 ? PageCheck::ok : PageCheck::bad_checksum;
}

PageHeader load_header(const uint8_t* headers, size_t i, size_t header_bytes) {
    PageHeader header;
    std::memcpy(&header, headers + i * header_bytes, sizeof(header));
    return header;
}

void store_header(const PageHeader& header, size_t i, size_t header_bytes, uint8_t* headers) {
    uint8_t* out = headers + i * header_bytes;
    std::memcpy(out, &header, sizeof(header));
    std::memset(out + sizeof(header), 0, header_bytes - sizeof(header));
}

// As guarded_all over pages whose bytes are all read: by several threads, as a medium waits for it.
template <class Body>
void guarded_pages(size_t num_pages, size_t page_bytes, const Body& body) {
    std::atomic<size_t> faulted{num_pages};  // the first one
    in_runs(num_pages, page_bytes, [&](size_t begin, size_t end) {
        guarded_each(
            end - begin, [&](size_t i) { body(begin + i); },
            [&](size_t i) {
                size_t first = faulted.load();
                while (begin + i < first && !faulted.compare_exchange_weak(first, begin + i)) {
                }
            });
    });
    if (faulted.load() < num_pages) throw MemoryFault(faulted.load());
}

}  // namespace

void encode_headers(const PageBatch& pages, size_t header_bytes, uint8_t* headers) {
    guarded_pages(pages.num_pages, pages.payload_bytes, [&](size_t i) {
        store_header(describe(pages, i, header_bytes, {raw_codec, pages.payload_bytes}), i, header_bytes, headers);
    });
}

void check_pages(const PageBatch& pages, size_t header_bytes, const uint8_t* headers, PageCheck* checks) {
    const Expected raw_only{1, pages.payload_bytes, pages.payload_bytes};
    guarded_pages(pages.num_pages, pages.payload_bytes, [&](size_t i) {
        checks[i] = check_page(load_header(headers, i, header_bytes), pages, i, header_bytes, raw_only);
    });
}

void encode_encoded_headers(const EncodedBatch& batch, size_t header_bytes, uint8_t* headers) {
    guarded_pages(batch.pages.num_pages, batch.pages.payload_bytes, [&](size_t i) {
        const Stored stored{batch.codecs[i], batch.stored_bytes[i]};
        store_header(describe(batch.pages, i, header_bytes, stored), i, header_bytes, headers);
    });
}

void check_encoded(const EncodedBatch& batch, size_t header_bytes, const uint8_t* headers, const EncodedChecks& out) {
    guarded_pages(batch.pages.num_pages, batch.pages.payload_bytes, [&](size_t i) {
        const PageHeader header = load_header(headers, i, header_bytes);
        const Expected any_codec{num_codecs, 1, batch.stored_bytes[i]};
        out.checks[i] = check_page(header, batch.pages, i, header_bytes, any_codec);
        const bool is_ok = out.checks[i] == PageCheck::ok;
        out.codecs[i] = is_ok ? header.codec : 0;
        out.stored_bytes[i] = is_ok ? header.stored_bytes : 0;
    });
}

void header_claims(const uint8_t* headers, size_t num_headers, size_t header_bytes, uint8_t* namespaces,
                   uint64_t* raw_bytes) {
    for (size_t i = 0; i < num_headers; ++i, headers += header_bytes, namespaces += sizeof(PageHeader::ns)) {
        PageHeader header;
        std::memcpy(&header, headers, sizeof(header));
        std::memcpy(namespaces, header.ns, sizeof(header.ns));
        raw_bytes[i] = header.raw_bytes;
    }
}

void object_ids(const uint8_t* keys, size_t num_keys, uint16_t pool, uint16_t rank, uint8_t* ids) {
    for (size_t i = 0; i < num_keys; ++i, keys += 32, ids += object_id_bytes) {
        std::memcpy(ids, keys, 32);
        std::memcpy(ids + 32, &pool, sizeof(pool));
        std::memcpy(ids + 34, &rank, sizeof(rank));
    }
}

void checksum_ranges(const uint64_t* addresses, const uint64_t* lengths, size_t num_ranges, uint8_t* out) {
    guarded_all(num_ranges, [&](size_t i) {
        page_checksum(reinterpret_cast<const void*>(addresses[i]), lengths[i], out + i * checksum_bytes);
    });
}

uint32_t crc32c(const uint8_t* data, size_t bytes) {
    uint32_t crc = ~uint32_t{0};
    for (size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ crc_table[(crc ^ data[i]) & 0xff];
    return ~crc;
}

}  // namespace cachesvc
