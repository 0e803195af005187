// The runner: makes the values again that living handles want, and the end of a region's forward.
#pragma once

#include <ATen/ops/equal.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>

#include <functional>
#include <limits>
#include <string>

#include "recorder.h"

namespace hyper_parallel {

// A value is not what forward read or saved. The Python side makes an InPlaceChangeError of it.
struct ChangedInPlace : std::exception {
  std::string where;
  std::string what_changed;      // shape and dtype
  const void* storage = nullptr;  // of a tensor from outside the region; null for a saved value
  int64_t version = 0;
  int64_t now = 0;
  const char* what() const noexcept override { return "a tensor was changed in place"; }
};

// No stream is used for texts in this extension: with the standard library of some machines a stream of ours ends the process
// inside torch's.
inline std::string describe(const View& view) {
  std::string text = "(";
  for (size_t at = 0; at < view.sizes.size(); ++at) text += (at ? ", " : "") + std::to_string(view.sizes[at]);
  return text + (view.sizes.size() == 1 ? ",) " : ") ") + c10::toString(c10::typeMetaToScalarType(view.dtype));
}

// One run over a tape.
//
// A slot may be wanted at versions on both sides of the version at which its bytes are kept. So there are two chains: the
// *upper* one begins with the kept bytes, or with the creating op where nothing is kept, the *lower* one with the creating op
// and ends below the kept version. The pass backwards marks which ops are needed and where each chain is last read; the pass
// forwards runs them and drops each storage behind its last reader.
class Replay {
 public:
  explicit Replay(Tape& tape)
      : tape_(tape), upper_(tape.slots_.size()), lower_(tape.slots_.size()), is_needed_(tape.ops_.size(), false) {}

  void want(int slot, int version) { mark(slot, version, kForever); }

  // Wanted for a look: `look` is called when this version was made, and the storage goes when no op reads it any more.
  using Look = std::function<void(int slot, const c10::Storage& made)>;
  void want_to_see(int slot, int version) {
    mark(slot, version, kNone);
    seen_at_.emplace(slot, version);
  }

  void run(Look look = nullptr) {
    look_ = std::move(look);
    plan();
    BelowAutograd below_autograd;
    const c10::AutoGradMode mode_of_backward(false);
    UnderSettings under_settings;
    Restorer restorer;
    for (size_t at = 0; at < tape_.ops_.size(); ++at) {
      if (!is_needed_[at]) continue;
      under_settings.use(*tape_.settings_[tape_.ops_[at].settings]);
      run_op(tape_.ops_[at], static_cast<int>(at), restorer);
    }
  }

  // The slots whose kept bytes the needed ops read, in the order in which they do.
  std::vector<int> read_slots() {
    plan();
    std::vector<int> found;
    for (size_t slot = 0; slot < upper_.size(); ++slot) {
      if (upper_[slot].first_read != kNone) found.push_back(static_cast<int>(slot));
    }
    std::stable_sort(found.begin(), found.end(), [this](int one, int other) {
      return upper_[one].first_read < upper_[other].first_read;
    });
    return found;
  }

  c10::Storage storage_of(int slot, int version) {
    Chain& chain = chain_of(slot, version);
    start(chain, slot, version);
    return chain.storage;
  }

 private:
  static constexpr int kForever = std::numeric_limits<int>::max();

  struct Chain {
    int wanted = kNone;    // the highest version that is read
    int last_read = kNone;  // the op that reads it last
    int first_read = kNone;  // the op that reads it first
    c10::Storage storage;
  };

  // Puts generators back to where they were before the replay, however it ends.
  struct Restorer {
    std::vector<std::pair<at::Generator, at::Tensor>> before;
    void draw_as(const std::vector<std::pair<at::Generator, at::Tensor>>& draws) {
      Unseen unseen;
      for (const auto& [generator, state] : draws) {
        at::Generator mutable_generator = generator;
        std::lock_guard<std::mutex> lock(mutable_generator.mutex());
        bool is_known = false;
        for (const auto& known : before) is_known = is_known || known.first == generator;
        if (!is_known) before.emplace_back(generator, generator.get_state());
        if (!HP_FAULT("generator_state")) mutable_generator.set_state(state);
      }
    }
    ~Restorer() {
      Unseen unseen;
      for (auto& [generator, state] : before) {
        if (HP_FAULT("generator_put_back")) continue;
        std::lock_guard<std::mutex> lock(generator.mutex());
        generator.set_state(state);
      }
    }
  };

  // Runs under the settings of forward, and puts back those that it found.
  class UnderSettings {
   public:
    void use(const Settings& wanted) {
      if (&wanted == last_ || HP_FAULT("settings")) return;
      last_ = &wanted;
      if (now_ == wanted) return;
      wanted.apply();
      now_ = wanted;
    }
    ~UnderSettings() {
      if (!(now_ == before_)) before_.apply();
    }

   private:
    const Settings before_ = Settings::now();
    Settings now_ = before_;
    const Settings* last_ = nullptr;
  };

  int kept_version(int slot) const {
    const Slot& known = tape_.slots_[slot];
    if (known.kept_version != kNone) return known.kept_version;
    return known.is_created ? kNone : 0;  // an outside slot is held at version 0
  }

  bool is_upper(int slot, int version) const { return version >= kept_version(slot); }
  Chain& chain_of(int slot, int version) { return is_upper(slot, version) ? upper_[slot] : lower_[slot]; }

  void mark(int slot, int version, int reader) {
    Chain& chain = chain_of(slot, version);
    chain.wanted = std::max(chain.wanted, version);
    chain.last_read = std::max(chain.last_read, reader);
  }

  // Whether a version that an op makes is read by a needed op after it, or by a handle.
  bool is_made_for_somebody(int slot, int version) const {
    const int kept = kept_version(slot);
    if (version == kept) return false;  // those bytes are there
    return (version > kept ? upper_[slot] : lower_[slot]).wanted >= version;
  }

  void plan() {
    for (int at = static_cast<int>(tape_.ops_.size()) - 1; at >= 0; --at) {
      const Op& op = tape_.ops_[at];
      bool is_needed = false;
      for (const auto& output : op.created) is_needed = is_needed || is_made_for_somebody(output.slot, 0);
      for (const auto& [slot, version] : op.written) {
        is_needed = is_needed || is_made_for_somebody(slot, version) ||
            (version == kept_version(slot) && lower_[slot].wanted >= version);
      }
      if (!is_needed) continue;
      TORCH_INTERNAL_ASSERT(op.may_run, "the outputs of an op that may not run again are kept");
      is_needed_[at] = true;
      for (int argument = 0; argument < op.argument_count; ++argument) {
        const Argument& known = tape_.arguments_[op.first_argument + argument];
        for (int ref = known.first; ref < known.first + known.count; ++ref) {
          if (tape_.refs_[ref].slot == kNone) continue;
          mark(tape_.refs_[ref].slot, tape_.refs_[ref].version, at);
          chain_of(tape_.refs_[ref].slot, tape_.refs_[ref].version).first_read = at;
        }
      }
    }
  }

  // The first bytes of a chain that begins with kept ones. Ops that write it get a copy.
  void start(Chain& chain, int slot, int version) {
    if (chain.storage || !is_upper(slot, version)) return;
    Slot& known = tape_.slots_[slot];
    if (known.kept_version == kNone) return;
    c10::Storage kept = tape_.kept_storage(known);
    const bool is_written = upper_[slot].wanted > known.kept_version && !HP_FAULT("copy_for_replay");
    chain.storage = is_written ? copy_of(kept) : std::move(kept);
  }

  at::Tensor resolve(const Ref& ref) {
    if (ref.slot == kNone) return at::Tensor();
    const Slot& slot = tape_.slots_[ref.slot];
    if (!slot.is_created && slot.kept_version == kNone) {
      return tape_.held_value(tape_.slots_[ref.slot].held[ref.held]);
    }
    Chain& chain = chain_of(ref.slot, ref.version);
    start(chain, ref.slot, ref.version);
    TORCH_INTERNAL_ASSERT(chain.storage, "what an op reads was made before it");
    return ref.view.over(chain.storage);
  }

  void run_op(const Op& op, int at, Restorer& restorer) {
    torch::jit::Stack stack;
    stack.reserve(op.argument_count);
    for (int argument = 0; argument < op.argument_count; ++argument) {
      stack.push_back(value_of(tape_.arguments_[op.first_argument + argument]));
    }
    if (!op.draws.empty()) restorer.draw_as(op.draws);
    c10::GradMode::set_enabled(op.is_recorded_by_autograd && !HP_FAULT("grad_mode"));
    op.handle.callBoxed(stack);
    counters().replayed_ops.fetch_add(1, std::memory_order_relaxed);
    int position = 0;
    size_t next = 0;
    for (const auto& value : stack) {
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        const int here = position++;
        if (next >= op.created.size() || op.created[next].position != here) return;
        const int index = op.created[next++].slot;
        const bool has_kept = kept_version(index) != kNone;
        Chain& chain = has_kept ? lower_[index] : upper_[index];
        if (chain.wanted == kNone) return;
        TORCH_CHECK(
            tensor.storage().nbytes() == tape_.slots_[index].nbytes,
            tape_.where_ + ": " + op.handle.operator_name().name + " made " + std::to_string(tensor.storage().nbytes()) +
                " bytes in its replay and " + std::to_string(tape_.slots_[index].nbytes) + " in forward");
        chain.storage = tensor.storage();
        if (look_) show(index, 0, chain);
      });
    }
    if (look_) {
      for (const auto& [slot, version] : op.written) show(slot, version, chain_of(slot, version));
    }
    stack.clear();
    for (int argument = 0; argument < op.argument_count; ++argument) {
      const Argument& known = tape_.arguments_[op.first_argument + argument];
      for (int ref = known.first; ref < known.first + known.count; ++ref) {
        const Ref& read = tape_.refs_[ref];
        if (read.slot == kNone) continue;
        Chain& chain = chain_of(read.slot, read.version);
        if (HP_FAULT("last_use_early") || (chain.last_read == at && !HP_FAULT("last_use_never"))) chain.storage = c10::Storage();
      }
    }
  }

  void show(int slot, int version, Chain& chain) {
    auto wanted = seen_at_.find(slot);
    if (wanted == seen_at_.end() || wanted->second != version || !chain.storage) return;
    look_(slot, chain.storage);
    if (chain.last_read == kNone) chain.storage = c10::Storage();
  }

  c10::IValue value_of(const Argument& argument) {
    switch (argument.kind) {
      case Argument::Kind::kTensor:
        return resolve(tape_.refs_[argument.first]);
      case Argument::Kind::kTensors: {
        c10::List<at::Tensor> list;
        for (int ref = argument.first; ref < argument.first + argument.count; ++ref) list.push_back(resolve(tape_.refs_[ref]));
        return list;
      }
      case Argument::Kind::kOptionalTensors: {
        c10::List<c10::optional<at::Tensor>> list;
        for (int ref = argument.first; ref < argument.first + argument.count; ++ref) {
          at::Tensor tensor = resolve(tape_.refs_[ref]);
          list.push_back(tensor.defined() ? c10::optional<at::Tensor>(tensor) : c10::nullopt);
        }
        return list;
      }
      default:
        return argument.constant;
    }
  }

  Tape& tape_;
  std::vector<Chain> upper_;
  std::vector<Chain> lower_;
  std::vector<bool> is_needed_;
  Look look_;
  std::unordered_map<int, int> seen_at_;  // by slot: the version that is looked at
};

// -- Handles -------------------------------------------------------------------------------------------------------------

inline at::Tensor Tape::held_value(Held& held) {
  if (held.value.defined()) return held.value;
  if (!HP_FAULT("held_version") && held.version >= 0 && held.counter.current_version() != static_cast<uint32_t>(held.version)) {
    ChangedInPlace error;
    error.where = where_;
    error.what_changed = describe(held.view);
    error.storage = held.storage;
    error.version = held.version;
    error.now = held.counter.current_version();
    throw error;
  }
  if (held.alias.defined()) {
    const auto& storage = held.alias.unsafeGetTensorImpl()->unsafe_storage();
    TORCH_CHECK(
        held.alias.numel() == 0 || storage.nbytes() > 0,
        where_ + ": the memory of a tensor " + describe(held.view) +
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

inline void Tape::collect_dead() {
  std::vector<int> dead;
  {
    std::lock_guard<std::mutex> lock(dead_mutex_);
    dead.swap(dead_);
  }
  for (int index : dead) {
    Handle& handle = handles_[index];
    handle.is_alive = false;
    handle.kept = at::Tensor();
    if (handle.slot == kNone) continue;
    Slot& slot = slots_[handle.slot];
    if (handle.served_in != -1 && handle.served_in == slot.served_in) slot.served -= 1;
    if (--slot.living_handles == 0) slot.made = slot.fetched = c10::Storage();
    if (is_held(handle) && --slot.held[handle.held].living_handles == 0) slot.held[handle.held].value = at::Tensor();
  }
}

inline void Tape::release(int handle) {
  {
    std::lock_guard<std::mutex> lock(dead_mutex_);
    dead_.push_back(handle);
  }
  Lock lock(mutex_, std::try_to_lock);  // where another thread has it, that thread collects
  if (lock.owns_lock()) collect_dead();
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

// Of the handles from `first` to `end`: the version of each slot that a living one wants and that is not there. What this graph
// task has read before is not made for it again, unless it is `asked` for.
inline std::vector<int> Tape::want_missing(Replay& replay, int first, int end, const Handle* asked) const {
  const int task = torch::autograd::get_current_graph_task_id();
  std::vector<int> wanted(slots_.size(), kNone);
  for (int at = first; at < end; ++at) {
    const Handle& handle = handles_[at];
    if (!is_remade(handle) || handle.kept.defined() || slots_[handle.slot].made) continue;
    if (task != -1 && handle.served_in == task && &handle != asked) continue;
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
inline void Tape::note_served(Handle& handle) {
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

inline at::Tensor Tape::unpack(int index) {
  drop_served_before();
  auto lock = HP_FAULT("lock_of_unpack") ? Lock() : locked(mutex_);
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
    error.what_changed = describe(handle.slot == kNone ? View::of(handle.kept) : handle.view);
    error.version = handle.saved_version;
    error.now = now;
    throw error;
  }
  if (handle.kept.defined()) return handle.kept;
  if (is_open_) follow_writes(handle);
  Slot& slot = slots_[handle.slot];
  note_served(handle);
  if (is_held(handle)) return held_value(slot.held[handle.held]);
  check_kept(slot);
  if (slot.kept_version == handle.version) return handle.view.over(kept_storage(slot));
  if (is_open_ && !slot.made && slot.kept_version == kNone && handle.version == slot.writes && !HP_FAULT("living_values")) {
    if (auto living = slot.storage.lock()) return handle.view.over(c10::Storage(std::move(living)));
  }
  if (!slot.made) make_missing(handle);
  order_after_made(slot.made);
  return handle.view.over(slot.made);
}

// -- The end of forward --------------------------------------------------------------------------------------------------

inline void Tape::abandon() {
  std::vector<at::Tensor> originals;  // dropped after the lock: their graph may hold handles of this tape
  auto lock = locked(mutex_);
  for (Slot& slot : slots_) {
    for (Held& entry : slot.held) originals.push_back(std::move(entry.original));
  }
  for (auto& [slot, tensor] : pending_swaps_) originals.push_back(std::move(tensor));
  pending_swaps_.clear();
  stop("its forward raised");
}

inline void Tape::close() {
  auto lock = locked(mutex_);
  collect_dead();
  swap_pending();
  is_open_ = false;
  if (!(*settings_.front() == Settings::now())) stop("it changes settings under which kernels run (default dtype, determinism)");
  slot_by_storage_ = {};
  belief_->note_sizes({ops_.size(), arguments_.size(), refs_.size(), slots_.size(), handles_.size()});
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

inline bool has_history(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->grad_fn_ != nullptr;
}

// The pack hook of every tape, which the extension sets.
inline PyCFunction pack_of_tapes = nullptr;

// Whether it is a leaf, or a view or a cast of one: a weight, as `is_parameter_derived` of storages.py knows it.
inline bool is_of_a_leaf(const at::Tensor& tensor) {
  constexpr int kLongestChain = 8;
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  auto node = meta == nullptr ? nullptr : meta->grad_fn_;
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
inline PythonRef shown_to(PyObject* pack, const at::Tensor& tensor) {
  const bool is_tape = PyCFunction_Check(pack) && PyCFunction_GetFunction(pack) == pack_of_tapes;
  return PythonRef::take(THPVariable_Wrap(is_tape || is_of_a_leaf(tensor) ? tensor : alias_of(tensor)));
}

// The copies of swapped arguments begin here, before the region's own work. Called with the GIL.
inline void Tape::show_arguments(const std::vector<at::Tensor>& tensors, PyObject* pack, PyObject* unpack) {
  if (HP_FAULT("hooks_around")) return;
  for (const at::Tensor& tensor : tensors) {
    if (why_not_plain(tensor) != nullptr || (tensor.dim() == 0 && tensor.device().type() == c10::kCPU)) continue;
    int slot = kNone;
    int held = kNone;
    {
      auto lock = locked(mutex_);
      slot = find_or_hold(tensor, View::of(tensor), held);
      if (slots_[slot].held[held].is_argument) continue;
      slots_[slot].held[held].is_argument = true;
      slots_[slot].held[held].is_used = false;
    }
    PythonRef value = PythonRef::take(THPVariable_Wrap(tensor));
    PyObject* packed = PyObject_CallFunctionObjArgs(pack, value.get(), nullptr);
    if (packed == nullptr) throw python_error();
    auto lock = locked(mutex_);
    slots_[slot].held[held].packed = PythonRef::take(packed);
    slots_[slot].held[held].unpack = PythonRef(unpack);
  }
}

// Outside tensors go through the hooks around the region, which decide what becomes of them: arguments, their views, and
// tensors that have a history. Weights and constants are held as they are. Called with the GIL.
inline void Tape::show_held(PyObject* pack, PyObject* unpack) {
  for (Slot& slot : slots_) {
    bool is_argument = false;
    for (const Held& entry : slot.held) is_argument = is_argument || entry.is_argument;
    for (Held& entry : slot.held) {
      at::Tensor original = std::move(entry.original);
      entry.original = at::Tensor();
      if (entry.packed) {  // shown when the region began
        auto lock = locked(mutex_);
        entry.alias = at::Tensor();
        if (!entry.is_used) entry.packed = PythonRef();
        continue;
      }
      const bool is_scalar = entry.view.sizes.empty() && entry.alias.device().type() == c10::kCPU;
      if (pack == nullptr || is_scalar || !(is_argument || has_history(original)) || HP_FAULT("hooks_around")) continue;
      PythonRef value = shown_to(pack, original);
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
  if (HP_FAULT("probation_comparison") || at::equal(handle.view.bits(made), handle.view.bits(original))) return "";
  const Slot& slot = slots_[handle.slot];
  const Op* op = slot.created_by == kNone ? nullptr : &ops_[slot.created_by];
  return "a value " + describe(handle.view) + (op ? " of " + op->handle.operator_name().name : std::string()) +
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
          handle.kept = handle.view.over(original);
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
    belief_->add(sequence_);
    still_proven_ = true;
    return different;
  }
  for (const auto& [slot, on_probation] : by_slot) {  // what was not compared stays
    const c10::Storage& original = without_swaps.original(slot);
    for (int at : on_probation) {
      if (original && !handles_[at].kept.defined()) handles_[at].kept = handles_[at].view.over(original);
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
