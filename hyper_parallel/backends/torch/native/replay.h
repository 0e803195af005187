// The runner: which ops of a tape run again, in which order, and what becomes of their outputs.
#pragma once

#include <algorithm>
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
    at::Tensor last;        // over the storage: what the op returned that made it, or what was given to an op last
    int last_view = kNone;  // the view that `last` is, where that is known

    void drop() {
      storage = c10::Storage();
      last = at::Tensor();
    }
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
      if (*now_ == wanted) return;
      wanted.apply();
      now_ = &wanted;
    }
    ~UnderSettings() {
      if (now_ != before_.get() && !(*now_ == *before_)) before_->apply();
    }

   private:
    const std::shared_ptr<const Settings> before_ = Settings::now();
    const Settings* now_ = before_.get();
    const Settings* last_ = before_.get();
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
  bool has_reader(int slot, int version) const {
    const int kept = kept_version(slot);
    if (version == kept) return false;  // those bytes are there
    return (version > kept ? upper_[slot] : lower_[slot]).wanted >= version;
  }

  void plan() {
    for (int at = static_cast<int>(tape_.ops_.size()) - 1; at >= 0; --at) {
      const Op& op = tape_.ops_[at];
      bool is_needed = false;
      for (const auto& output : op.created) is_needed = is_needed || has_reader(output.slot, 0);
      for (const auto& [slot, version] : op.written) {
        is_needed = is_needed || has_reader(slot, version) ||
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
    const View& view = tape_.views_[ref.view];
    const bool is_same = chain.last.defined() && (chain.last_view == kNone ? view.is_of(chain.last) : chain.last_view == ref.view);
    if (!is_same) chain.last = view.over(chain.storage);
    chain.last_view = ref.view;
    return chain.last;
  }

  void run_op(const Op& op, int at, Restorer& restorer) {
    torch::jit::Stack& stack = stack_;
    stack.clear();
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
            tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() == tape_.slots_[index].nbytes,
            tape_.where_ + ": " + op.handle.operator_name().name + " made " + std::to_string(tensor.storage().nbytes()) +
                " bytes in its replay and " + std::to_string(tape_.slots_[index].nbytes) + " in forward");
        chain.storage = tensor.storage();
        chain.last = tensor;
        chain.last_view = kNone;
        if (look_) show(index, 0, chain);
      });
    }
    for (const auto& [slot, version] : op.written) {
      Chain& chain = chain_of(slot, version);
      chain.last = chain_of(slot, version - 1).last = at::Tensor();  // an op may give other sizes to what it writes
      if (look_) show(slot, version, chain);
    }
    stack.clear();
    for (int argument = 0; argument < op.argument_count; ++argument) {
      const Argument& known = tape_.arguments_[op.first_argument + argument];
      for (int ref = known.first; ref < known.first + known.count; ++ref) {
        const Ref& read = tape_.refs_[ref];
        if (read.slot == kNone) continue;
        Chain& chain = chain_of(read.slot, read.version);
        if (HP_FAULT("last_use_early") || (chain.last_read == at && !HP_FAULT("last_use_never"))) chain.drop();
      }
    }
  }

  void show(int slot, int version, Chain& chain) {
    auto wanted = seen_at_.find(slot);
    if (wanted == seen_at_.end() || wanted->second != version || !chain.storage) return;
    look_(slot, chain.storage);
    if (chain.last_read == kNone) chain.drop();
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
  torch::jit::Stack stack_;  // of the op that runs
  Look look_;
  std::unordered_map<int, int> seen_at_;  // by slot: the version that is looked at
};

}  // namespace hyper_parallel
