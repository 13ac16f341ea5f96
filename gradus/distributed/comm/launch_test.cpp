#include <gradus/distributed/comm/launch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::distributed::comm {
namespace {

using testing::HasSubstr;
using tests::message_of;

std::string refusal(const Environment& environment, const LaunchOptions& options = {}) {
  return message_of([&] { discover(environment, options); });
}

Environment with(Environment environment, const Environment& changes) {
  for (const auto& [name, value] : changes) environment[name] = value;
  return environment;
}

Environment without(Environment environment, const std::string& name) {
  environment.erase(name);
  return environment;
}

const Environment kTorchrun{{"RANK", "5"},
                            {"LOCAL_RANK", "1"},
                            {"WORLD_SIZE", "8"},
                            {"LOCAL_WORLD_SIZE", "4"},
                            {"MASTER_ADDR", "10.0.0.1"},
                            {"MASTER_PORT", "1234"}};
const Environment kOpenMpi{{"OMPI_COMM_WORLD_RANK", "3"},
                           {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                           {"PMIX_RANK", "3"}};
const Environment kMvapich{{"MV2_COMM_WORLD_RANK", "1"},
                           {"MV2_COMM_WORLD_SIZE", "2"},
                           {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
                           {"MV2_COMM_WORLD_LOCAL_SIZE", "2"}};
const Environment kMpich{
    {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Environment kPmix{
    {"PMIX_RANK", "1"}, {"PMIX_SIZE", "2"}, {"PMIX_LOCAL_RANK", "1"}, {"PMIX_LOCAL_SIZE", "2"}};
const Environment kSlurm{{"SLURM_PROCID", "4"},
                         {"SLURM_NTASKS", "6"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NODEID", "2"},
                         {"SLURM_TASKS_PER_NODE", "1(x2),2(x2)"},
                         {"SLURM_JOB_NODELIST", "gpu[007-009,12]"},
                         {"SLURM_JOB_ID", "1234567"},
                         {"SLURM_JOB_NAME", "train"}};

TEST(LaunchTest, WithoutAnyWordThisIsTheOnlyProcess) {
  for (const auto& environment :
       {Environment{}, Environment{{"MASTER_ADDR", "x"}, {"PATH", "/bin"}}}) {
    const auto info = discover(environment);
    EXPECT_EQ(info.rank, 0);
    EXPECT_EQ(info.world_size, 1);
    EXPECT_EQ(info.local_rank, 0);
    EXPECT_EQ(info.local_world_size, 1);
    EXPECT_EQ(info.launcher, "none");
  }
}

TEST(LaunchTest, ReadsTorchrun) {
  const auto info = discover(kTorchrun);
  EXPECT_EQ(info.rank, 5);
  EXPECT_EQ(info.world_size, 8);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_world_size, 4);
  EXPECT_EQ(info.master_address, "10.0.0.1");
  EXPECT_EQ(info.master_port, 1234);
  EXPECT_EQ(info.launcher, "torchrun");
  EXPECT_FALSE(info.agent_store);
  EXPECT_EQ(info.restart_count, 0);
  EXPECT_EQ(info.error_file, "");
}

TEST(LaunchTest, ReadsTorchrunsAgentStoreRestartCountAndErrorFile) {
  const auto info = discover(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                              {"TORCHELASTIC_RESTART_COUNT", "2"},
                                              {"TORCHELASTIC_ERROR_FILE", "/tmp/error.json"}}));
  EXPECT_TRUE(info.agent_store);
  EXPECT_EQ(info.restart_count, 2);
  EXPECT_EQ(info.error_file, "/tmp/error.json");
  EXPECT_FALSE(discover(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).agent_store);
}

TEST(LaunchTest, ReadsEveryMpi) {
  for (const auto& [environment, launcher] : std::vector<std::pair<Environment, std::string>>{
           {kOpenMpi, "openmpi"}, {kMvapich, "mvapich2"}, {kMpich, "pmi"}, {kPmix, "pmix"}}) {
    SCOPED_TRACE(launcher);
    const auto info = discover(environment);
    EXPECT_EQ(info.launcher, launcher);
    EXPECT_EQ(info.rank, info.world_size - 1);
    EXPECT_EQ(info.local_rank, info.rank);
    EXPECT_EQ(info.local_world_size, info.world_size);
    EXPECT_EQ(info.master_address, "127.0.0.1");
    EXPECT_EQ(info.master_port, 29500);
    const auto told = discover(with(environment, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "77"}}));
    EXPECT_EQ(told.master_address, "head");
    EXPECT_EQ(told.master_port, 77);
  }
}

TEST(LaunchTest, MpiOnSeveralHostsNeedsAnAddress) {
  const auto hosts =
      with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
  EXPECT_THAT(refusal(hosts),
              HasSubstr("the variables of openmpi must be complete; got no MASTER_ADDR"));
  EXPECT_EQ(discover(with(hosts, {{"MASTER_ADDR", "head"}})).master_address, "head");
  EXPECT_EQ(discover(with(hosts, {{"SLURM_JOB_NODELIST", "n[3-4]"}, {"SLURM_JOB_ID", "42"}}))
                .master_address,
            "n3");
}

TEST(LaunchTest, ReadsSlurm) {
  const auto info = discover(kSlurm);
  EXPECT_EQ(info.rank, 4);
  EXPECT_EQ(info.world_size, 6);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_world_size, 2);
  EXPECT_EQ(info.master_address, "gpu007");
  EXPECT_EQ(info.master_port, 19567);
  EXPECT_EQ(info.launcher, "slurm");
  EXPECT_EQ(discover(with(kSlurm, {{"SLURM_JOB_ID", "42"}})).master_port, 15042);
  EXPECT_EQ(discover(with(kSlurm, {{"SLURM_JOB_ID", "120007"}})).master_port, 15007);
  EXPECT_EQ(discover(with(kSlurm, {{"SLURM_STEP_NODELIST", "b1"}})).master_address, "b1");
}

TEST(LaunchTest, SlurmIsIgnoredInAnInteractiveShell) {
  for (const auto* name : {"bash", "interactive"}) {
    EXPECT_EQ(discover(with(kSlurm, {{"SLURM_JOB_NAME", name}})).launcher, "none");
  }
}

TEST(LaunchTest, SrunsPmiRankDoesNotHideSlurm) {
  EXPECT_EQ(discover(with(kSlurm, {{"PMIX_RANK", "4"}})).launcher, "slurm");
  EXPECT_EQ(discover(with(kSlurm, {{"PMI_RANK", "4"}, {"PMI_SIZE", "6"}})).launcher, "slurm");
}

TEST(LaunchTest, TheFirstWordInOrderWins) {
  Environment all = kSlurm;
  EXPECT_EQ(discover(all).launcher, "slurm");
  all = with(all, kMvapich);
  EXPECT_EQ(discover(all).launcher, "mvapich2");
  all = with(all, kOpenMpi);
  EXPECT_EQ(discover(all).launcher, "openmpi");
  all = with(all, kTorchrun);
  EXPECT_EQ(discover(all).launcher, "torchrun");
  const auto info =
      discover(all, {.rank = 1, .world_size = 2, .master_address = "here", .master_port = 9});
  EXPECT_EQ(info.launcher, "options");
  EXPECT_EQ(info.rank, 1);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_world_size, 2);
  EXPECT_EQ(info.master_address, "here");
  EXPECT_EQ(info.master_port, 9);
}

TEST(LaunchTest, PartialSetIsRefusedWithTheNameOfTheMissingVariable) {
  for (const auto& [environment, optional] :
       std::vector<std::pair<Environment, std::vector<std::string>>>{
           {kTorchrun, {"LOCAL_WORLD_SIZE"}},
           {kOpenMpi, {"PMIX_RANK"}},
           {kMvapich, {}},
           {kMpich, {}},
           {kPmix, {}},
           {kSlurm,
            {"SLURM_PROCID", "SLURM_TASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_JOB_NAME",
             "SLURM_NODEID"}}}) {
    for (const auto& [name, value] : environment) {
      if (std::find(optional.begin(), optional.end(), name) != optional.end()) continue;
      SCOPED_TRACE(name);
      EXPECT_THAT(refusal(without(environment, name)),
                  HasSubstr("must be complete; got no " + name));
    }
  }
  EXPECT_THAT(refusal({}, {.rank = 0}),
              HasSubstr("the launch options must be complete; got no world_size"));
  EXPECT_THAT(refusal({}, {.world_size = 2}), HasSubstr("got no rank"));
  EXPECT_THAT(refusal({}, {.rank = 0, .world_size = 2}), HasSubstr("got no master_address"));
  EXPECT_THAT(refusal({}, {.rank = 0, .world_size = 2, .master_address = "x"}),
              HasSubstr("got no master_port"));
  EXPECT_EQ(discover(kTorchrun, {.world_size = 1}).world_size, 1);
}

TEST(LaunchTest, MalformedNumbersAreRefusedByName) {
  for (const auto* value : {"", "x", "1x", " 1", "1.5", "-1", "99999999999"}) {
    SCOPED_TRACE(value);
    for (const auto* name :
         {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"}) {
      EXPECT_THAT(refusal(with(kTorchrun, {{name, value}})),
                  HasSubstr(std::string("[launch] ") + name + " must "));
    }
    EXPECT_THAT(refusal(with(kSlurm, {{"SLURM_PROCID", value}})), HasSubstr("SLURM_PROCID must "));
    EXPECT_THAT(refusal(with(kSlurm, {{"SLURM_JOB_ID", std::string(value) + "_"}})),
                HasSubstr("SLURM_JOB_ID must "));
    EXPECT_THAT(refusal(with(kSlurm, {{"SLURM_TASKS_PER_NODE", value}})),
                HasSubstr("SLURM_TASKS_PER_NODE must "));
  }
  EXPECT_THAT(refusal(with(kTorchrun, {{"MASTER_PORT", "0"}})),
              HasSubstr("MASTER_PORT must be a whole number from 1 to 65535; got '0'"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"MASTER_PORT", "65536"}})), HasSubstr("MASTER_PORT"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"WORLD_SIZE", "0"}})), HasSubstr("WORLD_SIZE"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"MASTER_ADDR", ""}})),
              HasSubstr("MASTER_ADDR must not be empty"));
  EXPECT_THAT(refusal(with(kSlurm, {{"SLURM_NODEID", "9"}})),
              HasSubstr("must have an entry for this node"));
}

TEST(LaunchTest, RankMustBeBelowTheWorldSize) {
  EXPECT_THAT(refusal(with(kTorchrun, {{"RANK", "8"}})),
              HasSubstr("the rank must be below the world size 8; got 8 from torchrun"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"LOCAL_RANK", "4"}})),
              HasSubstr("the local rank must be below the local world size 4"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}})),
              HasSubstr("the local world size must be at most"));
  EXPECT_THAT(refusal({}, {.rank = 2, .world_size = 2, .master_address = "x", .master_port = 1}),
              HasSubstr("got 2 from options"));
  EXPECT_THAT(refusal({}, {.rank = -1, .world_size = 1}), HasSubstr("rank must be >= 0"));
}

TEST(LaunchTest, FirstHostOfANodeList) {
  for (const auto& [list, host] :
       std::vector<std::pair<std::string, std::string>>{{"a", "a"},
                                                        {"a,b", "a"},
                                                        {"node[003-005,9],x", "node003"},
                                                        {"n[7,9]", "n7"},
                                                        {"n[12]", "n12"},
                                                        {"rack[1-2]node[03-04]", "rack1node03"},
                                                        {"gpu-[01-02].site,b", "gpu-01.site"}}) {
    EXPECT_EQ(first_slurm_host(list), host) << list;
  }
  for (const auto* list : {"", ",a", "n[", "n[]", "n]", "n[a-b]", "n[-3]"}) {
    EXPECT_THROW(first_slurm_host(list), UserError) << list;
  }
}

TEST(LaunchTest, ProcessEnvironmentHasWhatThisProcessHas) {
  ASSERT_EQ(::setenv("GRADUS_LAUNCH_TEST", "a=b", 1), 0);
  EXPECT_EQ(process_environment().at("GRADUS_LAUNCH_TEST"), "a=b");
  ::unsetenv("GRADUS_LAUNCH_TEST");
}

}  // namespace
}  // namespace gradus::distributed::comm
