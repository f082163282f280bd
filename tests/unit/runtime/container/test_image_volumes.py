"""Which mounts of a container are volumes of its image."""

from __future__ import annotations

from pathlib import Path

from aenv_ray.runtime.container.image_volumes import image_volumes

NAMES = ("home", "extra cache", "etc", "data", "srv/a b", "dev/data", "old", "run/secrets")
KUBELET = "/var/lib/kubelet/pods/8f0c/volumes/kubernetes.io~empty-dir"
CONTAINERD = "/var/lib/containerd/io.containerd.grpc.v1.cri/containers/5d/volumes/6e"
MOUNTS = f"""\
812 640 0:90 / / rw,relatime master:201 - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c
813 812 0:92 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
814 812 0:93 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
815 814 0:94 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
816 814 0:85 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw
817 812 0:89 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro
818 817 0:27 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw
819 812 0:95 / ROOT/run/secrets rw,nosuid,nodev - tmpfs tmpfs rw,mode=755
820 812 254:1 {KUBELET}/home ROOT/home ro,relatime - ext4 /dev/vda1 rw
821 812 254:1 {KUBELET}/extra ROOT/extra\\040cache rw,relatime - ext4 /dev/vda1 rw
822 812 254:1 /var/lib/kubelet/pods/8f0c/etc-hosts ROOT/etc/hosts rw,relatime - ext4 /dev/vda1 rw
823 814 254:1 {KUBELET}/log /dev/termination-log rw,relatime - ext4 /dev/vda1 rw
824 812 254:1 {CONTAINERD} ROOT/data rw,relatime - ext4 /dev/vda1 rw
825 812 254:1 {CONTAINERD} ROOT/srv/a\\040b rw,relatime - xfs /dev/vda1 rw
829 814 254:1 {CONTAINERD} ROOT/dev/data rw,relatime - ext4 /dev/vda1 rw
826 812 254:2 / ROOT/old rw,relatime - ext4 /dev/vdb ro
827 813 0:92 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw
828 813 0:96 / /proc/acpi ro,relatime - tmpfs tmpfs ro
"""


def test_a_writable_directory_on_disk_is_a_volume_of_the_image(tmp_path: Path) -> None:
    """Invariant 14; the mounts are those of a pod on containerd."""
    for name in NAMES:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc/hosts").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    mounts = MOUNTS.replace("ROOT", str(tmp_path))
    known = [str(tmp_path / "home"), str(tmp_path / "link/extra cache")]
    found = image_volumes(mounts, known)
    assert found == [str(tmp_path / name) for name in ("data", "srv/a b", "dev/data")]
