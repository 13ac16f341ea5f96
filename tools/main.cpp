#include <CLI/CLI.hpp>
#include <tools/commands.h>

int main(int argc, char** argv) {
  CLI::App app("gradus: trains models that do not fit, without changing the model");
  gradus::tools::Command chosen;
  gradus::tools::add_commands(app, chosen);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return gradus::tools::report_parse_error(app, error);
  }
  return gradus::tools::run_command(chosen);
}
