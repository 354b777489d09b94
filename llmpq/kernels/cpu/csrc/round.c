/* Round-to-nearest in two passes over a few groups, where torch needs ten over all: the grid of
 * quant/rtn.py, to the last bit. It returns an error for values it cannot represent; torch then reports them. */
#include "lanes.h"

typedef struct {
    const void *weight; /* [rows, columns] of `type` */
    uint8_t *codes;     /* [rows, columns * bits / 8], each row a little-endian bit stream */
    void *scales;       /* [rows, columns / group] of scale_type */
    void *zeros;        /* the same, or null: symmetric */
    int64_t rows, columns, group;
    int32_t bits, type, scale_type, threads;
} Rounding;

typedef struct {
    const Rounding *call;
    int32_t refused;
} Work;

/* Neighbours, two in each lane: what shares a byte of codes needs no shuffle. */
typedef struct {
    vf even, odd;
} Pairs;

/* Of some numbers; the least is negated. `finite` is no longer 0 once one is not. */
typedef struct {
    vf most, least, finite;
} Range;

/* Of a group. Where `inverse` is not 0, division by the scale is multiplication, and corrected. */
typedef struct {
    float scale, inverse, zero;
} Grid;

enum { ROWS_OF_PART = 16, AT_ONCE = 2 * LANES };
/* Added to a number below 2^22, it leaves the nearest whole one, ties to even, in the low bits. */
static const float MAGIC = 12582912.0f;
enum { MAGIC_BITS = 0x4B400000, INFINITE = 0x7F800000 };

INLINE Pairs load_pairs(const void *from, int64_t at, const int type) {
    if (type == TYPE_BF16) {
        vu both;
        memcpy(&both, (const uint16_t *)from + at, sizeof both);
        return (Pairs){(vf)(both << 16), (vf)(both & 0xFFFF0000)};
    }
    const vi even = 2 * lane_numbers();
    vf front = load_lanes(from, at, type), back = load_lanes(from, at + LANES, type);
    return (Pairs){__builtin_shuffle(front, back, even), __builtin_shuffle(front, back, even + 1)};
}

/* The last 16 of a group that is no multiple of 32, twice: lanes 0 to 7 are the first of them. */
static Pairs load_last(const void *from, int64_t at, const int type) {
    uint8_t twice[128];
    size_t each = type == TYPE_F32 ? 4 : 2;
    memcpy(twice, (const uint8_t *)from + (size_t)at * each, 16 * each);
    memcpy(twice + 16 * each, twice, 16 * each);
    return load_pairs(twice, 0, type);
}

INLINE void widen(Range *range, Pairs w) {
    range->most = greater(greater(w.even, w.odd), range->most);
    range->least = greater(greater(-w.even, -w.odd), range->least);
    range->finite += w.even * 0;
    range->finite += w.odd * 0;
}

INLINE void ends_of(const Range *range, float *low, float *high) {
    const vi lane = lane_numbers(), front = lane + ((lane >= LANES / 2) & (LANES / 2));
    vf both = greater(__builtin_shuffle(range->most, range->least, front),
                      __builtin_shuffle(range->most, range->least, front + LANES / 2));
    for (int step = LANES / 4; step; step /= 2)
        both = greater(both, __builtin_shuffle(both, lane ^ step));
    *high = both[0], *low = -both[LANES / 2];
}

/* The least and the greatest of the group that begins at weight `at`. */
INLINE void range_of(const Rounding *r, int64_t at, float *low, float *high, vf *finite,
                     const int type) {
    const vf none = (vf){0} - __builtin_inff();
    Range range = {none, none, *finite};
    int64_t whole = r->group / AT_ONCE * AT_ONCE;
    for (int64_t k = 0; k < whole; k += AT_ONCE)
        widen(&range, load_pairs(r->weight, at + k, type));
    if (whole < r->group) widen(&range, load_last(r->weight, at + whole, type));
    ends_of(&range, low, high);
    *finite = range.finite;
}

/* Chooses and stores the grids of `count` groups, as rtn.fit_grid does; 0 when one overflows. */
static int fit_grids(const Rounding *r, int64_t group, int64_t count, const float *lows,
                     const float *highs, Grid *grids) {
    float half = (float)(1 << (r->bits - 1)), steps = 2 * half - 1;
    vf low = load_lanes(lows, 0, TYPE_F32), high = load_lanes(highs, 0, TYPE_F32);
    vf step, zero = {0}, inverse = {0}, one = zero + 1;
    if (r->zeros) {
        volatile vf middle = (high / steps - low / steps) * half; /* rounded: no fused sum */
        vu bits = typed_bits(low + middle, r->scale_type);
        zero = typed_value(bits, r->scale_type);
        store_typed(r->zeros, group, count, bits, r->scale_type);
        step = greater((high - zero) / (half - 1), (zero - low) / half);
    } else {
        step = greater(high, -low) / (r->bits == 8 ? 127.0f : steps / 2);
    }
    vu bits = typed_bits(step, r->scale_type);
    bits -= (vu)(typed_value(bits, r->scale_type) < step); /* where that is so, it is -1 */
    vf scale = typed_value(bits, r->scale_type);
    scale = either(scale == 0, one, scale);
    store_typed(r->scales, group, count, typed_bits(scale, r->scale_type), r->scale_type);
    /* The remainder of a division is exact for scales of few bits, and amid the exponents. */
    if (FUSES && r->scale_type != TYPE_F32)
        inverse = either((scale > 0x1p-60f) & (scale < 0x1p60f), one / scale, inverse);
    vi wrong = (((vi)scale & INFINITE) == INFINITE) | (((vi)zero & INFINITE) == INFINITE);
    int is_wrong = 0;
    for (int i = 0; i < LANES; i++) {
        grids[i] = (Grid){scale[i], inverse[i], zero[i]};
        is_wrong |= wrong[i];
    }
    return !is_wrong;
}

/* Codes in the low bits of the lanes, above them something from bit 22 on. */
INLINE vi codes_of(vf weight, const Grid *grid, const int bits, const int divides) {
    const int32_t half = 1 << (bits - 1);
    vf none = {0}, zeroed = weight - grid->zero, steps;
    if (divides) {
        steps = zeroed / grid->scale;
    } else { /* the quotient to the last bit (Markstein): the first is wrong by two units at most */
        vf first = zeroed * grid->inverse;
        vf rest = multiply_add(-first, none + grid->scale, zeroed);
        steps = multiply_add(rest, none + grid->inverse, first);
    }
    return within((vi)(steps + (MAGIC + half)), MAGIC_BITS, MAGIC_BITS + 2 * half - 1);
}

/* The codes of a pair in the low bits of its lane, behind those of the pair before. */
INLINE void put_pairs(uint8_t *to, vu both, const int bits) {
    if (bits == 8) {
        vh words = __builtin_convertvector(both, vh);
        memcpy(to, &words, sizeof words);
        return;
    }
#ifdef __AVX512F__
    if (bits == 4) {
        _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)both));
        return;
    }
    both &= 63;
    __m512i fours = _mm512_or_si512((__m512i)both, _mm512_srli_epi64((__m512i)both, 26));
    __m128i eights = _mm_madd_epi16(_mm512_cvtepi64_epi16(fours), _mm_set1_epi32(1 << 28 | 1));
    const __m128i three_of_four = {0x0908060504020100, 0x0E0D0C0A};
    eights = _mm_shuffle_epi8(eights, three_of_four);
    memcpy(to, &eights, 12);
#else
    both &= (1 << 2 * bits) - 1;
    vl fours = ((vl)both | (vl)both >> (32 - 2 * bits)) & ((1 << 4 * bits) - 1);
    uint64_t all = 0;
    for (int i = 0; i < LANES / 2; i++) all |= fours[i] << 4 * bits * i;
    memcpy(to, &all, LANES / 4 * (size_t)bits);
#endif
}

INLINE void put_codes(uint8_t *to, Pairs w, const Grid *grid, const int bits, const int divides) {
    vi even = codes_of(w.even, grid, bits, divides), odd = codes_of(w.odd, grid, bits, divides);
    put_pairs(to, (vu)(even | odd << bits), bits);
}

/* Codes of the group that begins at weight `at`. */
INLINE void round_group(const Rounding *r, int64_t at, const Grid *grid, const int type,
                        const int bits, const int divides) {
    uint8_t *to = r->codes + at * bits / 8, last[4 * LANES];
    int64_t whole = r->group / AT_ONCE * AT_ONCE;
    for (int64_t k = 0; k < whole; k += AT_ONCE, to += LANES / 4 * bits)
        put_codes(to, load_pairs(r->weight, at + k, type), grid, bits, divides);
    if (whole < r->group) {
        put_codes(last, load_last(r->weight, at + whole, type), grid, bits, divides);
        memcpy(to, last, 2 * (size_t)bits);
    }
}

/* Groups [first, first + count): all ranges, then all grids, then all codes. Within a group every step
 * waits for the one before; those of many overlap. Returns 0 when a weight or a grid is not finite. */
INLINE int round_groups(const Rounding *r, int64_t first, int64_t count, const int type,
                        const int bits) {
    float low[LANES] = {0}, high[LANES] = {0}, sum = 0;
    Grid grids[LANES];
    vf finite = {0};
    for (int64_t i = 0; i < count; i++)
        range_of(r, (first + i) * r->group, low + i, high + i, &finite, type);
    int done = fit_grids(r, first, count, low, high, grids);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = (first + i) * r->group;
        if (FUSES && grids[i].inverse != 0) round_group(r, at, grids + i, type, bits, 0);
        else round_group(r, at, grids + i, type, bits, 1);
    }
    for (int i = 0; i < LANES; i++) sum += finite[i];
    return done && sum == 0;
}

INLINE int round_typed_groups(const Rounding *r, int64_t first, int64_t count, const int bits) {
    if (r->type == TYPE_BF16) return round_groups(r, first, count, TYPE_BF16, bits);
    if (r->type == TYPE_F16) return round_groups(r, first, count, TYPE_F16, bits);
    return round_groups(r, first, count, TYPE_F32, bits);
}

static void round_part(void *data, int64_t item) {
    Work *work = data;
    const Rounding *r = work->call;
    int64_t groups = r->columns / r->group, row = ROWS_OF_PART * item;
    int64_t rows = r->rows - row < ROWS_OF_PART ? r->rows - row : ROWS_OF_PART;
    int64_t end = (row + rows) * groups; /* groups of a row, and rows, follow each other */
    for (int64_t first = row * groups; first < end; first += LANES) {
        int64_t count = end - first < LANES ? end - first : LANES;
        int done = r->bits == 4   ? round_typed_groups(r, first, count, 4)
                   : r->bits == 3 ? round_typed_groups(r, first, count, 3)
                                  : round_typed_groups(r, first, count, 8);
        if (!done) __atomic_store_n(&work->refused, 1, __ATOMIC_RELAXED);
    }
}

/* Columns and groups are multiples of 16. Returns 1 when a weight or a grid is not finite. */
int kernels_round(const Rounding *r) {
    Work work = {r, 0};
    run_parts(round_part, &work, (r->rows + ROWS_OF_PART - 1) / ROWS_OF_PART, r->threads);
    return work.refused;
}
