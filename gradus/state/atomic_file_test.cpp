#include <gradus/state/atomic_file.h>

#include <csignal>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sched.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/state/internal/file_descriptor.h>

#include <tests/support/message_of.h>

namespace gradus::state {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using tests::message_of;

class AtomicFileTest : public testing::Test {
 protected:
  AtomicFileTest() {
    std::string pattern = (fs::temp_directory_path() / "gradus-state-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  ~AtomicFileTest() override { fs::remove_all(directory_); }

  std::string at(const std::string& name) const { return directory_ + "/" + name; }
  std::vector<std::string> names(const std::string& directory) const {
    std::vector<std::string> result;
    for (const auto& entry : fs::directory_iterator(directory))
      result.push_back(entry.path().filename());
    std::sort(result.begin(), result.end());
    return result;
  }
  std::vector<std::string> names() const { return names(directory_); }

  std::string directory_;
};

/// Lowers this process's file size limit, so that a write past it fails half way with EFBIG instead
/// of a signal.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    old_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &old_limit_);
    const rlimit limit{bytes, old_limit_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_limit_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_limit_{};
  sighandler_t old_handler_ = nullptr;
};

/// Runs @p fn in a child process that then dies by SIGKILL, as a power cut or the out-of-memory
/// killer would end it.
void run_and_kill(const auto& fn) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    fn();
    ::kill(::getpid(), SIGKILL);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST_F(AtomicFileTest, CommitReplacesTheContentAndLeavesNothingElse) {
  write_file_atomically(at("a"), "old");
  AtomicFile file(at("a"));
  file.write("new ");
  file.write("content");
  EXPECT_EQ(read_file(at("a")), "old");
  EXPECT_EQ(file.size_bytes(), 11);
  file.commit();
  EXPECT_EQ(read_file(at("a")), "new content");
  EXPECT_THAT(names(), ElementsAre("a"));
}

TEST_F(AtomicFileTest, WithoutCommitTheOldContentStays) {
  write_file_atomically(at("a"), "old");
  {
    AtomicFile(at("a")).write("new");
  }
  EXPECT_EQ(read_file(at("a")), "old");
  EXPECT_THAT(names(), ElementsAre("a"));
}

TEST_F(AtomicFileTest, RefusesUseAfterCommit) {
  AtomicFile file(at("a"));
  file.commit();
  EXPECT_THAT(message_of([&] { file.write("x"); }), HasSubstr("no write may follow commit()"));
  EXPECT_THAT(message_of([&] { file.commit(); }), HasSubstr("commit() is called once"));
}

TEST_F(AtomicFileTest, FullDeviceIsReportedByPathReasonAndCure) {
  const internal::FileDescriptor full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(full.open());
  EXPECT_EQ(message_of([&] { internal::write_all(full.get(), "x", 1, "/data/model"); }),
            "[state] cannot write '/data/model': No space left on device. Free some space there, "
            "or choose a directory on "
            "another disk.");
}

TEST_F(AtomicFileTest, FullFileSystemKeepsTheOldFileAndDirectoryAndLeavesNoTemporary) {
  // A file system of 64 KiB, seen by one thread only; the mount goes with the thread.
  bool mounted = false;
  std::string file_message, directory_message, file_after;
  std::vector<std::string> names_after, state_after;
  std::thread([&] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
      return;
    if (::mount("tmpfs", directory_.c_str(), "tmpfs", 0, "size=64k") != 0) return;
    mounted = true;
    write_file_atomically(at("model"), "old");
    {
      AtomicDirectory state(at("step"));
      write_file_atomically(state.file("trainer"), "old");
      state.commit();
    }
    const std::string large(1 << 20, 'x');
    file_message = message_of([&] { write_file_atomically(at("model"), large); });
    directory_message = message_of([&] {
      AtomicDirectory state(at("step"));
      write_file_atomically(state.file("small"), "new");
      write_file_atomically(state.file("large"), large);
      state.commit();
    });
    file_after = read_file(at("model"));
    names_after = names();
    state_after = names(at("step"));
  }).join();
  if (!mounted)
    GTEST_SKIP()
        << "mounting a small file system needs CAP_SYS_ADMIN; the file size limit is tested apart";
  EXPECT_THAT(file_message, HasSubstr("cannot write '" + at("model") +
                                      "': No space left on device. Free some space"));
  EXPECT_THAT(directory_message, HasSubstr("No space left on device"));
  EXPECT_EQ(file_after, "old");
  EXPECT_THAT(names_after, ElementsAre("model", "step"));
  EXPECT_THAT(state_after, ElementsAre("trainer"));
}

TEST_F(AtomicFileTest, ShortWriteAtTheFileSizeLimitIsAnErrorAndKeepsTheOldContent) {
  write_file_atomically(at("a"), "old");
  const std::string large(100'000, 'x');
  std::string message;
  {
    const FileSizeLimit limit(10'000);
    message = message_of([&] { write_file_atomically(at("a"), large); });
  }
  EXPECT_EQ(message, "[state] cannot write '" + at("a") +
                         "': File too large. Raise the file size limit (ulimit -f), or choose "
                         "another file system.");
  EXPECT_EQ(read_file(at("a")), "old");
  EXPECT_THAT(names(), ElementsAre("a"));
}

TEST_F(AtomicFileTest, MissingParentAndBadNamesAreRefused) {
  EXPECT_EQ(message_of([&] { AtomicFile file(at("none/a")); }),
            "[state] cannot create a file beside '" + at("none/a") +
                "': No such file or directory. Create what is missing, or correct the path.");
  EXPECT_THAT(message_of([&] { AtomicDirectory directory(at("none/a")); }),
              HasSubstr("No such file or directory"));
  write_file_atomically(at("file"), "");
  EXPECT_THAT(message_of([&] { AtomicFile file(at("file/a")); }), HasSubstr("Not a directory"));
  EXPECT_THAT(message_of([&] { AtomicFile file(at(std::string(300, 'n'))); }),
              HasSubstr("File name too long"));
  for (const char* bad : {"", "x/", "..", "/"}) {
    EXPECT_THAT(message_of([&] { AtomicFile file{std::string(bad)}; }),
                HasSubstr("must end in a name"))
        << bad;
  }
  EXPECT_THAT(message_of([&] { read_file(at("absent")); }),
              HasSubstr("cannot open '" + at("absent")));
}

TEST_F(AtomicFileTest, NeverReplacesADirectoryADeviceOrALink) {
  fs::create_directory(at("directory"));
  fs::create_symlink("target", at("link"));
  for (const std::string& path : {at("directory"), at("link"), std::string("/dev/full")}) {
    EXPECT_THAT(message_of([&] { AtomicFile file(path); }),
                HasSubstr("is a directory, a link or a device"))
        << path;
  }
  write_file_atomically(at("file"), "x");
  EXPECT_THAT(message_of([&] { AtomicDirectory directory(at("file")); }),
              HasSubstr("is something else"));
}

TEST_F(AtomicFileTest, DirectoryWithoutPermissionIsRefusedAndUnchanged) {
  write_file_atomically(at("a"), "old");
  fs::permissions(directory_, fs::perms::owner_read | fs::perms::owner_exec |
                                  fs::perms::others_read | fs::perms::others_exec);
  // Permissions do not bind root: this thread's file accesses become another user's.
  const bool root = ::geteuid() == 0;
  if (root) ::setfsuid(65534);
  const std::string message = message_of([&] { write_file_atomically(at("a"), "new"); });
  if (root) ::setfsuid(0);
  fs::permissions(directory_, fs::perms::owner_all);
  EXPECT_THAT(message, HasSubstr("Permission denied. Grant this user the permission"));
  EXPECT_EQ(read_file(at("a")), "old");
  EXPECT_THAT(names(), ElementsAre("a"));
}

TEST_F(AtomicFileTest, DirectoryAppearsWholeAtCommitAndReplacesTheOldOne) {
  for (const char* content : {"first", "second"}) {
    AtomicDirectory state(at("step"));
    write_file_atomically(state.file(content), content);
    EXPECT_EQ(fs::exists(at(std::string("step/") + content)), false);
    state.commit();
    EXPECT_THAT(names(), ElementsAre("step"));
    EXPECT_THAT(names(at("step")), ElementsAre(content));
  }
  EXPECT_EQ(read_file(at("step/second")), "second");
}

TEST_F(AtomicFileTest, DirectoryAcceptsATrailingSlashAndRefusesPathsAsFileNames) {
  AtomicDirectory state(at("step/"));
  EXPECT_EQ(state.path(), at("step"));
  for (const char* bad : {"", ".", "..", "a/b", "/etc/passwd"}) {
    EXPECT_THAT(message_of([&] { state.file(bad); }), HasSubstr("plain name")) << bad;
  }
  state.commit();
  EXPECT_THAT(message_of([&] { state.commit(); }), HasSubstr("called once"));
  EXPECT_THAT(message_of([&] { state.file("late"); }), HasSubstr("no file may follow commit()"));
}

TEST_F(AtomicFileTest, DirectoryWithoutCommitLeavesTheOldOne) {
  {
    AtomicDirectory state(at("step"));
    write_file_atomically(state.file("x"), "old");
    state.commit();
  }
  {
    AtomicDirectory state(at("step"));
    write_file_atomically(state.file("y"), "new");
  }
  EXPECT_THAT(names(), ElementsAre("step"));
  EXPECT_THAT(names(at("step")), ElementsAre("x"));
}

TEST_F(AtomicFileTest, KilledWritersLeaveTheOldContentAndTheSweepRemovesTheirRest) {
  write_file_atomically(at("a"), "old");
  run_and_kill([&] {
    auto* file = new AtomicFile(at("a"));
    file->write("half of the new conte");
  });
  run_and_kill([&] {
    auto* state = new AtomicDirectory(at("step"));
    write_file_atomically(state->file("x"), "new");
    auto* inner = new AtomicFile(state->file("y"));
    inner->write("half");
  });
  EXPECT_EQ(read_file(at("a")), "old");
  EXPECT_THAT(names(), SizeIs(3));
  EXPECT_THAT(remove_stale_temporaries(directory_), SizeIs(2));
  EXPECT_THAT(names(), ElementsAre("a"));
}

TEST_F(AtomicFileTest, SweepSparesLivingWritersAndForeignNames) {
  write_file_atomically(at("a"), "x");
  write_file_atomically(at(".gradus-tmp-1-2"), "not ours: no name before the mark");
  write_file_atomically(at(".a.gradus-tmp-"), "not ours: no numbers");
  write_file_atomically(at("a.gradus-tmp-1-2"), "not ours: not hidden");
  fs::create_symlink(at("a"), at(".a.gradus-tmp-1-3"));
  AtomicFile file(at("b"));
  file.write("alive");
  AtomicDirectory state(at("step"));
  const std::vector<std::string> before = names();
  EXPECT_THAT(remove_stale_temporaries(directory_), IsEmpty());
  EXPECT_EQ(names(), before);
  file.commit();
  state.commit();
  EXPECT_EQ(read_file(at("b")), "alive");
  EXPECT_THAT(remove_stale_temporaries(at("absent")), IsEmpty());
}

TEST_F(AtomicFileTest, WritersOfOnePathAtOnceLeaveOneWholeContent) {
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer] {
      const std::string content(10'000, static_cast<char>('a' + writer));
      for (int i = 0; i < 10; ++i) {
        write_file_atomically(at("shared"), content);
        remove_stale_temporaries(directory_);
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::string content = read_file(at("shared"));
  EXPECT_EQ(content, std::string(10'000, content.front()));
  EXPECT_THAT(names(), ElementsAre("shared"));
}

}  // namespace
}  // namespace gradus::state
