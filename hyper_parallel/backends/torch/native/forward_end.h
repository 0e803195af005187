// The end of a region's forward: what the hooks around it see, and the proof that the tape makes the same values.
#pragma once

#include <ATen/ops/equal.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>

#include "handles.h"

namespace hyper_parallel {

inline void Tape::abandon() {
  std::vector<torch::autograd::Edge> graphs;  // dropped after the lock: they may hold handles of this tape
  auto lock = locked(mutex_);
  for (Slot& slot : slots_) {
    for (Held& entry : slot.held) graphs.push_back(std::move(entry.history));
  }
  pending_swaps_.clear();
  stop("its forward raised");
}

// While the region runs it is not known what backward will need, so everything that cannot be made again is kept. At its end it
// is known: an op whose value no handle's ops read (a weight that was unpacked for one product, say) holds nothing. What a policy
// keeps counts as not there, because a change of it may ask its ops again.
inline void Tape::drop_unread() {
  if (std::none_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.is_stuck; })) return;
  std::vector<bool> is_read(slots_.size(), false);
  std::vector<bool> has_run(ops_.size(), false);
  std::vector<std::pair<int, int>> left;
  for (const Handle& handle : handles_) {
    if (handle.is_alive && handle.slot != kNone) left.emplace_back(handle.slot, handle.version);
  }
  const auto run = [&](int op) {
    if (has_run[op]) return;
    has_run[op] = true;
    push_read(ops_[op], left);
  };
  while (!left.empty()) {
    const auto [index, wanted] = left.back();
    left.pop_back();
    const Slot& slot = slots_[index];
    is_read[index] = true;
    const bool is_there = !slot.is_created || (slot.kept_version != kNone && !slot.can_be_remade);
    const int first = is_there ? std::max(slot.kept_version, 0) : 0;
    if (is_there && wanted == first) continue;
    if ((!is_there || wanted < first) && slot.created_by != kNone) run(slot.created_by);
    for (int version = wanted > first ? first : 0; version < wanted; ++version) run(slot.written_by[version]);
  }
  for (size_t at = 0; at < slots_.size(); ++at) {
    Slot& slot = slots_[at];
    if (!slot.is_stuck || is_read[at] || HP_FAULT("unread_values")) continue;
    slot.kept = c10::Storage();
    slot.kept_version = kNone;
    slot.is_stuck = slot.owns_kept = false;
  }
}

inline size_t Tape::stuck_bytes() {
  auto lock = locked(mutex_);
  size_t total = 0;
  for (const Slot& slot : slots_) {
    if (slot.is_stuck) total += slot.nbytes;
  }
  return total;
}

inline void Tape::close() {
  auto lock = locked(mutex_);
  collect_dead();
  swap_pending();
  is_open_ = false;
  slot_by_storage_.clear();
  if (reason_.empty()) drop_unread();
  for (Handle& handle : handles_) {
    if (handle.saved_version >= 0) handle.closed_version = handle.counter.current_version();
    follow_writes(handle);
    if (handle.slot != kNone && !is_remade(handle)) handle.kept = at::Tensor();
  }
  for (Slot& slot : slots_) {
    slot.storage.reset();  // no address is looked up any more; before torch 2.13 it would keep the storage's Python object
    if (slot.kept_at >= 0) slot.kept_at = slot.kept_counter.current_version();
  }
}

// Of the region's own values that autograd saved; without a tape they would be held until backward. Its outputs are held anyway.
inline size_t Tape::handed_bytes(const std::vector<at::Tensor>& outputs) {
  auto lock = locked(mutex_);
  std::vector<bool> is_output(slots_.size(), false);
  for (const at::Tensor& output : outputs) {
    if (why_not_plain(output) != nullptr) continue;
    const int found = slot_by_storage_.find(output.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    if (found != kNone) is_output[found] = true;
  }
  size_t total = 0;
  for (size_t at = 0; at < slots_.size(); ++at) {
    if (slots_[at].is_created && slots_[at].living_handles > 0 && !is_output[at]) total += slots_[at].nbytes;
  }
  return total;
}

// Small tensors that the region reads and others may change before backward: a copy stands for each.
inline void Tape::copy_held(const std::vector<at::Tensor>& tensors) {
  auto lock = locked(mutex_);
  for (Slot& slot : slots_) {
    if (slot.is_created || slot.kept_version != kNone || slot.held.empty()) continue;
    for (const at::Tensor& tensor : tensors) {
      const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
      if (HP_FAULT("small_buffers") || slot.held[0].storage != storage.unsafeGetStorageImpl()) continue;
      slot.kept = copy_of(storage);
      slot.owns_kept = true;
      slot.kept_version = 0;
      slot.held.clear();
      break;
    }
  }
}

// The pack hook of every tape, which the extension sets.
inline PyCFunction pack_of_tapes = nullptr;

// Whether this is the graph of a view or a cast of a leaf: of a weight, as `is_parameter_derived` of storages.py knows it.
inline bool is_of_a_leaf(const torch::autograd::Edge& history) {
  constexpr int kLongestChain = 8;
  auto node = history.function;
  for (int step = 0; node != nullptr; ++step) {
    const std::string name = node->name();
    if (name.find("AccumulateGrad") != std::string::npos) return true;
    const bool passes_through = is_one_of(
        name, {"TBackward0", "ToCopyBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0",
               "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0", "SelectBackward0", "SliceBackward0",
               "UnsqueezeBackward0", "ExpandBackward0"});
    if (!passes_through || step == kLongestChain) return false;
    node = node->next_edge(0).function;
  }
  return true;
}

// What the hooks around a region see, at its end, of a tensor that is no argument. Hooks want to know weights from activations.
// Another graph is not shown: where it was made inside the region, by another thread, what a hook keeps could hold this tape. A tape
// around it asks for the graph and lets go of it when its region ends.
inline PythonRef shown_to(PyObject* pack, const Held& entry) {
  const bool is_tape = PyCFunction_Check(pack) && PyCFunction_GetFunction(pack) == pack_of_tapes;
  at::Tensor shown = alias_of(entry.alias);
  if (entry.history.is_valid() && (is_tape || is_of_a_leaf(entry.history))) {
    torch::autograd::impl::set_gradient_edge(shown, entry.history);
  }
  return PythonRef::take(THPVariable_Wrap(std::move(shown)));
}

// The copies of swapped arguments begin here, before the region's own work. Called with the GIL.
inline void Tape::show_arguments(const std::vector<at::Tensor>& tensors, PyObject* pack, PyObject* unpack) {
  if (HP_FAULT("hooks_around")) return;
  for (const at::Tensor& tensor : tensors) {
    if (why_not_plain(tensor) != nullptr || (tensor.dim() == 0 && tensor.device().type() == c10::kCPU)) continue;
    Ref ref;
    {
      auto lock = locked(mutex_);
      ref = find_or_hold(tensor);
      Held& entry = slots_[ref.slot].held[ref.held];
      if (entry.is_argument) continue;
      entry.is_argument = true;
      entry.is_used = false;
    }
    PythonRef value = PythonRef::take(THPVariable_Wrap(tensor));
    PyObject* packed = PyObject_CallFunctionObjArgs(pack, value.get(), nullptr);
    if (packed == nullptr) throw python_error();
    auto lock = locked(mutex_);
    slots_[ref.slot].held[ref.held].packed = PythonRef::take(packed);
    slots_[ref.slot].held[ref.held].unpack = PythonRef(unpack);
  }
}

// Outside tensors go through the hooks around the region, which decide what becomes of them: arguments, their views, and
// tensors that have a history. Weights and constants are held as they are. Called with the GIL.
inline void Tape::show_held(PyObject* pack, PyObject* unpack) {
  for (Slot& slot : slots_) {
    bool is_argument = false;
    for (const Held& entry : slot.held) is_argument = is_argument || entry.is_argument;
    for (Held& entry : slot.held) {
      const auto graph = entry.history;  // goes at the end of this turn, without the lock
      if (entry.packed) {  // shown when the region began
        auto lock = locked(mutex_);
        entry.history = {};
        entry.alias = at::Tensor();
        if (!entry.is_used) entry.packed = PythonRef();
        continue;
      }
      const bool is_scalar = views_[entry.view].sizes.empty() && entry.alias.device().type() == c10::kCPU;
      const bool is_shown = pack != nullptr && !is_scalar && (is_argument || graph.is_valid()) && !HP_FAULT("hooks_around");
      PythonRef value = is_shown ? shown_to(pack, entry) : PythonRef();
      entry.history = {};
      if (!is_shown) continue;
      PyObject* packed = PyObject_CallFunctionObjArgs(pack, value.get(), nullptr);
      if (packed == nullptr) throw python_error();
      auto lock = locked(mutex_);
      entry.packed = PythonRef::take(packed);
      entry.unpack = PythonRef(unpack);
      entry.alias = at::Tensor();
    }
  }
}

// Swapped outputs that an op of torch made are remade as well while a tape is proven: a kernel that the dispatcher does not see
// may have changed one after its copy out began.
class Tape::WithoutSwaps {
 public:
  explicit WithoutSwaps(Tape& tape) : tape_(tape), aside_(tape.slots_.size()) {
    for (size_t at = 0; at < aside_.size(); ++at) {
      Slot& slot = tape.slots_[at];
      if (!slot.swapped || !slot.can_be_remade || slot.writes != slot.kept_version || HP_FAULT("swapped_probation")) continue;
      aside_[at].swapped = std::move(slot.swapped);
      aside_[at].original = std::move(slot.fetched);
      slot.swapped = PythonRef();
      slot.fetched = c10::Storage();
      slot.kept_version = kNone;
    }
  }
  ~WithoutSwaps() {
    for (size_t at = 0; at < aside_.size(); ++at) {
      if (!aside_[at].swapped) continue;
      tape_.slots_[at].swapped = std::move(aside_[at].swapped);
      tape_.slots_[at].kept_version = tape_.slots_[at].writes;
    }
  }
  const c10::Storage& original(int slot) const { return aside_[slot].original; }
  void forget_original(int slot) { aside_[slot].original = c10::Storage(); }

 private:
  struct Aside {
    PythonRef swapped;
    c10::Storage original;  // none where the ops up to it were proven before
  };
  Tape& tape_;
  std::vector<Aside> aside_;
};

inline std::string Tape::difference(const Handle& handle, const c10::Storage& made, const c10::Storage& original) const {
  if (handle.saved_version >= 0 && handle.closed_version != handle.saved_version) return "";  // raises when it is wanted
  Unseen unseen;
  const View& view = views_[handle.view];
  if (HP_FAULT("probation_comparison") || at::equal(view.bits(made), view.bits(original))) return "";
  const Slot& slot = slots_[handle.slot];
  const Op* op = slot.created_by == kNone ? nullptr : &ops_[slot.created_by];
  return "a value " + describe(view) + (op ? " of " + op->handle.operator_name().name : std::string()) +
      " came out different when it was made again";
}

// Every value is compared as soon as it was made, and what came out equal is let go at once: two copies of all values of a
// region would be more than its backward takes.
inline std::string Tape::prove() {
  auto lock = locked(mutex_);
  collect_dead();
  WithoutSwaps without_swaps(*this);
  std::unordered_map<int, std::vector<int>> by_slot;  // handles on probation
  Replay replay(*this);
  for (size_t at = 0; at < handles_.size(); ++at) {
    const Handle& handle = handles_[at];
    if (is_remade(handle)) by_slot[handle.slot].push_back(static_cast<int>(at));
  }
  for (const auto& [slot, on_probation] : by_slot) {
    int version = kNone;
    for (int at : on_probation) version = std::max(version, handles_[at].version);
    replay.want_to_see(slot, version);
  }
  std::string different;
  try {
    const ReplayingFlag replaying(is_replaying);
    replay.run([&](int slot, const c10::Storage& made) {
      bool is_equal = true;
      for (int at : by_slot[slot]) {
        Handle& handle = handles_[at];
        const c10::Storage original = handle.kept.defined() ? handle.kept.storage() : without_swaps.original(slot);
        const std::string found = original ? difference(handle, made, original) : std::string();
        if (found.empty()) {
          handle.kept = at::Tensor();
        } else {
          handle.kept = views_[handle.view].over(original);
          is_equal = false;
        }
        if (different.empty()) different = found;
      }
      if (is_equal) without_swaps.forget_original(slot);
    });
  } catch (python_error& error) {
    WithGil gil;
    error.restore();
    PyErr_Clear();
    different = "it could not be run again: a Python error";
  } catch (const c10::Error& error) {
    different = std::string("it could not be run again: ") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    different = std::string("it could not be run again: ") + error.what();
  }
  if (different.empty()) {
    region_history_->add(sequence_);
    still_proven_ = true;
    return different;
  }
  for (const auto& [slot, on_probation] : by_slot) {  // what was not compared stays
    const c10::Storage& original = without_swaps.original(slot);
    for (int at : on_probation) {
      if (original && !handles_[at].kept.defined()) handles_[at].kept = views_[handles_[at].view].over(original);
    }
  }
  return different;
}

inline size_t Tape::kept_bytes() {
  auto lock = locked(mutex_);
  size_t total = 0;
  for (const Slot& slot : slots_) {
    if (slot.kept) total += slot.nbytes;
  }
  return total;
}

inline size_t Tape::recomputed_bytes() {
  auto lock = locked(mutex_);
  size_t total = 0;
  for (const Slot& slot : slots_) {
    if (slot.is_created && slot.kept_version == kNone) total += slot.nbytes;
  }
  return total;
}

inline size_t Tape::held_count() {
  auto lock = locked(mutex_);
  size_t total = 0;
  for (const Slot& slot : slots_) total += slot.held.size();
  return total;
}

}  // namespace hyper_parallel
