// What a handle stands for: values that are kept, held outside, fetched or made again, and how long those are there.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include "replay.h"

namespace hyper_parallel {

inline at::Tensor Tape::held_value(Held& held) {
  if (held.value.defined()) return held.value;
  if (!HP_FAULT("held_version") && held.version >= 0 && held.counter.current_version() != static_cast<uint32_t>(held.version)) {
    ChangedInPlace error;
    error.where = where_;
    error.what_changed = describe(views_[held.view]);
    error.storage = held.storage;
    error.version = held.version;
    error.now = held.counter.current_version();
    throw error;
  }
  if (held.alias.defined()) {
    const auto& storage = held.alias.unsafeGetTensorImpl()->unsafe_storage();
    TORCH_CHECK(
        held.alias.numel() == 0 || storage.nbytes() > 0,
        where_ + ": the memory of a tensor " + describe(views_[held.view]) +
            " that the region reads from outside was freed by its owner before backward.");
    return held.alias;
  }
  WithGil gil;
  PyObject* value = PyObject_CallFunctionObjArgs(held.unpack.get(), held.packed.get(), nullptr);
  if (value == nullptr) throw python_error();
  PythonRef owned = PythonRef::take(value);
  TORCH_CHECK(THPVariable_Check(value), where_ + ": the unpack hook around the region returned no tensor");
  at::Tensor tensor = THPVariable_Unpack(value);
  held.value = alias_of(tensor);
  return held.value;
}

inline void Tape::let_go(int index) {
  Handle& handle = handles_[index];
  handle.is_alive = false;
  handle.kept = at::Tensor();
  if (handle.slot == kNone) return;
  Slot& slot = slots_[handle.slot];
  if (handle.served_in != -1 && handle.served_in == slot.served_in) slot.served -= 1;
  if (--slot.living_handles == 0) slot.made = slot.fetched = c10::Storage();
  if (is_held(handle) && --slot.held[handle.held].living_handles == 0) slot.held[handle.held].value = at::Tensor();
}

inline void Tape::collect_dead() {
  if (!has_dead_.load(std::memory_order_acquire)) return;
  std::vector<int> dead;
  {
    std::lock_guard<std::mutex> lock(dead_mutex_);
    dead.swap(dead_);
    has_dead_.store(false, std::memory_order_release);
  }
  for (int index : dead) let_go(index);
}

inline void Tape::release(int handle) {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    {
      std::lock_guard<std::mutex> dead_lock(dead_mutex_);
      dead_.push_back(handle);
      has_dead_.store(true, std::memory_order_release);
    }
    if (!lock.try_lock()) return;  // the thread that has it collects when it comes next
    collect_dead();
    return;
  }
  collect_dead();
  let_go(handle);
}

// Kept bytes that are a tensor of the user's may be changed after the region. Then its ops make them again, or this raises.
inline void Tape::check_kept(Slot& slot) {
  if (HP_FAULT("kept_version") || is_open_ || slot.kept_version == kNone || slot.owns_kept || slot.kept_at < 0) return;
  const int64_t now = slot.kept_counter.current_version();
  if (now == slot.kept_at) return;
  if (slot.swapped) {
    WithGil gil;
    PythonRef is_exact = PythonRef::take(call_swaps("is_exact", slot.swapped.get()));
    if (PyObject_IsTrue(is_exact.get()) || HP_FAULT("swapped_changed")) return;
  }
  if (!slot.can_be_remade) {
    ChangedInPlace error;
    error.where = where_;
    error.what_changed = "of " + std::to_string(slot.nbytes) + " bytes";
    error.version = slot.kept_at;
    error.now = now;
    throw error;
  }
  slot.kept = slot.fetched = c10::Storage();
  slot.swapped = PythonRef();
  slot.kept_version = kNone;
}

inline c10::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.type() == c10::kCPU) return c10::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The kept bytes of a slot, fetched where they are swapped.
inline c10::Storage Tape::kept_storage(Slot& slot) {
  if (!slot.swapped) return slot.kept;
  if (slot.fetched && (!slot.fetched_on || *slot.fetched_on == current_stream(slot.fetched.device()))) return slot.fetched;
  WithGil gil;
  PythonRef value = PythonRef::take(call_swaps("fetch", slot.swapped.get()));
  TORCH_CHECK(THPVariable_Check(value.get()), where_ + ": the swap engine returned no tensor");
  c10::Storage storage = THPVariable_Unpack(value.get()).storage();
  if (slot.living_handles > 0) {
    slot.fetched = storage;
    slot.fetched_on = current_stream(storage.device());
  }
  return storage;
}

// Whether a handle's value is the held tensor itself: it was made outside, and the region does not write it.
inline bool Tape::is_held(const Handle& handle) const {
  return handle.held != kNone && slots_[handle.slot].kept_version == kNone;
}

// Whether a handle's value must be made by running ops.
inline bool Tape::is_remade(const Handle& handle) const {
  return handle.is_alive && handle.slot != kNone && !is_held(handle) &&
      slots_[handle.slot].kept_version != handle.version;
}

struct ReplayingFlag {
  bool& flag;
  explicit ReplayingFlag(bool& value) : flag(value) { flag = true; }
  ~ReplayingFlag() { flag = false; }
};

// In an open region values that the user's code still holds are there: they stand for themselves while the tape is run.
class Tape::WithLiving {
 public:
  explicit WithLiving(Tape& tape) : tape_(tape) {
    if (!tape.is_open_ || HP_FAULT("living_values")) return;
    for (size_t at = 0; at < tape.slots_.size(); ++at) {
      Slot& slot = tape.slots_[at];
      if (!slot.is_created || slot.kept_version != kNone) continue;
      auto living = slot.storage.lock();
      if (!living) continue;
      slot.kept = c10::Storage(std::move(living));
      slot.kept_version = slot.writes;
      borrowed_.push_back(static_cast<int>(at));
    }
  }
  ~WithLiving() {
    for (int at : borrowed_) {
      tape_.slots_[at].kept = c10::Storage();
      tape_.slots_[at].kept_version = kNone;
    }
  }

 private:
  Tape& tape_;
  std::vector<int> borrowed_;
};

// A gradient that is taken inside forward reads the last ops. How far back it goes is not known: twice as far with every miss.
inline int Tape::first_to_make(int asked, int task) {
  if (!is_open_) return 0;
  span_ = task == span_task_ ? span_ * 2 : 16;
  span_task_ = task;
  return span_ < asked ? asked - span_ : 0;
}

// The versions that an op reads.
inline void Tape::push_read(const Op& op, std::vector<std::pair<int, int>>& left) const {
  for (int argument = 0; argument < op.argument_count; ++argument) {
    const Argument& known = arguments_[op.first_argument + argument];
    for (int at = known.first; at < known.first + known.count; ++at) {
      const Ref& ref = refs_[at];
      if (ref.slot != kNone) left.emplace_back(ref.slot, ref.version);
    }
  }
}

// Counts the ops that must run for the values that are wanted, each op once.
class Tape::OpCount {
 public:
  explicit OpCount(const Tape& tape) : tape_(tape), is_counted_(tape.ops_.size(), false) {}

  // Adds a version of a slot, if it takes at most `most` ops more. Returns whether it does.
  bool add(int slot, int version, size_t most) {
    std::vector<int> added;
    std::vector<std::pair<int, int>> left{{slot, version}};
    while (!left.empty()) {
      const auto [index, wanted] = left.back();
      left.pop_back();
      visit_makers(index, wanted, [&](int op) {
        if (is_counted_[op]) return;
        is_counted_[op] = true;
        added.push_back(op);
        tape_.push_read(tape_.ops_[op], left);
      });
      if (added.size() <= most) continue;
      for (int op : added) is_counted_[op] = false;
      return false;
    }
    return true;
  }

 private:
  // The ops that make this version from the bytes that are there.
  template <typename Visit>
  void visit_makers(int index, int wanted, Visit visit) const {
    const Slot& slot = tape_.slots_[index];
    const bool is_there = slot.kept_version != kNone || !slot.is_created;
    const int kept = is_there ? std::max(slot.kept_version, 0) : kNone;
    if (is_there && wanted == kept) return;
    const bool is_from_kept = is_there && wanted > kept;
    if (!is_from_kept && slot.created_by != kNone) visit(slot.created_by);
    for (int version = is_from_kept ? kept : 0; version < wanted; ++version) visit(slot.written_by[version]);
  }

  const Tape& tape_;
  std::vector<bool> is_counted_;
};

// Of the handles from `first` to `end`: the version of each slot that a living one wants and that is not there. What this graph
// task has read before is not made for it again, unless it is `asked` for. In an open region only values come with the asked
// one that take few ops more: an earlier one, which this gradient may never read, can take all ops from the region's beginning.
inline std::vector<int> Tape::want_missing(Replay& replay, int first, int end, const Handle* asked) {
  const int task = torch::autograd::get_current_graph_task_id();
  std::vector<int> wanted(slots_.size(), kNone);
  OpCount count(*this);
  const bool is_limited = is_open_ && !HP_FAULT("costly_values");
  if (is_limited) count.add(asked->slot, asked->version, ops_.size());
  for (int at = end - 1; at >= first; --at) {
    const Handle& handle = handles_[at];
    if (!is_remade(handle) || handle.kept.defined() || slots_[handle.slot].made) continue;
    if (task != -1 && handle.served_in == task && &handle != asked) continue;
    if (is_limited && !count.add(handle.slot, handle.version, span_)) continue;
    wanted[handle.slot] = std::max(wanted[handle.slot], handle.version);
  }
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (wanted[slot] != kNone) replay.want(static_cast<int>(slot), wanted[slot]);
  }
  return wanted;
}

// What was given to the swap engine or to the hooks around the region, in the order in which a backward through the whole region
// will ask for it. Called with the GIL.
inline std::vector<PyObject*> Tape::given_in_order() {
  auto lock = locked(mutex_);
  std::vector<bool> is_listed(slots_.size(), false);
  std::vector<PyObject*> listed;
  const auto list = [&](int index) {
    const Slot& slot = slots_[index];
    if (is_listed[index]) return;
    is_listed[index] = true;
    if (slot.swapped) listed.push_back(slot.swapped.get());
    for (const Held& held : slot.held) {
      if (held.packed) listed.push_back(held.packed.get());
    }
  };
  bool has_replayed = false;
  for (auto handle = handles_.rbegin(); handle != handles_.rend(); ++handle) {
    if (handle->slot == kNone || handle->kept.defined()) continue;
    if (!is_remade(*handle)) {
      list(handle->slot);
    } else if (!has_replayed) {  // the first value that is missing makes all of them
      has_replayed = true;
      Replay replay(*this);
      want_missing(replay, 0, static_cast<int>(handles_.size()), nullptr);
      for (int slot : replay.read_slots()) list(slot);
    }
  }
  return listed;
}

inline void Tape::make_missing(const Handle& asked) {
  at::RecordFunction range(at::RecordScope::USER_SCOPE);  // in torch's profiler
  if (range.isActive()) range.before("hyper_parallel: replay");
  const int task = torch::autograd::get_current_graph_task_id();
  const int asked_at = static_cast<int>(&asked - handles_.data());
  const int first = first_to_make(asked_at, task);
  const int end = is_open_ ? asked_at + 1 : static_cast<int>(handles_.size());
  for (Slot& slot : slots_) check_kept(slot);
  const WithLiving with_living(*this);
  Replay replay(*this);
  const std::vector<int> wanted = want_missing(replay, first, end, &asked);
  const ReplayingFlag replaying(is_replaying);
  {
    struct InReplay {  // the swap engine loads ahead when a replay begins, and lets go of what it took when it ends
      Tape& tape;
      explicit InReplay(Tape& of) : tape(of) {
        if (!tape.swaps_) return;
        WithGil gil;
        Py_DECREF(tape.call_swaps("begin", nullptr));
      }
      ~InReplay() {
        if (!tape.swaps_) return;
        WithGil gil;
        PyObject* answer = tape.ask_swaps("end", nullptr);
        if (answer == nullptr) PyErr_Clear();
        Py_XDECREF(answer);
      }
    } in_replay(*this);
    replay.run();
  }
  for (Slot& slot : slots_) {
    for (Held& held : slot.held) {
      if (held.living_handles == 0) held.value = at::Tensor();  // every living handle's value is there now
    }
  }
  counters().replays.fetch_add(1, std::memory_order_relaxed);
  c10::optional<c10::Device> device;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (wanted[slot] == kNone) continue;
    slots_[slot].made = replay.storage_of(static_cast<int>(slot), wanted[slot]);
    TORCH_INTERNAL_ASSERT(slots_[slot].made, "every wanted slot was made");
    if (!device && slots_[slot].made.device().type() != c10::kCPU) device = slots_[slot].made.device();
  }
  if (device) {
    c10::impl::VirtualGuardImpl guard(device->type());
    made_stream_ = guard.getStream(*device);
    made_event_ = std::make_shared<c10::Event>(device->type());
    made_event_->record(*made_stream_);
  }
  if (task != -1) {
    std::weak_ptr<Tape> weak = weak_from_this();
    torch::autograd::Engine::get_default_engine().queue_callback([weak]() {
      auto tape = weak.lock();
      if (tape == nullptr) return;
      auto lock = locked(tape->mutex_);
      tape->collect_dead();
      if (!HP_FAULT("drop_made")) tape->drop_made();
    });
  }
}

inline void Tape::drop_made() {
  for (Slot& slot : slots_) {
    slot.made = slot.fetched = c10::Storage();
    for (Held& held : slot.held) held.value = at::Tensor();
  }
}

// A handle got its value in this backward. Autograd asks once for each node that it runs; a Python function may ask more often.
inline void Tape::count_served(Handle& handle) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1 || handle.slot == kNone || HP_FAULT("drop_served")) return;
  Slot& slot = slots_[handle.slot];
  if (slot.served_in != task) {
    slot.served_in = task;
    slot.served = 0;
  }
  if (handle.served_in != task) {
    handle.served_in = task;
    slot.served += 1;
  }
  served_slots_.push_back(handle.slot);
}

// Another node reads: what the last one read goes, unless handles wait for it.
inline void Tape::drop_served() {
  const void* node = torch::autograd::get_current_node().get();
  if (node == serving_node_) return;
  serving_node_ = node;
  for (int index : served_slots_) {
    Slot& slot = slots_[index];
    if (slot.served < slot.living_handles) continue;
    slot.made = slot.fetched = c10::Storage();
    for (Held& held : slot.held) held.value = at::Tensor();
  }
  served_slots_.clear();
}

// The tape whose value this thread read last: what its last node read goes too when another tape is read.
inline void Tape::drop_served_before() {
  thread_local std::weak_ptr<Tape> last;
  if (torch::autograd::get_current_graph_task_id() == -1) return;
  if (auto before = last.lock(); before != nullptr && before.get() != this) {
    Lock lock(before->mutex_, std::try_to_lock);  // where another thread reads it, that thread drops
    if (lock.owns_lock()) before->drop_served();
  }
  last = weak_from_this();
}

// A value that was made on one stream and is read on another.
inline void Tape::order_after_made(const c10::Storage& storage) {
  if (HP_FAULT("stream_event") || !made_event_ || storage.device().type() == c10::kCPU) return;
  c10::impl::VirtualGuardImpl guard(storage.device().type());
  const c10::Stream current = guard.getStream(storage.device());
  if (current == *made_stream_) return;
  made_event_->block(current);
  guard.recordDataPtrOnStream(storage.data_ptr(), current);
}

// Whether a handle's value can be given without a run and without a call of Python. Of a region that is closed.
inline bool Tape::is_there(const Handle& handle) const {
  if (handle.kept.defined()) return true;
  const Slot& slot = slots_[handle.slot];
  if (is_held(handle)) return slot.held[handle.held].value.defined() || slot.held[handle.held].alias.defined();
  if (slot.kept_version == handle.version) return !slot.swapped;
  return static_cast<bool>(slot.made);
}

inline at::Tensor Tape::unpack(int index, bool may_run) {
  drop_served_before();
  Lock lock;
  if (may_run) {
    if (!HP_FAULT("lock_of_unpack")) lock = locked(mutex_);
  } else {
    lock = Lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || is_open_ || HP_FAULT("lock_of_unpack")) return at::Tensor();
  }
  collect_dead();
  swap_pending();
  drop_served();
  Handle& handle = handles_[index];
  const int64_t now = handle.saved_version < 0 ? -1
      : (is_open_ || handle.kept.defined() || handle.closed_version < 0) ? handle.counter.current_version()
                                                                         : handle.closed_version;
  if (now != handle.saved_version && !HP_FAULT("saved_version")) {
    ChangedInPlace error;
    error.where = where_;
    error.what_changed = describe(handle.slot == kNone ? View::of(handle.kept) : views_[handle.view]);
    error.version = handle.saved_version;
    error.now = now;
    throw error;
  }
  if (handle.kept.defined()) return handle.kept;
  if (is_open_) follow_writes(handle);
  Slot& slot = slots_[handle.slot];
  check_kept(slot);
  if (!may_run && !is_there(handle)) return at::Tensor();
  count_served(handle);
  if (is_held(handle)) return held_value(slot.held[handle.held]);
  const View& view = views_[handle.view];
  if (slot.kept_version == handle.version) return view.over(kept_storage(slot));
  if (is_open_ && !slot.made && slot.kept_version == kNone && handle.version == slot.writes && !HP_FAULT("living_values")) {
    if (auto living = slot.storage.lock()) return view.over(c10::Storage(std::move(living)));
  }
  if (!slot.made) make_missing(handle);
  order_after_made(slot.made);
  return view.over(slot.made);
}

}  // namespace hyper_parallel
