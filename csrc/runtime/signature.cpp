// Whether a message was signed by the owner of an Ed25519 key (RFC 8032).
// Takes public data only, so that nothing here hides how long it takes. Always holds: a signature that is not the one
// canonical encoding, or a key that is no point of the curve, is refused.
#include "signature.h"

#include <cstring>
#include <vector>

namespace fw {
namespace {

// --- SHA-512

using Word = uint64_t;
constexpr Word kRounds[80] = {
    0x428a2f98d728ae22, 0x7137449123ef65cd, 0xb5c0fbcfec4d3b2f, 0xe9b5dba58189dbbc, 0x3956c25bf348b538,
    0x59f111f1b605d019, 0x923f82a4af194f9b, 0xab1c5ed5da6d8118, 0xd807aa98a3030242, 0x12835b0145706fbe,
    0x243185be4ee4b28c, 0x550c7dc3d5ffb4e2, 0x72be5d74f27b896f, 0x80deb1fe3b1696b1, 0x9bdc06a725c71235,
    0xc19bf174cf692694, 0xe49b69c19ef14ad2, 0xefbe4786384f25e3, 0x0fc19dc68b8cd5b5, 0x240ca1cc77ac9c65,
    0x2de92c6f592b0275, 0x4a7484aa6ea6e483, 0x5cb0a9dcbd41fbd4, 0x76f988da831153b5, 0x983e5152ee66dfab,
    0xa831c66d2db43210, 0xb00327c898fb213f, 0xbf597fc7beef0ee4, 0xc6e00bf33da88fc2, 0xd5a79147930aa725,
    0x06ca6351e003826f, 0x142929670a0e6e70, 0x27b70a8546d22ffc, 0x2e1b21385c26c926, 0x4d2c6dfc5ac42aed,
    0x53380d139d95b3df, 0x650a73548baf63de, 0x766a0abb3c77b2a8, 0x81c2c92e47edaee6, 0x92722c851482353b,
    0xa2bfe8a14cf10364, 0xa81a664bbc423001, 0xc24b8b70d0f89791, 0xc76c51a30654be30, 0xd192e819d6ef5218,
    0xd69906245565a910, 0xf40e35855771202a, 0x106aa07032bbd1b8, 0x19a4c116b8d2d0c8, 0x1e376c085141ab53,
    0x2748774cdf8eeb99, 0x34b0bcb5e19b48a8, 0x391c0cb3c5c95a63, 0x4ed8aa4ae3418acb, 0x5b9cca4f7763e373,
    0x682e6ff3d6b2b8a3, 0x748f82ee5defb2fc, 0x78a5636f43172f60, 0x84c87814a1f0ab72, 0x8cc702081a6439ec,
    0x90befffa23631e28, 0xa4506cebde82bde9, 0xbef9a3f7b2c67915, 0xc67178f2e372532b, 0xca273eceea26619c,
    0xd186b8c721c0c207, 0xeada7dd6cde0eb1e, 0xf57d4f7fee6ed178, 0x06f067aa72176fba, 0x0a637dc5a2c898a6,
    0x113f9804bef90dae, 0x1b710b35131c471b, 0x28db77f523047d84, 0x32caab7b40c72493, 0x3c9ebe0a15c9bebc,
    0x431d67c49c100d4c, 0x4cc5d4becb3e42b6, 0x597f299cfc657e2a, 0x5fcb6fab3ad6faec, 0x6c44198c4a475817};
constexpr Word kStart[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

Word turned(Word value, int by) { return value >> by | value << (64 - by); }

void add_block(Word *state, const uint8_t *at) {
    Word w[80], v[8];
    for (int i = 0; i < 16; i++) {
        w[i] = 0;
        for (int k = 0; k < 8; k++) w[i] = w[i] << 8 | at[8 * i + k];
    }
    for (int i = 16; i < 80; i++) {
        Word a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (turned(a, 1) ^ turned(a, 8) ^ a >> 7) + (turned(b, 19) ^ turned(b, 61) ^ b >> 6);
    }
    std::memcpy(v, state, sizeof v);
    for (int i = 0; i < 80; i++) {
        Word one = v[7] + (turned(v[4], 14) ^ turned(v[4], 18) ^ turned(v[4], 41)) + ((v[4] & v[5]) ^ (~v[4] & v[6]));
        Word two = turned(v[0], 28) ^ turned(v[0], 34) ^ turned(v[0], 39);
        one += kRounds[i] + w[i];
        two += (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        for (int k = 7; k > 0; k--) v[k] = v[k - 1];
        v[4] += one;
        v[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
}

void sha512(std::vector<uint8_t> data, uint8_t *digest) {
    Word state[8], bits = Word(data.size()) * 8;
    std::memcpy(state, kStart, sizeof state);
    data.push_back(0x80);
    while (data.size() % 128 != 112) data.push_back(0);
    data.resize(data.size() + 8);  // the length has 16 bytes
    for (int i = 7; i >= 0; i--) data.push_back(static_cast<uint8_t>(bits >> (8 * i)));
    for (size_t i = 0; i < data.size(); i += 128) add_block(state, data.data() + i);
    for (int i = 0; i < 64; i++) digest[i] = static_cast<uint8_t>(state[i / 8] >> (56 - 8 * (i % 8)));
}

// --- numbers modulo 2^255 - 19, in five digits of 51 bits that may be a little larger

struct Number {
    uint64_t digit[5];
};
constexpr uint64_t kDigit = (uint64_t(1) << 51) - 1;
constexpr Number kOne = {{1, 0, 0, 0, 0}};
constexpr Number kCurve = {{0x34dca135978a3, 0x1a8283b156ebd, 0x5e7a26001c029, 0x739c663a03cbb, 0x52036cee2b6ff}};
constexpr Number kRootOfMinusOne = {
    {0x61b274a0ea0b0, 0xd5a5fc8f189d, 0x7ef5e9cbd0c60, 0x78595a6804c9e, 0x2b8324804fc1d}};
constexpr Number kBaseX = {{0x62d608f25d51a, 0x412a4b4f6592a, 0x75b7171a4b31d, 0x1ff60527118fe, 0x216936d3cd6e5}};
constexpr Number kBaseY = {{0x6666666666658, 0x4cccccccccccc, 0x1999999999999, 0x3333333333333, 0x6666666666666}};

Number carried(Number a) {
    for (int round = 0; round < 2; round++) {
        uint64_t over = 0;
        for (uint64_t &digit : a.digit) {
            digit += over;
            over = digit >> 51;
            digit &= kDigit;
        }
        a.digit[0] += 19 * over;
    }
    return a;
}

Number operator+(const Number &a, const Number &b) {
    Number made;
    for (int i = 0; i < 5; i++) made.digit[i] = a.digit[i] + b.digit[i];
    return carried(made);
}

Number operator-(const Number &a, const Number &b) {
    Number made;  // with four times the modulus, so that no digit is negative
    for (int i = 0; i < 5; i++) made.digit[i] = a.digit[i] + 4 * (i == 0 ? kDigit - 18 : kDigit) - b.digit[i];
    return carried(made);
}

Number operator*(const Number &a, const Number &b) {
    unsigned __int128 sums[5] = {};
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 5; k++) {
            auto product = static_cast<unsigned __int128>(a.digit[i]) * b.digit[k];
            sums[(i + k) % 5] += product * (i + k < 5 ? 1 : 19);
        }
    Number made;
    unsigned __int128 over = 0;
    for (int i = 0; i < 5; i++) {
        sums[i] += over;
        made.digit[i] = static_cast<uint64_t>(sums[i]) & kDigit;
        over = sums[i] >> 51;
    }
    made.digit[0] += 19 * static_cast<uint64_t>(over);
    return carried(made);
}

// a to the power of 2^bits - less.
Number power(const Number &a, int bits, unsigned less) {
    Number made = kOne;
    for (int bit = bits - 1; bit >= 0; bit--) {
        made = made * made;
        // 2^bits - less: ones above the lowest bits, for less <= 32
        bool set = bit >= 6 || ((64 - less) >> bit & 1) != 0;
        if (set) made = made * a;
    }
    return made;
}
Number inverse(const Number &a) { return power(a, 255, 21); }

void write(Number a, uint8_t *bytes) {
    a = carried(carried(a));
    uint64_t more = 19;  // a + 19 reaches 2^255 where a is the modulus or above
    for (uint64_t digit : a.digit) more = (digit + more) >> 51;
    a.digit[0] += 19 * more;
    uint64_t over = 0;
    for (uint64_t &digit : a.digit) {
        digit += over;
        over = digit >> 51;
        digit &= kDigit;
    }
    for (int i = 0; i < 32; i++) {
        int bit = 8 * i, at = bit / 51, from = bit % 51;
        uint64_t value = a.digit[at] >> from;
        if (from > 43 && at < 4) value |= a.digit[at + 1] << (51 - from);
        bytes[i] = static_cast<uint8_t>(value);
    }
}

Number read(const uint8_t *bytes) {  // without the highest bit
    Number made = {};
    for (int bit = 0; bit < 255; bit++) made.digit[bit / 51] |= uint64_t(bytes[bit / 8] >> (bit % 8) & 1) << (bit % 51);
    return made;
}

bool equal(const Number &a, const Number &b) {
    uint8_t one[32], two[32];
    write(a, one);
    write(b, two);
    return std::memcmp(one, two, 32) == 0;
}

// --- points of the curve: x = X / Z, y = Y / Z, T = x * y * Z

struct Point {
    Number x, y, z, t;
};
const Point kNothing = {{}, kOne, kOne, {}};

Point operator+(const Point &p, const Point &q) {
    Number a = (p.y - p.x) * (q.y - q.x), b = (p.y + p.x) * (q.y + q.x), c = p.t * q.t * (kCurve + kCurve);
    Number d = p.z * q.z + p.z * q.z, e = b - a, f = d - c, g = d + c, h = b + a;
    return {e * f, g * h, f * g, e * h};
}

Point times(const Point &p, const uint8_t *factor) {
    Point made = kNothing;
    for (int bit = 255; bit >= 0; bit--) {
        made = made + made;
        if ((factor[bit / 8] >> (bit % 8) & 1) != 0) made = made + p;
    }
    return made;
}

void write(const Point &p, uint8_t *bytes) {
    Number over = inverse(p.z);
    uint8_t x[32];
    write(p.x * over, x);
    write(p.y * over, bytes);
    bytes[31] = static_cast<uint8_t>(bytes[31] | (x[0] & 1) << 7);
}

// False where the bytes are no point in its one encoding.
bool read(const uint8_t *bytes, Point *p) {
    uint8_t again[32];
    p->y = read(bytes);
    p->z = kOne;
    Number square = p->y * p->y, u = square - kOne, v = kCurve * square + kOne;
    Number w = u * v * v * v * power(u * v * v * v * v * v * v * v, 252, 3);
    if (!equal(v * w * w, u)) w = w * kRootOfMinusOne;
    if (!equal(v * w * w, u)) return false;
    write(w, again);
    p->x = (again[0] & 1) == bytes[31] >> 7 ? w : Number{} - w;
    p->t = p->x * p->y;
    write(*p, again);
    return std::memcmp(again, bytes, 32) == 0;
}

// --- numbers modulo the order of the base point

constexpr Word kOrder[4] = {0x5812631a5cf5d3ed, 0x14def9dea2f79cd6, 0x0, 0x1000000000000000};

bool below_order(const Word *a) {
    for (int i = 3; i >= 0; i--)
        if (a[i] != kOrder[i]) return a[i] < kOrder[i];
    return false;
}

// 64 bytes, the lowest first, modulo the order: 32 bytes.
void reduce(const uint8_t *bytes, uint8_t *made) {
    Word rest[4] = {};
    for (int bit = 511; bit >= 0; bit--) {
        Word over = bytes[bit / 8] >> (bit % 8) & 1;
        for (Word &word : rest) {
            Word high = word >> 63;
            word = word << 1 | over;
            over = high;
        }
        if (below_order(rest)) continue;
        Word borrow = 0;
        for (int i = 0; i < 4; i++) {
            Word left = rest[i] - kOrder[i], next = rest[i] < kOrder[i] || left < borrow;
            rest[i] = left - borrow;
            borrow = next;
        }
    }
    for (int i = 0; i < 32; i++) made[i] = static_cast<uint8_t>(rest[i / 8] >> (8 * (i % 8)));
}

}  // namespace

bool is_signed(Bytes message, const uint8_t *signature, const uint8_t *key) {
    Point owner;
    Word scalar[4] = {};
    for (int i = 0; i < 32; i++) scalar[i / 8] |= Word(signature[32 + i]) << (8 * (i % 8));
    if (!below_order(scalar) || !read(key, &owner)) return false;
    std::vector<uint8_t> text(signature, signature + 32);
    text.insert(text.end(), key, key + 32);
    text.insert(text.end(), message.data, message.data + message.size);
    uint8_t digest[64], challenge[32], found[32];
    sha512(std::move(text), digest);
    reduce(digest, challenge);
    owner.x = Number{} - owner.x;
    owner.t = Number{} - owner.t;
    const Point base = {kBaseX, kBaseY, kOne, kBaseX * kBaseY};
    write(times(base, signature + 32) + times(owner, challenge), found);
    return std::memcmp(found, signature, 32) == 0;
}

}  // namespace fw
