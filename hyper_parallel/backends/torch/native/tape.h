// One region's recording: which ops ran, on what, and how to make the values again that autograd wants back.
//
// Slots. A slot is one storage. It is *created* by an op of the region, or *outside*: it was there before, or was made by
// something that the dispatcher does not see. A slot has versions: 0 when it is created or first met, one more with every
// recorded write. An argument of an op is (slot, version, view).
//
// What can be remade. A created slot is remade by running its creating op and every write up to the wanted version, unless
// its bytes are kept at some version. An outside slot is held: as a detached alias that shares the version counter, or through
// the saved-tensor hooks around the region. When the region itself writes an outside slot, its bytes are copied before the
// first write, and the copy stands for version 0.
//
// Policies. The output of an op that a policy saves is kept; one that it swaps is given to the swap engine, and fetched when
// an op of the replay or a handle wants it. Ops before it that nothing else needs do not run.
//
// Handles. Autograd holds one handle per packed tensor. A handle holds the tape and no bytes. The first unpack runs the ops
// that the living handles still need, in forward order, and each remade storage goes with its last handle. Where the graph is
// retained, it goes when every handle got it in this backward and the node that read it last is over.
//
// Locks. `mutex` guards everything. It is never awaited while the GIL is held. A handle dies with the GIL held, so its death
// goes to a list of its own (`dead_mutex`), which is emptied under `mutex`.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "fates.h"
#include "op_facts.h"
#include "python_ref.h"
#include "settings.h"
#include "storage_table.h"

namespace hyper_parallel {

constexpr int kNone = -1;

// How to make a tensor over a storage again.
struct View {
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;  // holds the conjugate and the negative bit
  bool is_wrapped_number = false;

  static View of(const at::Tensor& tensor);
  void take(const at::Tensor& tensor);
  bool is_of(const at::Tensor& tensor) const;
  at::Tensor over(c10::Storage storage) const;
  at::Tensor bits(c10::Storage storage) const;  // the same elements as integers: two bit patterns can be compared
  bool operator==(const View& other) const;
};

struct Ref {
  int slot = kNone;
  int version = 0;
  int held = kNone;  // which tensor of an outside slot
  int view = kNone;  // in Tape::views
};

struct Argument {
  enum class Kind : uint8_t { kConstant, kTensor, kTensors, kOptionalTensors } kind = Kind::kConstant;
  c10::IValue constant;
  int first = 0;  // in Tape::refs
  int count = 0;
};

struct Output {
  int slot;
  int position;  // among the tensors that the op returns, lists opened
};

struct Op {
  c10::OperatorHandle handle;
  int first_argument;
  int argument_count;
  c10::SmallVector<Output, 2> created;
  c10::SmallVector<std::pair<int, int>, 2> written;  // slot, the version it has afterwards
  bool may_run;
  bool is_recorded_by_autograd;  // grad mode when it ran: some kernels choose by it
  int settings;                  // in Tape::settings
  std::vector<std::pair<at::Generator, at::Tensor>> draws;  // generators and their states before the op
};

// A tensor of an outside slot, as long as the tape may need it.
struct Held {
  int view = kNone;     // in Tape::views
  at::Tensor alias;     // detached, with the same version counter; the tensor itself must not be referred to (`swap_tensors`)
  torch::autograd::Edge history;  // while the region runs: the hooks around it are shown a tensor with this graph
  PythonRef packed;     // what the hooks around the region made of it; then there is no alias
  PythonRef unpack;
  const void* storage = nullptr;  // names the tensor in an error; not followed
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  int64_t version = -1;  // -1: it counts none
  at::Tensor value;        // unpacked; hooks may allow that only once in a backward
  bool is_used = false;    // by an op or a handle
  bool is_argument = false;  // of the region's function
  int living_handles = 0;
};

struct Slot {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};  // its address names nothing else
  size_t nbytes = 0;
  bool is_created = false;
  bool is_unset = false;  // created by an `empty` op and not written since, as far as was seen
  int created_by = kNone;
  int writes = 0;
  std::vector<int> written_by;  // ops; the first made version 1
  std::vector<Held> held;
  c10::Storage kept;      // its bytes at `kept_version`, unless they are swapped
  PythonRef swapped;      // what the swap engine made of them
  c10::Storage fetched;   // swapped bytes, as long as handles want them
  c10::optional<c10::Stream> fetched_on;  // the stream that is ordered after their load
  bool owns_kept = false;  // a copy of ours: no op of the region can change it
  int kept_version = kNone;
  bool can_be_remade = true;  // its kept bytes are those that its recorded ops make
  bool is_stuck = false;  // kept because what made it is not run again; no policy asked for it
  c10::VariableVersion kept_counter{c10::VariableVersion::DISABLED};  // sees changes of kept bytes that are not a copy
  int64_t kept_at = -1;       // its version when the region ended; -1: it counts none
  c10::Storage made;      // remade, at the version that handles want
  int living_handles = 0;
  int served_in = -1;     // the backward in which `served` handles got their value
  int served = 0;
  size_t origin = 0;      // which op made it, for the sequence's hash
  int last_view = kNone;  // the view through which it was seen last; most tensors are seen through one
};

struct Handle {
  int slot = kNone;
  int version = 0;  // of the slot
  int held = kNone;
  int view = kNone;  // in Tape::views; none where `slot` is none
  at::Tensor kept;  // the value itself: on probation, or where it cannot be remade
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  int64_t saved_version = -1;
  int64_t closed_version = -1;
  int served_in = -1;  // the backward in which it got its value last
  bool is_alive = true;
};

// The tables of a tape.
struct Tables {
  std::vector<Op> ops;
  std::vector<Argument> arguments;
  std::vector<Ref> refs;
  std::vector<Slot> slots;
  std::vector<Handle> handles;
  std::vector<View> views;
  StorageTable slot_by_storage;

  void clear() {
    ops.clear();
    arguments.clear();
    refs.clear();
    slots.clear();
    handles.clear();
    views.clear();
    slot_by_storage.clear();
  }
  size_t memory_bytes() const {
    return bytes_of(ops) + bytes_of(arguments) + bytes_of(refs) + bytes_of(slots) + bytes_of(handles) + bytes_of(views) +
        slot_by_storage.memory_bytes();
  }

 private:
  template <typename T>
  static size_t bytes_of(const std::vector<T>& table) {
    return table.capacity() * sizeof(T);
  }
};

// What is known of one region over all its calls: the op sequences that were once remade bit by bit. It also keeps the empty
// tables of tapes that are gone, for the next ones: tables that grow move everything, and memory that goes back to the system at
// the end of every step costs a page fault for every page in the next one.
struct RegionHistory {
  using Set = std::unordered_set<size_t>;
  static constexpr size_t kMostSpareBytes = size_t{4} << 20;
  std::mutex mutex;
  std::shared_ptr<const Set> proven = std::make_shared<const Set>();
  std::vector<Tables> spare;
  size_t spare_bytes = 0;

  Tables take_tables() {
    std::lock_guard<std::mutex> lock(mutex);
    if (spare.empty()) return Tables();
    Tables tables = std::move(spare.back());
    spare.pop_back();
    spare_bytes -= tables.memory_bytes();
    return tables;
  }
  void give_back(Tables& tables) {
    tables.clear();  // not under the lock: this may drop Python objects
    std::lock_guard<std::mutex> lock(mutex);
    const size_t bytes = tables.memory_bytes();
    if (spare_bytes + bytes > kMostSpareBytes) return;
    spare_bytes += bytes;
    spare.push_back(std::move(tables));
  }

  std::shared_ptr<const Set> get() {
    std::lock_guard<std::mutex> lock(mutex);
    return proven;
  }
  void add(const std::vector<size_t>& hashes) {
    std::lock_guard<std::mutex> lock(mutex);
    auto larger = std::make_shared<Set>(*proven);
    larger->insert(hashes.begin(), hashes.end());
    proven = std::move(larger);
  }
};

struct Limits {
  size_t copied_before_write = size_t{1} << 20;  // per region
  size_t steering_output = size_t{1} << 20;      // per output
};

// What a region's tape needs of Python where its policy swaps; see SwappedOutputs in tape_policies.py.
using Swaps = PythonRef;

class Replay;

class Tape : public std::enable_shared_from_this<Tape> {
 public:
  Tape(std::string where, std::shared_ptr<RegionHistory> region_history, Limits limits, std::shared_ptr<Fates> fates, Swaps swaps);
  ~Tape();

  // Recorder.
  struct Draft;  // one op, between its call and its return
  bool begin(const c10::OperatorHandle& op, const OpFacts& facts, const torch::jit::Stack& stack, Draft& draft);
  void end(const c10::OperatorHandle& op, Draft& draft, const torch::jit::Stack& stack);
  void stop(std::string reason);

  // Handles.
  int pack(const at::Tensor& tensor);
  // With `may_run` false: an undefined tensor where ops must run, a lock is taken or the region is open.
  at::Tensor unpack(int handle, bool may_run);
  void release(int handle);

  // The beginning of forward: arguments that the hooks around the region shall see at once.
  void show_arguments(const std::vector<at::Tensor>& tensors, PyObject* pack, PyObject* unpack);

  // Forward raised: what stands in for the hooks around is let go. It may belong to the graph that holds this tape.
  void abandon();

  // The end of forward.
  void close();
  std::string prove();  // empty when every packed value was remade bit by bit; else what was not, and the values stay
  std::vector<PyObject*> given_in_order();
  void copy_held(const std::vector<at::Tensor>& tensors);
  // The hooks around the region, or null, see what is held: arguments, and tensors with a history. Last, and with the GIL.
  void show_held(PyObject* pack, PyObject* unpack);

  bool is_proven() const { return still_proven_; }
  const std::string& reason() const { return reason_; }
  const std::string& where() const { return where_; }
  size_t op_count() const { return ops_.size(); }
  size_t kept_bytes();
  size_t saved_bytes() const { return saved_bytes_; }            // by the policy
  size_t stuck_bytes();  // kept because what made them is not run again; after `close`
  size_t recomputed_bytes();
  size_t handed_bytes(const std::vector<at::Tensor>& outputs);  // to autograd; asked before the region is closed
  size_t held_count();
  size_t handle_count() const { return handles_.size(); }
  bool is_replaying = false;
  std::recursive_mutex& mutex() { return mutex_; }

 private:
  friend class Replay;
  using Lock = std::unique_lock<std::recursive_mutex>;

  bool refer(const at::Tensor& tensor, bool is_overwritten, Ref& ref);
  Fate fate_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first);
  Ref find_or_hold(const at::Tensor& tensor);
  int view_of(Slot& slot, const at::Tensor& tensor);
  bool swap_out(Slot& slot, const at::Tensor& tensor, bool can_be_remade);
  void swap_pending();
  void keep_instead_of_swap(Slot& slot, const at::Tensor& tensor);
  c10::Storage kept_storage(Slot& slot);
  PyObject* ask_swaps(const char* method, PyObject* argument);
  PyObject* call_swaps(const char* method, PyObject* argument);
  void keep_alive(Slot& slot, const at::Tensor& tensor, bool can_be_remade, bool is_saved_by_policy = false);
  void check_kept(Slot& slot);
  bool before_write(Slot& slot);
  void forget_arguments(const Draft& draft);
  void remember_settings();
  void follow_writes(Handle& handle);
  void collect_dead();
  void let_go(int handle);
  bool is_there(const Handle& handle) const;
  at::Tensor held_value(Held& held);
  bool is_held(const Handle& handle) const;
  bool is_remade(const Handle& handle) const;
  std::vector<int> want_missing(Replay& replay, int first, int end, const Handle* asked);
  void push_read(const Op& op, std::vector<std::pair<int, int>>& left) const;
  class OpCount;
  void make_missing(const Handle& asked);
  void drop_made();
  void drop_unread();
  void count_served(Handle& handle);
  void drop_served();
  void drop_served_before();
  void order_after_made(const c10::Storage& storage);
  int first_to_make(int asked, int task);
  class WithoutSwaps;
  class WithLiving;
  std::string difference(const Handle& handle, const c10::Storage& made, const c10::Storage& original) const;

  std::string where_;
  std::shared_ptr<RegionHistory> region_history_;
  std::shared_ptr<const RegionHistory::Set> proven_;
  Limits limits_;
  std::recursive_mutex mutex_;
  std::mutex dead_mutex_;
  std::vector<int> dead_;
  std::atomic<bool> has_dead_{false};
  Tables tables_;
  std::vector<Op>& ops_ = tables_.ops;
  std::vector<Argument>& arguments_ = tables_.arguments;
  std::vector<Ref>& refs_ = tables_.refs;
  std::vector<Slot>& slots_ = tables_.slots;
  std::vector<Handle>& handles_ = tables_.handles;
  std::vector<View>& views_ = tables_.views;
  StorageTable& slot_by_storage_ = tables_.slot_by_storage;
  std::shared_ptr<Fates> fates_;  // null: everything is recomputed
  Swaps swaps_;                   // null: nothing is swapped
  std::unordered_map<const Answers*, size_t> counts_;  // how often an op came, where its answers differ
  // Outputs that the policy swaps. The engine gets them when the op has ended for all: dispatch modes around it see its end later.
  std::vector<std::pair<int, at::Tensor>> pending_swaps_;
  int opened_in_task_ = -1;       // the backward in which the region runs, if any
  size_t saved_bytes_ = 0;
  size_t copied_bytes_ = 0;
  bool is_open_ = true;
  bool still_proven_ = true;
  size_t last_hash_ = 0;
  std::vector<size_t> sequence_;  // hashes that are not proven yet
  std::string reason_;            // why recording stopped, if it did
  std::vector<std::shared_ptr<const Settings>> settings_;  // each time that they changed; the first: when the region began
  int span_ = 0;        // how many handles before the asked one are made with it in an open region, and with how many more ops
  int span_task_ = -1;  // in this backward
  const void* serving_node_ = nullptr;  // the node of backward that reads; not followed
  std::vector<int> served_slots_;       // by that node
  std::shared_ptr<c10::Event> made_event_;  // after the last op that ran again, on a device with streams
  c10::optional<c10::Stream> made_stream_;
};

// An op between its call and its return. Its arguments are at the end of the tape's tables already.
struct Tape::Draft {
  Tape* tape = nullptr;
  const OpFacts* facts = nullptr;
  size_t first_argument = 0;
  size_t argument_count = 0;
  size_t first_ref = 0;
  size_t hash = 0;
  Fate fate = Fate::kRecompute;
  c10::SmallVector<std::pair<int, at::Tensor>, 2> written;  // slot, and the tensor through which it is written
  std::vector<std::pair<at::Generator, at::Tensor>> draws;
};

// How often what happened, in this process.
struct Counters {
  std::atomic<uint64_t> recorded_ops{0};
  std::atomic<uint64_t> replayed_ops{0};
  std::atomic<uint64_t> replays{0};
  std::atomic<int64_t> live_tapes{0};
};
Counters& counters();

}  // namespace hyper_parallel
