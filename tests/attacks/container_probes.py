"""Probes that run inside a container, as one script: each says whether it got what it must not.

The script prints a JSON object of the probes that succeeded, by name, and the number of all.
"""

from __future__ import annotations

SCRIPT = r"""
import ctypes, json, os, socket, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
held, count = {}, 0


def probe(name, attempt):
    global count
    count += 1
    try:
        found = attempt()
    except Exception:
        return
    if found not in (None, False, "", b""):
        held[name] = repr(found)[:80]


def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return True


def read(path):
    with open(path, "rb") as file:
        return file.read(64)


def write(path, data=b"0"):
    with open(path, "wb") as file:
        file.write(data)
    return True


lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":\t") for line in lines if ":\t" in line)

# capabilities: none is held, none can be had
for number in range(41):
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        probe(f"{kind} {number}", lambda: int(status[kind], 16) >> number & 1)

# devices
for kind, major, minor in (("c", 1, 1), ("c", 1, 2), ("c", 1, 11), ("b", 7, 0), ("b", 8, 0),
                           ("b", 252, 0), ("b", 254, 0), ("c", 10, 200), ("c", 10, 229)):
    mode, path = 0o600 | (0o020000 if kind == "c" else 0o060000), f"/tmp/{kind}-{major}-{minor}"
    probe(f"mknod {path}", lambda: os.mknod(path, mode, os.makedev(major, minor)) or True)
for name in ("mem", "kmem", "port", "kmsg", "fuse", "kvm", "loop-control", "loop0", "sda", "vda",
             "nvme0n1", "dm-0", "net/tun", "vhost-net", "vsock", "snapshot", "mapper/control",
             "cpu/0/msr", "userfaultfd", "uinput", "btrfs-control"):
    probe(f"/dev/{name}", lambda: os.open(f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK) + 1)

# the node through /proc and /sys
for path in ("kcore", "keys", "timer_list", "sched_debug", "latency_stats", "acpi", "scsi/scsi",
             "1/mem", "1/environ", "1/maps", "1/stack", "1/syscall", "1/auxv", "1/pagemap",
             "1/root/etc/passwd", "1/cwd/x", "1/fd/3", "1/exe"):
    probe(f"read /proc/{path}", lambda: read(f"/proc/{path}"))
for number in range(8):
    probe(f"/proc/1/fd/{number}", lambda: os.readlink(f"/proc/1/fd/{number}"))
    probe(f"descriptor {number}", lambda: call(438, os.pidfd_open(1), number, 0))
for path in ("sysrq-trigger", "irq/default_smp_affinity", "sys/kernel/core_pattern",
             "sys/kernel/modprobe", "sys/kernel/hostname", "sys/kernel/domainname",
             "sys/kernel/panic", "sys/kernel/randomize_va_space", "sys/kernel/yama/ptrace_scope",
             "sys/kernel/shmmax", "sys/kernel/msgmax", "sys/kernel/sem", "sys/kernel/ns_last_pid",
             "sys/kernel/pid_max", "sys/vm/overcommit_memory", "sys/vm/drop_caches",
             "sys/vm/panic_on_oom", "sys/fs/binfmt_misc/register", "sys/fs/mqueue/queues_max",
             "sys/fs/file-max", "sys/net/ipv4/ip_forward", "sys/net/core/somaxconn", "bus/x",
             "1/comm", "1/uid_map", "1/loginuid", "1/mem"):
    probe(f"write /proc/{path}", lambda: write(f"/proc/{path}"))
for path in ("/sys/kernel/uevent_helper", "/sys/power/state", "/sys/kernel/mm/ksm/run",
             "/sys/module/kernel/parameters/panic", "/sys/fs/cgroup/memory/memory.limit_in_bytes",
             "/sys/fs/cgroup/pids/pids.max", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/pids.max",
             "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs",
             "/sys/fs/cgroup/devices/devices.allow", "/sys/fs/cgroup/release_agent",
             "/sys/fs/cgroup/memory/release_agent", "/sys/kernel/security/apparmor/.remove"):
    probe(f"write {path}", lambda: write(path))
probe("read /sys/firmware", lambda: bool(os.listdir("/sys/firmware")))
probe("read debugfs", lambda: bool(os.listdir("/sys/kernel/debug")))
probe("read tracefs", lambda: bool(os.listdir("/sys/kernel/tracing")))
probe("mkdir cgroup", lambda: os.mkdir("/sys/fs/cgroup/x") or True)

# mounts and namespaces
os.makedirs("/tmp/at", exist_ok=True)
MS_BIND, MS_REMOUNT, MS_REC, MS_SHARED = 4096, 32, 16384, 1 << 20
for kind in ("tmpfs", "proc", "sysfs", "devpts", "devtmpfs", "cgroup", "cgroup2", "overlay",
             "mqueue", "debugfs", "tracefs", "securityfs", "binfmt_misc", "fuse", "ext4", "bpf"):
    probe(f"mount {kind}", lambda: call(165, b"none", b"/tmp/at", kind.encode(), 0, None))
for what in ("/", "/proc", "/etc/hosts", "/.aenv/run", "/project", "/dev"):
    probe(f"bind {what}", lambda: call(165, what.encode(), b"/tmp/at", None, MS_BIND, None))
    again = MS_BIND | MS_REMOUNT
    probe(f"remount {what}", lambda: call(165, None, what.encode(), None, again, None))
    probe(f"umount {what}", lambda: call(166, what.encode(), 2))
probe("share /", lambda: call(165, None, b"/", None, MS_REC | MS_SHARED, None))
probe("fsopen", lambda: call(430, b"tmpfs", 0))
probe("open_tree", lambda: call(428, -100, b"/", 1))
probe("pivot_root", lambda: call(155, b"/tmp", b"/tmp/at"))
probe("chroot", lambda: call(161, b"/tmp"))
for name, flag in (("newns", 0x20000), ("cgroup", 0x2000000), ("uts", 0x4000000),
                   ("ipc", 0x8000000), ("user", 0x10000000), ("pid", 0x20000000),
                   ("net", 0x40000000), ("time", 0x80)):
    probe(f"unshare {name}", lambda: call(272, flag))
for name in ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup", "time"):
    probe(f"setns {name}", lambda: call(308, os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0))

# process 1 and the kernel
probe("ptrace 1", lambda: call(101, 16, 1, 0, 0))
probe("seize 1", lambda: call(101, 0x4206, 1, 0, 0))
probe("process_vm_readv 1", lambda: call(310, 1, 0, 0, 0, 0, 0))
for name, number, arguments in (
    ("init_module", 175, (0, 0, 0)), ("finit_module", 313, (0, 0, 0)),
    ("delete_module", 176, (b"x", 0)), ("kexec_load", 246, (0, 0, 0, 0)),
    ("reboot", 169, (0xFEE1DEAD, 672274793, 0, 0)), ("bpf", 321, (5, 0, 0)),
    ("perf_event_open", 298, (0, 0, -1, -1, 0)), ("userfaultfd", 323, (0,)),
    ("keyctl", 250, (0, -3, 1)), ("add_key", 248, (b"user", b"x", b"x", 1, -4)),
    ("request_key", 249, (b"user", b"x", 0, -4)), ("swapon", 167, (b"/tmp/x", 0)),
    ("acct", 163, (b"/tmp/x",)), ("syslog", 103, (3, 0, 0)), ("iopl", 172, (3,)),
    ("ioperm", 173, (0, 1, 1)), ("settimeofday", 164, (0, 0)), ("clock_settime", 227, (0, 0)),
    ("sethostname", 170, (b"x", 1)), ("setdomainname", 171, (b"x", 1)),
    ("open_by_handle_at", 304, (3, 0, 0)), ("quotactl", 179, (0, 0, 0, 0)),
    ("lookup_dcookie", 212, (0, 0, 0)), ("nfsservctl", 180, (0, 0, 0)), ("vhangup", 153, ()),
    ("move_pages", 279, (1, 0, 0, 0, 0, 0)), ("kcmp", 312, (1, 1, 0, 0, 0)),
):
    probe(name, lambda: call(number, *arguments))
probe("setuid", lambda: os.getuid() and (os.setuid(0) or True))
probe("setgroups", lambda: os.setgroups([0, 42]) or True)
probe("nice", lambda: os.nice(-5) or True)
probe("realtime", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)) or True)
probe("more files", lambda: __import__("resource").setrlimit(7, (1 << 20, 1 << 20)) or True)

# daemons of the node, and socket families
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock",
             "/run/podman/podman.sock", "/run/systemd/private", "/run/dbus/system_bus_socket",
             "/.aenv/run/door", "/.aenv/run/boot", "/.aenv/d"):
    probe(f"connect {path}", lambda: socket.socket(socket.AF_UNIX).connect(path) or True)
    probe(f"exists {path}", lambda: os.path.exists(path))
for line in open("/proc/net/unix").read().splitlines()[1:]:
    name = line.split()[-1]
    if name.startswith("@"):
        target = "\0" + name[1:]
        probe(f"abstract {name}", lambda: socket.socket(socket.AF_UNIX).connect(target) or True)
for family in range(46):
    if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        continue
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        name = f"family {family} type {int(kind)}"
        probe(name, lambda: socket.socket(family, kind).fileno() + 1)
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET):
    probe(f"raw {int(family)}", lambda: socket.socket(family, socket.SOCK_RAW, 1).fileno() + 1)
for address in ("127.0.0.1", "172.17.0.1", "169.254.169.254", "1.1.1.1", "10.0.0.1"):
    for port in (22, 53, 80, 2375, 6379, 6443, 8080, 8265, 10001, 10250):
        def dial():
            with socket.socket() as sock:
                sock.settimeout(0.05)
                sock.connect((address, port))
            return True
        probe(f"dial {address}:{port}", dial)
print(json.dumps({"count": count, "held": held}))
"""
