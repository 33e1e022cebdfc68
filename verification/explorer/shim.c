/* Counts the changes that this process makes below one directory, TensorStore's too, and from one on
 * refuses them, or holds the one. Loaded by LD_PRELOAD; seams.py compiles and drives it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { OFF, END, HOLD };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char below[PATH_MAX];
static volatile int mode = OFF, is_held = 0;
static long left = 0;

void explorer_arm(const char *directory, int what, long skip) {
  pthread_mutex_lock(&lock);
  snprintf(below, sizeof below, "%s", directory);
  left = skip;
  is_held = 0;
  mode = what;
  pthread_mutex_unlock(&lock);
}

void explorer_disarm(void) {
  pthread_mutex_lock(&lock);
  mode = OFF;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

/* Whether a change was refused, or one is or was held. */
int explorer_is_reached(void) { return is_held; }

/* 0: go on. -1: errno says that the change is refused. A look may be held and is never refused. */
static int point(int directory, const char *path, int is_change) {
  if (mode == OFF || path == NULL) return 0;
  char full[PATH_MAX * 2] = "";
  if (path[0] != '/' && directory != AT_FDCWD) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(name, full, PATH_MAX);
    if (length < 0) return 0;
    snprintf(full + length, sizeof full - length, "/%s", path);
  } else {
    snprintf(full, sizeof full, "%s", path);
  }
  int refused = 0;
  pthread_mutex_lock(&lock);
  if (mode != OFF && strncmp(full, below, strlen(below)) == 0 && (is_change || mode == HOLD)) {
    long now = left--;
    if (mode == END && now <= 0) {
      is_held = 1;
      refused = 1;
    } else if (mode == HOLD && now == 0) {
      is_held = 1;
      while (mode == HOLD) pthread_cond_wait(&changed, &lock);
    }
  }
  pthread_mutex_unlock(&lock);
  if (refused) errno = EACCES;
  return -refused;
}

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define CHANGE(result, name, arguments, values, directory, path) \
  result name arguments {                                        \
    REAL(name);                                                  \
    return point(directory, path, 1) ? -1 : real values;         \
  }

CHANGE(int, rename, (const char *a, const char *b), (a, b), AT_FDCWD, b)
CHANGE(int, renameat, (int i, const char *a, int j, const char *b), (i, a, j, b), j, b)
CHANGE(int, renameat2, (int i, const char *a, int j, const char *b, unsigned f), (i, a, j, b, f), j, b)
CHANGE(int, link, (const char *a, const char *b), (a, b), AT_FDCWD, b)
CHANGE(int, linkat, (int i, const char *a, int j, const char *b, int f), (i, a, j, b, f), j, b)
CHANGE(int, symlink, (const char *a, const char *b), (a, b), AT_FDCWD, b)
CHANGE(int, unlink, (const char *a), (a), AT_FDCWD, a)
CHANGE(int, unlinkat, (int i, const char *a, int f), (i, a, f), i, a)
CHANGE(int, mkdir, (const char *a, mode_t m), (a, m), AT_FDCWD, a)
CHANGE(int, mkdirat, (int i, const char *a, mode_t m), (i, a, m), i, a)
CHANGE(int, rmdir, (const char *a), (a), AT_FDCWD, a)

#define OPEN(name, head, values, directory)                                    \
  int name head {                                                              \
    REAL(name);                                                                \
    mode_t permissions = 0;                                                    \
    if (flags & (O_CREAT | O_TMPFILE)) {                                       \
      va_list rest;                                                            \
      va_start(rest, flags);                                                   \
      permissions = va_arg(rest, mode_t);                                      \
      va_end(rest);                                                            \
    }                                                                          \
    int is_change = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT) != 0; \
    return point(directory, path, is_change) ? -1 : real values;               \
  }

OPEN(open, (const char *path, int flags, ...), (path, flags, permissions), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, permissions), AT_FDCWD)
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, permissions), at)
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, permissions), at)

DIR *opendir(const char *path) {
  REAL(opendir);
  point(AT_FDCWD, path, 0);
  return real(path);
}
