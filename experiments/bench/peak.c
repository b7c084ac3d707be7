/* Peak of bfloat16 arithmetic on a processor with AVX-512 BF16: products of registers only, no memory.

       cc -O2 -pthread -mavx512bf16 experiments/bench/peak.c -o /tmp/peak && /tmp/peak 2

   The argument is the number of threads. No matrix product on these vector units does more operations per second
   (processors with AMX have a faster unit). The best of three rounds is printed. */

#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ITERATIONS = 30000000, SUMS = 13, OPERATIONS = 64 }; /* 32 products and 32 sums an instruction */

/* The sums are independent, so that the latency of an instruction does not count. */
#define STEP(sum) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" #sum "\n\t"

static void *work(void *unused) {
    for (long i = 0; i < ITERATIONS; i++)
        __asm__ volatile(STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10)
                             STEP(11) STEP(12)
                         ::: "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9",
                           "zmm10", "zmm11", "zmm12");
    return unused;
}

int main(int argc, char **argv) {
    int threads = argc == 2 ? atoi(argv[1]) : 0;
    if (threads < 1) {
        fprintf(stderr, "usage: peak THREADS\n");
        return 2;
    }
    pthread_t *others = malloc(threads * sizeof *others);
    double best = 0;
    for (int round = 0; round < 3; round++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int i = 0; i < threads; i++)
            if (pthread_create(&others[i], NULL, work, NULL)) {
                fprintf(stderr, "no thread %d could be started\n", i);
                return 1;
            }
        for (int i = 0; i < threads; i++)
            pthread_join(others[i], NULL);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double seconds = (end.tv_sec - start.tv_sec) + 1e-9 * (end.tv_nsec - start.tv_nsec);
        double rate = 1e-9 * threads * ITERATIONS * (double)SUMS * OPERATIONS / seconds;
        best = rate > best ? rate : best;
    }
    free(others);
    printf("%.0f GFLOP/s with %d threads\n", best, threads);
    return 0;
}
