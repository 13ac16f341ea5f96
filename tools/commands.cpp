#include <tools/commands.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>
#include <tools/info.h>
#include <tools/stop_signal.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/one_line.h>
#include <gradus/data/token_file.h>
#include <gradus/distributed/comm/spawn.h>
#include <gradus/report/plan_page.h>
#include <gradus/state/atomic_file.h>
#include <gradus/train/classification_task.h>
#include <gradus/train/config.h>
#include <gradus/train/device.h>
#include <gradus/train/explain.h>
#include <gradus/train/generate.h>
#include <gradus/train/language_model.h>
#include <gradus/train/trainer.h>
#include <gradus/train/training_state.h>

namespace gradus::tools {
namespace {

namespace fs = std::filesystem;
using train::ConfigKey;
using train::TrainConfig;

std::string local_time(const char* format) {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[64];
  std::strftime(text, sizeof text, format, &parts);
  return text;
}

// What the user gave for the keys of the configuration, as text.
using FlagValues = std::map<std::string, std::string>;

void add_key_flags(CLI::App& command, FlagValues& values, const std::vector<std::string>& tables) {
  for (const ConfigKey& key : train::config_keys()) {
    if (std::find(tables.begin(), tables.end(), key.table) == tables.end()) continue;
    TrainConfig defaults;
    const std::string text = train::key_text(defaults, key);
    const char* const group = "Configuration (also keys of the TOML file)";
    // What is off by default is switched on by its bare name, or off by --name=false.
    if (std::holds_alternative<ConfigKey::Access<bool>>(key.access) && text == "false") {
      command
          .add_flag_function(
              key.flag,
              [&values, &key](std::int64_t on) { values[key.path()] = on > 0 ? "true" : "false"; },
              key.help)
          ->group(group);
      continue;
    }
    command
        .add_option_function<std::string>(
            key.flag, [&values, &key](const std::string& value) { values[key.path()] = value; },
            key.help + (text.empty() ? "" : " [" + text + "]"))
        ->group(group);
  }
}

void apply_flags(TrainConfig& config, const FlagValues& values) {
  for (const ConfigKey& key : train::config_keys()) {
    const auto value = values.find(key.path());
    if (value != values.end()) train::set_key(config, key, value->second);
  }
}

// The configuration that a finished or interrupted run was made with.
TrainConfig run_config(const std::string& run_directory) {
  GRADUS_CHECK("gradus", fs::is_directory(run_directory), "a run directory is required; '",
               run_directory, "' is none");
  TrainConfig config = train::load_config((fs::path(run_directory) / "config.toml").string());
  config.train.out = run_directory;
  return config;
}

// --- train

struct TrainArguments {
  std::string config_path;
  std::string resume;
  FlagValues flags;
  TrainConfig config;
};

void prepare_training(TrainArguments& arguments) {
  GRADUS_CHECK("gradus", arguments.config_path.empty() || arguments.resume.empty(),
               "give a configuration or --resume, not both: a run keeps its own configuration");
  if (!arguments.resume.empty()) {
    arguments.config = run_config(arguments.resume);
  } else if (!arguments.config_path.empty()) {
    arguments.config = train::load_config(arguments.config_path);
  }
  apply_flags(arguments.config, arguments.flags);
  train::validate(arguments.config);
  train::find_device(arguments.config.train.device);
  if (!arguments.resume.empty()) {
    arguments.config.train.out = arguments.resume;
  } else if (arguments.config.train.out.empty()) {
    const std::string stem = !arguments.config_path.empty()
                                 ? fs::path(arguments.config_path).stem().string()
                             : train::is_classifier(arguments.config) ? arguments.config.data.task
                                                                      : "gpt";
    arguments.config.train.out = "runs/" + stem + local_time("-%Y%m%d-%H%M%S");
  }
}

void print_summary(const TrainConfig& config, const train::TrainOutcome& outcome,
                   std::ostream& out) {
  const auto row = [&](const char* name, const std::string& value) {
    out << name << std::string(24 - std::min<std::size_t>(23, std::string_view(name).size()), ' ')
        << value << '\n';
  };
  out << '\n';
  if (!train::is_classifier(config))
    row("plan", train::describe_plan(outcome.plan, config.train.batch, config.model.layers));
  if (outcome.plain_peak_bytes > 0) {
    row("plain training needs",
        base::format_bytes(outcome.plain_peak_bytes) + " (predicted from measured steps)");
  }
  std::string peak = base::format_bytes(outcome.peak_bytes);
  if (!config.memory.limit.empty()) {
    const std::int64_t limit = base::parse_bytes(config.memory.limit);
    row("memory limit", base::format_bytes(limit));
    peak += base::join(
        " (",
        std::llround(100.0 * static_cast<double>(outcome.peak_bytes) / static_cast<double>(limit)),
        "% of the limit)");
  }
  row("measured peak", peak);
  row("loss",
      base::join(outcome.first_loss, " -> ", outcome.last_loss, " in ", outcome.steps, " steps"));
  if (config.train.precision != "fp32") row("precision", config.train.precision);
  if (outcome.accuracy) row("test accuracy", base::join(100.0 * *outcome.accuracy, "%"));
  if (outcome.epsilon) {
    row("epsilon spent",
        base::join(*outcome.epsilon, " at delta ", config.privacy.delta, " (noise multiplier ",
                   outcome.noise_multiplier, ", ", config.privacy.accountant, ")"));
  }
  if (outcome.skipped_steps > 0) {
    row("skipped steps",
        base::join(outcome.skipped_steps, " (a gradient overflowed at the loss scale)"));
  }
  row("training state", outcome.state_path);
  row("report", outcome.report_path);
  if (!outcome.sample.empty()) out << "\nsample:\n" << outcome.sample << '\n';
}

int run_training(const TrainArguments& arguments) {
  catch_stop_signals();
  const train::TrainerEnvironment environment{.out = std::cout,
                                              .terminal = report::inspect_terminal(STDOUT_FILENO),
                                              .should_stop = [] { return stop_signal() != 0; },
                                              .date = local_time("%Y-%m-%d %H:%M")};
  const train::TrainOutcome outcome =
      train::train(arguments.config, !arguments.resume.empty(), environment);
  print_summary(arguments.config, outcome, std::cout);
  if (!outcome.interrupted) return 0;
  std::cout << "interrupted at step " << outcome.steps << "; continue with: gradus train --resume "
            << arguments.config.train.out << '\n';
  return 128 + stop_signal();
}

// --- plan

struct PlanArguments {
  std::string config_path;
  std::string html_path;
  std::string json_path;
  FlagValues flags;
  TrainConfig config;
};

void prepare_plan(PlanArguments& arguments) {
  if (!arguments.config_path.empty()) arguments.config = train::load_config(arguments.config_path);
  apply_flags(arguments.config, arguments.flags);
  train::validate(arguments.config);
  train::find_device(arguments.config.train.device);
  GRADUS_CHECK("gradus", !arguments.config.memory.limit.empty(),
               "a memory limit is required to plan for; give --memory, such as --memory 600MiB");
  GRADUS_CHECK("gradus", arguments.config.memory.plan == "auto",
               "--plan must be auto to be planned; got '", arguments.config.memory.plan, "'");
}

int run_plan(const PlanArguments& arguments) {
  catch_stop_signals();
  const train::PlanExplanation explanation =
      train::explain_plan(arguments.config, {.out = std::cout,
                                             .terminal = report::inspect_terminal(STDOUT_FILENO),
                                             .should_stop = [] { return stop_signal() != 0; },
                                             .date = local_time("%Y-%m-%d %H:%M")});
  std::cout << explanation.text;
  if (!arguments.html_path.empty()) {
    report::write_plan_page(arguments.html_path, explanation.page);
    std::cout << "\npage      " << arguments.html_path << '\n';
  }
  if (!arguments.json_path.empty()) {
    state::write_file_atomically(arguments.json_path, explanation.json);
    std::cout << (arguments.html_path.empty() ? "\n" : "") << "json      " << arguments.json_path
              << '\n';
  }
  return 0;
}

// --- eval and sample

train::SavedState newest_state(const TrainConfig& config) {
  const train::FoundState found = train::find_training_state(config.train.out);
  for (const auto& [path, reason] : found.damaged) {
    std::cerr << "gradus: warning: passed over a damaged training state: " << path << ": " << reason
              << '\n';
  }
  GRADUS_CHECK("gradus", found.newest.has_value(), config.train.out,
               " must hold a good training state; it holds ",
               found.damaged.empty() ? "none" : "damaged ones only");
  return *found.newest;
}

// A trained language model, read back from its run directory.
struct TrainedModel {
  models::Gpt gpt{nullptr};
  std::shared_ptr<const data::Tokenizer> tokenizer;
  train::SavedState state;
};

TrainedModel load_trained(const TrainConfig& config) {
  TrainedModel model;
  model.tokenizer = data::load_tokenizer((fs::path(config.train.out) / "tokenizer").string());
  model.state = newest_state(config);
  model.gpt = train::make_gpt(config, model.tokenizer->vocabulary_size());
  train::load_model(model.state, train::named_tensors(*model.gpt));
  return model;
}

struct RunArguments {
  std::string directory;
  FlagValues flags;
  TrainConfig config;
};

void prepare_run(RunArguments& arguments) {
  arguments.config = run_config(arguments.directory);
  apply_flags(arguments.config, arguments.flags);
  arguments.config.train.out = arguments.directory;
  train::validate(arguments.config);
  if (arguments.config.train.threads > 0)
    at::set_num_threads(static_cast<int>(arguments.config.train.threads));
}

int evaluate_classifier_run(const TrainConfig& config) {
  const train::SavedState state = newest_state(config);
  const train::ClassificationTask task =
      train::make_classification_task(config, config.train.out, /*made_before=*/true);
  GRADUS_CHECK("gradus", state.run.corpus_hash == task.content_hash,
               "the examples must be those the model was trained beside; those of data.task ",
               config.data.task, " are others now");
  train::load_model(state, train::named_tensors(*task.model));
  const train::Evaluation found =
      train::evaluate_classifier(task, task.test, config.privacy.micro_batch);
  std::cout << "step " << state.run.step << ": test accuracy " << 100.0 * found.accuracy
            << "%, loss " << found.loss << " nats (" << task.test.size() << " " << task.item
            << "s)\n";
  return 0;
}

int run_eval(const RunArguments& arguments) {
  const TrainConfig& config = arguments.config;
  if (train::is_classifier(config)) return evaluate_classifier_run(config);
  TrainedModel model = load_trained(config);
  const data::PreparedTokens prepared = data::prepare_tokens(
      config.data.corpus,
      {.kind = config.data.tokenizer, .vocabulary_size = config.data.vocabulary},
      config.data.cache);
  GRADUS_CHECK("gradus",
               prepared.tokenizer->hash() == model.tokenizer->hash() &&
                   prepared.tokens->info().corpus_hash == model.state.run.corpus_hash,
               "the corpus must be the one the model was trained on; ", config.data.corpus,
               " is another now");
  const auto split = data::split_tokens(prepared.tokens->size(),
                                        {.validation_ratio = config.data.validation_ratio});
  GRADUS_CHECK("gradus", !split.validation.empty(),
               "data.validation_ratio must be above 0 to evaluate; got 0");
  data::BatchStream stream(
      prepared.tokens, split.validation,
      {.batch_size = 8, .sequence_length = config.model.context, .shuffle = false});
  const std::int64_t sequences =
      std::min(config.train.eval_sequences, stream.sequences_per_epoch());
  const double loss = train::evaluate(*model.gpt, stream, sequences, 8);
  std::cout << "step " << model.state.run.step << ": validation loss " << loss
            << " nats a token, perplexity " << std::exp(loss) << " (" << sequences
            << " sequences of " << config.model.context << " tokens)\n";
  return 0;
}

int run_sample(const RunArguments& arguments) {
  const TrainConfig& config = arguments.config;
  GRADUS_CHECK("gradus", !train::is_classifier(config),
               "only a language model writes text; this run's data.task is ", config.data.task,
               ". Ask gradus eval for its accuracy");
  TrainedModel model = load_trained(config);
  std::cout << train::generate(*model.gpt, *model.tokenizer,
                               {.prompt = config.sample.prompt,
                                .tokens = config.sample.tokens,
                                .temperature = config.sample.temperature,
                                .top_k = config.sample.top_k,
                                .seed = static_cast<std::uint64_t>(config.train.seed)})
            << '\n';
  return 0;
}

// --- launch

struct LaunchArguments {
  int ranks = 1;
  int port = 0;
  std::vector<std::string> command;
};

int run_launch(const LaunchArguments& arguments) {
  const auto result = distributed::comm::run_ranks(
      {.world_size = arguments.ranks, .command = arguments.command, .port = arguments.port});
  return result.interrupted_by == 0 ? 0 : 128 + result.interrupted_by;
}

int fail(const std::string& message, int code) {
  std::cerr << "gradus: error: " << base::one_line(message) << '\n';
  return code;
}

// Runs a part of a command; what it throws becomes one line and this exit code.
template <typename Part>
std::optional<int> guarded(Part part, int code) {
  try {
    part();
    return std::nullopt;
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), code);
  } catch (const std::bad_alloc&) {
    return fail("the operating system has no memory left", code);
  } catch (const std::exception& error) {
    return fail(error.what(), code);
  }
}

}  // namespace

void add_commands(CLI::App& app, Command& chosen) {
  app.require_subcommand(1);
  app.set_version_flag("--version", GRADUS_VERSION);

  CLI::App& train_command = *app.add_subcommand(
      "train", "Train a language model inside a memory limit, or a classifier, privately if asked");
  const auto train_arguments = std::make_shared<TrainArguments>();
  train_command.add_option("config", train_arguments->config_path, "Configuration (TOML)");
  train_command.add_option("--resume", train_arguments->resume,
                           "Continue the run in this directory");
  add_key_flags(train_command, train_arguments->flags,
                {"model", "data", "train", "optimizer", "memory", "privacy", "sample"});
  train_command.callback([=, &chosen] {
    chosen.prepare = [=] { prepare_training(*train_arguments); };
    chosen.run = [=] { return run_training(*train_arguments); };
  });

  CLI::App& plan_command = *app.add_subcommand(
      "plan", "Show how a configuration would be trained inside a memory limit, and why so");
  const auto plan_arguments = std::make_shared<PlanArguments>();
  plan_command.add_option("config", plan_arguments->config_path, "Configuration (TOML)");
  plan_command.add_option("--html", plan_arguments->html_path,
                          "Write a page with the memory timeline to this file");
  plan_command.add_option("--json", plan_arguments->json_path,
                          "Write the plans to this file, for programs");
  add_key_flags(plan_command, plan_arguments->flags,
                {"model", "data", "train", "optimizer", "memory"});
  plan_command.callback([=, &chosen] {
    chosen.prepare = [=] { prepare_plan(*plan_arguments); };
    chosen.run = [=] { return run_plan(*plan_arguments); };
  });

  const auto add_run_command = [&](const char* name, const char* help,
                                   const std::vector<std::string>& tables,
                                   int (*run)(const RunArguments&)) {
    CLI::App& command = *app.add_subcommand(name, help);
    const auto arguments = std::make_shared<RunArguments>();
    command.add_option("run", arguments->directory, "Run directory")->required();
    add_key_flags(command, arguments->flags, tables);
    command.callback([=, &chosen] {
      chosen.prepare = [=] { prepare_run(*arguments); };
      chosen.run = [=] { return run(*arguments); };
    });
  };
  add_run_command("eval", "Validation loss or test accuracy of a run's last training state",
                  {"data", "train"}, &run_eval);
  add_run_command("sample", "Generate text with a run's last training state", {"train", "sample"},
                  &run_sample);

  CLI::App& info_command =
      *app.add_subcommand("info", "Versions, devices and what this build can do");
  info_command.callback([&chosen] {
    chosen.run = [] {
      print_info(std::cout);
      return 0;
    };
  });

  CLI::App& launch_command =
      *app.add_subcommand("launch", "Start several ranks of a program on this machine");
  const auto launch_arguments = std::make_shared<LaunchArguments>();
  launch_command.add_option("-n,--ranks", launch_arguments->ranks, "Ranks to start")->required();
  launch_command.add_option("--port", launch_arguments->port, "MASTER_PORT; 0 is a free one [0]");
  launch_command
      .add_option("command", launch_arguments->command, "Program and its arguments, after --")
      ->required();
  launch_command.callback(
      [=, &chosen] { chosen.run = [=] { return run_launch(*launch_arguments); }; });
}

int report_parse_error(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
  if (app.get_subcommands().empty() && !app.remaining().empty()) {
    return fail(base::join("there is no command '", app.remaining().front(),
                           "' (gradus --help lists them)"),
                kBadUsage);
  }
  return fail(base::join(error.what(), " (gradus --help, or gradus COMMAND --help)"), kBadUsage);
}

int run_command(const Command& command) {
  if (const auto code = guarded(command.prepare, kBadUsage)) return *code;
  int result = 0;
  if (const auto code = guarded([&] { result = command.run(); }, kRunFailed)) return *code;
  return result;
}

}  // namespace gradus::tools
