/* The native kernel: bulk copies of ragged rows, ids of packed sequences, and best-fit-decreasing.
 *
 * Plain C99 without Python.h, called with ctypes, which releases the GIL. Every pointer comes with its extent. Each
 * function checks all of its arguments before it writes anything, and returns a negative number if one is wrong.
 * Values are bytes with an item size: nothing depends on their type, alignment or byte order. Numbers (int64_t and
 * int32_t arrays) must be aligned, which is checked.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#elif defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#else
#define EXPORT
#endif

enum { OUT_OF_BOUNDS = -1, BAD_ARGUMENT = -2, NO_MEMORY = -3 };

/* Raised whenever the meaning of a function changes, so that a library left over from another version is not used. */
EXPORT int64_t midepoch_version(void) { return 1; }

static int is_aligned(const void *pointer, size_t size) { return (uintptr_t)pointer % size == 0; }

/* True if `items` of `size` bytes can be addressed. */
static int is_addressable(int64_t items, int64_t size) {
    return items >= 0 && size >= 1 && items <= PTRDIFF_MAX / size;
}

static int is_item_size(int64_t size) { return size == 1 || size == 2 || size == 4 || size == 8; }

/* Return 0 if every range [start, start + size) lies within `items`. */
static int64_t check_ranges(const int64_t *starts, const int64_t *sizes, int64_t count, int64_t items) {
    int bad = 0;
    for (int64_t i = 0; i < count; i++) {
        bad |= (starts[i] < 0) | (sizes[i] < 0) | (sizes[i] > items) | (starts[i] > items - sizes[i]);
    }
    return bad ? OUT_OF_BOUNDS : 0;
}

static int64_t check_numbers(const void *numbers, int64_t count) {
    return count < 0 || (count && (numbers == NULL || !is_aligned(numbers, sizeof(int64_t)))) ? BAD_ARGUMENT : 0;
}

/* Copy `count` ranges of items: sizes[i] of them from `source` at starts[i] to `out` at targets[i]. */
EXPORT int64_t midepoch_copy_ranges(const void *source, int64_t source_items, void *out, int64_t out_items,
                                    int64_t item_size, const int64_t *starts, const int64_t *sizes,
                                    const int64_t *targets, int64_t count) {
    if (!is_item_size(item_size) || !is_addressable(source_items, item_size) || !is_addressable(out_items, item_size) ||
        (source == NULL && source_items) || (out == NULL && out_items) || check_numbers(starts, count) ||
        check_numbers(sizes, count) || check_numbers(targets, count)) {
        return BAD_ARGUMENT;
    }
    if (check_ranges(starts, sizes, count, source_items) || check_ranges(targets, sizes, count, out_items)) {
        return OUT_OF_BOUNDS;
    }
    for (int64_t i = 0; i < count; i++) {
        if (sizes[i]) { /* memmove: a caller may pass overlapping memory */
            memmove((char *)out + targets[i] * item_size, (const char *)source + starts[i] * item_size,
                    (size_t)(sizes[i] * item_size));
        }
    }
    return 0;
}

/* Fill `count` ranges of `out` with one item, by copying what is filled already. */
EXPORT int64_t midepoch_fill_ranges(void *out, int64_t out_items, const void *item, int64_t item_size,
                                    const int64_t *starts, const int64_t *sizes, int64_t count) {
    if (!is_item_size(item_size) || !is_addressable(out_items, item_size) || (out == NULL && out_items) ||
        item == NULL || check_numbers(starts, count) || check_numbers(sizes, count)) {
        return BAD_ARGUMENT;
    }
    if (check_ranges(starts, sizes, count, out_items)) {
        return OUT_OF_BOUNDS;
    }
    char value[8];
    memcpy(value, item, (size_t)item_size);
    for (int64_t i = 0; i < count; i++) {
        char *first = (char *)out + starts[i] * item_size;
        const size_t all = (size_t)(sizes[i] * item_size);
        if (!all) {
            continue;
        }
        if (item_size == 1) {
            memset(first, (unsigned char)value[0], all);
            continue;
        }
        size_t filled = (size_t)item_size;
        memcpy(first, value, filled);
        while (filled < all) {
            const size_t step = filled < all - filled ? filled : all - filled;
            memcpy(first + filled, first, step);
            filled += step;
        }
    }
    return 0;
}

/* Ids written in one step, which compilers turn into a few vector stores. Steps begin at lines of the cache and write
 * each once, in order: large outputs take 40 % longer with steps that overlap. */
enum { TOGETHER = 16 };

/* Write first, first + slope, ... The slope is a constant of each call, and the function is inlined there. */
static inline void write_ids(int32_t *ids, int32_t size, int32_t first, int32_t slope) {
    const uintptr_t line = TOGETHER * sizeof(int32_t);
    const int32_t before = (int32_t)((line - (uintptr_t)ids % line) % line / sizeof(int32_t));
    const int32_t start = before < size ? before : size, stop = size - (size - start) % TOGETHER;
    for (int32_t k = 0; k < start; k++) {
        ids[k] = first + k * slope;
    }
    for (int32_t k = start; k < stop; k += TOGETHER) {
        for (int32_t j = 0; j < TOGETHER; j++) {
            ids[k + j] = first + (k + j) * slope;
        }
    }
    for (int32_t k = stop; k < size; k++) {
        ids[k] = first + k * slope;
    }
}

static void number_piece(int32_t *positions, int32_t *segments, int64_t size, int32_t number) {
    write_ids(positions, (int32_t)size, 0, 1);
    write_ids(segments, (int32_t)size, number, 0);
}

static int64_t check_ids(const int32_t *positions, const int32_t *segments, int64_t items) {
    const int missing = (positions == NULL || segments == NULL) && items;
    return missing || !is_addressable(items, sizeof(int32_t)) || !is_aligned(positions, sizeof(int32_t)) ||
                   !is_aligned(segments, sizeof(int32_t))
               ? BAD_ARGUMENT
               : 0;
}

/* Write positions 0, 1, ... and a segment number into each of `count` ranges. */
EXPORT int64_t midepoch_number_ranges(int32_t *positions, int32_t *segments, int64_t items, const int64_t *starts,
                                      const int64_t *sizes, const int64_t *numbers, int64_t count) {
    if (check_ids(positions, segments, items) || check_numbers(starts, count) || check_numbers(sizes, count) ||
        check_numbers(numbers, count)) {
        return BAD_ARGUMENT;
    }
    if (check_ranges(starts, sizes, count, items)) {
        return OUT_OF_BOUNDS;
    }
    for (int64_t i = 0; i < count; i++) {
        if (sizes[i] > INT32_MAX || numbers[i] < 0 || numbers[i] > INT32_MAX) {
            return BAD_ARGUMENT;
        }
    }
    for (int64_t i = 0; i < count; i++) {
        number_piece(positions + starts[i], segments + starts[i], sizes[i], (int32_t)numbers[i]);
    }
    return 0;
}

/* Number the pieces of documents that lie one after the other in sequences of `length`, up to `items` tokens. */
EXPORT int64_t midepoch_number_concatenated(int32_t *positions, int32_t *segments, int64_t items,
                                            const int64_t *documents, int64_t count, int64_t length) {
    if (check_ids(positions, segments, items) || check_numbers(documents, count) || length < 1 || length > INT32_MAX) {
        return BAD_ARGUMENT;
    }
    int64_t total = 0;
    for (int64_t i = 0; i < count && total < items; i++) {
        if (documents[i] < 0) {
            return OUT_OF_BOUNDS;
        }
        total = documents[i] > items - total ? items : total + documents[i];
    }
    if (total < items) {
        return OUT_OF_BOUNDS;
    }
    int64_t at = 0, room = length;
    int32_t number = 1;
    for (int64_t i = 0; i < count && at < items; i++) {
        int64_t left = documents[i] < items - at ? documents[i] : items - at;
        while (left) {
            const int64_t size = left < room ? left : room;
            number_piece(positions + at, segments + at, size, number);
            at += size;
            left -= size;
            room -= size;
            number += 1;
            if (!room) {
                room = length;
                number = 1;
            }
        }
    }
    return 0;
}

/* A set of the numbers below a limit: bits, and for every 64 words of a level a word of the next. */
enum { MOST_LEVELS = 11 };

typedef struct {
    uint64_t *levels[MOST_LEVELS];
    int count;
} Set;

static int lowest_bit(uint64_t word) {
#if defined(__GNUC__)
    return __builtin_ctzll(word);
#else
    int bit = 0;
    while (!(word & 1)) {
        word >>= 1;
        bit++;
    }
    return bit;
#endif
}

static int64_t set_words(int64_t limit) {
    int64_t words = limit / 64 + 1, all = words;
    while (words > 1) {
        words = (words - 1) / 64 + 1;
        all += words;
    }
    return all;
}

static void set_begin(Set *set, uint64_t *words, int64_t limit) {
    int64_t size = limit / 64 + 1;
    set->count = 0;
    for (;;) {
        set->levels[set->count++] = words;
        words += size;
        if (size == 1) {
            return;
        }
        size = (size - 1) / 64 + 1;
    }
}

static void set_add(Set *set, int64_t number) {
    for (int level = 0; level < set->count; level++, number >>= 6) {
        set->levels[level][number >> 6] |= (uint64_t)1 << (number & 63);
    }
}

static void set_remove(Set *set, int64_t number) {
    for (int level = 0; level < set->count; level++, number >>= 6) {
        uint64_t *word = &set->levels[level][number >> 6];
        *word &= ~((uint64_t)1 << (number & 63));
        if (*word) {
            return;
        }
    }
}

/* Return the smallest member that is at least `number`, or -1. `number` must be below the limit of the set. */
static int64_t set_next(const Set *set, int64_t number) {
    uint64_t word = set->levels[0][number >> 6] & (~(uint64_t)0 << (number & 63));
    int level = 0;
    while (!word) {
        number >>= 6;
        if (++level == set->count) {
            return -1;
        }
        const int bit = (int)(number & 63); /* members after this one only: it was searched below */
        word = bit == 63 ? 0 : set->levels[level][number >> 6] & (~(uint64_t)0 << (bit + 1));
    }
    number = (number >> 6 << 6) + lowest_bit(word);
    while (level--) {
        number = (number << 6) + lowest_bit(set->levels[level][number]);
    }
    return number;
}

/* Bins with the same room: a leftist heap by number. Its right spine has at most log2(n) nodes, so recursion is flat. */
typedef struct {
    int64_t *left, *right, *rank;
} Heap;

static int64_t heap_merge(const Heap *heap, int64_t a, int64_t b) {
    if (a < 0 || b < 0) {
        return a < 0 ? b : a;
    }
    if (b < a) {
        const int64_t other = a;
        a = b;
        b = other;
    }
    heap->right[a] = heap_merge(heap, heap->right[a], b);
    const int64_t left = heap->left[a], right = heap->right[a];
    if (left < 0 || heap->rank[left] < heap->rank[right]) {
        heap->left[a] = right;
        heap->right[a] = left;
    }
    heap->rank[a] = heap->right[a] < 0 ? 1 : heap->rank[heap->right[a]] + 1;
    return a;
}

/* Put pieces into bins of `length` by best-fit-decreasing: from the largest on, and of equal ones the first, each goes
 * into the bin that it leaves the least room in, and of equal ones into the oldest.
 *
 * Bins are then numbered by their first piece. Of each piece return its bin, its offset there, and its number there
 * (from 1): pieces of a bin are in order. `rooms`: what is left of each bin. Return the number of bins.
 * Time: O(length + n log n). Memory: O(length + n).
 */
EXPORT int64_t midepoch_best_fit(const int64_t *sizes, int64_t count, int64_t length, int64_t *bins, int64_t *offsets,
                                 int64_t *numbers, int64_t *rooms) {
    if (check_numbers(sizes, count) || check_numbers(bins, count) || check_numbers(offsets, count) ||
        check_numbers(numbers, count) || check_numbers(rooms, count) || length < 1 || length > INT32_MAX ||
        count > PTRDIFF_MAX / 64) {
        return BAD_ARGUMENT;
    }
    for (int64_t i = 0; i < count; i++) {
        if (sizes[i] < 1 || sizes[i] > length) {
            return OUT_OF_BOUNDS;
        }
    }
    if (!count) {
        return 0;
    }
    const int64_t words = set_words(length);
    int64_t *memory = malloc((size_t)(2 * (length + 1) + 5 * count) * sizeof(int64_t));
    uint64_t *bits = calloc((size_t)words, sizeof(uint64_t));
    if (memory == NULL || bits == NULL) {
        free(memory);
        free(bits);
        return NO_MEMORY;
    }
    int64_t *first = memory, *heads = first + length + 1; /* by size: its first place in order; by room: its heap */
    int64_t *order = heads + length + 1, *room = order + count;
    const Heap heap = {room + count, room + 2 * count, room + 3 * count};
    Set full;
    set_begin(&full, bits, length);

    /* Sort by counting: larger sizes first, equal ones in order. */
    memset(first, 0, (size_t)(length + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < count; i++) {
        first[sizes[i] - 1]++;
    }
    for (int64_t size = length, before = 0; size >= 1; size--) {
        const int64_t equal = first[size - 1];
        first[size - 1] = before;
        before += equal;
    }
    for (int64_t i = 0; i < count; i++) {
        order[first[sizes[i] - 1]++] = i;
    }
    for (int64_t i = 0; i <= length; i++) {
        heads[i] = -1;
    }

    int64_t made = 0;
    for (int64_t k = 0; k < count; k++) {
        const int64_t piece = order[k];
        const int64_t place = set_next(&full, sizes[piece]);
        int64_t bin;
        if (place < 0) {
            bin = made++;
            room[bin] = length - sizes[piece];
        } else {
            bin = heads[place];
            heads[place] = heap_merge(&heap, heap.left[bin], heap.right[bin]);
            if (heads[place] < 0) {
                set_remove(&full, place);
            }
            room[bin] = place - sizes[piece];
        }
        bins[piece] = bin;
        if (room[bin]) {
            heap.left[bin] = heap.right[bin] = -1;
            heap.rank[bin] = 1;
            heads[room[bin]] = heap_merge(&heap, heads[room[bin]], bin);
            set_add(&full, room[bin]);
        }
    }

    /* Number the bins by their first piece. The heaps are not needed any more: their memory has the new numbers. */
    int64_t *renumbered = heap.left, *used = heap.right, *pieces = heap.rank, next = 0;
    for (int64_t bin = 0; bin < made; bin++) {
        renumbered[bin] = -1;
        used[bin] = pieces[bin] = 0;
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t bin = bins[i];
        if (renumbered[bin] < 0) {
            renumbered[bin] = next;
            rooms[next++] = room[bin];
        }
        bins[i] = renumbered[bin];
        offsets[i] = used[bin];
        used[bin] += sizes[i];
        numbers[i] = ++pieces[bin];
    }
    free(memory);
    free(bits);
    return made;
}
