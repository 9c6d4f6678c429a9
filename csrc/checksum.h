// CRC-32 as zip files have it; shared by the extension and the runtime without Python.
// Takes bytes; gives the checksum. Always holds: the same number on every processor. Where the processor multiplies
// polynomials, four sums of 16 bytes each are carried over 64 bytes at a step, at the speed of memory: checking a
// model's weights is most of what loading a file takes.
#ifndef FUSEWRIGHT_CHECKSUM_H
#define FUSEWRIGHT_CHECKSUM_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define FW_MULTIPLIES_POLYNOMIALS 1
#include <immintrin.h>
#else
#define FW_MULTIPLIES_POLYNOMIALS 0
#endif

namespace fw {
namespace checksum {

// The state of the sum after `size` more bytes.
inline uint32_t by_tables(uint32_t found, const uint8_t *data, size_t size) {
    static const std::vector<uint32_t> table = [] {  // eight tables: eight bytes a step
        std::vector<uint32_t> made(8 * 256);
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t value = i;
            for (int bit = 0; bit < 8; bit++) value = (value >> 1) ^ (value & 1 ? 0xedb88320u : 0);
            made[i] = value;
        }
        for (uint32_t i = 256; i < 8 * 256; i++) made[i] = (made[i - 256] >> 8) ^ made[made[i - 256] & 255];
        return made;
    }();
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word = found;
        for (int k = 0; k < 8; k++) word ^= uint64_t(data[i + k]) << (8 * k);
        found = 0;
        for (int k = 0; k < 8; k++) found ^= table[(7 - k) * 256 + ((word >> (8 * k)) & 255)];
    }
    for (; i < size; i++) found = table[(found ^ data[i]) & 255] ^ (found >> 8);
    return found;
}

#if FW_MULTIPLIES_POLYNOMIALS
// `sum` as it stands some bytes later, plus what lies there. factors: powers of x modulo the polynomial, for that
// distance.
__attribute__((target("pclmul,sse4.1"))) inline __m128i carried(__m128i sum, __m128i factors, __m128i data) {
    __m128i low = _mm_clmulepi64_si128(sum, factors, 0x00), high = _mm_clmulepi64_si128(sum, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), data);
}

__attribute__((target("pclmul,sse4.1"))) inline uint32_t by_products(uint32_t found, const uint8_t *data, size_t size) {
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    auto at = [&](size_t place) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(data + place)); };
    __m128i sums[4];
    for (int k = 0; k < 4; k++) sums[k] = at(16 * k);
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(found)));
    size_t i = 64;
    for (; i + 64 <= size; i += 64)
        for (int k = 0; k < 4; k++) sums[k] = carried(sums[k], by_64, at(i + 16 * k));
    for (int k = 1; k < 4; k++) sums[k] = carried(sums[k - 1], by_16, sums[k]);
    uint8_t last[16];
    _mm_storeu_si128(reinterpret_cast<__m128i *>(last), sums[3]);
    return by_tables(by_tables(0, last, sizeof last), data + i, size - i);
}
#endif

}  // namespace checksum

inline uint32_t crc32(const uint8_t *data, size_t size) {
#if FW_MULTIPLIES_POLYNOMIALS
    static const bool able = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    if (able && size >= 64) return ~checksum::by_products(~0u, data, size);
#endif
    return ~checksum::by_tables(~0u, data, size);
}

}  // namespace fw
#endif
