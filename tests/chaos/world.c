/* A worse world for the supervisor, the controller and the trainer of a run: preload it.
 *
 *     CHAOS_CONTROL   a file with the struct `control`, which the test changes
 *     CHAOS_ROOT      the folder whose disk may be full
 *     CHAOS_PROXY     the port of a proxy
 *
 * While `disk_error` is an errno, nothing can be written below the folder; with EROFS no file can be
 * opened for it either. `clock_offset_s` is added to the
 * wall clock. Controller and trainer connect to 127.0.0.1 by way of the proxy, which learns the port
 * from its own address: 127.100.HIGH.LOW. Other programs are left alone.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

struct control { int64_t clock_offset_s; int64_t disk_error; };

static struct control calm, *world = &calm;
static int proxy;

static int names(const char *command, size_t size, const char *part) {
    return memmem(command, size, part, strlen(part)) != NULL;
}

__attribute__((constructor)) static void begin(void) {
    char command[4096];
    const char *path = getenv("CHAOS_CONTROL");
    int file = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
    ssize_t n = file < 0 ? -1 : syscall(SYS_read, file, command, sizeof command);
    if (file >= 0) syscall(SYS_close, file);
    if (n <= 0 || !path) return;
    int role = names(command, n, "areal_lite.controller.service") ||
               names(command, n, "areal_lite.trainer.loop");
    if (!role && !memmem(command, n, "areal_lite\0train", 16)) return;
    if (role && getenv("CHAOS_PROXY")) proxy = atoi(getenv("CHAOS_PROXY"));
    file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    void *shared = mmap(NULL, sizeof calm, PROT_READ, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) world = shared;
    syscall(SYS_close, file);
}

/* --- the disk */

static int below_root(const char *path) {
    const char *root = getenv("CHAOS_ROOT");
    return root && !strncmp(path, root, strlen(root));
}

static int refused(int fd) {
    char link[64], path[PATH_MAX];
    if (!world->disk_error) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    if (!below_root(path)) return 0;
    errno = world->disk_error;
    return 1;
}

#define OPEN(name)                                                                                \
    int name(const char *path, int flags, ...) {                                                  \
        mode_t mode = 0;                                                                          \
        va_list rest;                                                                             \
        va_start(rest, flags);                                                                    \
        if (flags & (O_CREAT | __O_TMPFILE)) mode = va_arg(rest, mode_t);                         \
        va_end(rest);                                                                             \
        if (world->disk_error == EROFS && (flags & O_ACCMODE) != O_RDONLY && below_root(path)) {  \
            errno = EROFS;                                                                        \
            return -1;                                                                            \
        }                                                                                         \
        return REAL(name)(path, flags, mode);                                                     \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t size) {
    return size && refused(fd) ? -1 : REAL(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return refused(fd) ? -1 : REAL(writev)(fd, parts, count);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    return size && refused(fd) ? -1 : REAL(pwrite)(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    return size && refused(fd) ? -1 : REAL(pwrite64)(fd, data, size, offset);
}

/* --- the clock */

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = REAL(clock_gettime)(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += world->clock_offset_s;
    return status;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int status = REAL(gettimeofday)(now, zone);
    now->tv_sec += world->clock_offset_s;
    return status;
}
time_t time(time_t *result) {
    time_t now = REAL(time)(NULL) + world->clock_offset_s;
    if (result) *result = now;
    return now;
}

/* The kernel waits until a moment of its own clock. One of the monotonic clock is far smaller. */
static struct timespec of_kernel(const struct timespec *until) {
    struct timespec moment = *until;
    if (moment.tv_sec > 1000000000) moment.tv_sec -= world->clock_offset_s;
    return moment;
}
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec moment = of_kernel(until);
    __typeof__(&pthread_cond_timedwait) wait =
        dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    return (wait ? wait : REAL(pthread_cond_timedwait))(condition, mutex, &moment);
}
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec moment = of_kernel(until);
    return REAL(sem_timedwait)(semaphore, &moment);
}

/* --- the network */

int connect(int fd, const struct sockaddr *address, socklen_t size) {
    struct sockaddr_in *to = (struct sockaddr_in *)address, other;
    if (!proxy || address->sa_family != AF_INET || to->sin_addr.s_addr != htonl(INADDR_LOOPBACK))
        return REAL(connect)(fd, address, size);
    other = *to;
    other.sin_addr.s_addr = htonl(0x7f640000u | ntohs(to->sin_port));
    other.sin_port = htons(proxy);
    return REAL(connect)(fd, (struct sockaddr *)&other, sizeof other);
}
