// Threads are the caller's: LOCKS starts none.
#pragma once

namespace locks {

// Runs `work(argument, worker)` once for each worker in [0, num_workers), in any order, at the same
// time or one after the other, and returns when all have ended. Stages deal their items out to the
// workers by an atomic counter, so results never depend on num_workers or on timing.
struct Executor {
  using Work = void (*)(void* argument, int worker);

  int num_workers = 1;
  void (*run)(void* context, int num_workers, Work work, void* argument) = nullptr;
  void* context = nullptr;  // handed to `run` as it is
};

// The calling thread alone.
Executor serial_executor();

}  // namespace locks
