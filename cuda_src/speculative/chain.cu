// The step that closes a drafted token: what was drafted is stored, the next token is put in place
// and every counter moves, so that the same captured step can be launched again as it is.
#include "common/device.cuh"

// Words of the block `io` (int32 each), shared with speculative/io.py.
constexpr int IO_TOKEN = 0;    // token that the next step embeds; the body leaves its argmax here
constexpr int IO_POS = 1;      // position of that token
constexpr int IO_STEP = 2;     // steps done in this round
constexpr int IO_N_FEED = 3;   // known tokens that the round begins with: the lag, then the pending
constexpr int IO_BAD = 4;      // index of the first draft outside the vocabulary, or -1
constexpr int IO_FEED = 5;     // int32 [n_feed_max]

// One thread.
//   io         int32 block as above
//   draft_d    int32 [k_max + 1]: the pending token, then the drafts
//   counters   int32 [n_counters] lengths of the draft's planes, or null; each grows by one
//   token_map  int32 [n_vocab] the target's token for each of the draft's, or null: they are the same
//   n_vocab    tokens that the draft can choose from
// A token outside the vocabulary is never fed on: it is noted, and token 0 takes its place.
KERNEL void chain_advance(int32_t* __restrict__ io, int32_t* __restrict__ draft_d,
                          int32_t* NULLABLE counters, int32_t n_counters,
                          const int32_t* NULLABLE token_map, int32_t n_vocab, int32_t k_max) {
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        int32_t token = io[IO_TOKEN];
        const int32_t done = io[IO_STEP] + 1;
        const int32_t n_feed = io[IO_N_FEED];
        if (done < n_feed) {
            token = io[IO_FEED + done];
        } else {
            const int32_t index = done - n_feed + 1;
            if (token < 0 || token >= n_vocab) {
                token = 0;
                if (io[IO_BAD] < 0) io[IO_BAD] = index;
            } else if (token_map != nullptr) {
                token = token_map[token];
            }
            if (index <= k_max) draft_d[index] = token;
        }
        io[IO_TOKEN] = token;
        io[IO_STEP] = done;
        io[IO_POS] += 1;
    }
    if (blockIdx.x == 0 && counters != nullptr) {
        for (int i = threadIdx.x; i < n_counters; i += blockDim.x) counters[i] += 1;
    }
}
