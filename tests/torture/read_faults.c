/* Faults on the reading side, for LD_PRELOAD.

   Counts the calls that examine, open, read, list or map a file below `folder`, and gives the
   call number `target` a fault. Files that are opened for writing are not counted: the other
   torture tests inject faults there. Without a plan, every call does what it always does. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum fault { NONE, FAIL, INTERRUPT, SHORT, END, ZERO }; /* the order of FAULTS in fault_server.py */

struct plan {
    char folder[PATH_MAX];
    char hit[2 * PATH_MAX]; /* the call that got the fault, and its path */
    char ended[PATH_MAX];   /* a file that has ended early stays so while it is open */
    int ended_file;
    int log;                /* a descriptor that each call is written to, or -1 */
    int fault;
    long target;
    atomic_long calls;
};

static struct plan *plan; /* shared with the process that made this one by a fork */

void set_plan(struct plan *given) { plan = given; }

static int fault_of(const char *call, const char *path) {
    if (!plan || strncmp(path, plan->folder, strlen(plan->folder))) return NONE;
    int kept = errno;
    long number = ++plan->calls;
    if (plan->log >= 0) dprintf(plan->log, "%s %s\n", call, path);
    errno = kept;
    if (number != plan->target) return NONE;
    snprintf(plan->hit, sizeof plan->hit, "%s %s", call, path);
    if (plan->fault == FAIL) errno = EIO;
    if (plan->fault == INTERRUPT) errno = EINTR;
    return plan->fault;
}

static void path_of(int file, char *path) {
    char name[64];
    int kept = errno;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t size = readlink(name, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    errno = kept;
}

static int fault_of_file(const char *call, int file) {
    char path[PATH_MAX];
    if (!plan || file < 0) return NONE;
    path_of(file, path);
    return fault_of(call, path);
}

/* Paths are absolute in these tests, or relative to the descriptor of a directory. */
static int fault_of_path(const char *call, int directory, const char *name) {
    char path[2 * PATH_MAX + 1];
    if (!plan || !name) return NONE;
    if (name[0] == '/' || directory == AT_FDCWD) return fault_of(call, name);
    path_of(directory, path);
    if (name[0]) {
        strcat(path, "/");
        strncat(path, name, PATH_MAX);
    }
    return fault_of(call, path);
}

static int is_error(int fault) { return fault == FAIL || fault == INTERRUPT; }

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name, directory, declared, ...)                                            \
    int name(declared const char *path, int flags, ...) {                               \
        va_list rest;                                                                   \
        va_start(rest, flags);                                                          \
        mode_t mode = va_arg(rest, mode_t);                                             \
        va_end(rest);                                                                   \
        int is_read = (flags & O_ACCMODE) == O_RDONLY;                                  \
        if (is_read && is_error(fault_of_path("open", directory, path))) return -1;     \
        return REAL(name)(__VA_ARGS__ path, flags, mode);                               \
    }
#define COMMA ,
OPEN(open, AT_FDCWD, , )
OPEN(open64, AT_FDCWD, , )
OPEN(openat, directory, int directory COMMA, directory COMMA)
OPEN(openat64, directory, int directory COMMA, directory COMMA)

DIR *opendir(const char *path) {
    if (is_error(fault_of_path("open", AT_FDCWD, path))) return NULL;
    return REAL(opendir)(path);
}

#define READDIR(name, type)                                                             \
    struct type *name(DIR *directory) {                                                 \
        if (is_error(fault_of_file("readdir", dirfd(directory)))) return NULL;          \
        return REAL(name)(directory);                                                   \
    }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)

#define STAT(name, type)                                                                \
    int name(const char *path, struct type *found) {                                    \
        if (is_error(fault_of_path("stat", AT_FDCWD, path))) return -1;                 \
        return REAL(name)(path, found);                                                 \
    }
#define FSTAT(name, type)                                                               \
    int name(int file, struct type *found) {                                            \
        if (is_error(fault_of_file("stat", file))) return -1;                           \
        return REAL(name)(file, found);                                                 \
    }
#define FSTATAT(name, type)                                                             \
    int name(int directory, const char *path, struct type *found, int flags) {          \
        if (is_error(fault_of_path("stat", directory, path))) return -1;                \
        return REAL(name)(directory, path, found, flags);                               \
    }
/* Names of glibc before 2.33, which wheels are linked to; the headers do not declare them. */
#define XSTAT(name, type)                                                               \
    int name(int version, const char *path, struct type *found) {                       \
        int (*real)(int, const char *, struct type *) = dlsym(RTLD_NEXT, #name);        \
        if (is_error(fault_of_path("stat", AT_FDCWD, path))) return -1;                 \
        return real(version, path, found);                                              \
    }
#define FXSTAT(name, type)                                                              \
    int name(int version, int file, struct type *found) {                               \
        int (*real)(int, int, struct type *) = dlsym(RTLD_NEXT, #name);                 \
        if (is_error(fault_of_file("stat", file))) return -1;                           \
        return real(version, file, found);                                              \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
FSTAT(fstat, stat)
FSTAT(fstat64, stat64)
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)
XSTAT(__xstat, stat)
XSTAT(__xstat64, stat64)
XSTAT(__lxstat, stat)
XSTAT(__lxstat64, stat64)
FXSTAT(__fxstat, stat)
FXSTAT(__fxstat64, stat64)

int statx(int directory, const char *path, int flags, unsigned mask, struct statx *found) {
    if (is_error(fault_of_path("stat", directory, path))) return -1;
    return REAL(statx)(directory, path, flags, mask, found);
}

/* The fault of a read; END also for later reads of a file that has ended early. */
static int fault_of_read(int file) {
    char path[PATH_MAX];
    int fault = fault_of_file("read", file);
    if (!plan || (fault != END && plan->ended_file != file)) return fault;
    path_of(file, path);
    if (fault == END) {
        strcpy(plan->ended, path);
        plan->ended_file = file;
    }
    return strcmp(path, plan->ended) ? fault : END;
}

/* What a read returns that got `size` bytes: fewer of them, or as many zeros. */
static ssize_t changed(int fault, void *buffer, ssize_t size) {
    if (fault == SHORT && size > 1) return size / 2;
    if (fault == ZERO && size > 0) memset(buffer, 0, size);
    return size;
}

ssize_t read(int file, void *buffer, size_t size) {
    int fault = fault_of_read(file);
    if (is_error(fault)) return -1;
    if (fault == END) return 0;
    ssize_t got = REAL(read)(file, buffer, size);
    ssize_t kept = changed(fault, buffer, got);
    if (kept < got) lseek(file, kept - got, SEEK_CUR);
    return kept;
}

ssize_t readv(int file, const struct iovec *parts, int count) {
    int fault = fault_of_read(file);
    if (is_error(fault)) return -1;
    if (fault == END) return 0;
    if (fault == NONE) return REAL(readv)(file, parts, count);
    /* A short read may fill the first part only. */
    return changed(fault, parts[0].iov_base, REAL(readv)(file, parts, 1));
}

#define PREAD(name)                                                                     \
    ssize_t name(int file, void *buffer, size_t size, off_t offset) {                   \
        int fault = fault_of_read(file);                                                \
        if (is_error(fault)) return -1;                                                 \
        if (fault == END) return 0;                                                     \
        return changed(fault, buffer, REAL(name)(file, buffer, size, offset));          \
    }
PREAD(pread)
PREAD(pread64)

#define MMAP(name)                                                                      \
    void *name(void *at, size_t size, int access, int flags, int file, off_t offset) {  \
        int fault = flags & MAP_ANONYMOUS ? NONE : fault_of_file("mmap", file);         \
        if (is_error(fault)) return MAP_FAILED;                                         \
        if (fault == ZERO) {                                                            \
            flags = (flags & ~(MAP_SHARED | MAP_SHARED_VALIDATE)) | MAP_PRIVATE;        \
            return REAL(name)(at, size, access, flags | MAP_ANONYMOUS, -1, 0);          \
        }                                                                               \
        return REAL(name)(at, size, access, flags, file, offset);                       \
    }
MMAP(mmap)
MMAP(mmap64)
