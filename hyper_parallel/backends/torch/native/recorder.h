// The recorder: what happens at every op of an open region, and when autograd packs a value.
#pragma once

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "tensors.h"

namespace hyper_parallel {

// -- Slots ---------------------------------------------------------------------------------------------------------------

inline Tape::Tape(
    std::string where, std::shared_ptr<RegionHistory> region_history, Limits limits, std::shared_ptr<Fates> fates, Swaps swaps)
    : where_(std::move(where)),
      region_history_(std::move(region_history)),
      proven_(region_history_->get()),
      limits_(limits),
      tables_(region_history_->take_tables()),
      fates_(std::move(fates)),
      swaps_(std::move(swaps)),
      opened_in_task_(torch::autograd::get_current_graph_task_id()),
      settings_{Settings::now()} {
  counters().live_tapes.fetch_add(1, std::memory_order_relaxed);
}

inline Tape::~Tape() {
  region_history_->give_back(tables_);
  counters().live_tapes.fetch_sub(1, std::memory_order_relaxed);
}

inline void Tape::stop(std::string reason) {
  if (reason_.empty()) reason_ = std::move(reason);
}

// The view through which a tensor shows its slot.
inline int Tape::view_of(Slot& slot, const at::Tensor& tensor) {
  if (slot.last_view == kNone || !views_[slot.last_view].is_of(tensor)) {
    slot.last_view = static_cast<int>(views_.size());
    views_.emplace_back();
    views_.back().take(tensor);
  }
  return slot.last_view;
}

// A tensor as the tape refers to it now. A storage that is not known is outside: the tensor is held.
inline Ref Tape::find_or_hold(const at::Tensor& tensor) {
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const auto* key = storage.unsafeGetStorageImpl();
  int index = slot_by_storage_.find(key);
  if (index == kNone) {
    index = static_cast<int>(slots_.size());
    slots_.emplace_back();
    Slot& slot = slots_.back();
    slot.storage = storage.getWeakStorageImpl();
    slot.nbytes = storage.nbytes();
    slot.origin = 1;
    slot_by_storage_.add(key, index);
  }
  Slot& slot = slots_[index];
  Ref ref;
  ref.slot = index;
  ref.version = slot.writes;
  ref.view = view_of(slot, tensor);
  if (slot.is_created || slot.kept_version != kNone) return ref;
  for (size_t at = 0; at < slot.held.size(); ++at) {
    if (slot.held[at].view == ref.view || views_[slot.held[at].view] == views_[ref.view]) {
      ref.held = static_cast<int>(at);
      slot.held[at].is_used = true;
      return ref;
    }
  }
  ref.held = static_cast<int>(slot.held.size());
  slot.held.emplace_back();
  Held& entry = slot.held.back();
  entry.view = ref.view;
  if (const auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    entry.history = {meta->grad_fn_, meta->output_nr_};
  }
  entry.alias = alias_of(tensor);
  entry.storage = key;
  entry.is_used = true;
  if (counts_versions(tensor)) {
    entry.counter = tensor.unsafeGetTensorImpl()->version_counter();
    entry.version = entry.counter.current_version();
  }
  return ref;
}

// Keep a created slot's bytes from here on: what is there now is what its readers read.
inline void Tape::keep_alive(Slot& slot, const at::Tensor& tensor, bool can_be_remade, bool is_saved_by_policy) {
  if (slot.kept_version != kNone) return;
  slot.can_be_remade = can_be_remade;
  if (counts_versions(tensor)) {
    slot.kept_counter = tensor.unsafeGetTensorImpl()->version_counter();
    slot.kept_at = slot.kept_counter.current_version();
  }
  slot.kept = tensor.unsafeGetTensorImpl()->unsafe_storage();
  slot.owns_kept = false;
  slot.kept_version = slot.writes;
  slot.is_stuck = !can_be_remade && !is_saved_by_policy;
}

// Call a method of the object that knows the swap engine; null after an error. With the GIL. The engine's own ops are on no tape.
inline PyObject* Tape::ask_swaps(const char* method, PyObject* argument) {
  c10::impl::ExcludeDispatchKeyGuard unseen(kRecorderKey);
  return argument == nullptr ? PyObject_CallMethod(swaps_.get(), method, nullptr)
                             : PyObject_CallMethod(swaps_.get(), method, "O", argument);
}

inline PyObject* Tape::call_swaps(const char* method, PyObject* argument) {
  PyObject* answer = ask_swaps(method, argument);
  if (answer == nullptr) throw python_error();
  return answer;
}

// Give an op's output to the swap engine. False where it stays: it is small, or there is no far memory for its device.
inline bool Tape::swap_out(Slot& slot, const at::Tensor& tensor, bool can_be_remade) {
  WithGil gil;
  PythonRef value = PythonRef::take(THPVariable_Wrap(tensor));
  PythonRef token = PythonRef::take(call_swaps("swap", value.get()));
  if (token.get() == Py_None) return false;
  slot.swapped = std::move(token);
  slot.can_be_remade = can_be_remade;
  slot.kept_version = slot.writes;
  if (counts_versions(tensor)) {
    slot.kept_counter = tensor.unsafeGetTensorImpl()->version_counter();
    slot.kept_at = slot.kept_counter.current_version();
  }
  // A tape that is not proven is run at the end of forward, and reads these bytes.
  if (!still_proven_) slot.fetched = tensor.unsafeGetTensorImpl()->unsafe_storage();
  return true;
}

inline void Tape::swap_pending() {
  if (pending_swaps_.empty()) return;
  const auto pending = std::move(pending_swaps_);
  pending_swaps_.clear();
  if (!reason_.empty()) return;  // the op whose outputs they are is not on the tape
  for (const auto& [index, tensor] : pending) {
    Slot& slot = slots_[index];
    const bool can_be_remade = ops_[slot.created_by].may_run;
    if (!swap_out(slot, tensor, can_be_remade)) keep_alive(slot, tensor, can_be_remade);
  }
}

// A kernel inside a Python autograd.Function may have written the bytes after their copy out began.
inline void Tape::keep_instead_of_swap(Slot& slot, const at::Tensor& tensor) {
  if (slot.kept_version != slot.writes || HP_FAULT("swapped_functions")) return;
  slot.swapped = PythonRef();
  slot.fetched = c10::Storage();
  slot.kept_version = kNone;
  keep_alive(slot, tensor, false);
}

// What becomes of this op's output. Ops of a gradient that is taken inside forward are not the policy's.
inline Fate Tape::fate_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  if (c10::InferenceMode::is_enabled() || torch::autograd::get_current_graph_task_id() != opened_in_task_) {
    return Fate::kRecompute;
  }
  const Answers& answers = fates_->of(op);
  if (answers.is_constant() && answers.fate == Fate::kRecompute) return Fate::kRecompute;
  if (answers.is_passed_over && first < stack.size() && stack[first].isTensor() && stack[first].toTensor().defined()) {
    WithGil gil;
    PythonRef value = PythonRef::take(THPVariable_Wrap(stack[first].toTensor()));
    PythonRef answer = PythonRef::take(PyObject_CallFunctionObjArgs(answers.is_passed_over.get(), value.get(), nullptr));
    if (!answer) throw python_error();
    if (PyObject_IsTrue(answer.get())) return Fate::kRecompute;
  }
  if (answers.ask) {
    WithGil gil;
    PythonRef answer = PythonRef::take(PyObject_CallFunctionObjArgs(answers.ask.get(), nullptr));
    if (!answer) throw python_error();
    return fate_from(answer.get());
  }
  if (answers.by_occurrence.empty()) return answers.fate;
  const size_t count = counts_[&answers]++;
  return count < answers.by_occurrence.size() ? answers.by_occurrence[count] : Fate::kRecompute;
}

// Before a recorded op changes a storage: what is kept of it must not change with it.
inline bool Tape::before_write(Slot& slot) {
  if (slot.swapped && slot.kept_version == slot.writes && !slot.owns_kept && !HP_FAULT("swapped_write")) {
    auto source = slot.storage.lock();
    TORCH_INTERNAL_ASSERT(source, "a storage that an op is given lives");
    if (slot.fetched) slot.fetched = copy_of(c10::Storage(source));
    slot.owns_kept = true;  // the write is ordered after the copy out, or there is a copy of ours
    WithGil gil;
    PythonRef has_far_copy = PythonRef::take(call_swaps("before_write", slot.swapped.get()));
    if (!PyObject_IsTrue(has_far_copy.get())) {
      slot.kept = copy_of(c10::Storage(std::move(source)));
      slot.swapped = PythonRef();
      slot.fetched = c10::Storage();
    }
    return true;
  }
  if (slot.swapped) return true;  // its far copy was made before an earlier write
  if (slot.is_created) {
    if (slot.kept_version != kNone && !slot.owns_kept && !HP_FAULT("copy_of_kept")) {
      slot.kept = copy_of(slot.kept);
      slot.owns_kept = true;
    }
    return true;
  }
  if (slot.kept_version != kNone) return true;  // copied before an earlier write
  if (HP_FAULT("copy_before_write")) return true;
  if (!HP_FAULT("copy_limit") && copied_bytes_ + slot.nbytes > limits_.copied_before_write) {
    stop("it changes a tensor of " + std::to_string(slot.nbytes) + " bytes that was made outside the region");
    return false;
  }
  auto strong = slot.storage.lock();
  TORCH_INTERNAL_ASSERT(strong, "a storage that an op is given lives");
  slot.kept = copy_of(c10::Storage(std::move(strong)));
  slot.owns_kept = true;
  slot.kept_version = 0;
  copied_bytes_ += slot.nbytes;
  slot.held.clear();
  return true;
}

inline bool Tape::refer(const at::Tensor& tensor, bool is_overwritten, Ref& ref) {
  if (const char* reason = why_not_plain(tensor)) {
    stop(std::string("it uses ") + reason);
    return false;
  }
  ref = find_or_hold(tensor);
  Slot& slot = slots_[ref.slot];
  if (slot.is_created && slot.kept_version == kNone && !is_overwritten) {
    const bool is_unset = slot.is_unset && tensor.numel() > 0 && !HP_FAULT("unset_outputs");
    if (is_unset || (is_from_python_function(tensor) && !HP_FAULT("python_functions"))) keep_alive(slot, tensor, false);
  } else if (slot.swapped && is_from_python_function(tensor)) {
    keep_instead_of_swap(slot, tensor);
  }
  return true;
}

// -- Ops -----------------------------------------------------------------------------------------------------------------

inline bool remember_draws(const torch::jit::Stack& stack, size_t count, std::vector<std::pair<at::Generator, at::Tensor>>& draws) {
  at::Generator generator;
  c10::optional<c10::Device> device;
  for (size_t at = stack.size() - count; at < stack.size(); ++at) {
    const auto& value = stack[at];
    if (value.isGenerator()) generator = value.toGenerator();
    if (value.isDevice() && !device) device = value.toDevice();
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!device) device = tensor.device();
    });
  }
  Unseen unseen;
  if (!generator.defined()) {
    c10::Device on = device.value_or(c10::Device(c10::kCPU));
    if (on.type() != c10::kCPU && !on.has_index()) {
      on = c10::impl::VirtualGuardImpl(on.type()).getDevice();
    }
    generator = at::globalContext().defaultGenerator(on);
  }
  std::lock_guard<std::mutex> lock(generator.mutex());
  draws.emplace_back(generator, generator.get_state());
  return true;
}

inline void Tape::forget_arguments(const Draft& draft) {
  arguments_.resize(draft.first_argument);
  refs_.resize(draft.first_ref);
}

// A region may change settings for some of its ops.
inline void Tape::remember_settings() {
  const auto& now = Settings::now();
  if (now == settings_.back() || *now == *settings_.back() || HP_FAULT("settings_of_op")) return;
  settings_.push_back(now);
}

inline bool is_among(const c10::SmallVectorImpl<uint8_t>& positions, size_t at) {
  return std::find(positions.begin(), positions.end(), at) != positions.end();
}

inline bool Tape::begin(
    const c10::OperatorHandle& op, const OpFacts& facts, const torch::jit::Stack& stack, Draft& draft) {
  if (!is_open_ || is_replaying || !reason_.empty()) return false;
  swap_pending();
  if (facts.kind == OpKind::kRefused) {
    stop(std::string("it runs ") + facts.reason + " (" + op.operator_name().name + ")");
    return false;
  }
  draft.tape = this;
  const size_t count = facts.argument_count;
  draft.facts = &facts;
  draft.hash = facts.hash;
  draft.first_argument = arguments_.size();
  draft.argument_count = count;
  draft.first_ref = refs_.size();
  const size_t base = stack.size() - count;
  bool hides_writes = !facts.hidden_writes.empty();
  if (hides_writes && facts.training_flag >= 0 && static_cast<size_t>(facts.training_flag) < count) {
    const auto& flag = stack[base + facts.training_flag];
    hides_writes = !flag.isBool() || flag.toBool();
  }
  for (size_t at = 0; at < count; ++at) {
    const auto& value = stack[base + at];
    arguments_.emplace_back();
    Argument& argument = arguments_.back();
    argument.first = static_cast<int>(refs_.size());
    const bool writes = is_among(facts.writes, at) || (hides_writes && is_among(facts.hidden_writes, at));
    auto add = [&](const at::Tensor& tensor) {
      refs_.emplace_back();
      if (!tensor.defined()) return true;
      Ref& ref = refs_.back();
      if (!refer(tensor, writes && facts.overwrites, ref)) return false;
      draft.hash = mix(draft.hash, mix(slots_[ref.slot].origin, ref.version > 0 ? 2 : 1));
      if (writes) draft.written.emplace_back(ref.slot, tensor);
      return true;
    };
    bool is_fine = true;
    if (value.isTensor() && value.toTensor().defined()) {
      argument.kind = Argument::Kind::kTensor;
      is_fine = add(value.toTensor());
    } else if (value.isTensorList()) {
      argument.kind = Argument::Kind::kTensors;
      for (const at::Tensor& tensor : value.toTensorVector()) is_fine = is_fine && add(tensor);
    } else if (value.isOptionalTensorList()) {
      argument.kind = Argument::Kind::kOptionalTensors;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        is_fine = is_fine && add(tensor.has_value() ? *tensor : at::Tensor());
      }
    } else {
      argument.constant = value;
    }
    if (!is_fine) {
      forget_arguments(draft);
      return false;
    }
    argument.count = static_cast<int>(refs_.size()) - argument.first;
  }
  if (fates_) draft.fate = fate_of(op, stack, base);
  for (auto& [slot, tensor] : draft.written) {
    if (before_write(slots_[slot])) continue;
    forget_arguments(draft);
    return false;
  }
  // A copy that was made just now stands for the tensor in this op too.
  if (!draft.written.empty()) {
    for (size_t at = draft.first_ref; at < refs_.size(); ++at) {
      Ref& ref = refs_[at];
      if (ref.slot != kNone && !slots_[ref.slot].is_created && slots_[ref.slot].kept_version != kNone) ref.held = kNone;
    }
  }
  if (facts.is_random) remember_draws(stack, count, draft.draws);
  remember_settings();
  return true;
}

inline void Tape::end(const c10::OperatorHandle& handle, Draft& draft, const torch::jit::Stack& stack) {
  const OpFacts& facts = *draft.facts;
  c10::SmallVector<Output, 2> created;
  int position = 0;
  const char* refused = nullptr;
  const int this_op = static_cast<int>(ops_.size());
  const size_t pair = mix(last_hash_, draft.hash);
  const bool is_new = proven_->count(pair) == 0 && !HP_FAULT("probation");
  const size_t count = facts.result_count;
  for (size_t at = stack.size() - count; at < stack.size(); ++at) {
    for_each_tensor(stack[at], [&](const at::Tensor& tensor) {
      const int here = position++;
      if (refused != nullptr || (refused = why_not_plain(tensor)) != nullptr) return;
      const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
      const int index = static_cast<int>(slots_.size());
      // Known: it was written in place, or is a view that the schema does not tell of.
      if (!slot_by_storage_.add(storage.unsafeGetStorageImpl(), index)) return;
      slots_.emplace_back();
      Slot& slot = slots_.back();
      slot.storage = storage.getWeakStorageImpl();
      slot.nbytes = storage.nbytes();
      slot.is_created = true;
      slot.is_unset = facts.leaves_bytes_unset;
      slot.created_by = this_op;
      slot.origin = mix(facts.hash, static_cast<size_t>(here) + 2);
      if (is_new) still_proven_ = false;
      created.push_back({index, here});
      const bool is_small = slot.nbytes <= limits_.steering_output && !HP_FAULT("steering_outputs");
      const bool is_index = c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
      const bool can_be_remade = facts.kind == OpKind::kReplayable;
      const bool is_route = is_small && (facts.is_steering || is_index) && !slot.is_unset;
      if (draft.fate == Fate::kSwap && !is_route) {
        pending_swaps_.emplace_back(index, alias_of(tensor));  // `swap_tensors` refuses a tensor that others refer to
        return;
      }
      if (draft.fate != Fate::kRecompute || !can_be_remade || is_route) {
        keep_alive(slot, tensor, can_be_remade, draft.fate == Fate::kSave);
        if (draft.fate == Fate::kSave) saved_bytes_ += slot.nbytes;
      }
    });
  }
  if (refused != nullptr) {
    stop(std::string("an op returned ") + refused + " (" + handle.operator_name().name + ")");
    forget_arguments(draft);
    return;
  }
  if (created.empty() && draft.written.empty()) {
    forget_arguments(draft);
    return;
  }
  c10::SmallVector<std::pair<int, int>, 2> written;
  for (auto& [index, tensor] : draft.written) {
    Slot& slot = slots_[index];
    const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (slot.nbytes != storage.nbytes() || slot_by_storage_.find(storage.unsafeGetStorageImpl()) == kNone) {
      stop("an op gave a tensor another storage (" + handle.operator_name().name + ")");
      forget_arguments(draft);
      return;
    }
    bool is_twice = false;
    for (const auto& known : written) is_twice = is_twice || known.first == index;
    if (is_twice) continue;
    slot.is_unset = false;
    slot.writes += 1;
    slot.written_by.push_back(this_op);
    slot.made = c10::Storage();  // of an earlier version, for a gradient that was taken inside this forward
    written.emplace_back(index, slot.writes);
  }
  ops_.push_back(Op{
      handle, static_cast<int>(draft.first_argument), static_cast<int>(draft.argument_count),
      std::move(created), std::move(written), facts.kind == OpKind::kReplayable, c10::GradMode::is_enabled(),
      static_cast<int>(settings_.size()) - 1, std::move(draft.draws)});
  counters().recorded_ops.fetch_add(1, std::memory_order_relaxed);
  last_hash_ = draft.hash;
  if (is_new) {
    still_proven_ = false;
    sequence_.push_back(pair);
  }
}

// -- Packing -------------------------------------------------------------------------------------------------------------

// Autograd notices a change of a saved value by its version counter. A change that the counter does not show (through `.data`; by
// an op that fills an argument after autograd saved it, as `rrelu` does with its noise) is read by the plain step's backward.
inline void Tape::follow_writes(Handle& handle) {
  if (handle.slot == kNone || HP_FAULT("unseen_by_counter")) return;
  const bool is_counted = handle.saved_version >= 0 && handle.counter.current_version() != static_cast<uint32_t>(handle.saved_version);
  if (!is_counted) handle.version = slots_[handle.slot].writes;
}

inline int Tape::pack(const at::Tensor& tensor) {
  auto lock = locked(mutex_);
  collect_dead();
  swap_pending();
  Handle handle;
  // A subclass may have no memory of its own. Autograd gives a tensor without a graph, so it is kept as it is.
  const bool is_subclass = tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  if (is_subclass && is_open_) stop("it saves a tensor subclass");
  const bool is_plain = is_open_ && reason_.empty() && why_not_plain(tensor) == nullptr;
  if (counts_versions(tensor)) {
    handle.counter = tensor.unsafeGetTensorImpl()->version_counter();
    handle.saved_version = handle.counter.current_version();
  }
  if (is_plain) {
    const Ref ref = find_or_hold(tensor);
    handle.slot = ref.slot;
    handle.held = ref.held;
    handle.view = ref.view;
    Slot& slot = slots_[handle.slot];
    if (slot.is_created && slot.is_unset && tensor.numel() > 0 && !HP_FAULT("unset_saved")) keep_alive(slot, tensor, false);
    if (slot.swapped && is_from_python_function(tensor)) keep_instead_of_swap(slot, tensor);
    handle.version = slot.writes;
    slot.living_handles += 1;
    if (handle.held != kNone) slot.held[handle.held].living_handles += 1;
  }
  // On probation the value is kept even where it is held: the region may change it yet.
  if (!is_plain || !still_proven_) handle.kept = is_subclass ? tensor : alias_of(tensor);
  handles_.push_back(std::move(handle));
  return static_cast<int>(handles_.size()) - 1;
}

}  // namespace hyper_parallel
