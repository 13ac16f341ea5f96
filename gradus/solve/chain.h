#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gradus::solve {

/// One stage of a chain. Its forward reads the stage before's output and makes its own; its
/// backward reads the gradient of its output, what its forward saved and its input.
/// Times >= 0 and finite, bytes >= 0 unless said otherwise.
struct ChainStage {
  double forward_ms = 0.0;
  double backward_ms = 0.0;
  std::int64_t output_bytes = 0;             ///< a_i: what the next stage reads.
  std::int64_t saved_bytes = 0;              ///< abar_i: all that backward wants, the output
                                             ///< included, the input not; >= output_bytes.
  std::int64_t forward_transient_bytes = 0;  ///< Peak of a forward that saves nothing, beyond input
                                             ///< and output.
  std::optional<std::int64_t>
      saving_transient_bytes{};  ///< Peak of a forward that saves, beyond
                                 ///< input and saved_bytes; unset: as above.
  std::int64_t backward_transient_bytes =
      0;  ///< Peak of backward beyond input, saved_bytes and
          ///< both gradients. May be negative where backward
          ///< frees early; not below minus the gradient it makes.
  std::optional<std::int64_t> gradient_bytes{};  ///< Of the output; unset: output_bytes.
};

/// Stages in forward order. The input is held throughout, and so is the gradient of the last output
/// until the last stage's backward has read it (a loss: 4 bytes).
struct Chain {
  std::vector<ChainStage> stages;
  std::int64_t input_bytes = 0;           ///< a_0; 0 if counted elsewhere.
  std::int64_t input_gradient_bytes = 0;  ///< 0 if the input needs no gradient.
};

/// The four operations of Beaumont et al. 2019, Table 1.
enum class ChainOperationKind : std::uint8_t {
  forward_drop,  ///< F_none: makes the output, drops the input.
  forward_keep,  ///< F_ck: makes the output, keeps the input for a later forward.
  forward_save,  ///< F_all: saves all that backward wants, keeps the input.
  backward,      ///< B: frees what was saved, the input and the output's gradient.
};

struct ChainOperation {
  ChainOperationKind kind = ChainOperationKind::backward;
  std::int64_t stage = 0;  ///< Index into Chain::stages.
  bool operator==(const ChainOperation&) const = default;
};
using ChainSequence = std::vector<ChainOperation>;

struct ChainRun {
  std::int64_t peak_bytes = 0;
  double time_ms = 0.0;
  std::vector<std::int64_t> operation_peak_bytes;  ///< One per operation: for a memory timeline.
};

/// Runs @p sequence on sizes and times alone, and checks that each operation finds what it reads,
/// that nothing is made twice while it is still held, and that every stage's backward runs once.
/// @throws UserError naming the operation and what it lacks, or on a chain that is not valid.
ChainRun simulate(const ChainSequence& sequence, const Chain& chain);

/// Every forward saves: plain training.
ChainSequence keep_everything(const Chain& chain);

struct ChainOptions {
  std::int64_t max_slots = 500;                ///< Steps into which memory is divided, >= 1.
  std::int64_t max_table_bytes = 256LL << 20;  ///< Bound of the cost table, which takes
                                               ///< 4 * (slots + 1) * n * (n + 1) / 2 bytes; fewer
                                               ///< slots are taken to fit. >= 4 * n * (n + 1).
};

struct ChainPlan {
  bool feasible = false;
  std::int64_t least_bytes = 0;  ///< Least limit that has a plan, exact to the byte.
  ChainSequence sequence;        ///< Empty if not feasible, as the rest.
  double time_ms = 0.0;          ///< Of all operations, recomputed ones included.
  std::int64_t peak_bytes = 0;   ///< As simulated; <= the limit.
};

/// Fastest way to train a chain under a memory limit, by the dynamic program of Beaumont,
/// Eyraud-Dubois, Herrmann, Joly and Shilova 2019 ("Optimal checkpointing for heterogeneous
/// chains", Theorem 1) over (memory, first stage, last stage).
///
/// Optimal among schedules that hold a value, once kept or saved, until its backward. Memory is
/// divided into slots of whole bytes: sizes are rounded up and what is left over down, so a plan is
/// never over its limit; with one byte a slot it is optimal, else near it (docs/solve.md). A plan
/// is found for every limit from least_bytes on, whatever the slots.
/// Time n^3 * slots / 6 at construction, in vector code; plan() takes milliseconds. Construction
/// throws, plan() is const and may be called from several threads.
class ChainPlanner {
 public:
  /// @param largest_limit_bytes  Plans up to this limit can be asked for; a larger one has longer
  ///   slots.
  /// @throws UserError on an invalid chain, option or limit.
  ChainPlanner(Chain chain, std::int64_t largest_limit_bytes, const ChainOptions& options = {});
  ~ChainPlanner();
  ChainPlanner(ChainPlanner&&) noexcept;
  ChainPlanner& operator=(ChainPlanner&&) noexcept;

  /// @throws UserError if @p limit_bytes is above the largest.
  ChainPlan plan(std::int64_t limit_bytes) const;

  std::int64_t least_bytes() const;  ///< Least limit that has a plan.
  std::int64_t plain_bytes() const;  ///< Peak of keep_everything().
  std::int64_t slot_bytes() const;   ///< Rounding of sizes; 1 is exact.
  std::int64_t table_bytes() const;  ///< Memory of the cost table; 0 if none was needed.

 private:
  class Impl;
  std::unique_ptr<const Impl> impl_;
};

/// ChainPlanner for one limit.
ChainPlan plan_chain(const Chain& chain, std::int64_t limit_bytes,
                     const ChainOptions& options = {});

}  // namespace gradus::solve
