// The end of a round of greedy speculation that the device decides by itself: drafts are compared with
// what the target says, tokens and counters take their places, and the next round is set up, or none.
#include "common/conditional.cuh"
#include "common/device.cuh"

// Words of a chain's block; see speculative/chain.cu.
constexpr int IO_TOKEN = 0, IO_POS = 1, IO_STEP = 2, IO_N_FEED = 3, IO_BAD = 4, IO_FEED = 5;

// Words of `state` (int32), shared with speculative/loop.py.
constexpr int N_TOKENS = 0;     // committed by this launch so far
constexpr int N_WANTED = 1;     // of them
constexpr int N_ROUNDS = 2;     // done by this launch
constexpr int POSITION = 3;     // of the pending token: the target's length
constexpr int TARGET_END = 4;   // length that the target may not exceed
constexpr int DRAFT_END = 5;    // and the draft
constexpr int REASON = 6;       // why there is no next round, 0 if there is one
enum { GOES_ON = 0, ENOUGH = 1, ENDED = 2, NO_ROOM = 3, BAD_TOKEN = 4 };

// One block. The round drafted k >= 1 tokens behind the pending one and verified k + 1 rows.
//   io, draft_d    as of chain_advance
//   argmax_d       int32 [k + 1]: the target's token behind the pending one and behind each draft
//   target, draft  int32 [n_target], [n_draft]: counters of the planes. The target's are as before the
//                  round; the draft's moved by k, and by one more if the round began with a lag.
//   followed       whether the target's pass wrote the draft's rows too: then the draft never lags
//   end_tokens     int32 [n_end] that end the text
//   tokens         int32 [N_WANTED + k]: what is committed
//   accepted       int32 [N_WANTED]: by round
//   goes_on, lags  conditions, or 0 where there is no loop: there is a next round; it begins with a token
//                  that the draft has not seen
// A round with a token outside the vocabulary commits nothing and leaves the counters as they were
// before it, but for the row of a lag.
KERNEL void round_advance(int32_t* __restrict__ io, int32_t* __restrict__ draft_d,
                          const int32_t* __restrict__ argmax_d, int32_t* __restrict__ state,
                          int32_t* __restrict__ target, int32_t n_target,
                          int32_t* __restrict__ draft, int32_t n_draft,
                          const int32_t* __restrict__ end_tokens, int32_t n_end,
                          int32_t* __restrict__ tokens, int32_t* __restrict__ accepted, int32_t k,
                          int32_t n_vocab, int32_t followed, uint64_t goes_on, uint64_t lags) {
    __shared__ int32_t move_target, move_draft;
    if (threadIdx.x == 0) {
        int32_t n = 0;  // drafts that were right
        while (n < k && draft_d[1 + n] == argmax_d[n]) n++;
        const int32_t last = argmax_d[n];
        const int32_t before = state[N_TOKENS];
        int32_t reason = GOES_ON;
        if (io[IO_BAD] >= 0 || last < 0 || last >= n_vocab) {
            reason = BAD_TOKEN;
            move_target = 0;
            move_draft = -k;
        } else {
            for (int32_t i = 0; i <= n; i++) {
                const int32_t token = i < n ? draft_d[1 + i] : last;
                tokens[before + i] = token;
                for (int32_t e = 0; e < n_end; e++)
                    if (token == end_tokens[e]) reason = ENDED;
            }
            const int32_t position = state[POSITION] + n + 1;
            const bool lag = n == k && !followed;
            move_target = n + 1;
            move_draft = (lag ? k : n + 1) - k;
            accepted[state[N_ROUNDS]] = n;
            state[N_TOKENS] = before + n + 1;
            state[N_ROUNDS] += 1;
            state[POSITION] = position;
            if (reason == GOES_ON && before + n + 1 >= state[N_WANTED]) reason = ENOUGH;
            const bool fits = position + k + 1 <= state[TARGET_END] && position + k <= state[DRAFT_END];
            if (reason == GOES_ON && !fits) reason = NO_ROOM;
            io[IO_TOKEN] = lag ? draft_d[k] : last;
            io[IO_POS] = lag ? position - 1 : position;
            io[IO_STEP] = 0;
            io[IO_N_FEED] = lag ? 2 : 1;
            io[IO_FEED] = io[IO_TOKEN];
            io[IO_FEED + 1] = last;
            draft_d[0] = last;
            if (lags != 0) cudaGraphSetConditional(lags, lag);
        }
        state[REASON] = reason;
        if (goes_on != 0) cudaGraphSetConditional(goes_on, reason == GOES_ON);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_target; i += blockDim.x) target[i] += move_target;
    for (int i = threadIdx.x; i < n_draft; i += blockDim.x) draft[i] += move_draft;
}
