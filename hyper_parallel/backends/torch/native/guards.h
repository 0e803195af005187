// States of the calling thread in which our own tensor ops run.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <Python.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>

namespace hyper_parallel {

// The dispatch key whose fallback is the recorder. Torch leaves it unused in eager mode.
constexpr auto kRecorderKey = c10::DispatchKey::Fake;

// Our own ops: no dispatch mode sees them, no tape records them, no graph keeps them.
struct Unseen {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard exclude{c10::DispatchKeySet(
      {kRecorderKey, c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Ops that run again: below autograd and autocast, whose work is on the tape already. Dispatch modes and tapes that are open
// around see them.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Lets go of the GIL where this thread has it: locks are never awaited with it, and ops need none.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

template <typename Mutex>
std::unique_lock<Mutex> locked(Mutex& mutex) {
  std::unique_lock<Mutex> lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    WithoutGil released;
    lock.lock();
  }
  return lock;
}

}  // namespace hyper_parallel
