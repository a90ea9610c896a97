/* Record what a process writes below a folder: preload it, with RECORD_ROOT and RECORD_LOG set.
 *
 * Each change of a file or a name is one record of the log, before the change is made:
 *     u8 kind, u32 bytes of path, path, i64 offset, u32 bytes of data, data
 * Kinds: c create, w write, t truncate, s sync, r rename (data: new path), u unlink, d rmdir,
 * m mkdir, l link (data: new path).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void put(int log, const void *bytes, size_t size) { syscall(SYS_write, log, bytes, size); }

static int below_root(const char *path) {
    const char *root = getenv("RECORD_ROOT");
    size_t n = root ? strlen(root) : 0;
    return n && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

static void record(char kind, const char *path, int64_t offset, const void *data, uint32_t size) {
    static int log = -1;
    if (!below_root(path)) return;
    if (log < 0)
        log = syscall(SYS_openat, AT_FDCWD, getenv("RECORD_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    uint32_t n = strlen(path);
    put(log, &kind, 1), put(log, &n, 4), put(log, path, n);
    put(log, &offset, 8), put(log, &size, 4), put(log, data, size);
}

/* The path of `name` in the folder `dir`, which may be AT_FDCWD. */
static void resolve(int dir, const char *name, char *path) {
    char base[PATH_MAX] = "", link[64];
    if (name[0] != '/') {
        if (dir == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) base[0] = 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
            ssize_t n = readlink(link, base, sizeof base - 1);
            base[n < 0 ? 0 : n] = 0;
        }
    }
    snprintf(path, PATH_MAX, "%.2000s%s%.2000s", base, base[0] ? "/" : "", name);
}

static void path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
}

static void on_open(int dir, const char *name, int flags) {
    char path[PATH_MAX];
    struct stat found;
    resolve(dir, name, path);
    if (!below_root(path)) return;
    int exists = !lstat(path, &found);
    if ((flags & O_CREAT) && !exists) record('c', path, 0, "", 0);
    if ((flags & O_TRUNC) && exists) record('t', path, 0, "", 0);
}

#define OPEN(name, dir, parameters, ...)                                                          \
    int name parameters {                                                                         \
        mode_t mode = 0;                                                                          \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                                    \
            va_list rest;                                                                         \
            va_start(rest, flags), mode = va_arg(rest, mode_t), va_end(rest);                     \
        }                                                                                         \
        on_open(dir, path, flags);                                                                \
        return REAL(name)(__VA_ARGS__, flags, mode);                                              \
    }
OPEN(open, AT_FDCWD, (const char *path, int flags, ...), path)
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), path)
OPEN(openat, dir, (int dir, const char *path, int flags, ...), dir, path)
OPEN(openat64, dir, (int dir, const char *path, int flags, ...), dir, path)

static void on_write(int fd, const void *data, size_t size, int64_t offset) {
    char path[PATH_MAX];
    path_of(fd, path);
    if (!below_root(path)) return;
    struct stat found;
    if (offset < 0 && (fcntl(fd, F_GETFL) & O_APPEND) && !fstat(fd, &found)) offset = found.st_size;
    if (offset < 0) offset = lseek(fd, 0, SEEK_CUR);
    record('w', path, offset, data, size);
}

ssize_t write(int fd, const void *data, size_t size) {
    on_write(fd, data, size, -1);
    return REAL(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    on_write(fd, data, size, offset);
    return REAL(pwrite)(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    on_write(fd, data, size, offset);
    return REAL(pwrite64)(fd, data, size, offset);
}

static void on_descriptor(char kind, int fd, int64_t offset) {
    char path[PATH_MAX];
    path_of(fd, path);
    record(kind, path, offset, "", 0);
}

int ftruncate(int fd, off_t size) { on_descriptor('t', fd, size); return REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) {
    on_descriptor('t', fd, size);
    return REAL(ftruncate64)(fd, size);
}
int fsync(int fd) { on_descriptor('s', fd, 0); return REAL(fsync)(fd); }
int fdatasync(int fd) { on_descriptor('s', fd, 0); return REAL(fdatasync)(fd); }

static void on_name(char kind, int dir, const char *name, int to_dir, const char *to) {
    char path[PATH_MAX], target[PATH_MAX] = "";
    resolve(dir, name, path);
    if (to) resolve(to_dir, to, target);
    record(kind, path, 0, target, strlen(target));
}

int truncate(const char *path, off_t size) {
    record('t', path, size, "", 0);
    return REAL(truncate)(path, size);
}
int rename(const char *from, const char *to) {
    on_name('r', AT_FDCWD, from, AT_FDCWD, to);
    return REAL(rename)(from, to);
}
int link(const char *from, const char *to) {
    on_name('l', AT_FDCWD, from, AT_FDCWD, to);
    return REAL(link)(from, to);
}
int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    on_name('l', from_dir, from, to_dir, to);
    return REAL(linkat)(from_dir, from, to_dir, to, flags);
}
int unlink(const char *path) {
    on_name('u', AT_FDCWD, path, 0, NULL);
    return REAL(unlink)(path);
}
int rmdir(const char *path) {
    on_name('d', AT_FDCWD, path, 0, NULL);
    return REAL(rmdir)(path);
}
int unlinkat(int dir, const char *path, int flags) {
    on_name(flags & AT_REMOVEDIR ? 'd' : 'u', dir, path, 0, NULL);
    return REAL(unlinkat)(dir, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    on_name('m', AT_FDCWD, path, 0, NULL);
    return REAL(mkdir)(path, mode);
}
