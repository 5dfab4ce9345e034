/* A light client for server-sent events: B streams, one thread, one epoll loop.
 *
 * Owns: when each frame that carries text arrived. Never: parses JSON, keeps text, or does anything between two receives
 * that could make it the bottleneck of what it measures.
 *
 * Every recv() is stamped once with CLOCK_MONOTONIC; every content frame that it completes gets that stamp. A content frame
 * is a line `data: ...` holding `"content":"x` or `"text":"x`, x any character but a quote. Where the key stood in the last
 * frame of a stream is tried first, so most frames cost one comparison and one search for their line end.
 *
 * The steady window opens when every stream has its first content frame and `settle` ms have passed; it closes when any
 * stream has `tokens` - 1 content frames, or ends. At both marks the CPU of the processes named by -P is read.
 *
 * Output, JSON lines: first {"streams", "open", "close", "client_cpu_ns"}, a mark being {"at_ns", "frames", "cpu_ns": [...]}
 * or null; then per stream {"id", "status", "ended", "start_ns", "bytes", "arrivals_ns": [...]}. All times are absolute.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PIDS = 8, ID_BYTES = 96, HEAD_BYTES = 8192, RECV_BYTES = 1 << 16, MAX_EVENTS = 512 };

/* Where a stream stands in its response. */
enum state { HEAD, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, PLAIN, TRAILER, FINISHED };

struct stream {
  int fd, status, is_done;
  enum state state;
  size_t sent;            /* bytes of the request that are out */
  uint64_t chunk_left;    /* bytes of the current chunk still to come */
  char head[HEAD_BYTES];  /* response head, NUL-terminated */
  size_t head_length;
  char *line;             /* a line whose end has not come yet */
  size_t line_length, line_room;
  size_t content_at;      /* offset of the content key in the last content frame */
  const char *key;        /* that key; NULL before the first content frame */
  char id[ID_BYTES];
  int64_t start_ns;
  uint64_t bytes;
  int64_t *arrivals;
  size_t num_arrivals, arrivals_room;
};

struct mark { int is_set; int64_t at_ns; uint64_t frames; uint64_t cpu_ns[MAX_PIDS]; };

static struct {
  const char *host, *unix_path, *path, *body_file, *out_file;
  int port, num_streams, settle_ms, timeout_s;
  size_t num_tokens;
  int pids[MAX_PIDS], num_pids;
} options = {.host = "127.0.0.1", .path = "/v1/chat/completions", .out_file = "/dev/stdout", .num_streams = 1,
             .settle_ms = 30, .timeout_s = 120};

static struct stream *streams;
static int num_started_content; /* streams that have their first content frame */
static uint64_t num_frames;
static int64_t opens_ns;        /* when the steady window opens; 0: not known yet */
static int is_over;             /* a stream has ended: a window that is not open by now never will be */
static struct mark opened, closed;
static const char KEYS[2][16] = {"\"content\":\"", "\"text\":\""};

static void die(const char *what) { perror(what); exit(2); }

static void *grown(void *block, size_t bytes) {
  block = realloc(block, bytes);
  if (!block) die("realloc");
  return block;
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* CPU time of all live threads of a process; 0 when it is gone. */
static uint64_t process_cpu_ns(int pid) {
  char path[320], text[64];
  snprintf(path, sizeof path, "/proc/%d/task", pid);
  DIR *tasks = opendir(path);
  if (!tasks) return 0;
  uint64_t total = 0;
  for (struct dirent *entry; (entry = readdir(tasks));) {
    if (!isdigit((unsigned char)entry->d_name[0])) continue;
    snprintf(path, sizeof path, "/proc/%d/task/%s/schedstat", pid, entry->d_name);
    int fd = open(path, O_RDONLY);
    if (fd < 0) continue;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n > 0) { text[n] = 0; total += strtoull(text, NULL, 10); }
  }
  closedir(tasks);
  return total;
}

static void set_mark(struct mark *mark) {
  if (mark->is_set) return;
  mark->is_set = 1;
  mark->frames = num_frames;
  for (int i = 0; i < options.num_pids; i++) mark->cpu_ns[i] = process_cpu_ns(options.pids[i]);
  mark->at_ns = now_ns();
}

/* A stream is about to end or has ended: what follows is no longer the steady state. */
static void close_window(void) {
  is_over = 1;
  if (opened.is_set) set_mark(&closed);
}

static void content_frame(struct stream *s, int64_t at_ns) {
  if (s->num_arrivals == s->arrivals_room) {
    s->arrivals_room = s->arrivals_room ? 2 * s->arrivals_room : 512;
    s->arrivals = grown(s->arrivals, s->arrivals_room * sizeof *s->arrivals);
  }
  s->arrivals[s->num_arrivals++] = at_ns;
  num_frames++;
  if (s->num_arrivals == 1 && ++num_started_content == options.num_streams) opens_ns = at_ns + options.settle_ms * INT64_C(1000000);
  if (options.num_tokens && s->num_arrivals + 1 == options.num_tokens) close_window();
}

static void take_id(struct stream *s, const char *line, size_t length) {
  const char *key = memmem(line, length, "\"id\":", 5);
  if (!key) return;
  const char *at = key + 5, *end = line + length;
  while (at < end && *at == ' ') at++;
  if (at == end || *at++ != '"') return;
  size_t n = 0;
  while (at < end && *at != '"' && n + 1 < ID_BYTES) s->id[n++] = *at++;
  s->id[n] = 0;
}

/* One whole line, without its end. */
static void take_line(struct stream *s, const char *line, size_t length, int64_t at_ns) {
  if (length < 6 || memcmp(line, "data: ", 6)) return;
  if (s->key) {
    size_t key_length = strlen(s->key);
    if (s->content_at + key_length < length && !memcmp(line + s->content_at, s->key, key_length)) {
      if (line[s->content_at + key_length] != '"') content_frame(s, at_ns);
      return;
    }
  }
  if (length >= 12 && !memcmp(line + 6, "[DONE]", 6)) { close_window(); return; }
  if (!s->id[0]) take_id(s, line, length);
  for (int k = 0; k < 2; k++) {
    size_t key_length = strlen(KEYS[k]);
    const char *key = memmem(line, length, KEYS[k], key_length);
    if (!key || key + key_length >= line + length || key[key_length] == '"') continue;
    s->content_at = key - line;
    s->key = KEYS[k];
    content_frame(s, at_ns);
    return;
  }
}

static void take_body(struct stream *s, const char *p, size_t n, int64_t at_ns) {
  while (n) {
    const char *end = memchr(p, '\n', n);
    size_t length = end ? (size_t)(end - p) : n;
    if (end && !s->line_length) {
      if (length) take_line(s, p, length, at_ns);
    } else {
      if (s->line_length + length > s->line_room) {
        s->line_room = 2 * (s->line_length + length);
        s->line = grown(s->line, s->line_room);
      }
      memcpy(s->line + s->line_length, p, length);
      s->line_length += length;
      if (end) { take_line(s, s->line, s->line_length, at_ns); s->line_length = 0; }
    }
    if (end) length++;
    p += length;
    n -= length;
  }
}

static const char *take_head(struct stream *s, const char *p, const char *end) {
  while (p < end && s->state == HEAD) {
    if (s->head_length + 1 == HEAD_BYTES) { fprintf(stderr, "response head above %d bytes\n", HEAD_BYTES); exit(2); }
    s->head[s->head_length++] = *p++;
    if (s->head_length < 4 || memcmp(s->head + s->head_length - 4, "\r\n\r\n", 4)) continue;
    s->head[s->head_length] = 0;
    if (sscanf(s->head, "HTTP/1.%*d %d", &s->status) != 1) { fprintf(stderr, "no HTTP/1 response: %s\n", s->head); exit(2); }
    s->state = strcasestr(s->head, "transfer-encoding: chunked") ? CHUNK_SIZE : PLAIN;
  }
  return p;
}

static void take_bytes(struct stream *s, const char *p, size_t n, int64_t at_ns) {
  const char *end = p + n;
  s->bytes += n;
  while (p < end) switch (s->state) {
    case HEAD: p = take_head(s, p, end); break;
    case CHUNK_SIZE:
      if (isxdigit((unsigned char)*p)) s->chunk_left = s->chunk_left * 16 + (isdigit((unsigned char)*p) ? *p - '0' : (*p | 32) - 'a' + 10);
      else if (*p == '\n') s->state = s->chunk_left ? CHUNK_DATA : TRAILER;
      p++;
      break;
    case CHUNK_DATA: {
      size_t length = (uint64_t)(end - p) < s->chunk_left ? (size_t)(end - p) : s->chunk_left;
      take_body(s, p, length, at_ns);
      p += length;
      if (!(s->chunk_left -= length)) s->state = CHUNK_END;
      break;
    }
    case CHUNK_END: if (*p++ == '\n') s->state = CHUNK_SIZE; break;
    case PLAIN: take_body(s, p, end - p, at_ns); p = end; break;
    case TRAILER: if (*p++ == '\n') { s->state = FINISHED; s->is_done = 1; } break;
    case FINISHED: p = end; break;
  }
}

static void start(struct stream *s, int epoll_fd) {
  int one = 1;
  s->start_ns = now_ns();
  s->fd = socket(options.unix_path ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (s->fd < 0) die("socket");
  int failed;
  if (options.unix_path) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    snprintf(to.sun_path, sizeof to.sun_path, "%s", options.unix_path);
    failed = connect(s->fd, (struct sockaddr *)&to, sizeof to);
  } else {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(options.port)};
    if (inet_pton(AF_INET, options.host, &to.sin_addr) != 1) { fprintf(stderr, "not an IPv4 address: %s\n", options.host); exit(2); }
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    failed = connect(s->fd, (struct sockaddr *)&to, sizeof to);
  }
  if (failed && errno != EINPROGRESS) die("connect");
  struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP, .data.ptr = s};
  if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, s->fd, &event)) die("epoll_ctl");
}

static void send_request(struct stream *s, int epoll_fd, const char *request, size_t length) {
  ssize_t n = send(s->fd, request + s->sent, length - s->sent, MSG_NOSIGNAL);
  if (n < 0) {
    if (errno != EAGAIN) { perror("send"); s->is_done = 1; }
    return;
  }
  s->sent += n;
  if (s->sent < length) return;
  /* Without this every recv() sends an ACK of its own, a fifth of this client's time. Fails on a Unix socket: no matter. */
  int zero = 0;
  setsockopt(s->fd, IPPROTO_TCP, TCP_QUICKACK, &zero, sizeof zero);
  struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.ptr = s};
  if (epoll_ctl(epoll_fd, EPOLL_CTL_MOD, s->fd, &event)) die("epoll_ctl");
}

/* Edge-triggered: a short read has emptied the socket, unless the peer has also closed, which `has_hung_up` tells. */
static void receive(struct stream *s, int has_hung_up) {
  static char buffer[RECV_BYTES];
  for (ssize_t n = sizeof buffer; !s->is_done && (n == sizeof buffer || has_hung_up);) {
    n = recv(s->fd, buffer, sizeof buffer, 0);
    if (n > 0) take_bytes(s, buffer, n, now_ns());
    else if (n < 0 && errno == EAGAIN) return;
    else if (n == 0 || errno != EINTR) s->is_done = 1;
  }
}

static char *read_request(size_t *length) {
  FILE *file = fopen(options.body_file, "r");
  if (!file) die(options.body_file);
  char *body = NULL, *request;
  size_t room = 0;
  if (getdelim(&body, &room, 0, file) < 0) die(options.body_file);
  fclose(file);
  int n = asprintf(&request,
                   "POST %s HTTP/1.1\r\nHost: %s:%d\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\n"
                   "Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
                   options.path, options.host, options.port, strlen(body), body);
  if (n < 0) die("asprintf");
  free(body);
  *length = n;
  return request;
}

static void print_mark(FILE *out, const char *name, const struct mark *mark) {
  if (!mark->is_set) { fprintf(out, "\"%s\":null,", name); return; }
  fprintf(out, "\"%s\":{\"at_ns\":%jd,\"frames\":%ju,\"cpu_ns\":[", name, (intmax_t)mark->at_ns, (uintmax_t)mark->frames);
  for (int i = 0; i < options.num_pids; i++) fprintf(out, i ? ",%ju" : "%ju", (uintmax_t)mark->cpu_ns[i]);
  fprintf(out, "]},");
}

static void report(void) {
  FILE *out = fopen(options.out_file, "w");
  if (!out) die(options.out_file);
  struct rusage use;
  getrusage(RUSAGE_SELF, &use);
  int64_t cpu_us = (use.ru_utime.tv_sec + use.ru_stime.tv_sec) * INT64_C(1000000) + use.ru_utime.tv_usec + use.ru_stime.tv_usec;
  fprintf(out, "{\"streams\":%d,", options.num_streams);
  print_mark(out, "open", &opened);
  print_mark(out, "close", &closed);
  fprintf(out, "\"client_cpu_ns\":%jd}\n", (intmax_t)cpu_us * 1000);
  for (int i = 0; i < options.num_streams; i++) {
    const struct stream *s = &streams[i];
    fprintf(out, "{\"id\":\"%s\",\"status\":%d,\"ended\":%s,\"start_ns\":%jd,\"bytes\":%ju,\"arrivals_ns\":[", s->id, s->status,
            s->state == FINISHED || (s->state == PLAIN && s->is_done) ? "true" : "false", (intmax_t)s->start_ns, (uintmax_t)s->bytes);
    for (size_t k = 0; k < s->num_arrivals; k++) fprintf(out, k ? ",%jd" : "%jd", (intmax_t)s->arrivals[k]);
    fprintf(out, "]}\n");
  }
  if (fclose(out)) die(options.out_file);
}

static int usage(void) {
  fprintf(stderr, "usage: sse_client -b BODY_FILE (-p PORT [-H IPV4] | -x UNIX_SOCKET) [-u PATH] [-n STREAMS] [-k TOKENS]\n"
                  "                  [-s SETTLE_MS] [-t TIMEOUT_S] [-P PID,PID] [-o OUT]\n");
  return 2;
}

int main(int argc, char **argv) {
  for (int letter; (letter = getopt(argc, argv, "b:p:H:x:u:n:k:s:t:P:o:")) != -1;) switch (letter) {
    case 'b': options.body_file = optarg; break;
    case 'p': options.port = atoi(optarg); break;
    case 'H': options.host = optarg; break;
    case 'x': options.unix_path = optarg; break;
    case 'u': options.path = optarg; break;
    case 'n': options.num_streams = atoi(optarg); break;
    case 'k': options.num_tokens = strtoul(optarg, NULL, 10); break;
    case 's': options.settle_ms = atoi(optarg); break;
    case 't': options.timeout_s = atoi(optarg); break;
    case 'o': options.out_file = optarg; break;
    case 'P':
      for (char *pid = strtok(optarg, ","); pid && options.num_pids < MAX_PIDS; pid = strtok(NULL, ","))
        options.pids[options.num_pids++] = atoi(pid);
      break;
    default: return usage();
  }
  if (!options.body_file || (!options.port && !options.unix_path) || options.num_streams < 1) return usage();

  size_t request_length;
  char *request = read_request(&request_length);
  streams = calloc(options.num_streams, sizeof *streams);
  int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  if (!streams || epoll_fd < 0) die("start");
  int64_t deadline_ns = now_ns() + options.timeout_s * INT64_C(1000000000);
  for (int i = 0; i < options.num_streams; i++) start(&streams[i], epoll_fd);

  static struct epoll_event events[MAX_EVENTS];
  int num_live = options.num_streams;
  while (num_live) {
    int n = epoll_wait(epoll_fd, events, MAX_EVENTS, 100);
    if (n < 0 && errno != EINTR) die("epoll_wait");
    for (int i = 0; i < n; i++) {
      struct stream *s = events[i].data.ptr;
      if ((events[i].events & EPOLLOUT) && s->sent < request_length) send_request(s, epoll_fd, request, request_length);
      if (events[i].events & ~EPOLLOUT) receive(s, events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
      if (!s->is_done) continue;
      close_window();
      close(s->fd); /* which takes it out of the epoll set */
      num_live--;
    }
    int64_t at_ns = now_ns();
    if (opens_ns && at_ns >= opens_ns && !is_over) set_mark(&opened);
    if (at_ns > deadline_ns) { fprintf(stderr, "timeout: %d streams have not ended\n", num_live); break; }
  }
  report();
  for (int i = 0; i < options.num_streams; i++)
    if (streams[i].status != 200 || (streams[i].state != FINISHED && streams[i].state != PLAIN)) return 1;
  return num_live ? 1 : 0;
}
